# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The CUDA kernels as one table.

What the host must know of a kernel is here and nowhere else: its parameters (a struct of 64-bit fields in
csrc/<name>.cuh), its instantiations, its tiles. The backends (`builder`, `nvrtc`) compile and launch by that name and
know nothing of any particular kernel; `launching` knows what kernels over rows have in common.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

CSRC = Path(__file__).parent / "csrc"

# Without --use_fast_math, which DeepSpeed's builder would add: nothing here may flush a subnormal.
NVCC_FLAGS = ("-O3", "-std=c++17")

MXFP4_BLOCK, FP8_GROUP = 32, 128  # those of ds_fp4.formats, which need not be there where an installation builds
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
# Of kernels from rows to columns, whether 128 columns share a scale.
SHARED_SCALES = {"blocks": ("true",), "gemm": ("false",), "row": ("false",)}
_VECTOR = ("true", "false")
_VALUES_AND_VECTOR = tuple(f"{value}, {vector}" for value in VALUE_TYPES.values() for vector in _VECTOR)
_FLAG_AND_VECTOR = tuple(f"{flag}, {vector}" for flag in _VECTOR for vector in _VECTOR)


class Operand(NamedTuple):
    """A tensor [rows, ...] of a kernel over rows, which takes its address and the bytes from row to row.

    Attributes:
        pointer, stride: the two parameters.
        values: of a row that one element stands for.
        unit: elements that are accessed at a time, where they may; 0 for scales, which are taken one by one.
    """

    pointer: str
    stride: str
    values: int
    unit: int


@dataclass(frozen=True)
class Kernel:
    """A `__global__` function template in csrc/<name>.cuh.

    Attributes:
        name: of the header, the function and the call.
        params: fields of struct <name>_params, in order, each 64 bits wide.
        instantiations: template arguments, as text.
        operands: of kernels over rows, what `launching` finds addresses and strides of.
        unit: values of a row that they take at a time, where they may.
        tile: what a warp (row kernels) or a block (column kernels) takes at a time: rows, values; None where the call
            works out its own grid.
        whole_tile: the same, where a row is whole tiles and all accesses are aligned.
        blocks: at most so many a multiprocessor, of kernels that go over tiles in grid strides.
        shared_bytes: of dynamic shared memory.
    """

    name: str
    params: tuple[str, ...]
    instantiations: tuple[str, ...]
    operands: tuple[Operand, ...] = ()
    unit: int = 1
    tile: tuple[int, int] | None = None
    whole_tile: tuple[int, int] | None = None
    blocks: int = BLOCKS_PER_MULTIPROCESSOR
    shared_bytes: int = 0

    @functools.cached_property
    def packing(self) -> struct.Struct:
        return struct.Struct(f"{len(self.params)}q")

    @functools.cached_property
    def in_order(self) -> Callable[[Mapping[str, int]], tuple[int, ...]]:
        """The parameters' values in the struct's order, from those by name."""
        return operator.itemgetter(*self.params)

    def pack(self, values: Mapping[str, int]) -> bytes:
        """The struct, from all parameters' values by name."""
        return self.packing.pack(*self.in_order(values))


def _operands(unit: int, values: Mapping[str, int]) -> tuple[Operand, ...]:
    """By name, how many values of a row an element stands for; `unit` as in Kernel."""
    return tuple(Operand(name, f"{name}_stride", count, unit // count) for name, count in values.items())


def _addresses(operands: Iterable[str]) -> tuple[str, ...]:
    """Each with its row stride."""
    return tuple(field for name in operands for field in (name, f"{name}_stride"))


def _scales(name: str) -> tuple[str, ...]:
    return tuple(f"{name}_{field}" for field in SCALES)


def _row_kernel(
    name: str, operands: Mapping[str, int], *params: str, blocks: int = BLOCKS_PER_MULTIPROCESSOR
) -> Kernel:
    params = (*ROWS, *_addresses(operands), *params)
    return Kernel(name, params, _VALUES_AND_VECTOR, _operands(8, operands), 8, TILE, blocks=blocks)


def _quad_kernel(
    name: str,
    instantiations: tuple[str, ...],
    operands: Mapping[str, int],
    *params: str,
    quad: tuple[int, int] = FP8_QUAD,
    whole_quad: tuple[int, int] | None = None,
    blocks: int = BLOCKS_OF_ONE_TILE,
) -> Kernel:
    params = (*ROWS, *_addresses(operands), *params)
    return Kernel(name, params, instantiations, _operands(16, operands), 16, quad, whole_quad, blocks)


def _column_kernel(
    name: str, instantiations: tuple[str, ...], unit: int, columns: int, operands: Mapping[str, int], *params: str
) -> Kernel:
    params = (*COLUMNS, *_addresses(operands), *params, "q", *_scales("scales"))
    return Kernel(name, params, instantiations, _operands(unit, operands), unit, (TILE_TOKENS, columns))


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
        _row_kernel("bf16_to_fp4_row", {"x": 1, "packed": 2, "scales": MXFP4_BLOCK}, "rounding"),
        _row_kernel("fp4_row_to_bf16", {"packed": 2, "scales": MXFP4_BLOCK, "out": 1}, blocks=BLOCKS_OF_ONE_TILE),
        _row_kernel("bf16_to_fp8_row", {"x": 1, "q": 1}, *_scales("scales")),
        _row_kernel(
            "fp8_row_to_bf16", {"q": 1, "scales": FP8_GROUP, "out": 1}, "scale_bytes", blocks=BLOCKS_OF_ONE_TILE
        ),
        _quad_kernel(
            "fp4_row_to_fp8_row", _VECTOR, {"packed": 2, "block_scales": MXFP4_BLOCK, "q": 1}, *_scales("scales")
        ),
        _quad_kernel(
            "fp8_row_to_fp4_row",
            tuple(f"{fp32}, {rest}" for fp32 in _VECTOR for rest in ("32, true", "16, true", "16, false")),
            {"q": 1, "group_scales": FP8_GROUP, "packed": 2, "scales": MXFP4_BLOCK},
            "rounding",
            quad=FP4_QUAD,
            whole_quad=WHOLE_FP4_QUAD,
            blocks=BLOCKS_PER_MULTIPROCESSOR,
        ),
        _quad_kernel(
            "fp8_row_to_fp8_row", _FLAG_AND_VECTOR, {"source": 1, "source_scales": FP8_GROUP, "q": 1},
            *_scales("scales"), "stripe",
        ),
        _column_kernel(
            "fp4_row_to_fp8_col", _FLAG_AND_VECTOR, 8, 256, {"packed": 2, "block_scales": MXFP4_BLOCK}
        ),
        _column_kernel(
            "fp8_row_to_fp8_col",
            tuple(f"{fp32}, {rest}" for fp32 in _VECTOR for rest in _FLAG_AND_VECTOR),
            4,
            128,
            {"source": 1, "source_scales": FP8_GROUP},
        ),
        _column_kernel(
            "bf16_to_fp8_row_and_col", _VALUES_AND_VECTOR, 4, 128, {"x": 1, "row_q": 1}, *_scales("row_scales")
        ),
        Kernel(
            "weight_to_fp8",
            (
                "rows", "width", "first_rows", "row_tiles", "column_tiles",
                "w1", "w3", "expert_stride", "row_stride", "q", "scales", "q_t", "scales_t",
            ),
            _VALUES_AND_VECTOR,
            tile=(TILE_TOKENS, 128),
        ),
        Kernel(
            "split_weight_gradient",
            ("tiles", "tiles_a_half", "half_units", "gradient", "g1", "g3"),
            ("",),
            tile=(1, 8192),
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
