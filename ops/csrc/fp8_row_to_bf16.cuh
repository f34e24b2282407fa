// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// Decode FP8 rows to BF16, FP16 or FP32. Reads K codes and ceil(K/128) scales a row, writes K values.
#pragma once

#include "row_tiles.cuh"
#include "scaled_values.cuh"

namespace ds_fp4 {

struct fp8_row_to_bf16_params {
    Rows rows;
    const uint8* q;
    int64 q_stride;  // strides are in bytes, from row to row
    const char* scales;
    int64 scales_stride;
    char* out;
    int64 out_stride;
    int64 scale_bytes;  // 4: FP32, 1: UE8M0
};

template <typename Out, bool kVector>
__global__ void __launch_bounds__(kThreads, kMinBlocks) fp8_row_to_bf16(const fp8_row_to_bf16_params p) {
    for (Tile tile(p.rows); tile.inside(p.rows); tile.advance(p.rows)) {
        const uint8* q = row_of(p.q, tile.input_row, p.q_stride) + tile.first;
        const char* scales = row_of(p.scales, tile.input_row, p.scales_stride);
        uint32 codes[kSteps][2];
        uint32 scale[kSteps];  // as it is stored
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            codes[step][0] = codes[step][1] = 0;
            scale[step] = 0;
            if (tile.has_input(step)) {
                const int group = tile.first / kFp8Group + step * (kStepValues / kFp8Group);
                load_unit<kVector, uint8>(q + step * kStepValues, tile.valid(step), codes[step]);
                scale[step] = p.scale_bytes == 4 ? __ldg(reinterpret_cast<const uint32*>(scales) + group)
                                                 : __ldg(reinterpret_cast<const uint8*>(scales) + group);
            }
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint32 scale_bits =
                p.scale_bytes == 4 ? fp32_scale_bits(scale[step]) : ue8m0_scale_bits(scale[step]);
            uint32 value[4];
            decode_e4m3x8(codes[step], value);
            Values8<Out> out = scaled_values<Out>(value, scale_bits);
            if (scale_bits == kFp32NanBits) {
                out = nan_values<Out>();
            } else if (has_e4m3_nan(codes[step][0]) || has_e4m3_nan(codes[step][1])) {
#pragma unroll
                for (int i = 0; i < kUnit; ++i) {
                    if (has_e4m3_nan((codes[step][i / 4] >> (8 * (i % 4))) & 0xFF)) {
                        set_nan(out, i);
                    }
                }
            }
            store_values<kVector>(p.out, p.out_stride, tile, step, out);
        }
    }
}

}  // namespace ds_fp4
