# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Compiling the kernels at install: what setup.py asks for when DS_BUILD_FP4=1.

Runs before the package exists, so that `builder.py` and `kernels.py` beside this file are loaded by path.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_ds_fp4_build_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def extension_options(root: str | os.PathLike[str]) -> dict[str, Any]:
    """Keyword arguments for `setuptools.setup`: the extension module `ds_fp4.ops.fp4_kernels` and what builds it.

    Args:
        root: folder of setup.py.

    Raises:
        SystemExit: if torch, DeepSpeed, ninja or a matching nvcc is missing: which, and what to do.
    """
    try:
        builder = _load("builder")
        from torch.utils.cpp_extension import BuildExtension
    except ImportError as error:
        raise SystemExit(
            f"DS_BUILD_FP4=1 compiles CUDA kernels with the torch and DeepSpeed of this environment, but {error}. "
            "Install them first, then: DS_BUILD_FP4=1 pip install --no-build-isolation ."
        ) from error
    fp4 = builder.FP4Builder(_load("kernels"))
    obstacle = fp4.obstacle()
    if obstacle:
        raise SystemExit(
            f"DS_BUILD_FP4=1, but the kernels cannot be compiled here: {obstacle}. Without DS_BUILD_FP4 they are "
            "compiled on first use."
        )
    extension = fp4.builder()
    # setuptools wants its paths relative to setup.py.
    extension.sources = [os.path.relpath(source, root) for source in extension.sources]
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildExtension}}
