# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Argument checks and outputs of the format calls, for the reference here and the kernels in `ds_fp4.ops` alike.

Each `prepare_<call>` checks the call's arguments, raises ValueError that says what was expected and what came, and
returns the outputs: those given as `out`, else new ones. Nothing here waits for a GPU, the sum of group sizes where
`padded_rows` is not given apart: what can only be known from a tensor's values (an index in range, scales that are
powers of two, group sizes that add up) is checked for host tensors only.
"""

from collections.abc import Sequence

import torch

from . import columns, e4m3, ue8m0
from .blocks import FP8_GROUP, MXFP4_BLOCK, SCALE_ROUNDINGS

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BYTES, INT32, FP32 = (torch.uint8,), (torch.int32,), (torch.float32,)

Pair = tuple[torch.Tensor, torch.Tensor]

# Which results of `weight_to_fp8` are wanted: the weights as they are, and transposed.
ORIENTATIONS = {"both": (True, True), "rows": (True, False), "transposed": (False, True)}


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)


def check_tensor(
    name: str, t: torch.Tensor, dtypes: Sequence[torch.dtype], device: torch.device | None, dims: int
) -> None:
    """`t` is a tensor of one of `dtypes`, on `device`, with `dims` dimensions, the last one of stride 1."""
    if not isinstance(t, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(t).__name__}")
    if t.dtype not in dtypes:
        raise ValueError(f"{name} must be {_names(dtypes)}, got {t.dtype}")
    if t.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimension(s), got shape {tuple(t.shape)}; reshape it first")
    if device is not None and t.device != device:
        raise ValueError(f"{name} must be on {device} like the input, got {t.device}")
    if t.stride()[-1] != 1 and t.shape[-1] > 1:
        raise ValueError(
            f"{name} must have an inner stride of 1 (any row stride), got strides {tuple(t.stride())}; "
            "pass a contiguous copy"
        )


def check_width(name: str, width: int, multiple: int) -> None:
    if width == 0 or width % multiple:
        raise ValueError(f"{name} must have a positive multiple of {multiple} columns, got {width}")


def check_index(index: torch.Tensor | None, rows: int, device: torch.device) -> int:
    """Number of output rows: `rows` without an index, else its length. Values in [-1, rows) on the host."""
    if index is None:
        return rows
    check_tensor("index", index, INT32, device, 1)
    if index.is_cpu and index.numel():
        low, high = (int(v) for v in torch.aminmax(index))
        if low < -1 or high >= rows:
            raise ValueError(f"index must hold -1 or input rows 0 to {rows - 1}, got values from {low} to {high}")
    return index.shape[0]


def check_scale_rounding(scale_rounding: str) -> None:
    if scale_rounding not in SCALE_ROUNDINGS:
        allowed = ", ".join(repr(name) for name in SCALE_ROUNDINGS)
        raise ValueError(f"scale_rounding must be one of {allowed}, got {scale_rounding!r}")


def check_scale_dtype(scale_dtype: torch.dtype) -> None:
    if scale_dtype not in ue8m0.SCALE_DTYPES:
        raise ValueError(f"scale_dtype must be {_names(ue8m0.SCALE_DTYPES)} (uint8 is UE8M0), got {scale_dtype}")


def check_scale_layout(
    scale_layout: str, scale_dtype: torch.dtype, layouts: Sequence[str] = ue8m0.SCALE_LAYOUTS
) -> None:
    if scale_layout not in layouts:
        allowed = ", ".join(repr(name) for name in layouts)
        raise ValueError(f"scale_layout must be one of {allowed}, got {scale_layout!r}")
    if scale_layout == "gemm" and scale_dtype != torch.float32:
        raise ValueError(f'scale_layout "gemm" holds torch.float32 scales, got scale_dtype {scale_dtype}')


def check_orientation(orientation: str) -> None:
    if orientation not in ORIENTATIONS:
        allowed = ", ".join(repr(name) for name in ORIENTATIONS)
        raise ValueError(f"orientation must be one of {allowed}, got {orientation!r}")


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype must be {_names(FLOAT_DTYPES)}, got {dtype}")


def check_shape(name: str, t: torch.Tensor, shape: tuple[int, ...]) -> None:
    if t.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(t.shape)}")


def check_fp4_rows(packed: torch.Tensor, scales: torch.Tensor) -> tuple[int, int]:
    """Rows M and values a row K of MXFP4 input: packed uint8 [M, K/2], scales uint8 [M, K/32]."""
    check_tensor("packed", packed, BYTES, None, 2)
    m, row_bytes = packed.shape
    check_width("packed", row_bytes, MXFP4_BLOCK // 2)
    check_tensor("scales", scales, BYTES, packed.device, 2)
    check_shape("scales", scales, (m, 2 * row_bytes // MXFP4_BLOCK))
    return m, 2 * row_bytes


def check_fp8_rows(q: torch.Tensor, scales: torch.Tensor) -> tuple[int, int]:
    """Rows M and values a row K of FP8 input: q e4m3 or uint8 [M, K], scales float32 or uint8 [M, ceil(K/128)]."""
    check_tensor("q", q, e4m3.CODE_DTYPES, None, 2)
    m, k = q.shape
    check_width("q", k, 1)
    check_tensor("scales", scales, ue8m0.SCALE_DTYPES, q.device, 2)
    check_shape("scales", scales, (m, -(-k // FP8_GROUP)))
    if scales.is_cpu and scales.dtype == torch.float32:
        bad = scales[~ue8m0.are_powers_of_two(scales)]
        if bad.numel():
            raise ValueError(
                f"scales must be positive powers of two (or NaN), got {bad[0].item()!r}; "
                "quantize with bf16_to_fp8_row, which makes such scales"
            )
    return m, k


def check_out(
    name: str, t: torch.Tensor, shape: tuple[int, ...], dtypes: Sequence[torch.dtype], device: torch.device
) -> None:
    """`t` is of `shape`, and in two dimensions its rows, of any stride, do not overlap."""
    check_tensor(name, t, dtypes, device, len(shape))
    check_shape(name, t, shape)
    if len(shape) == 2 and t.stride()[0] < shape[1] and shape[0] > 1:
        raise ValueError(f"{name} must not have rows that overlap, got strides {tuple(t.stride())}")


def _output(
    out: torch.Tensor | None, shape: tuple[int, int], dtypes: Sequence[torch.dtype], device: torch.device
) -> torch.Tensor:
    if out is None:
        return torch.empty(*shape, dtype=dtypes[0], device=device)
    check_out("out", out, shape, dtypes, device)
    return out


def align_to_gemm(rows: int) -> int:
    """Rows rounded up so that each group's FP32 scales begin at a multiple of 16 bytes."""
    return -(-rows // 4) * 4


def new_gemm_scales(rows: int, groups: int, device: torch.device) -> torch.Tensor:
    """FP32 [rows, groups] with strides (1, rows rounded up to 4), as SM90 grouped GEMMs read them."""
    aligned = align_to_gemm(rows)
    scales = torch.empty_strided((aligned, groups), (1, max(aligned, 1)), dtype=torch.float32, device=device)
    return scales if rows == aligned else scales[:rows]


def _check_gemm_scales(name: str, t: torch.Tensor, shape: Sequence[int], device: torch.device) -> None:
    if not isinstance(t, torch.Tensor) or t.dim() != 2:
        got = f"shape {tuple(t.shape)}" if isinstance(t, torch.Tensor) else type(t).__name__
        raise ValueError(f"{name} must be a tensor with 2 dimensions, got {got}")
    check_tensor(name, t.t(), FP32, device, 2)
    check_shape(name, t, shape)
    rows, groups = shape
    if rows and groups > 1 and (t.stride(1) < rows or t.stride(1) % 4):
        raise ValueError(
            f'{name} in scale_layout "gemm" must have strides (1, a multiple of 4 that is at least {rows}), '
            f"got {tuple(t.stride())}"
        )


def _output_pair(out, names, shapes, dtypes, device: torch.device, scale_layout: str = "row") -> Pair:
    """The pair given, or a new one; `scale_layout` is that of its second tensor."""
    if out is None:
        first = torch.empty(*shapes[0], dtype=dtypes[0][0], device=device)
        if scale_layout == "gemm":
            return first, new_gemm_scales(*shapes[1], device)
        return first, torch.empty(*shapes[1], dtype=dtypes[1][0], device=device)
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        got = f"{len(out)} of them" if isinstance(out, (tuple, list)) else type(out).__name__
        raise ValueError(f"out must be the pair ({names[0]}, {names[1]}), got {got}")
    check_out(f"out's {names[0]}", out[0], shapes[0], dtypes[0], device)
    if scale_layout == "gemm":
        _check_gemm_scales(f"out's {names[1]}", out[1], shapes[1], device)
    else:
        check_out(f"out's {names[1]}", out[1], shapes[1], dtypes[1], device)
    return out[0], out[1]


def _fp4_outputs(rows: int, k: int, device: torch.device, out: Pair | None) -> Pair:
    shapes = ((rows, k // 2), (rows, k // MXFP4_BLOCK))
    return _output_pair(out, ("packed", "scales"), shapes, (BYTES, BYTES), device)


def _fp8_outputs(
    rows: int, k: int, scale_dtype: torch.dtype, scale_layout: str, device: torch.device, out: Pair | None
) -> Pair:
    check_scale_dtype(scale_dtype)
    check_scale_layout(scale_layout, scale_dtype)
    shapes = ((rows, k), (rows, -(-k // FP8_GROUP)))
    return _output_pair(out, ("q", "scales"), shapes, (e4m3.CODE_DTYPES, (scale_dtype,)), device, scale_layout)


def prepare_bf16_to_fp4_row(
    x: torch.Tensor, scale_rounding: str, index: torch.Tensor | None, out: Pair | None
) -> Pair:
    check_tensor("x", x, FLOAT_DTYPES, None, 2)
    rows, k = x.shape
    check_width("x", k, MXFP4_BLOCK)
    check_scale_rounding(scale_rounding)
    return _fp4_outputs(check_index(index, rows, x.device), k, x.device, out)


def prepare_fp4_row_to_bf16(
    packed: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    index: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    m, k = check_fp4_rows(packed, scales)
    check_dtype(dtype)
    return _output(out, (check_index(index, m, packed.device), k), (dtype,), packed.device)


def prepare_bf16_to_fp8_row(
    x: torch.Tensor, scale_dtype: torch.dtype, scale_layout: str, index: torch.Tensor | None, out: Pair | None
) -> Pair:
    check_tensor("x", x, FLOAT_DTYPES, None, 2)
    rows, k = x.shape
    check_width("x", k, 1)
    return _fp8_outputs(check_index(index, rows, x.device), k, scale_dtype, scale_layout, x.device, out)


def prepare_fp8_row_to_bf16(
    q: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, index: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    m, k = check_fp8_rows(q, scales)
    check_dtype(dtype)
    return _output(out, (check_index(index, m, q.device), k), (dtype,), q.device)


def prepare_fp8_row_to_fp4_row(
    q: torch.Tensor, scales: torch.Tensor, scale_rounding: str, index: torch.Tensor | None, out: Pair | None
) -> Pair:
    m, k = check_fp8_rows(q, scales)
    check_width("q", k, MXFP4_BLOCK)
    check_scale_rounding(scale_rounding)
    return _fp4_outputs(check_index(index, m, q.device), k, q.device, out)


def prepare_fp4_row_to_fp8_row(
    packed: torch.Tensor,
    scales: torch.Tensor,
    scale_dtype: torch.dtype,
    scale_layout: str,
    index: torch.Tensor | None,
    out: Pair | None,
) -> Pair:
    m, k = check_fp4_rows(packed, scales)
    return _fp8_outputs(check_index(index, m, packed.device), k, scale_dtype, scale_layout, packed.device, out)


def prepare_fp8_row_to_fp8_row(
    q: torch.Tensor,
    scales: torch.Tensor,
    scale_dtype: torch.dtype,
    scale_layout: str,
    index: torch.Tensor | None,
    out: Pair | None,
) -> Pair:
    m, k = check_fp8_rows(q, scales)
    return _fp8_outputs(check_index(index, m, q.device), k, scale_dtype, scale_layout, q.device, out)


def _column_outputs(
    rows: int,
    k: int,
    group_sizes: torch.Tensor,
    padded_rows: int | None,
    scale_layout: str,
    device: torch.device,
    out: Pair | None,
    layouts: Sequence[str],
) -> tuple[int, Pair]:
    check_scale_layout(scale_layout, torch.float32, layouts)
    check_tensor("group_sizes", group_sizes, INT32, device, 1)
    if padded_rows is not None and (not isinstance(padded_rows, int) or padded_rows < 0 or padded_rows % FP8_GROUP):
        raise ValueError(f"padded_rows must be a multiple of {FP8_GROUP} (an int), got {padded_rows!r}")
    if group_sizes.is_cpu:
        sizes = group_sizes.tolist()
        if min(sizes, default=0) < 0 or sum(sizes) != rows:
            raise ValueError(f"group_sizes must be non-negative and add up to the {rows} rows, got {sizes}")
        needed = sum(columns.padded_sizes(sizes))
        if padded_rows not in (None, needed):
            raise ValueError(f"padded_rows must be {needed} for group_sizes {sizes}, got {padded_rows}")
        padded_rows = needed
    elif padded_rows is None:
        padded_rows = int(columns.padded(group_sizes).sum())
    scales_shape: tuple[int, ...] = (k, padded_rows // FP8_GROUP)
    if scale_layout == "blocks":
        scales_shape = (columns.block_scales_size(k, padded_rows, group_sizes.shape[0]),)
    shapes = ((k * padded_rows,), scales_shape)
    dtypes = (e4m3.CODE_DTYPES, FP32)
    return padded_rows, _output_pair(out, ("q", "scales"), shapes, dtypes, device, scale_layout)


def prepare_fp4_row_to_fp8_col(
    packed: torch.Tensor,
    scales: torch.Tensor,
    group_sizes: torch.Tensor,
    padded_rows: int | None,
    scale_layout: str,
    index: torch.Tensor | None,
    out: Pair | None,
) -> tuple[int, Pair]:
    m, k = check_fp4_rows(packed, scales)
    rows, layouts = check_index(index, m, packed.device), ue8m0.COLUMN_SCALE_LAYOUTS
    return _column_outputs(rows, k, group_sizes, padded_rows, scale_layout, packed.device, out, layouts)


def prepare_fp8_row_to_fp8_col(
    q: torch.Tensor,
    scales: torch.Tensor,
    group_sizes: torch.Tensor,
    padded_rows: int | None,
    scale_layout: str,
    index: torch.Tensor | None,
    out: Pair | None,
) -> tuple[int, Pair]:
    m, k = check_fp8_rows(q, scales)
    rows, layouts = check_index(index, m, q.device), ue8m0.COLUMN_SCALE_LAYOUTS
    return _column_outputs(rows, k, group_sizes, padded_rows, scale_layout, q.device, out, layouts)


def prepare_bf16_to_fp8_row_and_col(
    x: torch.Tensor,
    group_sizes: torch.Tensor,
    padded_rows: int | None,
    scale_layout: str,
    index: torch.Tensor | None,
    out: tuple[Pair, Pair] | None,
) -> tuple[int, Pair, Pair]:
    check_tensor("x", x, FLOAT_DTYPES, None, 2)
    check_width("x", x.shape[1], 1)
    row_out, column_out = _pair_of(out, "the pairs ((q, scales) of rows, (q, scales) of columns)")
    rows, k = check_index(index, x.shape[0], x.device), x.shape[1]
    layouts = ue8m0.SCALE_LAYOUTS
    padded_rows, column_out = _column_outputs(
        rows, k, group_sizes, padded_rows, scale_layout, x.device, column_out, layouts
    )
    return padded_rows, _fp8_outputs(rows, k, torch.float32, scale_layout, x.device, row_out), column_out


def check_contiguous(name: str, t: torch.Tensor) -> None:
    if not t.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tuple(t.stride())} for shape {tuple(t.shape)}")


def _pair_of(out, what: str) -> tuple:
    if out is None:
        return None, None
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        got = f"{len(out)} of them" if isinstance(out, (tuple, list)) else type(out).__name__
        raise ValueError(f"out must be {what}, got {got}")
    return out[0], out[1]


def prepare_weight_to_fp8(
    w1: torch.Tensor, w3: torch.Tensor | None, orientation: str, out: tuple[Pair | None, Pair | None] | None
) -> tuple[Pair | None, Pair | None]:
    check_tensor("w1", w1, FLOAT_DTYPES, None, 3)
    check_width("w1", w1.shape[2], 1)
    experts, n, k = w1.shape
    if w3 is not None:
        check_tensor("w3", w3, (w1.dtype,), w1.device, 3)
        check_shape("w3", w3, w1.shape)
        n *= 2
    check_orientation(orientation)
    blocks_n, blocks_k = -(-n // FP8_GROUP), -(-k // FP8_GROUP)
    shapes = (((experts, n, k), (experts, blocks_n, blocks_k)), ((experts, k, n), (experts, blocks_k, blocks_n)))
    dtypes = (e4m3.CODE_DTYPES, FP32)
    given = _pair_of(out, "the pairs ((q, scales), (q_t, scales_t))")
    names = (("q", "scales"), ("q_t", "scales_t"))
    pairs: list[Pair | None] = []
    for wanted, part, part_names, part_shapes in zip(ORIENTATIONS[orientation], given, names, shapes, strict=True):
        if not wanted:
            if part is not None:
                raise ValueError(
                    f"out's ({', '.join(part_names)}) must be None with orientation {orientation!r}, "
                    f"got {type(part).__name__}"
                )
            pairs.append(None)
            continue
        pairs.append(_output_pair(part, part_names, part_shapes, dtypes, w1.device))
        for t, name in zip(pairs[-1], part_names, strict=True):
            check_contiguous(f"out's {name}", t)
    return pairs[0], pairs[1]


def prepare_split_weight_gradient(gradient: torch.Tensor, out: Pair | None) -> Pair:
    check_tensor("gradient", gradient, FP32, None, 3)
    check_contiguous("gradient", gradient)
    experts, n, k = gradient.shape
    if n % 2:
        raise ValueError(f"gradient must have an even number of rows (those of w1, of w3), got {n}")
    shape = (experts, n // 2, k)
    pair = _output_pair(out, ("g1", "g3"), (shape, shape), ((torch.bfloat16,), (torch.bfloat16,)), gradient.device)
    for name, t in zip(("g1", "g3"), pair, strict=True):
        check_contiguous(f"out's {name}", t)
    return pair
