# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""One MoE layer's experts, from tokens and routing to combined output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_fp4.config import LayerRecipe
from ds_fp4.experts.compute import Fp8Compute
from ds_fp4.experts.exchange import Exchange
from ds_fp4.experts.function import apply_experts
from ds_fp4.experts.records import RecordFormat
from ds_fp4.experts.spec import LayerSpec
from ds_fp4.experts.weights import WeightCache, split_kinds, stacked
from ds_fp4.gemm import GemmBackends

# Per expert of a token: an FP32 weight and an int16 id on the way there, the weight's FP32 gradient on the way back.
_ROUTING_BYTES, _GRADIENT_BYTES = 6, 4
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def record_formats(spec: LayerSpec, recipe: LayerRecipe) -> dict[str, RecordFormat]:
    """Records of each leg of a layer, by `config.LEGS`."""

    def records(leg: str, tail_bytes: int = 0, operand: bool = True) -> RecordFormat:
        # Sums that go nowhere are not worth rounding; GEMM operands are FP8 wherever they come from.
        name = getattr(recipe, leg) if operand or spec.ep_size > 1 else "bf16"
        return RecordFormat(name, spec.hidden, recipe.scale_rounding, tail_bytes)

    return {
        "dispatch_forward": records("dispatch_forward", _ROUTING_BYTES * spec.top_k),
        "combine_forward": records("combine_forward", operand=False),
        "combine_backward": records("combine_backward"),
        # Where they go nowhere, tokens' gradients are handed to autograd as they lie: nothing may lie between them.
        "dispatch_backward": records(
            "dispatch_backward", _GRADIENT_BYTES * spec.top_k if spec.ep_size > 1 else 0, operand=False
        ),
    }


class ExpertLayer:
    """The expert level of one layer on one rank.

    Args:
        spec: shapes and activation.
        recipe: formats of the four legs, what is kept for backward, when FP8 weights are made.
        group: the expert-parallel process group; not used where `spec.ep_size` is 1.
        gemms: the GEMM libraries.

    Attributes:
        dispatch, combine, combine_backward, dispatch_backward: records of each leg.
        compute, exchange, cache: the other pieces that `function` puts in order.

    Raises:
        ValueError: if the expert level cannot compute such a layer.
    """

    def __init__(self, spec: LayerSpec, recipe: LayerRecipe, group: Any, gemms: GemmBackends) -> None:
        obstacle = spec.obstacle()
        if obstacle is not None:
            raise ValueError(f"the expert level cannot compute this layer: {obstacle}")
        self.spec, self.recipe, self.gemms = spec, recipe, gemms
        legs = record_formats(spec, recipe)
        self.dispatch, self.combine = legs["dispatch_forward"], legs["combine_forward"]
        self.combine_backward, self.dispatch_backward = legs["combine_backward"], legs["dispatch_backward"]
        self.compute = Fp8Compute(spec, recipe, gemms)
        self.exchange = Exchange(group, spec.ep_size)
        self.cache = WeightCache(recipe.weight_cache == "step", self.compute.quantize_weights)

    def __deepcopy__(self, memo: dict) -> ExpertLayer:
        # Process groups and libraries are shared; FP8 weights are made when they are needed.
        return ExpertLayer(self.spec, self.recipe, self.exchange.group, self.gemms)

    def __call__(
        self, x: torch.Tensor, scores: torch.Tensor, expert_ids: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Combined output of all experts, wherever they live.

        Args:
            x: BF16, FP16 or FP32 [T, H], this rank's tokens.
            scores: [T, k], routing weights. Their gradient is returned in FP32 to whatever computed them.
            expert_ids: int32 or int64 [T, k], experts among all; -1 for none.
            weights: as in `weights.quantize`.

        Returns:
            [T, H] in x's dtype.

        Raises:
            ValueError: on a wrong shape, dtype or device.
        """
        self._check(x, scores, expert_ids, weights)
        return apply_experts(self, x, scores.to(torch.float32).contiguous(), expert_ids.contiguous(), weights)

    def _check(
        self, x: torch.Tensor, scores: torch.Tensor, expert_ids: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> None:
        if x.dim() != 2 or x.shape[1] != self.spec.hidden:
            raise ValueError(f"x must have shape [T, {self.spec.hidden}], got {tuple(x.shape)}")
        if x.dtype not in _DTYPES:
            raise ValueError(f"x must be BF16, FP16 or FP32, got {x.dtype}")
        if expert_ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"expert_ids must be int32 or int64, got {expert_ids.dtype}")
        if not scores.is_floating_point():
            raise ValueError(f"scores must be of a floating point dtype, got {scores.dtype}")
        routing = (x.shape[0], self.spec.top_k)
        for name, t in (("scores", scores), ("expert_ids", expert_ids)):
            if t.shape != routing:
                raise ValueError(f"{name} must have shape {routing}, got {tuple(t.shape)}")
        self._check_weights(weights)
        device = x.device
        for t in (scores, expert_ids, *weights):
            if t.device != device:
                raise ValueError(f"tokens, routing and weights must be on one device, got {device} and {t.device}")

    def _check_weights(self, weights: Sequence[torch.Tensor]) -> None:
        experts, hidden, intermediate = self.spec.local_experts, self.spec.hidden, self.spec.intermediate
        is_stacked = bool(weights) and stacked(weights)
        if len(weights) != (3 if is_stacked else 3 * experts):
            raise ValueError(
                f"weights must be three tensors of {experts} experts or {3 * experts} matrices, got shapes "
                f"{[list(w.shape) for w in weights]}; under ZeRO-3 they have to be gathered"
            )
        lead = (experts,) if is_stacked else ()
        inner, outer = (*lead, intermediate, hidden), (*lead, hidden, intermediate)
        for name, shape, kind in zip(
            ("w1", "w2", "w3"), (inner, outer, inner), split_kinds(weights, is_stacked), strict=True
        ):
            for expert, weight in enumerate((kind,) if is_stacked else kind):
                if weight.shape != shape or weight.dtype not in _DTYPES:
                    which = name if is_stacked else f"{name} of expert {expert}"
                    raise ValueError(
                        f"{which} must be BF16, FP16 or FP32 {list(shape)}, got {weight.dtype} {list(weight.shape)}"
                    )
