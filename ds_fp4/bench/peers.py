# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""What the kernels are compared with: torchao (compiled, and its Triton kernels), else plain PyTorch.

Every function here returns a callable, or None where torchao cannot be used; `problems` says why. Nothing is compiled
before the first call.
"""

from __future__ import annotations

import functools

import torch

problems: dict[str, str] = {}


@functools.cache
def _torchao(part: str):
    """A torchao module, or None."""
    import importlib

    try:
        return importlib.import_module(f"torchao.prototype.{part}")
    except Exception as error:  # not installed, or not for this torch, Triton or GPU
        problems[f"torchao.prototype.{part}"] = str(error).splitlines()[0]
        return None


@functools.cache
def _compiled(name: str):
    module = _torchao("mx_formats.mx_tensor")
    return module and torch.compile(getattr(module, name), dynamic=False)


def quantize_fp4(x: torch.Tensor):
    """torchao's MXFP4 quantization of [M, K], compiled.

    With its default rounding of scales, FLOOR: EVEN, one addition more, assigns NaN through a mask to a tensor viewed
    as another type, which inductor (torch 2.11 to 2.13) cannot compile ("make_reindexer NYI on DtypeView").
    """
    to_mx, config = _compiled("to_mx"), _torchao("mx_formats.config")
    if to_mx is None or config is None:
        return None
    return lambda: to_mx(x, torch.float4_e2m1fn_x2, 32, config.ScaleCalculationMode.FLOOR)


def decode_fp4(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16):
    to_dtype = _compiled("to_dtype")
    if to_dtype is None:
        return None
    scales = scales.view(torch.float8_e8m0fnu)
    return lambda: to_dtype(packed, scales, torch.float4_e2m1fn_x2, 32, dtype)


def _fp8_kernel(name: str):
    module = _torchao("blockwise_fp8_training.kernels")
    return module and getattr(module, name, None)


def quantize_fp8(x: torch.Tensor):
    """torchao's Triton kernel: 1x128 groups, scales in the GEMM's layout."""
    kernel = _fp8_kernel("triton_fp8_blockwise_act_quant_lhs")
    return kernel and (lambda: kernel(x))


def quantize_fp8_transposed(x: torch.Tensor):
    """torchao's Triton kernel: 128x1 groups, written transposed. Rows must be a multiple of 128."""
    kernel = _fp8_kernel("triton_fp8_blockwise_act_quant_transposed_lhs")
    return kernel and (lambda: kernel(x))


def decode_fp8(q: torch.Tensor, scales: torch.Tensor):
    """Plain PyTorch; K a multiple of 128."""

    def run():
        values = q.to(torch.bfloat16).view(q.shape[0], -1, 128) * scales.to(torch.bfloat16)[..., None]
        return values.view(q.shape)

    return run


def then(first, second):
    """What `second` makes of the result of `first`, called; None if `first` cannot be had."""
    if first is None:
        return None

    def run():
        made = second(first())
        if made is None:
            raise RuntimeError("torchao cannot be used")
        return made()

    return run


def both(first, second):
    if first is None or second is None:
        return None

    def run():
        return first(), second()

    return run


def gathered(source: torch.Tensor, index: torch.Tensor):
    """Rows through an index without -1."""
    return lambda: source.index_select(0, index)


def padding_index(group_sizes: list[int], index: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """int64 input row of each padded row, padding as row 0: what a peer without ragged groups has to gather first."""
    rows, start = [], 0
    for size in group_sizes:
        row = torch.arange(start, start + size, device=device)
        padded = torch.zeros(-(-size // 128) * 128, dtype=torch.int64, device=device)
        padded[:size] = row if index is None else index[row].clamp(min=0).to(torch.int64)
        rows.append(padded)
        start += size
    return torch.cat(rows)


def quantize_weights(w: torch.Tensor, orientation: str):
    """torchao's Triton kernels for 128x128 blocks of [E, N, K], as they are, transposed or both: two reads."""
    module = _torchao("blockwise_fp8_training.deepgemm_quant")
    kernel = module and getattr(module, "triton_fp8_blockwise_weight_quant_grouped_transposed_rhs_deepgemm", None)
    transposed = module and getattr(module, "triton_fp8_blockwise_weight_quant_grouped_rhs_deepgemm", None)
    if kernel is None or transposed is None:
        return None
    w_t = w.transpose(1, 2)
    calls = {"both": (kernel, transposed), "rows": (kernel,), "transposed": (transposed,)}[orientation]
    return lambda: [call(w_t) for call in calls]
