# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The CUDA kernels as one table, and the one way to launch them.

What the host must know of a kernel is here and nowhere else: its parameters (a struct of 64-bit fields in
csrc/<name>.cuh), its instantiations, its grid. The backends (`builder`, `nvrtc`) compile and launch by that name and
know nothing of any particular kernel.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CSRC = Path(__file__).parent / "csrc"

# Without --use_fast_math, which DeepSpeed's builder would add: nothing here may flush a subnormal.
NVCC_FLAGS = ("-O3", "-std=c++17")

THREADS, LANES = 256, 32  # kThreads, kLanes, csrc/row_tiles.cuh
TILE = (1, 1024)  # rows and values a warp takes at a time: 1, kTileValues
# Rows and values of a quad, csrc/row_quads.cuh: what kernels that write FP8 take at a time; what fp8_row_to_fp4_row
# takes, and where rows are whole tiles and all accesses are aligned. Its values a lane are a template argument.
FP8_QUAD, FP4_QUAD, WHOLE_FP4_QUAD = (8, 512), (4, 512), (2, 1024)
# Tiles of neighboring columns that fp8_row_to_fp8_row converts in all gathered rows before the next ones: 1024 bytes
# of each of 40,000 rows fit into the cache, from which a row that an index names again is then read.
GATHERED_STRIPE = 2
TILE_TOKENS = 128  # kTokens, csrc/column_tiles.cuh
# Tiles of 128 rows that follow each other before the next columns: their runs of 128 bytes lie side by side, and so do
# the pieces of a row that neighboring columns read. Where rows are gathered, all of them: what an index names again is
# then still in the cache, 128 or 256 columns of every row.
STRIP = 8
# Of a row that the kernels could not count within 31 bits, what is converted at a time: whole tiles, groups, blocks.
PART_VALUES = 1 << 30
LONGEST_ROW = (1 << 31) - 1
# Enough blocks for the slowest to hardly matter at the end, few enough for a warp to take several tiles.
BLOCKS_PER_MULTIPROCESSOR = 32
# The same for kernels that are faster when warps take one tile each, in order: those that write as much as they read,
# or more. Nearly every launch is that small; what remains goes by grid strides, within warps' 32-bit numbers.
BLOCKS_OF_ONE_TILE = 1024

ROWS = ("rows", "width", "input_rows", "index", "tiles_a_row")  # struct Rows, csrc/row_tiles.cuh
# struct Columns, csrc/column_tiles.cuh
COLUMNS = ("width", "rows", "input_rows", "index", "group_sizes", "groups", "tiles", "column_tiles", "strip")
SCALES = ("base", "row_stride", "group_stride", "bytes", "lowest")  # struct Scales, csrc/scales.cuh
VALUE_TYPES = {torch.bfloat16: "Bf16", torch.float16: "Fp16", torch.float32: "Fp32"}
# The first template argument by what the kernel converts from or to: a value type, or a type of FP8 scales.
VALUES = {dtype: (name,) for dtype, name in VALUE_TYPES.items()}
SOURCE_SCALES = {torch.float32: ("true",), torch.uint8: ("false",)}
_VECTOR = ("true", "false")
_VALUES_AND_VECTOR = tuple(f"{value}, {vector}" for value in VALUE_TYPES.values() for vector in _VECTOR)
_FP32_AND_VECTOR = tuple(f"{fp32}, {vector}" for fp32 in _VECTOR for vector in _VECTOR)


@dataclass(frozen=True)
class Kernel:
    """A `__global__` function template in csrc/<name>.cuh.

    Attributes:
        name: of the header, the function and the call.
        params: fields of struct <name>_params, in order, each 64 bits wide.
        instantiations: template arguments, as text.
        tile: what a warp (row kernels) or a block (column kernels) takes at a time: rows, values; None where the call
            works out its own grid.
        whole_tile: the same, where a row is whole tiles and all accesses are aligned.
        blocks: at most so many a multiprocessor, of kernels that go over tiles in grid strides.
        shared_bytes: of dynamic shared memory.
    """

    name: str
    params: tuple[str, ...]
    instantiations: tuple[str, ...]
    tile: tuple[int, int] | None = None
    whole_tile: tuple[int, int] | None = None
    blocks: int = BLOCKS_PER_MULTIPROCESSOR
    shared_bytes: int = 0

    @functools.cached_property
    def packing(self) -> struct.Struct:
        return struct.Struct(f"{len(self.params)}q")


def _pointers(*names: str) -> Iterator[str]:
    """Each with its row stride."""
    for name in names:
        yield from (name, f"{name}_stride")


def _scales(name: str) -> tuple[str, ...]:
    return tuple(f"{name}_{field}" for field in SCALES)


def _row_kernel(name: str, *params: str, blocks: int = BLOCKS_PER_MULTIPROCESSOR) -> Kernel:
    return Kernel(name, (*ROWS, *params), _VALUES_AND_VECTOR, TILE, blocks=blocks)


def _to_fp8_quad_kernel(name: str, instantiations: tuple[str, ...], *params: str) -> Kernel:
    return Kernel(name, (*ROWS, *params), instantiations, FP8_QUAD, blocks=BLOCKS_OF_ONE_TILE)


def _column_kernel(name: str, instantiations: tuple[str, ...], columns: int, *params: str) -> Kernel:
    return Kernel(name, (*COLUMNS, *params), instantiations, (TILE_TOKENS, columns))


# ---- fused_kernels.cu ----

CHUNK_VALUES = 512  # of a row that a warp takes at a time: kForwardSteps, kCombineSteps times 256
LONG_CHUNK_VALUES = 1024  # combine_rows<LONG_CHUNKS>
LONG_CHUNKS = "Mxfp4Rows, Bf16Rows, false, true"
GATHER_UNITS = 4 * THREADS  # kGatherSteps, csrc/gather_rows.cuh
_ACTIVATIONS = ("Swiglu", "SwigluClamped", "SwigluOai", "GegluTanh")
_STORED_ROWS = ("Bf16Rows", "Mxfp4Rows", "Fp8Rows")

_FUSED_KERNELS = (
    Kernel(
        "swiglu_forward",
        (
            "rows", "width", "chunks_a_row", "gate_up", "gate_up_stride", "weights", "alpha", "limit", "q", "q_stride",
            "scales", "scales_stride", "scales_group_stride", "lowest_scale", "saved", "saved_stride", "saved_scales",
            "saved_scales_stride", "rounding",
        ),
        tuple(f"{a}, {saved}" for a in _ACTIVATIONS for saved in ("Mxfp4Rows", "Fp8Rows", "NoRows")),
    ),
    Kernel(
        "swiglu_backward",
        (
            "rows", "width", "group_sizes", "groups", "padded_input", "tiles", "dh", "dh_stride", "weights", "gate_up",
            "gate_up_stride", "up_offset", "gate_up_scales", "gate_up_scales_stride", "up_scales_offset", "alpha",
            "limit", "lowest_scale", "row", "row_stride", "row_scales", "row_scales_stride",
            "row_scales_group_stride", "col", "col_scales", "col_scales_stride", "col_scales_tile_stride", "h_col",
            "h_col_scales", "h_col_scales_stride", "h_col_scales_tile_stride", "partial",
        ),
        tuple(f"{a}, {saved}" for a in _ACTIVATIONS for saved in ("Mxfp4Rows", "Fp8Rows", "Bf16Rows")),
        shared_bytes=59136,  # kSwigluBackwardSharedBytes
    ),
    Kernel("sum_partials", ("rows", "parts", "partial", "out"), ("8",)),
    Kernel(
        "gather_rows",
        ("rows", "row_units", "input_rows", "index", "records", "records_stride", "out", "out_stride"),
        ("16", "4", "1"),
    ),
    Kernel(
        "combine_rows",
        (
            "rows", "width", "chunks_a_row", "input_rows", "offsets", "list_entries", "indices", "weights", "x",
            "x_stride", "x_scales", "x_scales_stride", "x_scale_bytes", "out", "out_stride", "out_scales",
            "out_scales_stride", "out_scale_bytes", "rounding",
        ),
        tuple(
            f"{rows}, {out}, {weighted}, {vector}"
            for rows, out, weighted, vector in itertools.product(
                _STORED_ROWS, _STORED_ROWS, ("false", "true"), ("true", "false")
            )
        ),
    ),
)  # fmt: skip

_SEND_IDS = ("SendIds4", "SendIds8")

_ROUTING_KERNELS = (
    Kernel(
        "route_count",
        ("rows", "k", "ids", "ids_stride", "local_experts", "experts", "counts_a_block", "counts"),
        (*_SEND_IDS, "ReceivedIds"),
    ),
    Kernel(
        "route_send",
        (
            "rows", "k", "ids", "ids_stride", "local_experts", "ranks", "counts", "tokens", "most_records", "records",
            "table",
        ),
        _SEND_IDS,
    ),
    Kernel(
        "route_receive",
        (
            "rows", "k", "ids", "weights", "stride", "local_experts", "counts", "padded_rows", "order", "row_weights",
            "m_indices", "group_sizes", "padded_offsets", "places",
        ),
        ("128",),
    ),
    Kernel(
        "pack_routing",
        (
            "rows", "k", "ids", "ids_stride", "scores", "scores_stride", "local_experts", "input_rows", "tokens",
            "records", "weights_out", "ids_out", "out_stride",
        ),
        _SEND_IDS,
    ),
    Kernel("gather_gradients", ("rows", "k", "input_rows", "gradients", "places", "out", "out_stride"), ("1",)),
    Kernel(
        "return_gradients",
        (
            "rows", "k", "ids", "ids_stride", "local_experts", "input_rows", "records", "gradients",
            "gradients_stride", "out",
        ),
        _SEND_IDS,
    ),
)  # fmt: skip

# ---- all ----

KERNELS: Mapping[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        _row_kernel("bf16_to_fp4_row", *_pointers("x", "packed", "scales"), "rounding"),
        _row_kernel("fp4_row_to_bf16", *_pointers("packed", "scales", "out"), blocks=BLOCKS_OF_ONE_TILE),
        _row_kernel("bf16_to_fp8_row", *_pointers("x", "q"), *_scales("scales")),
        _row_kernel(
            "fp8_row_to_bf16", *_pointers("q", "scales", "out"), "scale_bytes", blocks=BLOCKS_OF_ONE_TILE
        ),
        _to_fp8_quad_kernel(
            "fp4_row_to_fp8_row", _VECTOR, *_pointers("packed", "block_scales", "q"), *_scales("scales")
        ),
        Kernel(
            "fp8_row_to_fp4_row",
            (*ROWS, *_pointers("q", "group_scales", "packed", "scales"), "rounding"),
            tuple(f"{fp32}, {rest}" for fp32 in _VECTOR for rest in ("32, true", "16, true", "16, false")),
            FP4_QUAD,
            WHOLE_FP4_QUAD,
        ),
        _to_fp8_quad_kernel(
            "fp8_row_to_fp8_row", _FP32_AND_VECTOR,
            *_pointers("source", "source_scales", "q"), *_scales("scales"), "stripe",
        ),
        _column_kernel(
            "fp4_row_to_fp8_col", _VECTOR, 256, *_pointers("packed", "block_scales"), "q", *_scales("scales")
        ),
        _column_kernel(
            "fp8_row_to_fp8_col", _FP32_AND_VECTOR, 128,
            *_pointers("source", "source_scales"), "q", *_scales("scales"),
        ),
        _column_kernel(
            "bf16_to_fp8_row_and_col", _VALUES_AND_VECTOR, 128,
            *_pointers("x", "row_q"), *_scales("row_scales"), "q", *_scales("scales"),
        ),
        Kernel(
            "weight_to_fp8",
            (
                "rows", "width", "first_rows", "row_tiles", "column_tiles",
                "w1", "w3", "expert_stride", "row_stride", "q", "scales", "q_t", "scales_t",
            ),
            _VALUES_AND_VECTOR,
            (TILE_TOKENS, 128),
        ),
        Kernel(
            "split_weight_gradient",
            ("tiles", "tiles_a_half", "half_units", "gradient", "g1", "g3"),
            ("",),
            (1, 8192),
        ),
        *_FUSED_KERNELS,
        *_ROUTING_KERNELS,
    )
}  # fmt: skip


@functools.cache
def sources_hash() -> str:
    """Hash of everything in csrc/."""
    digest = hashlib.sha256()
    for path in sorted(CSRC.iterdir()):
        if path.suffix in (".cuh", ".cu", ".cpp", ".h"):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def row_stride(t: torch.Tensor) -> int:
    """Bytes from row to row, which kernels take for less than 2^31."""
    stride = t.stride(0) * t.element_size()
    return below_2_31("a row stride in bytes", stride) if t.shape[0] > 1 else 0


def below_2_31(name: str, value: int) -> int:
    if value >= 1 << 31:
        raise ValueError(f"the kernels take {name} below 2^31, got {value}; convert in parts")
    return value


def aligned(t: torch.Tensor, unit_bytes: int) -> bool:
    """Whether every unit of `unit_bytes` of every row may be accessed whole (in pieces of 16 bytes at most)."""
    alignment = min(unit_bytes, 16)
    return t.data_ptr() % alignment == 0 and (t.dim() == 1 or t.shape[0] <= 1 or row_stride(t) % alignment == 0)


def scales_values(name: str, scales: torch.Tensor, lowest: int) -> dict[str, int]:
    """Parameters for a struct Scales: where to write scales [rows, groups] of any strides.

    Args:
        lowest: biased exponent (by 127) that scales must not fall below.
    """
    itemsize = scales.element_size()
    strides = [below_2_31("a scale stride in bytes", stride * itemsize) for stride in scales.stride()]
    values = (scales.data_ptr(), *strides, itemsize, lowest)
    return dict(zip(_scales(name), values, strict=True))


def _addresses(values: dict[str, int], units: Mapping[str, tuple[torch.Tensor, int]]) -> bool:
    """Add pointers and row strides to `values`; whether all units may be accessed whole."""
    vector = True
    for parameter, (tensor, unit_bytes) in units.items():
        values[parameter] = tensor.data_ptr()
        if tensor.dim() > 1:
            values[f"{parameter}_stride"] = row_stride(tensor)
        vector = vector and aligned(tensor, unit_bytes)
    return vector


def grid_for(threads: int, kernel: Kernel, device: int) -> int:
    """Blocks for a kernel that goes over its work in grid strides."""
    return min(-(-threads // THREADS), multiprocessors(device) * kernel.blocks)


def row_parts(
    width: int, index: torch.Tensor | None, *tensors: tuple[torch.Tensor, int]
) -> Iterator[tuple[torch.Tensor, ...]]:
    """What a row kernel is to convert at a time: everything, or pieces of single rows where rows are too long for it,
    or too far apart.

    Args:
        width: values a row. index: the call's.
        tensors: [rows, ...] of inputs and outputs, each with the values of a row that one element stands for.

    Raises:
        ValueError: such rows are not gathered.
    """
    # Longer rows, or rows whose bytes are (of BF16 from half as many values on).
    if width <= LONGEST_ROW and all(t.shape[0] <= 1 or t.stride(0) * t.itemsize <= LONGEST_ROW for t, _ in tensors):
        yield tuple(t for t, _ in tensors)
        return
    if index is not None:
        raise ValueError(
            f"an index gathers rows of up to {LONGEST_ROW} values, as many bytes apart, got {width} values; convert "
            "without an index"
        )
    for row in range(tensors[0][0].shape[0]):
        for first in range(0, width, PART_VALUES):
            last = min(first + PART_VALUES, width)
            yield tuple(t[row : row + 1, first // values : -(-last // values)] for t, values in tensors)


def launch_rows(
    name: str,
    arguments: tuple[str, ...],
    rows: int,
    width: int,
    input_rows: int,
    index: torch.Tensor | None,
    units: Mapping[str, tuple[torch.Tensor, int]],
    unit: int = 8,
    **values: int,
) -> None:
    """Launch a row kernel on the current stream of the tensors' device.

    Args:
        name: a key of KERNELS.
        arguments: of the template, but the last, kVector, and a lane's values where there is a whole tile.
        rows: output rows. width: values a row. input_rows: rows that `index` may name.
        index: int32 [rows] or None.
        units: by parameter, the tensors accessed in units of `unit` values, and the bytes of one unit.
        values: the kernel's other parameters.

    Raises:
        RuntimeError: with the kernel's name, if the kernels cannot be loaded or CUDA refuses the launch.
    """
    if rows == 0:
        return
    kernel = KERNELS[name]
    tile_rows, tile_values = kernel.tile
    if kernel.whole_tile is not None:
        longer = kernel.whole_tile[1] // tile_values
        if width % kernel.whole_tile[1] == 0 and all(aligned(t, longer * size) for t, size in units.values()):
            tile_rows, tile_values = kernel.whole_tile
        arguments = (*arguments, str(tile_values // LANES))
    below_2_31("rows", max(rows, input_rows))
    below_2_31("values in a row", width)
    tiles_a_row = -(-width // tile_values)
    values |= {
        "rows": rows,
        "width": width,
        "input_rows": input_rows,
        "index": 0 if index is None else index.data_ptr(),
        "tiles_a_row": tiles_a_row,
    }
    vector = _addresses(values, units) and width % unit == 0
    device = next(iter(units.values()))[0].device.index
    warps = -(-rows // tile_rows) * tiles_a_row
    launch(kernel, _template(arguments, vector), grid_for(LANES * warps, kernel, device), values, device)


def launch_columns(
    name: str,
    arguments: tuple[str, ...],
    width: int,
    input_rows: int,
    index: torch.Tensor | None,
    group_sizes: torch.Tensor,
    padded_rows: int,
    units: Mapping[str, tuple[torch.Tensor, int]],
    unit: int,
    **values: int,
) -> None:
    """Launch a column kernel: one block a tile of 128 rows by `kernel.tile[1]` columns. Arguments as of `launch_rows`.

    Args:
        group_sizes: int32 [E]. padded_rows: their sum, each rounded up to 128.
    """
    if padded_rows == 0:
        return
    kernel = KERNELS[name]
    below_2_31("rows", max(padded_rows, input_rows))
    below_2_31("values in a row", width)
    tiles, column_tiles = padded_rows // TILE_TOKENS, -(-width // kernel.tile[1])
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
    }
    vector = _addresses(values, units) and width % unit == 0
    launch(kernel, _template(arguments, vector), tiles * column_tiles, values, group_sizes.device.index)


def launch_blocks(
    name: str, arguments: tuple[str, ...], blocks: int, device: int, vector: bool | None = None, **values: int
) -> None:
    """Launch any kernel on the current stream of `device`.

    Args:
        vector: the template's last argument; None if it has none.
        values: all of its parameters.
    """
    if blocks:
        template = ", ".join(arguments) if vector is None else _template(arguments, vector)
        launch(KERNELS[name], template, blocks, values, device)


def _template(arguments: tuple[str, ...], vector: bool) -> str:
    return ", ".join([*arguments, "true" if vector else "false"])


def launch(kernel: Kernel, template: str, grid: int, values: Mapping[str, int], device: int) -> None:
    """Launch one instantiation on the current stream of `device`, which need not be the current one."""
    from ds_fp4.ops import backends

    params = kernel.packing.pack(*[values[name] for name in kernel.params])
    if device == torch.cuda.current_device():
        backends.get(device).launch(kernel, template, grid, params, torch.cuda.current_stream(device).cuda_stream)
    else:
        with torch.cuda.device(device):
            backends.get(device).launch(kernel, template, grid, params, torch.cuda.current_stream(device).cuda_stream)
