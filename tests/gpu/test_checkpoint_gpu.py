# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Checkpointing on a GPU: bits, bytes by the allocator, offload, and that memory does not grow."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ds_fp4
from ds_fp4.packing import Format, Packer
from tests.unit.checkpoint_scenarios import SCENARIOS, Case, unpacked

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TORCH = functools.partial(torch_checkpoint, use_reentrant=False)
FORMATS = (("mxfp4", 0.27), ("fp8", 0.52))
OPTIONS = [
    dict(ds_fp4_format="mxfp4"),
    dict(ds_fp4_format="fp8"),
    dict(ds_fp4_format="mxfp4", ds_fp4_exact=False),
    dict(ds_fp4_format="fp8", ds_fp4_offload="cpu"),
]


def _bits_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b) > 0
    for number, (left, right) in enumerate(zip(a, b, strict=True)):
        assert left.dtype == right.dtype and torch.equal(left, right), (number, (left - right).abs().max())


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_equals_pytorchs_checkpoint(name, options):
    format = options["ds_fp4_format"]
    ck = functools.partial(ds_fp4.checkpoint, **options)
    _bits_equal(SCENARIOS[name](Case(ck, format, "cuda")), SCENARIOS[name](Case(TORCH, format, "cuda")))


@pytest.mark.parametrize("format, _", FORMATS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_exact_equals_the_function_on_the_unpacked_input(format, _, dtype):
    net = nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 512)).to(
        "cuda", dtype
    )
    x = torch.randn(1024, 512, device="cuda", dtype=dtype).requires_grad_()

    def run(function: Callable, x: torch.Tensor) -> list[torch.Tensor]:
        net.zero_grad()
        torch.manual_seed(4)
        y = function(x)
        y.float().square().sum().backward()
        return [y.detach(), x.grad.clone(), *(p.grad.clone() for p in net.parameters())]

    checkpointed = run(lambda x: ds_fp4.checkpoint(net, x, ds_fp4_format=format), x)
    _bits_equal(checkpointed, run(net, unpacked(x, format)))


@pytest.mark.parametrize("format, _", FORMATS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize(
    "make",
    (
        lambda: torch.randn(64, 7168),
        lambda: torch.randn(4, 33, 96).transpose(0, 1),
        lambda: torch.randn(70, 67),
        lambda: torch.randn(100, 256)[:, 32:160],
        lambda: torch.randn(64, 64).expand(3, 64, 64),
        lambda: torch.randn(5000),
    ),
    ids=("rows", "transposed", "odd", "slice", "expanded", "flat"),
)
def test_bytes_are_those_of_the_host(make, dtype, format, _):
    t = make().to(dtype)
    view, buffer = Packer(Format(format)).pack(t)
    gpu_view, gpu_buffer = Packer(Format(format)).pack(
        t.cuda()
        if t.is_contiguous()
        else torch.empty_strided(t.shape, t.stride(), dtype=dtype, device="cuda").copy_(t)
        if 0 not in t.stride()
        else t[:1].cuda().expand(t.shape)
    )
    assert torch.equal(view.of(view.run.decode(buffer)), gpu_view.of(gpu_view.run.decode(gpu_buffer)).cpu())
    if gpu_view.run == view.run:
        assert torch.equal(buffer, gpu_buffer.cpu())


def _allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # the allocator takes back what other streams are done with when it is next asked
    # What was asked for: blocks are up to 1 MiB larger, which is not theirs who ask.
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def _held(ck: Callable, shape: tuple[int, ...], layers: int = 4) -> int:
    """Bytes that a chain of checkpoints holds after its forward: of inputs that nobody else holds."""
    leaf = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ck(torch.sin, leaf).sum().backward()  # decoding tables, streams
    leaf.grad = None
    before = _allocated()
    x = leaf * 1
    for _ in range(layers):
        x = ck(torch.tanh, x)
    loss = x.sum()
    del x
    held = _allocated() - before
    loss.backward()
    del loss
    leaf.grad = None
    assert _allocated() == before
    return held


@pytest.mark.parametrize("format, limit", FORMATS)
@pytest.mark.parametrize("shape", ((8192, 7168), (4, 4096, 2048), (65536, 512), (40000, 1000), (30000, 333)))
def test_bytes_held_by_the_allocator(format, limit, shape):
    bf16 = _held(TORCH, shape)
    layer = 2 * torch.Size(shape).numel()
    assert bf16 >= 4 * layer
    assert _held(functools.partial(ds_fp4.checkpoint, ds_fp4_format=format), shape) <= limit * bf16


def test_offloaded_bytes_are_not_on_the_device():
    shape = (8192, 7168)
    held = _held(functools.partial(ds_fp4.checkpoint, ds_fp4_offload="cpu"), shape)
    assert held <= 0.01 * 2 * torch.Size(shape).numel()


@pytest.mark.parametrize("format, limit", FORMATS)
def test_saved_tensors_by_the_allocator(format, limit):
    leaf = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def chain() -> torch.Tensor:
        x = leaf * 1
        for _ in range(3):
            x = nn.functional.silu(x).sin().cos()
        return x.sum()

    def held(context) -> int:
        before = _allocated()
        with context:
            loss = chain()
        bytes_held = _allocated() - before
        loss.backward()
        leaf.grad = None
        return bytes_held

    with ds_fp4.saved_tensors(format):
        chain().backward()
    leaf.grad = None
    plain = held(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
    assert held(ds_fp4.saved_tensors(format)) <= limit * plain


def _blocks(layers: int, width: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(
        [
            nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        ]
    ).to("cuda", torch.bfloat16)


def test_offload_gives_the_same_bits_under_pressure():
    """Many layers, two micro-batches in flight, memory reused between: a copy that is read too early would show."""
    blocks = _blocks(12, 1024)
    results = []
    for offload in ("none", "cpu"):
        gradients = []
        for step in range(5):
            torch.manual_seed(step)
            blocks.zero_grad()
            inputs = [torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2)]
            outputs = []
            for x in inputs:
                for block in blocks:
                    x = x + ds_fp4.checkpoint(block, x, ds_fp4_format="mxfp4", ds_fp4_offload=offload)
                outputs.append(x.float().square().mean())
                torch.empty(64 << 20, dtype=torch.uint8, device="cuda").fill_(255)
            for output in outputs if step % 2 else reversed(outputs):
                output.backward()
            gradients += [x.grad for x in inputs] + [p.grad.clone() for p in blocks.parameters()]
        results.append(gradients)
    _bits_equal(*results)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_memory_does_not_grow_over_200_steps(options):
    blocks = _blocks(3, 512)
    optimizer = torch.optim.SGD(blocks.parameters(), 1e-4)
    allocated, reserved = [], []
    for step in range(200):
        x = torch.randn(2048, 512, device="cuda", dtype=torch.bfloat16)
        for block in blocks:
            x = x + ds_fp4.checkpoint(block, x, **options)
        with ds_fp4.saved_tensors(options["ds_fp4_format"]):
            loss = blocks[0](x).float().square().mean()
        if step % 7:  # now and then a graph is dropped
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        del x, loss
        if step % 20 == 19:
            allocated.append(torch.cuda.memory_allocated())
            reserved.append(torch.cuda.memory_reserved())
    torch.cuda.synchronize()
    assert max(allocated[1:]) <= allocated[1] + (8 << 20), allocated
    assert reserved[-1] <= reserved[2], reserved


def test_exceptions_leave_nothing_on_the_device():
    net = _blocks(1, 512)[0]
    leaf = torch.randn(2048, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ds_fp4.checkpoint(net, leaf).sum().backward()
    net.zero_grad()
    leaf.grad = None
    before = _allocated()

    def function(a):
        y = net(a)
        raise ArithmeticError(y.shape)

    for options in OPTIONS:
        with pytest.raises(ArithmeticError):
            ds_fp4.checkpoint(function, leaf * 1, **options)
        assert _allocated() == before, options


def test_dropout_on_the_device_is_replayed_when_inputs_are_on_the_host():
    dropout = nn.Dropout(0.5)
    # Magnitudes of 1 to 2 are not rounded to zero, so exp gives 1 where dropout dropped and nowhere else.
    x = torch.randn(2048, 512, device="cuda").sign() * (1 + torch.rand(2048, 512, device="cuda"))
    y = ds_fp4.checkpoint(lambda a: dropout(a).exp(), x.requires_grad_(), ds_fp4_format="mxfp4", ds_fp4_offload="cpu")
    torch.rand(10, device="cuda")
    y.sum().backward()
    dropped = y == 1
    assert 0.49 < dropped.float().mean() < 0.51
    assert torch.equal(x.grad == 0, dropped)
    # exp's derivative is itself, and dropout scales what it keeps by 2.
    assert torch.equal(x.grad[~dropped], 2 * y[~dropped])


def test_other_streams():
    net = _blocks(1, 512)[0]
    x = torch.randn(2048, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ds_fp4.checkpoint(net, x).float().sum().backward()
    expected = x.grad.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for offload in ("none", "cpu"):
        x.grad = None
        with torch.cuda.stream(stream):
            loss = ds_fp4.checkpoint(net, x, ds_fp4_offload=offload).float().sum()
        torch.cuda.current_stream().wait_stream(stream)
        loss.backward()
        torch.cuda.synchronize()
        assert torch.equal(x.grad, expected)
