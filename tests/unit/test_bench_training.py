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
    with pytest.raises(ValueError, match="expected KEY=VALUE, got 'fused'"):
        keys_of(["fused"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--recipes bf16 mxfp4:fc1", "expected KEY=VALUE, got 'fc1'"),
        ("--recipes nope", "nope"),
        ("--recipes mxfp4:recompute=fc3", "fc3"),
        ("--autoep fused", "--autoep: expected KEY=VALUE, got 'fused'"),
        ("--steps 0", "whole number of at least 1, got '0'"),
        ("--accumulation -1", "whole number of at least 1, got '-1'"),
        ("--zero 4", "invalid choice"),
        (f"--output {__file__}/y.json", "y.json cannot be written"),
        ("--output .", ". cannot be written"),
    ],
)
def test_what_cannot_work_is_said_before_an_engine_is_built(words, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench_training.py", *words.split()])
    with pytest.raises(SystemExit):
        bench_training.parse_args()
    assert message in capsys.readouterr().err


def test_a_profile_without_a_gpu_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench_training.py", "--profile"])
    with pytest.raises(SystemExit):
        bench_training.parse_args()
    assert "--profile needs a GPU" in capsys.readouterr().err


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
    labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.3, -100)
    results = []
    for call in (model.forward, lambda **inputs: bench_training.chunked_loss(model, **inputs)):
        model.zero_grad()
        loss = call(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole)
