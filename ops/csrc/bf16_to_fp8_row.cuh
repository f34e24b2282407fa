// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// Quantize rows of BF16, FP16 or FP32 to FP8. Reads K values a row, writes K codes and ceil(K/128) scales.
#pragma once

#include "formats.cuh"
#include "row_tiles.cuh"

namespace ds_fp4 {

struct bf16_to_fp8_row_params {
    Rows rows;
    const char* x;
    int64 x_stride;  // strides are in bytes, from row to row
    uint8* q;
    int64 q_stride;
    char* scales;
    int64 scales_stride;
    int64 scale_bytes;  // 4: FP32, 1: UE8M0
};

template <typename In, bool kVector>
__global__ void __launch_bounds__(kThreads, kMinBlocks) bf16_to_fp8_row(const bf16_to_fp8_row_params p) {
    constexpr int kGroupLanes = kFp8Group / kUnit;
    const int own_step = threadIdx.x % kGroupLanes;
    for (Tile tile(p.rows); tile.inside(p.rows); tile.advance(p.rows)) {
        Values8<In> x[kSteps];
        load_values<kVector>(p.x, p.x_stride, tile, x);
        uint8* q = p.q + tile.row * p.q_stride + tile.first;
        uint32 own_scale = 0;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint32 amax = max_over_lanes<kGroupLanes>(x[step].amax_bits());
            const uint32 scale = fp8_scale(amax);
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
            const int64 group = (tile.first + own_step * kStepValues) / kFp8Group;
            char* scales = p.scales + tile.row * p.scales_stride;
            if (p.scale_bytes == 4) {
                reinterpret_cast<uint32*>(scales)[group] = ue8m0_scale_bits(own_scale);
            } else {
                scales[group] = static_cast<char>(own_scale);
            }
        }
    }
}

}  // namespace ds_fp4
