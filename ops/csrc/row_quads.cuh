// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// How a warp walks over rows that are converted from FP4 to FP8, FP8 to FP4 and FP8 to FP8: four rows at a time.
//
// A lane takes 16 consecutive values, so that both sides are accessed in 8 or 16 bytes; a warp takes 512 columns of
// four consecutive output rows (their input rows may be anywhere). All four loads are issued before the first is used.
//
//     row 4q:      | lane 0: values 0..15 | lane 1: values 16..31 | ... | lane 31: values 496..511 |
//     row 4q + 1:  | lane 0: values 0..15 | ...
//
// An MXFP4 block lies in 2 neighboring lanes, an FP8 group in 8. Four rows a warp rather than one, because a GEMM
// wants the scales of one group of consecutive rows side by side: lanes 8g to 8g + 3 keep group g's scales of rows 0
// to 3, and store 16 bytes together.
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
    int row;                   // first output row
    uint32 first;              // this lane's first value in each row
    int valid;                 // values from there to the row's end, at most kQuadUnit; none: 0 or less
    int rows;                  // output rows, up to 4
    int input_row[kQuadRows];  // -1: zeros

    DS_FP4_DEVICE explicit Quad(const Rows& p) {
        const uint32 warp = blockIdx.x * (kThreads / kLanes) + __shfl_sync(kAllLanes, threadIdx.x / kLanes, 0);
        const uint32 tiles_a_row = static_cast<uint32>(p.tiles_a_row), quad = warp / tiles_a_row;
        row = static_cast<int>(quad) * kQuadRows;
        number = static_cast<int>(warp - quad * tiles_a_row);
        const uint32 warps = gridDim.x * (kThreads / kLanes), quads = warps / tiles_a_row;
        stride_rows = static_cast<int>(quads) * kQuadRows;
        stride_tiles = static_cast<int>(warps - quads * tiles_a_row);
        place(p);
    }

    DS_FP4_DEVICE bool inside(const Rows& p) const { return row < static_cast<int>(p.rows); }

    DS_FP4_DEVICE void advance(const Rows& p) {
        row += stride_rows;
        number += stride_tiles;
        if (number >= static_cast<int>(p.tiles_a_row)) {
            number -= static_cast<int>(p.tiles_a_row);
            row += kQuadRows;
        }
        place(p);
    }

    DS_FP4_DEVICE bool has_output(int step) const { return valid > 0 && step < rows; }
    DS_FP4_DEVICE bool has_input(int step) const { return valid > 0 && input_row[step] >= 0; }

  private:
    int number;  // of the tile within the row
    int stride_rows, stride_tiles;

    DS_FP4_DEVICE void place(const Rows& p) {
        first = static_cast<uint32>(number) * kQuadColumns + threadIdx.x % kLanes * kQuadUnit;
        valid = min(static_cast<int>(p.width) - static_cast<int>(first), kQuadUnit);
        // Clamped: eight lanes share a group, and those past the fourth must not store another quad's scales.
        rows = min(static_cast<int>(p.rows) - row, kQuadRows);
#pragma unroll
        for (int step = 0; step < kQuadRows; ++step) {
            input_row[step] = step < rows ? row + step : -1;
        }
        if (p.index != nullptr) {
            const int* index = p.index + row;
            int last = -1;
#pragma unroll
            for (int step = 0; step < kQuadRows; ++step) {
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

}  // namespace ds_fp4
