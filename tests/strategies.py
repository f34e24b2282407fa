# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Random and adversarial inputs, shared by the tests of the reference, of the kernels and of what is built on them.

`make` fills a tensor of one kind from a seed and needs nothing but torch, so that GPU tests can use it too; the
hypothesis strategies below draw kinds, shapes and seeds, and shrink to a small seed.
"""

import torch
from hypothesis import strategies as st

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUNDINGS = ("floor", "rceil", "ceil", "even")

INT_OF = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
EXPONENT_RANGE = {torch.bfloat16: (-133, 127), torch.float16: (-24, 15), torch.float32: (-149, 127)}

# Midpoints and ends of the E2M1 and E4M3 grids, powers of two apart: where roundings and scales change.
_EDGES = (1.0, 1.0625, 1.1875, 1.25, 1.3125, 1.5, 1.5625, 1.75, 1.8125, 1.875, 1.9375)

FINITE_KINDS = (
    "gaussian",
    "student_t",
    "bits",
    "edges",
    "zero_blocks",
    "subnormal",
    "extreme",
    "wide_rows",
)


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Clears one exponent bit of what is NaN or infinite, keeping the other bits."""
    bits = x.view(INT_OF[x.dtype])
    return torch.where(torch.isfinite(x), bits, bits & ~(1 << (MANTISSA_BITS[x.dtype] + 1))).view(x.dtype)


def make(kind: str, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """A finite [rows, columns] tensor on the host.

    Args:
        kind: one of FINITE_KINDS: "gaussian"; "student_t" (3 degrees of freedom, heavy tails); "bits" (uniform bit
            patterns); "edges" (values at, just below and just above rounding boundaries, a power of two a row);
            "zero_blocks" (blocks of 32 of zeros of both signs among Gaussian ones); "subnormal" (subnormal values and
            the smallest normal ones); "extreme" (the dtype's largest, smallest and neighbouring values); "wide_rows"
            (rows and blocks many powers of two apart).
    """
    g = torch.Generator().manual_seed(seed)
    low, high = EXPONENT_RANGE[dtype]
    int_dtype, mantissa = INT_OF[dtype], MANTISSA_BITS[dtype]
    shape = (rows, columns)
    normal = torch.randn(shape, generator=g, dtype=torch.float64)
    if kind == "gaussian":
        x = normal
    elif kind == "student_t":
        chi2 = torch.randn((3, *shape), generator=g, dtype=torch.float64).square().sum(0)
        x = normal / (chi2 / 3).sqrt()
    elif kind == "bits":
        width = 8 * dtype.itemsize
        bits = torch.randint(-(1 << (width - 1)), 1 << (width - 1), shape, generator=g)
        return _finite(bits.to(int_dtype).view(dtype))
    elif kind == "edges":
        edge = torch.tensor(_EDGES, dtype=torch.float64)[torch.randint(len(_EDGES), shape, generator=g)]
        row = torch.randint(low, high, (rows, 1), generator=g)
        exponent = row - torch.randint(0, 6, shape, generator=g)
        x = (edge * torch.pow(2.0, exponent.double()) * torch.sign(normal)).to(dtype)
        nudge = torch.randint(-1, 2, shape, generator=g).to(int_dtype)
        return _finite((x.view(int_dtype) + nudge).view(dtype))
    elif kind == "zero_blocks":
        dead = torch.rand((rows, -(-columns // 32)), generator=g) < 0.5
        x = torch.where(
            dead.repeat_interleave(32, dim=1)[:, :columns], torch.copysign(torch.zeros(shape), normal), normal
        )
    elif kind == "subnormal":
        bits = torch.randint(0, 3 << mantissa, shape, generator=g) >> torch.randint(0, mantissa, shape, generator=g)
        sign = torch.randint(0, 2, shape, generator=g) << (8 * dtype.itemsize - 1)
        return (bits | sign).to(int_dtype).view(dtype)
    elif kind == "extreme":
        info = torch.finfo(dtype)
        values = [info.max, info.max / 2, info.max / 3, info.smallest_normal, 2.0**low, 3 * 2.0**low, 1.0, 0.0, -0.0]
        pick = torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), shape, generator=g)]
        x = torch.copysign(pick, normal)
    elif kind == "wide_rows":
        spread = torch.randint(low, high - 3, (rows, 1), generator=g)
        block = torch.randint(-20, 1, (rows, -(-columns // 32)), generator=g).repeat_interleave(32, dim=1)
        x = normal * torch.pow(2.0, (spread + block[:, :columns]).clamp(min=low).double())
    else:
        raise ValueError(f"unknown kind {kind!r}")
    return _finite(x.to(dtype))


def poison(x: torch.Tensor, seed: int, count: int) -> torch.Tensor:
    """A copy of `x` with NaN (several payloads and signs) or an infinity in `count` random places."""
    g = torch.Generator().manual_seed(seed)
    bits = x.clone().view(INT_OF[x.dtype]).flatten()
    infinity = torch.tensor([torch.inf, -torch.inf], dtype=x.dtype).view(bits.dtype)
    patterns = torch.cat([infinity, infinity | 1, infinity | (1 << (MANTISSA_BITS[x.dtype] - 1))])
    where = torch.randint(bits.numel(), (count,), generator=g)
    bits[where] = patterns[torch.randint(len(patterns), (count,), generator=g)]
    return bits.view(x.dtype).view(x.shape)


def random_fp4(rows: int, columns: int, seed: int, spread: int = 254, nan: bool = True) -> tuple:
    """Arbitrary MXFP4 rows: any codes, scale bytes within `spread` of a random top, some 0xFF where `nan`."""
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, columns // 2), generator=g).to(torch.uint8)
    top = torch.randint(0, 255, (), generator=g)
    scales = (top - torch.randint(0, spread + 1, (rows, columns // 32), generator=g)).clamp(min=0)
    if nan:
        scales[torch.rand(scales.shape, generator=g) < 0.1] = 0xFF
    return packed, scales.to(torch.uint8)


def random_fp8(
    rows: int, columns: int, seed: int, scale_dtype: torch.dtype, spread: int = 254, nan: bool = True
) -> tuple:
    """Arbitrary FP8 rows: any codes, exponents within `spread` of a random top, NaN codes and scales where `nan`."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=g)
    if not nan:
        codes[(codes & 0x7F) == 0x7F] -= 1
    low = -127 if scale_dtype == torch.uint8 else -149
    top = torch.randint(low, 128, (), generator=g)
    exponent = (top - torch.randint(0, spread + 1, (rows, -(-columns // 128)), generator=g)).clamp(min=low)
    bad = torch.rand(exponent.shape, generator=g) < (0.1 if nan else 0.0)
    if scale_dtype == torch.uint8:
        scales = torch.where(bad, 0xFF, exponent + 127).to(torch.uint8)
    else:
        scales = torch.where(bad, torch.nan, torch.pow(2.0, exponent.double())).to(torch.float32)
    return codes.to(torch.uint8).view(torch.float8_e4m3fn), scales


def seeds() -> st.SearchStrategy[int]:
    return st.integers(0, 2**32 - 1)


@st.composite
def matrices(draw, multiple: int = 32, dtypes=FLOAT_DTYPES, kinds=FINITE_KINDS, max_rows: int = 9) -> torch.Tensor:
    """Finite [M, K] tensors of any kind and dtype, K a multiple of `multiple`, M from 0."""
    rows, columns = draw(st.integers(0, max_rows)), multiple * draw(st.integers(1, max(288 // multiple, 1)))
    return make(draw(st.sampled_from(kinds)), rows, columns, draw(st.sampled_from(dtypes)), draw(seeds()))


@st.composite
def indices(draw, rows: int, length: int | None = None) -> torch.Tensor:
    """int32 [R] with values in [-1, rows), repeats and -1 likely."""
    if length is None:
        length = draw(st.integers(0, 12))
    g = torch.Generator().manual_seed(draw(seeds()))
    return torch.randint(-1, rows, (length,), generator=g).to(torch.int32)


@st.composite
def group_sizes(draw, max_groups: int = 5, max_size: int = 300) -> torch.Tensor:
    """int32 [E], empty groups and multiples of 128 likely."""
    size = st.one_of(st.just(0), st.integers(1, max_size), st.sampled_from([1, 127, 128, 129, 256]))
    return torch.tensor(draw(st.lists(size, max_size=max_groups)), dtype=torch.int32)


def in_records(*parts: torch.Tensor, gap: int = 16) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Byte records, one a row, with copies of `parts` (each [M, *]) side by side in them.

    A part's offset is a multiple of its item size; a record's length is a multiple of 16, unused bytes are 0xA5.

    Returns:
        the records uint8 [M, bytes], and the views of the parts in them.
    """
    offsets, end = [], 0
    for t in parts:
        end = -(-end // t.itemsize) * t.itemsize
        offsets.append(end)
        end += t.shape[1] * t.itemsize
    length = -(-end // 16) * 16 + gap
    records = torch.full((parts[0].shape[0], length), 0xA5, dtype=torch.uint8, device=parts[0].device)
    views = []
    for t, offset in zip(parts, offsets, strict=True):
        views.append(records[:, offset : offset + t.shape[1] * t.itemsize].view(t.dtype))
        views[-1].copy_(t)
    return records, views
