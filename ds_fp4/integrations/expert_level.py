# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The expert level inside DeepSpeed's layers: which layers it can take over, and how it gets in.

As at the codec level (`seam`), classes are swapped, so that parameters, their names and attributes, hooks and
checkpoints stay as they are:

    AutoEPMoELayer    _forward: router and output tail are DeepSpeed's; between them one call of self.experts
    GroupedExperts    forward: (tokens, scores, expert ids) -> combined output, through `ds_fp4.experts`

The experts are called as a module with positional tensors: ZeRO-3 gathers parameters in hooks, which see no keywords.
"""

from __future__ import annotations

import inspect
from typing import Any

import deepspeed
import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.ep_experts import GroupedExperts

from ds_fp4.config import LayerRecipe
from ds_fp4.experts import ExpertLayer, LayerSpec
from ds_fp4.gemm import GemmBackends
from ds_fp4.integrations.seam import SeamError

_FORWARD_PARAMETERS = ["self", "hidden_states"]
_FINALIZE_PARAMETERS = ["self", "output", "x", "hidden_states", "hdim"]


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


def check_autoep_seam() -> None:
    """Raise SeamError if what is overridden or called in AutoEP's layer takes other arguments than when tested."""
    for function, expected in (
        (AutoEPMoELayer._forward, _FORWARD_PARAMETERS),
        (AutoEPMoELayer._finalize_output, _FINALIZE_PARAMETERS),
    ):
        found = list(inspect.signature(function).parameters)
        if found != expected:
            raise SeamError(
                f"DeepSpeed {deepspeed.__version__}: AutoEPMoELayer.{function.__name__} takes {found}, expected "
                f'{expected}. Install a tested release, or set ds_fp4.experts.compute to "bf16".'
            )


class ExpertLevelLayer:
    """Mixin of swapped AutoEP layers."""

    @torch.compiler.disable
    def _forward(self, hidden_states: torch.Tensor) -> Any:
        batch, length, hidden = hidden_states.shape
        x = hidden_states.reshape(-1, hidden)
        scores, expert_ids, counts = self.router(x, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        output = self.experts(x, scores, expert_ids).reshape(batch, length, hidden)
        return self._finalize_output(output, x, hidden_states, hidden)


class ExpertLevelExperts:
    """Mixin of swapped experts modules. Instances carry `ds_fp4_experts`."""

    ds_fp4_experts: ExpertLayer

    def forward(self, x: torch.Tensor, scores: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        return self.ds_fp4_experts(x, scores, expert_ids, (self.w1, self.w2, self.w3))


_swapped_classes: dict[tuple[type, type], type] = {}


def _swap(module: torch.nn.Module, mixin: type) -> None:
    base = type(module)
    if (mixin, base) not in _swapped_classes:
        name = f"Fp4{base.__name__}"
        _swapped_classes[mixin, base] = type(name, (mixin, base), {"__module__": __name__})
    module.__class__ = _swapped_classes[mixin, base]


def _restore(module: torch.nn.Module) -> None:
    if isinstance(module, (ExpertLevelLayer, ExpertLevelExperts)):
        module.__class__ = type(module).__mro__[2]
        module.__dict__.pop("ds_fp4_experts", None)


def take_over(layer: AutoEPMoELayer, recipe: LayerRecipe, gemms: GemmBackends) -> None:
    """Make ds_fp4 compute the layer's experts. Its expert-parallel group has to be bound."""
    experts = ExpertLayer(autoep_spec(layer), recipe, layer.ep_group, gemms)
    _swap(layer, ExpertLevelLayer)
    _swap(layer.experts, ExpertLevelExperts)
    layer.experts.ds_fp4_experts = experts


def restore(layer: torch.nn.Module) -> None:
    """Undo a swap; a layer without one is left alone."""
    _restore(layer)
    experts = getattr(layer, "experts", None)
    if isinstance(experts, torch.nn.Module):
        _restore(experts)
