# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The emulated GEMM backend against FP64, and what every backend refuses."""

from __future__ import annotations

import pytest
import torch

from ds_fp4.gemm import Groups
from ds_fp4.gemm.emulation import EmulationBackend
from tests import gemm_checks as checks

BACKEND = EmulationBackend()
COUNTS = [[5, 0, 130], [300], [0, 256, 0, 0], [128, 128], [0, 0], [0], [], [1] * 9]
IDS = [str(counts).replace(" ", "") for counts in COUNTS]


@pytest.mark.parametrize("counts", COUNTS, ids=IDS)
def test_grouped_gemm(counts):
    problem = checks.operands("cpu", counts, 192, 256)
    checks.check_grouped_gemm(BACKEND, problem, limit=checks.BF16_ROUNDING)


@pytest.mark.parametrize("counts", COUNTS, ids=IDS)
@pytest.mark.parametrize("parts", [(96,), (64, 64)])
def test_weight_gradient(counts, parts):
    problem = checks.operands("cpu", counts, sum(parts), 160)
    checks.check_weight_gradient(BACKEND, problem, parts, torch.float32, limit=1e-6)
    checks.check_weight_gradient(BACKEND, problem, parts, torch.bfloat16, limit=checks.BF16_ROUNDING)


def test_every_element_is_rounded_once():
    problem = checks.operands("cpu", [200, 70], 128, 384)
    out = BACKEND.grouped_gemm(problem.rows, problem.weights, problem.groups).double()
    expected = checks.expected_grouped_gemm(problem)
    gap = (out - expected).abs()
    # Half a unit in the last of 8 bits, and what FP32 sums lose where terms cancel.
    assert bool((gap <= expected.abs() * 2.0**-8 + 1e-6 * expected.abs().max()).all())


@pytest.mark.parametrize("k", [64, 192, 320])
def test_a_short_last_group(k):
    problem = checks.operands("cpu", [40, 200], 64, k)
    checks.check_grouped_gemm(BACKEND, problem, limit=checks.BF16_ROUNDING)


def test_nan_padding_does_not_reach_tokens():
    checks.check_poisoned_padding(BACKEND, checks.operands("cpu", [1, 0, 130, 128], 64, 256))


def test_a_nan_reaches_its_own_row_and_expert_only():
    problem = checks.operands("cpu", [100, 20], 64, 128)
    problem.rows[0].view(torch.uint8)[3, 5] = checks.E4M3_NAN
    out = BACKEND.grouped_gemm(problem.rows, problem.weights, problem.groups)
    assert bool(out[3].isnan().all()) and int(out.isnan().any(1).sum()) == 1
    problem.left[0].view(torch.uint8)[64 * 128] = checks.E4M3_NAN
    (gradient,) = checks.new_outs(problem, (64,), torch.bfloat16)
    BACKEND.weight_gradient(problem.left, problem.right, problem.groups, (gradient,))
    assert bool(gradient[1, 0].isnan().all()) and int(gradient.isnan().any(2).sum()) == 1


def test_groups_of():
    groups = Groups.of([130, 0, 1])
    assert groups.sizes == (256, 0, 128) and groups.padded_rows == 384
    assert groups.padded_offsets.tolist() == [0, 256, 256, 384]
    indices = groups.m_indices.tolist()
    assert indices[:130] == [0] * 130 and indices[256] == 2 and set(indices[130:256] + indices[257:]) == {-1}


# ---- what is refused ----


def grouped(problem, **changes):
    problem = problem._replace(**changes)
    BACKEND.grouped_gemm(problem.rows, problem.weights, problem.groups)


@pytest.fixture(scope="module")
def problem():
    return checks.operands("cpu", [100, 20], 64, 256)


def test_refused_grouped_gemm(problem):
    (q, scales), (w, w_scales), groups = problem.rows, problem.weights, problem.groups
    refusals = {
        "a's codes must be contiguous float8_e4m3fn": {"rows": (q.view(torch.uint8), scales)},
        r"a's codes must be .* \[256, 256\]": {"rows": (q[:128], scales)},
        r"a's scales must be float32 \[256, 2\]": {"rows": (q, scales[:, :1])},
        "a's scales must have strides": {"rows": (q, scales.contiguous())},
        "b's codes must be .experts": {"weights": (w[0], w_scales)},
        "b's scales must be float32": {"weights": (w, w_scales.double())},
        "b's scales must be contiguous": {"weights": (w, torch.ones(2, 1, 4)[:, :, ::2])},
        "entry for each of 2 experts": {"groups": groups._replace(sizes=(256,))},
        "multiples of 128": {"groups": groups._replace(sizes=(100, 156))},
        r"m_indices must be contiguous int32 \[256\]": {"groups": groups._replace(m_indices=groups.m_indices.long())},
        r"padded_offsets must be contiguous int32 \[3\]": {
            "groups": groups._replace(padded_offsets=groups.padded_offsets[:2])
        },
    }
    for message, changes in refusals.items():
        with pytest.raises(ValueError, match=message):
            grouped(problem, **changes)


def test_refused_weight_gradient(problem):
    left, right, groups = problem.left, problem.right, problem.groups
    good = torch.empty(2, 64, 256)
    refusals = [
        ((left[0][1:], left[1]), (good,), "a must have N, the sum of N_i, = 64 columns of 256 rows, 16384 codes"),
        ((left[0].view(64, 256), left[1]), (good,), r"a's codes must be .* \[16384\]"),
        ((left[0], left[1].contiguous()), (good,), "a's scales must have strides"),
        ((left[0], left[1][:, 0]), (good,), r"a's scales must be float32 \[12\]"),
        ((left[0], problem.left_shared[1].repeat(2)[::2]), (good,), "a's scales must be contiguous"),
        (left, (), r"outs must be tensors \[experts, N_i, K\], got \[\]"),
        (left, (good, good), r"N_i, = 128 columns of 256 rows, 32768 codes, for outs \[\[2, 64, 256\], .*, got 16384"),
        (left, (torch.empty(2, 64, 128),), r"b must have K = 128 columns of 256 rows, 32768 codes"),
        (left, (good[0],), r"outs must be tensors \[experts, N_i, K\]"),
        (problem.left_shared, tuple(half.contiguous() for half in good.chunk(2, 1)), r"of 128, got \[32, 32\]"),
        (left, (good.half(),), "all bfloat16 or all float32"),
        (left, (good[:, :32].contiguous(), good[:, 32:].bfloat16().contiguous()), "all bfloat16 or all float32"),
        (left, (torch.empty(2, 256, 64).transpose(1, 2),), "must be contiguous"),
        (left, (torch.empty(1, 64, 256),), r"must be contiguous \[2, N_i, 256\]"),
    ]
    for a, outs, message in refusals:
        with pytest.raises(ValueError, match=message):
            BACKEND.weight_gradient(a, right, groups, outs)
    with pytest.raises(ValueError, match="one of a and b may have a scale for 128 columns, got both"):
        BACKEND.weight_gradient(problem.left_shared, problem.right_shared, groups, (good,))


def test_a_backend_without_block_scales_refuses_them(problem, monkeypatch):
    monkeypatch.setattr(BACKEND, "column_scale_layout", "gemm")
    with pytest.raises(ValueError, match="b has a scale for 128 columns, which emulation does not take.*'gemm'"):
        BACKEND.weight_gradient(problem.left, problem.right_shared, problem.groups, (torch.empty(2, 64, 256),))
