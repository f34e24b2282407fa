// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// How a thread block turns 128 rows (tokens) of one group into columns. A tile is 128 tokens of 32 * kWidth columns,
// kWidth being the columns a lane takes (4 or 8). Four steps:
//
// 1. Load. Warp w takes tokens 16w to 16w + 15, one a load, lane l columns kWidth * l and on:
//
//        token 16w:      | lane 0: columns 0..3 | lane 1: columns 4..7 | ... | lane 31 |     one access, 128 bytes up
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
//    w ^ (c / kWidth % 8), so that neither the warp that writes its piece of 32 columns nor the one that reads all
//    pieces of four columns meets a bank twice. Eight lanes then store the 128 bytes of a column side by side:
//
//        column c:       | lane 0: tokens 0..15 | lane 1: tokens 16..31 | ... | lane 7: tokens 112..127 |
//        column c + 1:   | lane 8: ...
#pragma once

#include "scales.cuh"

namespace ds_fp4 {

constexpr int kTokens = 128;
constexpr int kWarps = kThreads / kLanes;
constexpr int kWarpTokens = kTokens / kWarps;
constexpr int kPieces = kTokens / 16;  // of 16 bytes, in a column of a tile
static_assert(kPieces == kWarps && kWarpTokens == 16, "a thread makes one piece of each of its columns");

// Parameters of every column kernel, 64 bits each.
struct Columns {
    int64 width;       // values a row, K
    int64 rows;        // of all groups: entries of `index`, or input rows
    int64 input_rows;  // rows that `index` may name
    const int* index;  // input row of each row, -1 for a zero row; null: the same row
    const int* group_sizes;
    int64 groups;
    int64 tiles;         // of 128 rows, of all groups
    int64 column_tiles;  // ceil(K / columns of a tile)
    int64 strip;         // tiles of neighboring rows that follow each other before the next columns
};

// A block's tile, and its place in the column layout (ds_fp4/formats/columns.py).
struct ColumnTile {
    int tile;        // number among all tiles of rows
    int column;      // first column
    int row;         // first row
    int rows;        // rows that are no padding, 1 to 128; 0 or less: there is no such tile
    int group;       // that it belongs to
    int first_tile;  // of the group
    int64 run;       // where in the output this tile's codes of column 0 begin
    int run_stride;  // from column to column: the group's rows, padded
};

// Shared memory that every column kernel has.
struct ColumnShared {
    ColumnTile tile;
    longlong2 offset[kTokens / 2];  // where each token's row lies, in bytes from row 0; -1 for zeros
    int source[kTokens];            // its number, -1 for zeros
};

// Sets place by one warp: the group of the tile is found by its size and the sums of those before, 32 at a time.
template <int kColumns>
DS_FP4_DEVICE void find_tile(const Columns& p, ColumnTile& result) {
    const uint32 tiles = static_cast<uint32>(p.tiles), strip = static_cast<uint32>(p.strip);
    const uint32 strip_blocks = strip * static_cast<uint32>(p.column_tiles);
    const uint32 number = blockIdx.x / strip_blocks, place = blockIdx.x - number * strip_blocks;
    const uint32 length = smaller(tiles - number * strip, strip), column_tile = place / length;
    const int tile = static_cast<int>(number * strip + place - column_tile * length);

    const int lane = threadIdx.x % kLanes, groups = static_cast<int>(p.groups);
    int first_row = 0, first_tile = 0;  // of the first of 32 groups, then of the tile's own
    int group = 0, size = 0;
    for (int base = 0; base < groups; base += kLanes) {
        const int own_size = base + lane < groups ? __ldg(p.group_sizes + base + lane) : 0;
        const int own_tiles = (own_size + kTokens - 1) / kTokens;
        int end = own_tiles;
#pragma unroll
        for (int distance = 1; distance < kLanes; distance *= 2) {
            const int before = __shfl_up_sync(kAllLanes, end, distance);
            end += lane >= distance ? before : 0;
        }
        const uint32 behind = __ballot_sync(kAllLanes, first_tile + end > tile);
        if (behind != 0) {
            const int own = __ffs(behind) - 1;
            first_row += __reduce_add_sync(kAllLanes, lane < own ? own_size : 0);
            first_tile += __shfl_sync(kAllLanes, end - own_tiles, own);
            size = __shfl_sync(kAllLanes, own_size, own);
            group = base + own;
            break;
        }
        first_row += __reduce_add_sync(kAllLanes, own_size);
        first_tile += __shfl_sync(kAllLanes, end, kLanes - 1);
    }
    if (lane == 0) {
        const int tile_in_group = tile - first_tile;
        result.tile = tile;
        result.column = static_cast<int>(column_tile) * kColumns;
        result.row = first_row + tile_in_group * kTokens;
        result.rows = min(size - tile_in_group * kTokens, kTokens);
        result.group = group;
        result.first_tile = first_tile;
        result.run = (p.width * first_tile + tile_in_group) * kTokens;
        result.run_stride = (size + kTokens - 1) / kTokens * kTokens;
        if (result.rows > 0 &&
            (result.row + result.rows > p.rows || first_tile + result.run_stride / kTokens > p.tiles)) {
            __trap();  // sizes that do not add up: this tile would be read, or written, past an end
        }
    }
}

// Before step 1: the tile, and its tokens' input rows, `stride` bytes apart. All threads of the block must call.
template <int kWidth>
DS_FP4_DEVICE ColumnTile start_tile(const Columns& p, int64 stride, ColumnShared& shared) {
    if (threadIdx.x < kLanes) {
        find_tile<kLanes * kWidth>(p, shared.tile);
    }
    __syncthreads();
    const ColumnTile tile = shared.tile;
    if (threadIdx.x < kTokens) {
        const int token = threadIdx.x;
        int source = -1;
        if (token < tile.rows) {
            source = tile.row + token;
            if (p.index != nullptr) {
                source = __ldg(p.index + source);
                if (source >= static_cast<int>(p.input_rows)) {
                    __trap();  // reading there would be worse than stopping
                }
            }
        }
        shared.source[token] = source;
        reinterpret_cast<int64*>(shared.offset)[token] = source < 0 ? -1 : source * stride;
    }
    __syncthreads();
    return tile;
}

// Step 1. `base` is where this lane's columns of row 0 are, `valid` how many there are of them. Loads are ordered:
// with a barrier behind them, all of them are on their way before the first is used.
template <bool kVector, typename Element, int kWords>
DS_FP4_DEVICE void load_tokens(const char* base, const ColumnShared& shared, int valid,
                               uint32 (&token)[kWarpTokens][kWords]) {
    const int warp = threadIdx.x / kLanes;
#pragma unroll
    for (int i = 0; i < kWarpTokens / 2; ++i) {
        const longlong2 offsets = shared.offset[warp * (kWarpTokens / 2) + i];
        const int64 offset[2] = {offsets.x, offsets.y};
#pragma unroll
        for (int t = 0; t < 2; ++t) {
#pragma unroll
            for (int word = 0; word < kWords; ++word) {
                token[2 * i + t][word] = 0;
            }
            if (offset[t] >= 0 && valid > 0) {
                load_unit<kVector, Element, true>(base + offset[t], valid, token[2 * i + t]);
            }
        }
    }
}

// Step 3. `column[c]` gets the four tokens' codes of column c.
DS_FP4_HD void turn_4x4(const uint32 (&token)[4], uint32 (&column)[4]) {
    const uint32 ab01 = permute_bytes(token[0], token[1], 0x5140), ab23 = permute_bytes(token[0], token[1], 0x7362);
    const uint32 cd01 = permute_bytes(token[2], token[3], 0x5140), cd23 = permute_bytes(token[2], token[3], 0x7362);
    column[0] = permute_bytes(ab01, cd01, 0x5410);
    column[1] = permute_bytes(ab01, cd01, 0x7632);
    column[2] = permute_bytes(ab23, cd23, 0x5410);
    column[3] = permute_bytes(ab23, cd23, 0x7632);
}

// Step 4, first half. `piece[c]` is this thread's piece of its column c.
template <int kWidth>
DS_FP4_DEVICE void stage_columns(const uint32 (&piece)[kWidth][4], uint4* staging) {
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
        uint4* column = staging + (lane * kWidth + c) * kPieces;
        column[warp ^ (lane % kPieces)] = make_uint4(piece[c][0], piece[c][1], piece[c][2], piece[c][3]);
    }
}

// Step 4, second half, after a barrier. `columns` and `rows` are those that there are, from this tile's first on; `q`
// is where its first column begins, `stride` bytes lie from column to column.
template <bool kVector, int kWidth>
DS_FP4_DEVICE void store_staged(const uint4* staging, uint8* q, int64 stride, int columns, int rows) {
    constexpr int kColumnsAtOnce = kThreads / kPieces;
    const int number = threadIdx.x % kPieces, first = threadIdx.x / kPieces;
    uint8* address = row_of(q + number * 16, first, stride);
#pragma unroll
    for (int i = 0; i < kLanes * kWidth / kColumnsAtOnce; ++i) {
        const int c = first + i * kColumnsAtOnce;
        const uint4 codes = staging[c * kPieces + (number ^ (c / kWidth % kPieces))];
        if (c < columns && number * 16 < rows) {
            const uint32 words[4] = {codes.x, codes.y, codes.z, codes.w};
            store_unit<kVector, uint8>(row_of(address, i * kColumnsAtOnce, stride), min(rows - number * 16, 16),
                                       words);
        }
    }
}

// Step 4 for a tile of the column layout. All threads of the block must call.
template <bool kVector, int kWidth>
DS_FP4_DEVICE void store_columns(const Columns& p, const ColumnTile& tile, const uint32 (&piece)[kWidth][4],
                                 uint4* staging, uint8* q) {
    stage_columns(piece, staging);
    __syncthreads();
    q = row_of(q + tile.run, tile.column, tile.run_stride);
    store_staged<kVector, kWidth>(staging, q, tile.run_stride, static_cast<int>(p.width) - tile.column, kTokens);
}

// The one FP32 scale of a tile's 128 columns from `column` on, in layout "blocks" of ds_fp4/formats/columns.py.
DS_FP4_DEVICE void store_block_scale(const Columns& p, const ColumnTile& tile, int column, char* base, int exponent) {
    constexpr int kAlignment = 4;  // values
    const auto align = [](int tiles) { return (tiles + kAlignment - 1) / kAlignment * kAlignment; };
    const int64 blocks = (p.width + kFp8Group - 1) / kFp8Group;
    const int64 group = blocks * (align(tile.first_tile) + static_cast<int64>(kAlignment) * tile.group);
    const int64 row = static_cast<int64>(column / kFp8Group) * align(tile.run_stride / kTokens);
    reinterpret_cast<uint32*>(base)[group + row + tile.tile - tile.first_tile] = fp32_power_bits(exponent);
}

}  // namespace ds_fp4
