// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// The routing weights' gradients, from returned records to their places at home: out[token][slot] is the gradient that
// the record of the slot's rank brought for the slot's expert; 0 where a slot has no expert. The other direction of
// pack_routing.
#pragma once

#include "routing.cuh"

namespace ds_fp4 {

struct return_gradients_params {
    int64 rows;  // tokens
    int64 k;
    const char* ids;
    int64 ids_stride;  // strides are in bytes, from row to row
    int64 local_experts;
    int64 input_rows;       // that `records` may name
    const int* records;     // [rows, k]
    const char* gradients;  // FP32 [records, k]
    int64 gradients_stride;
    float* out;  // [rows, k]
};

template <typename Ids>
__global__ void __launch_bounds__(kThreads) return_gradients(const return_gradients_params p) {
    const int k = static_cast<int>(p.k);
    const EntryLane lane(k);
    const int64 warp = (static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
    const int64 warps = static_cast<int64>(gridDim.x) * kWarps;
    for (int64 base = warp * lane.rows; base < p.rows; base += warps * lane.rows) {
        const int64 token = base + lane.row;
        const bool exists = lane.used && token < p.rows;
        const int id = exists ? Ids::id(p.ids + token * p.ids_stride, lane.slot) : kNoKey;
        const EntryGroup group(lane, k, id >= 0 ? id / static_cast<int>(p.local_experts) : kNoKey);
        if (exists) {
            float gradient = 0.0f;
            if (id >= 0) {
                const int64 record = __ldg(p.records + token * k + group.record);
                if (record < 0 || record >= p.input_rows) {
                    __trap();  // reading there would be worse than stopping
                }
                gradient =
                    __ldg(reinterpret_cast<const float*>(p.gradients + record * p.gradients_stride) + group.place);
            }
            p.out[token * k + lane.slot] = gradient;
        }
    }
}

}  // namespace ds_fp4
