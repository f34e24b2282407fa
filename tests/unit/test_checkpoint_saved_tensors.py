# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Packing of tensors of any shape, and `ds_fp4.saved_tensors` over autograd's hooks."""

from __future__ import annotations

import contextlib
import gc
import weakref

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import ds_fp4
from ds_fp4 import formats
from ds_fp4.packing import Format, Packer, _Geometry, is_packable

FORMATS = ("mxfp4", "fp8")


def _roundtrip(t: torch.Tensor, format: str) -> torch.Tensor:
    view, buffer = Packer(Format(format)).pack(t)
    assert buffer.dtype == torch.uint8 and buffer.shape == (view.run.nbytes,)
    return view.of(view.run.decode(buffer))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("rounding", formats.SCALE_ROUNDINGS)
def test_rows_are_those_of_the_format(dtype, rounding):
    t = torch.randn(6, 10, 96, dtype=dtype)
    view, buffer = Packer(Format("mxfp4", rounding)).pack(t)
    rows = formats.fp4_row_to_bf16(*formats.bf16_to_fp4_row(t.view(-1, 96), rounding), dtype=dtype)
    assert torch.equal(view.of(view.run.decode(buffer)), rows.view(t.shape))
    fp8 = formats.fp8_row_to_bf16(*formats.bf16_to_fp8_row(t.view(-1, 96)), dtype=dtype)
    assert torch.equal(_roundtrip(t, "fp8"), fp8.view(t.shape))


@st.composite
def _tensors(draw):
    """Any view: permuted, sliced, stepped, expanded, of any shape."""
    shape = draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))
    t = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(("permute", "slice", "step", "expand")))
        dim = draw(st.integers(0, t.dim() - 1))
        if kind == "permute":
            t = t.permute(draw(st.permutations(range(t.dim()))))
        elif kind == "slice" and t.shape[dim] > 2:
            t = t.narrow(dim, 1, t.shape[dim] - 2)
        elif kind == "step":
            t = t[(slice(None),) * dim + (slice(None, None, 2),)]
        elif kind == "expand" and t.dim() < 5:
            t = t.unsqueeze(dim).expand(*t.shape[:dim], 3, *t.shape[dim:])
    return t


@given(_tensors(), st.sampled_from(FORMATS))
@settings(max_examples=150, deadline=None)
def test_any_shape_and_stride_comes_back(t, format):
    back = _roundtrip(t, format)
    assert back.shape == t.shape and back.dtype == t.dtype
    scale = t.abs().amax()
    assert (back - t).abs().amax() <= scale * (0.26 if format == "mxfp4" else 0.07)
    if _Geometry(t).dense:
        assert back.stride() == t.stride()
    # A second time nothing changes.
    assert torch.equal(_roundtrip(back, format), back)


@pytest.mark.parametrize("format, per_value", (("mxfp4", 0.53125), ("fp8", 1.0078125)))
def test_bytes_of_a_value(format, per_value):
    for shape in ((64, 7168), (100, 4096), (33, 1000), (70, 67)):
        view, buffer = Packer(Format(format)).pack(torch.randn(shape))
        assert buffer.numel() <= per_value * view.run.numel + 33


def test_views_of_one_memory_are_packed_once():
    packer = Packer(Format())
    x = torch.randn(32, 4, 64)
    base, buffer = packer.pack(x)
    for t in (
        x,
        x.detach(),
        x.view(-1, 64),
        x.view(-1),
        x.transpose(0, 1),
        x[3:30],
        x[:, :, :32],
        x[:, ::2],
        x.expand(2, 32, 4, 64),
    ):
        view, again = packer.pack(t)
        assert again is buffer
        assert torch.equal(
            view.of(view.run.decode(again)),
            base.of(base.run.decode(buffer)).as_strided(t.shape, t.stride(), t.storage_offset()),
        )
    assert packer.pack(x.clone())[1] is not buffer
    assert packer.pack(x.view(torch.int32).view(torch.float32))[1] is buffer
    x.mul_(2)
    assert packer.pack(x)[1] is not buffer


def test_slices_packed_first_are_found_again_as_slices():
    packer = Packer(Format())
    x = torch.randn(64, 128)
    left, right = x.chunk(2, -1)
    buffers = [packer.pack(left)[1], packer.pack(right)[1]]
    assert [buffer.numel() for buffer in buffers] == [64 * 34] * 2
    assert packer.pack(x[:, :64])[1] is buffers[0] and packer.pack(x[:, 64:])[1] is buffers[1]


def test_memory_used_again_is_not_taken_for_the_old_tensor():
    packer = Packer(Format())
    for number in range(300):
        x = torch.full((64, 64), float(number % 5))
        view, buffer = packer.pack(x)
        assert view.of(view.run.decode(buffer))[0, 0] == number % 5
    kept = []
    for number in range(300):
        x = torch.full((64, 64), float(number % 5))
        kept.append(packer.pack(x))
        view, buffer = kept[-1]
        assert view.of(view.run.decode(buffer))[0, 0] == number % 5
    kept.clear()
    for _ in range(200):
        packer.pack(torch.zeros(64, 64))
    assert len(packer._storages) < 200


class _Attention(nn.Module):
    """What a transformer block saves: norms, projections that share an input, attention, dropout, gated activation."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate_up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (p(h).unflatten(-1, (2, 64)).transpose(1, 2) for p in (self.q, self.k, self.v))
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + nn.functional.dropout(self.out(h), 0.1)
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


def _run(model: nn.Module, x: torch.Tensor, context) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    x.grad = None
    torch.manual_seed(2)
    with context:
        y = model(x)
    y.float().square().mean().backward()
    return y.detach(), [x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("format, worst", (("mxfp4", 0.3), ("fp8", 0.08)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_forward_is_untouched_and_gradients_are_close(format, worst, dtype):
    torch.manual_seed(0)
    model, x = _Attention().to(dtype), torch.randn(2, 64, 128).to(dtype).requires_grad_()
    y, reference = _run(model, x, torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
    z, gradients = _run(model, x, ds_fp4.saved_tensors(format))
    assert torch.equal(y, z)
    for a, b in zip(gradients, reference, strict=True):
        assert 0 < (a - b).norm() < worst * b.norm()


class _Watched:
    """What a saved_tensors context keeps, by patching nothing: its own hooks wrapped."""

    def __init__(self, format: str) -> None:
        self.context = ds_fp4.saved_tensors(format)
        self.kept, self.buffers = [], {}
        pack = self.context.pack_hook

        def watching(t):
            saved = pack(t)
            if hasattr(saved, "buffer"):
                self.buffers[saved.buffer.data_ptr()] = saved.buffer.numel()
            else:
                self.kept.append(t)
            return saved

        self.context.pack_hook = watching

    def __enter__(self):
        self.context.__enter__()
        return self

    def __exit__(self, *exception):
        self.context.__exit__(*exception)


@pytest.mark.parametrize("format, limit", (("mxfp4", 0.27), ("fp8", 0.52)))
def test_what_is_packed_and_what_is_kept(format, limit):
    torch.manual_seed(0)
    model, x = _Attention().bfloat16(), torch.randn(2, 64, 128).bfloat16().requires_grad_()
    storages = {}

    def count(t):
        if is_packable(t):
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    alive = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (alive.append(t), count(t))[1], lambda t: t):
        model(x)
    with _Watched(format) as watched:
        model(x)
    assert 0 < sum(watched.buffers.values()) <= limit * sum(storages.values())
    for t in watched.kept:
        small = t.numel() < 2048 or t.shape[-1] < 32
        parameter = isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter)
        assert small or parameter or not t.requires_grad, (t.shape, t.dtype, t.grad_fn)


def test_parameters_are_never_packed_under_autocast_nor_as_views():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    weight = model[0].weight
    x = torch.randn(64, 64, requires_grad=True)
    seen = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t), t)[1], lambda t: t),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        model(x) @ torch.cat([weight, model[1].weight], 0)[:64].to(torch.bfloat16).t()
    cast = weight.detach().bfloat16()
    weights = [t for t in seen if any(torch.equal(t.detach(), w) for w in (cast, cast.t()))]
    assert len(weights) >= 2 and not any(is_packable(t) for t in weights)
    assert any(is_packable(t) for t in seen)


def test_one_input_of_three_projections_is_packed_once():
    q, k, v = (nn.Linear(128, 128, bias=False) for _ in range(3))
    x = torch.randn(2, 64, 128, requires_grad=True)
    with _Watched("mxfp4") as watched:
        y = q(x), k(x), v(x.view(-1, 128)), x.transpose(0, 1).sin()
    assert list(watched.buffers.values()) == [int(x.numel() * 0.53125)]
    del y


def test_saved_outputs_do_not_hold_themselves():
    x = torch.randn(4, 64, requires_grad=True)  # small, so it is kept as it is
    big = torch.randn(64, 64, requires_grad=True)
    gc.disable()
    try:
        with ds_fp4.saved_tensors():
            y, z = x.exp(), big.exp().tanh()
        refs = [weakref.ref(y), weakref.ref(z)]
        del y, z
        assert all(ref() is None for ref in refs)
    finally:
        gc.enable()


def test_a_kept_tensor_that_changes_is_found():
    x = torch.randn(4, 64, requires_grad=True)
    y = x * 2
    with ds_fp4.saved_tensors():
        z = y.sin()
    y.add_(1)
    with pytest.raises(RuntimeError, match="changed by an in-place operation: it is at version 1, expected version 0"):
        z.sum().backward()


def test_a_packed_tensor_may_change_afterwards():
    x = torch.randn(64, 64, requires_grad=True)
    y = x * 2
    with ds_fp4.saved_tensors("fp8"):
        z = y.sin()
    expected = _roundtrip(y, "fp8").cos() * 2
    with torch.no_grad():
        y.add_(1)
    z.sum().backward()
    assert torch.equal(x.grad, expected)


def test_contexts_nest_and_hold_checkpoints():
    torch.manual_seed(0)
    model, x = _Attention(), torch.randn(2, 64, 128, requires_grad=True)
    _, plain = _run(model, x, ds_fp4.saved_tensors("fp8"))
    context = ds_fp4.saved_tensors("mxfp4")
    with contextlib.ExitStack() as stack:
        stack.enter_context(context)
        stack.enter_context(ds_fp4.saved_tensors("fp8"))
        _, nested = _run(model, x, stack)
    for a, b in zip(plain, nested, strict=True):
        assert torch.equal(a, b)
    with context:  # used again
        y = ds_fp4.checkpoint(model, x)
    y.sum().backward()


@pytest.mark.parametrize("arguments", (("int4",), ("mxfp4", "up")))
def test_wrong_arguments(arguments):
    with pytest.raises(ValueError, match="expected"):
        ds_fp4.saved_tensors(arguments[0], **({"scale_rounding": arguments[1]} if len(arguments) > 1 else {}))
