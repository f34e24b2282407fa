# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Nothing outlives its graph: after backward, after an exception, after a graph was dropped without backward."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from torch import nn

import ds_fp4
from ds_fp4 import checkpointing, packing
from ds_fp4.offload import HostBuffer

ROWS, WIDTH = 64, 64
VARIANTS = {
    "exact": dict(),
    "inexact": dict(ds_fp4_exact=False),
    "mxfp4": dict(ds_fp4_format="mxfp4"),
    "offload": dict(ds_fp4_offload="cpu"),
}


def _tensors() -> int:
    """How many plain tensors of some size Python can reach."""
    return sum(type(o) in (torch.Tensor, nn.Parameter) and o.numel() >= 1024 for o in gc.get_objects())


@pytest.fixture(autouse=True)
def _collected():
    for format in packing.FORMATS:  # the formats' tables are made once
        ds_fp4.checkpoint(torch.sin, torch.ones(64, 64, requires_grad=True), ds_fp4_format=format)
    gc.collect()
    before = _tensors()
    yield
    gc.collect()
    assert _tensors() <= before, "tensors are left over"
    assert not any(type(o) in (HostBuffer, checkpointing._Arguments) for o in gc.get_objects())
    assert checkpointing.checkpoint_depth() == 0 and checkpointing.redirection() is None


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("variant", VARIANTS)
def test_input_and_bytes_go_when_the_graph_goes(variant):
    net = _net()
    x = torch.randn(ROWS, WIDTH, requires_grad=True) * 1
    source, seen = weakref.ref(x), []

    def function(a):
        seen.append(weakref.ref(a))
        return net(a)

    gc.disable()
    try:
        y = ds_fp4.checkpoint(function, x, **VARIANTS[variant])
        del x
        assert source() is None, "the original is kept although its bytes are"
        assert all(ref() is None for ref in seen)
        y.sum().backward(retain_graph=True)
        assert len(seen) == 2 and all(ref() is None for ref in seen), "the recomputed input outlives backward"
        before = len(_buffers())
        del y
        assert len(_buffers()) == 0, before
    finally:
        gc.enable()


def _buffers() -> list:
    """Packed buffers that the packers of this thread know to be alive."""
    packers = getattr(packing._threads, "packers", {}).values()
    known = [packing for packer in packers for _, packings in packer._storages.values() for packing in packings]
    return [packing for packing in known if packing.buffer() is not None]


@pytest.mark.parametrize("variant", VARIANTS)
def test_graph_dropped_without_backward(variant):
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    y = ds_fp4.checkpoint(_net(), x, **VARIANTS[variant])
    node = y.grad_fn
    gc.disable()
    try:
        del y, node
        assert not _buffers()
    finally:
        gc.enable()


@pytest.mark.parametrize("variant", VARIANTS)
def test_exception_in_the_forward(variant):
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    net = _net()

    def function(a):
        y = net(a)
        raise ArithmeticError(f"after {y.shape}")

    with pytest.raises(ArithmeticError, match="after"):
        ds_fp4.checkpoint(function, x, **VARIANTS[variant])
    assert checkpointing.checkpoint_depth() == 0 and not checkpointing.recomputing()
    # The next call works as if nothing had been.
    ds_fp4.checkpoint(net, x, **VARIANTS[variant]).sum().backward()


@pytest.mark.parametrize("variant", VARIANTS)
def test_exception_in_the_recomputation(variant):
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    net = _net()
    calls = []

    def function(a):
        y = net(a)
        calls.append(1)
        if len(calls) == 2:
            raise ArithmeticError("second time")
        return y.sin()

    y = ds_fp4.checkpoint(function, x, **VARIANTS[variant])
    with pytest.raises(ArithmeticError, match="second time"):
        y.sum().backward()
    assert checkpointing.checkpoint_depth() == 0 and not checkpointing.recomputing()
    del y
    ds_fp4.checkpoint(net, x, **VARIANTS[variant]).sum().backward()


def test_exception_under_saved_tensors():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with pytest.raises(ArithmeticError), ds_fp4.saved_tensors():
        y = _net()(x)
        raise ArithmeticError
    del y


@pytest.mark.parametrize("variant", VARIANTS)
def test_200_steps_do_not_grow(variant):
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    counts = []
    for step in range(200):
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        inner = functools.partial(ds_fp4.checkpoint, net, **VARIANTS[variant])
        y = ds_fp4.checkpoint(lambda a, inner=inner: inner(a.sin()) + a, x, **VARIANTS[variant])
        with ds_fp4.saved_tensors():
            loss = (net(y) * y).square().mean()
        if step % 5:  # now and then a graph that nobody needs
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 49:
            gc.collect()
            counts.append(len(gc.get_objects()))
    # The packers' notes of what they packed come and go; 150 steps that each left a graph behind are thousands.
    assert counts[-1] - counts[0] < 500, counts
    assert sum(len(packer._storages) for packer in packing._threads.packers.values()) < 300


def test_a_recomputed_layer_is_gone_when_the_next_is_recomputed():
    net, x = _net(), torch.randn(ROWS, WIDTH, requires_grad=True)
    seen, alive = [], []

    def function(a):
        alive.append(sum(ref() is not None for ref in seen))
        y = net(a)
        seen.extend((weakref.ref(a), weakref.ref(y)))
        return y

    gc.disable()
    try:
        y = x
        for _ in range(4):
            y = ds_fp4.checkpoint(function, y)
        y.sum().backward()
    finally:
        gc.enable()
    # Of a forward its output, of a recomputation nothing.
    assert alive == [0, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("exact", (True, False))
def test_originals_in_containers_go_with_the_forward(exact):
    x = torch.randn(64, 64, requires_grad=True)
    scaled = x * 2
    held, gone = [scaled], weakref.ref(scaled)
    y = ds_fp4.checkpoint(lambda items, more: items[0].sin() * more["a"], held, {"a": scaled}, ds_fp4_exact=exact)
    del held, scaled
    assert gone() is None
    y.sum().backward()
    assert torch.isfinite(x.grad).all()
