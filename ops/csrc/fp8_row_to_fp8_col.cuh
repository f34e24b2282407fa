// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// FP8 rows to FP8 columns: one scale per column per 128 rows, the largest of the rows' scales; codes are shifted to
// it. Since 128 columns have the same in every row, it may be stored once for them. Reads K codes and ceil(K/128)
// scales a row, writes K codes a padded row and K or ceil(K/128) scales a tile.
#pragma once

#include "column_tiles.cuh"

namespace ds_fp4 {

struct fp8_row_to_fp8_col_params {
    Columns columns;
    const char* source;
    int64 source_stride;  // strides are in bytes, from row to row
    const char* source_scales;
    int64 source_scales_stride;
    uint8* q;
    Scales scales;  // a "row" is a column, a "group" a tile; in layout "blocks" its strides are not used
};

// kFp32: whether the rows' scales are FP32; else UE8M0. kShared: whether scales are stored in layout "blocks".
template <bool kFp32, bool kShared, bool kVector>
__global__ void __launch_bounds__(kThreads, kMinBlocks) fp8_row_to_fp8_col(const fp8_row_to_fp8_col_params p) {
    constexpr int kWidth = 4;  // a tile's columns are one group of the rows: its 128 scales are one a token
    static_assert(kLanes * kWidth == kFp8Group, "one scale a token");
    __shared__ uint4 staging[kFp8Group * kPieces];
    __shared__ ColumnShared shared;
    __shared__ int exponents[kTokens];
    __shared__ uint4 factors[kTokens / 4];
    __shared__ uint32 largest[kTokens / kLanes];
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;

    const ColumnTile tile = start_tile<kWidth>(p.columns, p.source_stride, shared);
    if (tile.rows <= 0) {
        return;
    }
    const int own_source = threadIdx.x < kTokens ? shared.source[threadIdx.x] : -1;
    uint32 stored = 0;
    if (own_source >= 0) {
        const char* scales = p.source_scales + tile.column / kFp8Group * (kFp32 ? 4 : 1);
        stored = load_scale<kFp32, true>(row_of(scales, own_source, p.source_scales_stride));
    }
    const int valid = min(static_cast<int>(p.columns.width) - tile.column - lane * kWidth, kWidth);
    uint32 codes[kWarpTokens][1];
    load_tokens<kVector, uint8>(p.source + tile.column + lane * kWidth, shared, valid, codes);
    __syncthreads();
    // The largest exponent, counted from 1 so that 0 is no row with a scale to go by.
    if (threadIdx.x < kTokens) {
        const int exponent = scale_exponent<kFp32>(stored);
        exponents[threadIdx.x] = own_source >= 0 ? exponent : kLowestFp32Scale;
        const bool counts = own_source >= 0 && exponent != kNanScale;
        const uint32 most =
            __reduce_max_sync(kAllLanes, counts ? static_cast<uint32>(exponent - kLowestFp32Scale + 1) : 0u);
        if (lane == 0) {
            largest[warp] = most;
        }
    }
    __syncthreads();
    const uint32 most = larger(larger(largest[0], largest[1]), larger(largest[2], largest[3]));
    const int wanted = most == 0 ? kEmptyScale : static_cast<int>(most) + kLowestFp32Scale - 1;
    const int target = larger(wanted, static_cast<int>(p.scales.lowest));
    if (lane < kWarpTokens) {
        const int exponent = exponents[warp * kWarpTokens + lane];
        const uint32 factor = exponent == kNanScale ? kNanFactor : e4m3_factor(exponent - target);
        reinterpret_cast<uint32*>(factors)[warp * kWarpTokens + lane] = factor;
    }
    __syncwarp();

    uint32 piece[kWidth][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4 factor = factors[warp * 4 + i];
        const uint32 token[4] = {scale_e4m3x4(codes[4 * i][0], factor.x), scale_e4m3x4(codes[4 * i + 1][0], factor.y),
                                 scale_e4m3x4(codes[4 * i + 2][0], factor.z),
                                 scale_e4m3x4(codes[4 * i + 3][0], factor.w)};
        uint32 column[4];
        turn_4x4(token, column);
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
            piece[c][i] = column[c];
        }
    }
    store_columns<kVector>(p.columns, tile, piece, staging, p.q);
    if constexpr (kShared) {
        if (threadIdx.x == 0) {
            store_block_scale(p.columns, tile, tile.column, p.scales.base, target);
        }
    } else if (threadIdx.x < kFp8Group &&
               tile.column + static_cast<int>(threadIdx.x) < static_cast<int>(p.columns.width)) {
        store_scale(p.scales, tile.column + threadIdx.x, tile.tile, target);
    }
}

}  // namespace ds_fp4
