# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The expert level of `deepspeed.moe.layer.MoE` whose experts are `ds_fp4.nn.SwiGLUExpert`.

    MOELayer    forward: the layer's own gate; its routes are the routing of one call of self.experts
    Experts     a module per expert, three matrices in each

Any gate, k and capacity will do: DeepSpeed's gates name for every token up to k experts with their weights, and a
route that the capacity cut off as -1. Slots in an expert's buffer, which they give too, mean nothing here: experts
get as many rows as they have, and no buffer of capacity rows is made or sent.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.moe.experts import Experts
from deepspeed.moe.sharded_moe import MOE_TIMER, MOELayer, TopKGate
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch import nn

from ds_fp4.checkpointing import recomputing
from ds_fp4.experts import LayerSpec
from ds_fp4.integrations.expert_level import ExpertLevel, ExpertLevelExperts, ExpertLevelLayer, ExpertLevelModule
from ds_fp4.integrations.seam import CodecLayer
from ds_fp4.nn import SwiGLUExpert


def classic_spec(layer: MOELayer) -> LayerSpec:
    """Shapes of a layer of SwiGLUExpert."""
    expert = layer.experts.deepspeed_experts[0]
    return LayerSpec(
        expert.w1.in_features,
        expert.w1.out_features,
        layer.num_local_experts,
        layer.ep_size,
        layer.gate.k,
        expert.activation,
        expert.alpha,
        expert.limit,
    )


def classic_obstacle(layer: MOELayer, mpu: Any = None) -> str | None:
    """Why the expert level cannot take over this layer, as the end of a sentence; None if it can.

    Args:
        layer: the MOELayer.
        mpu: the engine's, if it has one; else what `deepspeed.utils.groups` holds counts, as in MOELayer.
    """
    obstacle = _experts_obstacle(layer.experts)
    if obstacle is not None:
        return obstacle
    if "sparse_routes" not in inspect.signature(TopKGate.forward).parameters:
        return f"DeepSpeed {deepspeed.__version__}'s gates do not list their routes (those of 0.19.4 and later do)"
    if not _computes_by(layer, MOELayer.forward, ExpertLevelModule, CodecLayer):
        return f"{type(layer).__name__} has a forward of its own in place of MOELayer's"
    if not isinstance(layer.gate, TopKGate):
        return f"its gate is {type(layer.gate).__name__}, not DeepSpeed's TopKGate"
    if layer.use_tutel:
        return "it dispatches through Tutel (use_tutel)"
    tensor_parallel = bwc_tensor_model_parallel_world_size(groups.mpu if mpu is None else mpu)
    if tensor_parallel > 1:
        return f"the model is tensor-parallel over {tensor_parallel} ranks, which hold the same tokens"
    return classic_spec(layer).obstacle()


def _experts_obstacle(experts: nn.Module) -> str | None:
    if not isinstance(experts, Experts) or len(experts.deepspeed_experts) == 0:
        return f"its experts are {type(experts).__name__}, not a deepspeed.moe.experts.Experts"
    modules = list(experts.deepspeed_experts)
    for expert in modules:
        if not isinstance(expert, SwiGLUExpert) or not _computes_by(expert, SwiGLUExpert.forward):
            return f"its experts are {type(expert).__name__}; classic layers get it with ds_fp4.nn.SwiGLUExpert"
        for name in ("w1", "w2", "w3"):
            projection = getattr(expert, name)
            # Replaced by an adapter or a quantized layer, say, whose computation would be left out.
            if not isinstance(projection, nn.Linear) or not _computes_by(projection, nn.Linear.forward):
                return f"its experts' {name} is {type(projection).__name__}, not nn.Linear"
            if projection.bias is not None:
                return f"its experts' {name} has a bias"
    kinds = {
        (*expert.w1.weight.shape, *expert.w3.weight.shape, expert.activation, expert.alpha, expert.limit)
        for expert in modules
    }
    if len(kinds) > 1:
        return "its experts differ in shape or activation"
    return None


def _computes_by(module: nn.Module, forward: Callable, *ours: type) -> bool:
    """Whether `forward` is what a call of the module computes, apart from classes that ds_fp4 put over its own."""
    own = next(c for c in type(module).__mro__ if not issubclass(c, ours))
    return own.forward is forward and "forward" not in module.__dict__


class ClassicLayer(ExpertLevelLayer):
    """Mixin of swapped layers."""

    @torch.compiler.disable
    def forward(self, *input: Any, **kwargs: Any) -> torch.Tensor:
        if self.wall_clock_breakdown:
            self.timers(MOE_TIMER).start()
        hidden_states, used_token = input[0], input[1]
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        l_aux, _, _, expert_ids, _, scores, exp_counts = self.gate(x, used_token, True)
        # Of a recomputation, l_aux would hold the recomputed graph (`classic.keep_results_of_forward`).
        if not recomputing():
            self.l_aux, self.exp_counts = l_aux, exp_counts
        # Routes are [k, tokens].
        output = self.experts(x, scores.t().contiguous(), expert_ids.t().contiguous())
        if self.wall_clock_breakdown:
            # The two all-to-alls have no times of their own; DeepSpeed prints zeros.
            self.timers(MOE_TIMER).stop()
            self.time_moe = self.timers(MOE_TIMER).elapsed(reset=False)
        return output.reshape(hidden_states.shape)


class ClassicExperts(ExpertLevelExperts):
    """Mixin of swapped experts modules."""

    def ds_fp4_weights(self) -> Sequence[torch.Tensor]:
        experts = self.deepspeed_experts
        weights = [getattr(expert, name).weight for name in ("w1", "w2", "w3") for expert in experts]
        # Three tensors are w1, w2 and w3 of all experts, stacked.
        return [weight[None] for weight in weights] if len(experts) == 1 else weights


CLASSIC = ExpertLevel(
    ClassicLayer,
    ClassicExperts,
    classic_spec,
    seam=(
        (MOELayer, "forward", ["self", "input", "kwargs"]),
        (TopKGate, "forward", ["self", "input", "used_token", "sparse_routes", "use_tutel"]),
        (Experts, "forward", ["self", "inputs"]),
    ),
)
