// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// Quantize rows of BF16, FP16 or FP32 to FP8 rows and FP8 columns, from one read. Reads K values a row; writes K codes
// and ceil(K/128) scales a row, and K codes a padded row and K scales a tile of columns.
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
constexpr int kRowAndColMinBlocks = kVector && In::kMultipliesPairs ? 3 : 2;

template <typename In, bool kVector>
__global__ void __launch_bounds__(kThreads, (kRowAndColMinBlocks<In, kVector>))
    bf16_to_fp8_row_and_col(const bf16_to_fp8_row_and_col_params p) {
    constexpr int kWidth = 4;  // a tile's columns are one group of the rows
    constexpr int kWords = In::kWords / 2;
    static_assert(kLanes * kWidth == kFp8Group, "one row scale a token");
    __shared__ uint4 staging[kFp8Group * kPieces];
    __shared__ ColumnShared shared;
    __shared__ uint4 row_inverses[kTokens / 4];
    __shared__ uint4 largest[kWarps][kLanes];  // FP32 bits of each warp's four columns a lane
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;

    const ColumnTile tile = start_tile<kWidth>(p.columns, p.x_stride, shared);
    if (tile.rows <= 0) {
        return;
    }
    const int own_column = tile.column + lane * kWidth;
    const int valid = min(static_cast<int>(p.columns.width) - own_column, kWidth);
    const char* x = p.x + static_cast<int64>(own_column) * In::kBytes;
    uint32 words[kWarpTokens][kWords];
    load_tokens<kVector, typename In::Element>(x, shared, valid, words);
    __syncthreads();
    const auto values = [&](int t) {
        Values<In, kWidth> result;
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            result.word[i] = words[t][i];
        }
        return result;
    };
    // Rows: lane t gets the largest magnitude of token t, and makes the scale of it. On the way, the columns' maxima
    // over this warp's tokens.
    Values<In, kWidth> most;
    uint32 own_amax = 0;
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            const uint32 magnitude = words[t][i] & Values<In, kWidth>::kSignless;
            most.word[i] = t == 0 ? magnitude : In::max_magnitude(most.word[i], magnitude);
        }
        const uint32 amax = __reduce_max_sync(kAllLanes, values(t).amax_bits());
        own_amax = t == lane ? amax : own_amax;
    }
    if (lane < kWarpTokens) {
        const int token = warp * kWarpTokens + lane;
        const uint32 scale = larger(fp8_scale(own_amax), static_cast<uint32>(p.row_scales.lowest));
        reinterpret_cast<uint32*>(row_inverses)[token] = Inverses4<In>::bits(own_amax, scale);
        if (token < tile.rows) {
            store_scale(p.row_scales, tile.row + token, tile.column / kFp8Group, static_cast<int>(scale));
        }
    }
    __syncwarp();
    const int rows = tile.rows - warp * kWarpTokens;
#pragma unroll
    for (int i = 0; i < kWarpTokens / 4; ++i) {
        const uint4 four = row_inverses[warp * (kWarpTokens / 4) + i];
        const uint32 inverse[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int t = 4 * i; t < 4 * i + 4; ++t) {
            const uint32 codes[1] = {encode_e4m3x4(values(t), Inverses4<In>(inverse[t % 4]))};
            if (t < rows && valid > 0) {
                const int row = tile.row + warp * kWarpTokens + t;
                store_unit<kVector, uint8>(row_of(p.row_q + own_column, row, p.row_q_stride), valid, codes);
            }
        }
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
    uint32 scale[kWidth];
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
        scale[c] = larger(fp8_scale(amax[c]), static_cast<uint32>(p.scales.lowest));
    }
    const Inverses4<In> inverses(Inverses4<In>::bits(amax[0], scale[0]), Inverses4<In>::bits(amax[1], scale[1]),
                                 Inverses4<In>::bits(amax[2], scale[2]), Inverses4<In>::bits(amax[3], scale[3]));
    uint32 piece[kWidth][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32 token[4], column[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            token[t] = encode_e4m3x4(values(4 * i + t), inverses);
        }
        turn_4x4(token, column);
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
            piece[c][i] = column[c];
        }
    }
    store_columns<kVector>(p.columns, tile, piece, staging, p.q);
    // Warp w stores the scales of the columns whose number in their lane is w.
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
        if (warp == c && own_column + c < static_cast<int>(p.columns.width)) {
            store_scale(p.scales, own_column + c, tile.tile, static_cast<int>(scale[c]));
        }
    }
}

}  // namespace ds_fp4
