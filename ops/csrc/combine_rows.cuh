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
    int64 chunks_a_row;  // ceil(width / (256 * kCombineSteps))
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

// Units of a chunk that a lane takes. Of MXFP4 rows a unit is 4 bytes: a lane asks for more of them at a time, where
// the registers hold what they become.
template <typename In, typename Out, bool kWeighted, bool kVector>
constexpr int kCombineSteps =
    Same<In, Mxfp4Rows>::value && Same<Out, Bf16Rows>::value && !kWeighted && kVector ? 4 : 2;

template <typename In>
struct CombineUnit {
    uint32 word[In::kWords];
    uint32 scale;  // as it is stored
};

// Where this lane reads of an input row: its first address in row 0, and how far on its unit of each step is.
template <typename In, int kChunkSteps, bool kVector>
struct CombineReader {
    // Whether loads ask if their unit exists. Else another unit stands in past the row's end, for nothing.
    static constexpr bool kAsks = !kVector || kChunkSteps > 2;

    const char* x;
    const char* scales;
    uint32 stride, scales_stride;  // row strides fit 32 bits, and so one multiplication
    int at_step[kChunkSteps], scale_at_step[kChunkSteps];
    bool fp32_scales;

    DS_FP4_DEVICE CombineReader(const combine_rows_params& p, const Chunks<kChunkSteps>& chunks) {
        stride = static_cast<uint32>(p.x_stride);
        scales_stride = static_cast<uint32>(p.x_scales_stride);
        fp32_scales = In::kUnitBytes != 4 && p.x_scale_bytes == 4;
        // Also with kAsks, where the choice saves ptxas four registers.
        const int64 first = !kVector || chunks.has_unit(0) ? chunks.first : 0;
        x = p.x + first / kUnit * In::kUnitBytes;
        scales = p.x_scales;
        if constexpr (In::kScaled) {
            scales += first / In::kScaleValues * (fp32_scales ? 4 : 1);
        }
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step) {
            const int there = kAsks || chunks.has_unit(step) ? step : 0;
            at_step[step] = there * (kStepValues / kUnit * In::kUnitBytes);
            scale_at_step[step] = 0;
            if constexpr (In::kScaled) {
                scale_at_step[step] = there * (kStepValues / In::kScaleValues) * (fp32_scales ? 4 : 1);
            }
        }
    }

    // FP32 bits of a scale, if it is a normal number.
    DS_FP4_DEVICE uint32 plain_scale(uint32 stored) const {
        return fp32_scales ? stored & kInfinityBits : stored << 23;
    }

    // Zeros for row -1.
    DS_FP4_DEVICE void load(int row, const Chunks<kChunkSteps>& chunks, CombineUnit<In> (&unit)[kChunkSteps]) const {
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step) {
#pragma unroll
            for (int i = 0; i < In::kWords; ++i) {
                unit[step].word[i] = 0;
            }
            unit[step].scale = fp32_scales ? 0x3F800000u : 127;  // 1
        }
        if (row < 0) {
            return;
        }
        const char* from = x + static_cast<uint64>(static_cast<uint32>(row)) * stride;
        const char* scale = scales + static_cast<uint64>(static_cast<uint32>(row)) * scales_stride;
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step) {
            if (kAsks && !chunks.has_unit(step)) {
                continue;
            }
            const int elements = In::kUnitBytes == 4 ? kUnit / 2 : chunks.valid(step);
            load_unit<kVector, typename In::Element>(from + at_step[step], elements, unit[step].word);
            if constexpr (In::kScaled) {
                const char* at = scale + scale_at_step[step];
                unit[step].scale = fp32_scales ? __ldg(reinterpret_cast<const uint32*>(at))
                                               : __ldg(reinterpret_cast<const uint8*>(at));
            }
        }
    }
};

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
constexpr int kCombineBlocks = kVector && !In::kScaled ? kMinBlocks : kMinBlocks - 1;

template <typename In, typename Out, bool kWeighted, bool kVector>
__global__ void __launch_bounds__(kThreads, (kCombineBlocks<In, kVector>)) combine_rows(const combine_rows_params p) {
    const int lane = threadIdx.x % kLanes;
    const uint32 rounding = static_cast<uint32>(p.rounding);
    constexpr int kChunkSteps = kCombineSteps<In, Out, kWeighted, kVector>;
    const Chunks<kChunkSteps> chunks(p.width, p.chunks_a_row);
    const CombineReader<In, kChunkSteps, kVector> reader(p, chunks);
    int64 row = chunks.first_row;
    const uint32 out_unit = static_cast<uint32>(chunks.first / kUnit);
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
        int64 first = row * p.list_entries;
        int left = static_cast<int>(p.list_entries);
        if (p.offsets != nullptr) {
            first = __ldg(p.offsets + row);
            left = __ldg(p.offsets + row + 1) - static_cast<int>(first);
        }
        for (; left > 0; first += kLanes, left -= kLanes) {
            int own_row = -1;
            float own_weight = 0.0f;
            if (lane < left) {
                own_row = __ldg(p.indices + first + lane);
                if (own_row >= p.input_rows) {
                    __trap();  // reading there would be worse than stopping
                }
                if (kWeighted && own_row >= 0) {
                    own_weight = __ldg(p.weights + first + lane);
                }
            }
            // A list may end in entries of -1.
            const int entries = kLanes - __clz(static_cast<int>(__ballot_sync(kAllLanes, own_row >= 0)));
#pragma unroll 1
            for (int entry = 0; entry < entries; entry += kRowsInFlight) {
                CombineUnit<In> unit[kRowsInFlight][kChunkSteps];
#pragma unroll
                for (int i = 0; i < kRowsInFlight; ++i) {
                    // Past the list's end a lane holds -1; past the warp's end there is no lane.
                    static_assert(kLanes % kRowsInFlight == 0, "entries come in whole batches");
                    reader.load(__shfl_sync(kAllLanes, own_row, entry + i), chunks, unit[i]);
                }
                // One look at all scales together: nearly always they are plain.
                bool plain = true;
#pragma unroll
                for (int i = 0; i < kRowsInFlight; ++i) {
#pragma unroll
                    for (int step = 0; step < kChunkSteps; ++step) {
                        plain = plain && In::is_plain(unit[i][step].word, reader.plain_scale(unit[i][step].scale));
                    }
                }
                float weight[kRowsInFlight];
#pragma unroll
                for (int i = 0; i < kRowsInFlight; ++i) {
                    weight[i] = kWeighted ? __shfl_sync(kAllLanes, own_weight, entry + i) : 1.0f;
                }
                if (plain) {
#pragma unroll
                    for (int i = 0; i < kRowsInFlight; ++i) {
#pragma unroll
                        for (int step = 0; step < kChunkSteps; ++step) {
                            In::template add<kWeighted>(unit[i][step].word, reader.plain_scale(unit[i][step].scale),
                                                        weight[i], sum[step]);
                        }
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < kRowsInFlight; ++i) {
#pragma unroll
                        for (int step = 0; step < kChunkSteps; ++step) {
                            const uint32 stored = unit[i][step].scale;
                            const uint32 bits =
                                reader.fp32_scales ? fp32_scale_bits(stored) : ue8m0_scale_bits(stored);
                            add_values<kWeighted>(In::decode(unit[i][step].word, bits), weight[i], sum[step]);
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step) {
            if (Out::kWords == 2 && !chunks.has_unit(step)) {
                // A short group's other lanes must not take part in its maximum.
#pragma unroll
                for (int i = 0; i < kUnit; ++i) {
                    sum[step].word[i] = 0;
                }
            }
            SumUnit<Out> unit;
            unit.encode(sum[step], rounding);
            if (chunks.has_unit(step)) {
                const int elements = Out::kUnitBytes == 4 ? kUnit / 2 : chunks.valid(step);
                char* to = p.out + row * p.out_stride + static_cast<uint64>(out_unit) * Out::kUnitBytes +
                           step * (kStepValues / kUnit) * Out::kUnitBytes;
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
        out_scales += chunks.row_step * p.out_scales_stride;
    }
}

}  // namespace ds_fp4
