# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""How kernels run: large tensors, streams, graphs, threads, no waiting and no allocation, errors."""

import subprocess
import sys
import threading

import pytest
import torch

from ds_fp4 import formats, ops
from ds_fp4.ops import backends, launching
from ds_fp4.ops import kernels as table
from tests.gpu.compare import assert_same_bits

pytestmark = pytest.mark.usefixtures("kernels")


def _inputs() -> tuple[torch.Tensor, ...]:
    x = torch.randn(256, 7168, device="cuda", dtype=torch.bfloat16)
    return x, *ops.bf16_to_fp4_row(x), *ops.bf16_to_fp8_row(x)


def _outputs(x: torch.Tensor, packed, fp4_scales, q, fp8_scales) -> dict:
    """Every call with `out=`."""
    return {
        "bf16_to_fp4_row": (torch.empty_like(packed), torch.empty_like(fp4_scales)),
        "fp4_row_to_bf16": torch.empty_like(x),
        "bf16_to_fp8_row": (torch.empty_like(q), torch.empty_like(fp8_scales)),
        "fp8_row_to_bf16": torch.empty_like(x),
    }


def _run(inputs: tuple[torch.Tensor, ...], out: dict) -> None:
    x, packed, fp4_scales, q, fp8_scales = inputs
    ops.bf16_to_fp4_row(x, out=out["bf16_to_fp4_row"])
    ops.fp4_row_to_bf16(packed, fp4_scales, out=out["fp4_row_to_bf16"])
    ops.bf16_to_fp8_row(x, out=out["bf16_to_fp8_row"])
    ops.fp8_row_to_bf16(q, fp8_scales, out=out["fp8_row_to_bf16"])


def _check(inputs: tuple[torch.Tensor, ...], out: dict) -> None:
    x, packed, fp4_scales, q, fp8_scales = inputs
    for expected, got in (
        *zip(formats.bf16_to_fp4_row(x), out["bf16_to_fp4_row"], strict=True),
        *zip(formats.bf16_to_fp8_row(x), out["bf16_to_fp8_row"], strict=True),
        (formats.fp4_row_to_bf16(packed, fp4_scales), out["fp4_row_to_bf16"]),
        (formats.fp8_row_to_bf16(q, fp8_scales), out["fp8_row_to_bf16"]),
    ):
        assert_same_bits(expected, got)


def test_graph_capture():
    inputs = _inputs()
    out = _outputs(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the first launches of these shapes are captured: nothing needs a warm-up
        _run(inputs, out)
    for _ in range(2):
        for tensor, value in zip(inputs, _inputs(), strict=True):
            tensor.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        _check(inputs, out)


def test_callers_stream():
    inputs = _inputs()
    out = _outputs(*inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s: what runs elsewhere would see the old input
        inputs[0].mul_(-3)
        _run(inputs, out)
        done = stream.record_event()
    assert not done.query()
    stream.synchronize()
    _check(inputs, out)


def test_no_wait_and_no_allocation():
    inputs = _inputs()
    out = _outputs(*inputs)
    index = torch.arange(256, dtype=torch.int32, device="cuda")
    _run(inputs, out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        _run(inputs, out)
        ops.bf16_to_fp4_row(inputs[0], index=index, out=out["bf16_to_fp4_row"])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_thread_that_has_not_used_cuda():
    inputs = _inputs()
    out = _outputs(*inputs)
    torch.cuda.synchronize()
    errors = []

    def work():
        try:
            _run(inputs, out)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    torch.cuda.synchronize()
    _check(inputs, out)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_device_that_is_not_the_current_one():
    with torch.cuda.device(1):
        inputs = _inputs()
        out = _outputs(*inputs)
    assert torch.cuda.current_device() == 0
    _run(inputs, out)
    assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    _check(inputs, out)


def _free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else 0


@pytest.mark.skipif(_free_gib() < 24, reason="needs 24 GiB of free GPU memory")
@pytest.mark.parametrize("shape", [((1 << 31) // 7168 + 3, 7168), (1, (1 << 31) + 8192)], ids=["rows", "one row"])
def test_more_than_2_31_elements(shape):
    rows, width = shape
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    x.view(-1).view(torch.int32).random_(-(1 << 31), (1 << 31) - 1)
    # Rows, or pieces of the one row, that quantize by themselves: at the start, around 2^31 and at the end.
    pieces = x.view(-1, 7168 if rows > 1 else 8192)
    count, around = pieces.shape[0], (1 << 31) // pieces.shape[1]
    starts = (0, count // 3, around - 2, count - 3)
    picked = [slice(start, min(start + 4, count)) for start in starts]

    def check(results: list[torch.Tensor], reference) -> None:
        for piece in picked:
            for expected, got in zip(reference(pieces[piece]), results, strict=True):
                assert_same_bits(expected, got.view(count, -1)[piece], piece)

    packed, scales = ops.bf16_to_fp4_row(x)
    check([packed, scales], formats.bf16_to_fp4_row)
    decoded = ops.fp4_row_to_bf16(packed, scales)
    check([decoded], lambda p: (formats.fp4_row_to_bf16(*formats.bf16_to_fp4_row(p)),))
    del packed, decoded
    q, scales = ops.bf16_to_fp8_row(x)
    check([q, scales], formats.bf16_to_fp8_row)
    decoded = ops.fp8_row_to_bf16(q, scales)
    check([decoded], lambda p: (formats.fp8_row_to_bf16(*formats.bf16_to_fp8_row(p)),))


def test_refused_launches_name_the_kernel():
    kernel = table.KERNELS["bf16_to_fp4_row"]
    values = dict.fromkeys(kernel.params, 0)
    with pytest.raises(RuntimeError, match="bf16_to_fp4_row"):
        launching.launch(kernel, "Bf16, true", 0, values, torch.cuda.current_device())  # no grid
    # Refused, not broken: the next call works, and nobody else sees the error.
    torch.cuda.synchronize()
    inputs = _inputs()
    out = _outputs(*inputs)
    _run(inputs, out)
    _check(inputs, out)


def test_an_index_out_of_range_stops_the_kernel():
    script = f"""
import torch
from ds_fp4 import ops
from ds_fp4.ops import backends
backends._backend = backends.select({backends._backend.name!r})
x = torch.zeros(4, 64, device="cuda")
ops.bf16_to_fp4_row(x, index=torch.tensor([0, 4], dtype=torch.int32, device="cuda"))
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print("stopped:", str(error).splitlines()[0])
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert "stopped: " in result.stdout, result.stderr


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.bf16_to_fp4_row(x[:, :40]), "multiple of 32"),
        (lambda x: ops.bf16_to_fp4_row(x, "nearest"), "scale_rounding"),
        (lambda x: ops.bf16_to_fp4_row(x.t()), "inner stride"),
        (lambda x: ops.bf16_to_fp4_row(x, index=torch.zeros(1, dtype=torch.int32)), "must be on cuda"),
        (lambda x: ops.bf16_to_fp4_row(x, index=torch.zeros(1, dtype=torch.int64, device="cuda")), "int32"),
        (lambda x: ops.bf16_to_fp8_row(x.double()), "float64"),
        (lambda x: ops.fp8_row_to_bf16(x.to(torch.float8_e4m3fn), torch.ones(64, 2, device="cuda")), "shape"),
        (lambda x: ops.fp4_row_to_bf16(x.byte(), torch.ones(64, 4)), "scales"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(64, 64, device="cuda"))


def test_what_is_loaded_is_said():
    assert ops.describe_kernels().startswith(backends._backend.name)
