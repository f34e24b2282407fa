// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// MXFP4 rows to FP8 columns, bitwise: one scale per column per 128 rows, 2^-6 of the largest scale in the column's
// 32-column block, or one per 128 columns. Reads K/2 bytes of codes and K/32 scale bytes a row, writes K codes a
// padded row and K or ceil(K/128) scales a tile.
#pragma once

#include "column_tiles.cuh"

namespace ds_fp4 {

struct fp4_row_to_fp8_col_params {
    Columns columns;
    const char* packed;
    int64 packed_stride;  // strides are in bytes, from row to row
    const uint8* block_scales;
    int64 block_scales_stride;
    uint8* q;
    Scales scales;  // a "row" is a column, a "group" a tile; in layout "blocks" its strides are not used
};

// Tables for shifts from -14, where all codes are zero, to 6; then that of NaN.
constexpr int kLowestTable = -14;
constexpr int kNanTable = kFp4ToFp8Shift - kLowestTable + 1;

// kShared: whether 128 columns share a scale, in layout "blocks".
template <bool kShared, bool kVector>
__global__ void __launch_bounds__(kThreads, kVector ? 3 : 2) fp4_row_to_fp8_col(const fp4_row_to_fp8_col_params p) {
    constexpr int kWidth = 8;  // 4 bytes a token and lane
    constexpr int kColumns = kLanes * kWidth, kBlocks = kColumns / kMxfp4Block, kBlockLanes = kMxfp4Block / kWidth;
    constexpr int kSharing = kShared ? kFp8Group / kMxfp4Block : 1;  // blocks of one scale
    constexpr int kScalesAThread = kBlocks * kTokens / kThreads;
    constexpr int kScaleWarps = kTokens / kLanes;
    __shared__ uint4 staging[kColumns * kPieces];
    __shared__ ColumnShared shared;
    __shared__ uint4 tables[kNanTable + 1];
    __shared__ uint4 block_scales[kBlocks][kTokens / 16];  // a byte for each block and token
    __shared__ uint4 largest[kBlocks];                     // a word for each of four warps
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;

    if (threadIdx.x <= kNanTable) {
        const int shift = kLowestTable + static_cast<int>(threadIdx.x);
        const E4m3Table table = threadIdx.x == kNanTable ? e4m3_nan_table() : e4m3_table(shift);
        tables[threadIdx.x] = make_uint4(table.low, table.high, table.signs, 0);
    }
    const ColumnTile tile = start_tile<kWidth>(p.columns, p.packed_stride, shared);
    if (tile.rows <= 0) {
        return;
    }
    const int columns = static_cast<int>(p.columns.width) - tile.column;
    const int valid = lane * kWidth < columns ? kWidth / 2 : 0;  // bytes
    uint32 codes[kWarpTokens][1];
    load_tokens<kVector, uint8>(p.packed + tile.column / 2 + lane * (kWidth / 2), shared, valid, codes);
    // Scales after codes, since what is done with scales waits for them. Warps 0 to 3 take those of the tile's first
    // four blocks, warps 4 to 7 those of the others, a token a lane.
    const int scale_token = threadIdx.x % kTokens, first_block = threadIdx.x / kTokens * kScalesAThread;
    const int scale_source = shared.source[scale_token];
    const uint8* scales =
        row_of(p.block_scales + tile.column / kMxfp4Block + first_block, scale_source, p.block_scales_stride);
    uint32 scale[kScalesAThread];
#pragma unroll
    for (int i = 0; i < kScalesAThread; ++i) {
        scale[i] = 0;
        if (scale_source >= 0 && (first_block + i) * kMxfp4Block < columns) {
            scale[i] = load_one<true>(scales + i);
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kScalesAThread; ++i) {
        reinterpret_cast<uint8*>(block_scales[first_block + i])[scale_token] = static_cast<uint8>(scale[i]);
        // Plus one, so that 0xFF, left out, becomes the smallest; rows that are not there are left out as well.
        const uint32 most = __reduce_max_sync(kAllLanes, scale_source >= 0 ? (scale[i] + 1) & 0xFF : 0u);
        if (lane == 0) {
            reinterpret_cast<uint32*>(&largest[first_block + i])[warp % kScaleWarps] = most;
        }
    }
    __syncthreads();
    const auto exponent_of = [&](int block) {
        uint32 most = 0;
#pragma unroll
        for (int i = 0; i < kSharing; ++i) {
            const uint4 four = largest[block / kSharing * kSharing + i];
            most = larger(most, larger(larger(four.x, four.y), larger(four.z, four.w)));
        }
        const int wanted = most == 0 ? kEmptyScale : static_cast<int>(most) - 1 - kFp4ToFp8Shift;
        return larger(wanted, static_cast<int>(p.scales.lowest));
    };
    const int own_block = lane / kBlockLanes;
    const int table_of_zero = -exponent_of(own_block) - kLowestTable;
    const uint4 own_scales = block_scales[own_block][warp];
    const uint32 bytes[4] = {own_scales.x, own_scales.y, own_scales.z, own_scales.w};

    uint32 piece[kWidth][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32 token[2][4], column[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            // 0xFF is above all that can be: the last table.
            const int number = static_cast<int>((bytes[i] >> (8 * t)) & 0xFF) + table_of_zero;
            const uint4 entry = tables[smaller(larger(number, 0), kNanTable)];
            e2m1x8_to_e4m3(codes[4 * i + t][0], {entry.x, entry.y, entry.z}, token[0][t], token[1][t]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            turn_4x4(token[half], column);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                piece[4 * half + c][i] = column[c];
            }
        }
    }
    store_columns<kVector>(p.columns, tile, piece, staging, p.q);
    const int thread = static_cast<int>(threadIdx.x);
    if constexpr (kShared) {
        const int column = thread * kFp8Group;
        if (thread < kColumns / kFp8Group && column < columns) {
            const int exponent = exponent_of(thread * kSharing);
            store_block_scale(p.columns, tile, tile.column + column, p.scales.base, exponent);
        }
    } else if (thread < columns) {
        store_scale(p.scales, tile.column + thread, tile.tile, exponent_of(thread / kMxfp4Block));
    }
}

}  // namespace ds_fp4
