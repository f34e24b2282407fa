// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// Sums of rows by a list: out[t] = sum over j from offsets[t] to offsets[t + 1] - 1 of weights[j] * rows[indices[j]], in FP32 and
// in that order, from BF16 rows or MXFP4 or FP8 records, written as BF16 or quantized straight into records. An index of -1 adds
// nothing; an empty list gives a zero row.
//
// A warp takes a chunk of one output row. It reads up to 32 list entries at once, one a lane, and hands them around; two input
// rows are in flight at a time.
#pragma once

#include "stored_rows.cuh"

namespace ds_fp4 {

struct combine_rows_params {
    int64 rows;          // output rows
    int64 width;         // values a row
    int64 chunks_a_row;  // ceil(width / kChunkValues)
    int64 input_rows;    // rows that `indices` may name
    const int* offsets;  // [rows + 1]
    const int* indices;
    const float* weights;  // one a list entry; null: 1
    const char* x;
    int64 x_stride;  // strides are in bytes, from row to row
    const char* x_scales;
    int64 x_scales_stride;
    int64 x_scale_bytes;  // 4: FP32, 1: UE8M0
    char* out;
    int64 out_stride;
    char* out_scales;
    int64 out_scales_stride;
    int64 out_scale_bytes;  // of FP8 rows; 4: FP32, 1: UE8M0
    int64 rounding;         // of MXFP4 rows; ds_fp4.formats.SCALE_ROUNDINGS
};

constexpr int kRowsInFlight = 2;

template <typename In>
struct CombineUnit {
    uint32 word[In::kWords];
    uint32 scale;  // FP32 bits
};

template <typename In, bool kVector>
DS_FP4_DEVICE void load_combine_units(const combine_rows_params& p, int64 row, const Chunk& chunk,
                                      CombineUnit<In> (&unit)[kChunkSteps]) {
    const char* address = p.x + row * p.x_stride + chunk.first / kUnit * In::kUnitBytes;
    const char* scales = p.x_scales + row * p.x_scales_stride;
#pragma unroll
    for (int step = 0; step < kChunkSteps; ++step) {
#pragma unroll
        for (int i = 0; i < In::kWords; ++i) {
            unit[step].word[i] = 0;
        }
        unit[step].scale = 0;
        if (row >= 0 && chunk.has_unit(step)) {
            const int elements = In::kUnitBytes == 4 ? kUnit / 2 : chunk.valid(step);
            load_unit<kVector, typename In::Element>(address + step * (kStepValues / kUnit) * In::kUnitBytes, elements,
                                                     unit[step].word);
            if constexpr (In::kScaled) {
                const int64 group = (chunk.first + step * kStepValues) / In::kScaleValues;
                if (In::kUnitBytes == 4 || p.x_scale_bytes == 1) {
                    unit[step].scale = __ldg(reinterpret_cast<const uint8*>(scales) + group);
                } else {
                    unit[step].scale = __ldg(reinterpret_cast<const uint32*>(scales) + group);
                }
            }
        }
    }
}

template <typename Out, bool kVector>
DS_FP4_DEVICE void store_sum(const combine_rows_params& p, const Chunk& chunk, int step, const Floats8& sum) {
    const int64 value = chunk.first + step * kStepValues;
    char* out = p.out + chunk.row * p.out_stride + value / kUnit * Out::kUnitBytes;
    char* scales = p.out_scales + chunk.row * p.out_scales_stride;
    const bool exists = chunk.has_unit(step);
    uint32 word[Out::kWords];
    if constexpr (Out::kWords == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            word[i] = pack_bf16x2(float_at(sum, 2 * i), float_at(sum, 2 * i + 1));
        }
    } else if constexpr (Out::kWords == 1) {
        constexpr int kBlockLanes = kMxfp4Block / kUnit;
        const uint32 amax = max_over_lanes<kBlockLanes>(amax_of(sum));
        const uint32 scale = mxfp4_scale(amax, static_cast<uint32>(p.rounding));
        const uint32 encoded = encode_e2m1x8(sum, scale);
        word[0] = scale == kUe8m0Nan ? 0 : encoded;
        if (exists && threadIdx.x % kBlockLanes == 0) {
            scales[value / kMxfp4Block] = static_cast<char>(scale);
        }
    } else {
        constexpr int kGroupLanes = kFp8Group / kUnit;
        const uint32 field = max_over_lanes<kGroupLanes>(fp8_field(amax_of(sum)));
        const uint32 scale = fp8_scale_of_field(field, 0);
        encode_e4m3x8_or_nan(sum, field, scale, word);
        if (exists && threadIdx.x % kGroupLanes == 0) {
            if (p.out_scale_bytes == 4) {
                reinterpret_cast<uint32*>(scales)[value / kFp8Group] = ue8m0_scale_bits(scale);
            } else {
                scales[value / kFp8Group] = static_cast<char>(scale);
            }
        }
    }
    if (exists) {
        const int elements = Out::kUnitBytes == 4 ? kUnit / 2 : chunk.valid(step);
        store_unit<kVector, typename Out::Element>(out, elements, word);
    }
}

template <typename In, typename Out, bool kVector>
__global__ void __launch_bounds__(kThreads, kVector ? kMinBlocks : kMinBlocks - 1) combine_rows(const combine_rows_params p) {
    const int lane = threadIdx.x % kLanes;
    for (Chunk chunk(p.width, p.chunks_a_row); chunk.row < p.rows; chunk.advance()) {
        Floats8 sum[kChunkSteps];
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step) {
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                sum[step].word[i] = 0;
            }
        }
        const int end = __ldg(p.offsets + chunk.row + 1);
        for (int first = __ldg(p.offsets + chunk.row); first < end; first += kLanes) {
            const int entries = min(end - first, kLanes);
            int own_row = -1;
            float own_weight = 1.0f;
            if (lane < entries) {
                own_row = __ldg(p.indices + first + lane);
                if (own_row >= p.input_rows) {
                    __trap();  // reading there would be worse than stopping
                }
                if (p.weights != nullptr) {
                    own_weight = own_row < 0 ? 0.0f : __ldg(p.weights + first + lane);
                }
            }
            for (int entry = 0; entry < entries; entry += kRowsInFlight) {
                CombineUnit<In> unit[kRowsInFlight][kChunkSteps];
#pragma unroll
                for (int i = 0; i < kRowsInFlight; ++i) {
                    // Past the list's end a lane holds -1; past the warp's end there is no lane.
                    static_assert(kLanes % kRowsInFlight == 0, "entries come in whole batches");
                    load_combine_units<In, kVector>(p, __shfl_sync(kAllLanes, own_row, entry + i), chunk, unit[i]);
                }
#pragma unroll
                for (int i = 0; i < kRowsInFlight; ++i) {
                    const float weight = __shfl_sync(kAllLanes, own_weight, entry + i);
#pragma unroll
                    for (int step = 0; step < kChunkSteps; ++step) {
                        const uint32 stored = unit[i][step].scale;
                        uint32 scale = 0;
                        if constexpr (In::kScaled) {
                            scale = In::kUnitBytes == 4 || p.x_scale_bytes == 1 ? ue8m0_scale_bits(stored)
                                                                                 : fp32_scale_bits(stored);
                        }
                        if (p.weights == nullptr) {
                            In::add(unit[i][step].word, scale, sum[step]);
                        } else {
                            const Floats8 values = In::decode(unit[i][step].word, scale);
#pragma unroll
                            for (int j = 0; j < kUnit; ++j) {
                                // Two roundings, as in the reference.
                                const float product = multiply(float_at(values, j), weight);
                                sum[step].word[j] = bits_of(float_at(sum[step], j) + product);
                            }
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step) {
            store_sum<Out, kVector>(p, chunk, step, sum[step]);
        }
    }
}

}  // namespace ds_fp4
