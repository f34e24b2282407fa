# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""`ds_fp4.traffic`: what counts as forward, recompute and backward, and that nothing stays patched."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_fp4.traffic import AllToAllTraffic


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Exchange(torch.autograd.Function):
    """As DeepSpeed's classic layer does it: the backward applies the function itself."""

    @staticmethod
    def forward(ctx, x):
        output = torch.empty_like(x)
        dist.all_to_all_single(output, x.contiguous())
        return output

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient)


class ExchangeDirectly(Exchange):
    """As AutoEP does it: the backward calls the collective."""

    @staticmethod
    def backward(ctx, gradient):
        output = torch.empty_like(gradient)
        dist.all_to_all_single(output, gradient.contiguous())
        return output


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x):
        return self.function.apply(self.linear(self.function.apply(x)))


def counts(traffic):
    return tuple(
        (leg.payload.calls, leg.payload.bytes) for leg in (traffic.forward, traffic.recompute, traffic.backward)
    )


@pytest.mark.parametrize("function", [Exchange, ExchangeDirectly])
@pytest.mark.parametrize("checkpointing, recomputed", [(None, 0), ("reentrant", 2), ("saved tensors", 2)])
def test_directions(function, checkpointing, recomputed):
    layer, x = Layer(function), torch.ones(4, 8, requires_grad=True)
    with AllToAllTraffic() as traffic:
        if checkpointing is None:
            layer(x).sum().backward()
        else:
            # early_stop would skip the second exchange, whose output nothing needs again.
            with torch.utils.checkpoint.set_checkpoint_early_stop(False):
                checkpoint(layer, x, use_reentrant=checkpointing == "reentrant").sum().backward()
    assert counts(traffic) == ((2, 256), (recomputed, 128 * recomputed), (2, 256))


def test_nested_checkpoints():
    inner, x = Layer(Exchange), torch.ones(4, 8, requires_grad=True)
    with AllToAllTraffic() as traffic:
        checkpoint(lambda x: checkpoint(inner, x, use_reentrant=True), x, use_reentrant=True).sum().backward()
    assert [leg.payload.calls for leg in (traffic.forward, traffic.recompute, traffic.backward)] == [2, 4, 2]


def test_integers_are_metadata():
    counts_in, counts_out = torch.ones(6, dtype=torch.int32), torch.empty(6, dtype=torch.int32)
    with AllToAllTraffic() as traffic:
        dist.all_to_all_single(counts_out, counts_in)
        dist.all_to_all_single(torch.empty(6, 2, dtype=torch.uint8), torch.ones(6, 2, dtype=torch.uint8), [6], [6])
    assert traffic.forward.metadata.calls == 1 and traffic.forward.metadata.bytes == 24
    assert traffic.forward.payload.calls == 1 and traffic.forward.payload.bytes == 12
    assert traffic.forward.payload.sent == 0  # a single rank sends nothing to others


def test_no_rows():
    with AllToAllTraffic() as traffic:
        dist.all_to_all_single(torch.empty(0, 4), torch.empty(0, 4), [0], [0])
    assert counts(traffic)[0] == (1, 0)


def test_nothing_stays_patched():
    original, x = dist.all_to_all_single, torch.ones(4)
    outer, inner = AllToAllTraffic(), AllToAllTraffic()
    outer.__enter__()
    dist.all_to_all_single(torch.empty(4), x)
    inner.__enter__()
    dist.all_to_all_single(torch.empty(4), x)
    outer.__exit__(None, None, None)  # before the one opened inside it
    dist.all_to_all_single(torch.empty(4), x)
    inner.__exit__(None, None, None)
    assert dist.all_to_all_single is original
    dist.all_to_all_single(torch.empty(4), x)
    assert (outer.forward.payload.calls, inner.forward.payload.calls) == (2, 2)
    with pytest.raises(RuntimeError, match="on purpose"), outer:
        raise RuntimeError("on purpose")
    assert dist.all_to_all_single is original
    outer.reset()
    assert outer.forward.payload.calls == 0
