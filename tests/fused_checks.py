# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Checks of the fused calls against their reference, for kernels on a GPU and for the same kernels as host code.

`device` is where the inputs lie; the reference gets the same inputs on the host.
"""

import torch

from ds_fp4 import formats, ops, reference
from tests import strategies
from tests.kernel_checks import in_views

POISON = 0xA5
# Elements that may differ where exp is involved: one in 10^4, or one group whose scale lies at a boundary.
ALLOWED_FRACTION = 1e-4
ALLOWED_ELEMENTS = formats.FP8_GROUP

FUSED_ACTIVATIONS = reference.ACTIVATIONS


def poisoned(t: torch.Tensor) -> torch.Tensor:
    """`t` with every byte of its storage (gaps between rows included) set to `POISON`."""
    whole = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
    whole.fill_(POISON)
    return t


def to_host(value):
    """Tensors in tuples, copied to the host with their bits and strides' meaning."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if value is None:
        return None
    parts = [to_host(part) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def bits(t: torch.Tensor) -> torch.Tensor:
    t = t.cpu()
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


def assert_same(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Same shape and bits; BF16 NaN of any payload are the same."""
    assert got.shape == expected.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    a, b = bits(got), bits(expected)
    different = a != b
    if expected.dtype in (torch.bfloat16, torch.float32):
        different &= ~(got.cpu().isnan() & expected.cpu().isnan())
    if bool(different.any()):
        places = torch.nonzero(different)
        first = tuple(places[0].tolist())
        raise AssertionError(
            f"{name}: {places.shape[0]} of {a.numel()} differ, first at {first}: got {a[first].item():#x} "
            f"({got.cpu()[first].item() if got.element_size() > 1 else ''}), expected {b[first].item():#x}; "
            f"last at {tuple(places[-1].tolist())}"
        )


def assert_same_parts(name: str, got, expected) -> None:
    if isinstance(expected, torch.Tensor):
        assert_same(name, got, expected)
    else:
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert_same(f"{name}[{i}]", a, b)


def assert_nearly_same(
    name: str, got: torch.Tensor, expected: torch.Tensor, got_scale: torch.Tensor, expected_scale: torch.Tensor
) -> None:
    """Decoded FP8 values: nearly all equal, the others one step apart, scales at most one exponent apart.

    All tensors have one shape (scales repeated) and are FP64 values on the host; NaN equals NaN.
    """
    ratio = got_scale / expected_scale
    assert bool(((ratio >= 0.5) & (ratio <= 2)).all()), f"{name}: scales more than one exponent apart"
    assert torch.equal(got.isnan(), expected.isnan()), f"{name}: NaN in different places"
    got, expected = got.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0)
    gap = (got - expected).abs()
    scale = torch.maximum(got_scale, expected_scale)
    step = torch.maximum(torch.maximum(got.abs(), expected.abs()) / 8, scale * 2.0**-9)
    assert bool((gap <= step * 1.0001).all()), (
        f"{name}: {int((gap > step * 1.0001).sum())} values more than a step apart"
    )
    count = int((gap > 0).sum())
    allowed = max(ALLOWED_FRACTION * gap.numel(), ALLOWED_ELEMENTS)
    assert count <= allowed, f"{name}: {count} of {gap.numel()} values differ, {allowed:.0f} may"


def fp8_rows_value(q: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP64 values and scales [R, K] of FP8 rows."""
    scale = scales.double().repeat_interleave(formats.FP8_GROUP, dim=1)[:, : q.shape[1]]
    values = formats.fp8_row_to_bf16(q, torch.ones_like(scales.contiguous()), dtype=torch.float32).double()
    return values * scale, scale


def fp8_columns_value(q: torch.Tensor, scales: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """FP64 values and scales [K, P] of the FP8 column layout."""
    blocks = [
        fp8_rows_value(block.contiguous(), block_scales.contiguous())
        for block, block_scales in formats.column_blocks(q, scales, sizes)
        if block.numel()
    ]
    if not blocks:
        empty = torch.zeros(scales.shape[0], 0, dtype=torch.float64)
        return empty, empty
    return torch.cat([value for value, _ in blocks], dim=1), torch.cat([scale for _, scale in blocks], dim=1)


# ---- swiglu ----


def padded_rows_of(sizes: list[int]) -> int:
    return sum(formats.padded_sizes(sizes))


def real_rows(sizes: list[int]) -> torch.Tensor:
    """bool [P]: which padded rows are not padding."""
    padded = formats.padded_sizes(sizes)
    return torch.cat(
        [torch.arange(p) < m for p, m in zip(padded, sizes, strict=True)] or [torch.zeros(0, dtype=torch.bool)]
    )


def check_swiglu_forward(
    device: str,
    rows: int,
    width: int,
    kind: str = "gaussian",
    *,
    activation: str = "swiglu",
    save: str | None = "mxfp4",
    scale_layout: str = "row",
    scale_rounding: str = "even",
    weighted: bool = True,
    poison: int = 0,
    seed: int = 0,
    records: bool = False,
) -> None:
    gate_up = strategies.make(kind, rows, 2 * width, seed=seed)
    if poison:
        gate_up = strategies.poison(gate_up, seed, poison)
    weights = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) if weighted else None
    options = {
        "activation": activation, "save": save, "scale_layout": scale_layout, "scale_rounding": scale_rounding,
    }  # fmt: skip
    expected = reference.swiglu_forward(gate_up, weights, **options)
    device_weights = None if weights is None else weights.to(device)
    out = ops.swiglu_forward(gate_up.to(device), device_weights, **options)
    if records and save is not None and rows:
        _, saved = strategies.in_records(*[poisoned(t) for t in out.saved])
        out = out._replace(saved=tuple(saved))
    out = reference.SwigluForward(
        poisoned(out.q),
        poisoned(out.scales),
        out.saved if records or save is None else tuple(poisoned(t) for t in out.saved),
    )
    got = to_host(ops.swiglu_forward(gate_up.to(device), device_weights, out=out, **options))
    if save is not None:
        assert_same_parts("saved", got.saved, expected.saved)
    assert expected.scales.stride() == out.scales.stride() or rows <= 1
    assert_nearly_same(
        "h", *_interleave(fp8_rows_value(got.q, got.scales), fp8_rows_value(expected.q, expected.scales))
    )
    again = to_host(ops.swiglu_forward(gate_up.to(device), device_weights, **options))
    assert_same("h again", again.q, got.q)
    assert_same("h scales again", again.scales, got.scales)


def _interleave(got, expected):
    return got[0], expected[0], got[1], expected[1]


def check_swiglu_backward(
    device: str,
    sizes: list[int],
    width: int,
    kind: str = "gaussian",
    *,
    activation: str = "swiglu",
    gate_up_format: str = "mxfp4",
    scale_layout: str = "row",
    weighted: bool = True,
    padded_input: bool = True,
    poison: int = 0,
    seed: int = 0,
    dh_kind: str = "gaussian",
) -> None:
    padded = padded_rows_of(sizes)
    rows = padded if padded_input else sum(sizes)
    real = real_rows(sizes) if padded_input else torch.ones(rows, dtype=torch.bool)
    gate_up = strategies.make(kind, rows, 2 * width, seed=seed)
    dh = strategies.make(dh_kind, rows, width, seed=seed + 1)
    if poison:
        dh = strategies.poison(dh, seed, poison)
    weights = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) if weighted else None
    # Padding holds the worst there is.
    gate_up[~real] = torch.nan
    dh[~real] = torch.nan
    if weighted:
        weights[~real] = torch.nan
    if gate_up_format == "mxfp4":
        gate_up = formats.bf16_to_fp4_row(gate_up)
    elif gate_up_format == "fp8":
        gate_up = formats.bf16_to_fp8_row(gate_up, scale_dtype=torch.uint8)
    options = {
        "gate_up_format": gate_up_format, "activation": activation, "scale_layout": scale_layout,
        "padded_input": padded_input, "padded_rows": padded,
    }  # fmt: skip
    group_sizes = torch.tensor(sizes, dtype=torch.int32)
    expected = reference.swiglu_backward(dh, weights, gate_up, group_sizes, **options)

    def moved(value):
        if isinstance(value, torch.Tensor):
            return value.to(device)
        return None if value is None else tuple(t.to(device) for t in value)

    arguments = [moved(value) for value in (dh, weights, gate_up, group_sizes)]
    out = reference.SwigluBackward(*[poisoned(t) for t in ops.swiglu_backward(*arguments, **options)])
    got = to_host(ops.swiglu_backward(*arguments, out=out, **options))
    assert_nearly_same(
        "d_gate_up rows",
        *_interleave(fp8_rows_value(got.row, got.row_scales), fp8_rows_value(expected.row, expected.row_scales)),
    )
    assert bool((got.row.view(torch.uint8)[~real] == 0).all()), "padding rows must be zero codes"
    assert bool((got.weights[~real] == 0).all()), "padding rows must have no weight gradient"

    # Columns of d_gate_up are those of the rows that the kernel itself wrote, bit for bit.
    index = torch.nonzero(real).flatten().to(torch.int32) if padded_input else None
    col, col_scales = formats.fp8_row_to_fp8_col(
        got.row, got.row_scales.contiguous(), group_sizes, padded_rows=padded, index=index
    )
    assert_same("d_gate_up columns' scales", got.col_scales, col_scales)
    assert_same("d_gate_up columns", got.col, col)
    assert_nearly_same(
        "weight * h columns",
        *_interleave(
            fp8_columns_value(got.h_col, got.h_col_scales, sizes),
            fp8_columns_value(expected.h_col, expected.h_col_scales, sizes),
        ),
    )
    assert torch.equal(got.weights.isnan(), expected.weights.isnan()), "weights: NaN in different places"
    finite = expected.weights.isfinite()
    gap = (got.weights - expected.weights)[finite].double()
    size = expected.weights[finite].double().norm()
    assert float(gap.norm()) <= 1e-5 * float(size), f"weights: relative error {float(gap.norm() / size):.2e}"
    again = to_host(ops.swiglu_backward(*arguments, **options))
    for name, a, b in zip(again._fields, again, got, strict=True):
        assert_same(f"{name} again", a, b)


# ---- rows ----


def random_rows(row_format: str, rows: int, k: int, seed: int, kind: str = "gaussian", in_records: bool = False):
    """BF16 rows, or a pair of MXFP4 or FP8 rows, side by side in records if asked for."""
    x = strategies.make(kind, rows, k, seed=seed)
    if row_format == "bf16":
        return x
    pair = formats.bf16_to_fp4_row(x) if row_format == "mxfp4" else formats.bf16_to_fp8_row(x, scale_dtype=torch.uint8)
    return tuple(strategies.in_records(*pair)[1]) if in_records else pair


def random_lists(count: int, rows: int, longest: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """CSR of `count` lists of 0 to `longest` entries, some -1; entries beyond the last list are out of range."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, longest + 1, (count,), generator=g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).to(torch.int32)
    indices = torch.randint(-1 if rows else -1, max(rows, 0), (int(offsets[-1]),), generator=g).to(torch.int32)
    return offsets, indices


def check_combine_rows(
    device: str,
    count: int,
    rows: int,
    k: int,
    *,
    row_format: str,
    out_format: str,
    longest: int = 4,
    weighted: bool = False,
    kind: str = "gaussian",
    in_records: bool = False,
    seed: int = 0,
    poison: int = 0,
    one_length: bool = False,
    aligned: bool = True,
) -> None:
    """`one_length`: lists of `longest` entries, without offsets. Not `aligned`: input rows at odd places."""
    source = random_rows(row_format, rows, k, seed, kind, in_records)
    if not aligned:
        parts = in_views("cpu", *(source if isinstance(source, tuple) else (source,)), aligned=False)
        source = tuple(parts) if isinstance(source, tuple) else parts[0]
    if poison:
        if row_format == "bf16":
            source = strategies.poison(source, seed, poison)
        else:
            source[1][torch.randint(rows, (poison,)), 0] = 0xFF
    offsets, indices = random_lists(count, rows, longest, seed)
    if one_length:
        g = torch.Generator().manual_seed(seed)
        offsets, indices = None, torch.randint(-1, rows, (count, longest), generator=g).to(torch.int32)
    weights = torch.randn(indices.shape, generator=torch.Generator().manual_seed(seed)) if weighted else None
    options = {"row_format": row_format, "out_format": out_format}
    expected = reference.combine_rows(source, offsets, indices, weights, **options)

    def moved(value):
        if value is None:
            return None
        if isinstance(value, torch.Tensor):
            # .to() would make a view with gaps contiguous.
            result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            return result.copy_(value)
        return tuple(moved(t) for t in value)

    arguments = [moved(value) for value in (source, offsets, indices, weights)]
    out = ops.combine_rows(*arguments, **options)
    out = poisoned(out) if out_format == "bf16" else tuple(poisoned(t) for t in out)
    if in_records and out_format != "bf16" and count:
        out = tuple(strategies.in_records(*out)[1])
    got = to_host(ops.combine_rows(*arguments, out=out, **options))
    assert_same_parts("sum", got, expected)


def check_gather_rows(device: str, rows: int, row_bytes: int, count: int, *, stride: int = 0, seed: int = 0) -> None:
    g = torch.Generator().manual_seed(seed)
    stride = stride or row_bytes
    records = torch.randint(0, 256, (rows, stride), generator=g).to(torch.uint8)[:, :row_bytes]
    index = torch.randint(-1, rows, (count,), generator=g).to(torch.int32)
    expected = reference.gather_rows(records, index)
    whole = torch.full((count, stride), POISON, dtype=torch.uint8, device=device)
    source = torch.empty_strided(records.shape, (stride, 1), dtype=torch.uint8, device=device).copy_(records)
    got = ops.gather_rows(source, index.to(device), out=whole[:, :row_bytes])
    assert_same("gathered", got, expected)
    assert bool((whole[:, row_bytes:] == POISON).all()), "wrote beyond the row"
    assert_same("copied", ops.gather_rows(source), records)
