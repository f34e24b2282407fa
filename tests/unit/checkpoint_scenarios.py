# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""What a checkpointing function has to cope with, each as a small computation over `ck(function, *args, **kwargs)`.

A scenario returns tensors: outputs and gradients. Its inputs (`values`) come out of packing unchanged, so PyTorch's
checkpoint and ds_fp4's, exact or not, must give the same bits.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ds_fp4.packing import Format, Packer

ROWS, WIDTH = 48, 64
Pair = namedtuple("Pair", "left right")


def unpacked(x: torch.Tensor, format: str = "mxfp4") -> torch.Tensor:
    """The values that `x` has once packed, as a leaf that needs a gradient."""
    view, buffer = Packer(Format(format)).pack(x)
    return view.of(view.run.decode(buffer)).clone().requires_grad_()


class Case:
    """Inputs, a module and a checkpointing function, equal in every run of a scenario."""

    def __init__(self, ck: Callable, format: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.ck, self.format = ck, format
        self.device, self.dtype = torch.device(device), dtype
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * WIDTH, WIDTH)
        ).to(self.device, dtype)

    def values(self, seed: int = 1, shape: tuple[int, ...] = (ROWS, WIDTH)) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return unpacked(
            torch.randn(shape, generator=generator).to(self.device, self.dtype).requires_grad_(), self.format
        )

    def finish(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Backward of the sum of squares; outputs and all gradients."""
        torch.manual_seed(5)
        sum(output.float().square().sum() for output in outputs if output.requires_grad).backward()
        return self.results(outputs, inputs)

    def results(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        tensors = [*outputs, *(x.grad for x in inputs), *(p.grad for p in self.net.parameters())]
        return [t.detach().clone() for t in tensors if t is not None]


SCENARIOS: dict[str, Callable[[Case], list[torch.Tensor]]] = {}


def scenario(function: Callable[[Case], list[torch.Tensor]]) -> Callable[[Case], list[torch.Tensor]]:
    SCENARIOS[function.__name__] = function
    return function


@scenario
def dropout(case: Case) -> list[torch.Tensor]:
    x = case.values()
    return case.finish([case.ck(case.net, x)], [x])


@scenario
def several_outputs_and_none(case: Case) -> list[torch.Tensor]:
    x = case.values()

    def function(x):
        y = case.net(x)
        return y, None, (y * 2).tanh(), {"detached": y.detach(), "text": "as it is"}

    y, nothing, z, rest = case.ck(function, x)
    assert nothing is None and rest["text"] == "as it is" and not rest["detached"].requires_grad
    return case.finish([y, z, rest["detached"]], [x])


@scenario
def backward_through_one_of_two_outputs(case: Case) -> list[torch.Tensor]:
    x = case.values()
    y, z = case.ck(lambda x: (x.sin() @ x.t(), case.net(x).exp()), x)
    y.square().sum().backward()
    return case.results([y, z], [x])


@scenario
def keywords_and_nested_arguments(case: Case) -> list[torch.Tensor]:
    a, b, c, d, e = (case.values(seed) for seed in range(5))
    small = torch.randn(WIDTH, device=case.device, dtype=case.dtype, requires_grad=True)

    def function(first, rest, flag, *, named, mapping, ordered, text):
        assert flag is True and text == "mean" and type(rest) is list and type(rest[1]) is tuple
        assert isinstance(named, Pair) and isinstance(ordered, OrderedDict)
        y = first * rest[0] + rest[1][0].sin() * named.left.exp() + named.right
        return case.net(y) + mapping["inner"][0] * ordered["weight"]

    y = case.ck(
        function,
        a,
        [b, (c, 3)],
        True,
        named=Pair(d, 0.5),
        mapping={"inner": [e]},
        ordered=OrderedDict(weight=small),
        text="mean",
    )
    return case.finish([y], [a, b, c, d, e, small])


@scenario
def partial_function(case: Case) -> list[torch.Tensor]:
    a, b = case.values(1), case.values(2)
    function = functools.partial(functools.partial(lambda x, y, *, scale: case.net(x) * y.sin() * scale, scale=3.0), a)
    return case.finish([case.ck(function, b)], [a, b])


@scenario
def integers_masks_and_no_gradient(case: Case) -> list[torch.Tensor]:
    x = case.values()
    index = torch.arange(ROWS, device=case.device).flip(0)
    mask = torch.ones(ROWS, WIDTH, device=case.device, dtype=torch.bool).tril()
    bias = torch.full((ROWS, WIDTH), float("-inf"), device=case.device, dtype=case.dtype).triu(1)

    def function(x, index, mask, bias):
        return (case.net(x)[index].masked_fill(mask, 0.0) + bias).softmax(-1)

    return case.finish([case.ck(function, x, index, mask, bias)], [x])


@scenario
def same_input_twice(case: Case) -> list[torch.Tensor]:
    x = case.values()
    return case.finish([case.ck(lambda a, b: case.net(a) * b.sin(), x, x)], [x])


@scenario
def views_of_one_tensor(case: Case) -> list[torch.Tensor]:
    x = case.values(shape=(ROWS, 2 * WIDTH))
    left, right = x.chunk(2, dim=-1)
    return case.finish([case.ck(lambda a, b, c: case.net(a) * b.sin() + c.t()[:WIDTH].sum(), left, right, x)], [x])


@scenario
def one_input_of_two_calls(case: Case) -> list[torch.Tensor]:
    x = case.values()
    return case.finish([case.ck(case.net, x), case.ck(lambda a: a.sin() * a.cos(), x)], [x])


@scenario
def output_is_the_input(case: Case) -> list[torch.Tensor]:
    x = case.values()
    return case.finish(list(case.ck(lambda a: (a, a.view(-1)), x)), [x])


@scenario
def chain(case: Case) -> list[torch.Tensor]:
    x = case.values()
    return case.finish([case.ck(lambda a: a.sin().exp(), case.ck(torch.neg, case.ck(torch.neg, x)))], [x])


@scenario
def nested(case: Case) -> list[torch.Tensor]:
    x = case.values()

    # Inside, values are moved by powers of two only, which packing leaves alone.
    def inner(a):
        return case.net(a) * a.cos()

    def middle(a):
        return case.ck(inner, a * 2) + (a * 4).sin()

    def outer(a):
        return case.ck(middle, a * 0.5) + case.ck(inner, a)

    return case.finish([case.ck(outer, x)], [x])


@scenario
def no_input_needs_a_gradient(case: Case) -> list[torch.Tensor]:
    return case.finish([case.ck(case.net, case.values().detach())], [])


@scenario
def nothing_needs_a_gradient(case: Case) -> list[torch.Tensor]:
    y = case.ck(lambda a: a.sin(), case.values().detach())
    assert not y.requires_grad
    return [y]


@scenario
def no_grad_outside(case: Case) -> list[torch.Tensor]:
    x = case.values()
    torch.manual_seed(5)
    with torch.no_grad():
        y = case.ck(case.net, x)
    assert not y.requires_grad
    return [y]


@scenario
def no_grad_inside(case: Case) -> list[torch.Tensor]:
    x = case.values()

    def function(a):
        with torch.no_grad():
            scale = case.net(a).abs().amax()
        return case.net(a) / scale * a.detach()

    return case.finish([case.ck(function, x)], [x])


@scenario
def in_place_on_intermediates(case: Case) -> list[torch.Tensor]:
    x = case.values()

    def function(a):
        y = a.sin()
        y.mul_(2).add_(a)
        z = torch.zeros_like(y)
        z[: ROWS // 2] = y[ROWS // 2 :]
        return case.net(z.exp_())

    return case.finish([case.ck(function, x)], [x])


@scenario
def autocast(case: Case) -> list[torch.Tensor]:
    x = case.values()
    with torch.autocast(case.device.type, dtype=torch.bfloat16):
        y = case.ck(case.net, x)
    return case.finish([y], [x])


@scenario
def autocast_inside(case: Case) -> list[torch.Tensor]:
    x = case.values()

    def function(a):
        with torch.autocast(case.device.type, dtype=torch.bfloat16):
            return case.net(a)

    return case.finish([case.ck(function, x)], [x])


@scenario
def random_state_not_preserved(case: Case) -> list[torch.Tensor]:
    x = case.values()
    case.net.eval()
    return case.finish([case.ck(case.net, x, preserve_rng_state=False)], [x])


@scenario
def random_numbers_after_it(case: Case) -> list[torch.Tensor]:
    x = case.values()
    torch.manual_seed(3)
    results = case.finish([case.ck(case.net, x)], [x])
    return [*results, torch.rand(4)]


@scenario
def backward_twice(case: Case) -> list[torch.Tensor]:
    x = case.values()
    y = case.ck(case.net, x).square().sum()
    y.backward(retain_graph=True)
    first = case.results([y], [x])
    y.backward()
    return first + case.results([y], [x])


@scenario
def gradient_of_gradient(case: Case) -> list[torch.Tensor]:
    x = case.values()
    (g,) = torch.autograd.grad(case.ck(lambda a: (a.sin() * a).exp(), x).sum(), x, create_graph=True)
    g.square().sum().backward()
    return case.results([g], [x])


@scenario
def grad_of_some_inputs(case: Case) -> list[torch.Tensor]:
    a, b = case.values(1), case.values(2)
    y = case.ck(lambda a, b: case.net(a) * b.exp(), a, b)
    return [y.detach(), *torch.autograd.grad(y.sum(), [b, case.net[1].weight])]


@scenario
def backward_inside(case: Case) -> list[torch.Tensor]:
    x = case.values()

    def function(a):
        z = case.net(a).sin()
        (inner,) = torch.autograd.grad(z.sum(), a, retain_graph=True)
        return a.cos() * inner + z

    return case.finish([case.ck(function, x)], [x])


@scenario
def backward_inside_without_early_stop(case: Case) -> list[torch.Tensor]:
    with set_checkpoint_early_stop(False):
        return backward_inside(case)


@scenario
def early_stop(case: Case) -> list[torch.Tensor]:
    x = case.values()
    reached = []

    def function(a):
        y = case.net(a)
        reached.append(y)
        return y + 1  # addition saves nothing: a recomputation need not come here

    results = case.finish([case.ck(function, x)], [x])
    count = [torch.tensor(float(len(reached)))]
    reached.clear()
    results += case.finish([case.ck(function, x, early_stop=False)], [x])
    count.append(torch.tensor(float(len(reached))))
    reached.clear()
    with set_checkpoint_early_stop(False):
        y = case.ck(function, x)
    results += case.finish([y], [x])
    return results + count + [torch.tensor(float(len(reached)))]


@scenario
def selective_checkpointing(case: Case) -> list[torch.Tensor]:
    x = case.values()

    def policy(context, op, *args, **kwargs):
        keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return case.finish([case.ck(case.net, x, context_fn=contexts)], [x])


@scenario
def no_determinism_check(case: Case) -> list[torch.Tensor]:
    x = case.values()
    return case.finish([case.ck(case.net, x, determinism_check="none")], [x])


@scenario
def debug(case: Case) -> list[torch.Tensor]:
    x = case.values()
    # PyTorch's logger for its own records, which pytest attaches a handler to that cannot format them.
    logging.getLogger("LoggingTensor").handlers.clear()
    return case.finish([case.ck(case.net, x, debug=True)], [x])


@scenario
def parameters_as_arguments(case: Case) -> list[torch.Tensor]:
    x = case.values()
    weight, bias = case.net[1].weight, case.net[1].bias

    def function(a, weight, transposed, bias):
        assert isinstance(weight, nn.Parameter)
        return (nn.functional.linear(a, weight, bias) @ transposed.t()).sin()

    return case.finish([case.ck(function, x, weight, weight.t(), bias)], [x])


@scenario
def module_with_running_statistics(case: Case) -> list[torch.Tensor]:
    x = case.values()
    norm = nn.BatchNorm1d(WIDTH).to(case.device, case.dtype)
    results = case.finish([case.ck(lambda a: norm(case.net(a)), x)], [x])
    return [*results, norm.running_mean.clone()]


@scenario
def expanded_and_transposed_inputs(case: Case) -> list[torch.Tensor]:
    x = case.values()
    wide = x.t()
    many = x.unsqueeze(0).expand(3, ROWS, WIDTH)

    def function(a, b):
        assert a.stride() == (1, WIDTH) and b.stride() == (0, WIDTH, 1)
        return case.net(a.t()) * b.sin().sum(0)

    return case.finish([case.ck(function, wide, many)], [x])


@scenario
def row_length_no_multiple_of_32(case: Case) -> list[torch.Tensor]:
    x = case.values(shape=(70, 67))
    return case.finish([case.ck(lambda a: a.sin() * a.exp(), x)], [x])


@scenario
def hooks_on_tensors(case: Case) -> list[torch.Tensor]:
    x = case.values()
    x.register_hook(lambda grad: grad * 2)

    def function(a):
        y = case.net(a)
        y.register_hook(lambda grad: grad * 3)
        return y.sin()

    return case.finish([case.ck(function, x)], [x])


@scenario
def leaf_of_another_graph(case: Case) -> list[torch.Tensor]:
    x = case.values()
    scaled = x * 2
    return case.finish([case.ck(case.net, scaled), scaled.sin()], [x])


@scenario
def in_a_thread(case: Case) -> list[torch.Tensor]:
    results = []
    thread = threading.Thread(target=lambda: results.extend(dropout(case)))
    thread.start()
    thread.join()
    return results


@scenario
def containers_that_the_function_changes(case: Case) -> list[torch.Tensor]:
    x, y = case.values(1), case.values(2)
    seen, cache, untouched = [x], {"inner": [y], "y": y}, [x]

    def function(seen, cache, untouched):
        z = case.net(seen[0]) * cache["y"]
        seen.append(z)
        cache["z"] = cache["inner"]
        cache["inner"][0] = z
        return z + untouched[0]

    z = case.ck(function, seen, cache, untouched=untouched)
    # The caller sees what was done, in the containers and tensors that are the caller's own.
    assert len(seen) == 2 and seen[0] is x and list(cache) == ["inner", "y", "z"] and cache["y"] is y
    assert cache["z"] is cache["inner"] and cache["inner"][0] is seen[1] and untouched[0] is x
    first = seen[1].detach().clone()
    # So that PyTorch's recomputation, which is given the changed containers, computes the same.
    seen[:], cache["inner"][0] = [x], y
    return [first, *case.finish([z], [x, y])]


@scenario
def forward_mode(case: Case) -> list[torch.Tensor]:
    x = case.values()
    case.net.eval()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        try:
            torch_checkpoint(torch.sin, dual, use_reentrant=False)
        except NotImplementedError:
            pytest.skip(f"torch {torch.__version__}'s own checkpoint refuses forward mode")
        y, tangent = torch.autograd.forward_ad.unpack_dual(case.ck(lambda a: a.sin() * a.exp(), dual))
        return case.finish([y, tangent.detach()], [x])
