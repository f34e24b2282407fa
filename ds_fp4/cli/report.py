# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""`ds-fp4 report`: what is installed, which kernels would be used here, and why."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from ds_fp4 import compat, gemm, ops
from ds_fp4.version import __version__


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _verdict(check) -> str:
    try:
        check()
    except RuntimeError as error:
        return f"NOT SUPPORTED: {error}"
    return "supported"


def lines(obstacle: Exception | None = None) -> list[str]:
    """The report, a line an item; `obstacle` is why the kernels cannot be loaded."""
    report = [
        f"ds_fp4        {__version__}",
        f"python        {sys.version.split()[0]}",
        f"torch         {torch.__version__} (CUDA {torch.version.cuda})",
        f"deepspeed     {_installed('deepspeed')}: {_verdict(compat.check_deepspeed)} "
        f"(tested {' to '.join(compat.DEEPSPEED_TESTED)})",
        f"transformers  {_installed('transformers')}: {_verdict(compat.check_transformers)} "
        f"(tested {' to '.join(compat.TRANSFORMERS_TESTED)})",
    ]
    if torch.cuda.is_available():
        for device in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(device)
            report.append(
                f"device {device}      {torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
            )
    else:
        report.append("device        CPU: conversions run in plain PyTorch (ds_fp4.formats)")
    report.append(f"kernels       {ops.describe_kernels() if obstacle is None else f'CANNOT BE LOADED: {obstacle}'}")
    report += [f"gemm          {line}" for line in gemm.describe(_gemm_device())]
    return report


def _gemm_device() -> torch.device:
    """Where experts would compute: the current GPU, if there is any."""
    return torch.device("cuda" if torch.cuda.is_available() and torch.cuda.device_count() else "cpu")


def main() -> int:
    """Print the report; the status is 1 if CUDA devices are there and kernels cannot be loaded."""
    obstacle = None
    if torch.cuda.is_available():
        # First, so that the report names what is in use and not what would be tried.
        try:
            ops.load_kernels()
        except RuntimeError as error:
            obstacle = error
    print("\n".join(lines(obstacle)))
    return 0 if obstacle is None else 1
