# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The kernels through NVRTC and CuPy: for nodes with a driver and no nvcc.

A header is compiled with all its instantiations at once; the result is kept in the cache folder like the builder's.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import threading
from collections.abc import Iterable
from pathlib import Path

import torch

from ds_fp4.ops import cache
from ds_fp4.ops.kernels import CSRC, THREADS, Kernel, sources_hash

OPTIONS = ("--std=c++17", f"--include-path={CSRC}")
NAMESPACE = "ds_fp4::"

DEFAULT_SHARED_BYTES = 48 << 10  # what a block may have without asking
_MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def _expression(kernel: Kernel, template: str) -> str:
    """The instantiation as C++ names it outside of the namespace."""
    arguments = ", ".join(NAMESPACE + arg if arg[:1].isupper() else arg for arg in template.split(", "))
    return f"{NAMESPACE}{kernel.name}<{arguments}>"


def target(capability: tuple[int, int]) -> str:
    """NVRTC's name for what to compile for: Hopper's own features, or the newest it knows (as PTX) for a newer GPU."""
    from cupy.cuda import nvrtc

    number = 10 * capability[0] + capability[1]
    supported = sorted(nvrtc.getSupportedArchs())
    if number in supported:
        return "sm_90a" if number == 90 else f"sm_{number}"
    older = [arch for arch in supported if arch < number]
    if not older:
        raise RuntimeError(f"NVRTC {nvrtc.getVersion()} cannot make code for compute capability {capability}")
    return f"compute_{older[-1]}"


def compile_kernel(kernel: Kernel, architecture: str) -> tuple[dict[str, str], bytes]:
    """Compile all instantiations of a kernel.

    Args:
        architecture: "sm_90a" for machine code, "compute_90" for PTX.

    Returns:
        Mangled names by template arguments; the cubin or PTX.

    Raises:
        RuntimeError: with the kernel's name and the compiler's output.
    """
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(f'#include "{kernel.name}.cuh"\n', f"{kernel.name}.cu", (), ())
    try:
        for template in kernel.instantiations:
            nvrtc.addNameExpression(program, _expression(kernel, template))
        try:
            nvrtc.compileProgram(program, (*OPTIONS, f"--gpu-architecture={architecture}"))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise RuntimeError(f"NVRTC cannot compile {kernel.name} for {architecture}: {error}\n{log}") from error
        names = {t: nvrtc.getLoweredName(program, _expression(kernel, t)) for t in kernel.instantiations}
        code = nvrtc.getCUBIN(program) if architecture.startswith("sm_") else nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    return names, code if isinstance(code, bytes) else code.encode()


def cached_kernel(kernel: Kernel, architecture: str) -> tuple[dict[str, str], bytes]:
    """`compile_kernel`, once for all processes that share the cache folder."""
    from cupy.cuda import nvrtc

    parts = (sources_hash(), kernel.name, *kernel.instantiations, architecture, OPTIONS[0], nvrtc.getVersion())
    digest = hashlib.sha256("\n".join(str(part) for part in parts).encode()).hexdigest()[:16]

    def build(attempt: Path) -> Path:
        names, code = compile_kernel(kernel, architecture)
        # One file, so that names and code cannot part: a line of JSON, then the code.
        path = attempt / "kernel"
        path.write_bytes(json.dumps(names).encode() + b"\n" + code)
        return path

    names, code = cache.get(f"{kernel.name}-{digest}.cubin", build).read_bytes().split(b"\n", 1)
    return json.loads(names), code


class NvrtcBackend:
    """Kernels compiled by NVRTC, loaded and launched through CuPy's binding of the driver."""

    name = "nvrtc"

    def __init__(self, kernels: Iterable[Kernel]) -> None:
        import cupy  # an ImportError here says what to install, in backends

        self._cupy = cupy
        self._driver = cupy.cuda.driver
        self._kernels = tuple(kernels)
        self._functions: dict[tuple[int, str, str], int] = {}
        self._modules: list[int] = []
        self._lock = threading.Lock()

    def describe(self) -> str:
        return f"nvrtc (CuPy {self._cupy.__version__}), kept in {cache.folder()}"

    def prepare(self, device: int) -> None:
        self._enter_context(device)
        architecture = target(torch.cuda.get_device_capability(device))
        with self._lock:
            for kernel in self._kernels:
                names, code = cached_kernel(kernel, architecture)
                module = self._driver.moduleLoadData(code)
                self._modules.append(module)
                for template, name in names.items():
                    function = self._driver.moduleGetFunction(module, name)
                    if kernel.shared_bytes > DEFAULT_SHARED_BYTES:
                        self._driver.funcSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE, kernel.shared_bytes)
                    self._functions[device, kernel.name, template] = function

    def launch(self, kernel: Kernel, template: str, grid: int, params: bytes, stream: int) -> None:
        device = torch.cuda.current_device()
        if self._driver.ctxGetCurrent() == 0:  # a thread that has not used CUDA's runtime so far
            self._enter_context(device)
        arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.c_char_p(params), ctypes.c_void_p))
        try:
            self._driver.launchKernel(
                self._functions[device, kernel.name, template],
                grid, 1, 1, THREADS, 1, 1, kernel.shared_bytes, stream, ctypes.addressof(arguments), 0,
            )  # fmt: skip
        except self._driver.CUDADriverError as error:
            raise RuntimeError(f"CUDA kernel {kernel.name}<{template}> could not be launched: {error}") from error

    def _enter_context(self, device: int) -> None:
        """Make the device's primary context, torch's, current in this thread."""
        self._cupy.cuda.runtime.setDevice(device)
