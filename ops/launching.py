# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""From tensors to a launch: addresses, strides, alignment, grids.

A GPU waits for the host wherever kernels are short. So a tensor is asked once for each thing that a kernel must know
of it, and what is the same in every call of a kernel stands in the table.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import torch

from ds_fp4.ops import backends
from ds_fp4.ops.kernels import FP8_GROUP, LANES, STRIP, THREADS, TILE_TOKENS, Kernel

LONGEST_ROW = (1 << 31) - 1
# Of a row that the kernels could not count within 31 bits, what is converted at a time: whole tiles, groups, blocks.
PART_VALUES = 1 << 30
LARGEST_ACCESS = 16  # bytes

# FP8 scales that a kernel writes, [rows, groups] of any strides, and the lowest biased exponent (by 127) of them.
Scales = tuple[torch.Tensor, int]


def on_gpu(t: object) -> bool:
    """Whether a call with `t` first is for the kernels; what is no tensor the reference refuses."""
    return isinstance(t, torch.Tensor) and t.is_cuda


@functools.cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def grid_for(threads: int, kernel: Kernel, device: int) -> int:
    """Blocks for a kernel that goes over its work in grid strides."""
    return min(-(-threads // THREADS), multiprocessors(device) * kernel.blocks)


def below_2_31(name: str, value: int) -> int:
    if value >= 1 << 31:
        raise ValueError(f"the kernels take {name} below 2^31, got {value}; convert in parts")
    return value


def row_stride(t: torch.Tensor) -> int:
    """Bytes from row to row, which kernels take for less than 2^31; 0 where there are no two rows."""
    return below_2_31("a row stride in bytes", t.stride()[0] * t.element_size()) if t.shape[0] > 1 else 0


def _add_operands(values: dict[str, int], kernel: Kernel, tensors: Sequence[torch.Tensor]) -> tuple[bool, bool, int]:
    """Add addresses and row strides to `values`.

    Returns:
        Whether every unit of every row may be accessed whole, in pieces of 16 bytes at most; whether all rows begin at
        multiples of 16 bytes; the longest row stride.
    """
    remainders = places = longest = 0
    for (pointer, stride, _, unit), t in zip(kernel.operands, tensors, strict=True):
        place, itemsize = t.data_ptr(), t.element_size()
        values[pointer], values[stride] = place, 0
        if t.shape[0] > 1:
            values[stride] = apart = t.stride()[0] * itemsize
            place |= apart
            if apart > longest:
                longest = apart
        if unit:
            places |= place
            remainders |= place % min(unit * itemsize, LARGEST_ACCESS)
    return remainders == 0, places % LARGEST_ACCESS == 0, longest


def _add_scales(values: dict[str, int], name: str, scales: Scales) -> None:
    """Add the fields of a struct Scales to `values`."""
    tensor, values[f"{name}_lowest"] = scales
    itemsize = tensor.element_size()
    strides = tensor.stride() if tensor.dim() == 2 else (0, 0)  # 1-D ones have a layout of their own
    below_2_31("a scale stride in bytes", max(strides) * itemsize)
    values[f"{name}_base"] = tensor.data_ptr()
    values[f"{name}_row_stride"], values[f"{name}_group_stride"] = strides[0] * itemsize, strides[1] * itemsize
    values[f"{name}_bytes"] = itemsize


def launch_rows(
    kernel: Kernel,
    arguments: Sequence[str],
    width: int,
    index: torch.Tensor | None,
    tensors: Sequence[torch.Tensor],
    scales: Scales | None = None,
    **values: int,
) -> None:
    """Launch a row kernel on the current stream of the tensors' device.

    Rows that are too long for it, or too far apart, it gets one by one and in pieces.

    Args:
        arguments: of the template, but the last, kVector, and a lane's values where there is a whole tile.
        width: values a row.
        index: int32 [rows] or None.
        tensors: the kernel's operands, in its order: the first one is read, the last one written.
        scales: of kernels that write FP8.
        values: the kernel's other parameters.

    Raises:
        ValueError: if such rows are to be gathered.
        RuntimeError: with the kernel's name, if the kernels cannot be loaded or CUDA refuses the launch.
    """
    fields: dict[str, int] = {}
    vector, aligned, longest = _add_operands(fields, kernel, tensors)
    if longest > LONGEST_ROW or width > LONGEST_ROW:
        if index is not None:
            raise ValueError(
                f"an index gathers rows of up to {LONGEST_ROW} values, as many bytes apart, got {width} values; "
                "convert without an index"
            )
        for part_width, part_tensors, part_scales in _row_parts(kernel, width, tensors, scales):
            launch_rows(kernel, arguments, part_width, None, part_tensors, part_scales, **values)
        return
    if scales is not None:
        _add_scales(fields, "scales", scales)
    rows, input_rows = tensors[-1].shape[0], tensors[0].shape[0]
    if rows == 0:
        return
    below_2_31("rows", max(rows, input_rows))
    tile_rows, tile_values = kernel.tile
    if kernel.whole_tile is not None:
        if aligned and width % kernel.whole_tile[1] == 0:
            tile_rows, tile_values = kernel.whole_tile
        arguments = (*arguments, str(tile_values // LANES))
    tiles_a_row = -(-width // tile_values)
    fields |= {
        "rows": rows,
        "width": width,
        "input_rows": input_rows,
        "index": 0 if index is None else index.data_ptr(),
        "tiles_a_row": tiles_a_row,
        **values,
    }
    device = tensors[0].device.index
    grid = grid_for(-(-rows // tile_rows) * tiles_a_row * LANES, kernel, device)
    launch(kernel, _template(arguments, vector and width % kernel.unit == 0), grid, fields, device)


def _row_parts(
    kernel: Kernel, width: int, tensors: Sequence[torch.Tensor], scales: Scales | None
) -> Iterator[tuple[int, list[torch.Tensor], Scales | None]]:
    """Pieces of single rows: the values in one, its operands and scales."""
    for row in range(tensors[0].shape[0]):
        for first in range(0, width, PART_VALUES):
            last = min(first + PART_VALUES, width)

            def piece(t: torch.Tensor, values: int, row: int = row, first: int = first, last: int = last):
                return t[row : row + 1, first // values : -(-last // values)]

            operands = [piece(t, operand.values) for operand, t in zip(kernel.operands, tensors, strict=True)]
            yield last - first, operands, scales and (piece(scales[0], FP8_GROUP), scales[1])


def launch_columns(
    kernel: Kernel,
    arguments: Sequence[str],
    width: int,
    index: torch.Tensor | None,
    group_sizes: torch.Tensor,
    padded_rows: int,
    tensors: Sequence[torch.Tensor],
    q: torch.Tensor,
    scales: Scales,
    row_scales: Scales | None = None,
) -> None:
    """Launch a column kernel: one block a tile of 128 rows by `kernel.tile[1]` columns. Arguments as of `launch_rows`.

    Args:
        group_sizes: int32 [E]. padded_rows: their sum, each rounded up to 128.
        q, scales: the columns to write. row_scales: of a kernel that writes rows too.
    """
    values: dict[str, int] = {}
    vector, _, longest = _add_operands(values, kernel, tensors)
    _add_scales(values, "scales", scales)
    if row_scales is not None:
        _add_scales(values, "row_scales", row_scales)
    if padded_rows == 0:
        return
    input_rows = tensors[0].shape[0]
    below_2_31("rows", max(padded_rows, input_rows))
    below_2_31("values in a row", width)
    below_2_31("a row stride in bytes", longest)
    tiles, column_tiles = padded_rows // TILE_TOKENS, -(-width // kernel.tile[1])
    codes = q.data_ptr()
    values |= {
        "width": width,
        "rows": input_rows if index is None else index.shape[0],
        "input_rows": input_rows,
        "index": 0 if index is None else index.data_ptr(),
        "group_sizes": group_sizes.data_ptr(),
        "groups": group_sizes.shape[0],
        "tiles": tiles,
        "column_tiles": column_tiles,
        "strip": STRIP if index is None else tiles,
        "q": codes,
    }
    vector = vector and width % kernel.unit == 0 and codes % LARGEST_ACCESS == 0
    launch(kernel, _template(arguments, vector), tiles * column_tiles, values, group_sizes.device.index)


def _template(arguments: Sequence[str], vector: bool) -> str:
    return ", ".join([*arguments, "true" if vector else "false"])


def launch(kernel: Kernel, template: str, grid: int, values: Mapping[str, int], device: int) -> None:
    """Launch one instantiation on the current stream of `device`, which need not be the current one.

    Args:
        values: all of the kernel's parameters, by name.
    """
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, template, grid, values, device)
        return
    # torch.cuda.current_stream(device).cuda_stream, without a Stream made on the way; Inductor's launches ask so too.
    stream = torch._C._cuda_getCurrentRawStream(device)
    backends.get(device).launch(kernel, template, grid, kernel.pack(values), stream)
