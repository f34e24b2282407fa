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

THREADS = 256  # kThreads, csrc/row_tiles.cuh
TILE_VALUES = 1024  # kTileValues
# Enough blocks for the slowest to hardly matter at the end, few enough for a warp to take several tiles.
BLOCKS_PER_MULTIPROCESSOR = 32

ROWS = ("rows", "width", "input_rows", "index", "tiles_a_row")  # struct Rows, csrc/row_tiles.cuh
VALUE_TYPES = {torch.bfloat16: "Bf16", torch.float16: "Fp16", torch.float32: "Fp32"}
_ROW_INSTANTIATIONS = tuple(f"{value}, {vector}" for value in VALUE_TYPES.values() for vector in ("true", "false"))


@dataclass(frozen=True)
class Kernel:
    """A `__global__` function template in csrc/<name>.cuh.

    Attributes:
        name: of the header, the function and the call.
        params: fields of struct <name>_params, in order, each 64 bits wide.
        instantiations: template arguments, as text.
        shared_bytes: of dynamic shared memory.
    """

    name: str
    params: tuple[str, ...]
    instantiations: tuple[str, ...] = _ROW_INSTANTIATIONS
    shared_bytes: int = 0

    @functools.cached_property
    def packing(self) -> struct.Struct:
        return struct.Struct(f"{len(self.params)}q")


def _pointers(*names: str) -> Iterator[str]:
    """Each with its row stride."""
    for name in names:
        yield from (name, f"{name}_stride")


def _row_kernel(name: str, *params: str) -> Kernel:
    return Kernel(name, (*ROWS, *params))


# ---- fused_kernels.cu ----

CHUNK_VALUES = 512  # kChunkValues, csrc/stored_rows.cuh
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
            "rows", "k", "ids", "ids_stride", "scores", "scores_stride", "local_experts", "tokens", "records",
            "weights_out", "ids_out", "out_stride",
        ),
        _SEND_IDS,
    ),
    Kernel("gather_gradients", ("rows", "k", "gradients", "places", "out", "out_stride"), ("1",)),
    Kernel(
        "return_gradients",
        ("rows", "k", "ids", "ids_stride", "local_experts", "records", "gradients", "gradients_stride", "out"),
        _SEND_IDS,
    ),
)  # fmt: skip

# ---- all ----

KERNELS: Mapping[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        _row_kernel("bf16_to_fp4_row", *_pointers("x", "packed", "scales"), "rounding"),
        _row_kernel("fp4_row_to_bf16", *_pointers("packed", "scales", "out")),
        _row_kernel("bf16_to_fp8_row", *_pointers("x", "q", "scales"), "scale_bytes"),
        _row_kernel("fp8_row_to_bf16", *_pointers("q", "scales", "out"), "scale_bytes"),
        *_FUSED_KERNELS,
        *_ROUTING_KERNELS,
    )
}


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
    """Bytes from row to row."""
    return t.stride(0) * t.element_size()


def aligned(t: torch.Tensor, unit_bytes: int) -> bool:
    """Whether every unit of `unit_bytes` of every row may be accessed whole (in pieces of 16 bytes at most)."""
    alignment = min(unit_bytes, 16)
    return t.data_ptr() % alignment == 0 and (t.shape[0] <= 1 or row_stride(t) % alignment == 0)


def launch_rows(
    name: str,
    value_type: torch.dtype,
    rows: int,
    width: int,
    input_rows: int,
    index: torch.Tensor | None,
    units: Mapping[str, tuple[torch.Tensor, int]],
    scales: torch.Tensor,
    **scalars: int,
) -> None:
    """Launch a row kernel on the current stream of the tensors' device.

    Args:
        name: a key of KERNELS.
        value_type: BF16, FP16 or FP32, the side that is not packed.
        rows: output rows. width: values a row. input_rows: rows that `index` may name.
        index: int32 [rows] or None.
        units: by parameter, the tensors accessed in units of eight values, and the bytes of eight.
        scales: accessed one by one.
        scalars: the kernel's other parameters.

    Raises:
        RuntimeError: with the kernel's name, if the kernels cannot be loaded or CUDA refuses the launch.
    """
    if rows == 0:
        return
    tiles_a_row = -(-width // TILE_VALUES)
    values = {
        "rows": rows,
        "width": width,
        "input_rows": input_rows,
        "index": 0 if index is None else index.data_ptr(),
        "tiles_a_row": tiles_a_row,
        "scales": scales.data_ptr(),
        "scales_stride": row_stride(scales),
        **scalars,
    }
    vector = width % 8 == 0
    for parameter, (tensor, unit_bytes) in units.items():
        values[parameter] = tensor.data_ptr()
        values[f"{parameter}_stride"] = row_stride(tensor)
        vector = vector and aligned(tensor, unit_bytes)
    device = scales.device.index
    blocks = -(-rows * tiles_a_row // (THREADS // 32))
    grid = min(blocks, multiprocessors(device) * BLOCKS_PER_MULTIPROCESSOR)
    template = f"{VALUE_TYPES[value_type]}, {'true' if vector else 'false'}"
    launch(KERNELS[name], template, grid, values, device)


def launch(kernel: Kernel, template: str, grid: int, values: Mapping[str, int], device: int) -> None:
    """Launch one instantiation on the current stream of `device`, which need not be the current one."""
    from ds_fp4.ops import backends

    params = kernel.packing.pack(*[values[name] for name in kernel.params])
    if device == torch.cuda.current_device():
        backends.get(device).launch(kernel, template, grid, params, torch.cuda.current_stream(device).cuda_stream)
    else:
        with torch.cuda.device(device):
            backends.get(device).launch(kernel, template, grid, params, torch.cuda.current_stream(device).cuda_stream)
