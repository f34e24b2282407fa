# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Bad arguments: each is a ValueError that says what was expected and what came."""

import pytest
import torch

from ds_fp4 import formats
from tests.kernel_checks import assert_same

X = torch.randn(4, 128, dtype=torch.bfloat16)
FP4 = formats.bf16_to_fp4_row(X)
FP8 = formats.bf16_to_fp8_row(X)
SIZES = torch.tensor([1, 3], dtype=torch.int32)
META = torch.empty(4, 8, dtype=torch.uint8, device="meta")


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def u8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


CASES = {
    # x
    "x list": (lambda: formats.bf16_to_fp4_row([1.0]), "x must be a tensor, got list"),
    "x dtype": (
        lambda: formats.bf16_to_fp8_row(X.double()),
        "x must be torch.bfloat16 or torch.float16 or torch.float32, got torch.float64",
    ),
    "x dims": (
        lambda: formats.bf16_to_fp4_row(X.view(2, 2, 128)),
        "x must have 2 dimension(s), got shape (2, 2, 128); reshape it first",
    ),
    "x stride": (
        lambda: formats.bf16_to_fp4_row(X.repeat(1, 2)[:, ::2]),
        "x must have an inner stride of 1 (any row stride), got strides (256, 2); pass a contiguous copy",
    ),
    "x transposed": (lambda: formats.bf16_to_fp8_row(X.t()), "got strides (1, 128)"),
    "x width": (
        lambda: formats.bf16_to_fp4_row(X[:, :40]),
        "x must have a positive multiple of 32 columns, got 40",
    ),
    "x empty": (lambda: formats.bf16_to_fp8_row(X[:, :0]), "x must have a positive multiple of 1 columns, got 0"),
    "mode": (
        lambda: formats.bf16_to_fp4_row(X, "nearest"),
        "scale_rounding must be one of 'floor', 'rceil', 'ceil', 'even', got 'nearest'",
    ),
    "mode of fp8_row_to_fp4_row": (lambda: formats.fp8_row_to_fp4_row(*FP8, "EVEN"), "got 'EVEN'"),
    "scale_dtype": (
        lambda: formats.bf16_to_fp8_row(X, scale_dtype=torch.bfloat16),
        "scale_dtype must be torch.float32 or torch.uint8 (uint8 is UE8M0), got torch.bfloat16",
    ),
    "scale_dtype of fp4_row_to_fp8_row": (
        lambda: formats.fp4_row_to_fp8_row(*FP4, scale_dtype=torch.float16),
        "got torch.float16",
    ),
    "dtype": (
        lambda: formats.fp4_row_to_bf16(*FP4, dtype=torch.float64),
        "dtype must be torch.bfloat16 or torch.float16 or torch.float32, got torch.float64",
    ),
    "dtype of fp8_row_to_bf16": (lambda: formats.fp8_row_to_bf16(*FP8, dtype=torch.int8), "got torch.int8"),
    # packed, q and scales
    "packed dtype": (
        lambda: formats.fp4_row_to_bf16(FP4[0].int(), FP4[1]),
        "packed must be torch.uint8, got torch.int32",
    ),
    "packed width": (
        lambda: formats.fp4_row_to_bf16(u8(4, 8), u8(4, 1)),
        "packed must have a positive multiple of 16 columns, got 8",
    ),
    "scales shape": (
        lambda: formats.fp4_row_to_bf16(FP4[0], FP4[1][:, :3].contiguous()),
        "scales must have shape (4, 4), got (4, 3)",
    ),
    "scales rows": (
        lambda: formats.fp4_row_to_fp8_row(FP4[0], FP4[1][:3]),
        "scales must have shape (4, 4), got (3, 4)",
    ),
    "scales dtype": (
        lambda: formats.fp4_row_to_bf16(FP4[0], FP4[1].float()),
        "scales must be torch.uint8, got torch.float32",
    ),
    "scales stride": (lambda: formats.fp4_row_to_bf16(FP4[0], u8(4, 4).t()), "scales must have an inner stride of 1"),
    "scales device": (
        lambda: formats.fp4_row_to_bf16(FP4[0], META[:, :4]),
        "scales must be on cpu like the input, got meta",
    ),
    "q dtype": (
        lambda: formats.fp8_row_to_bf16(FP8[0].view(torch.float8_e5m2), FP8[1]),
        "q must be torch.float8_e4m3fn or torch.uint8, got torch.float8_e5m2",
    ),
    "q scales shape": (
        lambda: formats.fp8_row_to_bf16(u8(4, 129), FP8[1]),
        "scales must have shape (4, 2), got (4, 1)",
    ),
    "q scales dtype": (
        lambda: formats.fp8_row_to_bf16(FP8[0], FP8[1].double()),
        "scales must be torch.float32 or torch.uint8, got torch.float64",
    ),
    "q scales value": (
        lambda: formats.fp8_row_to_bf16(FP8[0], torch.full((4, 1), 3.0)),
        "scales must be positive powers of two (or NaN), got 3.0; quantize with bf16_to_fp8_row",
    ),
    "q scales zero": (
        lambda: formats.fp8_row_to_fp4_row(FP8[0], torch.zeros(4, 1)),
        "powers of two (or NaN), got 0.0",
    ),
    "q scales negative": (
        lambda: formats.fp8_row_to_fp8_col(FP8[0], torch.full((4, 1), -2.0), SIZES),
        "powers of two (or NaN), got -2.0",
    ),
    "q width for fp4": (
        lambda: formats.fp8_row_to_fp4_row(u8(4, 40), torch.ones(4, 1)),
        "q must have a positive multiple of 32 columns, got 40",
    ),
    # index
    "index dtype": (
        lambda: formats.bf16_to_fp4_row(X, index=torch.tensor([0])),
        "index must be torch.int32, got torch.int64",
    ),
    "index dims": (
        lambda: formats.bf16_to_fp8_row(X, index=i32(0).view(1, 1)),
        "index must have 1 dimension(s), got shape (1, 1)",
    ),
    "index high": (
        lambda: formats.fp4_row_to_bf16(*FP4, index=i32(0, 4)),
        "index must hold -1 or input rows 0 to 3, got values from 0 to 4",
    ),
    "index low": (
        lambda: formats.fp4_row_to_fp8_row(*FP4, index=i32(-2, 1)),
        "index must hold -1 or input rows 0 to 3, got values from -2 to 1",
    ),
    "index stride": (
        lambda: formats.bf16_to_fp8_row(X, index=i32(0, 1, 2, 3)[::2]),
        "index must have an inner stride of 1",
    ),
    "index device": (
        lambda: formats.bf16_to_fp4_row(X, index=i32(0).to("meta")),
        "index must be on cpu like the input, got meta",
    ),
    # out
    "out single": (
        lambda: formats.bf16_to_fp4_row(X, out=u8(4, 64)),
        "out must be the pair (packed, scales), got Tensor",
    ),
    "out three": (
        lambda: formats.bf16_to_fp8_row(X, out=(1, 2, 3)),
        "out must be the pair (q, scales), got 3 of them",
    ),
    "out shape": (
        lambda: formats.bf16_to_fp4_row(X, out=(u8(5, 64), u8(5, 4))),
        "out's packed must have shape (4, 64), got (5, 64)",
    ),
    "out shape under an index": (
        lambda: formats.bf16_to_fp4_row(X, index=i32(0), out=(u8(4, 64), u8(4, 4))),
        "out's packed must have shape (1, 64), got (4, 64)",
    ),
    "out scales": (
        lambda: formats.bf16_to_fp8_row(X, out=(u8(4, 128), u8(4, 1))),
        "out's scales must be torch.float32, got torch.uint8",
    ),
    "out scales uint8": (
        lambda: formats.fp4_row_to_fp8_row(*FP4, scale_dtype=torch.uint8, out=(u8(4, 128), torch.ones(4, 1))),
        "out's scales must be torch.uint8, got torch.float32",
    ),
    "out stride": (
        lambda: formats.bf16_to_fp4_row(X, out=(u8(64, 4).t(), u8(4, 4))),
        "out's packed must have an inner stride of 1",
    ),
    "out overlaps": (
        lambda: formats.fp8_row_to_fp4_row(*FP8, out=(u8(1, 64).expand(4, 64), u8(4, 4))),
        "out's packed must not have rows that overlap, got strides (0, 1)",
    ),
    "out device": (
        lambda: formats.bf16_to_fp4_row(X, out=(u8(4, 64).to("meta"), u8(4, 4))),
        "out's packed must be on cpu like the input, got meta",
    ),
    "out dtype": (
        lambda: formats.fp4_row_to_bf16(*FP4, out=torch.zeros(4, 128)),
        "out must be torch.bfloat16, got torch.float32",
    ),
    "out of fp8_row_to_bf16": (
        lambda: formats.fp8_row_to_bf16(*FP8, out=torch.zeros(4, 64, dtype=torch.bfloat16)),
        "out must have shape (4, 128), got (4, 64)",
    ),
    # columns
    "group_sizes dtype": (
        lambda: formats.fp4_row_to_fp8_col(*FP4, SIZES.long()),
        "group_sizes must be torch.int32, got torch.int64",
    ),
    "layout of quantized columns": (
        lambda: formats.bf16_to_fp8_row_and_col(torch.zeros(4, 128), SIZES, scale_layout="blocks"),
        "scale_layout must be one of 'row', 'gemm', got 'blocks'",
    ),
    "layout of columns": (
        lambda: formats.fp4_row_to_fp8_col(*FP4, SIZES, scale_layout="block"),
        "scale_layout must be one of 'row', 'gemm', 'blocks', got 'block'",
    ),
    "block scales' shape": (
        lambda: formats.fp4_row_to_fp8_col(*FP4, SIZES, scale_layout="blocks", out=(u8(128 * 256), torch.zeros(1, 2))),
        "out's scales must have 1 dimension(s), got shape (1, 2)",
    ),
    "group_sizes list": (lambda: formats.fp8_row_to_fp8_col(*FP8, [1, 3]), "group_sizes must be a tensor, got list"),
    "group_sizes sum": (
        lambda: formats.fp4_row_to_fp8_col(*FP4, i32(1, 2)),
        "group_sizes must be non-negative and add up to the 4 rows, got [1, 2]",
    ),
    "group_sizes negative": (
        lambda: formats.fp8_row_to_fp8_col(*FP8, i32(5, -1)),
        "add up to the 4 rows, got [5, -1]",
    ),
    "group_sizes under an index": (
        lambda: formats.fp8_row_to_fp8_col(*FP8, SIZES, index=i32(0, 1)),
        "add up to the 2 rows, got [1, 3]",
    ),
    "group_sizes device": (
        lambda: formats.fp4_row_to_fp8_col(*FP4, SIZES.to("meta"), padded_rows=256),
        "group_sizes must be on cpu like the input, got meta",
    ),
    "padded_rows": (
        lambda: formats.fp4_row_to_fp8_col(*FP4, SIZES, padded_rows=128),
        "padded_rows must be 256 for group_sizes [1, 3], got 128",
    ),
    "padded_rows multiple": (
        lambda: formats.fp8_row_to_fp8_col(*FP8, SIZES, padded_rows=200),
        "padded_rows must be a multiple of 128 (an int), got 200",
    ),
    "padded_rows type": (
        lambda: formats.fp8_row_to_fp8_col(*FP8, SIZES, padded_rows=torch.tensor(256)),
        "padded_rows must be a multiple of 128 (an int), got tensor(256)",
    ),
    "columns out": (
        lambda: formats.fp4_row_to_fp8_col(*FP4, SIZES, out=(u8(128, 256), torch.zeros(128, 2))),
        "out's q must have 1 dimension(s), got shape (128, 256)",
    ),
    "columns out size": (
        lambda: formats.fp4_row_to_fp8_col(*FP4, SIZES, out=(u8(128), torch.zeros(128, 2))),
        "out's q must have shape (32768,), got (128,)",
    ),
    # weights
    "orientation": (
        lambda: formats.weight_to_fp8(X[None], orientation="columns"),
        "orientation must be one of 'both', 'rows', 'transposed', got 'columns'",
    ),
    "out of another orientation": (
        lambda: formats.weight_to_fp8(X[None], orientation="rows", out=formats.weight_to_fp8(X[None])),
        "out's (q_t, scales_t) must be None with orientation 'rows', got tuple",
    ),
    "out of another orientation, transposed": (
        lambda: formats.weight_to_fp8(X[None], orientation="transposed", out=formats.weight_to_fp8(X[None])),
        "out's (q, scales) must be None with orientation 'transposed', got tuple",
    ),
    "out's transposed shape": (
        lambda: formats.weight_to_fp8(
            X[None], orientation="transposed", out=(None, formats.weight_to_fp8(X[None])[0])
        ),
        "out's q_t must have shape (1, 128, 4), got (1, 4, 128)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_arguments_say_what_was_expected_and_what_came(case):
    call, message = CASES[case]
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)


def test_out_is_untouched_when_a_check_fails():
    packed, scales = u8(4, 64) + 9, u8(4, 4) + 9
    with pytest.raises(ValueError):
        formats.bf16_to_fp4_row(X, "nearest", out=(packed, scales))
    assert (packed == 9).all() and (scales == 9).all()


@pytest.mark.parametrize("w3", [None, -X[None]], ids=("w1", "w1, w3"))
def test_one_orientation_of_weights(w3):
    rows, transposed = formats.weight_to_fp8(X[None], w3)
    for orientation, expected in (("rows", (rows, None)), ("transposed", (None, transposed))):
        out = tuple(pair and tuple(torch.zeros_like(t) for t in pair) for pair in expected)
        for given in (None, out):
            assert_same(formats.weight_to_fp8(X[None], w3, orientation=orientation, out=given), expected, orientation)
        assert_same(out, expected, orientation)


def test_no_rows_are_no_error():
    empty = X[:0]
    packed, scales = formats.bf16_to_fp4_row(empty)
    assert packed.shape == (0, 64) and scales.shape == (0, 4)
    assert formats.fp4_row_to_bf16(packed, scales).shape == (0, 128)
    assert formats.fp4_row_to_bf16(packed, scales, index=i32(-1, -1)).tolist() == [[0.0] * 128] * 2
    none = torch.zeros(0, dtype=torch.int32)
    for q, column_scales in (
        formats.fp4_row_to_fp8_col(packed, scales, none),
        formats.fp8_row_to_fp8_col(*formats.bf16_to_fp8_row(empty), i32(0, 0)),
    ):
        assert q.shape == (0,) and column_scales.shape == (128, 0)
