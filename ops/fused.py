# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The fused calls: `ds_fp4.reference` for host tensors, CUDA kernels for CUDA tensors.

As in `conversions`, a call on a GPU uses the caller's current stream, waits for nothing and may be captured in a CUDA
graph. `swiglu_backward` allocates, besides its outputs, FP32 [I/128, R] for the partial sums of the routing weights'
gradient. gather_rows and combine_rows give the reference's bits. The activations' exp differs by a unit or two in the
last place, and with it at most one code in ten thousand, by one step; results are the same from run to run.
"""

from __future__ import annotations

import functools
import math
import struct

import torch

from ds_fp4 import formats, reference
from ds_fp4.ops.kernels import (
    BLOCKS_PER_MULTIPROCESSOR,
    CHUNK_VALUES,
    GATHER_UNITS,
    KERNELS,
    LONG_CHUNK_VALUES,
    LONG_CHUNKS,
    THREADS,
)
from ds_fp4.ops.launching import below_2_31, launch, multiprocessors, on_gpu, row_stride
from ds_fp4.reference import activation as activations
from ds_fp4.reference import rows as row_calls

Pair = tuple[torch.Tensor, torch.Tensor]

_ACTIVATION_TYPES = {
    "swiglu": "Swiglu",
    "swiglu_clamped": "SwigluClamped",
    "swiglu_oai": "SwigluOai",
    "geglu_tanh": "GegluTanh",
}
_ROW_TYPES = {"mxfp4": "Mxfp4Rows", "fp8": "Fp8Rows", "bf16": "Bf16Rows", None: "NoRows"}
_BOOLS = {False: "false", True: "true"}
_UNIT_BYTES = {"mxfp4": 4, "fp8": 8, "bf16": 16}  # of eight values
_WARPS = THREADS // 32


def _bits(value: float) -> int:
    """FP32 bits of a scalar."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


def _pointer(t: torch.Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _strides(t: torch.Tensor) -> tuple[int, int]:
    """Bytes from row to row and from column to column."""
    itemsize = t.element_size()
    rows, columns = t.stride()
    return rows * itemsize, columns * itemsize


def _pair(rows: torch.Tensor | Pair | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return rows if isinstance(rows, (tuple, list)) else (rows, None)


def _row_grid(rows: int, chunks_a_row: int, device: int) -> int:
    """Blocks whose warps are a multiple of the chunks of a row, so that a warp stays in its columns."""
    multiple = chunks_a_row // math.gcd(chunks_a_row, _WARPS)
    blocks = min(-(-rows * chunks_a_row // _WARPS), multiprocessors(device) * BLOCKS_PER_MULTIPROCESSOR)
    return -(-blocks // multiple) * multiple


@functools.wraps(reference.swiglu_forward)
def swiglu_forward(
    gate_up: torch.Tensor,
    weights: torch.Tensor | None,
    *,
    activation: str = "swiglu",
    alpha: float = 1.702,
    limit: float = 7.0,
    save: str | None = "mxfp4",
    scale_rounding: str = "even",
    scale_layout: str = "row",
    out: reference.SwigluForward | None = None,
) -> reference.SwigluForward:
    if not on_gpu(gate_up):
        return reference.swiglu_forward(
            gate_up, weights, activation=activation, alpha=alpha, limit=limit, save=save,
            scale_rounding=scale_rounding, scale_layout=scale_layout, out=out,
        )  # fmt: skip
    out = activations.prepare_swiglu_forward(gate_up, weights, activation, save, scale_rounding, scale_layout, out)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if rows == 0:
        return out
    chunks_a_row = -(-width // CHUNK_VALUES)
    scales_stride, scales_group_stride = _strides(out.scales)
    saved, saved_scales = _pair(out.saved)
    values = {
        "rows": rows,
        "width": width,
        "chunks_a_row": chunks_a_row,
        "gate_up": gate_up.data_ptr(),
        "gate_up_stride": row_stride(gate_up),
        "weights": _pointer(weights),
        "alpha": _bits(alpha),
        "limit": _bits(limit),
        "q": out.q.data_ptr(),
        "q_stride": row_stride(out.q),
        "scales": out.scales.data_ptr(),
        "scales_stride": scales_stride,
        "scales_group_stride": scales_group_stride,
        "lowest_scale": int(scale_layout == "gemm"),
        "saved": _pointer(saved),
        "saved_stride": 0 if saved is None else row_stride(saved),
        "saved_scales": _pointer(saved_scales),
        "saved_scales_stride": 0 if saved_scales is None else row_stride(saved_scales),
        "rounding": formats.SCALE_ROUNDINGS[scale_rounding],
    }
    device = gate_up.device.index
    template = f"{_ACTIVATION_TYPES[activation]}, {_ROW_TYPES[save]}"
    launch(KERNELS["swiglu_forward"], template, _row_grid(rows, chunks_a_row, device), values, device)
    return out


@functools.wraps(reference.swiglu_backward)
def swiglu_backward(
    dh: torch.Tensor,
    weights: torch.Tensor | None,
    gate_up: torch.Tensor | Pair,
    group_sizes: torch.Tensor,
    *,
    gate_up_format: str = "mxfp4",
    padded_rows: int | None = None,
    padded_input: bool = True,
    activation: str = "swiglu",
    alpha: float = 1.702,
    limit: float = 7.0,
    scale_layout: str = "row",
    out: reference.SwigluBackward | None = None,
) -> reference.SwigluBackward:
    if not on_gpu(dh):
        return reference.swiglu_backward(
            dh, weights, gate_up, group_sizes, gate_up_format=gate_up_format, padded_rows=padded_rows,
            padded_input=padded_input, activation=activation, alpha=alpha, limit=limit, scale_layout=scale_layout,
            out=out,
        )  # fmt: skip
    padded_rows, out = activations.prepare_swiglu_backward(
        dh, weights, gate_up, group_sizes, gate_up_format, padded_rows, padded_input, activation, scale_layout, out
    )
    rows, width = dh.shape
    if rows == 0 or padded_rows == 0:
        return out
    groups = width // formats.FP8_GROUP
    partial = torch.empty(groups, rows, dtype=torch.float32, device=dh.device)
    data, data_scales = _pair(gate_up)
    values = {
        "rows": rows,
        "width": width,
        "group_sizes": group_sizes.data_ptr(),
        "groups": group_sizes.shape[0],
        "padded_input": int(padded_input),
        "tiles": padded_rows // formats.FP8_GROUP,
        "dh": dh.data_ptr(),
        "dh_stride": row_stride(dh),
        "weights": _pointer(weights),
        "gate_up": data.data_ptr(),
        "gate_up_stride": row_stride(data),
        "gate_up_scales": _pointer(data_scales),
        "gate_up_scales_stride": 0 if data_scales is None else row_stride(data_scales),
        "up_offset": width // 8 * _UNIT_BYTES[gate_up_format],
        "up_scales_offset": width // (formats.MXFP4_BLOCK if gate_up_format == "mxfp4" else formats.FP8_GROUP),
        "alpha": _bits(alpha),
        "limit": _bits(limit),
        "lowest_scale": int(scale_layout == "gemm"),
        "row": out.row.data_ptr(),
        "row_stride": row_stride(out.row),
        "col": out.col.data_ptr(),
        "h_col": out.h_col.data_ptr(),
        "partial": partial.data_ptr(),
    }
    for name, second in (("row_scales", "group"), ("col_scales", "tile"), ("h_col_scales", "tile")):
        scales = getattr(out, name)
        values[name] = scales.data_ptr()
        values[f"{name}_stride"], values[f"{name}_{second}_stride"] = _strides(scales)
    device = dh.device.index
    template = f"{_ACTIVATION_TYPES[activation]}, {_ROW_TYPES[gate_up_format]}"
    launch(KERNELS["swiglu_backward"], template, groups * (padded_rows // formats.FP8_GROUP), values, device)
    sums = {"rows": rows, "parts": groups, "partial": partial.data_ptr(), "out": out.weights.data_ptr()}
    launch(KERNELS["sum_partials"], "8", -(-rows // THREADS), sums, device)
    return out


@functools.wraps(reference.gather_rows)
def gather_rows(
    records: torch.Tensor, index: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    if not on_gpu(records):
        return reference.gather_rows(records, index, out=out)
    out = row_calls.prepare_gather_rows(records, index, out)
    rows, row_bytes = out.shape
    if rows == 0 or row_bytes == 0:
        return out
    source, source_stride = records.data_ptr(), row_stride(records)
    target, target_stride = out.data_ptr(), row_stride(out)
    places = source | source_stride | target | target_stride | row_bytes
    unit = 16 if places % 16 == 0 else 4 if places % 4 == 0 else 1
    row_units = below_2_31("units of a record", row_bytes // unit)
    values = {
        "rows": rows,
        "row_units": row_units,
        "input_rows": records.shape[0],
        "index": _pointer(index),
        "records": source,
        "records_stride": source_stride,
        "out": target,
        "out_stride": target_stride,
    }
    device = records.device.index
    grid = min(-(-rows * row_units // GATHER_UNITS), multiprocessors(device) * BLOCKS_PER_MULTIPROCESSOR)
    launch(KERNELS["gather_rows"], str(unit), grid, values, device)
    return out


@functools.wraps(reference.combine_rows)
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
    data, data_scales = _pair(rows)
    if not on_gpu(data):
        return reference.combine_rows(
            rows, offsets, indices, weights, row_format=row_format, out_format=out_format,
            scale_rounding=scale_rounding, out=out,
        )  # fmt: skip
    out = row_calls.prepare_combine_rows(rows, offsets, indices, weights, row_format, out_format, scale_rounding, out)
    count = indices.shape[0] if offsets is None else offsets.shape[0] - 1
    if count == 0:
        return out
    out_data, out_scales = _pair(out)
    input_rows, width = data.shape
    if row_format == "mxfp4":
        width *= 2
    source, source_stride = data.data_ptr(), row_stride(data)
    target, target_stride = out_data.data_ptr(), row_stride(out_data)
    vector = (
        width % 8 == 0
        and (source | source_stride) % _UNIT_BYTES[row_format] == 0
        and (target | target_stride) % _UNIT_BYTES[out_format] == 0
    )
    template = f"{_ROW_TYPES[row_format]}, {_ROW_TYPES[out_format]}, {_BOOLS[weights is not None]}, {_BOOLS[vector]}"
    chunks_a_row = -(-width // (LONG_CHUNK_VALUES if template == LONG_CHUNKS else CHUNK_VALUES))
    values = {
        "rows": count,
        "width": width,
        "chunks_a_row": chunks_a_row,
        "input_rows": input_rows,
        "offsets": _pointer(offsets),
        "list_entries": indices.shape[1] if offsets is None else 0,
        "indices": indices.data_ptr(),
        "weights": _pointer(weights),
        "x": source,
        "x_stride": source_stride,
        "x_scales": _pointer(data_scales),
        "x_scales_stride": 0 if data_scales is None else row_stride(data_scales),
        "x_scale_bytes": 0 if data_scales is None else data_scales.element_size(),
        "out": target,
        "out_stride": target_stride,
        "out_scales": _pointer(out_scales),
        "out_scales_stride": 0 if out_scales is None else row_stride(out_scales),
        "out_scale_bytes": 0 if out_scales is None else out_scales.element_size(),
        "rounding": formats.SCALE_ROUNDINGS[scale_rounding],
    }
    device = data.device.index
    launch(KERNELS["combine_rows"], template, _row_grid(count, chunks_a_row, device), values, device)
    return out
