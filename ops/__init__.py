# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Conversions between BF16 (FP16, FP32), MXFP4 and FP8, the same for host tensors and CUDA tensors, bit for bit.

    conversions   the calls: checks, outputs, then the reference or a kernel
    fused         calls that fuse an activation, a gather or a sum with conversions
    routing       which token goes where, and back
    kernels       what each CUDA kernel is launched with
    launching     how it is found out from tensors, and launched
    backends      which way of compiling them is in use: `builder` (nvcc) or `nvrtc` (CuPy)
    cache         where compiled kernels are kept, safely for many processes and nodes
    csrc/         the kernels

Importing this compiles nothing and does not touch CUDA. The first call on a CUDA tensor, or `load_kernels()`, does.
"""

from ds_fp4.ops.backends import describe_kernels, load_kernels
from ds_fp4.ops.conversions import (
    bf16_to_fp4_row,
    bf16_to_fp8_row,
    bf16_to_fp8_row_and_col,
    fp4_row_to_bf16,
    fp4_row_to_fp8_col,
    fp4_row_to_fp8_row,
    fp8_row_to_bf16,
    fp8_row_to_fp4_row,
    fp8_row_to_fp8_col,
    fp8_row_to_fp8_row,
    split_weight_gradient,
    weight_to_fp8,
)
from ds_fp4.ops.fused import combine_rows, gather_rows, swiglu_backward, swiglu_forward
from ds_fp4.ops.routing import (
    gather_gradients,
    pack_routing,
    plan_receive,
    plan_send,
    return_gradients,
    routing_bytes,
)

__all__ = [
    "bf16_to_fp4_row",
    "bf16_to_fp8_row",
    "bf16_to_fp8_row_and_col",
    "combine_rows",
    "describe_kernels",
    "fp4_row_to_bf16",
    "fp4_row_to_fp8_col",
    "fp4_row_to_fp8_row",
    "fp8_row_to_bf16",
    "fp8_row_to_fp4_row",
    "fp8_row_to_fp8_col",
    "fp8_row_to_fp8_row",
    "gather_gradients",
    "gather_rows",
    "load_kernels",
    "pack_routing",
    "plan_receive",
    "plan_send",
    "return_gradients",
    "routing_bytes",
    "split_weight_gradient",
    "swiglu_backward",
    "swiglu_forward",
    "weight_to_fp8",
]
