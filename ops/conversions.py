# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The eight conversions: the PyTorch reference for host tensors, kernels for CUDA tensors, the same bits from both.

Arguments, results and errors are those of the same names in `ds_fp4.formats`. On a GPU a call uses the caller's
current stream of the tensor's device, allocates nothing but outputs (nothing at all with `out=`) and waits for
nothing, so that it may be captured in a CUDA graph. What can only be known by waiting is not checked there: an index
outside the rows stops the kernel with an error, FP8 scales that are no powers of two are read as the next lower one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ds_fp4 import formats
from ds_fp4.formats import checks
from ds_fp4.ops.kernels import launch_rows

Pair = tuple[torch.Tensor, torch.Tensor]


def _on_gpu(t: torch.Tensor) -> bool:
    return isinstance(t, torch.Tensor) and t.is_cuda


@functools.wraps(formats.bf16_to_fp4_row)
def bf16_to_fp4_row(
    x: torch.Tensor, scale_rounding: str = "even", *, index: torch.Tensor | None = None, out: Pair | None = None
) -> Pair:
    if not _on_gpu(x):
        return formats.bf16_to_fp4_row(x, scale_rounding, index=index, out=out)
    packed, scales = checks.prepare_bf16_to_fp4_row(x, scale_rounding, index, out)
    launch_rows(
        "bf16_to_fp4_row", x.dtype, packed.shape[0], x.shape[1], x.shape[0], index,
        {"x": (x, 8 * x.element_size()), "packed": (packed, 4)}, scales,
        rounding=formats.SCALE_ROUNDINGS[scale_rounding],
    )  # fmt: skip
    return packed, scales


@functools.wraps(formats.fp4_row_to_bf16)
def fp4_row_to_bf16(
    packed: torch.Tensor,
    scales: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    index: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if not _on_gpu(packed):
        return formats.fp4_row_to_bf16(packed, scales, dtype=dtype, index=index, out=out)
    out = checks.prepare_fp4_row_to_bf16(packed, scales, dtype, index, out)
    launch_rows(
        "fp4_row_to_bf16", dtype, out.shape[0], out.shape[1], packed.shape[0], index,
        {"packed": (packed, 4), "out": (out, 8 * out.element_size())}, scales,
    )  # fmt: skip
    return out


@functools.wraps(formats.bf16_to_fp8_row)
def bf16_to_fp8_row(
    x: torch.Tensor,
    *,
    scale_dtype: torch.dtype = torch.float32,
    index: torch.Tensor | None = None,
    out: Pair | None = None,
) -> Pair:
    if not _on_gpu(x):
        return formats.bf16_to_fp8_row(x, scale_dtype=scale_dtype, index=index, out=out)
    q, scales = checks.prepare_bf16_to_fp8_row(x, scale_dtype, index, out)
    launch_rows(
        "bf16_to_fp8_row", x.dtype, q.shape[0], x.shape[1], x.shape[0], index,
        {"x": (x, 8 * x.element_size()), "q": (q, 8)}, scales,
        scale_bytes=scales.element_size(),
    )  # fmt: skip
    return q, scales


@functools.wraps(formats.fp8_row_to_bf16)
def fp8_row_to_bf16(
    q: torch.Tensor,
    scales: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    index: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if not _on_gpu(q):
        return formats.fp8_row_to_bf16(q, scales, dtype=dtype, index=index, out=out)
    out = checks.prepare_fp8_row_to_bf16(q, scales, dtype, index, out)
    launch_rows(
        "fp8_row_to_bf16", dtype, out.shape[0], out.shape[1], q.shape[0], index,
        {"q": (q, 8), "out": (out, 8 * out.element_size())}, scales,
        scale_bytes=scales.element_size(),
    )  # fmt: skip
    return out


def _reference_on_any_device(function: Callable) -> Callable:
    """A call that has no kernel: plain PyTorch operations, on the tensors' device."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    note = "CUDA tensors too are converted by plain PyTorch operations here."
    call.__doc__ = f"{function.__doc__.rstrip()}\n\n    {note}\n    "
    return call


fp8_row_to_fp4_row = _reference_on_any_device(formats.fp8_row_to_fp4_row)
fp4_row_to_fp8_row = _reference_on_any_device(formats.fp4_row_to_fp8_row)
fp4_row_to_fp8_col = _reference_on_any_device(formats.fp4_row_to_fp8_col)
fp8_row_to_fp8_col = _reference_on_any_device(formats.fp8_row_to_fp8_col)
