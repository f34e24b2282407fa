# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The kernels through DeepSpeed's op builder: nvcc on first use, or at install with DS_BUILD_FP4=1.

Differs from DeepSpeed's own ops in three ways: no --use_fast_math (it flushes subnormals); Hopper code is made for
sm_90a; and a first use is safe for any number of processes and nodes on one shared folder (`cache`), where torch's
extension folder keeps a lock file that outlives a killed build.

`ops/build_support.py` uses this file before ds_fp4 is installed, so that it imports nothing of the package at its top.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import platform
import re
import subprocess
import sysconfig
import threading
from pathlib import Path
from types import ModuleType

import torch
from deepspeed.ops.op_builder.builder import CUDAOpBuilder, installed_cuda_version
from torch.utils import cpp_extension

MIN_CAPABILITY = (8, 0)
# What an install is built for, unless TORCH_CUDA_ARCH_LIST says otherwise. PTX for GPUs that come later.
INSTALL_ARCHITECTURES = "8.0;8.9;9.0+PTX"

_environment_lock = threading.Lock()


class FP4Builder(CUDAOpBuilder):
    """Builds and loads the module over csrc/binding.cpp, csrc/kernels.cu and csrc/fused_kernels.cu."""

    BUILD_VAR = "DS_BUILD_FP4"
    NAME = "fp4"

    def __init__(self, kernels: ModuleType | None = None) -> None:
        """`kernels` is the module `ops/kernels.py`, where it cannot be imported from the package."""
        super().__init__(name=self.NAME)
        self._kernels = kernels or importlib.import_module("ds_fp4.ops.kernels")

    # ---- what DeepSpeed asks of a builder ----

    def absolute_name(self) -> str:
        return "ds_fp4.ops.fp4_kernels"

    def sources(self) -> list[str]:
        return [str(self._kernels.CSRC / name) for name in ("binding.cpp", "kernels.cu", "fused_kernels.cu")]

    def include_paths(self) -> list[str]:
        return [str(self._kernels.CSRC)]

    def cxx_args(self) -> list[str]:
        return ["-O2", "-std=c++17", *self._definitions()]

    def nvcc_args(self) -> list[str]:
        return [*self._kernels.NVCC_FLAGS, *gencode_flags(self.architectures()), *self._definitions()]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the kernels can be built and run here; if not, `error_log` says why."""
        obstacle = self.obstacle()
        self.error_log = obstacle
        if obstacle and verbose:
            self.warning(obstacle)
        return obstacle is None

    # ---- what is built ----

    def obstacle(self) -> str | None:
        """Why nvcc cannot build for this torch and GPU; None if it can."""
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA"
        for device in range(torch.cuda.device_count()):
            capability = torch.cuda.get_device_capability(device)
            if capability < MIN_CAPABILITY:
                return (
                    f"GPU {device} ({torch.cuda.get_device_name(device)}) has compute capability "
                    f"{capability[0]}.{capability[1]}; ds_fp4 needs 8.0 (BF16 arithmetic) or later"
                )
        version = nvcc_version()
        if version is None:
            return f"there is no nvcc (looked in CUDA_HOME={cpp_extension.CUDA_HOME} and on PATH)"
        if version.split(".")[0] != torch.version.cuda.split(".")[0]:
            return f"nvcc is CUDA {version}, torch {torch.__version__} is built for CUDA {torch.version.cuda}"
        if not cpp_extension.is_ninja_available():
            return "ninja is not installed (pip install ninja)"
        return None

    def architectures(self) -> list[str]:
        """Compute capabilities to build for, "9.0" or "9.0+PTX" each: TORCH_CUDA_ARCH_LIST, and the visible GPUs."""
        listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(" ", ";").strip(";")
        if not self.jit_mode:
            listed = listed or INSTALL_ARCHITECTURES
        # Without the letter of features that only one GPU or family has: "9.0a", "10.0f".
        archs = {re.sub("[af]", "", arch.strip()) for arch in listed.split(";") if re.match(r"\s*\d", arch)}
        if self.jit_mode:
            # A module that lacks the code for a GPU which is there would be of no use.
            capabilities = [torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())]
            present = {f"{major}.{minor}" for major, minor in capabilities}
            archs |= present - {arch.split("+")[0] for arch in archs}
        usable = [arch for arch in archs if _number(arch) >= MIN_CAPABILITY]
        if not usable:
            raise RuntimeError(
                f"no GPU architecture to build ds_fp4's kernels for: TORCH_CUDA_ARCH_LIST={listed!r}, and no GPU of "
                "compute capability 8.0 or later is visible; set TORCH_CUDA_ARCH_LIST, for H100 and H200 to 9.0"
            )
        return sorted(usable, key=_number)

    def _definitions(self) -> list[str]:
        archs = "_".join(re.sub(r"[.]", "", arch).replace("+PTX", "ptx") for arch in self.architectures())
        return [
            f"-DDS_FP4_SOURCES_HASH=h{self._kernels.sources_hash()}",
            f"-DDS_FP4_CUDA_VERSION={torch.version.cuda}",
            f"-DDS_FP4_ARCHITECTURES=sm{archs}",
        ]

    def file_name(self) -> str:
        """Name of the built module, with a hash over all that it depends on."""
        parts = (
            self._kernels.sources_hash(), *self.nvcc_args(), *self.cxx_args(), nvcc_version(), torch.__version__,
            torch.version.cuda, sysconfig.get_config_var("SOABI"), platform.machine(), *platform.libc_ver(),
            os.environ.get("CXX", ""), os.environ.get("CC", ""),
        )  # fmt: skip
        digest = hashlib.sha256("\n".join(str(part) for part in parts).encode()).hexdigest()[:16]
        return f"{self.name}-{digest}.so"

    # ---- loading ----

    def load(self, verbose: bool = False) -> ModuleType:
        """The module built at install if it is of use here, else the one built on first use.

        Raises:
            RuntimeError: with the compiler's output, if it cannot be built.
        """
        module, _ = self.load_prebuilt()
        return module or self.jit_load(verbose)

    def load_prebuilt(self) -> tuple[ModuleType | None, str]:
        """The module built at install, or None and why not."""
        if importlib.util.find_spec(self.absolute_name()) is None:
            return None, "none was built at install (DS_BUILD_FP4=1)"
        try:
            module = importlib.import_module(self.absolute_name())
        except ImportError as error:
            return None, f"the one built at install cannot be imported: {error}"
        if module.sources_hash != f"h{self._kernels.sources_hash()}":
            return None, f"{module.__file__} was built from other sources; reinstall ds_fp4 with DS_BUILD_FP4=1"
        if module.cuda_version.split(".")[0] != str(torch.version.cuda).split(".")[0]:
            return None, f"{module.__file__} is for CUDA {module.cuda_version}, torch for {torch.version.cuda}"
        return module, ""

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """The module built by nvcc, by this process or another one."""
        cache = importlib.import_module("ds_fp4.ops.cache")
        with _environment_lock:
            saved, self.jit_mode = self.jit_mode, True
            try:
                if not self.is_compatible(verbose):
                    raise RuntimeError(self.error_log)
                path = cache.get(self.file_name(), lambda attempt: self._build_in(attempt, verbose))
            finally:
                self.jit_mode = saved
        return import_extension(self.name, path)

    def _build_in(self, attempt: Path, verbose: bool) -> Path:
        """Compile in a folder of this attempt's own, through DeepSpeed's jit_load and torch's; the module's path."""
        # torch renames a module that it has built before in this process; its name is part of the binary.
        versions = getattr(cpp_extension, "JIT_EXTENSION_VERSIONER", None)
        if versions is not None:
            versions.entries.pop(self.name, None)
        saved = os.environ.get("TORCH_EXTENSIONS_DIR")
        os.environ["TORCH_EXTENSIONS_DIR"] = str(attempt)
        try:
            return Path(super().jit_load(verbose).__file__)
        finally:
            self._loaded_ops.pop(self.name, None)  # DeepSpeed would go on to use the file in the attempt's folder
            if saved is None:
                del os.environ["TORCH_EXTENSIONS_DIR"]
            else:
                os.environ["TORCH_EXTENSIONS_DIR"] = saved


def import_extension(name: str, path: Path) -> ModuleType:
    """The extension module `name` from any file."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # pybind11 makes a module once a process: who has just built it gets the one that torch imported, from where it
    # was built.
    module.__file__ = str(path)
    return module


@functools.cache
def nvcc_version() -> str | None:
    """ "13.0", or None where there is no nvcc that runs."""
    if cpp_extension.CUDA_HOME is None:
        return None
    try:
        return ".".join(str(part) for part in installed_cuda_version())
    except Exception:  # whatever keeps it from running, it cannot be used
        return None


@functools.cache
def _nvcc_architectures() -> frozenset[str]:
    """Code that nvcc can make, "sm_90"; empty if it does not say."""
    nvcc = os.path.join(cpp_extension.CUDA_HOME or "", "bin", "nvcc")
    try:
        return frozenset(subprocess.check_output([nvcc, "--list-gpu-code"], text=True).split())
    except (OSError, subprocess.SubprocessError):
        return frozenset()


def _number(arch: str) -> tuple[int, int]:
    major, minor = arch.split("+")[0].split(".")
    return int(major), int(minor)


def gencode_flags(archs: list[str]) -> list[str]:
    """nvcc's flags for capabilities such as "9.0" or "8.0+PTX".

    Hopper gets sm_90a. A GPU newer than nvcc gets PTX of the newest one before it that nvcc knows, for the driver to
    compile.
    """
    known = _nvcc_architectures()
    flags = []
    for arch in archs:
        major, minor = _number(arch)
        code = f"{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")
        if not known or f"sm_{major}{minor}" in known:
            flags.append(f"-gencode=arch=compute_{code},code=sm_{code}")
            if arch.endswith("+PTX"):
                flags.append(f"-gencode=arch=compute_{major}{minor},code=compute_{major}{minor}")
        else:
            numbers = sorted(int(name[3:]) for name in known if name[3:].isdigit())
            numbers = [number for number in numbers if number < 10 * major + minor]
            if not numbers:
                raise RuntimeError(f"nvcc {nvcc_version()} cannot make code for compute capability {arch}")
            flags.append(f"-gencode=arch=compute_{numbers[-1]},code=compute_{numbers[-1]}")
    return sorted(set(flags))
