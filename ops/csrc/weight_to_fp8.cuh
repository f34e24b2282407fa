// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// Quantize expert weights to FP8 in blocks of 128 x 128, as they are, transposed, or both from one read. A thread
// block takes one block of values, in the steps of column_tiles.cuh, a "token" being a row of the weight: both results
// are of the same codes. Reads two or four bytes a value, writes one for each result.
#pragma once

#include "column_tiles.cuh"

namespace ds_fp4 {

struct weight_to_fp8_params {
    int64 rows;          // of an expert, N: those of w1, then those of w3
    int64 width;         // K
    int64 first_rows;    // rows of w1
    int64 row_tiles;     // ceil(N / 128)
    int64 column_tiles;  // ceil(K / 128)
    const char* w1;
    const char* w3;
    int64 expert_stride;  // bytes, of w1 and w3
    int64 row_stride;     // bytes
    uint8* q;             // [experts, N, K]; null with its scales: not wanted
    float* scales;        // [experts, row_tiles, column_tiles]
    uint8* q_t;           // [experts, K, N]; null with its scales: not wanted
    float* scales_t;      // [experts, column_tiles, row_tiles]
};

template <typename In, bool kVector>
__global__ void __launch_bounds__(kThreads, In::kWords == 4 ? 3 : 2) weight_to_fp8(const weight_to_fp8_params p) {
    constexpr int kWidth = 4, kWords = In::kWords / 2, kBlock = 128;
    static_assert(kLanes * kWidth == kBlock && kTokens == kBlock, "a tile is a block");
    __shared__ uint4 staging[kBlock * kPieces];
    __shared__ uint32 largest[kWarps];
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    const uint32 row_tiles = static_cast<uint32>(p.row_tiles), column_tiles = static_cast<uint32>(p.column_tiles);
    const uint32 band = blockIdx.x / column_tiles, column_tile = blockIdx.x - band * column_tiles;
    const uint32 expert = band / row_tiles, row_tile = band - expert * row_tiles;

    const int rows = static_cast<int>(p.rows), width = static_cast<int>(p.width),
              first_rows = static_cast<int>(p.first_rows);
    const int row = static_cast<int>(row_tile) * kBlock + warp * kWarpTokens;   // this warp's first
    const int column = static_cast<int>(column_tile) * kBlock + lane * kWidth;  // this lane's first
    const int valid = min(width - column, kWidth);
    const int64 offset = expert * p.expert_stride + static_cast<int64>(column) * In::kBytes;
    Values<In, kWidth> values[kWarpTokens];
    uint32 amax = 0;
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            values[t].word[i] = 0;
        }
        if (row + t < rows && valid > 0) {
            const bool first = row + t < first_rows;
            const char* base = (first ? p.w1 : p.w3) + offset;
            const int own_row = first ? row + t : row + t - first_rows;
            load_unit<kVector, typename In::Element, true>(row_of(base, own_row, p.row_stride), valid, values[t].word);
        }
    }
    __syncthreads();  // so that all loads are on their way before the first is used
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) {
        amax = larger(amax, values[t].amax_bits());
    }
    amax = __reduce_max_sync(kAllLanes, amax);
    if (lane == 0) {
        largest[warp] = amax;
    }
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        amax = larger(amax, largest[w]);
    }
    const uint32 scale = larger(fp8_scale(amax), 1u);  // a normal number
    const Inverses4<In> inverses(Inverses4<In>::bits(amax, scale));

    uint32 code[kWarpTokens];
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) {
        code[t] = encode_e4m3x4(values[t], inverses);
    }
    const float value = float_of(fp32_power_bits(static_cast<int>(scale)));
    if (p.q != nullptr) {
        uint8* q = p.q + (static_cast<int64>(expert) * rows + row) * width + column;
#pragma unroll
        for (int t = 0; t < kWarpTokens; ++t) {
            const uint32 words[1] = {code[t]};
            if (row + t < rows && valid > 0) {
                store_unit<kVector, uint8>(row_of(q, t, p.width), valid, words);
            }
        }
        if (threadIdx.x == 0) {
            p.scales[static_cast<int64>(band) * column_tiles + column_tile] = value;
        }
    }
    if (p.q_t == nullptr) {
        return;
    }
    uint32 piece[kWidth][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32 token[4] = {code[4 * i], code[4 * i + 1], code[4 * i + 2], code[4 * i + 3]};
        uint32 turned[4];
        turn_4x4(token, turned);
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
            piece[c][i] = turned[c];
        }
    }
    stage_columns(piece, staging);
    __syncthreads();
    const int64 first_row = static_cast<int64>(row_tile) * kBlock;
    const int first_column = static_cast<int>(column_tile) * kBlock;
    uint8* q_t = p.q_t + (static_cast<int64>(expert) * width + first_column) * rows + first_row;
    store_staged<kVector, kWidth>(staging, q_t, rows, width - first_column, rows - static_cast<int>(first_row));
    if (threadIdx.x == 0) {
        p.scales_t[(static_cast<int64>(expert) * column_tiles + column_tile) * row_tiles + row_tile] = value;
    }
}

}  // namespace ds_fp4
