// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// out[r] = the sum of partial[0..parts-1][r] in that order, FP32: the end of swiglu_backward's routing weight
// gradient. One row a thread; neighboring threads read neighboring rows.
#pragma once

#include "row_tiles.cuh"

namespace ds_fp4 {

struct sum_partials_params {
    int64 rows;
    int64 parts;
    const float* partial;
    float* out;
};

// `kLoads` partials are in flight at a time.
template <int kLoads>
__global__ void __launch_bounds__(kThreads) sum_partials(const sum_partials_params p) {
    const int64 row = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x;
    if (row >= p.rows) {
        return;
    }
    float sum = 0.0f;
    for (int64 first = 0; first < p.parts; first += kLoads) {
        float part[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            part[i] = first + i < p.parts ? __ldg(p.partial + (first + i) * p.rows + row) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            sum += part[i];
        }
    }
    p.out[row] = sum;
}

}  // namespace ds_fp4
