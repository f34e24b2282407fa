// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// The records that leave a rank: one for each (rank, token) of a token with experts on that rank, by rank, then by
// token. Takes the counts of route_count with the same grid.
#pragma once

#include "routing.cuh"

namespace ds_fp4 {

struct route_send_params {
    int64 rows;  // tokens
    int64 k;
    const char* ids;
    int64 ids_stride;  // in bytes, from row to row
    int64 local_experts;
    int64 ranks;
    const int* counts;  // [blocks, ranks * local_experts + ranks]
    int* tokens;        // [most_records]: a record's token; -1 past the last
    int64 most_records;
    int* records;  // [rows, k]: a token's records, by the slot that named their rank first; -1 past the last
    int* table;    // [ranks, local_experts + 1]: entries of each expert; records to each rank
};

template <typename Ids>
__global__ void __launch_bounds__(kThreads) route_send(const route_send_params p) {
    __shared__ RoutingShared shared;
    const int k = static_cast<int>(p.k), ranks = static_cast<int>(p.ranks);
    const int local_experts = static_cast<int>(p.local_experts), experts = ranks * local_experts;
    const int counts_a_block = experts + ranks;
    find_starts(shared, p.counts + experts, counts_a_block, ranks, 1);
    if (blockIdx.x == 0) {
        for (int i = threadIdx.x; i < ranks * (local_experts + 1); i += kThreads) {
            const int rank = i / (local_experts + 1), expert = i % (local_experts + 1);
            uint32 total = 0;
            if (expert == local_experts) {
                total = shared.total[rank];
            } else {
#pragma unroll 8
                for (uint32 block = 0; block < gridDim.x; ++block) {
                    total +=
                        static_cast<uint32>(__ldg(p.counts + block * counts_a_block + rank * local_experts + expert));
                }
            }
            p.table[i] = static_cast<int>(total);
        }
    }
    for (int64 i = shared.start[ranks] + static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x; i < p.most_records;
         i += static_cast<int64>(gridDim.x) * kThreads) {
        p.tokens[i] = -1;
    }

    const int warp = threadIdx.x / kLanes;
    const EntryLane lane(k);
    const BlockRows block(p.rows, gridDim.x, blockIdx.x, 0);
    const BlockRows own(block.end - block.first, kWarps, warp, block.first);
    for (int i = threadIdx.x; i < (kWarps - 1) * ranks; i += kThreads) {
        shared.warp_start[1 + i / ranks][i % ranks] = 0;
    }
    __syncthreads();
    for (int pass = 0; pass < 2; ++pass) {
        for (int64 base = own.first; base < own.end; base += lane.rows) {
            const int64 row = base + lane.row;
            const bool exists = lane.used && row < own.end;
            const int id = exists ? Ids::id(p.ids + row * p.ids_stride, lane.slot) : kNoKey;
            const int rank = id >= 0 ? id / local_experts : kNoKey;
            const EntryGroup group(lane, k, rank);
            if (pass == 0) {
                if (group.first && warp + 1 < kWarps) {
                    atomicAdd(&shared.warp_start[warp + 1][rank], 1u);
                }
                continue;
            }
            const uint32 place = take_place(shared, warp, group.first, rank);
            if (group.first) {
                p.tokens[place] = static_cast<int>(row);
                p.records[row * k + group.record] = static_cast<int>(place);
            }
            if (exists && lane.slot >= group.records) {
                p.records[row * k + lane.slot] = -1;
            }
        }
        __syncthreads();
        if (pass == 0) {
            start_warps(shared, ranks);
        }
    }
}

}  // namespace ds_fp4
