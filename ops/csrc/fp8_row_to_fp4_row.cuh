// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// FP8 rows to MXFP4 rows, on E4M3 codes. Reads K codes and ceil(K/128) scales a row, writes K/2 bytes of codes and K/32 scale
// bytes.
#pragma once

#include "row_quads.cuh"
#include "shifted_codes.cuh"

namespace ds_fp4 {

struct fp8_row_to_fp4_row_params {
    Rows rows;
    const uint8* q;
    int64 q_stride;  // strides are in bytes, from row to row
    const char* group_scales;
    int64 group_scales_stride;
    int64 group_scale_bytes;  // 4: FP32, 1: UE8M0
    uint8* packed;
    int64 packed_stride;
    uint8* scales;
    int64 scales_stride;
    int64 rounding;  // ds_fp4.formats.SCALE_ROUNDINGS
};

template <bool kVector>
__global__ void __launch_bounds__(kThreads, kMinBlocks) fp8_row_to_fp4_row(const fp8_row_to_fp4_row_params p) {
    const uint32 rounding = static_cast<uint32>(p.rounding);
    const int own_row = threadIdx.x % kQuadBlockLanes;
    for (Quad quad(p.rows); quad.inside(p.rows); quad.advance(p.rows)) {
        uint32 codes[kQuadRows][4];
        uint32 stored[kQuadRows];  // scales as they are
#pragma unroll
        for (int step = 0; step < kQuadRows; ++step) {
            codes[step][0] = codes[step][1] = codes[step][2] = codes[step][3] = 0;
            stored[step] = 0;
            if (quad.has_input(step)) {
                load_unit<kVector, uint8>(p.q + quad.input_row[step] * p.q_stride + quad.first, quad.valid, codes[step]);
                const char* scales = p.group_scales + quad.input_row[step] * p.group_scales_stride;
                stored[step] = load_scale(scales, quad.first / kFp8Group, p.group_scale_bytes);
            }
        }
        uint32 own_scale[kQuadRows / kQuadBlockLanes];
#pragma unroll
        for (int step = 0; step < kQuadRows; ++step) {
            const int exponent = p.group_scale_bytes == 4 ? fp32_scale_exponent(stored[step]) : static_cast<int>(stored[step]);
            const uint32 amax = max_over_lanes<kQuadBlockLanes>(e4m3_amax(codes[step]));
            const bool nan = amax == 0x7F || exponent == kNanScale;
            uint32 scale = fp8_to_fp4_scale(amax, exponent, rounding);
            const int shift = exponent - static_cast<int>(scale);
            const uint32 first = e4m3x8_to_e2m1(codes[step][0], codes[step][1], shift);
            const uint32 second = e4m3x8_to_e2m1(codes[step][2], codes[step][3], shift);
            scale = nan ? kUe8m0Nan : amax == 0 ? 0 : scale;
            const uint32 packed[2] = {nan ? 0 : first, nan ? 0 : second};
            if (quad.has_output(step)) {
                uint8* address = p.packed + (quad.row + step) * p.packed_stride + quad.first / 2;
                store_unit<kVector, uint8>(address, kQuadUnit / 2, packed);
            }
            if (step % kQuadBlockLanes == 0 || step % kQuadBlockLanes == own_row) {
                own_scale[step / kQuadBlockLanes] = scale;
            }
        }
        // Of a block's two lanes one stores the scales of rows 0 and 2, the other of rows 1 and 3.
#pragma unroll
        for (int i = 0; i < kQuadRows / kQuadBlockLanes; ++i) {
            const int step = i * kQuadBlockLanes + own_row;
            if (quad.valid > 0 && step < quad.rows) {
                p.scales[(quad.row + step) * p.scales_stride + quad.first / kMxfp4Block] = static_cast<uint8>(own_scale[i]);
            }
        }
    }
}

}  // namespace ds_fp4
