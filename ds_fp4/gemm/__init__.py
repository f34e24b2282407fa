# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Grouped FP8 GEMMs of the experts, from libraries behind one interface.

    groups      which rows belong to which expert
    backend     the interface, and the checks that all share
    deepgemm    DeepGEMM's grouped kernels
    cublas      cuBLAS block scaling through torch, a call per expert
    emulation   plain PyTorch
    selection   which of them computes which GEMM, and why

Importing this loads no library and does not touch CUDA.
"""

from .backend import Backend
from .groups import Groups
from .selection import CHOICES, GemmBackends, choose, describe, select

__all__ = ["CHOICES", "Backend", "GemmBackends", "Groups", "choose", "describe", "select"]
