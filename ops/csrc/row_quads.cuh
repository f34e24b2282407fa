// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// How a warp walks over rows that are converted from FP4 to FP8, FP8 to FP4 and FP8 to FP8: four rows at a time.
//
// A lane takes 16 consecutive values, so that both sides are accessed in 8 or 16 bytes; a warp takes 512 columns of four
// consecutive output rows (their input rows may be anywhere). All four loads are issued before the first is used.
//
//     row 4q:      | lane 0: values 0..15 | lane 1: values 16..31 | ... | lane 31: values 496..511 |
//     row 4q + 1:  | lane 0: values 0..15 | ...
//
// An MXFP4 block lies in 2 neighboring lanes, an FP8 group in 8. Four rows a warp rather than one, because a GEMM wants the
// scales of one group of consecutive rows side by side: lanes 8g to 8g + 3 keep group g's scales of rows 0 to 3, and store
// 16 bytes together.
#pragma once

#include "row_tiles.cuh"
#include "scales.cuh"

namespace ds_fp4 {

constexpr int kQuadRows = 4;
constexpr int kQuadUnit = 16;
constexpr int kQuadColumns = kLanes * kQuadUnit;
constexpr int kQuadBlockLanes = 32 / kQuadUnit;
constexpr int kQuadGroupLanes = 128 / kQuadUnit;

// The quads of one warp, by grid strides, and this lane's place in the current one.
struct Quad {
    int64 row;                    // first output row
    int64 first;                  // this lane's first value in each row
    int valid;                    // values from there to the row's end, at most kQuadUnit; none: 0
    int rows;                     // output rows, 1 to 4
    int64 input_row[kQuadRows];   // -1: zeros

    DS_FP4_DEVICE explicit Quad(const Rows& p) {
        const uint32 warp = blockIdx.x * (kThreads / kLanes) + __shfl_sync(kAllLanes, threadIdx.x / kLanes, 0);
        quad = warp / static_cast<uint32>(p.tiles_a_row);
        number = static_cast<int>(warp % static_cast<uint32>(p.tiles_a_row));
        place(p);
    }

    DS_FP4_DEVICE bool inside(const Rows& p) const { return row < p.rows; }

    DS_FP4_DEVICE void advance(const Rows& p) {
        const uint32 warps = gridDim.x * (kThreads / kLanes), tiles_a_row = static_cast<uint32>(p.tiles_a_row);
        quad += warps / tiles_a_row;
        number += static_cast<int>(warps % tiles_a_row);
        if (number >= static_cast<int>(tiles_a_row)) {
            number -= static_cast<int>(tiles_a_row);
            ++quad;
        }
        place(p);
    }

    DS_FP4_DEVICE bool has_output(int step) const { return valid > 0 && step < rows; }
    DS_FP4_DEVICE bool has_input(int step) const { return valid > 0 && input_row[step] >= 0; }

  private:
    uint32 quad;
    int number;  // of the tile within the row

    DS_FP4_DEVICE void place(const Rows& p) {
        row = static_cast<int64>(quad) * kQuadRows;
        first = static_cast<int64>(number) * kQuadColumns + threadIdx.x % kLanes * kQuadUnit;
        valid = static_cast<int>(max(min(p.width - first, static_cast<int64>(kQuadUnit)), static_cast<int64>(0)));
        rows = static_cast<int>(max(min(p.rows - row, static_cast<int64>(kQuadRows)), static_cast<int64>(0)));
#pragma unroll
        for (int step = 0; step < kQuadRows; ++step) {
            input_row[step] = step < rows ? row + step : -1;
        }
        if (p.index != nullptr) {
#pragma unroll
            for (int step = 0; step < kQuadRows; ++step) {
                if (step < rows) {
                    input_row[step] = __ldg(p.index + row + step);
                }
            }
#pragma unroll
            for (int step = 0; step < kQuadRows; ++step) {
                if (input_row[step] >= p.input_rows) {
                    __trap();  // reading there would be worse than stopping
                }
            }
        }
    }
};

}  // namespace ds_fp4
