# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Modules that users put into their models."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ds_fp4.reference.activation import ACTIVATIONS, clamped

# f(gate) of each activation (`ds_fp4.reference.activation`) but swiglu_oai's, in PyTorch's fused functions.
_GATES = {
    "swiglu": F.silu,
    "swiglu_clamped": F.silu,
    "geglu_tanh": partial(F.gelu, approximate="tanh"),
}


class SwiGLUExpert(nn.Module):
    """A gated expert, w2(f(w1(x)) * w3(x)), to hand to `deepspeed.moe.layer.MoE`.

    As a module it is plain PyTorch in the model's dtype, with or without ds_fp4. Inside a MoE layer it is also what
    the expert level recognizes: there ds_fp4 computes all experts of a rank from these weights, in FP8.

    Args:
        hidden: H, elements of a token. intermediate: I, elements between the two projections. For the expert level
            both are multiples of 128.
        activation: "swiglu", "swiglu_clamped", "swiglu_oai" or "geglu_tanh", as AutoEP's `expert_activation`.
        alpha: of swiglu_oai. limit: of swiglu_clamped and swiglu_oai. The defaults are AutoEP's.
        device, dtype: of the weights.

    Attributes:
        w1: gate projection, weight [I, H]. w3: up projection, weight [I, H]. w2: down projection, weight [H, I]. They
            are initialized as `nn.Linear` does it.

    Raises:
        ValueError: for an unknown activation or a size below 1.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        activation: str = "swiglu",
        alpha: float = 1.702,
        limit: float = 7.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        if hidden < 1 or intermediate < 1:
            raise ValueError(f"hidden and intermediate must be at least 1, got {hidden} and {intermediate}")
        self.activation, self.alpha, self.limit = activation, alpha, limit
        self.w1 = nn.Linear(hidden, intermediate, bias=False, device=device, dtype=dtype)
        self.w2 = nn.Linear(intermediate, hidden, bias=False, device=device, dtype=dtype)
        self.w3 = nn.Linear(hidden, intermediate, bias=False, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] of [..., H], in x's dtype."""
        gate, factor = clamped(self.w1(x), self.w3(x), self.activation, self.limit)
        if self.activation == "swiglu_oai":
            inner = gate * torch.sigmoid(gate * self.alpha)
        else:
            inner = _GATES[self.activation](gate)
        return self.w2(inner * factor)

    def extra_repr(self) -> str:
        options = {"swiglu_clamped": f", limit={self.limit}"}
        options["swiglu_oai"] = f", alpha={self.alpha}{options['swiglu_clamped']}"
        return f"activation={self.activation!r}{options.get(self.activation, '')}"
