# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Small models and training loops shared by the distributed tests."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import nn

HIDDEN = 128
VOCABULARY = 64


class Expert(nn.Module):
    """A two-layer feed-forward expert."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(rows)))


def _swiglu(hidden: int, **options: Any) -> nn.Module:
    # Here and not above: when ds_fp4 is imported is part of what is tested.
    from ds_fp4.nn import SwiGLUExpert

    return SwiGLUExpert(hidden, **options)


class ClassicBlock(nn.Module):
    """x + MoE(norm(x)), optionally checkpointed; `swiglu` are arguments of `ds_fp4.nn.SwiGLUExpert`."""

    def __init__(self, hidden: int, checkpoint: str | None, swiglu: dict | None = None, **moe: Any) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.norm = nn.LayerNorm(hidden)
        self.moe = MoE(hidden, Expert(hidden) if swiglu is None else _swiglu(hidden, **swiglu), **moe)
        self.checkpoint = checkpoint

    def _forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, auxiliary, _ = self.moe(self.norm(x))
        return x + output, auxiliary

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.checkpoint == "deepspeed":
            return deepspeed.checkpointing.checkpoint(self._forward, x)
        if self.checkpoint is not None:
            return torch.utils.checkpoint.checkpoint(self._forward, x, use_reentrant=self.checkpoint == "reentrant")
        return self._forward(x)


class ClassicModel(nn.Module):
    """Embedding, MoE blocks of `deepspeed.moe.layer.MoE`, head; returns the loss of predicting the next token."""

    def __init__(self, layers: int = 2, hidden: int = HIDDEN, checkpoint: str | None = None, **moe: Any) -> None:
        super().__init__()
        options = {"num_experts": 4, "ep_size": 2, "k": 2, "capacity_factor": 1.5, "min_capacity": 2, **moe}
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList([ClassicBlock(hidden, checkpoint, **options) for _ in range(layers)])
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        auxiliary = 0.0
        for block in self.blocks:
            x, more = block(x)
            auxiliary = auxiliary + more
        logits = self.head(x)[:, :-1].float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + 0.01 * auxiliary


def classic_model(seed: int = 0, **options: Any) -> ClassicModel:
    """A ClassicModel whose dense weights are the same on every rank; DeepSpeed broadcasts the experts itself."""
    torch.manual_seed(seed)
    return ClassicModel(**options)


def mixtral(seed: int = 0, **overrides: Any) -> nn.Module:
    """A small Hugging Face Mixtral, to be converted by AutoEP."""
    from transformers import MixtralConfig, MixtralForCausalLM

    options = dict(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        attn_implementation="eager",
    )
    torch.manual_seed(seed)
    return MixtralForCausalLM(MixtralConfig(**{**options, **overrides}))


def llama(seed: int = 0, **overrides: Any) -> nn.Module:
    """A small Hugging Face Llama: no MoE layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    options = dict(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attn_implementation="eager",
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**options, **overrides}))


def batches(steps: int, rank: int, micro_batch: int = 2, length: int = 16, seed: int = 1) -> list[torch.Tensor]:
    """Token batches, different on every rank and the same in every run."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [torch.randint(0, VOCABULARY, (micro_batch, length), generator=generator) for _ in range(steps)]


def ds_config(
    ds_fp4: dict | None = None,
    *,
    dtype: str = "bf16",
    zero: int = 0,
    accumulation: int = 1,
    ep_size: int | None = None,
    preset: str = "mixtral",
    **more: Any,
) -> dict:
    """A DeepSpeed configuration; `ep_size` adds the expert_parallel block of AutoEP."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_optimization": {"stage": zero},
        "steps_per_print": 10**9,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if dtype == "fp16":
        config["fp16"]["initial_scale_power"] = 8
    if ep_size is not None:
        config["expert_parallel"] = {"enabled": True, "autoep_size": ep_size, "preset_model": preset}
    if ds_fp4 is not None:
        config["ds_fp4"] = ds_fp4
    return {**config, **more}


def build(model: nn.Module, config: dict) -> deepspeed.DeepSpeedEngine:
    """An engine, with the classic layer's experts in parameter groups of their own where there are any."""
    from deepspeed.moe.utils import has_moe_layers, split_params_into_different_moe_groups_for_optimizer

    parameters = None
    if isinstance(model, ClassicModel) and has_moe_layers(model)[0]:
        parameters = split_params_into_different_moe_groups_for_optimizer(
            {"params": list(model.parameters()), "name": "all"}
        )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    return engine


def loss_of(engine: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The training loss of either kind of model."""
    tokens = tokens.to(engine.device)
    if isinstance(engine.module, ClassicModel):
        return engine(tokens)
    return engine(input_ids=tokens, labels=tokens, use_cache=False).loss


def train(engine: deepspeed.DeepSpeedEngine, data: list[torch.Tensor]) -> list[float]:
    """One micro-step per batch; the losses."""
    losses = []
    for tokens in data:
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
