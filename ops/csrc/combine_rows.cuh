// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// Sums of rows by a list: out[t] = sum over j from offsets[t] to offsets[t + 1] - 1 of weights[j] * rows[indices[j]],
// in FP32 and in that order, from BF16 rows or MXFP4 or FP8 records, written as BF16 or quantized straight into
// records (MXFP4 ones from sums rounded to BF16). An index of -1 adds nothing; an empty list gives a zero row.
//
// A warp takes a chunk of one output row. It reads up to 32 list entries at once, one a lane, and hands them around;
// two input rows are in flight at a time.
#pragma once

#include "stored_rows.cuh"

namespace ds_fp4 {

struct combine_rows_params {
    int64 rows;          // output rows
    int64 width;         // values a row
    int64 chunks_a_row;  // ceil(width / kChunkValues)
    int64 input_rows;    // rows that `indices` may name
    const int* offsets;  // [rows + 1]; null: every list has `list_entries`
    int64 list_entries;
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
    uint32 scale;  // as it is stored
};

// This lane's units of an input row; zeros for row -1 and past the row's end. `x` and `scales` point at row 0.
template <typename In, bool kVector>
DS_FP4_DEVICE void load_combine_units(const combine_rows_params& p, const char* x, const char* scales, int row,
                                      const Chunks& chunks, CombineUnit<In> (&unit)[kChunkSteps]) {
    // Row strides fit 32 bits, and so one multiplication.
    const uint64 offset = static_cast<uint64>(static_cast<uint32>(row)) * static_cast<uint32>(p.x_stride);
    const uint64 scales_offset =
        static_cast<uint64>(static_cast<uint32>(row)) * static_cast<uint32>(p.x_scales_stride);
#pragma unroll
    for (int step = 0; step < kChunkSteps; ++step) {
#pragma unroll
        for (int i = 0; i < In::kWords; ++i) {
            unit[step].word[i] = 0;
        }
        unit[step].scale = 1;
        if (row >= 0 && chunks.has_unit(step)) {
            const int elements = In::kUnitBytes == 4 ? kUnit / 2 : chunks.valid(step);
            load_unit<kVector, typename In::Element>(x + offset + step * (kStepValues / kUnit) * In::kUnitBytes,
                                                     elements, unit[step].word);
            if constexpr (In::kScaled) {
                const char* address = scales + scales_offset;
                constexpr int kStepScales = kStepValues / In::kScaleValues;
                if (In::kUnitBytes == 4 || p.x_scale_bytes == 1) {
                    unit[step].scale = __ldg(reinterpret_cast<const uint8*>(address) + step * kStepScales);
                } else {
                    unit[step].scale = __ldg(reinterpret_cast<const uint32*>(address) + step * kStepScales);
                }
            }
        }
    }
}

// A sum as it is written.
template <typename Out>
struct SumUnit {
    uint32 word[Out::kWords];
    uint32 scale;  // byte

    // Every lane of the warp must call.
    DS_FP4_DEVICE void encode(const Floats8& sum, uint32 rounding) {
        if constexpr (Out::kWords == 2) {
            uint32 field = max_over_lanes<kFp8Group / kUnit>(fp8_field(amax_of(sum)));
            const float inverse = settle_fp8_field(field, kFieldOfByte0);
            encode_e4m3x8(sum, inverse, word);
            scale = field - kFieldOfByte0;
        } else {
            Values8<Bf16> rounded;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                rounded.word[i] = pack_bf16x2(float_at(sum, 2 * i), float_at(sum, 2 * i + 1));
            }
            if constexpr (Out::kWords == 4) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    word[i] = rounded.word[i];
                }
            } else {
                scale = mxfp4_scale(max_over_lanes<kMxfp4Block / kUnit>(rounded.amax_bits()), rounding);
                const uint32 encoded = encode_e2m1x8(rounded, scale);
                word[0] = scale == kUe8m0Nan ? 0 : encoded;
            }
        }
    }
};

// Blocks on a multiprocessor, by what the registers allow.
template <typename In, bool kVector>
constexpr int kCombineBlocks = kVector && In::kWords != 2 ? kMinBlocks : kMinBlocks - 1;

template <typename In, typename Out, bool kVector>
__global__ void __launch_bounds__(kThreads, (kCombineBlocks<In, kVector>)) combine_rows(const combine_rows_params p) {
    const int lane = threadIdx.x % kLanes;
    const uint32 rounding = static_cast<uint32>(p.rounding);
    const Chunks chunks(p.width, p.chunks_a_row);
    int64 row = chunks.first_row;
    const int64 first_unit = chunks.first / kUnit;
    const char* x = p.x + first_unit * In::kUnitBytes;
    const char* x_scales = p.x_scales;
    if constexpr (In::kScaled) {
        x_scales += chunks.first / In::kScaleValues * (In::kUnitBytes == 4 ? 1 : p.x_scale_bytes);
    }
    char* out = p.out + row * p.out_stride + first_unit * Out::kUnitBytes;
    char* out_scales = p.out_scales + row * p.out_scales_stride;
    if constexpr (Out::kScaled) {
        out_scales += chunks.first / Out::kScaleValues * (Out::kUnitBytes == 4 ? 1 : p.out_scale_bytes);
    }
    for (; row < p.rows; row += chunks.row_step) {
        Floats8 sum[kChunkSteps];
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step) {
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                sum[step].word[i] = 0;
            }
        }
        int64 first = row * p.list_entries, end = first + p.list_entries;
        if (p.offsets != nullptr) {
            first = __ldg(p.offsets + row);
            end = __ldg(p.offsets + row + 1);
        }
        for (; first < end; first += kLanes) {
            int entries = static_cast<int>(min(end - first, static_cast<int64>(kLanes)));
            int own_row = -1;
            float own_weight = 0.0f;
            if (lane < entries) {
                own_row = __ldg(p.indices + first + lane);
                if (own_row >= p.input_rows) {
                    __trap();  // reading there would be worse than stopping
                }
                if (p.weights != nullptr && own_row >= 0) {
                    own_weight = __ldg(p.weights + first + lane);
                }
            }
            // A list may end in entries of -1.
            entries = kLanes - __clz(static_cast<int>(__ballot_sync(kAllLanes, own_row >= 0)));
#pragma unroll 1
            for (int entry = 0; entry < entries; entry += kRowsInFlight) {
                CombineUnit<In> unit[kRowsInFlight][kChunkSteps];
#pragma unroll
                for (int i = 0; i < kRowsInFlight; ++i) {
                    // Past the list's end a lane holds -1; past the warp's end there is no lane.
                    static_assert(kLanes % kRowsInFlight == 0, "entries come in whole batches");
                    const int from = __shfl_sync(kAllLanes, own_row, entry + i);
                    load_combine_units<In, kVector>(p, x, x_scales, from, chunks, unit[i]);
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
            SumUnit<Out> unit;
            unit.encode(sum[step], rounding);
            if (chunks.has_unit(step)) {
                const int elements = Out::kUnitBytes == 4 ? kUnit / 2 : chunks.valid(step);
                char* to = out + step * (kStepValues / kUnit) * Out::kUnitBytes;
                store_unit<kVector, typename Out::Element>(to, elements, unit.word);
                if constexpr (Out::kScaled) {
                    if (first_lane_of<Out::kScaleValues>()) {
                        constexpr int kStepScales = kStepValues / Out::kScaleValues;
                        if (Out::kUnitBytes == 4 || p.out_scale_bytes == 1) {
                            out_scales[step * kStepScales] = static_cast<char>(unit.scale);
                        } else {
                            reinterpret_cast<uint32*>(out_scales)[step * kStepScales] = ue8m0_scale_bits(unit.scale);
                        }
                    }
                }
            }
        }
        out += chunks.row_step * p.out_stride;
        out_scales += chunks.row_step * p.out_scales_stride;
    }
}

}  // namespace ds_fp4
