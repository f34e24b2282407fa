// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// MXFP4 rows to FP8 columns, bitwise: one scale per column per 128 rows, 2^-6 of the largest scale in the column's 32-column
// block. Reads K/2 bytes of codes and K/32 scale bytes a row, writes K codes a padded row and K scales a tile.
#pragma once

#include "column_tiles.cuh"

namespace ds_fp4 {

struct fp4_row_to_fp8_col_params {
    Columns columns;
    const uint8* packed;
    int64 packed_stride;  // strides are in bytes, from row to row
    const uint8* block_scales;
    int64 block_scales_stride;
    uint8* q;
    Scales scales;  // a "row" is a column, a "group" a tile
};

// Tables for shifts from -14, where all codes are zero, to 6; then that of NaN.
constexpr int kLowestTable = -14;
constexpr int kNanTable = kFp4ToFp8Shift - kLowestTable + 1;

template <bool kVector>
__global__ void __launch_bounds__(kThreads, kVector ? 3 : 2) fp4_row_to_fp8_col(const fp4_row_to_fp8_col_params p) {
    constexpr int kWidth = 8;  // 4 bytes a token and lane
    constexpr int kBlocks = ColumnTile<kWidth>::kColumns / kMxfp4Block;
    constexpr int kBlockLanes = kMxfp4Block / kWidth;
    constexpr int kScalesAThread = kBlocks * kTokens / kThreads;
    constexpr int kScaleWarps = kTokens / kLanes;
    __shared__ uint4 staging[ColumnTile<kWidth>::kColumns * kPieces];
    __shared__ uint4 tables[kNanTable + 1];
    __shared__ uint4 block_scales[kBlocks][kTokens / 16];  // a byte for each block and token
    __shared__ uint32 largest[kBlocks][kScaleWarps];
    __shared__ TileGroup group;
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;

    if (threadIdx.x <= kNanTable) {
        const int shift = kLowestTable + static_cast<int>(threadIdx.x);
        const E4m3Table table = threadIdx.x == kNanTable ? e4m3_nan_table() : e4m3_table(shift);
        tables[threadIdx.x] = make_uint4(table.low, table.high, table.signs, 0);
    }
    const ColumnTile<kWidth> tile(p.columns, &group);
    if (tile.rows <= 0) {
        return;
    }
    const int own_source = tile.source(p.columns, warp * kWarpTokens + lane % kWarpTokens);
    // Warps 0 to 3 take the scales of the tile's first four blocks, warps 4 to 7 those of the others, a token a lane.
    const int scale_token = threadIdx.x % kTokens, first_block = threadIdx.x / kTokens * kScalesAThread;
    const int scale_source = tile.source(p.columns, scale_token);
    uint32 scale[kScalesAThread];
#pragma unroll
    for (int i = 0; i < kScalesAThread; ++i) {
        const int64 block = tile.column / kMxfp4Block + first_block + i;
        scale[i] = 0;
        if (scale_source >= 0 && block * kMxfp4Block < p.columns.width) {
            scale[i] = __ldg(p.block_scales + scale_source * p.block_scales_stride + block);
        }
    }
    const bool inside = tile.valid(p.columns) > 0;
    const uint8* packed = p.packed + tile.column / 2 + lane * (kWidth / 2);
    uint32 codes[kWarpTokens][1];
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) {
        const int row = __shfl_sync(kAllLanes, own_source, t);
        codes[t][0] = 0;
        if (row >= 0 && inside) {
            load_unit<kVector, uint8>(packed + row * p.packed_stride, kWidth / 2, codes[t]);
        }
    }
#pragma unroll
    for (int i = 0; i < kScalesAThread; ++i) {
        reinterpret_cast<uint8*>(block_scales[first_block + i])[scale_token] = static_cast<uint8>(scale[i]);
        // Plus one, so that 0xFF, left out, becomes the smallest; rows that are not there are left out as well.
        const uint32 most = __reduce_max_sync(kAllLanes, scale_source >= 0 ? (scale[i] + 1) & 0xFF : 0u);
        if (lane == 0) {
            largest[first_block + i][warp % kScaleWarps] = most;
        }
    }
    __syncthreads();
    const auto exponent_of = [&](int block) {
        uint32 most = 0;
#pragma unroll
        for (int i = 0; i < kScaleWarps; ++i) {
            most = larger(most, largest[block][i]);
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
    if (tile.column + threadIdx.x < p.columns.width) {
        store_scale(p.scales, tile.column + threadIdx.x, tile.tile, exponent_of(threadIdx.x / kMxfp4Block));
    }
}

}  // namespace ds_fp4
