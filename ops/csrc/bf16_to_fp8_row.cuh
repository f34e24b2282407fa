// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// Quantize rows of BF16, FP16 or FP32 to FP8. Reads K values a row, writes K codes and ceil(K/128) scales.
#pragma once

#include "formats.cuh"
#include "row_tiles.cuh"
#include "scales.cuh"

namespace ds_fp4 {

struct bf16_to_fp8_row_params {
    Rows rows;
    const char* x;
    int64 x_stride;  // strides are in bytes, from row to row
    uint8* q;
    int64 q_stride;
    Scales scales;
};

template <typename In, bool kVector>
__global__ void __launch_bounds__(kThreads, kMinBlocks) bf16_to_fp8_row(const bf16_to_fp8_row_params p) {
    constexpr int kGroupLanes = kFp8Group / kUnit;
    const int own_step = threadIdx.x % kGroupLanes;
    for (Tile tile(p.rows); tile.inside(p.rows); tile.advance(p.rows)) {
        Values8<In> x[kSteps];
        load_values<kVector>(p.x, p.x_stride, tile, x);
        uint8* q = row_of(p.q, tile.row, p.q_stride) + tile.first;
        uint32 own_scale = 0;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint32 amax = max_over_lanes<kGroupLanes>(x[step].amax_bits());
            const uint32 scale = larger(fp8_scale(amax), static_cast<uint32>(p.scales.lowest));
            own_scale = step == own_step ? scale : own_scale;
            uint32 codes[2];
            encode_e4m3x8(x[step], scale, codes);
            if (amax >= kInfinityBits) {
                codes[0] = codes[1] = kE4m3NanCodes;
            }
            if (tile.has_unit(step)) {
                store_unit<kVector, uint8>(q + step * kStepValues, tile.valid(step), codes);
            }
        }
        // Lanes 0 to 3 of a group store its scales of steps 0 to 3.
        if (own_step < kSteps && own_step * kStepValues < tile.left + own_step * kUnit) {
            const int group = (tile.first + own_step * kStepValues) / kFp8Group;
            store_scale(p.scales, tile.row, group, static_cast<int>(own_scale));
        }
    }
}

}  // namespace ds_fp4
