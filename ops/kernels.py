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
    """

    name: str
    params: tuple[str, ...]
    instantiations: tuple[str, ...] = _ROW_INSTANTIATIONS

    @functools.cached_property
    def packing(self) -> struct.Struct:
        return struct.Struct(f"{len(self.params)}q")


def _pointers(*names: str) -> Iterator[str]:
    """Each with its row stride."""
    for name in names:
        yield from (name, f"{name}_stride")


def _row_kernel(name: str, *params: str) -> Kernel:
    return Kernel(name, (*ROWS, *params))


KERNELS: Mapping[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        _row_kernel("bf16_to_fp4_row", *_pointers("x", "packed", "scales"), "rounding"),
        _row_kernel("fp4_row_to_bf16", *_pointers("packed", "scales", "out")),
        _row_kernel("bf16_to_fp8_row", *_pointers("x", "q", "scales"), "scale_bytes"),
        _row_kernel("fp8_row_to_bf16", *_pointers("q", "scales", "out"), "scale_bytes"),
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
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _row_stride(t: torch.Tensor) -> int:
    """Bytes from row to row."""
    return t.stride(0) * t.element_size()


def _aligned(t: torch.Tensor, unit_bytes: int) -> bool:
    """Whether every unit of `unit_bytes` of every row may be accessed whole (in pieces of 16 bytes at most)."""
    alignment = min(unit_bytes, 16)
    return t.data_ptr() % alignment == 0 and (t.shape[0] <= 1 or _row_stride(t) % alignment == 0)


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
        "scales_stride": _row_stride(scales),
        **scalars,
    }
    vector = width % 8 == 0
    for parameter, (tensor, unit_bytes) in units.items():
        values[parameter] = tensor.data_ptr()
        values[f"{parameter}_stride"] = _row_stride(tensor)
        vector = vector and _aligned(tensor, unit_bytes)
    device = scales.device.index
    blocks = -(-rows * tiles_a_row // (THREADS // 32))
    grid = min(blocks, _multiprocessors(device) * BLOCKS_PER_MULTIPROCESSOR)
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
