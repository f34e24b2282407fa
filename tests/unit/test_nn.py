# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""`ds_fp4.nn.SwiGLUExpert` as a plain module."""

from __future__ import annotations

import copy

import pytest
import torch

from ds_fp4.nn import SwiGLUExpert
from ds_fp4.reference.activation import ACTIVATIONS, activate, activation_backward


def _expert(activation: str, **options) -> SwiGLUExpert:
    torch.manual_seed(0)
    return SwiGLUExpert(48, 80, activation=activation, **{"alpha": 1.3, "limit": 0.4, **options})


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_computes_what_the_expert_level_does(activation):
    expert = _expert(activation)
    x = torch.randn(2, 37, 48, requires_grad=True)
    output = expert(x)
    rows = x.detach().flatten(0, 1)
    gate, up = rows @ expert.w1.weight.t(), rows @ expert.w3.weight.t()
    h = activate(gate, up, activation, 1.3, 0.4)
    torch.testing.assert_close(output.flatten(0, 1), h @ expert.w2.weight.t())

    d = torch.randn_like(output)
    output.backward(d)
    d = d.flatten(0, 1)
    one = torch.ones(rows.shape[0], 1)
    _, d_gate, d_up = activation_backward(gate, up, d @ expert.w2.weight, one, activation, 1.3, 0.4)
    torch.testing.assert_close(expert.w2.weight.grad, d.t() @ h)
    torch.testing.assert_close(expert.w1.weight.grad, d_gate.t() @ rows)
    torch.testing.assert_close(expert.w3.weight.grad, d_up.t() @ rows)
    torch.testing.assert_close(x.grad.flatten(0, 1), d_gate @ expert.w1.weight + d_up @ expert.w3.weight)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_its_activations_are_autoeps(activation):
    apply = pytest.importorskip("deepspeed.moe.ep_experts").__dict__.get("apply_expert_activation")
    if apply is None:
        pytest.skip("this release of DeepSpeed has no registry of activations")
    expert = _expert(activation, dtype=torch.bfloat16)
    x = torch.randn(37, 48, dtype=torch.bfloat16)
    h = apply(expert.w1(x), expert.w3(x), activation, 1.3, 0.4, fused=False)
    assert torch.equal(expert(x), expert.w2(h))


def test_weights_are_those_of_linear_layers():
    expert = SwiGLUExpert(128, 256, dtype=torch.bfloat16, device="meta")
    shapes = {name: tuple(parameter.shape) for name, parameter in expert.named_parameters()}
    assert shapes == {"w1.weight": (256, 128), "w2.weight": (128, 256), "w3.weight": (256, 128)}
    assert all(p.dtype == torch.bfloat16 and p.device.type == "meta" for p in expert.parameters())
    assert "activation='swiglu'" in repr(expert) and "limit" not in repr(expert)
    assert "alpha=1.3, limit=0.4" in repr(_expert("swiglu_oai"))


def test_a_copy_computes_the_same():
    expert = _expert("swiglu_oai")
    x = torch.randn(5, 48)
    assert torch.equal(copy.deepcopy(expert)(x), expert(x))


def test_what_it_refuses():
    with pytest.raises(ValueError, match="activation must be one of swiglu, .*, got 'relu'"):
        SwiGLUExpert(128, 128, activation="relu")
    with pytest.raises(ValueError, match="at least 1, got 128 and 0"):
        SwiGLUExpert(128, 0)
