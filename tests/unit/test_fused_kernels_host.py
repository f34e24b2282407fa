# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The sources of the fused and the routing kernels, run on the host (host_kernels), against their reference."""

import pytest
import torch

from ds_fp4 import reference
from ds_fp4.ops import fused, kernels, routing
from tests import fused_checks as checks
from tests.routing_checks import check_exchange


@pytest.fixture(autouse=True)
def ops_on_host(host, monkeypatch):
    host.replace(monkeypatch)


@pytest.mark.parametrize("save", ["mxfp4", "fp8", None])
@pytest.mark.parametrize("rows, width", [(1, 128), (37, 384), (5, 1152)])
def test_swiglu_forward(rows, width, save):
    checks.check_swiglu_forward("cpu", rows, width, save=save, records=save is not None)


@pytest.mark.parametrize("activation", checks.FUSED_ACTIVATIONS)
@pytest.mark.parametrize("kind", ["gaussian", "student_t", "zero_blocks", "wide_rows"])
def test_swiglu_forward_activations(activation, kind):
    for save in ("mxfp4", "fp8", None):
        checks.check_swiglu_forward("cpu", 16, 256, kind, activation=activation, save=save, scale_layout="gemm")


def test_swiglu_forward_non_finite():
    checks.check_swiglu_forward("cpu", 64, 256, poison=20, scale_layout="gemm")
    checks.check_swiglu_forward("cpu", 64, 256, poison=20, save="fp8", weighted=False)


def test_swiglu_forward_no_rows():
    checks.check_swiglu_forward("cpu", 0, 256)


@pytest.mark.parametrize("gate_up_format", ["mxfp4", "fp8", "bf16"])
@pytest.mark.parametrize("sizes", [[1], [128], [130, 0, 5], [0, 0, 200, 256, 0]], ids=str)
def test_swiglu_backward(sizes, gate_up_format):
    checks.check_swiglu_backward("cpu", sizes, 256, gate_up_format=gate_up_format, scale_layout="gemm")


@pytest.mark.parametrize("gate_up_format", ["mxfp4", "fp8", "bf16"])
@pytest.mark.parametrize("activation", checks.FUSED_ACTIVATIONS)
def test_swiglu_backward_activations(activation, gate_up_format):
    checks.check_swiglu_backward(
        "cpu", [100, 30], 256, "student_t", activation=activation, gate_up_format=gate_up_format
    )


@pytest.mark.parametrize("sizes", [[5, 0, 130], [0], []], ids=str)
def test_swiglu_backward_unpadded_rows(sizes):
    checks.check_swiglu_backward("cpu", sizes, 128, padded_input=False)


@pytest.mark.parametrize("kind", ["wide_rows", "zero_blocks"])
def test_swiglu_backward_spread(kind):
    """Rows many powers of two apart: codes become subnormal, and zero, under the tile's scale."""
    checks.check_swiglu_backward("cpu", [128], 128, "student_t", dh_kind=kind, gate_up_format="bf16")
    checks.check_swiglu_backward("cpu", [128], 128, "gaussian", dh_kind=kind, weighted=False, scale_layout="gemm")


def test_swiglu_backward_non_finite():
    checks.check_swiglu_backward("cpu", [200, 60], 128, poison=8)


def test_swiglu_backward_many_groups():
    sizes = [0] * 300
    sizes[0], sizes[31], sizes[32], sizes[290] = 3, 129, 1, 40
    checks.check_swiglu_backward("cpu", sizes, 128)


@pytest.mark.parametrize("sizes, padded_input", [([200], True), ([129], True), ([200], False)], ids=str)
def test_swiglu_backward_stops_at_sizes_that_do_not_add_up(monkeypatch, sizes, padded_input):
    # Of tensors on a GPU the sizes are not looked at before. Rows and padded rows for one tile.
    arguments = torch.ones(128, 128, dtype=torch.bfloat16), None, torch.ones(128, 256, dtype=torch.bfloat16)
    options = {"gate_up_format": "bf16", "padded_input": padded_input}
    out = reference.swiglu_backward(*arguments, torch.tensor([128], dtype=torch.int32), **options)
    monkeypatch.setattr(fused.activations, "prepare_swiglu_backward", lambda *_: (128, out))
    with pytest.raises(RuntimeError, match="trap"):
        fused.swiglu_backward(*arguments, torch.tensor(sizes, dtype=torch.int32), **options)


@pytest.mark.parametrize("row_format", ["bf16", "mxfp4", "fp8"])
@pytest.mark.parametrize("out_format", ["bf16", "mxfp4", "fp8"])
@pytest.mark.parametrize("weighted", [False, True])
def test_combine_rows(row_format, out_format, weighted):
    options = {"row_format": row_format, "out_format": out_format, "weighted": weighted}
    for in_records in (False, True):
        checks.check_combine_rows("cpu", 21, 40, 1056, **options, in_records=in_records)
    checks.check_combine_rows("cpu", 9, 12, 96, **options, aligned=False)


@pytest.mark.parametrize(
    "row_format, out_format, k", [("bf16", "fp8", 77), ("fp8", "bf16", 131), ("bf16", "mxfp4", 32)]
)
def test_combine_rows_widths(row_format, out_format, k):
    checks.check_combine_rows("cpu", 9, 12, k, row_format=row_format, out_format=out_format, longest=70)


@pytest.mark.parametrize(
    "row_format, out_format", [("bf16", "mxfp4"), ("mxfp4", "bf16"), ("fp8", "bf16"), ("bf16", "fp8")]
)
@pytest.mark.parametrize("kind", ["bits", "extreme", "subnormal"])
def test_combine_rows_values(row_format, out_format, kind):
    checks.check_combine_rows("cpu", 40, 60, 512, row_format=row_format, out_format=out_format, kind=kind, poison=5)


@pytest.mark.parametrize("row_format", ["mxfp4", "fp8"])
@pytest.mark.parametrize("k", [512, 992, 1024, 1056, 2112, 7168])
def test_combine_rows_lists_of_one_length(row_format, k):
    for longest in (2, 6, 35):
        checks.check_combine_rows(
            "cpu", 9, 20, k, row_format=row_format, out_format="bf16", longest=longest, one_length=True
        )


def test_plans_that_lead_beyond_the_rows_stop_the_kernels():
    # Of tensors on a GPU nobody looks at them before.
    def int32(*values):
        return torch.tensor(values, dtype=torch.int32)

    ids, scores = torch.tensor([[0, 3], [1, 2]]), torch.ones(2, 2)
    plan = routing.plan_send(ids, 2, 2)
    routing.pack_routing(ids, scores, plan.tokens, plan.records, 2)
    with pytest.raises(RuntimeError, match="trap"):
        routing.pack_routing(ids, scores, int32(0, 2), plan.records, 2)
    with pytest.raises(RuntimeError, match="trap"):
        routing.gather_gradients(torch.ones(2), int32(0, 2).view(1, 2))
    routing.return_gradients(ids, plan.records, torch.ones(4, 2), 2)
    with pytest.raises(RuntimeError, match="trap"):
        routing.return_gradients(ids, plan.records, torch.ones(3, 2), 2)


def test_combine_rows_empty():
    checks.check_combine_rows("cpu", 0, 5, 64, row_format="bf16", out_format="bf16")
    checks.check_combine_rows("cpu", 5, 0, 64, row_format="bf16", out_format="mxfp4", longest=0)


@pytest.mark.parametrize("row_bytes, stride", [(16, 0), (48, 64), (3824, 3840), (100, 0), (36, 40), (7, 9), (1, 3)])
def test_gather_rows(row_bytes, stride):
    checks.check_gather_rows("cpu", 50, row_bytes, 67, stride=stride)


def test_gather_rows_of_too_many_units_is_refused():
    records = torch.empty(1, (1 << 31) + 1, dtype=torch.uint8)  # memory that nobody touches
    with pytest.raises(ValueError, match="units of a record below 2"):
        fused.gather_rows(records)


@pytest.mark.parametrize("kind", ["uniform", "skewed", "one_rank", "dropped"])
@pytest.mark.parametrize("ranks, local_experts, k", [(1, 8, 8), (2, 4, 1), (4, 8, 8), (3, 40, 5), (2, 40, 32)])
def test_routing(kind, ranks, local_experts, k):
    check_exchange("cpu", kind, [33 + 30 * r for r in range(ranks)], k, local_experts)


@pytest.mark.parametrize("tokens", [[0, 30], [0, 0], [300, 1, 0]], ids=str)
def test_routing_many_blocks(tokens, monkeypatch):
    monkeypatch.setattr(routing, "_ROWS_A_BLOCK", 8)
    check_exchange("cpu", "uniform", tokens, 2, 4, dtype=torch.int32)


def test_swiglu_backward_strips():
    """More tiles than a strip has, and a last strip that is shorter."""
    checks.check_swiglu_backward("cpu", [700, 1, 500], 256, gate_up_format="bf16")


def test_every_instantiation_ran(host, request):
    if request.config.option.keyword:
        pytest.skip("only some of the tests ran")
    # test_kernels_on_host.py runs the others, which work in tiles.
    untiled = [kernel for kernel in kernels.KERNELS.values() if kernel.tile is None]
    missing = {f"{kernel.name}<{t}>" for kernel in untiled for t in kernel.instantiations} - set(host.launched)
    assert not missing  # this test comes last
