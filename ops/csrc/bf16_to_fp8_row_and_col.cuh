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
    static_assert(kLanes * kWidth == kFp8Group, "one row scale a token");
    __shared__ uint4 staging[kFp8Group * kPieces];
    __shared__ ColumnShared shared;
    __shared__ uint4 largest[kWarps][kLanes];  // FP32 bits of each warp's four columns a lane
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;

    const ColumnTile tile = start_tile<kWidth>(p.columns, shared);
    if (tile.rows <= 0) {
        return;
    }
    const int own_column = tile.column + lane * kWidth;
    const int valid = min(static_cast<int>(p.columns.width) - own_column, kWidth);
    const char* x = p.x + static_cast<int64>(own_column) * In::kBytes;
    uint32 words[kWarpTokens][kWords];
    load_tokens<kVector, typename In::Element>(x, p.x_stride, shared, valid, words);
    const auto values = [&](int t) {
        Values<In, kWidth> result;
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            result.word[i] = words[t][i];
        }
        return result;
    };
    // Rows, and on the way the columns' maxima over this warp's tokens.
    const uint32 lowest_row = static_cast<uint32>(p.row_scales.lowest);
    Values<In, kWidth> most;
    uint32 own_row_scale = 0;
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            const uint32 magnitude = words[t][i] & Values<In, kWidth>::kSignless;
            most.word[i] = t == 0 ? magnitude : In::max_magnitude(most.word[i], magnitude);
        }
        const uint32 amax = __reduce_max_sync(kAllLanes, values(t).amax_bits());
        const uint32 scale = larger(fp8_scale(amax), lowest_row);
        own_row_scale = t == lane ? scale : own_row_scale;
        const int token = warp * kWarpTokens + t;
        if (token < tile.rows && valid > 0) {
            const float inverse = inverse_scale(scale);
            const uint32 encoded = encode_e4m3x4(values(t), 0, inverse, inverse, inverse, inverse);
            const uint32 codes[1] = {amax < kInfinityBits ? encoded : kE4m3NanCodes};
            store_unit<kVector, uint8>(row_of(p.row_q + own_column, tile.row + token, p.row_q_stride), valid, codes);
        }
    }
    if (lane < kWarpTokens && warp * kWarpTokens + lane < tile.rows) {
        store_scale(p.row_scales, tile.row + warp * kWarpTokens + lane, tile.column / kFp8Group,
                    static_cast<int>(own_row_scale));
    }
    largest[warp][lane] =
        make_uint4(bits_of(most.value(0)), bits_of(most.value(1)), bits_of(most.value(2)), bits_of(most.value(3)));
    __syncthreads();
    // Columns: each lane combines the maxima of its four over all warps.
    uint32 amax[kWidth] = {0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        const uint4 four = largest[w][lane];
        amax[0] = larger(amax[0], four.x);
        amax[1] = larger(amax[1], four.y);
        amax[2] = larger(amax[2], four.z);
        amax[3] = larger(amax[3], four.w);
    }
    float inverse[kWidth];
    int exponent[kWidth];
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
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
            token[t] = encode_e4m3x4(values(4 * i + t), 0, inverse[0], inverse[1], inverse[2], inverse[3]);
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
        if (warp == c && own_column + c < static_cast<int>(p.columns.width)) {
            store_scale(p.scales, own_column + c, tile.tile, exponent[c]);
        }
    }
}

}  // namespace ds_fp4
