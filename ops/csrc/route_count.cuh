// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// How many entries of each key a block's rows have (see routing.cuh). At home two kinds: entries of each expert among
// all, and tokens that go to each rank, once however many of its experts they have.
#pragma once

#include "routing.cuh"

namespace ds_fp4 {

struct route_count_params {
    int64 rows;
    int64 k;
    const char* ids;
    int64 ids_stride;      // in bytes, from row to row
    int64 local_experts;   // of one rank
    int64 experts;         // that an id may name
    int64 counts_a_block;  // experts, and at home ranks
    int* counts;           // [blocks, counts_a_block]
};

template <typename Ids>
__global__ void __launch_bounds__(kThreads) route_count(const route_count_params p) {
    __shared__ uint32 count[kMaxCounts];
    const int k = static_cast<int>(p.k), counts = static_cast<int>(p.counts_a_block);
    const int experts = static_cast<int>(p.experts);
    for (int i = threadIdx.x; i < counts; i += kThreads) {
        count[i] = 0;
    }
    __syncthreads();
    const int warp = threadIdx.x / kLanes;
    const EntryLane lane(k);
    const BlockRows block(p.rows, gridDim.x, blockIdx.x, 0);
    for (int64 base = block.first + warp * lane.rows; base < block.end; base += kWarps * lane.rows) {
        const int64 row = base + lane.row;
        int id = kNoKey;
        if (lane.used && row < block.end) {
            id = Ids::id(p.ids + row * p.ids_stride, lane.slot);
            if (id >= experts) {
                __trap();  // an expert that does not exist
            }
        }
        if (id >= 0) {
            atomicAdd(&count[id], 1u);
        }
        if constexpr (Ids::kSend) {
            const int rank = id >= 0 ? id / static_cast<int>(p.local_experts) : kNoKey;
            const EntryGroup group(lane, k, rank);
            if (group.first) {
                atomicAdd(&count[experts + rank], 1u);
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < counts; i += kThreads) {
        p.counts[blockIdx.x * p.counts_a_block + i] = static_cast<int>(count[i]);
    }
}

}  // namespace ds_fp4
