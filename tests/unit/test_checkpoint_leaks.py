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
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ds_fp4
from ds_fp4 import checkpointing, packing
from ds_fp4.offload import HostBuffer

ROWS, WIDTH = 64, 64
VARIANTS = {
    "exact": dict(),
    "inexact": dict(ds_fp4_exact=False),
    "fp8": dict(ds_fp4_format="fp8"),
    "offload": dict(ds_fp4_offload="cpu"),
}


def _tensors() -> set[int]:
    """Addresses of all storages of some size that Python can reach."""
    return {o.untyped_storage().data_ptr() for o in gc.get_objects()
            if issubclass(type(o), torch.Tensor) and type(o) is not torch.nn.parameter.UninitializedParameter
            and o.numel() >= 1024}


@pytest.fixture(autouse=True)
def _collected():
    gc.collect()
    before = _tensors()
    yield
    gc.collect()
    assert not _tensors() - before, "tensors are left over"
    assert not any(isinstance(o, (HostBuffer, checkpointing._Arguments)) for o in gc.get_objects())
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
        y = ds_fp4.checkpoint(lambda a: inner(a.sin()) + a, x, **VARIANTS[variant])
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


def test_memory_is_that_of_pytorchs_checkpoint():
    """After backward through a chain, as many tensors are alive as with PyTorch's."""
    def alive_during(ck) -> int:
        net, x = _net(), torch.randn(ROWS, WIDTH, requires_grad=True)
        most = []

        def function(a):
            gc.collect()
            most.append(len(_tensors()))
            return net(a)

        y = x
        for _ in range(4):
            y = ck(function, y)
        y.sum().backward()
        return max(most[4:])

    plain = alive_during(functools.partial(torch_checkpoint, use_reentrant=False))
    # The unpacked values of the layer at hand come on top.
    assert alive_during(ds_fp4.checkpoint) <= plain + 2
