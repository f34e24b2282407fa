// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// How a warp walks over rows that are converted from FP4 to FP8, FP8 to FP4 and FP8 to FP8: several rows at a time, a
// quad of them.
//
// A lane takes kValues (16 or 32) consecutive values, so that both sides are accessed in 8 or 16 bytes; a warp takes
// 32 times as many columns of kRows consecutive output rows (their input rows may be anywhere). The loads of all rows
// are issued before the first is used. With 16 values and 8 rows:
//
//     row 8q:      | lane 0: values 0..15 | lane 1: values 16..31 | ... | lane 31: values 496..511 |
//     row 8q + 1:  | lane 0: values 0..15 | ...
//
// An MXFP4 block lies in 2 neighboring lanes, an FP8 group in 8. Several rows a warp rather than one, because a GEMM
// wants the scales of one group of consecutive rows side by side: lanes 8g to 8g + 7 keep group g's scales of rows 0
// to 7, and store 32 bytes together.
#pragma once

#include "row_tiles.cuh"
#include "scales.cuh"

namespace ds_fp4 {

// Blocks a multiprocessor shall hold where eight rows take registers.
constexpr int kEightRowBlocks = kMinBlocks - 1;

// This lane's place in a quad.
template <int kQuadRows, int kQuadValues>
struct QuadPlace {
    static constexpr int kRows = kQuadRows, kValues = kQuadValues;
    static constexpr int kBlockLanes = kMxfp4Block / kValues, kGroupLanes = kFp8Group / kValues;

    int row;               // first output row
    uint32 first;          // this lane's first value in each row
    int valid;             // values from there to the row's end, at most kValues; none: 0 or less
    int rows;              // output rows, up to kRows
    int input_row[kRows];  // -1: zeros

    // Unsigned, since the last stride may lead beyond 2^31.
    DS_FP4_DEVICE bool inside(const Rows& p) const { return static_cast<uint32>(row) < static_cast<uint32>(p.rows); }

    DS_FP4_DEVICE bool has_output(int step) const { return valid > 0 && step < rows; }
    DS_FP4_DEVICE bool has_input(int step) const { return valid > 0 && input_row[step] >= 0; }

  protected:
    // Sets all but `row`; `number` is that of the tile within the row.
    DS_FP4_DEVICE void place(const Rows& p, int number) {
        first = (static_cast<uint32>(number) * kLanes + threadIdx.x % kLanes) * kValues;
        valid = min(static_cast<int>(p.width) - static_cast<int>(first), kValues);
        // Clamped: of the lanes that share a group, those past the last row must not store another quad's scales.
        rows = min(static_cast<int>(static_cast<uint32>(p.rows) - static_cast<uint32>(row)), kRows);
#pragma unroll
        for (int step = 0; step < kRows; ++step) {
            input_row[step] = step < rows ? row + step : -1;
        }
        if (p.index != nullptr) {
            const int* index = p.index + row;
            int last = -1;
#pragma unroll
            for (int step = 0; step < kRows; ++step) {
                if (step < rows) {
                    input_row[step] = __ldg(index + step);
                }
                last = max(last, input_row[step]);
            }
            if (last >= static_cast<int>(p.input_rows)) {
                __trap();  // reading there would be worse than stopping
            }
        }
    }
};

// The quads of one warp, by grid strides: tiles of a row one after the other, then the next rows.
template <int kQuadRows, int kQuadValues>
struct Quad : QuadPlace<kQuadRows, kQuadValues> {
    DS_FP4_DEVICE explicit Quad(const Rows& p) {
        const uint32 warp = blockIdx.x * (kThreads / kLanes) + __shfl_sync(kAllLanes, threadIdx.x / kLanes, 0);
        const uint32 tiles_a_row = static_cast<uint32>(p.tiles_a_row), quad = warp / tiles_a_row;
        this->row = static_cast<int>(quad) * kQuadRows;
        number = static_cast<int>(warp - quad * tiles_a_row);
        const uint32 warps = gridDim.x * (kThreads / kLanes), quads = warps / tiles_a_row;
        stride_rows = quads * kQuadRows;
        stride_tiles = static_cast<int>(warps - quads * tiles_a_row);
        this->place(p, number);
    }

    DS_FP4_DEVICE void advance(const Rows& p) {
        uint32 row = static_cast<uint32>(this->row) + stride_rows;
        number += stride_tiles;
        if (number >= static_cast<int>(p.tiles_a_row)) {
            number -= static_cast<int>(p.tiles_a_row);
            row += kQuadRows;
        }
        this->row = static_cast<int>(row);
        this->place(p, number);
    }

  private:
    int number;  // of the tile within the row
    uint32 stride_rows;
    int stride_tiles;
};

// The same in stripes: `stripe` tiles of all rows, then the next tiles. What an index names more than once is then
// read again soon, from the cache.
template <int kQuadRows, int kQuadValues>
struct StripedQuad : QuadPlace<kQuadRows, kQuadValues> {
    DS_FP4_DEVICE StripedQuad(const Rows& p, int64 most_tiles) {
        stripe = smaller(static_cast<uint32>(most_tiles), static_cast<uint32>(p.tiles_a_row));
        number = blockIdx.x * (kThreads / kLanes) + __shfl_sync(kAllLanes, threadIdx.x / kLanes, 0);
        find(p);
    }

    DS_FP4_DEVICE void advance(const Rows& p) {
        number += gridDim.x * (kThreads / kLanes);
        find(p);
    }

  private:
    uint32 number;  // of the quad among all
    uint32 stripe;

    DS_FP4_DEVICE void find(const Rows& p) {
        const uint32 quads = (static_cast<uint32>(p.rows) + kQuadRows - 1) / kQuadRows;
        const uint32 before = number / (quads * stripe) * stripe;  // tiles of a row, in earlier stripes
        const uint32 place_in_stripe = number - before * quads;
        const bool there = before < static_cast<uint32>(p.tiles_a_row);
        const uint32 tiles = there ? smaller(static_cast<uint32>(p.tiles_a_row) - before, stripe) : 1;
        const uint32 quad = place_in_stripe / tiles;
        this->row = there && quad < quads ? static_cast<int>(quad * kQuadRows) : static_cast<int>(p.rows);
        this->place(p, static_cast<int>(before + place_in_stripe - quad * tiles));
    }
};

}  // namespace ds_fp4
