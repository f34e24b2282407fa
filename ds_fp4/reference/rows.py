# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Records in another order, and sums of rows by lists."""

import torch

from ds_fp4 import formats
from ds_fp4.formats import MXFP4_BLOCK, checks

from .layout import Pair, check_choice, check_out_rows, check_rows, new_rows

ROW_FORMATS = ("bf16", "mxfp4", "fp8")


def prepare_gather_rows(records: torch.Tensor, index: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
    """Checks the arguments of `gather_rows`; its output, the one given or a new one."""
    checks.check_tensor("records", records, checks.BYTES, None, 2)
    (rows, row_bytes), device = records.shape, records.device
    rows = checks.check_index(index, rows, device)
    if out is None:
        return torch.empty(rows, row_bytes, dtype=torch.uint8, device=device)
    checks.check_out("out", out, (rows, row_bytes), checks.BYTES, device)
    return out


@torch.no_grad()
def gather_rows(
    records: torch.Tensor, index: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows of bytes through an index: out[r] = records[index[r]], zeros where index[r] is -1.

    Args:
        records: uint8 [M, B], inner stride 1, any row stride.
        index: int32 [R]; None: all rows in order, a copy that may change the row stride.
        out: uint8 [R, B] to write to and return, any row stride.

    Returns:
        uint8 [R, B].

    Raises:
        ValueError: on a wrong shape, dtype, device, stride or (host tensors) index.
    """
    out = prepare_gather_rows(records, index, out)
    if index is None:
        return out.copy_(records)
    if records.shape[0] == 0:
        return out.zero_()
    gathered = records.index_select(0, index.clamp(min=0))
    return out.copy_(gathered.masked_fill_((index < 0)[:, None], 0))


def prepare_combine_rows(
    rows: torch.Tensor | Pair,
    offsets: torch.Tensor | None,
    indices: torch.Tensor,
    weights: torch.Tensor | None,
    row_format: str,
    out_format: str,
    scale_rounding: str,
    out: torch.Tensor | Pair | None,
) -> torch.Tensor | Pair:
    """Checks the arguments of `combine_rows`; its output, the one given or a new one."""
    check_choice("row_format", row_format, ROW_FORMATS)
    check_choice("out_format", out_format, ROW_FORMATS)
    checks.check_scale_rounding(scale_rounding)
    input_rows, k, device = check_rows("rows", rows, row_format)
    if out_format == "mxfp4":
        checks.check_width("rows", k, MXFP4_BLOCK)
    checks.check_tensor("indices", indices, checks.INT32, device, 2 if offsets is None else 1)
    checks.check_contiguous("indices", indices)
    if weights is not None:
        checks.check_tensor("weights", weights, checks.FP32, device, indices.dim())
        checks.check_shape("weights", weights, indices.shape)
        checks.check_contiguous("weights", weights)
    if indices.is_cpu:
        checks.check_index(indices.flatten(), input_rows, device)
    if offsets is None:
        count = indices.shape[0]
    else:
        checks.check_tensor("offsets", offsets, checks.INT32, device, 1)
        count = offsets.shape[0] - 1
        if count < 0:
            raise ValueError("offsets must have one entry more than there are output rows, got none")
    if offsets is not None and offsets.is_cpu:
        steps = offsets.diff()
        if int(offsets[0]) < 0 or int(offsets[-1]) > indices.shape[0] or bool((steps < 0).any()):
            raise ValueError(
                f"offsets must not decrease and lie within the {indices.shape[0]} indices, got {offsets.tolist()}"
            )
    if out is None:
        return new_rows(count, k, out_format, device)
    check_out_rows("out", out, count, k, out_format, device)
    return out


@torch.no_grad()
def combine_rows(
    rows: torch.Tensor | Pair,
    offsets: torch.Tensor | None,
    indices: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    row_format: str = "bf16",
    out_format: str = "bf16",
    scale_rounding: str = "even",
    out: torch.Tensor | Pair | None = None,
) -> torch.Tensor | Pair:
    """Sums of rows: output row t is the sum over j in [offsets[t], offsets[t + 1]) of weights[j] * rows[indices[j]].

    The sum is FP32, starts at +0 and goes in the order of j: the same bits on every run. Rows are decoded as by
    `formats.fp4_row_to_bf16` and `fp8_row_to_bf16` into FP32; a product with a weight is rounded before it is added.
    The sum is rounded to BF16, and quantized as by `formats.bf16_to_fp4_row` for MXFP4; for FP8 it is quantized from
    FP32 as by `formats.bf16_to_fp8_row`. An index of -1 adds nothing, an empty list gives a row of zeros.

    Args:
        rows: BF16 [M, K], MXFP4 (packed, scales) or FP8 (q, scales); inner stride 1, any row stride.
        offsets: int32 [T + 1], not decreasing; None for lists of one length, which then end in -1 where they are
            shorter.
        indices: int32 [n], n at least offsets[T]; [T, length] without offsets.
        weights: FP32, of the shape of indices; None for 1.
        row_format, out_format: "bf16", "mxfp4" or "fp8".
        scale_rounding: of MXFP4 output.
        out: what to write to and return: BF16 [T, K], or the pair with any row strides (parts of records); scales of
            FP8 are UE8M0 or FP32.

    Returns:
        BF16 [T, K], (packed, scales), or (q, scales) with UE8M0 scales.

    Raises:
        ValueError: on a wrong shape, dtype, device, stride, choice or (host tensors) index or offset.
    """
    out = prepare_combine_rows(rows, offsets, indices, weights, row_format, out_format, scale_rounding, out)
    if offsets is None:
        count, length = indices.shape
        offsets = torch.arange(count + 1, device=indices.device) * length
        indices, weights = indices.flatten(), None if weights is None else weights.flatten()
    count = offsets.shape[0] - 1
    decode = {
        "bf16": lambda index: rows.index_select(0, index).to(torch.float32),
        "mxfp4": lambda index: formats.fp4_row_to_bf16(rows[0][index], rows[1][index], dtype=torch.float32),
        "fp8": lambda index: formats.fp8_row_to_bf16(
            rows[0].view(torch.uint8)[index], rows[1][index], dtype=torch.float32
        ),
    }[row_format]
    first = rows if row_format == "bf16" else rows[0]
    k = first.shape[1] * (2 if row_format == "mxfp4" else 1)
    total = torch.zeros(count, k, dtype=torch.float32, device=first.device)
    starts, sizes = offsets[:-1].to(torch.int64), offsets.diff()
    for turn in range(int(sizes.max()) if count else 0):
        # The turn-th entry of every list that has one and names a row.
        lists = torch.nonzero(sizes > turn).flatten()
        entries = starts[lists] + turn
        named = indices[entries] >= 0
        lists, entries = lists[named], entries[named]
        values = decode(indices[entries].to(torch.int64))
        if weights is not None:
            values = values * weights[entries, None]
        total[lists] += values
    if out_format == "mxfp4":
        return formats.bf16_to_fp4_row(total.to(torch.bfloat16), scale_rounding, out=tuple(out))
    if out_format == "fp8":
        return formats.bf16_to_fp8_row(total, scale_dtype=out[1].dtype, out=tuple(out))
    return out.copy_(total)
