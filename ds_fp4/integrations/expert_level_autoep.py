# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The expert level of AutoEP.

AutoEPMoELayer    _forward: router and output tail are DeepSpeed's; between them one call of self.experts
GroupedExperts    w1, w2 and w3 of all local experts in one tensor each
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.ep_experts import GroupedExperts

from ds_fp4.experts import LayerSpec
from ds_fp4.integrations.expert_level import ExpertLevel, ExpertLevelExperts, ExpertLevelLayer


def autoep_spec(layer: AutoEPMoELayer) -> LayerSpec:
    """Shapes of an AutoEP layer, also where ZeRO-3 has its weights partitioned."""
    experts, w1 = layer.experts, layer.experts.w1
    _, intermediate, hidden = getattr(w1, "ds_shape", w1.shape)
    return LayerSpec(
        hidden,
        intermediate,
        layer.num_local_experts,
        layer.ep_size,
        layer.top_k,
        experts.activation,
        experts.activation_alpha,
        experts.activation_limit,
    )


def autoep_obstacle(layer: AutoEPMoELayer) -> str | None:
    """Why the expert level cannot take over this AutoEP layer, as the end of a sentence; None if it can."""
    if not hasattr(AutoEPMoELayer, "_forward") or not hasattr(AutoEPMoELayer, "_finalize_output"):
        return f"DeepSpeed {deepspeed.__version__}'s AutoEP layer has no seam for it (0.19.8 and later have one)"
    folding = layer.folding_group_handles
    if layer.score_apply != "post":
        return f'it applies routing weights before the experts (expert_parallel.score_apply "{layer.score_apply}")'
    if folding is not None and folding.spec.tp_size > 1:
        return f"tensor parallelism of size {folding.spec.tp_size} is folded into it"
    if layer.ep_size > 1 and layer.comm_backend != "comm":
        return f'its tokens travel by expert_parallel.comm_backend "{layer.comm_backend}"'
    if not isinstance(layer.experts, GroupedExperts):
        return f"its experts are {type(layer.experts).__name__}, not GroupedExperts"
    names = sorted(name for name, _ in layer.experts.named_parameters())
    if names != ["w1", "w2", "w3"]:
        return f"its experts' parameters are {', '.join(names)}, not w1, w2, w3"
    return autoep_spec(layer).obstacle()


class AutoEPLayer(ExpertLevelLayer):
    """Mixin of swapped layers."""

    @torch.compiler.disable
    def _forward(self, hidden_states: torch.Tensor) -> Any:
        batch, length, hidden = hidden_states.shape
        x = hidden_states.reshape(-1, hidden)
        scores, expert_ids, counts = self.router(x, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        output = self.experts(x, scores, expert_ids).reshape(batch, length, hidden)
        return self._finalize_output(output, x, hidden_states, hidden)


class AutoEPExperts(ExpertLevelExperts):
    """Mixin of swapped experts modules."""

    def ds_fp4_weights(self) -> Sequence[torch.Tensor]:
        return self.w1, self.w2, self.w3


AUTOEP = ExpertLevel(
    AutoEPLayer,
    AutoEPExperts,
    autoep_spec,
    seam=(
        (AutoEPMoELayer, "_forward", ["self", "hidden_states"]),
        (AutoEPMoELayer, "_finalize_output", ["self", "output", "x", "hidden_states", "hdim"]),
    ),
)
