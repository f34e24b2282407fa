# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""MXFP4 <-> FP8 conversions, rows and columns, against the oracle and against each other."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fp4 import formats
from ds_fp4.formats import columns as column_layout
from tests import strategies
from tests.strategies import ROUNDINGS, make, random_fp4, random_fp8
from tests.unit import formats_oracle as oracle

quick = settings(max_examples=100, deadline=None)
SCALE_DTYPES = (torch.float32, torch.uint8)


def codes_of(q: torch.Tensor) -> np.ndarray:
    return q.view(torch.uint8).numpy()


def fp4_to_fp8_group(values: np.ndarray, scales: np.ndarray, lowest: int) -> tuple[np.ndarray, int]:
    """E4M3 codes and scale exponent of MXFP4 blocks that are to share a scale.

    Args:
        values: FP64 [..., 32], E2M1 values by block. scales: int [...], scale bytes of the blocks.
        lowest: smallest exponent of the scale.
    """
    alive = scales != 0xFF
    if not alive.any():
        return np.full(values.shape, oracle.E4M3_NAN, np.uint8), -127
    exponent = max(int(scales[alive].max()) - 127 - 6, lowest)
    shifted = np.ldexp(values, (scales.astype(np.int64) - 127 - exponent)[..., None])
    codes = oracle.nearest(shifted, oracle.E4M3_TABLE)
    return np.where(alive[..., None], codes, oracle.E4M3_NAN).astype(np.uint8), exponent


def fp4_rows_to_fp8_rows(packed: torch.Tensor, scales: torch.Tensor, lowest: int) -> tuple[np.ndarray, np.ndarray]:
    m, blocks = scales.shape
    values = oracle.e2m1_values(packed.numpy()).reshape(m, blocks, 32)
    codes = np.zeros((m, blocks, 32), np.uint8)
    exponents = np.zeros((m, -(-blocks // 4)), np.int64)
    for i in range(m):
        for g in range(exponents.shape[1]):
            part = slice(4 * g, 4 * g + 4)
            codes[i, part], exponents[i, g] = fp4_to_fp8_group(values[i, part], scales.numpy()[i, part], lowest)
    return codes.reshape(m, 32 * blocks), exponents


@quick
@given(
    rows=st.integers(0, 6),
    blocks=st.integers(1, 9),
    spread=st.sampled_from([0, 3, 14, 20, 254]),
    seed=strategies.seeds(),
    scale_dtype=st.sampled_from(SCALE_DTYPES),
)
def test_fp4_to_fp8_rows_match_the_oracle(rows, blocks, spread, seed, scale_dtype):
    packed, scales = random_fp4(rows, 32 * blocks, seed, spread)
    q, fp8_scales = formats.fp4_row_to_fp8_row(packed, scales, scale_dtype=scale_dtype)
    assert q.dtype == torch.float8_e4m3fn and fp8_scales.dtype == scale_dtype
    codes, exponents = fp4_rows_to_fp8_rows(packed, scales, -127 if scale_dtype == torch.uint8 else -149)
    assert np.array_equal(codes_of(q), codes)
    assert np.array_equal(oracle.scale_values(fp8_scales), np.ldexp(1.0, exponents))


def all_codes_under(spread: int, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of one group: every byte twice over, half of the blocks at scale byte `top`, half at `top` - spread."""
    packed = torch.arange(256).to(torch.uint8).view(16, 16)
    packed = torch.cat([packed, packed]).view(8, 64)
    scales = torch.tensor([top, top - spread, top, top - spread], dtype=torch.uint8).expand(8, 4).contiguous()
    scales[4:] = scales[4:].flip(1)
    return packed, scales


@pytest.mark.parametrize("spread", range(15))
def test_fp4_to_fp8_is_exact_up_to_a_spread_of_2_to_the_14(spread):
    for top in (spread, 6 + spread, 127, 253):
        packed, scales = all_codes_under(spread, top)
        exact = oracle.decoded_fp4(packed, scales)
        for scale_dtype in SCALE_DTYPES:
            q, fp8_scales = formats.fp4_row_to_fp8_row(packed, scales, scale_dtype=scale_dtype)
            got = oracle.decoded_fp8(q, fp8_scales)
            assert np.array_equal(got, exact) and np.array_equal(np.signbit(got), np.signbit(exact))
        sizes = torch.tensor([8], dtype=torch.int32)
        ((block, column_scales),) = formats.column_blocks(*formats.fp4_row_to_fp8_col(packed, scales, sizes), [8])
        assert np.array_equal(oracle.decoded_fp8(block.contiguous(), column_scales)[:, :8], exact.T)


@pytest.mark.parametrize("spread", [15, 16, 17, 18, 19, 20, 25, 100, 200])
def test_fp4_to_fp8_beyond_that_loses_less_than_2_to_the_minus_14_of_the_maximum(spread):
    for top in (spread, 254):
        packed, scales = all_codes_under(spread, top)
        exact = oracle.decoded_fp4(packed, scales)
        maximum = np.abs(exact).max(1, keepdims=True)
        for scale_dtype in SCALE_DTYPES:
            q, fp8_scales = formats.fp4_row_to_fp8_row(packed, scales, scale_dtype=scale_dtype)
            lost = np.abs(oracle.decoded_fp8(q, fp8_scales) - exact)
            assert (lost < 2.0**-14 * maximum).all() and lost.max() > 0
            # Half of E4M3's smallest step, in units of the group's scale.
            assert (lost <= 2.0**-10 * oracle.scale_values(fp8_scales)).all()


def test_fp4_to_fp8_of_quantized_data_decodes_to_the_same_values():
    for kind in ("gaussian", "student_t", "zero_blocks"):
        for mode in ROUNDINGS:
            packed, scales = formats.bf16_to_fp4_row(make(kind, 64, 512, torch.float32, seed=1), mode)
            expected = formats.fp4_row_to_bf16(packed, scales)
            for scale_dtype in SCALE_DTYPES:
                q, fp8_scales = formats.fp4_row_to_fp8_row(packed, scales, scale_dtype=scale_dtype)
                assert torch.equal(formats.fp8_row_to_bf16(q, fp8_scales), expected)


def test_low_scale_bytes_in_ue8m0_shift_the_codes_and_in_fp32_the_scale():
    packed = torch.arange(256).to(torch.uint8).view(4, 64)
    for byte in range(8):
        scales = torch.full((4, 4), byte, dtype=torch.uint8)
        exact = oracle.decoded_fp4(packed, scales)
        q, fp32_scales = formats.fp4_row_to_fp8_row(packed, scales)
        assert (fp32_scales.double() == 2.0 ** (byte - 133)).all()
        assert np.array_equal(oracle.decoded_fp8(q, fp32_scales), exact)
        q, ue8m0 = formats.fp4_row_to_fp8_row(packed, scales, scale_dtype=torch.uint8)
        assert (ue8m0 == max(byte - 6, 0)).all()
        assert np.array_equal(oracle.decoded_fp8(q, ue8m0), exact)


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_a_nan_block_does_not_spoil_its_neighbours(scale_dtype):
    packed, scales = formats.bf16_to_fp4_row(make("gaussian", 8, 128, seed=2))
    clean = formats.bf16_to_fp4_row(make("gaussian", 8, 128, seed=2))[1]
    for block in range(4):
        scales = clean.clone()
        scales[:, block] = 0xFF
        q, fp8_scales = formats.fp4_row_to_fp8_row(packed, scales, scale_dtype=scale_dtype)
        decoded = formats.fp8_row_to_bf16(q, fp8_scales).view(8, 4, 32)
        assert torch.isnan(decoded[:, block]).all()
        others = [b for b in range(4) if b != block]
        expected = formats.fp4_row_to_bf16(packed, clean).view(8, 4, 32)
        assert torch.equal(decoded[:, others], expected[:, others])
    scales = torch.full_like(clean, 0xFF)
    q, fp8_scales = formats.fp4_row_to_fp8_row(packed, scales, scale_dtype=scale_dtype)
    assert (codes_of(q) == 0x7F).all()
    assert (oracle.scale_values(fp8_scales) == 2.0**-127).all()


@pytest.mark.parametrize("mode", ROUNDINGS)
def test_fp8_to_fp4_of_every_code_under_every_scale(mode):
    # Blocks of one code, beside a smaller one of the other sign and a zero, over all 256 codes and all scales.
    block = torch.zeros(256, 32, dtype=torch.uint8)
    block[:, 0] = torch.arange(256)
    block[:, 5] = torch.where((block[:, 0] & 0x7F) > 9, (block[:, 0] - 9) ^ 0x80, block[:, 0])
    for scale_dtype in SCALE_DTYPES:
        if scale_dtype == torch.uint8:
            column = torch.arange(256).to(torch.uint8)
        else:
            column = torch.cat([torch.pow(2.0, torch.arange(-149, 128).double()).float(), torch.tensor([torch.nan])])
        q = block.view(1, -1).expand(len(column), -1).contiguous()
        scales = column[:, None].expand(-1, 64).contiguous()
        packed, fp4_scales = formats.fp8_row_to_fp4_row(q.view(torch.float8_e4m3fn), scales, mode)
        values = oracle.decoded_fp8(q, scales).reshape(-1, 256, 32)
        expected_scale = np.full(values.shape[:2], 0xFF, np.uint8)
        expected = np.zeros(values.shape, np.uint8)
        finite = np.isfinite(values).all(-1)
        amax = np.abs(np.nan_to_num(values)).max(-1)
        exponent = np.array([oracle.mxfp4_exponent(a, mode) for a in amax[finite]])
        expected_scale[finite] = exponent + 127
        # Only lanes 0 and 5 are not zero.
        for lane in (0, 5):
            scaled = np.ldexp(values[finite][:, lane], -exponent)
            expected[finite, lane] = oracle.nearest(scaled, oracle.E2M1_TABLE)
        expected = expected.reshape(len(column), -1)
        assert np.array_equal(fp4_scales.numpy(), expected_scale)
        assert np.array_equal(packed.numpy(), expected[:, 0::2] | expected[:, 1::2] << 4)


@quick
@given(
    rows=st.integers(0, 5),
    blocks=st.integers(1, 9),
    seed=strategies.seeds(),
    scale_dtype=st.sampled_from(SCALE_DTYPES),
    mode=st.sampled_from(ROUNDINGS),
)
def test_fp8_to_fp4_quantizes_the_exact_values(rows, blocks, seed, scale_dtype, mode):
    q, scales = random_fp8(rows, 32 * blocks, seed, scale_dtype)
    packed, fp4_scales = formats.fp8_row_to_fp4_row(q, scales, mode)
    expected_packed, expected_scales = oracle.quantize_mxfp4(oracle.decoded_fp8(q, scales), mode)
    assert np.array_equal(fp4_scales.numpy(), expected_scales)
    assert np.array_equal(packed.numpy(), expected_packed)


def test_fp8_to_fp4_saturates_above_what_mxfp4_holds():
    q = torch.full((1, 32), 448.0).to(torch.float8_e4m3fn)
    packed, scales = formats.fp8_row_to_fp4_row(q, torch.tensor([[2.0**127]]))
    assert scales.item() == 254 and (packed == 0x77).all()


@pytest.mark.parametrize("mode", ROUNDINGS)
def test_fp4_to_fp8_and_back_keeps_every_value(mode):
    packed, scales = formats.bf16_to_fp4_row(make("gaussian", 32, 256, seed=3), mode)
    decoded = formats.fp4_row_to_bf16(packed, scales)
    back = formats.fp8_row_to_fp4_row(*formats.fp4_row_to_fp8_row(packed, scales), mode)
    assert torch.equal(formats.fp4_row_to_bf16(*back), decoded)


ROW_CALLS = {
    "fp4_row_to_fp8_row float32": (random_fp4, lambda *a, **k: formats.fp4_row_to_fp8_row(*a, **k)),
    "fp4_row_to_fp8_row uint8": (
        random_fp4,
        lambda *a, **k: formats.fp4_row_to_fp8_row(*a, scale_dtype=torch.uint8, **k),
    ),
    "fp8_row_to_fp4_row": (
        lambda *a: random_fp8(*a, torch.uint8),
        lambda *a, **k: formats.fp8_row_to_fp4_row(*a, **k),
    ),
}


@quick
@given(data=st.data(), rows=st.integers(0, 6), name=st.sampled_from(list(ROW_CALLS)))
def test_row_conversions_take_an_index(data, rows, name):
    generate, call = ROW_CALLS[name]
    codes, scales = generate(rows, 160, data.draw(strategies.seeds()))
    index = data.draw(strategies.indices(rows))
    kept = index >= 0
    got_codes, got_scales = call(codes, scales, index=index)
    whole_codes, whole_scales = call(codes, scales)
    rows_kept = index[kept].long()
    assert torch.equal(got_codes.view(torch.uint8)[kept], whole_codes.view(torch.uint8)[rows_kept])
    assert torch.equal(got_scales[kept], whole_scales[rows_kept])
    assert (got_codes.view(torch.uint8)[~kept] == 0).all()
    assert (got_scales[~kept] == (2.0**-127 if got_scales.dtype == torch.float32 else 0)).all()


@pytest.mark.parametrize("name", ROW_CALLS)
@pytest.mark.parametrize("columns", [32, 160, 256])
def test_row_conversions_between_records(name, columns):
    generate, call = ROW_CALLS[name]
    codes, scales = generate(9, columns, 4)
    expected = call(codes, scales)
    _, source = strategies.in_records(codes.view(torch.uint8), scales)
    records, target = strategies.in_records(*(torch.zeros_like(t.view(t.dtype)) for t in expected))
    assert call(*source, out=tuple(target))[0] is target[0]
    for got, wanted in zip(target, expected, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    assert (records[:, -16:] == 0xA5).all()


def columns_by_oracle(
    kind: str, codes: torch.Tensor, scales: torch.Tensor, sizes: list[int], index, shared: bool = False
) -> list:
    """(codes [K, p], scale values [K, p / 128]) of each group, a tile and the columns of a scale at a time.

    `shared`: 128 columns have one, a normal number.
    """
    if index is None:
        index = range(sum(sizes))
    if kind == "fp4":
        values, width, bonus = oracle.e2m1_values(codes.numpy()), 32, 6
    else:
        values, width, bonus = oracle.e4m3_values(codes_of(codes)), 128, 0
    own = width  # columns of a row's scale
    if shared:
        width = 128
    k, scale = values.shape[1], oracle.scale_values(scales)
    result, start = [], 0
    for size in sizes:
        padded = -(-size // 128) * 128
        group_codes, group_scales = np.zeros((k, padded), np.uint8), np.zeros((k, padded // 128))
        for first in range(0, padded, 128):
            members = [(r - first, int(index[start + r])) for r in range(first, min(first + 128, size))]
            members = [(place, row) for place, row in members if row >= 0]
            for c in range(0, k, width):
                columns = slice(c, min(c + width, k))
                row_scales = [scale[row, np.arange(c, columns.stop) // own] for _, row in members]
                alive = [s for each in row_scales for s in each if not np.isnan(s)]
                target = max(alive) * 2.0**-bonus if alive else 2.0**-127
                target = max(target, 2.0**-126) if shared else target
                group_scales[columns, first // 128] = target
                for (place, row), s in zip(members, row_scales, strict=True):
                    value = values[row, columns]
                    factor = np.where(np.isnan(s), 0, s / target)
                    new = oracle.nearest(np.nan_to_num(value) * factor, oracle.E4M3_TABLE)
                    new = np.where(np.isnan(value) | np.isnan(s), oracle.E4M3_NAN, new)
                    group_codes[columns, first + place] = new
        result.append((group_codes, group_scales))
        start += size
    return result


def check_columns(kind, source, sizes, index=None, **kwargs):
    call = formats.fp4_row_to_fp8_col if kind == "fp4" else formats.fp8_row_to_fp8_col
    q, scales = call(*source, sizes, index=index, **kwargs)
    k = scales.shape[0]
    host_sizes = sizes.tolist()
    padded = sum(formats.padded_sizes(host_sizes))
    assert q.shape == (k * padded,) and q.dtype == torch.float8_e4m3fn
    assert scales.shape == (k, padded // 128) and scales.dtype == torch.float32
    got = formats.column_blocks(q, scales, host_sizes)
    expected = columns_by_oracle(kind, *source, host_sizes, index)
    for (block, block_scales), (codes, values) in zip(got, expected, strict=True):
        assert np.array_equal(codes_of(block), codes)
        assert np.array_equal(oracle.to_numpy(block_scales), values)
    check_columns_that_share_scales(kind, call, source, sizes, index, **kwargs)


def check_columns_that_share_scales(kind, call, source, sizes, index, **kwargs):
    expected = columns_by_oracle(kind, *source, sizes.tolist(), index, shared=True)
    k, padded = source[0].shape[1] * (2 if kind == "fp4" else 1), sum(formats.padded_sizes(sizes.tolist()))
    size = -(-k // 128) * (-(-padded // 512) * 4 + 4 * len(sizes))
    untouched = torch.full((size + 1,), 7.0)
    out = torch.empty(k * padded, dtype=torch.float8_e4m3fn), untouched[:size]
    q, scales = call(*source, sizes, scale_layout="blocks", index=index, out=out, **kwargs)
    assert scales is out[1]
    views = formats.block_scales(scales, k, sizes.tolist())
    start = 0
    for view, (codes, values) in zip(views, expected, strict=True):
        p = codes.shape[1]
        assert np.array_equal(codes_of(q[k * start : k * (start + p)].view(k, p)), codes)
        assert np.array_equal(oracle.to_numpy(view), values[::128])
        if p:
            assert view.stride(0) % 4 == 0 and view.storage_offset() % 4 == 0  # as cuBLAS reads them
        view.fill_(7.0)
        start += p
    assert bool((untouched == 7.0).all())  # nothing else was written
    new = call(*source, sizes, scale_layout="blocks", index=index, **kwargs)
    assert new[1].shape == (size,) and torch.equal(new[0].view(torch.uint8), q.view(torch.uint8))


@settings(max_examples=25, deadline=None)
@given(
    sizes=strategies.group_sizes(max_groups=4, max_size=200),
    blocks=st.integers(1, 3),
    spread=st.sampled_from([2, 14, 30, 254]),
    seed=strategies.seeds(),
)
def test_fp4_columns_match_the_oracle(sizes, blocks, spread, seed):
    check_columns("fp4", random_fp4(int(sizes.sum()), 32 * blocks, seed, spread), sizes)


@settings(max_examples=25, deadline=None)
@given(
    sizes=strategies.group_sizes(max_groups=4, max_size=200),
    columns=st.sampled_from([8, 33, 128, 160]),
    spread=st.sampled_from([2, 14, 30, 254]),
    seed=strategies.seeds(),
    scale_dtype=st.sampled_from(SCALE_DTYPES),
)
def test_fp8_columns_match_the_oracle(sizes, columns, spread, seed, scale_dtype):
    check_columns("fp8", random_fp8(int(sizes.sum()), columns, seed, scale_dtype, spread), sizes)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), sizes=strategies.group_sizes(max_groups=4, max_size=150), rows=st.integers(0, 50))
def test_columns_through_an_index(data, sizes, rows):
    index = data.draw(strategies.indices(rows, int(sizes.sum())))
    seed = data.draw(strategies.seeds())
    padded = sum(formats.padded_sizes(sizes.tolist()))
    check_columns("fp4", random_fp4(rows, 64, seed, 40), sizes, index, padded_rows=padded)
    check_columns("fp8", random_fp8(rows, 40, seed, torch.float32, 40), sizes, index, padded_rows=padded)


def test_fp4_columns_hold_the_same_values_as_fp4_rows():
    sizes = [100, 0, 128, 1, 27]
    packed, scales = formats.bf16_to_fp4_row(make("gaussian", sum(sizes), 96, seed=5))
    expected = formats.fp4_row_to_bf16(packed, scales, dtype=torch.float32)
    q, column_scales = formats.fp4_row_to_fp8_col(packed, scales, torch.tensor(sizes, dtype=torch.int32))
    start = 0
    for (block, block_scales), size in zip(formats.column_blocks(q, column_scales, sizes), sizes, strict=True):
        values = block.float() * block_scales.repeat_interleave(128, dim=1)
        assert torch.equal(values[:, :size].t(), expected[start : start + size])
        assert (block.view(torch.uint8)[:, size:] == 0).all() and torch.isfinite(block_scales).all()
        start += size


@pytest.mark.parametrize("spread", [0, 14, 15, 16, 30])
def test_fp4_columns_that_share_a_scale_are_exact_up_to_a_spread_of_2_to_the_14(spread):
    """Columns beside 32 loud ones, and tokens beside a loud one."""
    packed, scales = formats.bf16_to_fp4_row(make("gaussian", 128, 256, torch.float32, seed=8))
    loud = torch.zeros(128, 8, dtype=torch.bool)
    loud[:, 1] = loud[5, 6] = True
    scales = torch.where(loud, 120 + spread, 120).to(torch.uint8)
    exact = formats.fp4_row_to_bf16(packed, scales, dtype=torch.float32).t()
    sizes = torch.tensor([128], dtype=torch.int32)
    for layout in ("row", "blocks"):
        ((q, of),) = formats.column_blocks(
            *formats.fp4_row_to_fp8_col(packed, scales, sizes, scale_layout=layout), [128], 256
        )
        of = of if layout == "row" else of.repeat_interleave(128, 0)
        lost = (q.float() * of - exact).abs()
        # Without sharing only the loud token's own 32 columns lose.
        outside = torch.ones(256, dtype=torch.bool)
        if layout == "row":
            outside[192:224] = False
        assert bool((lost[outside] == 0).all()) == (layout == "row" or spread <= 14)
        assert bool((lost < 2.0**-14 * 6 * 2.0 ** (120 - 127 + spread)).all())
    assert spread <= 14 or lost.max() > 0


def test_views_of_columns_say_what_does_not_fit():
    packed, scales = random_fp4(133, 256, 0)
    sizes = torch.tensor([130, 0, 3], dtype=torch.int32)
    q, of = formats.fp4_row_to_fp8_col(packed, scales, sizes, scale_layout="blocks")
    blocks = formats.column_blocks(q, of, [130, 0, 3], 256)
    assert [(tuple(codes.shape), tuple(t.shape)) for codes, t in blocks] == [
        ((256, 256), (2, 2)),
        ((256, 0), (2, 0)),
        ((256, 128), (2, 1)),
    ]
    with pytest.raises(ValueError, match="give k"):
        formats.column_blocks(q, of, [130, 0, 3])
    with pytest.raises(ValueError, match=r"must be \[48\] for 384 columns, got \[32\]"):
        formats.column_blocks(q, of, [130, 0, 3], 384)
    with pytest.raises(ValueError, match=r"must be \[24\] for 256 columns, got \[32\]"):
        formats.block_scales(of, 256, [130, 3])
    with pytest.raises(ValueError, match=r"256 columns of 384 rows, 98304 codes, got 98303"):
        formats.column_blocks(q[1:], of, [130, 0, 3], 256)


def test_fp8_columns_add_little_error():
    x = make("gaussian", 512, 256, torch.float32, seed=6)
    x *= torch.pow(2.0, torch.rand(512, 1, generator=torch.Generator().manual_seed(0)) * 3)  # 8:1 spread of row norms
    q, scales = formats.bf16_to_fp8_row(x)
    exact = formats.fp8_row_to_bf16(q, scales, dtype=torch.float32)
    columns, column_scales = formats.fp8_row_to_fp8_col(q, scales, torch.tensor([512], dtype=torch.int32))
    ((block, block_scales),) = formats.column_blocks(columns, column_scales, [512])
    values = (block.float() * block_scales.repeat_interleave(128, dim=1)).t()
    assert (values - exact).norm() < 1e-6 * exact.norm()
    assert 0 < (values != exact).float().mean() < 1e-3


def test_padding_and_missing_rows_are_zero_codes_with_finite_scales():
    packed, scales = formats.bf16_to_fp4_row(torch.full((3, 32), 5.0))
    index = torch.tensor([-1, -1], dtype=torch.int32)
    q, column_scales = formats.fp4_row_to_fp8_col(packed, scales, torch.tensor([2], dtype=torch.int32), index=index)
    assert (codes_of(q) == 0).all() and (column_scales == 2.0**-127).all()
    q, column_scales = formats.fp4_row_to_fp8_col(
        packed, scales, torch.tensor([0, 0], dtype=torch.int32), index=index[:0]
    )
    assert q.numel() == 0 and column_scales.shape == (32, 0)
    # A single row sets the scale; rows of index -1 beside it, whose own scale byte would be 0, do not.
    index = torch.tensor([-1, 2, -1], dtype=torch.int32)
    q, column_scales = formats.fp4_row_to_fp8_col(packed, scales, torch.tensor([3], dtype=torch.int32), index=index)
    assert (column_scales == 2.0 ** (int(scales[2, 0]) - 133)).all()
    assert (q.float().view(32, 128)[:, 1] * column_scales[:, 0] == formats.fp4_row_to_bf16(packed, scales)[2]).all()


def test_columns_into_given_memory():
    packed, scales = random_fp4(200, 64, 7)
    sizes = torch.tensor([72, 128], dtype=torch.int32)
    expected = formats.fp4_row_to_fp8_col(packed, scales, sizes)
    memory = torch.full((64, 10), 7.0)
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        q = torch.zeros(64 * 256, dtype=torch.uint8).view(dtype)
        got = formats.fp4_row_to_fp8_col(packed, scales, sizes, padded_rows=256, out=(q, memory[:, 3:5]))
        assert got[0] is q and torch.equal(q.view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(memory[:, 3:5], expected[1])
    assert (memory[:, :3] == 7).all() and (memory[:, 5:] == 7).all()


def test_many_pieces_give_what_one_gives(monkeypatch):
    from ds_fp4.formats import rows

    sizes = torch.tensor([300, 0, 129, 71], dtype=torch.int32)
    fp4, fp8 = random_fp4(500, 160, 8), random_fp8(500, 160, 8, torch.float32)

    def of_blocks(call, *source) -> list[torch.Tensor]:
        q, scales = call(*source, sizes, scale_layout="blocks")
        return [q, *(view.contiguous() for view in formats.block_scales(scales, 160, sizes.tolist()))]

    def everything() -> list[torch.Tensor]:
        results = [
            *formats.fp4_row_to_fp8_row(*fp4),
            *formats.fp8_row_to_fp4_row(*fp8),
            *formats.fp4_row_to_fp8_col(*fp4, sizes),
            *formats.fp8_row_to_fp8_col(*fp8, sizes),
            *of_blocks(formats.fp4_row_to_fp8_col, *fp4),
            *of_blocks(formats.fp8_row_to_fp8_col, *fp8),
        ]
        return [t.view(torch.uint8) for t in results]

    expected = everything()
    monkeypatch.setitem(rows._VALUES_PER_PIECE, "cpu", 1000)
    assert all(torch.equal(a, b) for a, b in zip(everything(), expected, strict=True))


def test_column_layout_places_groups_and_rows():
    sizes = torch.tensor([0, 130, 0, 128, 3, 0], dtype=torch.int32)
    assert formats.padded_sizes(sizes.tolist()) == [0, 256, 0, 128, 128, 0]
    for padded_rows in (None, 512):
        layout = formats.ColumnLayout.of(sizes, padded_rows)
        assert layout.padded_rows == 512
        assert layout.row_offsets.tolist() == [0, 0, 130, 130, 258, 261]
        assert layout.padded_offsets.tolist() == [0, 0, 256, 256, 384, 512]
        assert layout.padded_sizes.tolist() == [0, 256, 0, 128, 128, 0]
        assert layout.tile_groups().tolist() == [1, 1, 3, 4]
        source = list(range(130)) + [-1] * 126 + list(range(130, 258)) + [258, 259, 260] + [-1] * 125
        assert layout.source_rows().tolist() == source
        # Group 1 has two tiles, so that a column's runs lie two apart; groups 3 and 4 have one.
        assert layout.run_offsets(3).tolist() == [[0, 2, 4], [1, 3, 5], [6, 7, 8], [9, 10, 11]]
        assert all(t.dtype == torch.int32 for t in layout[:4])
        # Scales of 128 x 128: two rows of columns 0 to 127 and 128 to 255, each padded to four. Behind the 0, 0, 2, 2
        # and 3 tiles before them groups begin at columns 0, 4, 4 + 8, 4 + 12 and 4 + 16, times two.
        assert layout.block_scale_offsets(200).tolist() == [[8, 12], [9, 13], [32, 36], [40, 44]]
        assert column_layout.block_scales_size(200, 512, 6) == 2 * (4 + 24)
    empty = formats.ColumnLayout.of(torch.zeros(0, dtype=torch.int32))
    assert empty.padded_rows == 0 and empty.source_rows().numel() == 0
