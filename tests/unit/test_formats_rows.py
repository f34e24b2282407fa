# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The four row codecs against torchao, against the oracle, and at the rules' corners."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fp4 import formats
from tests import strategies
from tests.strategies import FINITE_KINDS, FLOAT_DTYPES, ROUNDINGS, make
from tests.unit import formats_oracle as oracle

to_mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor").to_mx
ScaleCalculationMode = pytest.importorskip("torchao.prototype.mx_formats.config").ScaleCalculationMode

quick = settings(max_examples=100, deadline=None)

QUANTIZERS = {
    "mxfp4": formats.bf16_to_fp4_row,
    "fp8 float32": formats.bf16_to_fp8_row,
    "fp8 uint8": functools.partial(formats.bf16_to_fp8_row, scale_dtype=torch.uint8),
}
DECODERS = {
    "mxfp4": formats.fp4_row_to_bf16,
    "fp8 float32": formats.fp8_row_to_bf16,
    "fp8 uint8": formats.fp8_row_to_bf16,
}


def by_torchao(x: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    # to_mx takes BF16 and FP32; FP16 is exact in FP32.
    x = x.float() if x.dtype == torch.float16 else x
    scales, packed = to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode[mode.upper()])
    return packed, scales.view(torch.uint8)


def comparable_blocks(x: torch.Tensor, mode: str) -> torch.Tensor:
    """bool [M, K/32]: blocks for which equality with torchao is promised (see bf16_to_fp4_row)."""
    amax = x.double().abs().view(x.shape[0], -1, 32).amax(-1)
    same = amax >= 2.0**-120
    if mode == "rceil" and x.dtype == torch.float32:
        # Just above 6 * 2^n, torchao's FP32 log2 of amax / 6 is n, whose ceil is one too low.
        mantissa = torch.frexp(amax).mantissa * 2
        same &= ~((mantissa > 1.5) & (mantissa <= 1.5 * (1 + 2.0**-16)))
    return same


@pytest.mark.parametrize("kind", FINITE_KINDS)
@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_mxfp4_bits_equal_torchao(dtype, mode, kind):
    x = make(kind, 128, 256, dtype, seed=7)
    packed, scales = formats.bf16_to_fp4_row(x, mode)
    expected_packed, expected_scales = by_torchao(x, mode)
    same = comparable_blocks(x, mode)
    assert same.any() or kind == "subnormal"
    assert torch.equal(scales[same], expected_scales[same])
    assert torch.equal(packed.view(128, 8, 16)[same], expected_packed.view(128, 8, 16)[same])


def test_mxfp4_bits_equal_torchao_for_every_bf16_maximum():
    bits = torch.arange(128, 0x7F80)  # normal values from 2^-126; the comparison takes those from 2^-120
    amax = bits.to(torch.int16).view(torch.bfloat16)
    x = torch.zeros(len(amax), 32, dtype=torch.bfloat16)
    g = torch.Generator().manual_seed(3)
    x[:, :31] = (amax.double()[:, None] * (2 * torch.rand(len(amax), 31, generator=g) - 1)).to(torch.bfloat16)
    x[:, 31] = amax
    for mode in ROUNDINGS:
        packed, scales = formats.bf16_to_fp4_row(x, mode)
        expected_packed, expected_scales = by_torchao(x, mode)
        same = comparable_blocks(x, mode)[:, 0]
        assert torch.equal(scales[same], expected_scales[same])
        assert torch.equal(packed[same], expected_packed[same])


@quick
@given(x=strategies.matrices(), mode=st.sampled_from(ROUNDINGS))
def test_mxfp4_matches_the_oracle(x, mode):
    packed, scales = formats.bf16_to_fp4_row(x, mode)
    expected_packed, expected_scales = oracle.quantize_mxfp4(oracle.to_numpy(x), mode)
    assert np.array_equal(scales.numpy(), expected_scales)
    assert np.array_equal(packed.numpy(), expected_packed)


@quick
@given(x=strategies.matrices(multiple=1), scale_dtype=st.sampled_from([torch.float32, torch.uint8]))
def test_fp8_matches_the_oracle(x, scale_dtype):
    q, scales = formats.bf16_to_fp8_row(x, scale_dtype=scale_dtype)
    codes, exponents = oracle.quantize_fp8(oracle.to_numpy(x))
    assert q.dtype == torch.float8_e4m3fn and scales.dtype == scale_dtype
    assert np.array_equal(oracle.scale_values(scales), np.ldexp(1.0, exponents))
    assert np.array_equal(q.view(torch.uint8).numpy(), codes)


@pytest.mark.parametrize("kind", FINITE_KINDS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_every_kind_and_dtype_against_the_oracle(dtype, kind):
    x = make(kind, 12, 288, dtype, seed=11)
    for mode in ROUNDINGS:
        packed, scales = formats.bf16_to_fp4_row(x, mode)
        expected_packed, expected_scales = oracle.quantize_mxfp4(oracle.to_numpy(x), mode)
        assert np.array_equal(scales.numpy(), expected_scales)
        assert np.array_equal(packed.numpy(), expected_packed)
    q, scales = formats.bf16_to_fp8_row(x)
    codes, exponents = oracle.quantize_fp8(oracle.to_numpy(x))
    assert np.array_equal(oracle.scale_values(scales), np.ldexp(1.0, exponents))
    assert np.array_equal(q.view(torch.uint8).numpy(), codes)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_mxfp4_decodes_every_byte_under_every_scale(dtype):
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16).contiguous()
    packed = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous()
    exact = oracle.decoded_fp4(packed, scales)
    got = formats.fp4_row_to_bf16(packed, scales, dtype=dtype)
    assert got.dtype == dtype
    assert oracle.same_values(got, oracle.round_to_dtype(exact, dtype))
    if dtype != torch.float16:
        small = np.abs(exact) <= torch.finfo(dtype).max
        assert np.array_equal(oracle.to_numpy(got)[small], exact[small])
    assert torch.isinf(got).sum() == 0 and torch.isnan(got[:255]).sum() == 0


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_fp8_decodes_every_code_under_every_scale(dtype, scale_dtype):
    if scale_dtype == torch.uint8:
        column = torch.arange(256).to(torch.uint8)
    else:
        column = torch.cat(
            [torch.pow(2.0, torch.arange(-149, 128).double()).float(), torch.tensor([torch.nan, torch.inf])]
        )
    scales = column[:, None].expand(-1, 2).contiguous()
    q = torch.arange(256).to(torch.uint8).expand(len(column), 256).contiguous()
    expected = oracle.round_to_dtype(oracle.decoded_fp8(q, scales), dtype)
    for codes in (q, q.view(torch.float8_e4m3fn)):
        got = formats.fp8_row_to_bf16(codes, scales, dtype=dtype)
        assert oracle.same_values(got, expected)
        assert torch.isinf(got).sum() == 0


def test_finite_input_never_decodes_to_nan_or_infinity():
    for dtype in FLOAT_DTYPES:
        x = make("extreme", 64, 256, dtype, seed=2)
        for mode in ROUNDINGS:
            packed, scales = formats.bf16_to_fp4_row(x, mode)
            for target in FLOAT_DTYPES:
                assert torch.isfinite(formats.fp4_row_to_bf16(packed, scales, dtype=target)).all()
        for target in FLOAT_DTYPES:
            assert torch.isfinite(formats.fp8_row_to_bf16(*formats.bf16_to_fp8_row(x), dtype=target)).all()


def test_rounding_up_past_the_largest_value_saturates():
    largest = torch.finfo(torch.bfloat16).max
    x = torch.full((1, 32), largest, dtype=torch.bfloat16)
    packed, scales = formats.bf16_to_fp4_row(x, "even")
    assert scales.item() == 253 and packed.unique().item() == 0x66  # 4 * 2^126 = 2^128
    assert formats.fp4_row_to_bf16(packed, scales).unique().item() == largest
    assert (
        formats.fp4_row_to_bf16(packed, scales, dtype=torch.float32).unique().item() == torch.finfo(torch.float32).max
    )


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_value_in_any_lane_takes_its_block_and_no_other(dtype, value):
    lanes = 256
    x = make("gaussian", lanes, lanes, dtype, seed=5)
    clean = {name: quantize(x) for name, quantize in QUANTIZERS.items()}
    x.fill_diagonal_(value)
    for name, quantize in QUANTIZERS.items():
        codes, scales = quantize(x)
        block = 32 if name == "mxfp4" else 128
        hit = torch.eye(lanes // block, dtype=torch.bool).repeat_interleave(block, 0)
        bad = {"mxfp4": 0xFF, "fp8 uint8": 0, "fp8 float32": 2.0**-127}[name]
        assert (scales[hit] == bad).all()
        assert torch.equal(scales[~hit], clean[name][1][~hit])
        codes, untouched = (t.view(torch.uint8).view(lanes, lanes // block, -1) for t in (codes, clean[name][0]))
        assert (codes[hit] == (0 if name == "mxfp4" else 0x7F)).all()
        assert torch.equal(codes[~hit], untouched[~hit])
        for target in FLOAT_DTYPES:
            decoded = DECODERS[name](*quantize(x), dtype=target)
            assert torch.equal(torch.isnan(decoded), hit.repeat_interleave(block, 1))


@quick
@given(x=strategies.matrices(max_rows=4), seed=strategies.seeds(), count=st.integers(1, 5))
def test_poisoned_input_matches_the_oracle(x, seed, count):
    if not len(x):
        return
    x = strategies.poison(x, seed, count)
    packed, scales = formats.bf16_to_fp4_row(x)
    expected_packed, expected_scales = oracle.quantize_mxfp4(oracle.to_numpy(x), "even")
    assert np.array_equal(scales.numpy(), expected_scales) and np.array_equal(packed.numpy(), expected_packed)
    q, fp8_scales = formats.bf16_to_fp8_row(x)
    codes, exponents = oracle.quantize_fp8(oracle.to_numpy(x))
    assert np.array_equal(q.view(torch.uint8).numpy(), codes)
    assert np.array_equal(oracle.scale_values(fp8_scales), np.ldexp(1.0, exponents))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_zero_blocks_keep_their_signs(dtype):
    x = torch.zeros(2, 256, dtype=dtype)
    x[1] = -0.0
    for mode in ROUNDINGS:
        packed, scales = formats.bf16_to_fp4_row(x, mode)
        assert (scales == 0).all() and (packed[0] == 0).all() and (packed[1] == 0x88).all()
        decoded = formats.fp4_row_to_bf16(packed, scales)
        assert (decoded == 0).all() and torch.signbit(decoded[1]).all() and not torch.signbit(decoded[0]).any()
    q, scales = formats.bf16_to_fp8_row(x)
    assert (scales == 2.0**-127).all()
    assert (q.view(torch.uint8)[0] == 0).all() and (q.view(torch.uint8)[1] == 0x80).all()
    assert (formats.bf16_to_fp8_row(x, scale_dtype=torch.uint8)[1] == 0).all()


def test_subnormal_maxima_follow_the_rule():
    # 2^-149, FP32's smallest: the exponent would be -151, is clamped to -127, and 2^-149 / 2^-127 rounds to 0.
    x = torch.zeros(1, 32)
    x[0, 0] = 2.0**-149
    packed, scales = formats.bf16_to_fp4_row(x, "floor")
    assert scales.item() == 0 and packed.sum() == 0
    # 1.5 * 2^-127 is subnormal and is 1.5 scales.
    x[0, 0] = 1.5 * 2.0**-127
    packed, scales = formats.bf16_to_fp4_row(x, "floor")
    assert scales.item() == 0 and packed[0, 0] == 3
    assert formats.fp4_row_to_bf16(packed, scales)[0, 0].item() == 1.5 * 2.0**-127


def test_rceil_finds_the_exact_power_of_two():
    # One unit above 6 * 2^100 saturates under 2^100; torchao's FP32 log2 cannot see it and chooses 2^100.
    above = torch.nextafter(torch.tensor(6 * 2.0**100), torch.tensor(torch.inf))
    x = torch.zeros(1, 32)
    x[0, 0] = above
    assert formats.bf16_to_fp4_row(x, "rceil")[1].item() == 127 + 101
    x[0, 0] = 6 * 2.0**100
    assert formats.bf16_to_fp4_row(x, "rceil")[1].item() == 127 + 100


@pytest.mark.skipif(not torch.set_flush_denormal(True), reason="this CPU cannot flush subnormals")
def test_results_do_not_depend_on_how_the_device_treats_subnormals():
    from ds_fp4.formats import convert, fp8, mxfp4

    x = {
        d: torch.cat([make(kind, 32, 160, d, seed=4) for kind in ("subnormal", "bits", "edges")]) for d in FLOAT_DTYPES
    }

    def everything() -> list[torch.Tensor]:
        for table in (
            mxfp4._decode_table,
            fp8._decode_table,
            convert._fp4_to_fp8_table,
            convert._fp8_to_fp8_table,
            convert._fp8_to_fp4_table,
            convert._e4m3_fp32_bits,
        ):
            table.cache_clear()
        sizes, results = torch.tensor([96], dtype=torch.int32), []
        for v in x.values():
            results += [t for mode in ROUNDINGS for t in formats.bf16_to_fp4_row(v, mode)]
            results += formats.bf16_to_fp8_row(v)
            packed, scales, q, q_scales = results[-4:]
            results += formats.fp4_row_to_fp8_row(packed, scales)
            results += formats.fp4_row_to_fp8_col(packed, scales, sizes)
            results += formats.fp8_row_to_fp8_col(q, q_scales, sizes)
            results += formats.fp8_row_to_fp4_row(q, q_scales)
            for d in FLOAT_DTYPES:
                results.append(formats.fp4_row_to_bf16(packed, scales, dtype=d))
                results.append(formats.fp8_row_to_bf16(q, q_scales, dtype=d))
        return [t.view(torch.uint8) if t.itemsize == 1 else t.view(strategies.INT_OF[t.dtype]) for t in results]

    try:
        torch.set_flush_denormal(False)
        expected = everything()
        torch.set_flush_denormal(True)
        flushed = everything()
    finally:
        torch.set_flush_denormal(False)
    for a, b in zip(expected, flushed, strict=True):
        assert torch.equal(a, b)


torch.set_flush_denormal(False)  # the skip condition above switched it on


@quick
@given(data=st.data(), rows=st.integers(0, 6), name=st.sampled_from(list(QUANTIZERS)))
def test_index_gathers_and_writes_zero_rows(data, rows, name):
    x = make("student_t", rows, 160, seed=6)
    index = data.draw(strategies.indices(rows))
    gathered = torch.zeros(len(index), 160, dtype=x.dtype)
    gathered[index >= 0] = x[index[index >= 0].long()]
    for got, expected in zip(QUANTIZERS[name](x, index=index), QUANTIZERS[name](gathered), strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    codes, scales = QUANTIZERS[name](x)
    for dtype in FLOAT_DTYPES:
        expected = torch.zeros(len(index), 160, dtype=dtype)
        expected[index >= 0] = DECODERS[name](codes, scales, dtype=dtype)[index[index >= 0].long()]
        assert torch.equal(DECODERS[name](codes, scales, dtype=dtype, index=index), expected)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("columns", [32, 96, 128, 320])
def test_views_into_records_are_written_and_read_in_place(name, columns):
    x = make("gaussian", 7, columns, seed=8)
    codes, scales = QUANTIZERS[name](x)
    records, views = strategies.in_records(torch.zeros_like(codes.view(torch.uint8)), torch.zeros_like(scales))
    returned = QUANTIZERS[name](x, out=views)
    assert all(r is v for r, v in zip(returned, views, strict=True))
    assert torch.equal(views[0], codes.view(torch.uint8)) and torch.equal(views[1], scales)
    assert (records[:, -16:] == 0xA5).all()
    decoded = DECODERS[name](codes, scales)
    assert torch.equal(DECODERS[name](*views), decoded)
    wide = torch.full((7, columns + 8), 3.0, dtype=torch.bfloat16)
    assert DECODERS[name](*views, out=wide[:, :columns]).data_ptr() == wide.data_ptr()
    assert torch.equal(wide[:, :columns], decoded) and (wide[:, columns:] == 3.0).all()


def test_strided_input_and_a_column_slice():
    wide = make("gaussian", 20, 512, seed=9)
    for x in (wide[::3, 64:320], wide[:1].expand(5, -1), wide[:0]):
        for name, quantize in QUANTIZERS.items():
            for got, expected in zip(quantize(x), quantize(x.contiguous()), strict=True):
                assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), name


@pytest.mark.parametrize("columns", [1, 31, 100, 127, 129, 200, 300])
def test_fp8_last_group_may_be_short(columns):
    x = make("student_t", 5, columns, seed=10)
    q, scales = formats.bf16_to_fp8_row(x)
    assert q.shape == (5, columns) and scales.shape == (5, -(-columns // 128))
    padded = torch.nn.functional.pad(x, (0, -columns % 128))
    whole, whole_scales = formats.bf16_to_fp8_row(padded)
    assert torch.equal(q.view(torch.uint8), whole.view(torch.uint8)[:, :columns]) and torch.equal(scales, whole_scales)
    decoded = formats.fp8_row_to_bf16(q, scales)
    assert torch.equal(decoded, formats.fp8_row_to_bf16(whole, whole_scales)[:, :columns])


def test_many_pieces_give_what_one_gives(monkeypatch):
    from ds_fp4.formats import rows

    x = make("student_t", 100, 256, seed=12)
    index = torch.arange(99, -1, -1, dtype=torch.int32)
    expected = {name: quantize(x, index=index) for name, quantize in QUANTIZERS.items()}
    monkeypatch.setitem(rows._VALUES_PER_PIECE, "cpu", 1000)
    for name, quantize in QUANTIZERS.items():
        got = quantize(x, index=index)
        assert all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, expected[name], strict=True)
        )
        assert torch.equal(DECODERS[name](*got), DECODERS[name](*expected[name]))


def test_input_that_requires_grad_is_taken_and_nothing_is_recorded():
    x = make("gaussian", 2, 128).requires_grad_()
    for quantize in QUANTIZERS.values():
        assert not any(t.requires_grad for t in quantize(x))


def sqnr_db(x: torch.Tensor, decoded: torch.Tensor) -> float:
    error = x.double() - decoded.double()
    return (10 * torch.log10(x.double().square().sum() / error.square().sum())).item()


@pytest.mark.parametrize(
    "kind, mode, expected",
    [
        ("gaussian", "even", 19.0),
        ("gaussian", "floor", 18.8),
        ("gaussian", "rceil", 18.8),
        ("gaussian", "ceil", 16.8),
        ("student_t", "even", 17.1),
        ("student_t", "floor", 17.0),
        ("student_t", "rceil", 16.5),
        ("student_t", "ceil", 14.2),
    ],
)
def test_signal_to_noise_ratio(kind, mode, expected):
    x = make(kind, 1024, 1024, torch.float32, seed=13)
    packed, scales = formats.bf16_to_fp4_row(x, mode)
    # Student-t(3) has a mean fourth power of infinity: its figure moves with the sample.
    tolerance = 0.15 if kind == "gaussian" else 0.6
    assert abs(sqnr_db(x, formats.fp4_row_to_bf16(packed, scales, dtype=torch.float32)) - expected) < tolerance


def test_fp8_signal_to_noise_ratio():
    x = make("gaussian", 512, 1024, torch.float32, seed=14)
    assert sqnr_db(x, formats.fp8_row_to_bf16(*formats.bf16_to_fp8_row(x), dtype=torch.float32)) > 31
