# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Records: their size, what they hold, and that decoding gives what the formats say."""

from __future__ import annotations

import pytest
import torch

from ds_fp4 import formats
from ds_fp4.codec import Fp8Codec, Mxfp4Codec, make_codec


@pytest.mark.parametrize(
    "hidden, mxfp4, fp8", [(7168, 3808, 7232), (4096, 2176, 4128), (128, 80, 144), (100, 80, 112), (1, 32, 16)]
)
def test_record_sizes(hidden, mxfp4, fp8):
    assert (Mxfp4Codec(hidden).record_bytes, Fp8Codec(hidden).record_bytes) == (mxfp4, fp8)


@pytest.mark.parametrize("hidden", (128, 96, 100, 1, 4160))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("rounding", ("floor", "rceil", "ceil", "even"))
def test_mxfp4_records_decode_to_what_the_format_says(hidden, dtype, rounding):
    rows = torch.randn(7, hidden).to(dtype)
    codec = Mxfp4Codec(hidden, rounding)
    padded = torch.nn.functional.pad(rows, (0, -hidden % 32))
    expected = formats.fp4_row_to_bf16(*formats.bf16_to_fp4_row(padded, rounding), dtype=dtype)[:, :hidden]
    decoded = codec.decode(codec.encode(rows), dtype)
    assert decoded.is_contiguous() and torch.equal(decoded, expected)


@pytest.mark.parametrize("hidden", (128, 100, 1, 7169))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_fp8_records_decode_to_what_the_format_says(hidden, dtype):
    rows = torch.randn(7, hidden).to(dtype)
    codec = Fp8Codec(hidden)
    decoded = codec.decode(codec.encode(rows), dtype)
    assert torch.equal(decoded, formats.fp8_row_to_bf16(*formats.bf16_to_fp8_row(rows), dtype=dtype))


@pytest.mark.parametrize("name", ("mxfp4", "fp8"))
@pytest.mark.parametrize("hidden", (128, 100))
def test_one_row_of_any_row_stride(name, hidden):
    row = torch.randn(hidden, 1).t()  # contiguous to torch, with a row stride of 1
    codec = make_codec(name, hidden, "even")
    assert torch.equal(codec.encode(row), codec.encode(row.clone(memory_format=torch.contiguous_format)))


@pytest.mark.parametrize("name", ("mxfp4", "fp8"))
def test_no_rows_and_padding(name):
    codec = make_codec(name, 100, "even")
    assert codec.encode(torch.empty(0, 100)).shape == (0, codec.record_bytes)
    assert codec.decode(torch.empty(0, codec.record_bytes, dtype=torch.uint8), torch.bfloat16).shape == (0, 100)
    records = codec.encode(torch.randn(64, 100))
    assert codec.record_bytes > codec.data_bytes and not records[:, codec.data_bytes :].any()


def test_bf16_is_no_codec_and_others_are_refused():
    assert make_codec("bf16", 128, "even") is None
    with pytest.raises(ValueError, match="unknown codec 'int8'"):
        make_codec("int8", 128, "even")
