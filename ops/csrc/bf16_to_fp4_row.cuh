// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// Quantize rows of BF16, FP16 or FP32 to MXFP4. Reads K values a row, writes K/2 bytes of codes and K/32 scale bytes.
#pragma once

#include "formats.cuh"
#include "row_tiles.cuh"

namespace ds_fp4 {

struct bf16_to_fp4_row_params {
    Rows rows;
    const char* x;
    int64 x_stride;  // strides are in bytes, from row to row
    uint8* packed;
    int64 packed_stride;
    uint8* scales;
    int64 scales_stride;
    int64 rounding;  // ds_fp4.formats.SCALE_ROUNDINGS
};

template <typename In, bool kVector>
__global__ void __launch_bounds__(kThreads, kMinBlocks) bf16_to_fp4_row(const bf16_to_fp4_row_params p) {
    constexpr int kBlockLanes = kMxfp4Block / kUnit;
    static_assert(kBlockLanes == kSteps, "each lane of a block stores the scale of one step");
    const int own_step = threadIdx.x % kBlockLanes;
    for (Tile tile(p.rows); tile.inside(p.rows); tile.advance(p.rows)) {
        Values8<In> x[kSteps];
        load_values<kVector>(p.x, p.x_stride, tile, x);
        uint8* packed = row_of(p.packed, tile.row, p.packed_stride) + tile.first / 2;
        uint32 own_scale = 0;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint32 amax = max_over_lanes<kBlockLanes>(x[step].amax_bits());
            const uint32 scale = mxfp4_scale(amax, static_cast<uint32>(p.rounding));
            own_scale = step == own_step ? scale : own_scale;
            const uint32 encoded = encode_e2m1x8(x[step], scale);
            const uint32 codes[1] = {scale == kUe8m0Nan ? 0 : encoded};
            if (tile.has_unit(step)) {
                store_unit<kVector, uint8>(packed + step * (kStepValues / 2), kUnit / 2, codes);
            }
        }
        // All four lanes of a block know its scale in every step. Lane i stores that of step i: the tile's 32 scale
        // bytes leave in one access of the warp.
        if (tile.has_unit(own_step)) {
            const int block = (tile.first + own_step * kStepValues) / kMxfp4Block;
            row_of(p.scales, tile.row, p.scales_stride)[block] = static_cast<uint8>(own_scale);
        }
    }
}

}  // namespace ds_fp4
