# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The fused kernels on a GPU against their reference on the host, and what only a GPU can show: streams, graphs,
size."""

import pytest
import torch

from ds_fp4 import formats, ops, reference
from tests import fused_checks as checks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GPU = "cuda"
SIZES = [
    [1],
    [128],
    [127, 0, 129],
    [0, 0, 300, 256, 0],
    [1000, 10, 0, 1],  # 100:1
    [512],
    [0] * 40 + [200] + [0] * 300 + [5],
    [0],
    [],
]


def device_tensors(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if t is None else t.to(GPU) for t in tensors]


# ---- swiglu_forward ----


@pytest.mark.parametrize("save", ["mxfp4", "fp8", None])
@pytest.mark.parametrize("rows, width", [(0, 256), (1, 128), (37, 384), (300, 768), (129, 2048), (64, 14336)])
@pytest.mark.parametrize("scale_layout", ["row", "gemm"])
def test_swiglu_forward_shapes(rows, width, save, scale_layout):
    checks.check_swiglu_forward(GPU, rows, width, save=save, scale_layout=scale_layout)


@pytest.mark.parametrize("activation", checks.FUSED_ACTIVATIONS)
@pytest.mark.parametrize("kind", ["gaussian", "student_t", "zero_blocks", "wide_rows", "subnormal", "extreme"])
def test_swiglu_forward_values(activation, kind):
    for save in ("mxfp4", "fp8", None):
        checks.check_swiglu_forward(GPU, 200, 1024, kind, activation=activation, save=save, scale_layout="gemm")


@pytest.mark.parametrize("scale_rounding", list(formats.SCALE_ROUNDINGS))
def test_swiglu_forward_roundings(scale_rounding):
    checks.check_swiglu_forward(GPU, 100, 512, "edges", scale_rounding=scale_rounding)


@pytest.mark.parametrize("save", ["mxfp4", "fp8"])
def test_swiglu_forward_into_records(save):
    checks.check_swiglu_forward(GPU, 77, 768, save=save, records=True)


@pytest.mark.parametrize("weighted", [True, False])
def test_swiglu_forward_non_finite(weighted):
    for save in ("mxfp4", "fp8", None):
        checks.check_swiglu_forward(GPU, 256, 512, poison=60, save=save, weighted=weighted)


# ---- swiglu_backward ----


@pytest.mark.parametrize("gate_up_format", ["mxfp4", "fp8", "bf16"])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)}x{sum(sizes)}")
def test_swiglu_backward_sizes(sizes, gate_up_format):
    checks.check_swiglu_backward(GPU, sizes, 384, gate_up_format=gate_up_format, scale_layout="gemm")


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)}x{sum(sizes)}")
def test_swiglu_backward_unpadded_rows(sizes):
    checks.check_swiglu_backward(GPU, sizes, 256, padded_input=False)


@pytest.mark.parametrize("gate_up_format", ["mxfp4", "fp8", "bf16"])
@pytest.mark.parametrize("activation", checks.FUSED_ACTIVATIONS)
def test_swiglu_backward_activations(activation, gate_up_format):
    checks.check_swiglu_backward(
        GPU, [300, 0, 130], 512, "student_t", activation=activation, gate_up_format=gate_up_format
    )


@pytest.mark.parametrize("kind", ["wide_rows", "zero_blocks", "student_t"])
@pytest.mark.parametrize("scale_layout", ["row", "gemm"])
def test_swiglu_backward_spread(kind, scale_layout):
    options = {"dh_kind": kind, "scale_layout": scale_layout}
    checks.check_swiglu_backward(GPU, [256, 70], 256, "student_t", gate_up_format="bf16", **options)
    checks.check_swiglu_backward(GPU, [256, 70], 256, "gaussian", weighted=False, **options)


def test_swiglu_backward_non_finite():
    checks.check_swiglu_backward(GPU, [500, 60], 256, poison=12)
    checks.check_swiglu_backward(GPU, [500, 60], 256, poison=12, gate_up_format="fp8", scale_layout="gemm")


def test_swiglu_backward_at_model_width():
    checks.check_swiglu_backward(GPU, [700, 0, 133, 1], 2048, scale_layout="gemm")


# ---- combine_rows, gather_rows ----


@pytest.mark.parametrize("row_format", ["bf16", "mxfp4", "fp8"])
@pytest.mark.parametrize("out_format", ["bf16", "mxfp4", "fp8"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("in_records", [False, True])
def test_combine_rows(row_format, out_format, weighted, in_records):
    for k, longest in ((32, 1), (1056, 3), (7168, 8), (2048, 70)):
        checks.check_combine_rows(
            GPU, 101, 150, k, row_format=row_format, out_format=out_format, weighted=weighted, in_records=in_records,
            longest=longest,
        )  # fmt: skip


@pytest.mark.parametrize("row_format, out_format, k", [("bf16", "fp8", 77), ("fp8", "bf16", 131), ("fp8", "fp8", 1)])
def test_combine_rows_any_width(row_format, out_format, k):
    checks.check_combine_rows(GPU, 50, 60, k, row_format=row_format, out_format=out_format, longest=5)


@pytest.mark.parametrize("row_format", ["bf16", "mxfp4", "fp8"])
@pytest.mark.parametrize("out_format", ["bf16", "mxfp4", "fp8"])
@pytest.mark.parametrize("kind", ["bits", "extreme", "subnormal", "wide_rows"])
def test_combine_rows_values(row_format, out_format, kind):
    checks.check_combine_rows(GPU, 300, 200, 512, row_format=row_format, out_format=out_format, kind=kind, poison=20)


@pytest.mark.parametrize("row_format", ["bf16", "mxfp4", "fp8"])
@pytest.mark.parametrize("k", [512, 2112, 7168])
def test_combine_rows_lists_of_one_length(row_format, k):
    for longest in (2, 6, 35):
        checks.check_combine_rows(
            GPU, 500, 600, k, row_format=row_format, out_format="bf16", longest=longest, one_length=True
        )


def test_combine_rows_empty():
    checks.check_combine_rows(GPU, 0, 5, 64, row_format="bf16", out_format="bf16")
    checks.check_combine_rows(GPU, 5, 0, 64, row_format="bf16", out_format="mxfp4", longest=0)


def test_combine_rows_fp32_scales():
    x = torch.randn(60, 512)
    offsets, indices = checks.random_lists(40, 60, 4, seed=1)
    rows = formats.bf16_to_fp8_row(x)
    expected_out = (torch.empty(40, 512, dtype=torch.float8_e4m3fn), torch.empty(40, 4))
    reference.combine_rows(rows, offsets, indices, row_format="fp8", out_format="fp8", out=expected_out)
    out = tuple(device_tensors(*expected_out))
    ops.combine_rows(
        tuple(device_tensors(*rows)), *device_tensors(offsets, indices), row_format="fp8", out_format="fp8", out=out
    )
    checks.assert_same_parts("sum", out, expected_out)


@pytest.mark.parametrize(
    "row_bytes, stride", [(16, 0), (48, 64), (3824, 3840), (7264, 0), (100, 0), (36, 40), (7, 9), (1, 3), (5000, 5001)]
)
def test_gather_rows(row_bytes, stride):
    checks.check_gather_rows(GPU, 500, row_bytes, 777, stride=stride)
    checks.check_gather_rows(GPU, 3, row_bytes, 0, stride=stride)


# ---- all ----


def _calls():
    """Each call on fixed inputs: name, function that writes into fixed outputs, those outputs."""
    g = torch.Generator().manual_seed(0)
    gate_up = torch.randn(256, 1024, generator=g).to(torch.bfloat16).to(GPU)
    dh = torch.randn(256, 512, generator=g).to(torch.bfloat16).to(GPU)
    weights = torch.rand(256, generator=g).to(GPU)
    sizes = torch.tensor([100, 0, 128], dtype=torch.int32, device=GPU)
    records = torch.randint(0, 256, (64, 272), generator=g).to(torch.uint8).to(GPU)
    index = torch.randint(-1, 64, (100,), generator=g).to(torch.int32).to(GPU)
    offsets, indices = device_tensors(*checks.random_lists(50, 256, 4, seed=2))
    forward = ops.swiglu_forward(gate_up, weights)
    backward = ops.swiglu_backward(dh, weights, forward.saved, sizes)
    gathered = ops.gather_rows(records, index)
    summed = ops.combine_rows(gate_up, offsets, indices, out_format="fp8")
    return [
        ("swiglu_forward", lambda: ops.swiglu_forward(gate_up, weights, out=forward), [forward.q, *forward.saved]),
        ("swiglu_backward", lambda: ops.swiglu_backward(dh, weights, forward.saved, sizes, out=backward), [*backward]),
        ("gather_rows", lambda: ops.gather_rows(records, index, out=gathered), [gathered]),
        ("combine_rows", lambda: ops.combine_rows(gate_up, offsets, indices, out_format="fp8", out=summed), [*summed]),
    ]


def test_graph_capture():
    """A captured call writes the same bits at each replay."""
    for name, call, outputs in _calls():
        call()
        expected = [t.clone() for t in outputs]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        for t in outputs:
            checks.poisoned(t)
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(outputs, expected, strict=True):
            checks.assert_same(name, got, want)


def test_caller_stream_and_no_synchronization():
    """Calls go to the current stream: behind a long sleep on it nothing has been written, and no call waits for it."""
    for name, call, outputs in _calls():
        call()
        torch.cuda.synchronize()
        for t in outputs:
            checks.poisoned(t)
        before = [checks.bits(t).clone() for t in outputs]
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # about 0.1 s
            torch.cuda.set_sync_debug_mode("error")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            done = stream.record_event()
        assert not done.query(), f"{name} waited for its stream"
        side = [t.view(torch.uint8).flatten()[:64].clone() for t in outputs]  # on the default stream
        torch.cuda.current_stream().synchronize()
        assert not done.query(), f"{name}: the sleep was too short for this test"
        for first, was in zip(side, before, strict=True):
            assert torch.equal(first.cpu(), was.view(torch.uint8).flatten()[:64]), (
                f"{name} did not use the current stream"
            )
        torch.cuda.synchronize()
        changed = [not torch.equal(checks.bits(t), was) for t, was in zip(outputs, before, strict=True)]
        assert all(changed), f"{name} has not run"


def test_more_than_2_to_31_elements():
    """Offsets past 2^31: the last rows of a big tensor, and beyond 4 GiB of bytes."""
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB")
    rows, width = 530_000, 2048  # gate_up: 2.17e9 elements, 4.3e9 bytes
    gate_up = torch.empty(rows, 2 * width, dtype=torch.bfloat16, device=GPU).normal_()
    weights = torch.rand(rows, device=GPU)
    forward = ops.swiglu_forward(gate_up, weights)
    tail = slice(rows - 300, rows)
    small = ops.swiglu_forward(gate_up[tail].contiguous(), weights[tail].contiguous())
    checks.assert_same("q", forward.q[tail], small.q)
    checks.assert_same_parts("saved", [t[tail] for t in forward.saved], small.saved)
    offsets = torch.arange(0, 301, dtype=torch.int32, device=GPU)
    indices = torch.arange(rows - 300, rows, dtype=torch.int32, device=GPU)
    summed = ops.combine_rows(gate_up, offsets, indices)
    assert torch.equal(summed, gate_up[tail])
    gathered = ops.gather_rows(gate_up.view(torch.uint8), indices)
    assert torch.equal(gathered, gate_up[tail].view(torch.uint8))
    del gate_up
    padded = -(-rows // 128) * 128
    dh = torch.empty(padded, width, dtype=torch.bfloat16, device=GPU).normal_()
    saved = tuple(torch.cat([t, t[: padded - rows]]) for t in forward.saved)
    weights = torch.cat([weights, weights[: padded - rows]])
    sizes = torch.tensor([padded - 128, 128], dtype=torch.int32, device=GPU)
    backward = ops.swiglu_backward(dh, weights, saved, sizes)
    last = slice(padded - 128, padded)
    small = ops.swiglu_backward(
        dh[last].contiguous(),
        weights[last].contiguous(),
        tuple(t[last].contiguous() for t in saved),
        sizes[1:].contiguous(),
    )
    checks.assert_same("row", backward.row[last], small.row)
    checks.assert_same("col", backward.col[-128 * 2 * width :], small.col)
    checks.assert_same("h_col", backward.h_col[-128 * width :], small.h_col)
    checks.assert_same("weights", backward.weights[last], small.weights)


def test_bad_index_stops_the_kernel():
    """Not run in this process: a trap ends the CUDA context."""
    import subprocess
    import sys

    code = (
        "import torch; from ds_fp4 import ops\n"
        "r = torch.zeros(4, 16, dtype=torch.uint8, device='cuda')\n"
        "ops.gather_rows(r, torch.tensor([4], dtype=torch.int32, device='cuda'))\n"
        "torch.cuda.synchronize()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode != 0 and "CUDA" in result.stderr, result.stderr
