# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Which way of compiling the kernels is in use.

In this order, unless DS_FP4_KERNELS names one: the module built at install, nvcc through DeepSpeed's op builder, NVRTC
through CuPy. All give the same results from the same sources; if none can be had, the error says why of each. There is
no further one: CUDA tensors are never converted by slower code instead.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import warnings
from typing import Protocol

import torch

from ds_fp4.ops.kernels import KERNELS, THREADS, Kernel

KERNELS_ENV = "DS_FP4_KERNELS"
CHOICES = ("builder", "nvrtc")
MIN_CAPABILITY = (8, 0)

HOW_TO_FIX = (
    "Install nvcc of torch's CUDA version (NVIDIA's toolkit, with CUDA_HOME set; conda: cuda-nvcc; pip: "
    "nvidia-cuda-nvcc), or CuPy: pip install 'ds_fp4[cupy]'"
)


class Backend(Protocol):
    """Compiled kernels."""

    name: str

    def describe(self) -> str:
        """For people: which code is in use."""

    def prepare(self, device: int) -> None:
        """Load all kernels on the current device, number `device`; after this a launch loads nothing."""

    def launch(self, kernel: Kernel, template: str, grid: int, params: bytes, stream: int) -> None:
        """Launch on `stream` of the current device; RuntimeError with the kernel's name if CUDA refuses."""


class BuilderBackend:
    """The extension module, built at install or on first use."""

    name = "builder"

    def __init__(self) -> None:
        from ds_fp4.ops.builder import FP4Builder

        self._module = FP4Builder().load()
        self._launch = self._module.launch
        self._numbers = {name: number for number, name in enumerate(self._module.kernel_names())}

    def describe(self) -> str:
        return f"builder (nvcc): {self._module.__file__}"

    def prepare(self, device: int) -> None:
        self._module.load_all()

    def launch(self, kernel: Kernel, template: str, grid: int, params: bytes, stream: int) -> None:
        self._launch(self._numbers[f"{kernel.name}<{template}>"], grid, THREADS, params, stream)


_lock = threading.Lock()
_backend: Backend | None = None
_prepared: set[int] = set()


def get(device: int) -> Backend:
    """The backend, with all kernels loaded on the current device, which is number `device`.

    Raises:
        RuntimeError: as `load_kernels`.
    """
    if device not in _prepared:
        with _lock:
            _prepare(device)
    return _backend


def load_kernels(device: torch.device | int | None = None) -> None:
    """Compile and load all kernels for a CUDA device (default: the current one), as the first conversion would.

    Any number of processes and nodes may do so at once on one cache folder (DS_FP4_CACHE).

    Raises:
        RuntimeError: if kernels cannot be had: why, and what to do.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(f"ds_fp4's CUDA kernels need a GPU; torch {torch.__version__} sees none")
    with torch.cuda.device(device):
        get(torch.cuda.current_device())


def describe_kernels() -> str:
    """One line for people: the kernels in use, or what a first use would try."""
    if _backend is not None:
        return _backend.describe()
    if not torch.cuda.is_available():
        return "none needed: tensors on the host are converted by plain PyTorch"
    return f"not loaded yet; the first use will try {_choice() or ', then '.join(CHOICES)}"


def select(choice: str | None) -> Backend:
    """A new backend: the one called `choice`, else the first that can be had."""
    if choice == "builder":
        return _builder_backend()
    if choice == "nvrtc":
        return _nvrtc_backend()
    try:
        return _builder_backend()
    except Exception as error:
        builder_error = error
    if _nvcc_is_there() and importlib.util.find_spec("cupy") is not None:
        warnings.warn(f"ds_fp4: nvcc cannot build the kernels, NVRTC does instead: {builder_error}", stacklevel=2)
    try:
        return _nvrtc_backend()
    except Exception as error:
        raise RuntimeError(f"{builder_error}\n{error}") from builder_error


def _choice() -> str | None:
    choice = os.environ.get(KERNELS_ENV) or None
    if choice not in (None, *CHOICES):
        raise RuntimeError(f"{KERNELS_ENV} must be one of {', '.join(CHOICES)}, or unset, got {choice!r}")
    return choice


def _prepare(device: int) -> None:
    global _backend
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise RuntimeError(
            f"GPU {device} ({torch.cuda.get_device_name(device)}) has compute capability "
            f"{capability[0]}.{capability[1]}; ds_fp4's kernels need 8.0 (BF16 arithmetic) or later"
        )
    if _backend is None:
        _backend = select(_choice())
    _backend.prepare(device)
    _prepared.add(device)


def _builder_backend() -> Backend:
    try:
        return BuilderBackend()
    except Exception as error:
        raise RuntimeError(f"ds_fp4's CUDA kernels cannot be built with nvcc: {error}. {HOW_TO_FIX}.") from error


def _nvrtc_backend() -> Backend:
    try:
        from ds_fp4.ops.nvrtc import NvrtcBackend

        return NvrtcBackend(KERNELS.values())
    except Exception as error:
        raise RuntimeError(f"ds_fp4's CUDA kernels cannot be built with NVRTC: {error}. {HOW_TO_FIX}.") from error


def _nvcc_is_there() -> bool:
    from ds_fp4.ops.builder import nvcc_version

    return nvcc_version() is not None
