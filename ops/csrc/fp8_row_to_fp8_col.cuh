// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// FP8 rows to FP8 columns: one scale per column per 128 rows, the largest of the rows' scales; codes are shifted to it. Reads K
// codes and ceil(K/128) scales a row, writes K codes a padded row and K scales a tile.
#pragma once

#include "column_tiles.cuh"

namespace ds_fp4 {

struct fp8_row_to_fp8_col_params {
    Columns columns;
    const uint8* source;
    int64 source_stride;  // strides are in bytes, from row to row
    const char* source_scales;
    int64 source_scales_stride;
    int64 source_scale_bytes;  // 4: FP32, 1: UE8M0
    uint8* q;
    Scales scales;  // a "row" is a column, a "group" a tile
};

template <bool kVector>
__global__ void __launch_bounds__(kThreads, kMinBlocks) fp8_row_to_fp8_col(const fp8_row_to_fp8_col_params p) {
    constexpr int kWidth = 4;  // a tile's columns are one group of the rows: its 128 scales are one a token
    static_assert(ColumnTile<kWidth>::kColumns == kFp8Group, "one scale a token");
    __shared__ uint4 staging[kFp8Group * kPieces];
    __shared__ TileGroup group;
    __shared__ int exponents[kTokens];
    __shared__ uint32 largest[kTokens / kLanes];
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;

    const ColumnTile<kWidth> tile(p.columns, &group);
    if (tile.rows <= 0) {
        return;
    }
    const int own_source = tile.source(p.columns, warp * kWarpTokens + lane % kWarpTokens);
    int scale_source = -1;
    uint32 stored = 0;
    if (threadIdx.x < kTokens) {
        scale_source = tile.source(p.columns, threadIdx.x);
        if (scale_source >= 0) {
            const char* scales = p.source_scales + scale_source * p.source_scales_stride;
            stored = load_scale(scales, tile.column / kFp8Group, p.source_scale_bytes);
        }
    }
    const int valid = tile.valid(p.columns);
    const uint8* source = p.source + tile.column + lane * kWidth;
    uint32 codes[kWarpTokens][1];
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) {
        const int row = __shfl_sync(kAllLanes, own_source, t);
        codes[t][0] = 0;
        if (row >= 0 && valid > 0) {
            load_unit<kVector, uint8>(source + row * p.source_stride, valid, codes[t]);
        }
    }
    // The largest exponent, counted from 1 so that 0 is no row with a scale to go by.
    if (threadIdx.x < kTokens) {
        const int exponent = p.source_scale_bytes == 4 ? fp32_scale_exponent(stored) : static_cast<int>(stored);
        exponents[threadIdx.x] = scale_source >= 0 ? exponent : kLowestFp32Scale;
        const bool counts = scale_source >= 0 && exponent != kNanScale;
        const uint32 most = __reduce_max_sync(kAllLanes, counts ? static_cast<uint32>(exponent - kLowestFp32Scale + 1) : 0u);
        if (lane == 0) {
            largest[warp] = most;
        }
    }
    __syncthreads();
    const uint32 most = larger(larger(largest[0], largest[1]), larger(largest[2], largest[3]));
    const int wanted = most == 0 ? kEmptyScale : static_cast<int>(most) + kLowestFp32Scale - 1;
    const int target = larger(wanted, static_cast<int>(p.scales.lowest));
    const int exponent = exponents[warp * kWarpTokens + lane % kWarpTokens];
    const uint32 own_factor = exponent == kNanScale ? kNanFactor : e4m3_factor(exponent - target);

    uint32 piece[kWidth][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32 token[4], column[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            token[t] = scale_e4m3x4(codes[4 * i + t][0], __shfl_sync(kAllLanes, own_factor, 4 * i + t));
        }
        turn_4x4(token, column);
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
            piece[c][i] = column[c];
        }
    }
    store_columns<kVector>(p.columns, tile, piece, staging, p.q);
    if (threadIdx.x < kFp8Group && tile.column + threadIdx.x < p.columns.width) {
        store_scale(p.scales, tile.column + threadIdx.x, tile.tile, target);
    }
}

}  // namespace ds_fp4
