// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// FP8 rows, such as records from the wire, to FP8 rows as GEMMs read them: codes are copied, scales change their type and place.
// Reads and writes K codes and ceil(K/128) scales a row.
#pragma once

#include "row_quads.cuh"
#include "shifted_codes.cuh"

namespace ds_fp4 {

struct fp8_row_to_fp8_row_params {
    Rows rows;
    const uint8* source;
    int64 source_stride;  // strides are in bytes, from row to row
    const char* source_scales;
    int64 source_scales_stride;
    int64 source_scale_bytes;  // 4: FP32, 1: UE8M0
    uint8* q;
    int64 q_stride;
    Scales scales;
};

template <bool kVector>
__global__ void __launch_bounds__(kThreads, kMinBlocks) fp8_row_to_fp8_row(const fp8_row_to_fp8_row_params p) {
    const int own_row = threadIdx.x % kQuadGroupLanes;
    const int lowest = static_cast<int>(p.scales.lowest);
    for (Quad quad(p.rows); quad.inside(p.rows); quad.advance(p.rows)) {
        const int64 group = quad.first / kFp8Group;
        const bool has_group = group * kFp8Group < p.rows.width;
        uint32 codes[kQuadRows][4];
        uint32 stored[kQuadRows];  // scales as they are
#pragma unroll
        for (int step = 0; step < kQuadRows; ++step) {
            codes[step][0] = codes[step][1] = codes[step][2] = codes[step][3] = 0;
            stored[step] = 0;
            if (quad.has_input(step)) {
                const uint8* source = p.source + quad.input_row[step] * p.source_stride + quad.first;
                load_unit<kVector, uint8>(source, quad.valid, codes[step]);
            }
            // Also where the last group is short and a lane has no codes of it: that lane may be the one to store its scale.
            if (quad.input_row[step] >= 0 && has_group) {
                const char* scales = p.source_scales + quad.input_row[step] * p.source_scales_stride;
                stored[step] = load_scale(scales, group, p.source_scale_bytes);
            }
        }
        int own_scale = 0;
#pragma unroll
        for (int step = 0; step < kQuadRows; ++step) {
            int exponent = kEmptyScale;
            if (quad.input_row[step] >= 0) {
                exponent = p.source_scale_bytes == 4 ? fp32_scale_exponent(stored[step]) : static_cast<int>(stored[step]);
            }
            int target = larger(exponent, lowest);
            if (target != exponent || exponent == kNanScale) {  // rare
                const uint32 factor = exponent == kNanScale ? kNanFactor : e4m3_factor(exponent - target);
                target = exponent == kNanScale ? larger(kEmptyScale, lowest) : target;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    codes[step][i] = scale_e4m3x4(codes[step][i], factor);
                }
            }
            own_scale = step == own_row ? target : own_scale;
            if (quad.has_output(step)) {
                store_unit<kVector, uint8>(p.q + (quad.row + step) * p.q_stride + quad.first, quad.valid, codes[step]);
            }
        }
        if (own_row < quad.rows && has_group) {
            store_scale(p.scales, quad.row + own_row, group, own_scale);
        }
    }
}

}  // namespace ds_fp4
