# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""gather_rows and combine_rows in PyTorch against loops over lists."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fp4 import formats, reference
from tests import fused_checks as checks


def _naive_sum(rows: torch.Tensor, offsets: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor | None):
    """FP32 sums one addition after the other."""
    out = torch.zeros(offsets.shape[0] - 1, rows.shape[1])
    for t in range(out.shape[0]):
        for j in range(int(offsets[t]), int(offsets[t + 1])):
            if indices[j] >= 0:
                row = rows[int(indices[j])]
                out[t] = out[t] + (row if weights is None else row * weights[j])
    return out


@settings(deadline=None, max_examples=40)
@given(
    row_format=st.sampled_from(["bf16", "mxfp4", "fp8"]),
    out_format=st.sampled_from(["bf16", "mxfp4", "fp8"]),
    count=st.integers(0, 12),
    k=st.sampled_from([32, 96, 160]),
    weighted=st.booleans(),
    in_records=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_combine_rows(row_format, out_format, count, k, weighted, in_records, seed):
    rows = checks.random_rows(row_format, 9, k, seed, "student_t", in_records)
    offsets, indices = checks.random_lists(count, 9, 5, seed)
    weights = torch.randn(indices.shape[0]) if weighted else None
    got = reference.combine_rows(rows, offsets, indices, weights, row_format=row_format, out_format=out_format)
    if row_format == "bf16":
        values = rows.float()
    elif row_format == "mxfp4":
        values = formats.fp4_row_to_bf16(*rows, dtype=torch.float32)
    else:
        values = formats.fp8_row_to_bf16(*rows, dtype=torch.float32)
    total = _naive_sum(values, offsets, indices, weights)
    if out_format == "bf16":
        checks.assert_same("sum", got, total.bfloat16())
    elif out_format == "mxfp4":
        checks.assert_same_parts("sum", got, formats.bf16_to_fp4_row(total.bfloat16()))
    else:
        checks.assert_same_parts("sum", got, formats.bf16_to_fp8_row(total, scale_dtype=torch.uint8))


def test_lists_of_one_length():
    rows = torch.randn(7, 64).bfloat16()
    lists = torch.tensor([[0, 3, -1], [6, -1, -1], [-1, -1, -1], [1, 1, 2]], dtype=torch.int32)
    got = reference.combine_rows(rows, None, lists)
    expected = torch.stack(
        [rows[[0, 3]].float().sum(0), rows[6].float(), torch.zeros(64), rows[[1, 1, 2]].float().sum(0)]
    )
    checks.assert_same("sum", got, expected.bfloat16())


@pytest.mark.parametrize("row_bytes, stride", [(16, 0), (100, 112), (7, 9)])
def test_gather_rows(row_bytes, stride):
    checks.check_gather_rows("cpu", 20, row_bytes, 33, stride=stride)


def test_gather_from_nothing():
    index = torch.full((3,), -1, dtype=torch.int32)
    assert reference.gather_rows(torch.zeros(0, 16, dtype=torch.uint8), index).tolist() == [[0] * 16] * 3


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: reference.gather_rows(torch.zeros(3, 16)), "torch.uint8"),
        (
            lambda: reference.gather_rows(torch.zeros(3, 16, dtype=torch.uint8), torch.tensor([3], dtype=torch.int32)),
            "0 to 2",
        ),
        (
            lambda: reference.combine_rows(
                torch.zeros(3, 32).bfloat16(),
                torch.tensor([0, 2, 1], dtype=torch.int32),
                torch.zeros(2, dtype=torch.int32),
            ),
            "not decrease",
        ),
        (
            lambda: reference.combine_rows(
                torch.zeros(3, 40).bfloat16(), None, torch.zeros(2, 1, dtype=torch.int32), out_format="mxfp4"
            ),
            "multiple of 32",
        ),
        (
            lambda: reference.combine_rows(
                torch.zeros(3, 32).bfloat16(), None, torch.zeros(2, 1, dtype=torch.int32), row_format="fp8"
            ),
            "pair",
        ),
        (
            lambda: reference.combine_rows(torch.zeros(3, 32).bfloat16(), None, torch.zeros(2, dtype=torch.int32)),
            "2 dimension",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_out_is_written_whatever_it_held():
    """FP8 outputs with FP32 scales that are no powers of two yet; MXFP4 and BF16 outputs with gaps between rows."""
    rows = torch.randn(9, 256).bfloat16()
    offsets, indices = checks.random_lists(5, 9, 4, seed=0)
    expected = reference.combine_rows(rows, offsets, indices, out_format="fp8")
    out = (torch.empty(5, 256, dtype=torch.float8_e4m3fn), torch.full((5, 2), 0.3))
    got = reference.combine_rows(rows, offsets, indices, out_format="fp8", out=out)
    assert got[1].data_ptr() == out[1].data_ptr()
    checks.assert_same("q", got[0], expected[0])
    assert torch.equal(got[1], torch.exp2(expected[1].float() - 127))


@pytest.mark.parametrize(
    "out_format, out, message",
    [
        ("bf16", torch.zeros(4, 32), "torch.bfloat16"),
        ("bf16", torch.zeros(3, 32).bfloat16(), r"shape \(4, 32\)"),
        ("fp8", torch.zeros(4, 32).bfloat16(), "pair"),
        ("mxfp4", (torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 1)), "scales must be torch.uint8"),
        ("bf16", torch.zeros(1, 32).bfloat16().expand(4, 32), "overlap"),
    ],
)
def test_bad_out(out_format, out, message):
    rows, lists = torch.zeros(3, 32).bfloat16(), torch.zeros(4, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        reference.combine_rows(rows, None, lists, out_format=out_format, out=out)
