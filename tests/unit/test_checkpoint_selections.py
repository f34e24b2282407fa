# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Routing in a recomputation that sees other values than the forward: it is the forward's, or an error by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ds_fp4
from ds_fp4.selections import RoutingError, Selections, selecting
from tests.unit.checkpoint_scenarios import unpacked

TOKENS, HIDDEN, EXPERTS = 256, 64, 16
# Far enough from the values that the router would often choose otherwise.
PACKED = {"ds_fp4_format": "mxfp4"}


class _MoE(nn.Module):
    """Router and experts in one process; notes which tokens each call sends where."""

    def __init__(self, select) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS)])
        self.select = select
        self.routes: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.select(self.router(x).softmax(-1))
        self.routes.append(chosen.detach().clone())
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            output = output.index_add(0, token, expert(x[token]).relu() * weights[token, slot, None])
        return output


def _by_argmax(scores):
    first = scores.argmax(dim=-1)
    second = torch.argmax(scores.masked_fill(nn.functional.one_hot(first, EXPERTS).bool(), -1.0), dim=-1)
    chosen = torch.stack([first, second], -1)
    return scores.gather(-1, chosen), chosen


def _by_sort(scores):
    values, order = torch.sort(scores, dim=-1, descending=True)
    return values[:, :2], order[:, :2]


def _by_max(scores):
    values, indices = scores.max(dim=-1)
    return values[:, None], indices[:, None]


def _by_argsort(scores):
    chosen = scores.argsort(-1, descending=True)[:, :2]
    return scores.gather(-1, chosen), chosen


def _by_group(scores):
    groups = scores.view(-1, 4, EXPERTS // 4)
    best = groups.topk(2, dim=-1)[0].sum(-1).topk(k=2, dim=-1, sorted=False).indices
    allowed = torch.zeros_like(scores.view(-1, 4, EXPERTS // 4)[..., 0], dtype=torch.bool).scatter(1, best, True)
    masked = groups.masked_fill(~allowed[..., None], 0.0).flatten(1)
    return torch.topk(input=masked, k=2)


SELECTIONS = {
    "topk": lambda scores: torch.topk(scores, 2, dim=-1),
    "topk method": lambda scores: scores.topk(2),
    "argmax": _by_argmax,
    "sort": _by_sort,
    "max": _by_max,
    "argsort": _by_argsort,
    "groups": _by_group,
}


def _routes(select, exact: bool, format: str = "mxfp4") -> tuple[_MoE, torch.Tensor]:
    model = _MoE(select)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = ds_fp4.checkpoint(model, x, ds_fp4_exact=exact, ds_fp4_format=format, early_stop=False)
    y.square().sum().backward()
    return model, x


@pytest.mark.parametrize("name", SELECTIONS)
def test_routing_is_the_forwards(name):
    model, x = _routes(SELECTIONS[name], exact=False)
    forward, recomputed = model.routes
    assert torch.equal(forward, recomputed)
    with torch.no_grad():
        _, free = SELECTIONS[name](model.router(unpacked(x)).softmax(-1))
    assert not torch.equal(free, forward), "the values are too close: this would have passed without keeping anything"


@pytest.mark.parametrize("name", SELECTIONS)
def test_gradients_are_those_of_the_recomputed_values_with_the_forwards_routing(name):
    model, x = _routes(SELECTIONS[name], exact=False)
    kept = model.routes[0]
    gradients = [p.grad.clone() for p in model.parameters()]

    def with_kept_routing(scores):
        return scores.gather(-1, kept), kept

    # The output's gradient comes from the forward, what it is multiplied with from the recomputation.
    model.zero_grad()
    model.select = SELECTIONS[name]
    upstream = 2 * model(x.detach())
    model.select = with_kept_routing
    model(unpacked(x)).backward(upstream.detach())
    if name == "groups":  # the values that the groups' scores are made of are differentiated too, to nothing
        assert len(gradients) == len(list(model.parameters()))
    for a, b in zip(gradients, [p.grad for p in model.parameters()], strict=True):
        torch.testing.assert_close(a, b)


def test_exact_needs_no_record():
    model, x = _routes(SELECTIONS["topk"], exact=True)
    assert torch.equal(*model.routes)
    with torch.no_grad():
        assert torch.equal(SELECTIONS["topk"](model.router(unpacked(x)).softmax(-1))[1], model.routes[0])


@pytest.mark.parametrize("inner_exact", (True, False))
def test_nested_checkpoints_keep_routing_too(inner_exact):
    model = _MoE(SELECTIONS["topk"])
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)

    def outer(x):
        return ds_fp4.checkpoint(model, x * 1.5, **PACKED, ds_fp4_exact=inner_exact, early_stop=False) * x

    ds_fp4.checkpoint(outer, x, **PACKED, ds_fp4_exact=False, early_stop=False).square().sum().backward()
    # forward, forward within outer's recomputation, recomputation of that
    assert len(model.routes) == 3 and all(torch.equal(route, model.routes[0]) for route in model.routes)


def test_backward_twice_replays_from_the_start():
    model = _MoE(SELECTIONS["groups"])
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    y = ds_fp4.checkpoint(model, x, **PACKED, ds_fp4_exact=False, early_stop=False).square().sum()
    y.backward(retain_graph=True)
    y.backward()
    assert len(model.routes) == 3 and all(torch.equal(route, model.routes[0]) for route in model.routes)


def test_another_path_is_refused_by_name():
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    threshold = x.detach().abs().amax()

    def function(x):
        # Packing changes the largest value, and so which selection is made.
        y = x.sin() if x.abs().amax() == threshold else x.topk(3, dim=0).values.sin().sum(0) + x.sin()
        return y.topk(2, dim=-1).values.exp()

    with pytest.raises(RoutingError) as error:
        ds_fp4.checkpoint(function, x, **PACKED, ds_fp4_exact=False).sum().backward()
    assert (
        "selection 1 of the recomputation is topk of (256, 64), dim 0; the forward's was topk of (256, 64), dim -1"
        in str(error.value)
    )
    assert "Set ds_fp4_exact=True (ds_fp4.checkpointing.exact)" in str(error.value)


def test_what_is_no_selection_is_left_alone():
    x = torch.randn(8, 8)
    selections = Selections()
    with selections.recording():
        assert selecting()
        torch.max(x)
        torch.max(x, x)
        x.max()
        torch.arange(8).topk(2)
        torch.sort(torch.arange(8))
        x.sum().topk(1)
    assert not selecting()
    assert [made.name for made in selections._made] == ["topk"]


@pytest.mark.parametrize(
    "function",
    (
        lambda x: x.topk(3),
        lambda x: x.topk(3, 0),
        lambda x: x.sort(),
        lambda x: torch.sort(x, 0, True),
        lambda x: torch.sort(x, stable=True, dim=0),
        lambda x: x.max(1),
        lambda x: x.max(dim=0, keepdim=True),
        lambda x: torch.min(x, -1),
        lambda x: x.kthvalue(2),
        lambda x: torch.kthvalue(x, 2, 0),
        lambda x: x.argmax(),
        lambda x: x.argmax(1, keepdim=True),
        lambda x: torch.argmin(x, 0),
        lambda x: x.argsort(descending=True),
        lambda x: torch.softmax(x, -1).multinomial(2),
    ),
)
def test_replaying_on_the_same_values_changes_nothing(function):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2), requires_grad=True)
    selections = Selections()
    torch.manual_seed(0)
    with selections.recording():
        recorded = function(x)
    y = x.detach().clone().requires_grad_()
    with selections.replaying():
        replayed = function(y)
    assert type(replayed) is type(recorded)
    if isinstance(recorded, torch.Tensor):
        assert torch.equal(recorded, replayed) and replayed.dtype == recorded.dtype
        return
    assert torch.equal(recorded.values, replayed.values) and torch.equal(recorded.indices, replayed.indices)
    recorded.values.square().sum().backward()
    replayed.values.square().sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_indices_are_kept_small():
    selections = Selections()
    with selections.recording():
        torch.rand(4, 256).topk(8)
        torch.rand(1 << 16).argmax()
        torch.rand(2, 1 << 16).topk(2, dim=0)
    assert [made.indices.dtype for made in selections._made] == [torch.int16, torch.int32, torch.int16]
