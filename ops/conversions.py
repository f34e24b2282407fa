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
from ds_fp4.formats import FP8_GROUP, MXFP4_BLOCK, checks, ue8m0
from ds_fp4.ops.kernels import (
    GATHERED_STRIPE,
    KERNELS,
    LONGEST_ROW,
    SOURCE_SCALES,
    THREADS,
    VALUES,
    below_2_31,
    grid_for,
    launch_blocks,
    launch_columns,
    launch_rows,
    row_parts,
    row_stride,
    scales_values,
)

Pair = tuple[torch.Tensor, torch.Tensor]


def _on_gpu(t: torch.Tensor) -> bool:
    return isinstance(t, torch.Tensor) and t.is_cuda


def _lowest(scale_dtype: torch.dtype, scale_layout: str) -> int:
    """Lowest scale exponent, biased."""
    return ue8m0.min_exponent(scale_dtype, scale_layout) + ue8m0.UE8M0_BIAS


@functools.wraps(formats.bf16_to_fp4_row)
def bf16_to_fp4_row(
    x: torch.Tensor, scale_rounding: str = "even", *, index: torch.Tensor | None = None, out: Pair | None = None
) -> Pair:
    if not _on_gpu(x):
        return formats.bf16_to_fp4_row(x, scale_rounding, index=index, out=out)
    packed, scales = checks.prepare_bf16_to_fp4_row(x, scale_rounding, index, out)
    for x_part, codes, block_scales in row_parts(x.shape[1], index, (x, 1), (packed, 2), (scales, MXFP4_BLOCK)):
        launch_rows(
            "bf16_to_fp4_row", VALUES[x.dtype], codes.shape[0], x_part.shape[1], x_part.shape[0], index,
            {"x": (x_part, 8 * x.element_size()), "packed": (codes, 4)},
            scales=block_scales.data_ptr(), scales_stride=row_stride(block_scales),
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
    if not _on_gpu(packed):
        return formats.fp4_row_to_bf16(packed, scales, dtype=dtype, index=index, out=out)
    out = checks.prepare_fp4_row_to_bf16(packed, scales, dtype, index, out)
    for codes, block_scales, values in row_parts(out.shape[1], index, (packed, 2), (scales, MXFP4_BLOCK), (out, 1)):
        launch_rows(
            "fp4_row_to_bf16", VALUES[dtype], values.shape[0], values.shape[1], codes.shape[0], index,
            {"packed": (codes, 4), "out": (values, 8 * out.element_size())},
            scales=block_scales.data_ptr(), scales_stride=row_stride(block_scales),
        )  # fmt: skip
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
    if not _on_gpu(x):
        return formats.bf16_to_fp8_row(x, scale_dtype=scale_dtype, scale_layout=scale_layout, index=index, out=out)
    q, scales = checks.prepare_bf16_to_fp8_row(x, scale_dtype, scale_layout, index, out)
    # Quantizing never gives an exponent under -127, which FP32 could hold.
    lowest = max(_lowest(scale_dtype, scale_layout), 0)
    for x_part, codes, group_scales in row_parts(x.shape[1], index, (x, 1), (q, 1), (scales, FP8_GROUP)):
        launch_rows(
            "bf16_to_fp8_row", VALUES[x.dtype], codes.shape[0], x_part.shape[1], x_part.shape[0], index,
            {"x": (x_part, 8 * x.element_size()), "q": (codes, 8)},
            **scales_values("scales", group_scales, lowest),
        )  # fmt: skip
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
    if not _on_gpu(q):
        return formats.fp8_row_to_bf16(q, scales, dtype=dtype, index=index, out=out)
    out = checks.prepare_fp8_row_to_bf16(q, scales, dtype, index, out)
    for codes, group_scales, values in row_parts(q.shape[1], index, (q, 1), (scales, FP8_GROUP), (out, 1)):
        launch_rows(
            "fp8_row_to_bf16", VALUES[dtype], values.shape[0], values.shape[1], codes.shape[0], index,
            {"q": (codes, 8), "out": (values, 8 * out.element_size())},
            scales=group_scales.data_ptr(), scales_stride=row_stride(group_scales), scale_bytes=scales.element_size(),
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
    if not _on_gpu(packed):
        return formats.fp4_row_to_fp8_row(
            packed, scales, scale_dtype=scale_dtype, scale_layout=scale_layout, index=index, out=out
        )
    q, out_scales = checks.prepare_fp4_row_to_fp8_row(packed, scales, scale_dtype, scale_layout, index, out)
    for source, block_scales, codes, group_scales in row_parts(
        q.shape[1], index, (packed, 2), (scales, MXFP4_BLOCK), (q, 1), (out_scales, FP8_GROUP)
    ):
        launch_rows(
            "fp4_row_to_fp8_row", (), codes.shape[0], codes.shape[1], source.shape[0], index,
            {"packed": (source, 8), "q": (codes, 16)}, unit=16,
            block_scales=block_scales.data_ptr(), block_scales_stride=row_stride(block_scales),
            **scales_values("scales", group_scales, _lowest(scale_dtype, scale_layout)),
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
    if not _on_gpu(q):
        return formats.fp8_row_to_fp4_row(q, scales, scale_rounding, index=index, out=out)
    packed, out_scales = checks.prepare_fp8_row_to_fp4_row(q, scales, scale_rounding, index, out)
    for source, group_scales, codes, block_scales in row_parts(
        q.shape[1], index, (q, 1), (scales, FP8_GROUP), (packed, 2), (out_scales, MXFP4_BLOCK)
    ):
        launch_rows(
            "fp8_row_to_fp4_row", SOURCE_SCALES[scales.dtype], codes.shape[0], source.shape[1], source.shape[0], index,
            {"q": (source, 16), "packed": (codes, 8)}, unit=16,
            group_scales=group_scales.data_ptr(), group_scales_stride=row_stride(group_scales),
            scales=block_scales.data_ptr(), scales_stride=row_stride(block_scales),
            rounding=formats.SCALE_ROUNDINGS[scale_rounding],
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
    if not _on_gpu(q):
        return formats.fp8_row_to_fp8_row(
            q, scales, scale_dtype=scale_dtype, scale_layout=scale_layout, index=index, out=out
        )
    out_q, out_scales = checks.prepare_fp8_row_to_fp8_row(q, scales, scale_dtype, scale_layout, index, out)
    for source, source_scales, codes, group_scales in row_parts(
        q.shape[1], index, (q, 1), (scales, FP8_GROUP), (out_q, 1), (out_scales, FP8_GROUP)
    ):
        launch_rows(
            "fp8_row_to_fp8_row", SOURCE_SCALES[scales.dtype], codes.shape[0], source.shape[1], source.shape[0], index,
            {"source": (source, 16), "q": (codes, 16)}, unit=16,
            source_scales=source_scales.data_ptr(), source_scales_stride=row_stride(source_scales),
            stripe=LONGEST_ROW if index is None else GATHERED_STRIPE,
            **scales_values("scales", group_scales, _lowest(scale_dtype, scale_layout)),
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
    if not _on_gpu(packed):
        return formats.fp4_row_to_fp8_col(
            packed, scales, group_sizes, padded_rows=padded_rows, scale_layout=scale_layout, index=index, out=out
        )
    padded_rows, (q, out_scales) = checks.prepare_fp4_row_to_fp8_col(
        packed, scales, group_sizes, padded_rows, scale_layout, index, out
    )
    launch_columns(
        "fp4_row_to_fp8_col", (), 2 * packed.shape[1], packed.shape[0], index, group_sizes, padded_rows,
        {"packed": (packed, 4), "q": (q, 16)}, unit=8,
        block_scales=scales.data_ptr(), block_scales_stride=row_stride(scales),
        **scales_values("scales", out_scales, _lowest(torch.float32, scale_layout)),
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
    if not _on_gpu(q):
        return formats.fp8_row_to_fp8_col(
            q, scales, group_sizes, padded_rows=padded_rows, scale_layout=scale_layout, index=index, out=out
        )
    padded_rows, (out_q, out_scales) = checks.prepare_fp8_row_to_fp8_col(
        q, scales, group_sizes, padded_rows, scale_layout, index, out
    )
    launch_columns(
        "fp8_row_to_fp8_col", SOURCE_SCALES[scales.dtype], q.shape[1], q.shape[0], index, group_sizes, padded_rows,
        {"source": (q, 4), "q": (out_q, 16)}, unit=4,
        source_scales=scales.data_ptr(), source_scales_stride=row_stride(scales),
        **scales_values("scales", out_scales, _lowest(torch.float32, scale_layout)),
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
    if not _on_gpu(x):
        return formats.bf16_to_fp8_row_and_col(
            x, group_sizes, padded_rows=padded_rows, scale_layout=scale_layout, index=index, out=out
        )
    padded_rows, (row_q, row_scales), (column_q, column_scales) = checks.prepare_bf16_to_fp8_row_and_col(
        x, group_sizes, padded_rows, scale_layout, index, out
    )
    lowest = max(_lowest(torch.float32, scale_layout), 0)
    launch_columns(
        "bf16_to_fp8_row_and_col", VALUES[x.dtype], x.shape[1], x.shape[0], index, group_sizes, padded_rows,
        {"x": (x, 4 * x.element_size()), "row_q": (row_q, 4), "q": (column_q, 16)}, unit=4,
        **scales_values("row_scales", row_scales, lowest),
        **scales_values("scales", column_scales, lowest),
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
    if not _on_gpu(w1):
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
    launch_blocks(
        "weight_to_fp8", VALUES[w1.dtype], experts * blocks_n * blocks_k, w1.device.index, vector,
        rows=n, width=k, first_rows=first_rows, row_tiles=blocks_n, column_tiles=blocks_k,
        w1=pointers[0], w3=pointers[1], expert_stride=strides[0], row_stride=strides[1],
        q=q, scales=scales, q_t=q_t, scales_t=scales_t,
    )  # fmt: skip
    return result


@functools.wraps(formats.split_weight_gradient)
def split_weight_gradient(gradient: torch.Tensor, *, out: Pair | None = None) -> Pair:
    if not _on_gpu(gradient):
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
    launch_blocks(
        kernel.name, (), grid_for(THREADS * tiles, kernel, gradient.device.index), gradient.device.index,
        tiles=tiles, tiles_a_half=tiles_a_half, half_units=half // 8,
        gradient=gradient.data_ptr(), g1=g1.data_ptr(), g3=g3.data_ptr(),
    )  # fmt: skip
    return g1, g3
