// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// Writes the routing of each record at its end: the weights (FP32 [k]) and local ids (int16 [k]) of the experts that
// its token has on its rank, in the order of the token's slots; weight 0 and id -1 past the last.
#pragma once

#include "routing.cuh"

namespace ds_fp4 {

struct pack_routing_params {
    int64 rows;  // records
    int64 k;
    const char* ids;
    int64 ids_stride;    // strides are in bytes, from row to row
    const char* scores;  // FP32
    int64 scores_stride;
    int64 local_experts;
    int64 input_rows;    // that `tokens` may name
    const int* tokens;   // [rows], -1: no entries
    const int* records;  // [tokens, k]
    char* weights_out;
    char* ids_out;
    int64 out_stride;
};

template <typename Ids>
__global__ void __launch_bounds__(kThreads) pack_routing(const pack_routing_params p) {
    const int k = static_cast<int>(p.k);
    const EntryLane lane(k);
    const int64 warp = (static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
    const int64 warps = static_cast<int64>(gridDim.x) * kWarps;
    for (int64 base = warp * lane.rows; base < p.rows; base += warps * lane.rows) {
        const int64 record = base + lane.row;
        const bool exists = lane.used && record < p.rows;
        const int64 token = exists ? __ldg(p.tokens + record) : -1;
        if (token >= p.input_rows) {
            __trap();  // reading there would be worse than stopping
        }
        const int id = token >= 0 ? Ids::id(p.ids + token * p.ids_stride, lane.slot) : kNoKey;
        const EntryGroup group(lane, k, id >= 0 ? id / static_cast<int>(p.local_experts) : kNoKey);
        const bool mine = id >= 0 && __ldg(p.records + token * k + group.record) == record;
        const uint32 row_lanes = exists ? lane.row_lanes(k) : 0;
        const uint32 members = __ballot_sync(kAllLanes, mine) & row_lanes;
        // Entries of other ranks fill the end, in their order.
        const int place = mine ? group.place : __popc(members) + __popc(row_lanes & ~members & lanes_below());
        if (exists) {
            const float weight =
                mine ? __ldg(reinterpret_cast<const float*>(p.scores + token * p.scores_stride) + lane.slot) : 0.0f;
            const int local = mine ? id % static_cast<int>(p.local_experts) : kNoKey;
            reinterpret_cast<float*>(p.weights_out + record * p.out_stride)[place] = weight;
            reinterpret_cast<short*>(p.ids_out + record * p.out_stride)[place] = static_cast<short>(local);
        }
    }
}

}  // namespace ds_fp4
