# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The expert level as an autograd function: what it computes, what it skips, what it keeps, what it refuses."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from ds_fp4.experts import weights_changed
from ds_fp4.experts.weights import WeightCache
from ds_fp4.gemm import GemmBackends
from ds_fp4.gemm.emulation import EmulationBackend
from tests.unit.expert_cases import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    CountingBackend,
    make_layer,
    make_problem,
    recipe_of,
    relative_error,
    spec_of,
)
from tests.unit.expert_emulation import emulate


def _equal(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def _emulated(problem, recipe) -> dict:
    return emulate(
        problem.x.detach(), problem.scores.detach(), problem.expert_ids, problem.weights, problem.dy, recipe
    )


def _matches(result: dict, expected: dict) -> None:
    for name, value in result.items():
        if expected[name].count_nonzero() == 0:
            assert value.count_nonzero() == 0, name
        else:
            assert relative_error(value, expected[name]) <= 4e-3, name


@pytest.mark.parametrize("k", (1, 4, 8))
@pytest.mark.parametrize("recipe", ("fp8", "mxfp4"))
def test_top_k(recipe, k):
    problem = make_problem(tokens=90, k=k)
    _matches(problem.run(make_layer(recipe_of(recipe), spec_of(k))), _emulated(problem, recipe_of(recipe)))


def test_experts_without_tokens_get_zeros():
    ids = torch.tensor([[1, 6]]).repeat(50, 1)
    problem = make_problem(expert_ids=ids)
    result = problem.run(make_layer())
    _matches(result, _emulated(problem, recipe_of()))
    for name in ("w1", "w2", "w3"):
        used = result[name].float().abs().amax((1, 2)) > 0
        assert used.nonzero().flatten().tolist() == [1, 6]


def test_slots_without_an_expert():
    generator = torch.Generator().manual_seed(3)
    problem = make_problem(tokens=60, k=3)
    dropped = torch.rand(problem.expert_ids.shape, generator=generator) < 0.3
    dropped[:5] = True
    problem = problem._replace(expert_ids=problem.expert_ids.masked_fill(dropped, -1))
    result = problem.run(make_layer(spec=spec_of(3)))
    _matches(result, _emulated(problem, recipe_of()))
    assert result["scores"][dropped].count_nonzero() == 0
    assert result["output"][:5].count_nonzero() == 0 and result["x"][:5].count_nonzero() == 0


@pytest.mark.parametrize(
    "ids", (torch.empty(0, 2, dtype=torch.int64), torch.full((7, 2), -1)), ids=("none", "dropped")
)
@pytest.mark.parametrize("recompute", ("activation", "fc1"))
def test_no_rows_at_all(ids, recompute):
    problem = make_problem(expert_ids=ids)
    result = problem.run(make_layer(recipe_of(recompute=recompute)))
    for name, value in result.items():
        assert value is not None and value.count_nonzero() == 0, name


def test_int32_ids_and_other_layouts():
    problem = make_problem()
    expected = problem.run(make_layer())
    x = problem.x.detach().repeat(1, 2)[:, :HIDDEN].requires_grad_()
    same = problem._replace(x=x, expert_ids=problem.expert_ids.to(torch.int32).t().contiguous().t())
    _equal(same.run(make_layer()), expected)
    one = torch.ones((), dtype=torch.bfloat16)
    spread = problem._replace(dy=one.expand_as(problem.dy)).run(make_layer())
    _equal(spread, problem._replace(dy=torch.ones_like(problem.dy)).run(make_layer()))


def test_two_runs_give_the_same_bits():
    problem = make_problem(k=4)
    layer = make_layer(spec=spec_of(4))
    _equal(problem.run(layer), problem.run(layer))


def test_called_twice_before_backward():
    layer = make_layer()
    first, second = (make_problem(seed=seed, dtype=torch.float32) for seed in (0, 1))
    second = second._replace(weights=first.weights)
    alone = [problem.run(layer) for problem in (first, second)]
    for leaf in (*first.leaves().values(), *second.leaves().values()):
        leaf.grad = None
    outputs = [layer(p.x, p.scores, p.expert_ids, p.weights) for p in (first, second)]
    torch.autograd.backward(outputs, (first.dy, second.dy))
    for number, problem in enumerate((first, second)):
        assert torch.equal(problem.x.grad, alone[number]["x"])
        assert torch.equal(problem.scores.grad, alone[number]["scores"])
    for name, weight in zip(("w1", "w2", "w3"), first.weights, strict=True):
        assert torch.equal(weight.grad, alone[0][name] + alone[1][name]), name


def test_four_accumulated_are_the_sum_of_four():
    layer = make_layer()
    whole = make_problem(tokens=400, dtype=torch.float32)
    parts = [
        whole._replace(
            x=whole.x.detach()[rows].requires_grad_(),
            scores=whole.scores.detach()[rows].requires_grad_(),
            expert_ids=whole.expert_ids[rows],
            dy=whole.dy[rows],
        )
        for rows in torch.arange(400).chunk(4)
    ]
    alone = [part.run(layer) for part in parts]
    for weight in whole.weights:
        weight.grad = None
    for part in parts:
        layer(part.x, part.scores, part.expert_ids, part.weights).backward(part.dy)
    for name, weight in zip(("w1", "w2", "w3"), whole.weights, strict=True):
        assert relative_error(weight.grad, sum(result[name] for result in alone)) < 1e-6


@pytest.mark.parametrize(
    "frozen, calls", [("", 2), ("w1", 2), ("w2", 1), ("w3", 2), ("w1 w3", 1), ("w1 w2 w3", 0)], ids=lambda v: str(v)
)
def test_frozen_experts_have_no_weight_gradient(frozen, calls):
    problem = make_problem()
    expected = problem.run(make_layer())
    for name in frozen.split():
        problem.leaves()[name].requires_grad_(False)
    layer = make_layer()
    result = problem.run(layer)
    for name, value in result.items():
        assert value is None if name in frozen.split() else torch.equal(value, expected[name]), name
    assert layer.gemms.weight_gradient.wgrad == calls


@pytest.mark.parametrize("needed, gemms", [(("w2",), 1), (("scores", "w1"), 2), (("x",), 2)], ids=str)
def test_what_needs_no_gradient_is_not_computed(needed, gemms):
    problem = make_problem(expert_ids=torch.zeros(9, 1, dtype=torch.int64))
    expected = problem.run(make_layer(spec=spec_of(1)))
    for name, leaf in problem.leaves().items():
        leaf.grad = None
        leaf.requires_grad_(name in needed)
    layer = make_layer(spec=spec_of(1))
    output = layer(problem.x, problem.scores, problem.expert_ids, problem.weights)
    before = layer.gemms.forward.grouped
    output.backward(problem.dy)
    assert layer.gemms.forward.grouped - before == gemms
    for name, leaf in problem.leaves().items():
        assert torch.equal(leaf.grad, expected[name]) if name in needed else leaf.grad is None, name


def test_without_gradients():
    problem = make_problem()
    expected = problem.run(make_layer())
    for context in (torch.no_grad, torch.inference_mode):
        layer = make_layer()
        with context():
            output = layer(problem.x, problem.scores, problem.expert_ids, problem.weights)
        assert output.grad_fn is None and torch.equal(output, expected["output"])
        # What was made there is used, or made again, when training goes on.
        _equal(problem.run(layer), expected)


def test_autocast_changes_nothing():
    problem = make_problem(dtype=torch.float32)
    expected = problem.run(make_layer())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = problem.run(make_layer())
    _equal(result, expected)


def test_no_second_derivative():
    problem = make_problem()
    output = make_layer()(problem.x, problem.scores, problem.expert_ids, problem.weights)
    (gradient,) = torch.autograd.grad(output, problem.x, problem.dy.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.float().sum().backward()


@pytest.mark.parametrize("cache", ("step", "none"))
@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("recompute", ("activation", "fc1"))
def test_gradient_checkpointing(recompute, reentrant, cache):
    problem = make_problem()
    layer = make_layer(recipe_of(recompute=recompute, weight_cache=cache))
    expected = problem.run(layer)
    for leaf in problem.leaves().values():
        leaf.grad = None
    output = checkpoint(layer, problem.x, problem.scores, problem.expert_ids, problem.weights, use_reentrant=reentrant)
    output.backward(problem.dy)
    if reentrant:  # sees tensors among its own arguments only, not in the tuple of weights
        assert torch.equal(problem.x.grad, expected["x"])
    else:
        _equal({"output": output.detach(), **{n: leaf.grad for n, leaf in problem.leaves().items()}}, expected)


@pytest.mark.parametrize("cache", ("step", "none"))
def test_hooks_on_saved_tensors(cache):
    problem = make_problem()
    layer = make_layer(recipe_of(weight_cache=cache))
    expected = problem.run(layer)
    with torch.autograd.graph.save_on_cpu():
        _equal(problem.run(layer), expected)
    import ds_fp4

    with ds_fp4.saved_tensors():
        _equal(problem.run(layer), expected)


def test_a_copied_layer_computes_the_same_with_weights_of_its_own():
    problem = make_problem()
    layer = make_layer(recipe_of(weight_cache="step"))
    expected = problem.run(layer)
    copied = copy.deepcopy(layer)
    assert copied.cache is not layer.cache and copied.gemms is layer.gemms
    _equal(problem.run(copied), expected)


@pytest.mark.parametrize("cache", ("step", "none"))
def test_a_matrix_an_expert(cache):
    problem = make_problem()
    expected = problem.run(make_layer())
    matrices = [w.detach()[e].clone().requires_grad_() for w in problem.weights for e in range(EXPERTS)]
    matrices[3].requires_grad_(False)
    problem.x.grad = None
    layer = make_layer(recipe_of(weight_cache=cache))
    output = layer(problem.x, problem.scores, problem.expert_ids, matrices)
    output.backward(problem.dy)
    assert torch.equal(output, expected["output"]) and torch.equal(problem.x.grad, expected["x"])
    assert matrices[3].grad is None
    for number, matrix in enumerate(matrices):
        name = ("w1", "w2", "w3")[number // EXPERTS]
        assert number == 3 or torch.equal(matrix.grad, expected[name][number % EXPERTS]), number


def test_one_expert_as_matrices():
    problem = make_problem(k=1, experts=1)
    spec = spec_of(1, local_experts=1)
    expected = problem.run(make_layer(spec=spec))
    matrices = [w.detach()[0].clone().requires_grad_() for w in problem.weights]
    output = make_layer(spec=spec)(problem.x, problem.scores, problem.expert_ids, matrices)
    output.backward(problem.dy)
    assert torch.equal(output, expected["output"])
    for matrix, name in zip(matrices, ("w1", "w2", "w3"), strict=True):
        assert torch.equal(matrix.grad, expected[name][0])


# FP8 copies of the weights


FORWARD, BACKWARD = ("w13", "w2"), ("w13_t", "w2_t")


def _times(forward: int, backward: int, w13_again: int = 0) -> dict[str, int]:
    """Expected quantizations, those that are none left out."""
    times = {**dict.fromkeys(FORWARD, forward), **dict.fromkeys(BACKWARD, backward)}
    times["w13"] += w13_again
    return {operand: n for operand, n in times.items() if n}


class _Counted:
    """A layer whose quantizations of weights are counted by operand, and the most bytes of codes alive at a time."""

    def __init__(self, weight_cache: str = "step", **experts: str) -> None:
        self.layer, self.counts = make_layer(recipe_of(weight_cache=weight_cache, **experts)), Counter()
        self.most = 0
        self._alive: list[weakref.ref] = []
        original = self.layer.cache._quantize

        def counting(weights, operand):
            self.counts[operand] += 1
            codes, scales = original(weights, operand)
            self._alive.append(weakref.ref(codes))
            self.most = max(self.most, sum(t.nbytes for t in (alive() for alive in self._alive) if t is not None))
            return codes, scales

        self.layer.cache._quantize = counting


def test_weights_are_quantized_once_until_they_change():
    problem = make_problem(tokens=20)
    counted = _Counted()
    for _ in range(4):
        problem.run(counted.layer)
    assert counted.counts == _times(1, 1)
    weights_changed()
    problem.run(counted.layer)
    assert counted.counts == _times(2, 2)
    # One byte a parameter and orientation; those of the old weights went before.
    assert counted.most == 2 * sum(w.numel() for w in problem.weights)


@pytest.mark.parametrize("recompute", ("activation", "fc1"))
def test_without_a_cache_every_use_quantizes_what_it_needs(recompute):
    problem = make_problem(tokens=20)
    expected = problem.run(make_layer(recipe_of(weight_cache="step", recompute=recompute)))
    counted = _Counted(weight_cache="none", recompute=recompute)
    for run in (1, 2):
        _equal(problem.run(counted.layer), expected)
        assert counted.counts == _times(run, run, run if recompute == "fc1" else 0)
    # None outlives its GEMM.
    assert counted.most == sum(problem.weights[kind].numel() for kind in (0, 2))
    assert not counted.layer.cache._kept


@pytest.mark.parametrize("without", (torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("cache", ("step", "none"))
def test_without_a_backward_nothing_is_transposed(cache, without):
    problem = make_problem(tokens=20)
    counted = _Counted(weight_cache=cache)
    evaluations = 3
    with without():
        for _ in range(evaluations):
            counted.layer(problem.x, problem.scores, problem.expert_ids, problem.weights)
    forwards = 1 if cache == "step" else evaluations
    assert counted.counts == _times(forwards, 0)
    # A backward makes the rest; what the evaluation made is good for its forward.
    _equal(problem.run(counted.layer), problem.run(make_layer()))
    assert counted.counts == _times(forwards + (cache == "none"), 1)


@pytest.mark.parametrize("recompute", ("activation", "fc1"))
def test_weights_that_change_before_backward(recompute):
    """Backward takes them as they are then, all of its operands, as DeepSpeed's own would."""
    results = []
    for cache in ("step", "none"):
        problem = make_problem(tokens=20)
        counted = _Counted(weight_cache=cache, recompute=recompute)
        output = counted.layer(problem.x, problem.scores, problem.expert_ids, problem.weights)
        assert counted.counts == _times(1, 0)
        for weight in problem.weights:
            weight.data.mul_(-3)  # as an optimizer does, unseen by autograd
        weights_changed()
        output.backward(problem.dy)
        assert counted.counts == _times(1, 1, 1 if recompute == "fc1" else 0)
        results.append({"output": output, **{name: leaf.grad for name, leaf in problem.leaves().items()}})
        # Nothing of the old weights is left for the next forward.
        after = problem.run(counted.layer)
        _equal(after, problem.run(make_layer(recipe_of(recompute=recompute))))
        if recompute == "fc1":  # nothing of the first forward entered that backward
            assert torch.equal(results[-1]["x"], after["x"])
    _equal(*results)


def test_changes_by_hand_are_noticed():
    problem = make_problem(tokens=20)
    layer, uncached = (make_layer(recipe_of(weight_cache=cache)) for cache in ("step", "none"))

    def check() -> None:
        _equal(problem.run(layer), problem.run(uncached))

    check()
    for weight in problem.weights:
        with torch.no_grad():
            weight.mul_(1.5)
        check()
    state = {name: torch.randn_like(w) for name, w in zip("abc", problem.weights, strict=True)}
    module = torch.nn.ParameterDict(dict(zip("abc", problem.weights, strict=True)))
    module.load_state_dict(state)
    check()
    problem.weights[0].data = torch.randn_like(problem.weights[0])
    check()


def test_a_write_through_data_has_to_be_told():
    problem = make_problem(tokens=20)
    layer, uncached = (make_layer(recipe_of(weight_cache=cache)) for cache in ("step", "none"))
    problem.run(layer)
    problem.weights[1].data.mul_(2)
    # What weights_changed is for. If this fails, the cache notices more than it promises.
    assert not torch.equal(problem.run(layer)["output"], problem.run(uncached)["output"])
    weights_changed()
    _equal(problem.run(layer), problem.run(uncached))


@pytest.mark.parametrize("checkpointed", (False, True))
def test_of_weights_that_come_and_go_no_copy_stays(checkpointed):
    problem = make_problem(tokens=20)
    for weight in problem.weights:
        weight.ds_id = 0  # as ZeRO-3 marks its parameters
    counted = _Counted()
    arguments = (problem.x, problem.scores, problem.expert_ids, problem.weights)
    # Non-reentrant checkpointing hands backward detached weights, which bear no mark.
    output = checkpoint(counted.layer, *arguments, use_reentrant=False) if checkpointed else counted.layer(*arguments)
    output.backward(problem.dy)
    assert counted.counts == _times(2 if checkpointed else 1, 1)
    assert not counted.layer.cache._kept


# What is kept


@pytest.mark.parametrize("recompute", ("activation", "fc1"))
@pytest.mark.parametrize("saved", ("mxfp4", "fp8", "bf16"))
@pytest.mark.parametrize("dispatch", ("mxfp4", "fp8", "bf16"))
def test_bytes_kept_for_backward(dispatch, saved, recompute):
    experts, tokens, k = 4, 256, 2
    token = torch.arange(tokens)[:, None]
    ids = torch.cat([token % experts, (token + 1) % experts], 1)  # 128 rows each: no padding
    problem = make_problem(expert_ids=ids, hidden=512, experts=experts)
    recipe = recipe_of("mxfp4", {"dispatch_forward": dispatch}, saved_activations=saved, recompute=recompute)
    layer = make_layer(recipe, spec_of(hidden=512, local_experts=experts))
    storages: dict[int, tuple[int, bool]] = {}
    parameters = {weight.untyped_storage().data_ptr() for weight in problem.weights}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = (storage.nbytes(), t.element_size() < 4)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = layer(problem.x, problem.scores, problem.expert_ids, problem.weights)
    rows = tokens * k
    kept = sum(size for size, data in storages.values() if data) / rows
    expected = layer.spec.kept_bytes(recipe, 0.5)
    assert expected <= kept <= 1.1 * expected
    assert sum(size for size, data in storages.values() if not data) / rows < 40  # routing
    output.backward(problem.dy)


def test_nothing_else_stays_alive():
    problem = make_problem(tokens=300)
    layer = make_layer()
    problem.run(layer)

    def alive() -> dict[int, int]:
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
        storages = (t.untyped_storage() for t in tensors if t.layout is torch.strided)
        return {storage.data_ptr(): storage.nbytes() for storage in storages}

    before = alive()
    output = layer(problem.x, problem.scores, problem.expert_ids, problem.weights)
    routing_bytes = 300 * 2 * 16
    expected = {t.untyped_storage().data_ptr() for t in (output, *output.grad_fn.saved_tensors)}
    new = {p: size for p, size in alive().items() if p not in before and p not in expected}
    assert all(size < routing_bytes for size in new.values()), new
    for leaf in problem.leaves().values():
        leaf.grad = None
    del expected
    output.backward(problem.dy)
    gradients = {leaf.grad.untyped_storage().data_ptr() for leaf in problem.leaves().values()}
    del output
    new = {p: size for p, size in alive().items() if p not in before and p not in gradients}
    assert not any(size >= routing_bytes for size in new.values()), new


def test_backward_lets_go_of_what_it_has_used(monkeypatch):
    problem, layer = make_problem(tokens=300), make_layer()
    read: dict[str, StorageWeakRef] = {}  # as long as anybody holds it
    left: list[set[str]] = []  # at each weight gradient

    def note(name: str, t: torch.Tensor) -> None:
        read[name] = StorageWeakRef(t.untyped_storage())

    def noting(owner, method: str, *names: str) -> None:
        original = getattr(owner, method)

        def call(*args):
            for name, t in zip(names, args, strict=False):
                note(name, t)
            return original(*args)

        monkeypatch.setattr(owner, method, call)

    def activate(dh, weights, kept, group_sizes, original=layer.compute.activate_backward):
        for name, t in zip(("gate_up", "its scales"), kept, strict=True):
            note(name, t)
        d = original(dh, weights, kept, group_sizes)
        for name in ("row", "col", "h_col"):
            note(name, getattr(d, name))
        return d

    def gradient(*args, original=layer.compute.weight_gradient):
        left.append({name for name, storage in read.items() if not storage.expired()})
        original(*args)

    noting(layer.combine_backward, "gemm_columns", "gradient")
    noting(layer.dispatch, "gemm_columns", "received")
    monkeypatch.setattr(layer.compute, "activate_backward", activate)
    monkeypatch.setattr(layer.compute, "weight_gradient", gradient)
    once = problem.run(layer)
    assert left == [{"h_col", "col"}, {"col"}]
    # But not of a graph that is kept.
    for leaf in problem.leaves().values():
        leaf.grad = None
    output = layer(problem.x, problem.scores, problem.expert_ids, problem.weights)
    output.backward(problem.dy, retain_graph=True)
    kept = {"gate_up", "its scales", "received"}
    assert left[3] == {"col", *kept}
    read.clear()
    for leaf in problem.leaves().values():
        leaf.grad = None
    output.backward(problem.dy)
    assert left[4:] == [{"h_col", "col"}, {"col"}]
    _equal({"output": output.detach(), **{name: leaf.grad for name, leaf in problem.leaves().items()}}, once)


def test_columns_have_the_scales_that_weight_gradients_are_best_given():
    problem = make_problem(tokens=300)
    handed, results = {}, []

    class Watched(EmulationBackend):
        def __init__(self, layout):
            self.column_scale_layout = layout

        def weight_gradient(self, a, b, groups, outs):
            handed.setdefault(self.column_scale_layout, []).append((a[1].dim(), b[1].dim()))
            super().weight_gradient(a, b, groups, outs)

    for forward, layout in (("gemm", "blocks"), ("blocks", "gemm")):
        layer = make_layer(gemms=GemmBackends(Watched(forward), Watched(layout)))
        results.append(problem.run(layer))
        for leaf in problem.leaves().values():
            leaf.grad = None
    # Of w2's gradient a is made from rows, of w1's and w3's b.
    assert handed == {"blocks": [(1, 2), (2, 1)], "gemm": [(2, 2), (2, 2)]}
    _equal(*results)


def test_on_one_rank_gradients_of_tokens_lie_together():
    problem, layer = make_problem(tokens=300), make_layer()
    seen = []
    hook = problem.x.register_hook(lambda gradient: seen.append(gradient.stride()))
    problem.run(layer)
    hook.remove()
    assert seen == [(HIDDEN, 1)]  # else autograd copies them
    assert layer.dispatch_backward.record_bytes == 2 * HIDDEN


# What is refused, and what must not be hidden


@pytest.mark.parametrize("value", (float("nan"), float("inf"), float("-inf")))
@pytest.mark.parametrize("where", ("x", "scores", "w1", "w2", "w3"))
@pytest.mark.parametrize("recipe", ("fp8", "mxfp4"))
def test_what_is_not_finite_reaches_output_and_gradients(recipe, where, value):
    problem = make_problem(tokens=40)
    leaf = problem.leaves()[where]
    with torch.no_grad():
        if where in ("x", "scores"):
            leaf[3, 1] = value
        else:
            leaf[int(problem.expert_ids[3, 0]), 5, 7] = value
    result = problem.run(make_layer(recipe_of(recipe)))
    assert not result["output"][3].isfinite().all() and not result["output"].float().sum().isfinite()
    assert not result["x"][3].isfinite().all()
    if where in ("x", "scores"):
        others = torch.arange(40) != 3
        assert result["output"][others].isfinite().all()
    problem = make_problem(tokens=40)
    problem.dy[4, 2] = value
    result = problem.run(make_layer(recipe_of(recipe)))
    assert all(not result[name].isfinite().all() for name in ("x", "scores", "w1", "w2", "w3"))


def _wrong(**changes):
    problem = make_problem(tokens=8)
    return {"x": problem.x, "scores": problem.scores, "expert_ids": problem.expert_ids, "weights": problem.weights,
            **{name: change(getattr(problem, name)) for name, change in changes.items()}}  # fmt: skip


WRONG = [
    (dict(x=lambda x: x[:, :128]), rf"x must have shape \[T, {HIDDEN}\], got \(8, 128\)"),
    (dict(x=lambda x: x[None]), r"x must have shape"),
    (dict(x=lambda x: x.double()), "x must be BF16, FP16 or FP32, got torch.float64"),
    (dict(x=lambda x: x.to("meta")), "on one device, got meta and cpu"),
    (dict(scores=lambda s: s[:, :1]), r"scores must have shape \(8, 2\), got \(8, 1\)"),
    (dict(scores=lambda s: s.long()), "scores must be of a floating point dtype, got torch.int64"),
    (dict(expert_ids=lambda i: i[:7]), r"expert_ids must have shape \(8, 2\), got \(7, 2\)"),
    (dict(expert_ids=lambda i: i.float()), "expert_ids must be int32 or int64, got torch.float32"),
    (dict(expert_ids=lambda i: i + 7), "expert_ids must be -1 or 0 to 7, got values from 7 to"),
    (dict(expert_ids=lambda i: i - 2), "expert_ids must be -1 or 0 to 7, got values from -2"),
    (dict(weights=lambda w: w[:2]), "weights must be three tensors of 8 experts or 24 matrices, got shapes"),
    (dict(weights=lambda w: [torch.empty(0)] * 3), "under ZeRO-3 they have to be gathered"),
    (
        dict(weights=lambda w: (w[1], w[0], w[2])),
        rf"w1 must be .* \[8, {INTERMEDIATE}, {HIDDEN}\], got torch.bfloat16",
    ),
    (dict(weights=lambda w: (w[0], w[1], w[2][:4])), rf"w3 must be .*, got torch.bfloat16 \[4, {INTERMEDIATE}"),
    (dict(weights=lambda w: (w[0], w[1].double(), w[2])), "w2 must be BF16, FP16 or FP32 .* got torch.float64"),
    (dict(weights=lambda w: (w[0], w[1].to("meta"), w[2])), "on one device, got cpu and meta"),
]


@pytest.mark.parametrize("changes, message", WRONG, ids=[message[:30] for _, message in WRONG])
def test_wrong_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        make_layer()(**_wrong(**changes))


@pytest.mark.parametrize(
    "spec, reason",
    [
        (dict(hidden=192), "hidden size 192 is not a multiple of 128"),
        (dict(intermediate=64), "intermediate size 64 is not a multiple of 128"),
        (dict(activation="relu"), "activation 'relu' is none of swiglu"),
        (dict(k=33), "a token 33 experts, more than 32"),
        (dict(local_experts=1025), "1025 experts on each of 1 ranks"),
        (dict(local_experts=1000, ep_size=8), "8000 experts, more than 4096"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_layers_that_cannot_be_computed(spec, reason):
    with pytest.raises(ValueError, match=f"cannot compute this layer: .*{reason}"):
        make_layer(spec=spec_of(**spec))


def test_the_counting_backend_is_the_emulation():
    assert CountingBackend.name == "emulation"


def test_fp8_weights_are_freed_when_their_epoch_ends():
    cache = WeightCache(keep=True)
    parameters = [torch.randn(2, 128, 128, dtype=torch.bfloat16) for _ in range(3)]
    kept = weakref.ref(cache.get(parameters, "w13")[0])
    gc.collect()
    assert kept() is not None
    weights_changed()
    gc.collect()
    assert kept() is None
