// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// The order in which experts see received records: by expert, then by record, each expert padded to 128 rows. Takes
// the counts of route_count with the same grid; reads the routing at the records' ends (pack_routing.cuh).
#pragma once

#include "routing.cuh"
#include "row_groups.cuh"

namespace ds_fp4 {

struct route_receive_params {
    int64 rows;  // records
    int64 k;
    const char* ids;      // int16 [rows, k]
    const char* weights;  // FP32 [rows, k]
    int64 stride;         // of both, in bytes, from row to row
    int64 local_experts;
    const int* counts;    // [blocks, local_experts]
    int64 padded_rows;    // room in the three below
    int* order;           // record of each padded row, -1 for padding
    float* row_weights;   // 0 for padding
    int* m_indices;       // expert of each padded row, -1 for padding
    int* group_sizes;     // [local_experts]
    int* padded_offsets;  // [local_experts + 1]
    int* places;          // [rows, k]: padded row of each entry; -1 for none
};

template <int kAlignment>
__global__ void __launch_bounds__(kThreads) route_receive(const route_receive_params p) {
    static_assert(kAlignment == kTileRows, "what GEMMs and column kernels pad to");
    __shared__ RoutingShared shared;
    const int k = static_cast<int>(p.k), experts = static_cast<int>(p.local_experts);
    find_starts(shared, p.counts, experts, experts, kAlignment);
    if (shared.start[experts] > p.padded_rows) {
        __trap();  // less room than the records' entries need
    }
    if (blockIdx.x == 0) {
        for (int i = threadIdx.x; i <= experts; i += kThreads) {
            p.padded_offsets[i] = static_cast<int>(shared.start[i]);
            if (i < experts) {
                p.group_sizes[i] = static_cast<int>(shared.total[i]);
            }
        }
    }
    // Padding: of this block's share of experts, and what is left of the room after the last.
    for (int expert = blockIdx.x; expert <= experts; expert += gridDim.x) {
        const int64 first = shared.start[expert] + (expert < experts ? shared.total[expert] : 0);
        const int64 end = expert < experts ? shared.start[expert + 1] : p.padded_rows;
        for (int64 i = first + threadIdx.x; i < end; i += kThreads) {
            p.order[i] = -1;
            p.row_weights[i] = 0.0f;
            p.m_indices[i] = -1;
        }
    }

    const int warp = threadIdx.x / kLanes;
    const EntryLane lane(k);
    const BlockRows block(p.rows, gridDim.x, blockIdx.x, 0);
    const BlockRows own(block.end - block.first, kWarps, warp, block.first);
    for (int i = threadIdx.x; i < (kWarps - 1) * experts; i += kThreads) {
        shared.warp_start[1 + i / experts][i % experts] = 0;
    }
    __syncthreads();
    if (warp + 1 < kWarps) {
        for (int64 base = own.first; base < own.end; base += lane.rows) {
            const int64 row = base + lane.row;
            const int id = lane.used && row < own.end ? ReceivedIds::id(p.ids + row * p.stride, lane.slot) : kNoKey;
            if (id >= 0) {
                atomicAdd(&shared.warp_start[warp + 1][id], 1u);
            }
        }
    }
    __syncthreads();
    start_warps(shared, experts);
    for (int64 base = own.first; base < own.end; base += lane.rows) {
        const int64 row = base + lane.row;
        const bool exists = lane.used && row < own.end;
        const int id = exists ? ReceivedIds::id(p.ids + row * p.stride, lane.slot) : kNoKey;
        const float weight =
            exists ? __ldg(reinterpret_cast<const float*>(p.weights + row * p.stride) + lane.slot) : 0.0f;
        const uint32 place = take_place(shared, warp, id >= 0, id);
        if (id >= 0) {
            p.order[place] = static_cast<int>(row);
            p.row_weights[place] = weight;
            p.m_indices[place] = id;
        }
        if (exists) {
            p.places[row * k + lane.slot] = id >= 0 ? static_cast<int>(place) : -1;
        }
    }
}

}  // namespace ds_fp4
