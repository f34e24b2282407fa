# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The conversions: the PyTorch reference for host tensors, CUDA kernels for CUDA tensors, the same bits from both.

Arguments, results and errors are those of the same names in `ds_fp4.formats`. On a GPU a call uses the caller's
current stream of the tensor's device, allocates nothing but outputs (nothing at all with `out=`) and waits for
nothing, so that it may be captured in a CUDA graph. Two exceptions: `weight_to_fp8` copies w1 and w3 if their strides
differ, and a column kernel without `padded_rows` waits for the group sizes. What can only be known by waiting is not
checked there: an index outside the rows, or group sizes that lead beyond the rows or `padded_rows`, stop the kernel
with an error; FP8 scales that are no powers of two are read as the next lower one.
"""

from __future__ import annotations

import functools

import torch

from ds_fp4 import formats
from ds_fp4.formats import FP8_GROUP, checks, ue8m0
from ds_fp4.ops.kernels import GATHERED_STRIPE, KERNELS, SHARED_SCALES, SOURCE_SCALES, THREADS, VALUES
from ds_fp4.ops.launching import LONGEST_ROW, below_2_31, grid_for, launch, launch_columns, launch_rows, on_gpu

Pair = tuple[torch.Tensor, torch.Tensor]


def _lowest(scale_dtype: torch.dtype, scale_layout: str) -> int:
    """Lowest scale exponent, biased."""
    return ue8m0.min_exponent(scale_dtype, scale_layout) + ue8m0.UE8M0_BIAS


@functools.wraps(formats.bf16_to_fp4_row)
def bf16_to_fp4_row(
    x: torch.Tensor, scale_rounding: str = "even", *, index: torch.Tensor | None = None, out: Pair | None = None
) -> Pair:
    if not on_gpu(x):
        return formats.bf16_to_fp4_row(x, scale_rounding, index=index, out=out)
    packed, scales = checks.prepare_bf16_to_fp4_row(x, scale_rounding, index, out)
    launch_rows(
        KERNELS["bf16_to_fp4_row"], VALUES[x.dtype], x.shape[1], index, (x, packed, scales),
        rounding=formats.SCALE_ROUNDINGS[scale_rounding],
    )  # fmt: skip
    return packed, scales


@functools.wraps(formats.fp4_row_to_bf16)
def fp4_row_to_bf16(
    packed: torch.Tensor,
    scales: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    index: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if not on_gpu(packed):
        return formats.fp4_row_to_bf16(packed, scales, dtype=dtype, index=index, out=out)
    out = checks.prepare_fp4_row_to_bf16(packed, scales, dtype, index, out)
    launch_rows(KERNELS["fp4_row_to_bf16"], VALUES[dtype], out.shape[1], index, (packed, scales, out))
    return out


@functools.wraps(formats.bf16_to_fp8_row)
def bf16_to_fp8_row(
    x: torch.Tensor,
    *,
    scale_dtype: torch.dtype = torch.float32,
    scale_layout: str = "row",
    index: torch.Tensor | None = None,
    out: Pair | None = None,
) -> Pair:
    if not on_gpu(x):
        return formats.bf16_to_fp8_row(x, scale_dtype=scale_dtype, scale_layout=scale_layout, index=index, out=out)
    q, scales = checks.prepare_bf16_to_fp8_row(x, scale_dtype, scale_layout, index, out)
    # Quantizing never gives an exponent under -127, which FP32 could hold.
    lowest = max(_lowest(scale_dtype, scale_layout), 0)
    launch_rows(KERNELS["bf16_to_fp8_row"], VALUES[x.dtype], x.shape[1], index, (x, q), (scales, lowest))
    return q, scales


@functools.wraps(formats.fp8_row_to_bf16)
def fp8_row_to_bf16(
    q: torch.Tensor,
    scales: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    index: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if not on_gpu(q):
        return formats.fp8_row_to_bf16(q, scales, dtype=dtype, index=index, out=out)
    out = checks.prepare_fp8_row_to_bf16(q, scales, dtype, index, out)
    launch_rows(
        KERNELS["fp8_row_to_bf16"], VALUES[dtype], q.shape[1], index, (q, scales, out),
        scale_bytes=scales.element_size(),
    )  # fmt: skip
    return out


@functools.wraps(formats.fp4_row_to_fp8_row)
def fp4_row_to_fp8_row(
    packed: torch.Tensor,
    scales: torch.Tensor,
    *,
    scale_dtype: torch.dtype = torch.float32,
    scale_layout: str = "row",
    index: torch.Tensor | None = None,
    out: Pair | None = None,
) -> Pair:
    if not on_gpu(packed):
        return formats.fp4_row_to_fp8_row(
            packed, scales, scale_dtype=scale_dtype, scale_layout=scale_layout, index=index, out=out
        )
    q, out_scales = checks.prepare_fp4_row_to_fp8_row(packed, scales, scale_dtype, scale_layout, index, out)
    launch_rows(
        KERNELS["fp4_row_to_fp8_row"], (), q.shape[1], index, (packed, scales, q),
        (out_scales, _lowest(scale_dtype, scale_layout)),
    )  # fmt: skip
    return q, out_scales


@functools.wraps(formats.fp8_row_to_fp4_row)
def fp8_row_to_fp4_row(
    q: torch.Tensor,
    scales: torch.Tensor,
    scale_rounding: str = "even",
    *,
    index: torch.Tensor | None = None,
    out: Pair | None = None,
) -> Pair:
    if not on_gpu(q):
        return formats.fp8_row_to_fp4_row(q, scales, scale_rounding, index=index, out=out)
    packed, out_scales = checks.prepare_fp8_row_to_fp4_row(q, scales, scale_rounding, index, out)
    launch_rows(
        KERNELS["fp8_row_to_fp4_row"], SOURCE_SCALES[scales.dtype], q.shape[1], index,
        (q, scales, packed, out_scales), rounding=formats.SCALE_ROUNDINGS[scale_rounding],
    )  # fmt: skip
    return packed, out_scales


@functools.wraps(formats.fp8_row_to_fp8_row)
def fp8_row_to_fp8_row(
    q: torch.Tensor,
    scales: torch.Tensor,
    *,
    scale_dtype: torch.dtype = torch.float32,
    scale_layout: str = "row",
    index: torch.Tensor | None = None,
    out: Pair | None = None,
) -> Pair:
    if not on_gpu(q):
        return formats.fp8_row_to_fp8_row(
            q, scales, scale_dtype=scale_dtype, scale_layout=scale_layout, index=index, out=out
        )
    out_q, out_scales = checks.prepare_fp8_row_to_fp8_row(q, scales, scale_dtype, scale_layout, index, out)
    launch_rows(
        KERNELS["fp8_row_to_fp8_row"], SOURCE_SCALES[scales.dtype], q.shape[1], index, (q, scales, out_q),
        (out_scales, _lowest(scale_dtype, scale_layout)), stripe=LONGEST_ROW if index is None else GATHERED_STRIPE,
    )  # fmt: skip
    return out_q, out_scales


@functools.wraps(formats.fp4_row_to_fp8_col)
def fp4_row_to_fp8_col(
    packed: torch.Tensor,
    scales: torch.Tensor,
    group_sizes: torch.Tensor,
    *,
    padded_rows: int | None = None,
    scale_layout: str = "row",
    index: torch.Tensor | None = None,
    out: Pair | None = None,
) -> Pair:
    if not on_gpu(packed):
        return formats.fp4_row_to_fp8_col(
            packed, scales, group_sizes, padded_rows=padded_rows, scale_layout=scale_layout, index=index, out=out
        )
    padded_rows, (q, out_scales) = checks.prepare_fp4_row_to_fp8_col(
        packed, scales, group_sizes, padded_rows, scale_layout, index, out
    )
    launch_columns(
        KERNELS["fp4_row_to_fp8_col"], SHARED_SCALES[scale_layout], 2 * packed.shape[1], index, group_sizes,
        padded_rows, (packed, scales), q, (out_scales, _lowest(torch.float32, scale_layout)),
    )  # fmt: skip
    return q, out_scales


@functools.wraps(formats.fp8_row_to_fp8_col)
def fp8_row_to_fp8_col(
    q: torch.Tensor,
    scales: torch.Tensor,
    group_sizes: torch.Tensor,
    *,
    padded_rows: int | None = None,
    scale_layout: str = "row",
    index: torch.Tensor | None = None,
    out: Pair | None = None,
) -> Pair:
    if not on_gpu(q):
        return formats.fp8_row_to_fp8_col(
            q, scales, group_sizes, padded_rows=padded_rows, scale_layout=scale_layout, index=index, out=out
        )
    padded_rows, (out_q, out_scales) = checks.prepare_fp8_row_to_fp8_col(
        q, scales, group_sizes, padded_rows, scale_layout, index, out
    )
    launch_columns(
        KERNELS["fp8_row_to_fp8_col"], SOURCE_SCALES[scales.dtype] + SHARED_SCALES[scale_layout], q.shape[1], index,
        group_sizes, padded_rows, (q, scales), out_q, (out_scales, _lowest(torch.float32, scale_layout)),
    )  # fmt: skip
    return out_q, out_scales


@functools.wraps(formats.bf16_to_fp8_row_and_col)
def bf16_to_fp8_row_and_col(
    x: torch.Tensor,
    group_sizes: torch.Tensor,
    *,
    padded_rows: int | None = None,
    scale_layout: str = "row",
    index: torch.Tensor | None = None,
    out: tuple[Pair, Pair] | None = None,
) -> tuple[Pair, Pair]:
    if not on_gpu(x):
        return formats.bf16_to_fp8_row_and_col(
            x, group_sizes, padded_rows=padded_rows, scale_layout=scale_layout, index=index, out=out
        )
    padded_rows, (row_q, row_scales), (column_q, column_scales) = checks.prepare_bf16_to_fp8_row_and_col(
        x, group_sizes, padded_rows, scale_layout, index, out
    )
    lowest = max(_lowest(torch.float32, scale_layout), 0)
    launch_columns(
        KERNELS["bf16_to_fp8_row_and_col"], VALUES[x.dtype], x.shape[1], index, group_sizes, padded_rows, (x, row_q),
        column_q, (column_scales, lowest), (row_scales, lowest),
    )  # fmt: skip
    return (row_q, row_scales), (column_q, column_scales)


@functools.wraps(formats.weight_to_fp8)
def weight_to_fp8(
    w1: torch.Tensor,
    w3: torch.Tensor | None = None,
    *,
    orientation: str = "both",
    out: tuple[Pair | None, Pair | None] | None = None,
) -> tuple[Pair | None, Pair | None]:
    if not on_gpu(w1):
        return formats.weight_to_fp8(w1, w3, orientation=orientation, out=out)
    result = checks.prepare_weight_to_fp8(w1, w3, orientation, out)
    # A null pointer for what is not wanted.
    (q, scales), (q_t, scales_t) = ((0, 0) if pair is None else [t.data_ptr() for t in pair] for pair in result)
    if w3 is not None and w3.stride() != w1.stride():
        w3 = w3.contiguous()
        w1 = w1.contiguous()
    experts, first_rows, k = w1.shape
    n = first_rows if w3 is None else 2 * first_rows
    blocks_n, blocks_k = -(-n // FP8_GROUP), -(-k // FP8_GROUP)
    itemsize = w1.element_size()
    strides = [stride * itemsize for stride in w1.stride()[:2]]
    below_2_31("a row stride in bytes", strides[1] if first_rows > 1 else 0)
    below_2_31("rows of an expert", n)
    pointers = [w1.data_ptr(), 0 if w3 is None else w3.data_ptr()]
    # Values are read four at a time, codes written four and, transposed, sixteen at a time.
    vector = k % 4 == 0 and (not q_t or n % 16 == 0) and all(
        number % (4 * itemsize) == 0 for number in (*pointers, *strides)
    ) and q % 4 == 0 and q_t % 16 == 0  # fmt: skip
    blocks = experts * blocks_n * blocks_k
    if blocks:
        values = {
            "rows": n,
            "width": k,
            "first_rows": first_rows,
            "row_tiles": blocks_n,
            "column_tiles": blocks_k,
            "w1": pointers[0],
            "w3": pointers[1],
            "expert_stride": strides[0],
            "row_stride": strides[1],
            "q": q,
            "scales": scales,
            "q_t": q_t,
            "scales_t": scales_t,
        }
        template = f"{VALUES[w1.dtype][0]}, {'true' if vector else 'false'}"
        launch(KERNELS["weight_to_fp8"], template, blocks, values, w1.device.index)
    return result


@functools.wraps(formats.split_weight_gradient)
def split_weight_gradient(gradient: torch.Tensor, *, out: Pair | None = None) -> Pair:
    if not on_gpu(gradient):
        return formats.split_weight_gradient(gradient, out=out)
    g1, g3 = checks.prepare_split_weight_gradient(gradient, out)
    half = g1.shape[1] * g1.shape[2]
    if half % 8 or any(t.data_ptr() % 16 for t in (gradient, g1, g3)):
        g1.copy_(gradient[:, : g1.shape[1]])
        g3.copy_(gradient[:, g1.shape[1] :])
        return g1, g3
    kernel = KERNELS["split_weight_gradient"]
    tiles_a_half = -(-half // kernel.tile[1])
    tiles = 2 * g1.shape[0] * tiles_a_half
    device = gradient.device.index
    if tiles:
        values = {
            "tiles": tiles,
            "tiles_a_half": tiles_a_half,
            "half_units": half // 8,
            "gradient": gradient.data_ptr(),
            "g1": g1.data_ptr(),
            "g3": g3.data_ptr(),
        }
        launch(kernel, "", grid_for(THREADS * tiles, kernel, device), values, device)
    return g1, g3
