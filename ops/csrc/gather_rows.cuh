// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// Records (rows of bytes) through an index: out[r] = records[index[r]], zeros where the index is -1. Reads and writes
// each output byte once.
//
// All units of all output rows are one sequence; a warp takes kGatherSteps x 32 of it, so that no lane idles at a
// row's end however short the rows are.
#pragma once

#include "row_tiles.cuh"

namespace ds_fp4 {

struct gather_rows_params {
    int64 rows;        // output rows
    int64 row_units;   // units a row
    int64 input_rows;  // rows that `index` may name
    const int* index;  // input row of each output row, -1 for a zero row; null: the same row
    const char* records;
    int64 records_stride;  // in bytes, from row to row
    char* out;
    int64 out_stride;
};

constexpr int kGatherSteps = 4;

template <int kBytes>
struct GatherUnit;
template <>
struct GatherUnit<16> {
    using Type = uint4;
    DS_FP4_DEVICE static Type zero() { return make_uint4(0, 0, 0, 0); }
};
template <>
struct GatherUnit<4> {
    using Type = uint32;
    DS_FP4_DEVICE static Type zero() { return 0; }
};
template <>
struct GatherUnit<1> {
    using Type = uint8;
    DS_FP4_DEVICE static Type zero() { return 0; }
};

template <int kBytes>
__global__ void __launch_bounds__(kThreads, 5) gather_rows(const gather_rows_params p) {
    using Unit = typename GatherUnit<kBytes>::Type;
    const uint32 row_units = static_cast<uint32>(p.row_units);
    // The place of the warp's first unit, and how far the next one of its tiles is; a grid has less than 2^32 units.
    const uint32 first = (blockIdx.x * kThreads + (threadIdx.x & ~(kLanes - 1))) * kGatherSteps;
    const uint32 stride = gridDim.x * kThreads * kGatherSteps;
    int64 row = first / row_units;
    uint32 column = first % row_units;
    const uint32 stride_rows = stride / row_units, stride_columns = stride % row_units;
    while (row < p.rows) {
        Unit unit[kGatherSteps];
        int64 to[kGatherSteps];  // output offset, -1: past the end
#pragma unroll
        for (int step = 0; step < kGatherSteps; ++step) {
            const uint32 place = column + step * kLanes + threadIdx.x % kLanes;
            const uint32 rows_on = place / row_units;
            const int64 out_row = row + rows_on, unit_column = place - rows_on * row_units;
            unit[step] = GatherUnit<kBytes>::zero();
            to[step] = -1;
            if (out_row < p.rows) {
                to[step] = out_row * p.out_stride + unit_column * kBytes;
                const int64 input_row = p.index == nullptr ? out_row : __ldg(p.index + out_row);
                if (input_row >= p.input_rows) {
                    __trap();  // reading there would be worse than stopping
                }
                if (input_row >= 0) {
                    const char* from = p.records + input_row * p.records_stride + unit_column * kBytes;
                    unit[step] = __ldg(reinterpret_cast<const Unit*>(from));
                }
            }
        }
#pragma unroll
        for (int step = 0; step < kGatherSteps; ++step) {
            if (to[step] >= 0) {
                *reinterpret_cast<Unit*>(p.out + to[step]) = unit[step];
            }
        }
        row += stride_rows;
        column += stride_columns;
        if (column >= row_units) {
            column -= row_units;
            ++row;
        }
    }
}

}  // namespace ds_fp4
