# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The model: a Hugging Face MoE built from a config JSON, and its MoE blocks swapped for `deepspeed.moe.layer.MoE`."""

from __future__ import annotations

import json
import math

import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
AUX_LOSS_COEFFICIENT = 0.01  # where the model's config states none


def load_config(path: str, overrides: list[str] | None = None) -> PretrainedConfig:
    """Reads a Hugging Face `config.json`; `overrides` are KEY=VALUE with JSON values (`num_hidden_layers=4`)."""
    with open(path) as file:
        values = json.load(file)
    if "model_type" not in values:
        raise ValueError(f'{path}: no "model_type" key. A Hugging Face config.json of a MoE model was expected.')
    for override in overrides or []:
        key, _, value = override.partition("=")
        if key not in values:
            raise ValueError(
                f"--model-args {override}: {path} has no key {key!r}. Its keys are: {', '.join(sorted(values))}."
            )
        try:
            values[key] = json.loads(value)
        except json.JSONDecodeError:
            raise ValueError(
                f"--model-args {override}: {value!r} is not a JSON value (text wants quotes: {key}='\"text\"')."
            ) from None
    return AutoConfig.for_model(values.pop("model_type"), **values)


def expert_count(config: PretrainedConfig) -> int:
    """Routed experts per MoE layer."""
    for key in EXPERT_COUNT_KEYS:
        if getattr(config, key, None):
            return int(getattr(config, key))
    raise ValueError(f"{config.model_type} is not a MoE: its config has none of {', '.join(EXPERT_COUNT_KEYS)}.")


def choose_ep_size(ep_size: int | None, experts: int, world_size: int) -> int:
    """The expert-parallel group's size: the one asked for, else the largest that divides both counts."""
    if ep_size is None:
        return math.gcd(experts, world_size)
    if ep_size < 1 or experts % ep_size or world_size % ep_size:
        raise ValueError(
            f"--ep-size {ep_size} must divide the {experts} experts and the {world_size} processes. "
            f"Set it to a divisor of {math.gcd(experts, world_size)}."
        )
    return ep_size


def build_model(config: PretrainedConfig, dtype: torch.dtype, gradient_checkpointing: bool) -> PreTrainedModel:
    """A randomly initialized causal language model, on CPU, in `dtype`."""
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.use_cache = False
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


class SwiGLUExpert(nn.Module):
    """silu(x Wg) * (x Wu), then Wd; gate and up in one matrix, as Hugging Face keeps them."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor):
        super().__init__()
        self.gate_up = nn.Parameter(gate_up.detach().clone())
        self.down = nn.Parameter(down.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


class ClassicMoEBlock(nn.Module):
    """A Hugging Face MoE block's place, filled with `deepspeed.moe.layer.MoE` that starts from the block's weights.

    The router becomes DeepSpeed's softmax top-k gate with a capacity; shared experts and the routed scaling stay.
    `aux_loss` holds the gate's load-balancing loss of the last forward.
    """

    def __init__(self, block: nn.Module, config: PretrainedConfig, ep_size: int, rank: int, capacity_factor: float):
        super().__init__()
        experts = block.experts.gate_up_proj.shape[0]
        local = experts // ep_size
        first = (rank % ep_size) * local
        self.moe = MoE(
            hidden_size=config.hidden_size,
            expert=SwiGLUExpert(block.experts.gate_up_proj[first], block.experts.down_proj[first]),
            num_experts=experts,
            ep_size=ep_size,
            k=config.num_experts_per_tok,
            capacity_factor=capacity_factor,
            eval_capacity_factor=2 * capacity_factor,
            top2_2nd_expert_sampling=False,  # noise that a comparison of recipes would have to average out
        )
        with torch.no_grad():
            self.moe.deepspeed_moe.gate.wg.weight.copy_(block.gate.weight)
            for i, expert in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts):
                expert.gate_up.copy_(block.experts.gate_up_proj[first + i])
                expert.down.copy_(block.experts.down_proj[first + i])
        self.to(block.gate.weight.dtype)
        self.shared_experts = getattr(block, "shared_experts", None)
        self.scale = float(getattr(config, "routed_scaling_factor", None) or 1.0)
        self.aux_loss: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        output, self.aux_loss, _ = self.moe(hidden_states)
        if self.scale != 1.0:
            output = output * self.scale
        return output if self.shared_experts is None else output + self.shared_experts(hidden_states)


def use_classic_moe(model: PreTrainedModel, ep_size: int, rank: int, capacity_factor: float) -> list[dict]:
    """Swaps every MoE block of `model` in place; returns the parameter groups that DeepSpeed's optimizer needs."""
    swapped = 0
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts") and hasattr(layer.mlp, "gate"):
            layer.mlp = ClassicMoEBlock(layer.mlp, model.config, ep_size, rank, capacity_factor)
            swapped += 1
    if not swapped:
        raise ValueError(
            f"--moe classic: no layer of {type(model).__name__} has a MoE block (mlp.gate and mlp.experts)."
        )
    return split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "parameters"}
    )


def language_loss(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats per token, in FP32; logits [B, S, V] predict rows[:, 1:] of int64 [B, S + 1]."""
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def forward_losses(engine: nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The language loss of `rows`, and what to run backward on: that loss plus the routers' load-balancing losses."""
    model = engine.module
    classic = [module for module in model.modules() if isinstance(module, ClassicMoEBlock)]
    coefficient = getattr(model.config, "router_aux_loss_coef", None)
    balanced_by_model = not classic and coefficient is not None
    extra = {"output_router_logits": True} if balanced_by_model else {}
    output = engine(input_ids=rows[:, :-1], use_cache=False, **extra)
    loss = language_loss(output.logits, rows)
    if classic:
        aux = torch.stack([block.aux_loss for block in classic]).sum()
        return loss, loss + (AUX_LOSS_COEFFICIENT if coefficient is None else coefficient) * aux
    if balanced_by_model:
        return loss, loss + coefficient * output.aux_loss
    return loss, loss
