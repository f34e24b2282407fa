// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// The activation between an expert's two GEMMs: BF16 gate_up [R, 2I] -> weight * activation as FP8 rows [R, I] with FP32 scales,
// and, from the same read, gate_up as it is kept for backward.
//
// Bytes of one element of I: reads 4, writes 1.03 and 1.06 (MXFP4), 2.02 (FP8) or nothing. A lane holds eight gates and the
// eight ups beside them; instructions of one element, counted from SASS with gate_up kept in MXFP4: about 35, or 6 a byte.
#pragma once

#include "stored_rows.cuh"

namespace ds_fp4 {

struct swiglu_forward_params {
    int64 rows;
    int64 width;         // I, a multiple of 128
    int64 chunks_a_row;  // ceil(I / kChunkValues)
    const char* gate_up;
    int64 gate_up_stride;  // strides are in bytes; from row to row where nothing else is said
    const float* weights;  // null: 1
    int64 alpha;           // FP32 bits
    int64 limit;           // FP32 bits
    uint8* q;
    int64 q_stride;
    char* scales;
    int64 scales_stride;
    int64 scales_group_stride;  // from group to group
    int64 lowest_scale;         // byte: 1 where subnormal scales are to be avoided, else 0
    uint8* saved;
    int64 saved_stride;
    uint8* saved_scales;
    int64 saved_scales_stride;
    int64 rounding;  // ds_fp4.formats.SCALE_ROUNDINGS
};

// One unit of gate_up into its saved form. `value` counts from the row's start in gate_up. Every lane of the warp must call.
template <typename Saved>
DS_FP4_DEVICE void save_unit(const swiglu_forward_params& p, int64 row, int64 value, bool exists, const Values8<Bf16>& x) {
    const int lane = threadIdx.x % kLanes;
    if constexpr (Saved::kWords == 1) {
        const uint32 amax = max_over_lanes<kMxfp4Block / kUnit>(x.amax_bits());
        const uint32 scale = mxfp4_scale(amax, static_cast<uint32>(p.rounding));
        const uint32 encoded = encode_e2m1x8(x, scale);
        if (exists) {
            *reinterpret_cast<uint32*>(p.saved + row * p.saved_stride + value / 2) = scale == kUe8m0Nan ? 0 : encoded;
            if (lane % (kMxfp4Block / kUnit) == 0) {
                p.saved_scales[row * p.saved_scales_stride + value / kMxfp4Block] = static_cast<uint8>(scale);
            }
        }
    } else {
        const uint32 amax = max_over_lanes<kFp8Group / kUnit>(x.amax_bits());
        const uint32 scale = fp8_scale(amax);
        uint32 codes[2];
        encode_e4m3x8(x, scale, codes);
        if (amax >= kInfinityBits) {
            codes[0] = codes[1] = kE4m3NanCodes;
        }
        if (exists) {
            store_words(p.saved + row * p.saved_stride + value, codes);
            if (lane % (kFp8Group / kUnit) == 0) {
                p.saved_scales[row * p.saved_scales_stride + value / kFp8Group] = static_cast<uint8>(scale);
            }
        }
    }
}

template <typename Activation, typename Saved>
__global__ void __launch_bounds__(kThreads, kMinBlocks) swiglu_forward(const swiglu_forward_params p) {
    const ActivationScalars scalars = {float_of(static_cast<uint32>(p.alpha)), float_of(static_cast<uint32>(p.limit))};
    const uint32 lowest = static_cast<uint32>(p.lowest_scale);
    for (Chunk chunk(p.width, p.chunks_a_row); chunk.row < p.rows; chunk.advance()) {
        const char* gate = p.gate_up + chunk.row * p.gate_up_stride + chunk.first * 2;
        Values8<Bf16> x[kChunkSteps][2];
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[step][0].word[i] = x[step][1].word[i] = 0;
            }
            if (chunk.has_unit(step)) {
                load_words(gate + step * (kStepValues * 2), x[step][0].word);
                load_words(gate + p.width * 2 + step * (kStepValues * 2), x[step][1].word);
            }
        }
        const float weight = p.weights == nullptr ? 1.0f : __ldg(p.weights + chunk.row);
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step) {
            const int64 value = chunk.first + step * kStepValues;
            const bool exists = chunk.has_unit(step);
            Floats8 h;
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                h.word[i] = bits_of(activate<Activation>(x[step][0].value(i), x[step][1].value(i), scalars) * weight);
            }
            const uint32 field = max_over_lanes<kFp8Group / kUnit>(fp8_field(amax_of(h)));
            const uint32 scale = fp8_scale_of_field(field, lowest);
            uint32 codes[2];
            encode_e4m3x8_or_nan(h, field, scale, codes);
            if (exists) {
                store_words(p.q + chunk.row * p.q_stride + value, codes);
                if (threadIdx.x % (kFp8Group / kUnit) == 0) {
                    char* address = p.scales + chunk.row * p.scales_stride + value / kFp8Group * p.scales_group_stride;
                    *reinterpret_cast<uint32*>(address) = ue8m0_scale_bits(scale);
                }
            }
            if constexpr (!Same<Saved, NoRows>::value) {
                save_unit<Saved>(p, chunk.row, value, exists, x[step][0]);
                save_unit<Saved>(p, chunk.row, p.width + value, exists, x[step][1]);
            }
        }
    }
}

}  // namespace ds_fp4
