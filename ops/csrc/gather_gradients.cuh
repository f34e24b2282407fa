// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// The routing weights' gradients, from expert order into records: out[row][slot] = gradients[places[row][slot]], 0 for
// -1.
#pragma once

#include "row_tiles.cuh"

namespace ds_fp4 {

struct gather_gradients_params {
    int64 rows;
    int64 k;
    int64 input_rows;  // that `places` may name
    const float* gradients;
    const int* places;  // [rows, k]
    char* out;          // FP32
    int64 out_stride;   // in bytes, from row to row
};

template <int kLoads>
__global__ void __launch_bounds__(kThreads) gather_gradients(const gather_gradients_params p) {
    static_assert(kLoads == 1, "one entry a thread");
    const uint32 k = static_cast<uint32>(p.k);
    const int64 entries = p.rows * p.k, stride = static_cast<int64>(gridDim.x) * kThreads;
    for (int64 entry = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x; entry < entries; entry += stride) {
        const int place = __ldg(p.places + entry);
        if (place >= p.input_rows) {
            __trap();  // reading there would be worse than stopping
        }
        const int64 row = entry / k;
        const float gradient = place >= 0 ? __ldg(p.gradients + place) : 0.0f;
        reinterpret_cast<float*>(p.out + row * p.out_stride)[entry - row * k] = gradient;
    }
}

}  // namespace ds_fp4
