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

from ds_fp4.ops import conversions, fused, kernels, launching, routing

SHIM = Path(__file__).parent / "host_cuda"
SOURCES = (SHIM / "launch.cpp", kernels.CSRC / "kernels.cu", kernels.CSRC / "fused_kernels.cu")
PARAMS_BYTES = 1024  # HostCudaParams


class HostKernels:
    """Compiled kernels; `launch` has the signature of `launching.launch`.

    Attributes:
        numbers: by name of every instantiation.
        launched: names in the order of launches.
    """

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(str(self._compile(folder)))
        self._library.host_kernel_name.restype = ctypes.c_char_p
        self._library.host_launch.restype = ctypes.c_char_p
        self._library.host_kernel_params_bytes.restype = ctypes.c_size_t
        count = self._library.host_kernel_count()
        self.numbers = {self._library.host_kernel_name(i).decode(): i for i in range(count)}
        self.launched: list[str] = []

    @staticmethod
    def _compile(folder: Path) -> Path:
        compiler = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-fPIC", f"-I{SHIM}", f"-I{kernels.CSRC}"]
        flags = ["-fno-strict-aliasing", "-Wno-unknown-pragmas"]
        # A GPU faults on accesses that are not aligned to their size; here a signal ends the process.
        checks = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
        objects = [folder / f"{source.stem}.o" for source in SOURCES]
        jobs = [
            subprocess.Popen([*compiler, *flags, *checks, "-x", "c++", "-c", str(source), "-o", str(made)])
            for source, made in zip(SOURCES, objects, strict=True)
        ]
        assert [job.wait() for job in jobs] == [0] * len(jobs)
        library = folder / "host_kernels.so"
        subprocess.run([compiler[0], "-shared", *map(str, objects), "-o", str(library)], check=True)
        return library

    def launch(self, kernel, template: str, grid: int, values, device) -> None:
        name = f"{kernel.name}<{template}>"
        number, params = self.numbers[name], kernel.pack(values)
        assert self._library.host_kernel_params_bytes(number) == len(params), name
        # Every other launch from the last block and thread to the first, to find what two of them write to.
        self._library.host_set_backwards(len(self.launched) % 2)
        self.launched.append(name)
        error = self._library.host_launch(
            number, ctypes.c_uint(grid), ctypes.c_uint(kernels.THREADS), params.ljust(PARAMS_BYTES, b"\0")
        )
        if error:
            raise RuntimeError(f"{name}: {error.decode()}")

    def replace(self, monkeypatch) -> None:
        """Let `ds_fp4.ops` treat host tensors as those of a GPU with few multiprocessors."""
        for module in (launching, conversions):
            # Two blocks, so that warps take several tiles.
            monkeypatch.setattr(module, "grid_for", lambda threads, *_: min(-(-threads // kernels.THREADS), 2))
        for module in (fused, routing):
            monkeypatch.setattr(module, "multiprocessors", lambda device: 2)
            monkeypatch.setattr(module, "BLOCKS_PER_MULTIPROCESSOR", 2)
        for module in (conversions, fused, routing):
            monkeypatch.setattr(module, "on_gpu", lambda t: isinstance(t, torch.Tensor))
        for module in (launching, conversions, fused, routing):
            monkeypatch.setattr(module, "launch", self.launch)
