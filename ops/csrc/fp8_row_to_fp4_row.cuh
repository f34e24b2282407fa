// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// FP8 rows to MXFP4 rows, on E4M3 codes. Reads K codes and ceil(K/128) scales a row, writes K/2 bytes of codes and
// K/32 scale bytes.
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
    uint8* packed;
    int64 packed_stride;
    uint8* scales;
    int64 scales_stride;
    int64 rounding;  // ds_fp4.formats.SCALE_ROUNDINGS
};

// kFp32: whether the rows' scales are FP32; else UE8M0. kValues: a lane takes of a row, 16 or, of rows that are whole
// tiles of so many, 32; then more bytes of a row are on their way at once.
template <bool kFp32, int kValues, bool kVector>
__global__ void __launch_bounds__(kThreads, kMinBlocks) fp8_row_to_fp4_row(const fp8_row_to_fp4_row_params p) {
    using Place = Quad<64 / kValues, kValues>;
    const uint32 rounding = static_cast<uint32>(p.rounding);
    const int own_row = threadIdx.x % Place::kBlockLanes;
    for (Place quad(p.rows); quad.inside(p.rows); quad.advance(p.rows)) {
        uint32 codes[Place::kRows][Place::kValues / 4];
        uint32 stored[Place::kRows];  // scales as they are
        const char* scales = p.group_scales + quad.first / kFp8Group * (kFp32 ? 4 : 1);
#pragma unroll
        for (int step = 0; step < Place::kRows; ++step) {
#pragma unroll
            for (int i = 0; i < Place::kValues / 4; ++i) {
                codes[step][i] = 0;
            }
            stored[step] = 0;
            if (quad.has_input(step)) {
                load_unit<kVector, uint8>(row_of(p.q + quad.first, quad.input_row[step], p.q_stride), quad.valid,
                                          codes[step]);
                stored[step] = load_scale<kFp32>(row_of(scales, quad.input_row[step], p.group_scales_stride));
            }
        }
        uint32 own_scale[Place::kRows / Place::kBlockLanes];
#pragma unroll
        for (int step = 0; step < Place::kRows; ++step) {
            const int exponent = scale_exponent<kFp32>(stored[step]);
            const uint32 amax = max_over_lanes<Place::kBlockLanes>(e4m3_amax(codes[step]));
            const bool nan = amax == 0x7F || exponent == kNanScale;
            const int wanted = fp8_to_fp4_exponent(amax, exponent, rounding);
            const int bounded = smaller(larger(wanted, 0), kHighestFp4Scale), shift = exponent - bounded;
            uint32 packed[Place::kValues / 8];
            // Rounding down lets values reach 8; else only a scale that is too large for MXFP4 lets them pass 7.
            if (rounding == 0 || wanted > kHighestFp4Scale) {
#pragma unroll
                for (int i = 0; i < Place::kValues / 8; ++i) {
                    packed[i] = e4m3x8_to_e2m1<true>(codes[step][2 * i], codes[step][2 * i + 1], shift);
                }
            } else {
#pragma unroll
                for (int i = 0; i < Place::kValues / 8; ++i) {
                    packed[i] = e4m3x8_to_e2m1<false>(codes[step][2 * i], codes[step][2 * i + 1], shift);
                }
            }
#pragma unroll
            for (int i = 0; i < Place::kValues / 8; ++i) {
                packed[i] = nan ? 0 : packed[i];
            }
            const uint32 scale = nan ? kUe8m0Nan : amax == 0 ? 0 : static_cast<uint32>(bounded);
            if (quad.has_output(step)) {
                uint8* address = row_of(p.packed + quad.first / 2, quad.row + step, p.packed_stride);
                store_unit<kVector, uint8>(address, Place::kValues / 2, packed);
            }
            if (step % Place::kBlockLanes == 0 || step % Place::kBlockLanes == own_row) {
                own_scale[step / Place::kBlockLanes] = scale;
            }
        }
        // With four rows, of a block's two lanes one stores the scales of rows 0 and 2, the other of rows 1 and 3.
#pragma unroll
        for (int i = 0; i < Place::kRows / Place::kBlockLanes; ++i) {
            const int step = i * Place::kBlockLanes + own_row;
            if (quad.valid > 0 && step < quad.rows) {
                *row_of(p.scales + quad.first / kMxfp4Block, quad.row + step, p.scales_stride) =
                    static_cast<uint8>(own_scale[i]);
            }
        }
    }
}

}  // namespace ds_fp4
