// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// The activation between an expert's two GEMMs: BF16 gate_up [R, 2I] -> weight * activation as FP8 rows [R, I] with
// FP32 scales, and, from the same read, gate_up as it is kept for backward.
//
// Bytes of one element of I: reads 4, writes 1.03 and 1.06 (MXFP4), 2.02 (FP8) or nothing. A lane holds eight gates
// and the eight ups beside them. Instructions of one element with gate_up kept in MXFP4: 37, or 6 a byte.
#pragma once

#include "stored_rows.cuh"

namespace ds_fp4 {

struct swiglu_forward_params {
    int64 rows;
    int64 width;         // I, a multiple of 128
    int64 chunks_a_row;  // ceil(I / 512)
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

// One unit of gate_up in its saved form.
template <typename Saved>
struct SavedUnit {
    uint32 codes[Saved::kWords];
    uint32 scale;  // byte

    // Every lane of the warp must call.
    DS_FP4_DEVICE void encode(const Values8<Bf16>& x, uint32 rounding) {
        const uint32 amax = max_over_lanes<Saved::kScaleValues / kUnit>(x.amax_bits());
        if constexpr (Saved::kWords == 1) {
            scale = mxfp4_scale(amax, rounding);
            const uint32 encoded = encode_e2m1x8(x, scale);
            codes[0] = scale == kUe8m0Nan ? 0 : encoded;
        } else {
            scale = fp8_scale(amax);
            encode_e4m3x8(x, scale, codes);
            if (amax >= kInfinityBits) {
                codes[0] = codes[1] = kE4m3NanCodes;
            }
        }
    }

    DS_FP4_DEVICE void store(uint8* to, uint8* scale_to) const {
        store_words(to, codes);
        if (first_lane_of<Saved::kScaleValues>()) {
            *scale_to = static_cast<uint8>(scale);
        }
    }
};
template <>
struct SavedUnit<NoRows> {};

constexpr int kForwardSteps = 2;

template <typename Activation, typename Saved>
__global__ void __launch_bounds__(kThreads, kMinBlocks) swiglu_forward(const swiglu_forward_params p) {
    const ActivationScalars scalars = {float_of(static_cast<uint32>(p.alpha)), float_of(static_cast<uint32>(p.limit))};
    const uint32 lowest = kFieldOfByte0 + static_cast<uint32>(p.lowest_scale);
    const uint32 rounding = static_cast<uint32>(p.rounding);
    const Chunks<kForwardSteps> chunks(p.width, p.chunks_a_row);
    int64 row = chunks.first_row;
    const char* gate_up = p.gate_up + row * p.gate_up_stride + chunks.first * 2;
    const float* weights = p.weights == nullptr ? nullptr : p.weights + row;
    uint8* q = p.q + row * p.q_stride + chunks.first;
    char* scales = p.scales + row * p.scales_stride + chunks.first / kFp8Group * p.scales_group_stride;
    uint8* saved = nullptr;
    uint8* saved_scales = nullptr;
    if constexpr (!Same<Saved, NoRows>::value) {
        saved = p.saved + row * p.saved_stride + chunks.first / kUnit * Saved::kUnitBytes;
        saved_scales = p.saved_scales + row * p.saved_scales_stride + chunks.first / Saved::kScaleValues;
    }
    for (; row < p.rows; row += chunks.row_step) {
        Values8<Bf16> x[kForwardSteps][2];  // gate, up
#pragma unroll
        for (int step = 0; step < kForwardSteps; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[step][0].word[i] = x[step][1].word[i] = 0;
            }
            if (chunks.has_unit(step)) {
                load_words(gate_up + step * (kStepValues * 2), x[step][0].word);
                load_words(gate_up + p.width * 2 + step * (kStepValues * 2), x[step][1].word);
            }
        }
        const float weight = weights == nullptr ? 1.0f : __ldg(weights);
#pragma unroll
        for (int step = 0; step < kForwardSteps; ++step) {
            Floats8 h;
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                h.word[i] = bits_of(activate<Activation>(x[step][0].value(i), x[step][1].value(i), scalars) * weight);
            }
            uint32 field = max_over_lanes<kFp8Group / kUnit>(amax_of(h) + kFp8ScaleRounding);
            const float inverse = settle_activation_field(field, lowest);
            uint32 codes[2];
            encode_e4m3x8(h, inverse, codes);
            SavedUnit<Saved> gate, up;
            if constexpr (!Same<Saved, NoRows>::value) {
                gate.encode(x[step][0], rounding);
                up.encode(x[step][1], rounding);
            }
            if (chunks.has_unit(step)) {
                store_words(q + step * kStepValues, codes);
                if (first_lane_of<kFp8Group>()) {
                    char* address = scales + step * (kStepValues / kFp8Group) * p.scales_group_stride;
                    *reinterpret_cast<uint32*>(address) = ue8m0_scale_bits((field >> 23) - kFieldOfByte0);
                }
                if constexpr (!Same<Saved, NoRows>::value) {
                    uint8* to = saved + step * (kStepValues / kUnit) * Saved::kUnitBytes;
                    uint8* scale_to = saved_scales + step * (kStepValues / Saved::kScaleValues);
                    gate.store(to, scale_to);
                    up.store(to + p.width / kUnit * Saved::kUnitBytes, scale_to + p.width / Saved::kScaleValues);
                }
            }
        }
        gate_up += chunks.row_step * p.gate_up_stride;
        weights = weights == nullptr ? nullptr : weights + chunks.row_step;
        q += chunks.row_step * p.q_stride;
        scales += chunks.row_step * p.scales_stride;
        saved += chunks.row_step * p.saved_stride;
        saved_scales += chunks.row_step * p.saved_scales_stride;
    }
}

}  // namespace ds_fp4
