# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Codes, scales and code tables, over all codes and around all rounding boundaries."""

import numpy as np
import pytest
import torch

from ds_fp4.formats import blocks, e2m1, e4m3, fp32, minifloat, ue8m0
from tests.unit import formats_oracle as oracle


def boundary_bits() -> torch.Tensor:
    """FP32 magnitudes to beyond 512: every upper half, with lower halves at, beside and between the boundaries."""
    upper = torch.arange(0, 0x4400, dtype=torch.int64)[:, None] << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return (upper | lower).flatten().to(torch.int32)


def test_code_tables_match_torch_and_the_oracle():
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).to(torch.float64)
    assert torch.equal(e4m3.code_values().nan_to_num(9e9), expected.nan_to_num(9e9))
    assert np.array_equal(e4m3.code_values().numpy(), oracle.e4m3_values(codes.numpy()), equal_nan=True)
    assert torch.equal(torch.signbit(e4m3.code_values()[[0, 128]]), torch.tensor([False, True]))
    pairs = e2m1.byte_values().numpy()
    assert np.array_equal(pairs, oracle.e2m1_values(codes.numpy()[:, None]).reshape(256, 2))


def test_ml_dtypes_agrees_with_the_oracle():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = boundary_bits().view(torch.float32).double().numpy()
    for table, dtype in ((oracle.E2M1_TABLE, ml_dtypes.float4_e2m1fn), (oracle.E4M3_TABLE, ml_dtypes.float8_e4m3fn)):
        inside = values[values <= table[-1]]
        codes = inside.astype(dtype).view(np.uint8)
        assert np.array_equal(codes, oracle.nearest(inside, table))


@pytest.mark.parametrize("module, table", [(e2m1, oracle.E2M1_TABLE), (e4m3, oracle.E4M3_TABLE)])
def test_encoding_rounds_to_nearest_even_at_every_boundary(module, table):
    bits = boundary_bits()
    # The caller's scale rule keeps E2M1's input below 8 and E4M3's at or below 448.
    bits = bits[bits.view(torch.float32) < (8 if module is e2m1 else 512)]
    values = oracle.to_numpy(bits.view(torch.float32))
    for sign in (0, -(1 << 31)):
        codes = module.encode_scaled(bits, bits | sign)
        assert np.array_equal(codes.numpy(), oracle.nearest(np.copysign(values, -1.0 if sign else 1.0), table))


def test_encoding_takes_any_ordered_bits_below_the_smallest_normal_as_zero():
    tiny = torch.tensor([-(23 << 23), -(149 << 23), -1, 0, 1], dtype=torch.int32)
    assert e2m1.encode_scaled(tiny, torch.zeros_like(tiny)).tolist() == [0] * 5
    assert e4m3.encode_scaled(tiny, torch.full_like(tiny, -1)).tolist() == [0x80] * 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_minifloat_decodes_and_encodes_every_16_bit_pattern(dtype):
    fmt = minifloat.OF_DTYPE[dtype]
    codes = torch.arange(1 << 16)
    values = codes.to(torch.int16).view(dtype).double()
    finite = torch.isfinite(values)
    decoded = minifloat.decode(fmt, codes)
    assert torch.equal(decoded[finite], values[finite])
    assert torch.isnan(decoded[~finite]).all()
    assert torch.equal(minifloat.encode(fmt, values[finite]), codes[finite])


def test_minifloat_rounds_as_the_host_does():
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (200_000,), generator=g).to(torch.int32)
    x = bits.view(torch.float32)
    x = x[torch.isfinite(x)]
    for dtype in (torch.bfloat16, torch.float16):
        expected = x.to(dtype)
        same = torch.isfinite(expected)  # beyond, encode saturates
        codes = minifloat.encode(minifloat.OF_DTYPE[dtype], x.double())
        assert torch.equal(codes.to(torch.int16)[same], expected.view(torch.int16)[same])
        assert torch.equal(codes[~same] & 0x7FFF, torch.full_like(codes[~same], minifloat.OF_DTYPE[dtype].max_code))
    assert torch.equal(minifloat.encode(minifloat.FP32, x.double()).to(torch.int32), x.view(torch.int32))


def test_minifloat_specials():
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 449.0, 1e30], dtype=torch.float64)
    assert minifloat.encode(e4m3.E4M3, values).tolist() == [0x7E, 0xFE, 0x7F, 0, 0x80, 0x7E, 0x7E]
    assert minifloat.encode(e2m1.E2M1, values[:2]).tolist() == [0x7, 0xF]


def test_ordered_bits_hold_the_exponent_of_every_kind_of_number():
    magnitude = torch.cat([torch.tensor([1 << i for i in range(23)]), torch.randint(1, 0x7F800000, (10_000,))])
    magnitude = magnitude.to(torch.int32)
    ordered = fp32.ordered(magnitude)
    values = magnitude.view(torch.float32).double()
    assert torch.equal((ordered >> 23) - 127, torch.frexp(values).exponent - 1)
    fraction = (ordered & 0x7FFFFF).double() / 2.0**23 + 1
    assert torch.equal(fraction * minifloat.power_of_two((ordered >> 23) - 127), values)
    assert fp32.ordered(torch.zeros(1, dtype=torch.int32)) < fp32.ordered(torch.ones(1, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_bits_of_every_16_bit_pattern(dtype):
    x = torch.arange(1 << 16).to(torch.int16).view(dtype)
    got, expected = fp32.bits_of(x).view(torch.float32), x.float()
    finite = torch.isfinite(expected)
    assert torch.equal(got.view(torch.int32)[finite], expected.view(torch.int32)[finite])
    assert torch.equal(torch.isnan(got), torch.isnan(expected))
    assert torch.equal(torch.isinf(got), torch.isinf(expected))


def test_scales_of_both_dtypes_store_and_read_back_every_exponent():
    for dtype, low in ((torch.uint8, -127), (torch.float32, -149)):
        exponent = torch.arange(low, 128, dtype=torch.int32)
        scales = torch.empty(exponent.shape, dtype=dtype)
        ue8m0.store(exponent, scales)
        assert torch.equal(ue8m0.exponents(scales), exponent)
        assert np.array_equal(oracle.scale_values(scales), np.ldexp(1.0, exponent.numpy()))
    assert ue8m0.exponents(torch.tensor([0xFF], dtype=torch.uint8)).item() == ue8m0.NAN_EXPONENT
    special = torch.tensor([torch.nan, -torch.nan, torch.inf, 0.0])
    assert ue8m0.exponents(special).tolist() == [128, 128, 128, -149]


def test_powers_of_two_are_told_from_the_rest():
    good = torch.cat([torch.pow(2.0, torch.arange(-149, 128).double()).float(), torch.tensor([torch.nan, torch.inf])])
    bad = torch.tensor([0.0, -0.0, -1.0, 3.0, 1.5e-45 * 3, 1.0000001, -(2.0**-140)])
    assert ue8m0.are_powers_of_two(good).all()
    assert not ue8m0.are_powers_of_two(bad).any()


@pytest.mark.parametrize("mode", blocks.SCALE_ROUNDINGS)
def test_scale_rules_match_their_words(mode):
    g = torch.Generator().manual_seed(1)
    bits = torch.randint(1, 0x7F800000, (4000,), generator=g).to(torch.int32)
    exponent = torch.arange(-149, 128)
    for significand in (1.0, 1.25, 1.5, 1.75, 1.9999998807907104):
        edge = (significand * torch.pow(2.0, exponent.double())).float().view(torch.int32)
        bits = torch.cat([bits, edge - 1, edge, edge + 1])
    bits = bits[(bits > 0) & (bits < 0x7F800000)]
    amax = bits.view(torch.float32).double().tolist()
    got = blocks.mxfp4_exponents(fp32.ordered(bits), mode).clamp(-127, 127)
    assert got.tolist() == [oracle.mxfp4_exponent(a, mode) for a in amax]
    got = blocks.fp8_exponents(fp32.ordered(bits)).clamp(min=-127)
    assert got.tolist() == [oracle.fp8_exponent(a) for a in amax]
