// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// FP8 rows, such as records from the wire, to FP8 rows as GEMMs read them: codes are copied, scales change their type
// and place. Reads and writes K codes and ceil(K/128) scales a row.
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
    uint8* q;
    int64 q_stride;
    Scales scales;
    int64 stripe;  // tiles of neighboring columns that are converted in all rows before the next; more: whole rows
};

// kFp32: whether the rows' scales are FP32; else UE8M0.
template <bool kFp32, bool kVector>
__global__ void __launch_bounds__(kThreads, kEightRowBlocks) fp8_row_to_fp8_row(const fp8_row_to_fp8_row_params p) {
    using Place = StripedQuad<8, 16>;
    const int own_row = threadIdx.x % Place::kGroupLanes;
    const int lowest = static_cast<int>(p.scales.lowest);
    for (Place quad(p.rows, p.stripe); quad.inside(p.rows); quad.advance(p.rows)) {
        const int group = static_cast<int>(quad.first / kFp8Group);
        const bool has_group = group * kFp8Group < static_cast<int>(p.rows.width);
        uint32 codes[Place::kRows][Place::kValues / 4];
        uint32 stored[Place::kRows];  // scales as they are
        const char* scales = p.source_scales + group * (kFp32 ? 4 : 1);
#pragma unroll
        for (int step = 0; step < Place::kRows; ++step) {
#pragma unroll
            for (int i = 0; i < Place::kValues / 4; ++i) {
                codes[step][i] = 0;
            }
            stored[step] = kFp32 ? fp32_power_bits(kEmptyScale) : kEmptyScale;
            if (quad.has_input(step)) {
                const uint8* source = row_of(p.source + quad.first, quad.input_row[step], p.source_stride);
                load_unit<kVector, uint8>(source, quad.valid, codes[step]);
            }
            // Also where the last group is short and a lane has no codes of it: that lane may be the one to store its
            // scale.
            if (quad.input_row[step] >= 0 && has_group) {
                stored[step] = load_scale<kFp32>(row_of(scales, quad.input_row[step], p.source_scales_stride));
            }
        }
        int own_scale = 0;
#pragma unroll
        for (int step = 0; step < Place::kRows; ++step) {
            const int exponent = scale_exponent<kFp32>(stored[step]);
            int target = larger(exponent, lowest);
            if (target != exponent || exponent == kNanScale) {  // rare
                const uint32 factor = exponent == kNanScale ? kNanFactor : e4m3_factor(exponent - target);
                target = exponent == kNanScale ? larger(kEmptyScale, lowest) : target;
#pragma unroll
                for (int i = 0; i < Place::kValues / 4; ++i) {
                    codes[step][i] = scale_e4m3x4(codes[step][i], factor);
                }
            }
            own_scale = step == own_row ? target : own_scale;
            if (quad.has_output(step)) {
                store_unit<kVector, uint8>(row_of(p.q + quad.first, quad.row + step, p.q_stride), quad.valid,
                                           codes[step]);
            }
        }
        if (own_row < quad.rows && has_group) {
            store_scale(p.scales, quad.row + own_row, group, own_scale);
        }
    }
}

}  // namespace ds_fp4
