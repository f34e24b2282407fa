# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The stages of an expert layer between its collectives: grouped FP8 GEMMs and the activation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_fp4 import ops
from ds_fp4.config import LayerRecipe
from ds_fp4.experts.spec import LayerSpec
from ds_fp4.experts.weights import quantize
from ds_fp4.gemm import GemmBackends, Groups
from ds_fp4.reference.activation import SwigluBackward

Pair = tuple[torch.Tensor, torch.Tensor]


class Fp8Compute:
    """What the GEMM libraries and the fused kernels do for one layer.

    Args:
        spec: the layer. recipe: its `saved_activations`, `recompute` and `scale_rounding` are used.
        gemms: the libraries.
    """

    def __init__(self, spec: LayerSpec, recipe: LayerRecipe, gemms: GemmBackends) -> None:
        self._gemms = gemms
        self._activation = {"activation": spec.activation, "alpha": spec.alpha, "limit": spec.limit}
        self._rounding = recipe.scale_rounding
        self.recomputes_gate_up = recipe.recompute == "fc1"
        self._saved = "bf16" if self.recomputes_gate_up else recipe.saved_activations

    quantize_weights = staticmethod(quantize)

    @property
    def column_scale_layout(self) -> str:
        """The `scale_layout` of columns that are made from rows for `weight_gradient`."""
        return self._gemms.weight_gradient.column_scale_layout

    def gemm(self, a: Pair, b: Pair, groups: Groups) -> torch.Tensor:
        """BF16 [P, N] of FP8 rows [P, K] and each row's expert in `b` [E, N, K]. Padding rows hold anything."""
        return self._gemms.forward.grouped_gemm(a, b, groups)

    def weight_gradient(self, a: Pair, b: Pair, groups: Groups, outs: Sequence[torch.Tensor]) -> None:
        """Write A_e @ B_e^T of each expert's FP8 columns into `outs` [E, N_i, K], whose N_i share A's N rows."""
        self._gemms.weight_gradient.weight_gradient(a, b, groups, outs)

    def activate(self, gate_up: torch.Tensor, weights: torch.Tensor) -> tuple[Pair, tuple[torch.Tensor, ...]]:
        """FP8 rows of weight * activation(gate_up), and what is kept of gate_up: a pair, BF16 itself, or nothing."""
        packed = self._saved if self._saved != "bf16" else None
        q, scales, saved = ops.swiglu_forward(
            gate_up,
            weights,
            save=packed,
            scale_rounding=self._rounding,
            scale_layout="gemm",
            **self._activation,
        )
        if self.recomputes_gate_up:
            return (q, scales), ()
        return (q, scales), (gate_up,) if saved is None else tuple(saved)

    def activate_backward(
        self, dh: torch.Tensor, weights: torch.Tensor, saved: tuple[torch.Tensor, ...], group_sizes: torch.Tensor
    ) -> SwigluBackward:
        """d_gate_up as FP8 rows and columns, weight * h as FP8 columns, the routing weights' gradient.

        Args:
            dh: BF16 [P, I]. weights: FP32 [P].
            saved: what `activate` kept, or (gate_up,) recomputed.
            group_sizes: int32 [E], rows of each expert without padding. Padding rows give zeros, whatever the GEMMs
                left in them.
        """
        return ops.swiglu_backward(
            dh,
            weights,
            saved[0] if len(saved) == 1 else saved,
            group_sizes,
            gate_up_format=self._saved,
            scale_layout="gemm",
            **self._activation,
        )
