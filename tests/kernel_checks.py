# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""What a conversion's kernel must do, as checks that tests on a GPU and tests of the kernels on the host share.

Each check makes adversarial input from a seed, calls `ds_fp4.ops` on a device and compares every bit with
`ds_fp4.formats` on the host, also of what lies between and beside the outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ds_fp4 import formats, ops
from ds_fp4.formats.columns import block_scales_size
from tests import strategies

CODES = torch.float8_e4m3fn
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32, CODES: torch.uint8}
POISON = 0xA5


def bits(t: torch.Tensor) -> torch.Tensor:
    t = t.detach().cpu()
    return t.view(BITS[t.dtype]) if t.dtype in BITS else t


def check_repeated(device: str, repeats: int, rows: int, k: int) -> None:
    """Conversions whose tensors repeat `repeats` times what converts by itself: [rows, k], groups of `rows` rows and a
    group of all rows, experts. With enough repeats offsets pass 2^31 and 2^32, and a wrong one cannot hit equal bits:
    neither power is a multiple of a part with 7 in its size, and each conversion has values of its own, lest freed
    memory hold what it fails to write.

    Needs 5 bytes for each of repeats * rows * k values at a time; `repeats` must be even.
    """
    parts, base = repeats // 2, torch.empty(rows, k, dtype=torch.bfloat16, device=device)
    big = base.new_empty(repeats, rows, k)
    sizes, one = (torch.full((n,), rows, dtype=torch.int32, device=device) for n in (repeats, 1))
    whole = repeats * one

    def renew() -> None:
        base.copy_(torch.randn(rows, k, device=device))
        big.copy_(base)

    def same(name: str, got: torch.Tensor, small: torch.Tensor) -> None:
        """`got` [repeats, ...] holds `small` again and again."""
        for number, part in enumerate(got):
            part, expected = (t.contiguous().view(-1).view(BITS.get(t.dtype, t.dtype)) for t in (part, small))
            assert torch.equal(part, expected), (name, number)

    def same_rows(name: str, got: tuple, small: tuple) -> None:
        for part, expected in zip(got, small, strict=True):
            same(name, part.view(repeats, -1), expected)

    def same_columns(name: str, got: tuple, small: tuple) -> None:
        same(name, got[0].view(repeats, -1), small[0])
        same(f"{name}, scales", got[1].view(k, repeats, -1).transpose(0, 1), small[1])

    def same_columns_of_one_group(name: str, got: tuple, small: tuple) -> None:
        for part, expected in zip(got, small, strict=True):
            same(f"{name}, one group", part.view(k, repeats, -1).transpose(0, 1), expected)

    def split_weight_gradient() -> None:
        halves = ops.split_weight_gradient(big[:parts].float())
        for part, expected in zip(halves, base.view(2, rows // 2, k), strict=True):
            same("split_weight_gradient", part, expected)

    def fp8_rows_to(convert: Callable) -> None:
        got = convert(*ops.bf16_to_fp8_row(big.view(-1, k), scale_dtype=torch.uint8))
        same_rows(convert.__name__, got, convert(*ops.bf16_to_fp8_row(base, scale_dtype=torch.uint8)))

    def fp4_row_to_fp8_col(group_sizes: torch.Tensor, same_columns: Callable) -> None:
        got = ops.fp4_row_to_fp8_col(*ops.bf16_to_fp4_row(big.view(-1, k)), group_sizes)
        same_columns("fp4_row_to_fp8_col", got, ops.fp4_row_to_fp8_col(*ops.bf16_to_fp4_row(base), one))

    def bf16_to_fp8_row_and_col(group_sizes: torch.Tensor, same_columns: Callable) -> None:
        got = ops.bf16_to_fp8_row_and_col(big.view(-1, k), group_sizes)
        small = ops.bf16_to_fp8_row_and_col(base, one)
        same_rows("bf16_to_fp8_row_and_col, rows", got[0], small[0])
        same_columns("bf16_to_fp8_row_and_col", got[1], small[1])

    def weight_to_fp8(orientation: str) -> None:
        got = ops.weight_to_fp8(big, orientation=orientation)
        for pair, small in zip(got, ops.weight_to_fp8(base[None], orientation=orientation), strict=True):
            assert (pair is None) == (small is None)
            if pair is not None:
                same_rows(f"weight_to_fp8, {orientation}", pair, small)

    for check, *arguments in (
        (split_weight_gradient,),
        (fp8_rows_to, ops.fp8_row_to_fp4_row),
        (fp8_rows_to, ops.fp8_row_to_fp8_row),
        (fp4_row_to_fp8_col, sizes, same_columns),
        (fp4_row_to_fp8_col, whole, same_columns_of_one_group),
        (bf16_to_fp8_row_and_col, sizes, same_columns),
        (bf16_to_fp8_row_and_col, whole, same_columns_of_one_group),
        *((weight_to_fp8, orientation) for orientation in ("both", "rows", "transposed")),
    ):
        renew()
        check(*arguments)


def assert_same(got, expected, what: str = "") -> None:
    """Equal bits, of tensors or nested tuples of them, None for None."""
    if expected is None:
        assert got is None, what
        return
    if isinstance(expected, tuple):
        assert len(got) == len(expected), what
        for number, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert_same(a, b, f"{what}[{number}]")
        return
    assert got.shape == expected.shape and got.dtype == expected.dtype, (what, got.shape, got.dtype, expected.shape)
    a, b = bits(got), bits(expected)
    if not torch.equal(a, b):
        wrong = (a != b).nonzero()
        first = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{what}: {len(wrong)} of {a.numel()} differ, first at {first}: got {a[first].item():#x}, "
            f"expected {b[first].item():#x}; in rows {wrong[:, 0].unique()[:8].tolist()}"
            + (f", columns {wrong[:, 1].unique()[:8].tolist()}" if a.dim() > 1 else "")
        )


class Canvas:
    """Outputs in poisoned buffers, rows with gaps, a margin at both ends; `check` finds what else was written."""

    def __init__(self, device, aligned: bool = True) -> None:
        self.device, self.offset = device, 64 if aligned else 1
        self._outputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def empty(self, shape, dtype, gap: int = 0) -> torch.Tensor:
        """A view of `shape` and dtype; rows are `gap` bytes apart, the item size apart from an offset."""
        itemsize = dtype.itemsize
        offset = -(-self.offset // itemsize) * itemsize
        gap = -(-gap // itemsize) * itemsize
        if len(shape) == 1:
            shape_bytes, stride = (shape[0] * itemsize,), (1,)
            length = shape_bytes[0]
        else:
            shape_bytes, stride = (shape[0], shape[1] * itemsize), (shape[1] * itemsize + gap, 1)
            length = shape_bytes[0] * stride[0]
        buffer = torch.full((length + offset + 64,), POISON, dtype=torch.uint8, device=self.device)
        view = buffer.as_strided(shape_bytes, stride, offset)
        self._outputs.append((buffer, view))
        if dtype == torch.uint8:
            return view
        return view.view(dtype)

    def gemm_scales(self, rows: int, groups: int) -> torch.Tensor:
        return self.empty((groups, formats.align_to_gemm(rows)), torch.float32)[:, :rows].t()

    def check(self) -> None:
        for buffer, view in self._outputs:
            outside = torch.ones_like(buffer, dtype=torch.bool)
            outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
            assert bool((buffer[outside] == POISON).all()), "written outside of the output"


def move(value, device):
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(move(v, device) for v in value)
    return value


def in_views(device, *parts: torch.Tensor, aligned: bool) -> list[torch.Tensor]:
    """Copies of row tensors side by side in byte records on the device; not aligned: everything off by one item."""
    if aligned:
        ordered = sorted(range(len(parts)), key=lambda i: -parts[i].shape[1] * parts[i].itemsize)
        _, views = strategies.in_records(*[parts[i].to(device) for i in ordered])
        return [views[ordered.index(i)] for i in range(len(parts))]
    result = []
    for t in parts:
        wide = torch.zeros((t.shape[0], t.shape[1] + 3), dtype=t.dtype, device=device)
        wide[:, 1 : 1 + t.shape[1]] = t.to(device)
        result.append(wide[:, 1 : 1 + t.shape[1]])
    return result


def index_of(kind: str, rows: int, seed: int) -> torch.Tensor | None:
    """One of "none", "random" (repeats, -1), "absent" (only -1) or "empty"."""
    g = torch.Generator().manual_seed(seed)
    if kind == "none":
        return None
    if kind == "absent" or rows == 0:
        return torch.full((11,), -1, dtype=torch.int32)
    return torch.randint(-1, rows, (0 if kind == "empty" else 2 * rows + 3,), generator=g).to(torch.int32)


def sizes_for(rows: int, groups: int, seed: int) -> torch.Tensor:
    """int32 [groups] that add up to `rows`: skewed, with empty groups."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.rand(groups, generator=g).pow(4) * (torch.rand(groups, generator=g) < 0.7)
    weight[torch.randint(groups, (), generator=g)] += 1e-3
    sizes = (weight / weight.sum() * rows).floor().to(torch.int32)
    sizes[sizes.argmax()] += rows - int(sizes.sum())
    return sizes


def fp8_input(rows: int, k: int, seed: int, scale_dtype: torch.dtype, spread: int):
    return strategies.random_fp8(rows, k, seed, scale_dtype, spread)


# ---- rows ----


def check_fp4_row_to_fp8_row(device, rows, k, seed, index, scale, aligned=True, spread=24) -> None:
    """`scale`: "fp32", "ue8m0" or "gemm"."""
    packed, scales = strategies.random_fp4(rows, k, seed, spread)
    chosen = index_of(index, rows, seed)
    options = _scale_options(scale)
    expected = formats.fp4_row_to_fp8_row(packed, scales, index=chosen, **options)
    canvas = Canvas(device, aligned)
    out = _fp8_out(canvas, expected[0].shape[0], k, scale)
    inputs = in_views(device, packed, scales, aligned=aligned)
    got = ops.fp4_row_to_fp8_row(*inputs, index=move(chosen, device), out=out, **options)
    assert_same(got, expected, "fp4_row_to_fp8_row")
    canvas.check()


def check_fp8_row_to_fp8_row(device, rows, k, seed, index, source, scale, aligned=True, spread=24) -> None:
    q, scales = fp8_input(rows, k, seed, source, spread)
    chosen = index_of(index, rows, seed)
    options = _scale_options(scale)
    expected = formats.fp8_row_to_fp8_row(q, scales, index=chosen, **options)
    canvas = Canvas(device, aligned)
    out = _fp8_out(canvas, expected[0].shape[0], k, scale)
    inputs = in_views(device, q.view(torch.uint8), scales, aligned=aligned)
    got = ops.fp8_row_to_fp8_row(*inputs, index=move(chosen, device), out=out, **options)
    assert_same(got, expected, "fp8_row_to_fp8_row")
    canvas.check()


def check_fp8_row_to_fp4_row(device, rows, k, seed, index, source, rounding, aligned=True, spread=24) -> None:
    q, scales = fp8_input(rows, k, seed, source, spread)
    # Blocks of small codes and of zeros, which random codes hardly ever are.
    g = torch.Generator().manual_seed(seed + 1)
    limit = torch.randint(0, 128, (rows, k // 32, 1), generator=g)
    blocks = q.view(torch.uint8).view(rows, k // 32, 32).to(torch.int64)
    blocks = (blocks & 0x80) | torch.minimum(blocks & 0x7F, limit)
    q = blocks.view(rows, k).to(torch.uint8)
    chosen = index_of(index, rows, seed)
    expected = formats.fp8_row_to_fp4_row(q, scales, rounding, index=chosen)
    canvas = Canvas(device, aligned)
    n = expected[0].shape[0]
    out = canvas.empty((n, k // 2), torch.uint8, 16), canvas.empty((n, k // 32), torch.uint8, 3)
    inputs = in_views(device, q, scales, aligned=aligned)
    got = ops.fp8_row_to_fp4_row(*inputs, rounding, index=move(chosen, device), out=out)
    assert_same(got, expected, "fp8_row_to_fp4_row")
    canvas.check()


def check_bf16_to_fp8_row(device, kind, rows, k, seed, dtype, index, scale, aligned=True) -> None:
    x = strategies.make(kind, rows, k, dtype, seed)
    x = strategies.poison(x, seed, 5) if rows and seed % 2 else x
    chosen = index_of(index, rows, seed)
    options = _scale_options(scale)
    expected = formats.bf16_to_fp8_row(x, index=chosen, **options)
    canvas = Canvas(device, aligned)
    out = _fp8_out(canvas, expected[0].shape[0], k, scale)
    (x,) = in_views(device, x, aligned=aligned)
    assert_same(ops.bf16_to_fp8_row(x, index=move(chosen, device), out=out, **options), expected, "bf16_to_fp8_row")
    canvas.check()


def check_bf16_to_fp4_row(device, kind, rows, k, seed, dtype, index, rounding, aligned=True) -> None:
    x = strategies.make(kind, rows, k, dtype, seed)
    x = strategies.poison(x, seed, 5) if rows and seed % 2 else x
    chosen = index_of(index, rows, seed)
    expected = formats.bf16_to_fp4_row(x, rounding, index=chosen)
    canvas = Canvas(device, aligned)
    n = expected[0].shape[0]
    out = canvas.empty((n, k // 2), torch.uint8, 16), canvas.empty((n, k // 32), torch.uint8, 3)
    (x,) = in_views(device, x, aligned=aligned)
    assert_same(ops.bf16_to_fp4_row(x, rounding, index=move(chosen, device), out=out), expected, "bf16_to_fp4_row")
    canvas.check()


def check_fp4_row_to_bf16(device, rows, k, seed, dtype, index, aligned=True) -> None:
    packed, scales = strategies.random_fp4(rows, k, seed)
    chosen = index_of(index, rows, seed)
    expected = formats.fp4_row_to_bf16(packed, scales, dtype=dtype, index=chosen)
    canvas = Canvas(device, aligned)
    out = canvas.empty(expected.shape, dtype, 16)
    inputs = in_views(device, packed, scales, aligned=aligned)
    got = ops.fp4_row_to_bf16(*inputs, dtype=dtype, index=move(chosen, device), out=out)
    assert_same(got, expected, "fp4_row_to_bf16")
    canvas.check()


def check_fp8_row_to_bf16(device, rows, k, seed, dtype, index, source, aligned=True) -> None:
    q, scales = fp8_input(rows, k, seed, source, 254)
    chosen = index_of(index, rows, seed)
    expected = formats.fp8_row_to_bf16(q, scales, dtype=dtype, index=chosen)
    canvas = Canvas(device, aligned)
    out = canvas.empty(expected.shape, dtype, 16)
    inputs = in_views(device, q.view(torch.uint8), scales, aligned=aligned)
    got = ops.fp8_row_to_bf16(*inputs, dtype=dtype, index=move(chosen, device), out=out)
    assert_same(got, expected, "fp8_row_to_bf16")
    canvas.check()


def _scale_options(scale: str) -> dict:
    return {
        "fp32": {},
        "ue8m0": {"scale_dtype": torch.uint8},
        "gemm": {"scale_layout": "gemm"},
    }[scale]


def _fp8_out(canvas: Canvas, rows: int, k: int, scale: str):
    groups = -(-k // 128)
    q = canvas.empty((rows, k), CODES, 16)
    if scale == "gemm":
        return q, canvas.gemm_scales(rows, groups)
    return q, canvas.empty((rows, groups), torch.uint8 if scale == "ue8m0" else torch.float32, 4)


# ---- columns ----


def column_out(canvas: Canvas, k: int, sizes: torch.Tensor, layout: str):
    """Outputs full of poison: what a conversion leaves out of layout "blocks" is the same on all devices."""
    padded = sum(formats.padded_sizes(sizes.tolist()))
    q = canvas.empty((k * padded,), CODES)
    tiles = padded // 128
    if layout == "blocks":
        return q, canvas.empty((block_scales_size(k, padded, len(sizes)),), torch.float32)
    return q, canvas.gemm_scales(k, tiles) if layout == "gemm" else canvas.empty((k, tiles), torch.float32, 4)


def _column_index(index: str, rows: int, input_rows: int, seed: int) -> torch.Tensor | None:
    if index == "none":
        return None
    if index == "absent":
        return torch.full((rows,), -1, dtype=torch.int32)
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-1, input_rows, (rows,), generator=g).to(torch.int32)


def _call_columns(call, device, inputs, sizes, chosen, layout, known, out):
    padded = sum(formats.padded_sizes(sizes.tolist())) if known else None
    return call(
        *inputs, sizes.to(device), padded_rows=padded, scale_layout=layout, index=move(chosen, device), out=out
    )


def check_fp4_row_to_fp8_col(device, sizes, k, seed, index, layout="row", aligned=True, spread=24, known=True) -> None:
    rows = int(sizes.sum())
    packed, scales = strategies.random_fp4(rows if index == "none" else rows // 2 + 1, k, seed, spread)
    chosen = _column_index(index, rows, packed.shape[0], seed)
    host = Canvas("cpu")
    expected = formats.fp4_row_to_fp8_col(
        packed, scales, sizes, scale_layout=layout, index=chosen, out=column_out(host, k, sizes, layout)
    )
    canvas = Canvas(device, aligned)
    inputs = in_views(device, packed, scales, aligned=aligned)
    out = column_out(canvas, k, sizes, layout)
    got = _call_columns(ops.fp4_row_to_fp8_col, device, inputs, sizes, chosen, layout, known, out)
    assert_same(got, expected, "fp4_row_to_fp8_col")
    canvas.check()


def check_fp8_row_to_fp8_col(
    device, sizes, k, seed, index, source, layout="row", aligned=True, spread=24, known=True
) -> None:
    rows = int(sizes.sum())
    q, scales = fp8_input(rows if index == "none" else rows // 2 + 1, k, seed, source, spread)
    chosen = _column_index(index, rows, q.shape[0], seed)
    host = Canvas("cpu")
    expected = formats.fp8_row_to_fp8_col(
        q, scales, sizes, scale_layout=layout, index=chosen, out=column_out(host, k, sizes, layout)
    )
    canvas = Canvas(device, aligned)
    inputs = in_views(device, q.view(torch.uint8), scales, aligned=aligned)
    out = column_out(canvas, k, sizes, layout)
    got = _call_columns(ops.fp8_row_to_fp8_col, device, inputs, sizes, chosen, layout, known, out)
    assert_same(got, expected, "fp8_row_to_fp8_col")
    canvas.check()


def check_weight_to_fp8(
    device, kind, experts, rows, k, seed, dtype, joined, aligned=True, poisoned=False, orientation="both"
) -> None:
    w1, w3 = (
        strategies.make(kind, experts * rows, k, dtype, seed + i).view(experts, rows, k).contiguous() for i in range(2)
    )
    if poisoned:
        w3 = strategies.poison(w3.view(-1, k), seed, 2).view(w3.shape)
    # One orientation is the same bits as it is of both.
    expected = tuple(
        pair if wanted else None
        for pair, wanted in zip(
            formats.weight_to_fp8(w1, w3 if joined else None), formats.ORIENTATIONS[orientation], strict=True
        )
    )
    canvas = Canvas(device, aligned)
    out = tuple(pair and tuple(canvas.empty((t.numel(),), t.dtype).view(t.shape) for t in pair) for pair in expected)
    w1, w3 = (in_views(device, w.view(-1, k), aligned=aligned)[0] for w in (w1, w3))
    w1, w3 = (w.as_strided((experts, rows, k), (rows * w.stride(0), w.stride(0), 1)) for w in (w1, w3))
    got = ops.weight_to_fp8(w1, w3 if joined else None, orientation=orientation, out=out)
    assert_same(got, expected, f"weight_to_fp8 {orientation}")
    canvas.check()


def check_split_weight_gradient(device, experts, rows, k, seed, aligned=True) -> None:
    g = torch.Generator().manual_seed(seed)
    gradient = torch.randint(-(2**31), 2**31, (experts, 2 * rows, k), generator=g).to(torch.int32).view(torch.float32)
    # Every NaN will do, so that there is none: payloads differ from one conversion to the other.
    gradient = torch.where(gradient.isnan(), torch.inf, gradient)
    expected = formats.split_weight_gradient(gradient)
    canvas = Canvas(device, aligned)
    out = tuple(canvas.empty((t.numel(),), t.dtype).view(t.shape) for t in expected)
    assert_same(ops.split_weight_gradient(gradient.to(device), out=out), expected, "split_weight_gradient")
    canvas.check()


def check_bf16_to_fp8_row_and_col(device, kind, sizes, k, seed, dtype, index, layout="row", aligned=True) -> None:
    rows = int(sizes.sum())
    input_rows = rows if index == "none" else rows // 2 + 1
    x = strategies.make(kind, input_rows, k, dtype, seed)
    x = strategies.poison(x, seed, 3) if input_rows and seed % 2 else x
    chosen = _column_index(index, rows, input_rows, seed)
    expected = formats.bf16_to_fp8_row_and_col(x, sizes, scale_layout=layout, index=chosen)
    canvas = Canvas(device, aligned)
    out = (
        _fp8_out(canvas, rows, k, "gemm" if layout == "gemm" else "fp32"),
        column_out(canvas, k, sizes, layout),
    )
    inputs = in_views(device, x, aligned=aligned)
    got = _call_columns(ops.bf16_to_fp8_row_and_col, device, inputs, sizes, chosen, layout, True, out)
    assert_same(got, expected, "bf16_to_fp8_row_and_col")
    canvas.check()
