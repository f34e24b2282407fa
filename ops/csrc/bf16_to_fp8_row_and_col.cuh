// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// Quantize rows of BF16, FP16 or FP32 to FP8 rows and FP8 columns, from one read. Reads K values a row; writes K codes and
// ceil(K/128) scales a row, and K codes a padded row and K scales a tile of columns.
#pragma once

#include "column_tiles.cuh"

namespace ds_fp4 {

struct bf16_to_fp8_row_and_col_params {
    Columns columns;
    const char* x;
    int64 x_stride;  // strides are in bytes, from row to row
    uint8* row_q;
    int64 row_q_stride;
    Scales row_scales;
    uint8* q;
    Scales scales;  // of columns: a "row" is a column, a "group" a tile
};

template <typename In, bool kVector>
__global__ void __launch_bounds__(kThreads, kVector && In::kWords == 4 ? 3 : 2)
    bf16_to_fp8_row_and_col(const bf16_to_fp8_row_and_col_params p) {
    constexpr int kWidth = 4;  // a tile's columns are one group of the rows
    constexpr int kWords = In::kWords / 2;
    static_assert(ColumnTile<kWidth>::kColumns == kFp8Group, "one row scale a token");
    __shared__ uint4 staging[kFp8Group * kPieces];
    __shared__ uint32 largest[kWarps][kFp8Group];  // FP32 bits, by warp and column
    __shared__ TileGroup group;
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;

    const ColumnTile<kWidth> tile(p.columns, &group);
    if (tile.rows <= 0) {
        return;
    }
    const int own_source = tile.source(p.columns, warp * kWarpTokens + lane % kWarpTokens);
    const int valid = tile.valid(p.columns);
    const int64 own_column = tile.column + lane * kWidth;
    const char* x = p.x + own_column * In::kBytes;
    Values<In, kWidth> values[kWarpTokens];
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) {
        const int row = __shfl_sync(kAllLanes, own_source, t);
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            values[t].word[i] = 0;
        }
        if (row >= 0 && valid > 0) {
            load_unit<kVector, typename In::Element>(x + row * p.x_stride, valid, values[t].word);
        }
    }
    // Rows, and on the way the columns' maxima over this warp's tokens.
    const uint32 lowest_row = static_cast<uint32>(p.row_scales.lowest);
    Values<In, kWidth> most;
    uint32 own_row_scale = 0;
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            const uint32 magnitude = values[t].word[i] & Values<In, kWidth>::kSignless;
            most.word[i] = t == 0 ? magnitude : In::max_magnitude(most.word[i], magnitude);
        }
        const uint32 amax = __reduce_max_sync(kAllLanes, values[t].amax_bits());
        const uint32 scale = larger(fp8_scale(amax), lowest_row);
        own_row_scale = t == lane ? scale : own_row_scale;
        const int token = warp * kWarpTokens + t;
        if (token < tile.rows && valid > 0) {
            uint32 codes[1] = {kE4m3NanCodes};
            if (amax < kInfinityBits) {
                const float inverse = inverse_scale(scale);
                codes[0] = encode_e4m3x4(values[t], 0, inverse, inverse, inverse, inverse);
            }
            uint8* address = p.row_q + (tile.row + token) * p.row_q_stride + own_column;
            store_unit<kVector, uint8>(address, valid, codes);
        }
    }
    if (lane < kWarpTokens && warp * kWarpTokens + lane < tile.rows) {
        store_scale(p.row_scales, tile.row + warp * kWarpTokens + lane, tile.column / kFp8Group,
                    static_cast<int>(own_row_scale));
    }
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
        largest[warp][lane * kWidth + c] = bits_of(most.value(c));
    }
    __syncthreads();
    // Columns. Each warp needs the scales of all 128 columns: a lane those of its four.
    uint32 amax[kWidth];
    float inverse[kWidth];
    int exponent[kWidth];
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
        amax[c] = largest[0][lane * kWidth + c];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) {
            amax[c] = larger(amax[c], largest[w][lane * kWidth + c]);
        }
        const uint32 scale = larger(fp8_scale(amax[c]), static_cast<uint32>(p.scales.lowest));
        exponent[c] = static_cast<int>(scale);
        inverse[c] = inverse_scale(scale);
    }
    uint32 piece[kWidth][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32 token[4], column[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            token[t] = encode_e4m3x4(values[4 * i + t], 0, inverse[0], inverse[1], inverse[2], inverse[3]);
        }
        turn_4x4(token, column);
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
            piece[c][i] = amax[c] < kInfinityBits ? column[c] : kE4m3NanCodes;
        }
    }
    store_columns<kVector>(p.columns, tile, piece, staging, p.q);
    // Warp w stores the scales of the columns whose number in their lane is w.
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
        if (warp == c && own_column + c < p.columns.width) {
            store_scale(p.scales, own_column + c, tile.tile, exponent[c]);
        }
    }
}

}  // namespace ds_fp4
