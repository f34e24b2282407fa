# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Which modules a `scope` means."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ds_fp4.checkpointing import CheckpointOptions, redirection
from ds_fp4.config import ConfigError
from ds_fp4.integrations import checkpointing
from ds_fp4.integrations.checkpointing import find_targets, idle_patterns
from ds_fp4.integrations.layers import MoELayer


class _Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Linear(2, 2)


class _Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(2, 2), mlp


class _Model(nn.Module):
    """Two dense and two MoE layers, and a list that has nothing to do with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Block(nn.Linear(2, 2) if i < 2 else _Moe()) for i in range(4)])
        self.heads = nn.ModuleList([nn.Linear(2, 2)])


def _names(model: nn.Module, scope, **options) -> list[str]:
    layers = [
        MoELayer(name, module, module.experts, hidden=2, ep_size=1, implementation="test", obstacle=None)
        for name, module in model.named_modules()
        if isinstance(module, _Moe)
    ]
    return list(find_targets(model, layers, scope, **options))


@pytest.mark.parametrize(
    "scope, names",
    (
        ("layers", [f"layers.{i}" for i in range(4)]),
        ("experts", ["layers.2.mlp.experts", "layers.3.mlp.experts"]),
        (["*.mlp"], [f"layers.{i}.mlp" for i in range(4)]),
        (["layers.?", "*.mlp", "heads.0"], ["layers.0", "layers.1", "layers.2", "layers.3", "heads.0"]),
        (["layers*"], [f"layers.{i}" for i in range(4)]),
        ([], []),
        (["layers.[13].attention", "heads.*"], ["layers.1.attention", "layers.3.attention", "heads.0"]),
    ),
)
def test_scopes(scope, names):
    assert _names(_Model(), scope) == names


def test_experts_that_save_for_themselves_are_left_out_of_the_scope_experts_only():
    model = _Model()
    assert _names(model, "experts", own_saving={"layers.2.mlp"}) == ["layers.3.mlp.experts"]
    assert _names(model, "experts", own_saving={"layers.2.mlp", "layers.3.mlp"}) == []
    for scope in ("layers", ["*.mlp.experts"]):
        assert _names(model, scope, own_saving={"layers.2.mlp"}) == _names(model, scope)


def test_patterns_need_no_moe_layer():
    dense = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert _names(dense, ["0"]) == ["0"] and _names(dense, []) == []


def test_lists_of_lists_and_sequences():
    stages = nn.Module()
    stages.stages = nn.ModuleList([nn.ModuleList([_Block(_Moe()), _Block(_Moe())]), nn.ModuleList([_Block(_Moe())])])
    assert _names(stages, "layers") == ["stages.0.0", "stages.0.1", "stages.1.0"]
    assert _names(nn.Sequential(nn.Linear(2, 2), _Block(nn.Sequential(nn.Linear(2, 2), _Moe()))), "layers") == [
        "0",
        "1",
    ]


def test_a_copied_model_works_and_is_not_the_originals_to_undo():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    plain = type(model[0])
    checkpointing.install(model, {"0": model[0], "2": model[2]}, CheckpointOptions("fp8"))
    assert [isinstance(module, checkpointing.CheckpointedModule) for module in model] == [True, False, True]
    assert type(model[0]).__name__ == "CheckpointedLinear" and isinstance(model[0], nn.Linear)
    x = torch.randn(64, 64, requires_grad=True)
    expected = model(x)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), expected)
    checkpointing.remove(copied)
    assert type(copied[0]) is plain and isinstance(model[0], checkpointing.CheckpointedModule)
    assert torch.equal(model(x), expected)
    checkpointing.remove(model)
    checkpointing.remove(model)
    assert type(model[0]) is plain and not model._forward_hooks and not model._forward_pre_hooks
    assert set(vars(model[0])) == set(vars(nn.Linear(64, 64)))


def test_an_exception_in_the_models_forward_ends_the_redirection():
    model = nn.Sequential(nn.Linear(64, 64))
    checkpointing.install(model, {}, CheckpointOptions())
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 3))
    assert redirection() is None


def test_a_layer_in_no_list_is_named():
    with pytest.raises(ConfigError, match='scope = "layers": mlp is not inside a ModuleList or Sequential'):
        _names(_Block(_Moe()), "layers")


def test_a_pattern_without_a_match_is_named_with_its_neighbours():
    scope = ["layers.0", "layer.1"]
    assert _names(_Model(), scope) == ["layers.0"]
    assert list(idle_patterns(_Model(), scope)) == ["ds_fp4.checkpointing.scope: layer.1"]
    assert "matches no module. Similar names: layers.1" in idle_patterns(_Model(), scope).popitem()[1]
    assert idle_patterns(_Model(), "layers") == {} and idle_patterns(_Model(), []) == {}


@pytest.mark.parametrize("exact", (True, False))
def test_a_layer_does_not_add_to_a_cache_twice(exact):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_local_experts=2)
    model = MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).train()
    tokens = torch.randint(0, 64, (1, 64))
    prefix = model(tokens, use_cache=True).past_key_values
    targets = dict(model.model.layers.named_children())
    checkpointing.install(model, targets, CheckpointOptions(exact=exact))
    gradients = []
    for use_cache in (False, None):  # None: the model's default, with which it makes an empty cache
        model.zero_grad()
        model(tokens, labels=tokens, use_cache=use_cache).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    with pytest.raises(RuntimeError, match="past_key_values that hold keys and values already.*without past_key_val"):
        model(tokens, past_key_values=prefix)
    model.eval()
    assert model(tokens, past_key_values=prefix).past_key_values.get_seq_length() == 128
