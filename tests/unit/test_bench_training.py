# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""What the arguments of launch/bench_training.py stand for."""

import pytest
import torch

from ds_fp4.config import parse_block
from launch import bench_training
from launch.bench_training import block_of, keys_of


def test_recipes_with_keys():
    config = parse_block(block_of("mxfp4:recompute=fc1,weight_cache=none"))
    assert (config.recipe, config.experts.recompute, config.experts.weight_cache) == ("mxfp4", "fc1", "none")
    assert parse_block(block_of("bf16")).recipe == "bf16"


def test_keys_of_autoep():
    assert keys_of(["gate_up_impl=fused", "async_split_plan=true"]) == {
        "gate_up_impl": "fused",
        "async_split_plan": True,
    }
    with pytest.raises(ValueError, match="--autoep fused: expected KEY=VALUE"):
        keys_of(["fused"])


def test_the_chunked_loss_is_the_models_own(monkeypatch):
    from transformers import MixtralConfig, MixtralForCausalLM

    monkeypatch.setattr(bench_training, "CHUNK", 7)
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=2,
        )
    )
    tokens = torch.randint(0, 50, (3, 11))
    results = []
    for call in (model.forward, lambda **inputs: bench_training.chunked_loss(model, **inputs)):
        model.zero_grad()
        loss = call(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole)
