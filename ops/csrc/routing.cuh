// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// What the routing kernels share. An entry is one of the k experts of a row (a token at home, a record where it was
// received). Entries have keys: the rank that a token goes to, or the local expert that a row goes to. The plan is a
// stable counting sort of the entries by key:
//
//     route_count    each block counts the keys of its rows                     [blocks, keys]
//     route_send     where each (rank, token) goes among all, from those counts
//     route_receive  the same for (expert, row), experts padded to 128 rows
//
// A block has consecutive rows, a warp of it has consecutive rows of those, and lanes are entries:
//
//     k = 8:  | lanes 0..7: row r | lanes 8..15: row r + 1 | lanes 16..23: row r + 2 | lanes 24..31: row r + 3 |
//
// so that lower lanes come first in the order too. Counts are added in shared memory by integer atomics: their order
// is of no consequence.
#pragma once

#include "row_tiles.cuh"

namespace ds_fp4 {

constexpr int kMaxKeys = 1024;     // ranks, or local experts
constexpr int kMaxExperts = 4096;  // of all ranks
constexpr int kMaxCounts = kMaxExperts + kMaxKeys;
constexpr int kWarps = kThreads / kLanes;
constexpr int kNoKey = -1;

DS_FP4_DEVICE uint32 lanes_below() {
    return (1u << (threadIdx.x % kLanes)) - 1;
}

// An entry's expert among all, -1 for none.
struct SendIds4 {
    static constexpr bool kSend = true;
    DS_FP4_DEVICE static int id(const char* row, int slot) { return __ldg(reinterpret_cast<const int*>(row) + slot); }
};
struct SendIds8 {
    static constexpr bool kSend = true;
    DS_FP4_DEVICE static int id(const char* row, int slot) {
        return static_cast<int>(__ldg(reinterpret_cast<const int64*>(row) + slot));
    }
};
// An entry's local expert, in a record.
struct ReceivedIds {
    static constexpr bool kSend = false;
    DS_FP4_DEVICE static int id(const char* row, int slot) {
        return __ldg(reinterpret_cast<const short*>(row) + slot);
    }
};

// This lane's entry among those of the warp's current rows.
struct EntryLane {
    int rows;  // of a batch: as many as have all their entries in one warp
    int row;   // within the batch
    int slot;
    bool used;

    DS_FP4_DEVICE explicit EntryLane(int k) {
        const int lane = threadIdx.x % kLanes;
        rows = kLanes / k;
        row = lane / k;
        slot = lane % k;
        used = row < rows;
    }

    // The lanes of this lane's row.
    DS_FP4_DEVICE uint32 row_lanes(int k) const {
        const uint32 mask = k == kLanes ? kAllLanes : (1u << k) - 1;
        return mask << (row * k);
    }
};

// How a token's entries come together in records, one a rank.
struct EntryGroup {
    uint32 same;  // lanes of the same row and rank; 0 for a lane without a key
    bool first;   // the lowest of them
    int record;   // number of the record among the token's
    int place;    // of the entry within the record
    int records;  // of the token

    // Every lane of the warp must call.
    DS_FP4_DEVICE EntryGroup(const EntryLane& lane, int k, int key) {
        const bool has_key = lane.used && key != kNoKey;
        // Lanes without a key differ from all: what they match is of no interest.
        const uint32 value = has_key ? static_cast<uint32>(lane.row) << 16 | static_cast<uint32>(key) : 0xFFFFFFFFu;
        same = __match_any_sync(kAllLanes, value);
        same = has_key ? same : 0;
        first = has_key && (same & lanes_below()) == 0;
        const uint32 firsts = __ballot_sync(kAllLanes, first) & (lane.used ? lane.row_lanes(k) : 0);
        const uint32 leader = same & (0u - same);  // its lowest bit
        record = __popc(firsts & (leader - 1));
        place = __popc(same & lanes_below());
        records = __popc(firsts);
    }
};

// Consecutive rows, the `part`-th of `parts` shares of them.
struct BlockRows {
    int64 first, end;

    DS_FP4_DEVICE BlockRows(int64 rows, int parts, int part, int64 start) {
        const int64 share = (rows + parts - 1) / parts;
        first = start + min(rows, share * part);
        end = start + min(rows, share * (part + 1));
    }
};

struct RoutingShared {
    uint32 warp_start[kWarps][kMaxKeys];  // first count, then place, of a warp's next entry of a key
    uint32 total[kMaxKeys];
    uint32 start[kMaxKeys + 1];  // of a key's places among all
};

// Fills shared.total and shared.start, keys' places rounded up to multiples of `alignment`, and sets warp 0's start to
// where this block's entries begin.
DS_FP4_DEVICE void find_starts(RoutingShared& shared, const int* counts, int64 counts_stride, int keys,
                               uint32 alignment) {
    for (int key = threadIdx.x; key < keys; key += kThreads) {
        uint32 total = 0, before = 0;
#pragma unroll 8
        for (uint32 block = 0; block < gridDim.x; ++block) {
            const uint32 count = static_cast<uint32>(__ldg(counts + block * counts_stride + key));
            total += count;
            before += block < blockIdx.x ? count : 0;
        }
        shared.total[key] = total;
        shared.warp_start[0][key] = before;
    }
    __syncthreads();
    if (threadIdx.x < kLanes) {
        const int lane = threadIdx.x;
        uint32 carry = 0;
        for (int base = 0; base < keys; base += kLanes) {
            const uint32 total = base + lane < keys ? shared.total[base + lane] : 0;
            const uint32 padded = (total + alignment - 1) / alignment * alignment;
            uint32 to_here = padded;
#pragma unroll
            for (int distance = 1; distance < kLanes; distance *= 2) {
                const uint32 more = __shfl_up_sync(kAllLanes, to_here, distance);
                to_here += lane >= distance ? more : 0;
            }
            if (base + lane < keys) {
                shared.start[base + lane] = carry + to_here - padded;
            }
            carry += __shfl_sync(kAllLanes, to_here, kLanes - 1);
        }
        if (lane == 0) {
            shared.start[keys] = carry;
        }
    }
    __syncthreads();
}

// From the counts of the block's warps (warp w's in warp_start[w + 1]; the last is not needed) to their starts.
DS_FP4_DEVICE void start_warps(RoutingShared& shared, int keys) {
    for (int key = threadIdx.x; key < keys; key += kThreads) {
        uint32 next = shared.warp_start[0][key] + shared.start[key];
        shared.warp_start[0][key] = next;
        for (int warp = 1; warp < kWarps; ++warp) {
            next += shared.warp_start[warp][key];
            shared.warp_start[warp][key] = next;
        }
    }
    __syncthreads();
}

// The place of an active lane's entry: places of a key go up with the lane. Every lane of the warp must call.
DS_FP4_DEVICE uint32 take_place(RoutingShared& shared, int warp, bool active, int key) {
    const uint32 peers = __match_any_sync(kAllLanes, active ? static_cast<uint32>(key) : 0xFFFFFFFFu);
    uint32 place = 0;
    if (active) {
        place = shared.warp_start[warp][key] + __popc(peers & lanes_below());
    }
    __syncwarp();
    if (active && (peers & lanes_below()) == 0) {
        shared.warp_start[warp][key] += __popc(peers);
    }
    __syncwarp();
    return place;
}

}  // namespace ds_fp4
