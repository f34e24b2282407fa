// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// Decode MXFP4 rows to BF16, FP16 or FP32. Reads K/2 bytes of codes and K/32 scale bytes a row, writes K values.
#pragma once

#include "row_tiles.cuh"
#include "scaled_values.cuh"

namespace ds_fp4 {

struct fp4_row_to_bf16_params {
    Rows rows;
    const uint8* packed;
    int64 packed_stride;  // strides are in bytes, from row to row
    const uint8* scales;
    int64 scales_stride;
    char* out;
    int64 out_stride;
};

template <typename Out, bool kVector>
__global__ void __launch_bounds__(kThreads, kMinBlocks) fp4_row_to_bf16(const fp4_row_to_bf16_params p) {
    for (Tile tile(p.rows); tile.inside(p.rows); tile.advance(p.rows)) {
        const uint8* packed = row_of(p.packed, tile.input_row, p.packed_stride) + tile.first / 2;
        const uint8* scales = row_of(p.scales, tile.input_row, p.scales_stride) + tile.first / kMxfp4Block;
        uint32 codes[kSteps][1];
        uint32 scale[kSteps];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            codes[step][0] = 0;
            scale[step] = 0;
            if (tile.has_input(step)) {
                load_unit<kVector, uint8>(packed + step * (kStepValues / 2), kUnit / 2, codes[step]);
                scale[step] = __ldg(scales + step * (kStepValues / kMxfp4Block));
            }
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32 value[4];
            decode_e2m1x8(codes[step][0], value);
            Values8<Out> out = scaled_values<Out>(value, ue8m0_scale_bits(scale[step]));
            if (scale[step] == kUe8m0Nan) {
                out = nan_values<Out>();
            }
            store_values<kVector>(p.out, p.out_stride, tile, step, out);
        }
    }
}

}  // namespace ds_fp4
