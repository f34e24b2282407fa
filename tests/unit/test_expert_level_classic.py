# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The expert level of DeepSpeed's classic MOELayer on one rank: every gate, and which layers it takes over.

With exact pieces in place of the quantizing ones (`tests.distributed.exact_experts`) everything must agree with
DeepSpeed in FP32.
"""

from __future__ import annotations

import copy
import re

import pytest
import torch
from deepspeed.moe.experts import Experts
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from torch import nn

from ds_fp4 import gemm
from ds_fp4.all_to_all import Leg
from ds_fp4.checkpointing import checkpoint
from ds_fp4.config import DsFp4Config, layer_recipe
from ds_fp4.integrations import classic, expert_level, seam
from ds_fp4.integrations.expert_level_classic import CLASSIC, classic_obstacle
from ds_fp4.nn import SwiGLUExpert
from ds_fp4.reference.activation import ACTIVATIONS
from tests.distributed.exact_experts import make_exact

H, WIDTH, EXPERTS, TOKENS = 128, 128, 4, 48
GEMMS = gemm.choose("emulation", "emulation", torch.device("cpu"))


def _layer(experts: int = EXPERTS, k: int = 2, expert: nn.Module | None = None, dtype=torch.float32, **gate):
    """A MOELayer on one rank whose experts differ."""
    torch.manual_seed(0)
    gate = TopKGate(H, experts, k, **{"capacity_factor": 1.0, "eval_capacity_factor": 1.0, "min_capacity": 2, **gate})
    layer = MOELayer(gate, Experts(expert or SwiGLUExpert(H, WIDTH), experts, "ep_size_1"), "ep_size_1", 1, experts)
    for parameter in layer.experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    nn.init.normal_(gate.wg.weight, std=0.2)
    return layer.to(dtype)


def _recipe(**block):
    return layer_recipe(DsFp4Config(enabled=True, **block), "")


def _take_over(layer: MOELayer, exact: bool = True, **block) -> MOELayer:
    assert classic_obstacle(layer) is None
    layer = copy.deepcopy(layer)
    CLASSIC.take_over(layer, _recipe(**block), GEMMS)
    if exact:
        make_exact(layer.experts.ds_fp4_experts)
    return layer


def _tokens(dtype=torch.float32) -> torch.Tensor:
    return torch.randn(2, TOKENS // 2, H, generator=torch.Generator().manual_seed(1)).to(dtype)


def _run(layer: MOELayer, x: torch.Tensor, used_token=None, calls: int = 1) -> dict[str, torch.Tensor]:
    """Output, l_aux, exp_counts and every gradient."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(3)  # noisy gates
    weights = torch.randn(2, TOKENS // 2, H, generator=torch.Generator().manual_seed(2))
    for _ in range(calls):
        output = layer(x, used_token)
        ((output.float() * weights).sum() + 0.1 * layer.l_aux).backward()
    found = {"output": output, "l_aux": layer.l_aux, "exp_counts": layer.exp_counts, "x": x.grad}
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {name: None if t is None else t.detach().clone() for name, t in found.items()}


def _assert_same(ours: dict, stock: dict) -> None:
    assert ours.keys() == stock.keys()
    assert torch.equal(ours["exp_counts"], stock["exp_counts"])
    torch.testing.assert_close(ours["l_aux"], stock["l_aux"], rtol=1e-6, atol=0)
    for name, expected in stock.items():
        if name == "exp_counts":
            continue
        assert expected is not None and ours[name] is not None, name
        assert ours[name].shape == expected.shape and ours[name].dtype == expected.dtype, name
        error = (ours[name] - expected).norm() / expected.norm().clamp(min=1e-6)
        assert error < 1e-5, f"{name}: relative error {error:.2e}"


GATES = [
    dict(k=1),
    dict(k=1, use_rts=False, capacity_factor=0.5),
    dict(k=1, noisy_gate_policy="RSample"),
    dict(k=1, noisy_gate_policy="Jitter"),
    dict(k=1, drop_tokens=False),
    dict(k=2),
    dict(k=2, capacity_factor=0.4),
    dict(k=2, top2_2nd_expert_sampling=False),
    dict(k=2, drop_tokens=False),
    dict(k=3, capacity_factor=0.5),
    dict(k=3, drop_tokens=False),
    dict(k=4, noisy_gate_policy="Jitter"),
    dict(k=2, experts=1),
    dict(k=1, experts=1),
]


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_every_gate_gives_what_deepspeed_gives(gate):
    stock = _layer(**gate)
    _assert_same(_run(_take_over(stock), _tokens()), _run(stock, _tokens()))


def test_evaluation_has_its_own_capacity():
    stock = _layer(k=2, eval_capacity_factor=0.6).eval()
    _assert_same(_run(_take_over(stock), _tokens()), _run(stock, _tokens()))


@pytest.mark.parametrize("dtype", (torch.int64, torch.float32))
def test_tokens_that_are_not_used(dtype):
    used = (torch.arange(TOKENS) % 3 > 0).to(dtype)
    stock = _layer(k=1, use_rts=False)
    ours = _run(_take_over(stock), _tokens(), used)
    _assert_same(ours, _run(stock, _tokens(), used))
    assert ours["output"].flatten(0, 1)[used == 0].abs().max() == 0


@pytest.mark.parametrize("k", (1, 2, 3))
def test_a_route_of_weight_zero_is_still_a_route(k):
    # A gate underflows to 0 where its logit is far below the largest; the expert's answer is its gradient.
    stock = _layer(k=k, drop_tokens=False, top2_2nd_expert_sampling=False)
    with torch.no_grad():
        stock.gate.wg.weight[:] = torch.arange(EXPERTS)[:, None] * 40.0
    x = _tokens().abs()
    routes = stock.gate(x.flatten(0, 1), None, True)
    assert (routes[3] >= 0).all() and (k == 1 or (routes[5][1] == 0).all())
    scores = routes[5].detach().requires_grad_()
    ours, gradients = _take_over(stock), []
    for layer in (stock, ours):
        layer.gate.forward = lambda *_: (*routes[:5], scores, routes[6])
        scores.grad = None
        layer(x, None).square().sum().backward()
        gradients.append(scores.grad.clone())
    assert (gradients[0][-1] != 0).all()
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation):
    stock = _layer(expert=SwiGLUExpert(H, 2 * WIDTH, activation=activation, alpha=1.3, limit=0.5))
    _assert_same(_run(_take_over(stock), _tokens()), _run(stock, _tokens()))


def test_gradients_add_up_and_belong_to_one_expert_each():
    stock = _layer(k=3)
    layer = _take_over(stock)
    _assert_same(_run(layer, _tokens(), calls=3), _run(stock, _tokens(), calls=3))
    gradients = {name: parameter.grad for name, parameter in layer.experts.named_parameters()}
    before = {name: gradient.clone() for name, gradient in gradients.items()}
    for name, gradient in gradients.items():
        assert gradient.is_contiguous()
        gradient.fill_(7.0)
        for other, expected in before.items():
            assert torch.equal(gradients[other], expected) == (other != name), (name, other)
        gradient.copy_(before[name])
    # Those of a step that is over do not change in the next.
    layer.zero_grad()
    layer(_tokens(), None).sum().backward()
    assert all(torch.equal(gradients[name], before[name]) for name in before)


def test_frozen_experts_get_no_gradient():
    stock = _layer(k=3)
    stock.experts.deepspeed_experts[1].requires_grad_(False)
    stock.experts.deepspeed_experts[2].w1.requires_grad_(False)
    ours, expected = _run(_take_over(stock), _tokens()), _run(stock, _tokens())
    without = {name for name, gradient in expected.items() if gradient is None}
    assert len(without) == 4 and without == {name for name, gradient in ours.items() if gradient is None}
    _assert_same(*({n: g for n, g in found.items() if n not in without} for found in (ours, expected)))


@pytest.mark.parametrize("recipe, least", (("fp8", 0.996), ("mxfp4", 0.96)))
def test_quantized_it_stays_close_to_bf16(recipe, least):
    stock = _layer(k=2, top2_2nd_expert_sampling=False, drop_tokens=False, dtype=torch.bfloat16)
    x = _tokens(torch.bfloat16)
    ours = _run(_take_over(stock, exact=False, recipe=recipe), x)
    for name, expected in _run(stock, x).items():
        if name not in ("l_aux", "exp_counts"):
            cosine = torch.cosine_similarity(ours[name].flatten().float(), expected.flatten().float(), dim=0)
            assert cosine > least, f"{name}: {cosine:.4f}"
            assert ours[name].dtype == torch.bfloat16


def test_a_recomputation_leaves_the_gates_results():
    layer = _take_over(_layer())
    x = _tokens().requires_grad_()
    output = checkpoint(layer, x, None)
    auxiliary, counts = layer.l_aux, layer.exp_counts
    output.sum().backward()
    assert layer.l_aux is auxiliary and layer.exp_counts is counts


def test_times_are_taken_where_asked():
    layer = _take_over(_layer())
    layer(_tokens(), None)
    assert layer.time_moe == 0
    layer.wall_clock_breakdown = layer.gate.wall_clock_breakdown = True
    layer(_tokens(), None)
    assert layer.time_moe > layer.gate.gate_time > 0
    assert layer.time_falltoall == layer.time_salltoall == 0


def test_names_attributes_and_checkpoints_stay():
    stock, layer = _layer(), _layer()
    CLASSIC.take_over(layer, _recipe(), GEMMS)
    assert list(layer.state_dict()) == list(stock.state_dict())
    assert "experts.deepspeed_experts.3.w2.weight" in layer.state_dict()
    for parameter in layer.experts.parameters():
        assert parameter.allreduce is False and parameter.group_name == "ep_size_1"
    layer.load_state_dict(stock.state_dict())
    expert_level.restore(layer)
    expert_level.restore(layer)
    assert type(layer) is MOELayer and type(layer.experts) is Experts
    _assert_same(_run(layer, _tokens()), _run(stock, _tokens()))


def test_layers_of_an_earlier_engine_can_be_taken_over_again():
    layer = _layer()
    seam.swap_class(layer, "layer", (Leg("dispatch", None, None), Leg("combine", None, None)))
    assert classic_obstacle(layer) is None
    seam.restore_class(layer)
    assert classic_obstacle(_take_over(layer)) is None


class _OtherExpert(SwiGLUExpert):
    def forward(self, x):
        return super().forward(x) * 2


class _OtherLayer(MOELayer):
    def forward(self, *input, **kwargs):
        return super().forward(*input, **kwargs) * 2


class _OtherLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class _Mpu:
    @staticmethod
    def get_tensor_model_parallel_world_size() -> int:
        return 2


def _bias(layer):
    layer.experts.deepspeed_experts[1].w3.bias = nn.Parameter(torch.zeros(WIDTH))


OBSTACLES = [
    (dict(expert=nn.Linear(H, H)), None, "its experts are Linear; .* ds_fp4.nn.SwiGLUExpert"),
    (dict(expert=_OtherExpert(H, WIDTH)), None, "its experts are _OtherExpert; "),
    (dict(expert=SwiGLUExpert(H, 96)), None, "intermediate size 96 is not a multiple of 128"),
    ({}, lambda layer: setattr(layer, "experts", nn.Identity()), "its experts are Identity, not a deepspeed.moe"),
    ({}, lambda layer: setattr(layer.experts.deepspeed_experts[2], "w2", _OtherLinear(WIDTH, H)), "w2 is _OtherL"),
    ({}, _bias, "its experts' w3 has a bias"),
    ({}, lambda layer: setattr(layer.experts.deepspeed_experts[0], "limit", 1.0), "differ in shape or activation"),
    ({}, lambda layer: setattr(layer, "__class__", _OtherLayer), "_OtherLayer has a forward of its own"),
    ({}, lambda layer: setattr(layer, "forward", layer.forward), "MOELayer has a forward of its own"),
    ({}, lambda layer: setattr(layer, "gate", nn.Linear(H, 4)), "its gate is Linear, not DeepSpeed's TopKGate"),
    ({}, lambda layer: setattr(layer, "use_tutel", True), "use_tutel"),
]


@pytest.mark.parametrize("options, change, message", OBSTACLES, ids=[row[2] for row in OBSTACLES])
def test_layers_it_leaves_alone(options, change, message):
    layer = _layer(**options)
    if change is not None:
        change(layer)
    obstacle = classic_obstacle(layer)
    assert obstacle is not None and re.search(message, obstacle), obstacle


def test_tensor_parallel_models_are_left_alone():
    (found,) = classic.find(nn.ModuleDict({"deepspeed_moe": _layer()}), _Mpu())
    assert "tensor-parallel over 2 ranks" in found.expert_obstacle
    (found,) = classic.find(nn.ModuleDict({"deepspeed_moe": _layer()}))
    assert found.expert_obstacle is None and found.expert_level is CLASSIC


def test_releases_whose_gates_list_no_routes(monkeypatch):
    monkeypatch.setattr(TopKGate, "forward", lambda self, input, used_token=None, use_tutel=False: None)
    assert "do not list their routes" in classic_obstacle(_layer())


def test_a_moved_seam_is_refused(monkeypatch):
    CLASSIC.check_seam()
    monkeypatch.setattr(Experts, "forward", lambda self, inputs, counts: None)
    with pytest.raises(seam.SeamError, match=r"Experts.forward was expected to take .*takes .*'counts'"):
        CLASSIC.check_seam()
    monkeypatch.delattr(Experts, "forward")
    monkeypatch.delattr(nn.Module, "forward")
    with pytest.raises(seam.SeamError, match="it does not exist"):
        CLASSIC.check_seam()
