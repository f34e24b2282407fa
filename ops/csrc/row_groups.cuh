// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// Where a tile of 128 padded rows lies among ragged groups (experts), from the groups' sizes alone: no offsets to
// compute beforehand.
#pragma once

#include "row_tiles.cuh"

namespace ds_fp4 {

constexpr int kTileRows = 128;

#ifdef __CUDACC__
// The launch's dynamic shared memory.
template <typename T>
DS_FP4_DEVICE T& dynamic_shared() {
    extern __shared__ __align__(16) unsigned char ds_fp4_dynamic_shared[];
    return *reinterpret_cast<T*>(ds_fp4_dynamic_shared);
}
#endif

struct GroupTile {
    int64 first_row;     // input row of the tile's first row
    int64 padded_start;  // the group's first padded row, a multiple of kTileRows
    int padded_rows;     // of the group
    int number;          // of the tile within the group
    int valid;           // rows of the tile that are not padding; 0: there is no such tile
};

// Every lane of a warp calls with the same arguments and gets the same answer. `padded_input`: input rows lie at
// padded places, not one after the other. Stops if the tile's group goes on beyond `tiles_in_all`: its columns would
// be written past the output's end.
DS_FP4_DEVICE GroupTile find_tile(const int* group_sizes, int groups, int64 tile, int64 tiles_in_all,
                                  bool padded_input) {
    const int lane = threadIdx.x % kLanes;
    int64 tiles_before = 0, rows_before = 0;
    for (int base = 0; base < groups; base += kLanes) {
        const int size = base + lane < groups ? __ldg(group_sizes + base + lane) : 0;
        const int tiles = (size + kTileRows - 1) / kTileRows;
        int tiles_to_here = tiles, rows_to_here = size;
#pragma unroll
        for (int distance = 1; distance < kLanes; distance *= 2) {
            const int more_tiles = __shfl_up_sync(kAllLanes, tiles_to_here, distance);
            const int more_rows = __shfl_up_sync(kAllLanes, rows_to_here, distance);
            if (lane >= distance) {
                tiles_to_here += more_tiles;
                rows_to_here += more_rows;
            }
        }
        const uint32 beyond = __ballot_sync(kAllLanes, tile < tiles_before + tiles_to_here);
        if (beyond != 0) {
            const int owner = __ffs(static_cast<int>(beyond)) - 1;
            const int own_size = __shfl_sync(kAllLanes, size, owner), own_tiles = __shfl_sync(kAllLanes, tiles, owner);
            const int64 tiles_start = tiles_before + __shfl_sync(kAllLanes, tiles_to_here, owner) - own_tiles;
            const int64 rows_start = rows_before + __shfl_sync(kAllLanes, rows_to_here, owner) - own_size;
            if (tiles_start + own_tiles > tiles_in_all) {
                __trap();
            }
            GroupTile result;
            result.number = static_cast<int>(tile - tiles_start);
            result.padded_start = tiles_start * kTileRows;
            result.padded_rows = own_tiles * kTileRows;
            result.first_row = (padded_input ? result.padded_start : rows_start) + result.number * kTileRows;
            result.valid = min(own_size - result.number * kTileRows, kTileRows);
            return result;
        }
        tiles_before += __shfl_sync(kAllLanes, tiles_to_here, kLanes - 1);
        rows_before += __shfl_sync(kAllLanes, rows_to_here, kLanes - 1);
    }
    return {0, 0, 0, 0, 0};
}

}  // namespace ds_fp4
