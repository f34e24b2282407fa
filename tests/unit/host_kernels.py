# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The CUDA kernels on the host: `ds_fp4.ops` calls run the kernels' sources, made by the host's compiler.

See host_cuda/cuda_runtime.h for how, and for what it cannot show.
"""

import ctypes
import os
import subprocess
from pathlib import Path

import torch

from ds_fp4 import ops
from ds_fp4.ops import conversions, kernels, launching

CSRC = Path(ops.__file__).parent / "csrc"
SHIM = Path(__file__).parent / "host_cuda"
PARAMS_BYTES = 1024  # HostCudaParams


class HostKernels:
    """Compiled kernels; `launch` has the signature of `launching.launch`."""

    def __init__(self, folder: Path) -> None:
        path = folder / "host_kernels.so"
        compiler = os.environ.get("CXX", "g++")
        flags = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
        # A GPU faults on accesses that are not aligned to their size; here a signal ends the process.
        checks = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
        command = [compiler, *flags, *checks, f"-I{SHIM}", f"-I{CSRC}", str(SHIM / "launch.cpp"), "-o", str(path)]
        subprocess.run(command, check=True)
        self._library = ctypes.CDLL(str(path))
        self._library.host_kernel_name.restype = ctypes.c_char_p
        self._library.host_launch.restype = ctypes.c_size_t
        count = self._library.host_kernel_count()
        self.numbers = {self._library.host_kernel_name(i).decode(): i for i in range(count)}
        self.launched: list[str] = []

    def launch(self, kernel, template: str, grid: int, values, device) -> None:
        name = f"{kernel.name}<{template}>"
        # Every other launch from the last block and thread to the first, to find what two of them write to.
        self._library.host_set_backwards(len(self.launched) % 2)
        params = kernel.pack(values)
        used = self._library.host_launch(
            self.numbers[name], ctypes.c_uint(grid), ctypes.c_uint(kernels.THREADS), params.ljust(PARAMS_BYTES, b"\0")
        )
        assert used == len(params), name
        self.launched.append(name)

    def replace(self, monkeypatch) -> None:
        """Let `ds_fp4.ops` treat host tensors as a GPU's."""
        for module in (launching, conversions):
            monkeypatch.setattr(module, "launch", self.launch)
            # Two blocks, so that warps take several tiles.
            monkeypatch.setattr(module, "grid_for", lambda threads, *_: min(-(-threads // kernels.THREADS), 2))
        monkeypatch.setattr(conversions, "on_gpu", lambda t: isinstance(t, torch.Tensor))
