# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Conversions between MXFP4 and FP8, without a wider tensor in between.

Both formats scale by powers of two, so that a conversion moves each code by a shift, the source's scale exponent
less the target's, and rounds it once: target code = RNE(source value * 2^shift). The shifts that differ in their
result are few, and every conversion is one table of (shift, source code).
"""

import functools

import torch

from . import checks, e2m1, e4m3, minifloat, rows, ue8m0
from .blocks import FP8_GROUP, MXFP4_BLOCK, mxfp4_exponents
from .columns import TILE_ROWS, ColumnLayout
from .e2m1 import E2M1
from .e4m3 import E4M3

# FP8's scale is 2^-6 of the largest MXFP4 scale in its group, which puts E2M1's 6 at 384 of 448 and leaves 14 powers
# of two below it in which every E2M1 value is an E4M3 value.
FP4_TO_FP8_SHIFT = 6

BLOCKS_PER_GROUP = FP8_GROUP // MXFP4_BLOCK

# Below these shifts every code rounds to zero: 6 * 2^-13 < 2^-10, 448 * 2^-19 < 2^-10 and 448 * 2^-12 < 2^-2.
_LOWEST_FP4_TO_FP8 = -13
_LOWEST_FP8_TO_FP8 = -19
_LOWEST_FP8_TO_FP4 = -12
# The scale of an MXFP4 block is at least 2^-11 of the smallest E4M3 value's, 2^-9.
_HIGHEST_FP8_TO_FP4 = 11

# In place of an exponent: no block takes part in the maximum.
_NONE = -1000


def _shifts(lowest: int, highest: int) -> torch.Tensor:
    return minifloat.power_of_two(torch.arange(lowest, highest + 1, dtype=torch.int64, device="cpu"))


@functools.cache
def _fp4_to_fp8_table(device: torch.device) -> torch.Tensor:
    """int16 [shifts -13..6 and a row of NaN codes, 256 packed bytes]: two E4M3 codes, the even one in the low byte."""
    scale = _shifts(_LOWEST_FP4_TO_FP8, FP4_TO_FP8_SHIFT)
    codes = minifloat.encode(E4M3, scale[:, None, None] * e2m1.byte_values())
    pairs = codes[..., 0] | (codes[..., 1] << 8)
    nan = torch.full_like(pairs[:1], e4m3.E4M3_NAN << 8 | e4m3.E4M3_NAN)
    return torch.cat([pairs, nan]).to(torch.int16).flatten().to(device)


@functools.cache
def _fp8_to_fp8_table(device: torch.device) -> torch.Tensor:
    """uint8 [shifts -19..0 and a row of NaN codes, 256 codes]: E4M3 codes."""
    codes = minifloat.encode(E4M3, _shifts(_LOWEST_FP8_TO_FP8, 0)[:, None] * e4m3.code_values())
    nan = torch.full_like(codes[:1], e4m3.E4M3_NAN)
    return torch.cat([codes, nan]).to(torch.uint8).flatten().to(device)


@functools.cache
def _fp8_to_fp4_table(device: torch.device) -> torch.Tensor:
    """uint8 [shifts -12..11, 256 codes]: E2M1 codes; NaN gives 0."""
    values = e4m3.code_values().nan_to_num(nan=0.0)
    codes = minifloat.encode(E2M1, _shifts(_LOWEST_FP8_TO_FP4, _HIGHEST_FP8_TO_FP4)[:, None] * values)
    return codes.to(torch.uint8).flatten().to(device)


@functools.cache
def _e4m3_fp32_bits(device: torch.device) -> torch.Tensor:
    """int32 [128]: FP32 bits of each E4M3 magnitude; all are normal numbers or zero."""
    magnitudes = e4m3.code_values()[:128].nan_to_num(nan=0.0)
    return minifloat.encode(minifloat.FP32, magnitudes).to(torch.int32).to(device)


def _fp4_to_fp8_codes(byte: torch.Tensor, shift: torch.Tensor, nan: torch.Tensor) -> torch.Tensor:
    """E4M3 codes (uint8 [m, K]) of packed bytes [m, K/2] shifted by int32 [m, K/32]; NaN codes where `nan`."""
    m, half = byte.shape
    row = shift.clamp(min=_LOWEST_FP4_TO_FP8) - _LOWEST_FP4_TO_FP8
    row = row.masked_fill_(nan, FP4_TO_FP8_SHIFT - _LOWEST_FP4_TO_FP8 + 1)
    entry = byte.to(torch.int32).view(m, -1, MXFP4_BLOCK // 2) + (row << 8)[..., None]
    table = _fp4_to_fp8_table(byte.device)
    return table.index_select(0, entry.view(-1)).view(torch.uint8).view(m, 2 * half)


@torch.no_grad()
def fp4_row_to_fp8_row(
    packed: torch.Tensor,
    scales: torch.Tensor,
    *,
    scale_dtype: torch.dtype = torch.float32,
    scale_layout: str = "row",
    index: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4 rows to FP8 rows.

    Let s* be the largest scale byte of a group's four blocks (those of 0xFF left out). The group's scale is 2^(s* -
    133), in UE8M0 not below byte 0 and in scale_layout "gemm" not below 2^-126, and a value v of a block with scale
    byte s becomes v * 2^(s - 127) / scale, rounded to nearest, ties to even: exact while s* - s <= 14, beyond that
    off by at most 2^-10 scales. A block of 0xFF becomes NaN codes; a group of nothing else gets exponent -127.

    Only scale bytes decide the scale: a group of zero codes with scale bytes 0 gets 2^-133 as FP32. A row whose index
    is -1 gets zero codes and exponent -127.

    Args:
        packed: uint8 [M, K/2], K a multiple of 32. Inner stride 1, any row stride, as for all arguments.
        scales: uint8 [M, K/32], UE8M0.
        scale_dtype: torch.float32 for powers of two (subnormal ones are kept), torch.uint8 for UE8M0.
        scale_layout: "row", or "gemm" for FP32 scales with strides (1, R rounded up to 4) and no exponent under -126,
            as Hopper's GEMM libraries read them: they take subnormal numbers for zeros.
        index: int32 [R], output row r is made from input row index[r]; -1 makes a zero row. None: all rows in order.
        out: (q, scales) to write to and return, q as float8_e4m3fn or uint8.

    Returns:
        q float8_e4m3fn [R, K]; scales [R, ceil(K/128)] of `scale_dtype`.

    Raises:
        ValueError: on a wrong shape, dtype, device, stride or index.
    """
    result = checks.prepare_fp4_row_to_fp8_row(packed, scales, scale_dtype, scale_layout, index, out)
    q, out_scales = result[0].view(torch.uint8), result[1]
    k, blocks = q.shape[1], scales.shape[1]
    lowest = ue8m0.min_exponent(scale_dtype, scale_layout)
    for piece in rows.pieces(q.shape[0], k, q.device):
        exponent = ue8m0.exponents(rows.take(scales, index, piece))
        nan = exponent == ue8m0.NAN_EXPONENT
        candidates = rows.pad_columns(exponent.masked_fill(nan, _NONE), BLOCKS_PER_GROUP, _NONE)
        largest = candidates.view(exponent.shape[0], -1, BLOCKS_PER_GROUP).amax(-1)
        target = (largest - FP4_TO_FP8_SHIFT).masked_fill_(largest == _NONE, ue8m0.UE8M0_MIN_EXPONENT)
        target.clamp_(min=lowest)
        shift = exponent - target.repeat_interleave(BLOCKS_PER_GROUP, dim=1)[:, :blocks]
        q[piece] = _fp4_to_fp8_codes(rows.take(packed, index, piece), shift, nan)
        if index is not None:
            target.masked_fill_((index[piece] < 0)[:, None], max(ue8m0.UE8M0_MIN_EXPONENT, lowest))
        ue8m0.store(target, out_scales[piece])
    return result


@torch.no_grad()
def fp8_row_to_fp4_row(
    q: torch.Tensor,
    scales: torch.Tensor,
    scale_rounding: str = "even",
    *,
    index: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 rows to MXFP4 rows, as `bf16_to_fp4_row` would quantize their exact values.

    The maximum of a block and the rounding are found on E4M3 codes. Values too large for MXFP4 (above 6 * 2^127)
    saturate. A block with a NaN code or a NaN scale gets scale byte 0xFF and codes 0, a zero block scale byte 0.

    Args:
        q: float8_e4m3fn, or its bytes as uint8, [M, K], K a multiple of 32. Inner stride 1, any row stride, as for all
            arguments.
        scales: [M, ceil(K/128)], uint8 (UE8M0) or float32 powers of two. On a GPU that is not checked.
        scale_rounding: "floor", "rceil", "ceil" or "even".
        index: int32 [R], output row r is made from input row index[r]; -1 makes a zero row. None: all rows in order.
        out: (packed, scales) to write to and return.

    Returns:
        packed uint8 [R, K/2], the even index in the low nibble; scales uint8 [R, K/32], UE8M0.

    Raises:
        ValueError: on a wrong shape, dtype, device, stride, mode or index, or (host tensors) a scale no power of two.
    """
    packed, out_scales = checks.prepare_fp8_row_to_fp4_row(q, scales, scale_rounding, index, out)
    table, magnitudes = _fp8_to_fp4_table(q.device), _e4m3_fp32_bits(q.device)
    codes, group_exponent = q.view(torch.uint8), ue8m0.exponents(scales)
    k, blocks = q.shape[1], out_scales.shape[1]
    for piece in rows.pieces(packed.shape[0], k, q.device):
        code = rows.take(codes, index, piece).view(-1, blocks, MXFP4_BLOCK)
        source = rows.take(group_exponent, index, piece)
        source = source.repeat_interleave(BLOCKS_PER_GROUP, dim=1)[:, :blocks]
        amax = (code & e4m3.E4M3_MAGNITUDE).amax(-1).to(torch.int32)
        nan = (amax == e4m3.E4M3_NAN) | (source == ue8m0.NAN_EXPONENT)
        exponent = magnitudes.index_select(0, amax.view(-1)).view(amax.shape)
        exponent = mxfp4_exponents(exponent, scale_rounding) + source
        exponent = exponent.clamp_(ue8m0.UE8M0_MIN_EXPONENT, ue8m0.UE8M0_MAX_EXPONENT)
        # Only a zero block comes to a shift above the highest one.
        row = (source - exponent).clamp_(_LOWEST_FP8_TO_FP4, _HIGHEST_FP8_TO_FP4) - _LOWEST_FP8_TO_FP4
        entry = code.to(torch.int32) + (row << 8)[..., None]
        pairs = e2m1.pack(table.index_select(0, entry.view(-1))).view(-1, blocks, MXFP4_BLOCK // 2)
        packed[piece] = pairs.masked_fill_(nan[..., None], 0).view(-1, k // 2)
        exponent.masked_fill_(amax == 0, ue8m0.UE8M0_MIN_EXPONENT)
        out_scales[piece] = exponent.add_(ue8m0.UE8M0_BIAS).masked_fill_(nan, ue8m0.UE8M0_NAN).to(torch.uint8)
    return packed, out_scales


@torch.no_grad()
def fp8_row_to_fp8_row(
    q: torch.Tensor,
    scales: torch.Tensor,
    *,
    scale_dtype: torch.dtype = torch.float32,
    scale_layout: str = "row",
    index: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 rows, such as records from the wire, to FP8 rows with scales as a GEMM reads them.

    Codes are copied. Where a group's scale is below what the output can hold, it becomes the lowest one there is and
    the codes are shifted to it, rounded to nearest, ties to even (NaN codes become 0x7F); a group of a NaN scale
    becomes NaN codes (0x7F) with exponent -127, or the lowest if that is above.

    Args:
        q: float8_e4m3fn, or its bytes as uint8, [M, K]. Inner stride 1, any row stride, as for all arguments.
        scales: [M, ceil(K/128)], uint8 (UE8M0) or float32 powers of two. On a GPU that is not checked.
        scale_dtype: torch.float32 for powers of two (subnormal ones are kept), torch.uint8 for UE8M0.
        scale_layout: "row", or "gemm" for FP32 scales with strides (1, R rounded up to 4) and no exponent under -126,
            as Hopper's GEMM libraries read them: they take subnormal numbers for zeros.
        index: int32 [R], output row r is made from input row index[r]; -1 makes a zero row. None: all rows in order.
        out: (q, scales) to write to and return, q as float8_e4m3fn or uint8.

    Returns:
        q float8_e4m3fn [R, K]; scales [R, ceil(K/128)] of `scale_dtype`.

    Raises:
        ValueError: on a wrong shape, dtype, device, stride or index, or (host tensors) a scale no power of two.
    """
    result = checks.prepare_fp8_row_to_fp8_row(q, scales, scale_dtype, scale_layout, index, out)
    out_q, out_scales = result[0].view(torch.uint8), result[1]
    table = _fp8_to_fp8_table(q.device)
    codes, exponents = q.view(torch.uint8), ue8m0.exponents(scales)
    k, groups = q.shape[1], scales.shape[1]
    lowest = ue8m0.min_exponent(scale_dtype, scale_layout)
    for piece in rows.pieces(out_q.shape[0], groups * FP8_GROUP, q.device):
        exponent = rows.take(exponents, index, piece)
        if index is not None:
            exponent.masked_fill_((index[piece] < 0)[:, None], ue8m0.UE8M0_MIN_EXPONENT)
        nan = exponent == ue8m0.NAN_EXPONENT
        target = exponent.masked_fill(nan, ue8m0.UE8M0_MIN_EXPONENT).clamp_(min=lowest)
        shift = (exponent - target).clamp_(_LOWEST_FP8_TO_FP8, 0)
        row = (shift - _LOWEST_FP8_TO_FP8).masked_fill_(nan, 1 - _LOWEST_FP8_TO_FP8)
        code = rows.pad_columns(rows.take(codes, index, piece), FP8_GROUP).view(-1, groups, FP8_GROUP)
        entry = code.to(torch.int32) + (row << 8)[..., None]
        shifted = table.index_select(0, entry.view(-1)).view(entry.shape)
        moved = ((shift < 0) | nan)[..., None]
        out_q[piece] = torch.where(moved, shifted, code).view(-1, groups * FP8_GROUP)[:, :k]
        ue8m0.store(target, out_scales[piece])
    return result


def source_rows(layout: ColumnLayout, index: torch.Tensor | None) -> torch.Tensor:
    """int32 [padded_rows]: the input row of each padded row, -1 for padding and where the index is -1."""
    source = layout.source_rows()
    if index is None or index.shape[0] == 0:
        return source
    return torch.where(source < 0, source, index[source.clamp(min=0).to(torch.int64)])


def _tile_maxima(exponent: torch.Tensor, left_out: torch.Tensor) -> torch.Tensor:
    """Largest exponent (int32 [tiles, C]) of each 128 rows of `exponent` [tiles * 128, C], or _NONE."""
    candidates = exponent.masked_fill(left_out, _NONE)
    return candidates.view(-1, TILE_ROWS, exponent.shape[1]).amax(1)


def store_tiles(codes: torch.Tensor, runs: torch.Tensor, q: torch.Tensor) -> None:
    """Write the codes of tiles transposed.

    Args:
        codes: uint8 [tiles * 128, K].
        runs: int64 [tiles, K], where in `q` each column's run of 128 codes lies.
        q: uint8 [K * padded_rows].
    """
    k = codes.shape[1]
    columns = codes.view(-1, TILE_ROWS, k).transpose(1, 2).reshape(-1, TILE_ROWS)
    q.view(-1, TILE_ROWS).index_copy_(0, runs.flatten(), columns)


def store_tile_scales(target: torch.Tensor, width: int, scales: torch.Tensor) -> None:
    """Write exponents, int32 [tiles, ceil(K / width)], each of `width` columns, as FP32 scales [K, tiles]."""
    ue8m0.store(target.repeat_interleave(width, dim=1)[:, : scales.shape[0]].t(), scales)


def _store_scales(
    target: torch.Tensor, width: int, tiles: slice, places: torch.Tensor | None, scales: torch.Tensor
) -> None:
    """Write the exponents of these tiles as `store_tile_scales`, or where there are `places`, in layout "blocks"."""
    if places is None:
        store_tile_scales(target, width, scales[:, tiles])
        return
    values = torch.empty(target.shape, dtype=torch.float32, device=target.device)
    ue8m0.store(target, values)
    scales.index_copy_(0, places[tiles].flatten(), values.flatten())


@torch.no_grad()
def fp4_row_to_fp8_col(
    packed: torch.Tensor,
    scales: torch.Tensor,
    group_sizes: torch.Tensor,
    *,
    padded_rows: int | None = None,
    scale_layout: str = "row",
    index: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4 rows to the FP8 column layout (see `columns`), one scale per column per 128 rows of a group.

    The rule is `fp4_row_to_fp8_row`'s with FP32 scales, s* being the largest scale byte (0xFF left out) of a
    32-column block over the tile's rows, or of 128 columns in scale_layout "blocks"; all of them get its scale.
    Padding rows and rows of index -1 are zero codes and take no part in s*; a tile without any scale byte to go by
    gets 2^-127.

    Args:
        packed: uint8 [M, K/2], K a multiple of 32. Inner stride 1, any row stride, as for all arguments.
        scales: uint8 [M, K/32], UE8M0.
        group_sizes: int32 [E], rows of each group, zero included; they add up to the rows (M, or R with an index).
            On a GPU that is not checked.
        padded_rows: the sum of the group sizes rounded up to 128 each. If None, a GPU is waited for to learn it.
        scale_layout: "row"; "gemm" for scales with strides (1, K rounded up to 4) and no exponent under -126; "blocks"
            for one scale of 128 x 128 codes, none under -126 either, in the layout that `columns` describes.
        index: int32 [R], row r is made from input row index[r]; -1 makes a zero row. None: all rows in order.
        out: (q, scales) to write to and return, q contiguous, as float8_e4m3fn or uint8.

    Returns:
        q float8_e4m3fn [K * padded_rows]; scales float32 [K, padded_rows / 128], or [n] in layout "blocks" (views of
        it: `columns.block_scales`).

    Raises:
        ValueError: on a wrong shape, dtype, device, stride or index, or (host tensors) sizes that do not add up.
    """
    padded_rows, result = checks.prepare_fp4_row_to_fp8_col(
        packed, scales, group_sizes, padded_rows, scale_layout, index, out
    )
    layout = ColumnLayout.of(group_sizes, padded_rows)
    q, out_scales = result[0].view(torch.uint8), result[1]
    blocks = scales.shape[1]
    k, shared = MXFP4_BLOCK * blocks, scale_layout == "blocks"
    source, runs = source_rows(layout, index), layout.run_offsets(k)
    places = layout.block_scale_offsets(k) if shared else None
    lowest = ue8m0.min_exponent(out_scales.dtype, scale_layout)
    for piece in rows.pieces(layout.padded_rows, k, q.device, multiple=TILE_ROWS):
        exponent = ue8m0.exponents(rows.take(scales, source, piece))
        nan = exponent == ue8m0.NAN_EXPONENT
        largest = _tile_maxima(exponent, nan | (source[piece] < 0)[:, None])
        if shared:
            largest = rows.pad_columns(largest, BLOCKS_PER_GROUP, _NONE)
            largest = largest.view(largest.shape[0], -1, BLOCKS_PER_GROUP).amax(-1)
        target = (largest - FP4_TO_FP8_SHIFT).masked_fill_(largest == _NONE, ue8m0.UE8M0_MIN_EXPONENT)
        target.clamp_(min=lowest)
        of_block = target.repeat_interleave(BLOCKS_PER_GROUP, dim=1)[:, :blocks] if shared else target
        # Zero rows may come to a shift above the highest one; their codes are zero under any.
        shift = (exponent - of_block.repeat_interleave(TILE_ROWS, dim=0)).clamp_(max=FP4_TO_FP8_SHIFT)
        codes = _fp4_to_fp8_codes(rows.take(packed, source, piece), shift, nan)
        tiles = slice(piece.start // TILE_ROWS, piece.stop // TILE_ROWS)
        store_tiles(codes, runs[tiles], q)
        _store_scales(target, MXFP4_BLOCK, tiles, places, out_scales)
    return result


@torch.no_grad()
def fp8_row_to_fp8_col(
    q: torch.Tensor,
    scales: torch.Tensor,
    group_sizes: torch.Tensor,
    *,
    padded_rows: int | None = None,
    scale_layout: str = "row",
    index: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 rows to the FP8 column layout (see `columns`), one scale per column per 128 rows of a group.

    The scale of a column in a tile is the largest of its rows' scales (NaN ones left out), and a code of a row with
    scale r becomes code * r / scale, rounded to nearest, ties to even: exact unless it falls into E4M3's subnormals.
    NaN codes stay NaN (0x7F), rows of a NaN scale become NaN codes. Padding rows and rows of index -1 are zero codes
    and take no part in the maximum; a tile without any scale to go by gets 2^-127.

    Args:
        q: float8_e4m3fn, or its bytes as uint8, [M, K]. Inner stride 1, any row stride, as for all arguments.
        scales: [M, ceil(K/128)], uint8 (UE8M0) or float32 powers of two. On a GPU that is not checked.
        group_sizes: int32 [E], rows of each group, zero included; they add up to the rows (M, or R with an index).
            On a GPU that is not checked.
        padded_rows: the sum of the group sizes rounded up to 128 each. If None, a GPU is waited for to learn it.
        scale_layout: "row"; "gemm" for scales with strides (1, K rounded up to 4) and no exponent under -126; "blocks"
            for one scale of 128 x 128 codes, none under -126 either, in the layout that `columns` describes.
        index: int32 [R], row r is made from input row index[r]; -1 makes a zero row. None: all rows in order.
        out: (q, scales) to write to and return, q contiguous, as float8_e4m3fn or uint8.

    Returns:
        q float8_e4m3fn [K * padded_rows]; scales float32 [K, padded_rows / 128], or [n] in layout "blocks" (views of
        it: `columns.block_scales`).

    Raises:
        ValueError: on a wrong shape, dtype, device, stride or index, or (host tensors) sizes that do not add up, a
            scale no power of two.
    """
    padded_rows, result = checks.prepare_fp8_row_to_fp8_col(
        q, scales, group_sizes, padded_rows, scale_layout, index, out
    )
    layout = ColumnLayout.of(group_sizes, padded_rows)
    out_q, out_scales = result[0].view(torch.uint8), result[1]
    table = _fp8_to_fp8_table(q.device)
    codes, exponents = q.view(torch.uint8), ue8m0.exponents(scales)
    k, groups = q.shape[1], scales.shape[1]
    source, runs = source_rows(layout, index), layout.run_offsets(k)
    places = layout.block_scale_offsets(k) if scale_layout == "blocks" else None
    lowest = ue8m0.min_exponent(out_scales.dtype, scale_layout)
    for piece in rows.pieces(layout.padded_rows, groups * FP8_GROUP, q.device, multiple=TILE_ROWS):
        exponent = rows.take(exponents, source, piece)
        nan = exponent == ue8m0.NAN_EXPONENT
        target = _tile_maxima(exponent, nan | (source[piece] < 0)[:, None])
        target.masked_fill_(target == _NONE, ue8m0.UE8M0_MIN_EXPONENT).clamp_(min=lowest)
        shift = (exponent - target.repeat_interleave(TILE_ROWS, dim=0)).clamp_(_LOWEST_FP8_TO_FP8, 0)
        row = (shift - _LOWEST_FP8_TO_FP8).masked_fill_(nan, 1 - _LOWEST_FP8_TO_FP8)
        code = rows.pad_columns(rows.take(codes, source, piece), FP8_GROUP).to(torch.int32)
        entry = code.view(-1, groups, FP8_GROUP) + (row << 8)[..., None]
        shifted = table.index_select(0, entry.view(-1)).view(-1, groups * FP8_GROUP)[:, :k]
        tiles = slice(piece.start // TILE_ROWS, piece.stop // TILE_ROWS)
        store_tiles(shifted.contiguous(), runs[tiles], out_q)
        _store_scales(target, FP8_GROUP, tiles, places, out_scales)
    return result
