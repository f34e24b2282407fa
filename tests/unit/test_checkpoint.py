# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""`ds_fp4.checkpoint` against the plain function and against `torch.utils.checkpoint`, bit for bit."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ds_fp4
from ds_fp4.packing import SMALL_NUMEL
from tests.unit.checkpoint_scenarios import ROWS, SCENARIOS, WIDTH, Case, unpacked

FORMATS = ("mxfp4", "fp8")
TORCH = functools.partial(torch_checkpoint, use_reentrant=False)


def _bits_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b) > 0
    for number, (left, right) in enumerate(zip(a, b, strict=True)):
        assert left.dtype == right.dtype and torch.equal(left, right), (number, (left - right).abs().max())


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize(
    "options",
    [
        dict(ds_fp4_format="mxfp4"),
        dict(ds_fp4_format="fp8"),
        dict(ds_fp4_format="mxfp4", ds_fp4_exact=False),
        dict(ds_fp4_format="mxfp4", ds_fp4_offload="cpu"),
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_equals_pytorchs_checkpoint(name, options):
    ck = functools.partial(ds_fp4.checkpoint, **options)
    format = options["ds_fp4_format"]
    _bits_equal(SCENARIOS[name](Case(ck, format)), SCENARIOS[name](Case(TORCH, format)))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", ("dropout", "nested", "same_input_twice", "in_place_on_intermediates", "autocast"))
def test_equals_the_function_without_checkpointing(name, dtype, format):
    plain = SCENARIOS[name](Case(lambda function, *args, **kwargs: function(*args, **kwargs), format, dtype=dtype))
    _bits_equal(
        SCENARIOS[name](Case(functools.partial(ds_fp4.checkpoint, ds_fp4_format=format), format, dtype=dtype)), plain
    )


def _grads(function, x: torch.Tensor, net: nn.Module) -> list[torch.Tensor]:
    net.zero_grad()
    x.grad = None
    torch.manual_seed(4)
    y = function(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad.clone(), *(p.grad.clone() for p in net.parameters())]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_exact_equals_the_function_on_the_unpacked_input(format, dtype):
    net = Case(None, format, dtype=dtype).net
    x = torch.randn(ROWS, WIDTH, dtype=dtype).requires_grad_()
    checkpointed = _grads(lambda x: ds_fp4.checkpoint(net, x, ds_fp4_format=format), x, net)
    _bits_equal(checkpointed, _grads(net, unpacked(x, format), net))
    assert not torch.equal(checkpointed[0], _grads(net, x, net)[0])


@pytest.mark.parametrize("format, worst", (("mxfp4", 0.25), ("fp8", 0.06)))
def test_inexact_forward_sees_the_original_values(format, worst):
    net = Case(None, format).net
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    reference = _grads(net, x, net)
    checkpointed = _grads(lambda x: ds_fp4.checkpoint(net, x, ds_fp4_format=format, ds_fp4_exact=False), x, net)
    assert torch.equal(checkpointed[0], reference[0])
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(checkpointed[1:], reference[1:], strict=True)]
    # The last bias' gradient does not depend on any saved tensor.
    assert 0 < max(errors) < worst and errors[-1] == 0


def test_nested_exact_checkpoints_on_values_that_packing_changes():
    net = Case(None, "mxfp4").net
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def straight_through(a):
        return a + (unpacked(a) - a).detach()

    def inner(a):
        return net(a) * a.cos()

    packed = functools.partial(ds_fp4.checkpoint, ds_fp4_format="mxfp4")
    checkpointed = _grads(lambda x: packed(lambda a: packed(inner, a.sin()) * a, x), x, net)
    y = unpacked(x)
    z = unpacked(y.sin())
    torch.manual_seed(4)
    net.zero_grad()
    output = inner(z) * y
    output.square().sum().backward()
    (through_sin,) = torch.autograd.grad(y.sin(), y, z.grad)
    _bits_equal(checkpointed[:1], [output.detach()])
    torch.testing.assert_close(checkpointed[1], y.grad + through_sin)
    _bits_equal(checkpointed[2:], [p.grad for p in net.parameters()])


@pytest.mark.parametrize("exact", (True, False))
def test_a_function_may_write_to_its_argument(exact):
    net = Case(None, "mxfp4").net.eval()

    def function(a):
        return net(a.mul_(2))

    x = unpacked(torch.randn(ROWS, WIDTH, requires_grad=True))
    expected = _grads(lambda x: function(x * 1), x, net)
    options = dict(ds_fp4_format="mxfp4", ds_fp4_exact=exact)
    _bits_equal(_grads(lambda x: ds_fp4.checkpoint(function, x * 1, **options), x, net), expected)


def test_nonfinite_values_reach_backward():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with torch.no_grad():
        x[3, 5] = float("inf")
    y = ds_fp4.checkpoint(torch.sin, x, ds_fp4_format="mxfp4")
    assert y[3, :32].isnan().all() and y[:3].isfinite().all()


class _Saved:
    """What is kept for backward, by the outermost hooks: packed buffers arrive there like any saved tensor."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def __enter__(self):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception):
        self._hooks.__exit__(*exception)

    def _pack(self, t):
        self.tensors.append(t)
        return t

    @property
    def nbytes(self) -> int:
        return sum(
            storage.nbytes()
            for storage in {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.tensors}.values()
        )


@pytest.mark.parametrize("format, limit", (("mxfp4", 0.27), ("fp8", 0.52)))
@pytest.mark.parametrize("shape", ((64, 7168), (4, 16, 256), (128, 100), (80, 33), (16, 2048), (7, 3, 1000)))
def test_bytes_held(format, limit, shape):
    x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    with _Saved() as bf16:
        y = TORCH(torch.exp, x)
    with _Saved() as packed:
        z = ds_fp4.checkpoint(torch.exp, x, ds_fp4_format=format)
    assert bf16.nbytes == x.numel() * 2
    assert packed.nbytes <= limit * bf16.nbytes
    assert y.shape == z.shape


def test_each_activation_is_packed_once():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    once = 0.53125 * x.numel()
    with _Saved() as saved:
        ds_fp4.checkpoint(
            lambda *args: sum(a.sum() for a in args), x, x, x[:40], x.view(WIDTH, ROWS), x.expand(2, ROWS, WIDTH),
            ds_fp4_format="mxfp4",
        )  # fmt: skip
    assert [t.numel() for t in saved.tensors] == [once]
    with _Saved() as saved:
        y = ds_fp4.checkpoint(torch.sin, x)
        z = ds_fp4.checkpoint(torch.cos, x)
    assert len({t.data_ptr() for t in saved.tensors}) == 1
    with _Saved() as saved:
        y = ds_fp4.checkpoint(torch.sin, x)
        with torch.no_grad():
            x.add_(1)
        z = ds_fp4.checkpoint(torch.cos, x)
    assert len({t.data_ptr() for t in saved.tensors}) == 2
    del y, z


def test_what_is_left_alone():
    weight = nn.Parameter(torch.randn(64, 64))
    frozen = torch.randn(64, 64)
    small = torch.randn(SMALL_NUMEL // 64 - 1, 64, requires_grad=True)
    statistics = torch.rand(4096, 1, requires_grad=True)
    double = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    integers = torch.arange(4096).view(64, 64)
    arguments = [
        weight,
        weight.t(),
        weight[:40],
        weight.to(torch.bfloat16),
        torch.cat([weight, weight]),
        frozen,
        small,
        statistics,
        double,
        integers,
    ]
    seen = []
    with _Saved() as saved:
        ds_fp4.checkpoint(lambda *args: seen.extend(args), *arguments)
    assert not any(t.dtype == torch.uint8 for t in saved.tensors)
    assert all(a is b for a, b in zip(seen, arguments, strict=True))
    product = weight @ weight
    with _Saved() as saved:
        ds_fp4.checkpoint(torch.sin, product)
    assert [t.dtype for t in saved.tensors] == [torch.uint8]


def test_containers_without_activations_are_passed_as_they_are():
    notes, table = [], {"a": torch.ones(3)}
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def function(x, notes, table):
        notes.append("seen")
        table["b"] = 1
        return x.sin()

    ds_fp4.checkpoint(function, x, notes, table)
    assert notes == ["seen"] and set(table) == {"a", "b"}


def test_a_container_that_holds_itself():
    loop = [torch.randn(ROWS, WIDTH, requires_grad=True)]
    loop.append(loop)
    ds_fp4.checkpoint(lambda value: value[0].sin(), loop).sum().backward()
    assert loop[0].grad is not None


@pytest.mark.parametrize(
    "options, message",
    (
        (dict(use_reentrant=True), "use_reentrant=True: ds_fp4.checkpoint has PyTorch's non-reentrant"),
        (dict(ds_fp4_format="fp4"), 'format \'fp4\': expected "mxfp4" or "fp8"'),
        (dict(ds_fp4_exact=1), "ds_fp4_exact=1: expected True or False"),
        (dict(ds_fp4_offload="disk"), 'ds_fp4_offload=\'disk\': expected "none" or "cpu"'),
        (dict(ds_fp4_scale_rounding="up"), "scale_rounding 'up': expected one of"),
        (dict(determinism_check="all"), "determinism_check"),
    ),
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError) as error:
        ds_fp4.checkpoint(torch.sin, torch.ones(ROWS, WIDTH, requires_grad=True), **options)
    assert message in str(error.value)


@pytest.mark.parametrize("use_reentrant", (None, False))
def test_a_drop_in(use_reentrant):
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    ds_fp4.checkpoint(torch.sin, x, use_reentrant=use_reentrant, preserve_rng_state=False).sum().backward()


def test_a_function_that_changes_is_found_as_by_pytorch():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    calls = []

    def function(x):
        calls.append(1)
        return (x if len(calls) == 1 else x[:4]).sin()

    with pytest.raises(CheckpointError, match="different metadata"):
        ds_fp4.checkpoint(function, x).sum().backward()


def test_compiled_callers_and_functions():
    net = Case(None, "mxfp4").net.eval()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    eager = _grads(lambda x: ds_fp4.checkpoint(net, x), x, net)
    outside = torch.compile(lambda x: ds_fp4.checkpoint(net, x * 1.0), backend="aot_eager")
    inside = torch.compile(net, backend="aot_eager")
    for compiled in (outside, lambda x: ds_fp4.checkpoint(inside, x)):
        for a, b in zip(_grads(compiled, x, net), eager, strict=True):
            torch.testing.assert_close(a, b)


def test_transforms_are_refused_as_by_pytorch():
    x = torch.randn(64, 64)
    for transform in (torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f), in_dims=0)):
        function = transform(lambda a: ds_fp4.checkpoint(torch.sin, a).sum())
        with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
            function(x.expand(2, 64, 64) if transform is not torch.func.grad else x)
    assert torch.equal(torch.func.vmap(lambda a: ds_fp4.checkpoint(torch.sin, a))(x.expand(2, 64, 64))[1], x.sin())
