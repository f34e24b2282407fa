// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// MXFP4 rows to FP8 rows, bitwise. Reads K/2 bytes of codes and K/32 scale bytes a row, writes K codes and ceil(K/128)
// scales.
#pragma once

#include "row_quads.cuh"
#include "shifted_codes.cuh"

namespace ds_fp4 {

struct fp4_row_to_fp8_row_params {
    Rows rows;
    const uint8* packed;
    int64 packed_stride;  // strides are in bytes, from row to row
    const uint8* block_scales;
    int64 block_scales_stride;
    uint8* q;
    int64 q_stride;
    Scales scales;
};

template <bool kVector>
__global__ void __launch_bounds__(kThreads, kEightRowBlocks) fp4_row_to_fp8_row(const fp4_row_to_fp8_row_params p) {
    using Place = Quad<8, 16>;
    const int own_row = threadIdx.x % Place::kGroupLanes;
    const int lowest = static_cast<int>(p.scales.lowest);
    for (Place quad(p.rows); quad.inside(p.rows); quad.advance(p.rows)) {
        uint32 codes[Place::kRows][Place::kValues / 8];
        uint32 scale[Place::kRows];
#pragma unroll
        for (int step = 0; step < Place::kRows; ++step) {
#pragma unroll
            for (int i = 0; i < Place::kValues / 8; ++i) {
                codes[step][i] = 0;
            }
            scale[step] = kUe8m0Nan;  // takes no part in the maximum
            if (quad.has_input(step)) {
                const uint8* packed = row_of(p.packed + quad.first / 2, quad.input_row[step], p.packed_stride);
                load_unit<kVector, uint8, true>(packed, Place::kValues / 2, codes[step]);
                const uint8* scales =
                    row_of(p.block_scales + quad.first / kMxfp4Block, quad.input_row[step], p.block_scales_stride);
                scale[step] = load_one<true>(scales);
            }
        }
        __syncwarp();  // all loads are on their way before the first row's scale is waited for
        int own_scale = 0;
#pragma unroll
        for (int step = 0; step < Place::kRows; ++step) {
            // Scale bytes plus one, so that 0xFF, left out, becomes the smallest.
            uint32 largest = (scale[step] + 1) & 0xFF;
#pragma unroll
            for (int distance = Place::kBlockLanes; distance < Place::kGroupLanes; distance *= 2) {
                largest = larger(largest, __shfl_xor_sync(kAllLanes, largest, distance));
            }
            const int wanted = largest == 0 ? kEmptyScale : static_cast<int>(largest) - 1 - kFp4ToFp8Shift;
            const int exponent = larger(wanted, lowest);
            own_scale = step == own_row ? exponent : own_scale;
            E4m3Table table = e4m3_table(static_cast<int>(scale[step]) - exponent);
            if (scale[step] == kUe8m0Nan && quad.has_input(step)) {
                table = e4m3_nan_table();
            }
            uint32 out[Place::kValues / 4];
#pragma unroll
            for (int i = 0; i < Place::kValues / 8; ++i) {
                e2m1x8_to_e4m3(codes[step][i], table, out[2 * i], out[2 * i + 1]);
            }
            if (quad.has_output(step)) {
                store_unit<kVector, uint8>(row_of(p.q + quad.first, quad.row + step, p.q_stride), quad.valid, out);
            }
        }
        const int group = static_cast<int>(quad.first / kFp8Group);
        if (own_row < quad.rows && group * kFp8Group < static_cast<int>(p.rows.width)) {
            store_scale(p.scales, quad.row + own_row, group, own_scale);
        }
    }
}

}  // namespace ds_fp4
