# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Packaging that pyproject.toml cannot say: the `ops` folder is the package `ds_fp4.ops`, and DS_BUILD_FP4=1 compiles
its CUDA kernels at install instead of on first use."""

import os
import sys

import setuptools
from setuptools import setup

# Without build isolation it is the environment's; an older one says "project.license must be valid exactly by one
# definition" of pyproject.toml.
if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(
        f"ds_fp4 is built by setuptools 77 or later, got {setuptools.__version__}: pip install --upgrade setuptools"
    )

root = os.path.dirname(os.path.abspath(__file__))

options = {}
if os.environ.get("DS_BUILD_FP4", "0") == "1":
    # Needs torch, DeepSpeed and nvcc: `DS_BUILD_FP4=1 pip install --no-build-isolation .`
    sys.path.insert(0, os.path.join(root, "ops"))
    from build_support import extension_options

    options = extension_options(root)

setup(
    packages=[
        "ds_fp4",
        "ds_fp4.bench",
        "ds_fp4.cli",
        "ds_fp4.experts",
        "ds_fp4.formats",
        "ds_fp4.gemm",
        "ds_fp4.integrations",
        "ds_fp4.ops",
        "ds_fp4.ops.csrc",
        "ds_fp4.reference",
    ],
    package_dir={"ds_fp4": "ds_fp4", "ds_fp4.ops": "ops"},
    package_data={"ds_fp4.ops.csrc": ["*.cuh", "*.cu", "*.cpp", "*.h"]},
    **options,
)
