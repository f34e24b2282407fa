// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// How a thread block turns 128 rows (tokens) of one group into columns. A tile is 128 tokens of 32 * kWidth columns, kWidth
// being the columns a lane takes (4 or 8). Four steps:
//
// 1. Load. Warp w takes tokens 16w to 16w + 15, one a load, lane l columns kWidth * l and on:
//
//        token 16w:      | lane 0: columns 0..3 | lane 1: columns 4..7 | ... | lane 31 |     one access, 128 bytes or more
//        token 16w + 1:  | lane 0: columns 0..3 | ...
//
// 2. Convert, still token by token: a 32-bit word holds the codes of four columns of one token.
//
// 3. Turn. Four words (four tokens) of a thread become four words (four columns), by byte permutations:
//
//        token a: a0 a1 a2 a3                              column 0: a0 b0 c0 d0
//        token b: b0 b1 b2 b3    ->  a0 b0 a1 b1   ->      column 1: a1 b1 c1 d1
//        token c: c0 c1 c2 c3        c0 d0 c1 d1           column 2: ...
//        token d: d0 d1 d2 d3        ...                   column 3: ...
//
//    After its 16 tokens a thread holds 16 bytes, tokens 16w to 16w + 15, of each of its columns: one piece.
//
// 4. Exchange through shared memory, in pieces of 16 bytes. Column c is 8 pieces, one a warp; piece w is kept at place
//    w ^ (c / kWidth % 8), so that neither the warp that writes its piece of 32 columns nor the one that reads all pieces of
//    four columns meets a bank twice. Eight lanes then store the 128 bytes of a column side by side:
//
//        column c:       | lane 0: tokens 0..15 | lane 1: tokens 16..31 | ... | lane 7: tokens 112..127 |
//        column c + 1:   | lane 8: ...
#pragma once

#include "row_quads.cuh"

namespace ds_fp4 {

constexpr int kTokens = 128;
constexpr int kWarps = kThreads / kLanes;
constexpr int kWarpTokens = kTokens / kWarps;
constexpr int kPieces = kTokens / 16;  // of 16 bytes, in a column of a tile
static_assert(kPieces == kWarps && kWarpTokens == 16, "a thread makes one piece of each of its columns");

// Parameters of every column kernel, 64 bits each.
struct Columns {
    int64 width;            // values a row, K
    int64 input_rows;       // rows that `index` may name
    const int* index;       // input row of each row, -1 for a zero row; null: the same row
    const int* group_sizes;
    int64 groups;
    int64 tiles;            // of 128 rows, of all groups
    int64 column_tiles;     // ceil(K / columns of a tile)
    int64 strip;            // tiles of neighboring rows that follow each other before the next columns
};

// The group that a tile of rows belongs to.
struct TileGroup {
    int first_row;   // of the group
    int size;        // rows, 0 if there is no such tile
    int first_tile;  // of the group
};

// Found by one warp: sizes and their prefix sums, 32 groups at a time.
DS_FP4_DEVICE TileGroup find_group(const Columns& p, int tile) {
    const int lane = threadIdx.x % kLanes;
    int first_row = 0, first_tile = 0;
    for (int64 base = 0; base < p.groups; base += kLanes) {
        const int size = base + lane < p.groups ? __ldg(p.group_sizes + base + lane) : 0;
        const int tiles = (size + kTokens - 1) / kTokens;
        int end = first_tile + tiles;  // of this lane's group, once all before are added
#pragma unroll
        for (int distance = 1; distance < kLanes; distance *= 2) {
            const int before = __shfl_up_sync(kAllLanes, end - first_tile, distance);
            end += lane >= distance ? before : 0;
        }
        const uint32 behind = __ballot_sync(kAllLanes, end > tile);
        if (behind != 0) {
            const int own = __ffs(behind) - 1;
            first_row += __reduce_add_sync(kAllLanes, lane < own ? size : 0);
            return {first_row, __shfl_sync(kAllLanes, size, own), __shfl_sync(kAllLanes, end - tiles, own)};
        }
        first_row += __reduce_add_sync(kAllLanes, size);
        first_tile = __shfl_sync(kAllLanes, end, kLanes - 1);
    }
    return {0, 0, 0};
}

// One block's tile, and its place in the column layout (ds_fp4/formats/columns.py).
template <int kWidth>
struct ColumnTile {
    static constexpr int kColumns = kLanes * kWidth;

    int tile;       // number among all tiles of rows
    int64 column;   // first column
    int64 row;      // first row
    int rows;       // rows that are no padding, 1 to 128; 0: there is no such tile
    int64 run;      // where in the output this tile's codes of column 0 begin
    int64 run_stride;  // from column to column: the group's rows, padded

    // All threads of the block must call. `group` is shared memory.
    DS_FP4_DEVICE ColumnTile(const Columns& p, TileGroup* group) {
        const uint32 tiles = static_cast<uint32>(p.tiles), column_tiles = static_cast<uint32>(p.column_tiles);
        const uint32 strip_tiles = static_cast<uint32>(p.strip), strip_blocks = strip_tiles * column_tiles;
        const uint32 first = blockIdx.x / strip_blocks * strip_tiles, place = blockIdx.x % strip_blocks;
        const uint32 length = smaller(tiles - first, strip_tiles);
        tile = static_cast<int>(first + place % length);
        column = static_cast<int64>(place / length) * kColumns;
        if (threadIdx.x < kLanes) {
            const TileGroup found = find_group(p, tile);
            if (threadIdx.x == 0) {
                *group = found;
            }
        }
        __syncthreads();
        const int tile_in_group = tile - group->first_tile;
        row = static_cast<int64>(group->first_row) + tile_in_group * kTokens;
        rows = min(group->size - tile_in_group * kTokens, kTokens);
        run = (p.width * group->first_tile + tile_in_group) * kTokens;
        run_stride = static_cast<int64>((group->size + kTokens - 1) / kTokens) * kTokens;
    }

    // Input row of a token of the tile, -1 for zeros.
    DS_FP4_DEVICE int source(const Columns& p, int token) const {
        if (token >= rows) {
            return -1;
        }
        if (p.index == nullptr) {
            return static_cast<int>(row) + token;
        }
        const int result = __ldg(p.index + row + token);
        if (result >= p.input_rows) {
            __trap();  // reading there would be worse than stopping
        }
        return result;
    }

    // How many of a lane's columns there are.
    DS_FP4_DEVICE int valid(const Columns& p) const {
        const int64 left = p.width - column - threadIdx.x % kLanes * kWidth;
        return static_cast<int>(max(min(left, static_cast<int64>(kWidth)), static_cast<int64>(0)));
    }
};

// Step 3. `column[c]` gets the four tokens' codes of column c.
DS_FP4_HD void turn_4x4(const uint32 (&token)[4], uint32 (&column)[4]) {
    const uint32 ab01 = permute_bytes(token[0], token[1], 0x5140), ab23 = permute_bytes(token[0], token[1], 0x7362);
    const uint32 cd01 = permute_bytes(token[2], token[3], 0x5140), cd23 = permute_bytes(token[2], token[3], 0x7362);
    column[0] = permute_bytes(ab01, cd01, 0x5410);
    column[1] = permute_bytes(ab01, cd01, 0x7632);
    column[2] = permute_bytes(ab23, cd23, 0x5410);
    column[3] = permute_bytes(ab23, cd23, 0x7632);
}

// Step 4. `piece[c]` is this thread's piece of its column c. All threads of the block must call.
template <bool kVector, int kWidth>
DS_FP4_DEVICE void store_columns(const Columns& p, const ColumnTile<kWidth>& tile, const uint32 (&piece)[kWidth][4],
                                 uint4* staging, uint8* q) {
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
        uint4* column = staging + (lane * kWidth + c) * kPieces;
        column[warp ^ (lane % kPieces)] = make_uint4(piece[c][0], piece[c][1], piece[c][2], piece[c][3]);
    }
    __syncthreads();
    constexpr int kColumnsAtOnce = kThreads / kPieces;
    const int number = threadIdx.x % kPieces, first = threadIdx.x / kPieces;
    uint8* address = q + tile.run + (tile.column + first) * tile.run_stride + number * 16;
#pragma unroll
    for (int i = 0; i < ColumnTile<kWidth>::kColumns / kColumnsAtOnce; ++i) {
        const int c = first + i * kColumnsAtOnce;
        const uint4 codes = staging[c * kPieces + (number ^ (c / kWidth % kPieces))];
        if (tile.column + c < p.width) {
            const uint32 words[4] = {codes.x, codes.y, codes.z, codes.w};
            store_unit<kVector, uint8>(address, 16, words);
        }
        address += kColumnsAtOnce * tile.run_stride;
    }
}

}  // namespace ds_fp4
