// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// The activation's backward pass between an expert's GEMMs. Reads dh [R, I] in BF16, gate_up [R, 2I] as it was kept and the
// routing weights; writes
//
//     d_gate_up        FP8 rows [R, 2I], for the data gradient
//     d_gate_up        FP8 columns, for gate_up's weight gradient: the codes of the rows, moved to the tile's scale
//     weight * h       FP8 columns, for down's weight gradient: the same, from rows that are never stored
//     partial sums     FP32 [I/128, R] of dh * h over 128 columns, which sum_partials adds up: the routing weights' gradient
//
// A block takes a tile: 128 rows of one group (expert) x 128 columns of I, gate and up alike.
//
// First, rows. A half warp holds a row's 128 columns, eight a lane; warp w takes rows 16w to 16w + 15, two at a time:
//
//     row 16w + 2s      | lane 0: columns 0..7  | lane 1: 8..15  | ... | lane 15: 120..127 |
//     row 16w + 2s + 1  | lane 16: columns 0..7 | lane 17: 8..15 | ... | lane 31: 120..127 |
//
// The three values of each element are found, their FP8 groups' scales reduced over the half warp, and the codes written to
// shared memory, [3][128 rows][128 bytes]; those of d_gate_up leave for global memory too, 128 bytes a row. A row is 32 words of
// four columns; word c of row r lies at place c ^ 4(r / 16).
//
// Then, columns. All columns of the tile get one scale, the largest of its rows', so that a code moves by its row's shift, a
// factor 2^-n in FP16 in which the product is exact wherever it matters. A lane takes four columns (a word) of 16 rows:
//
//     lane 8q + g of warp w: word 4w + q of rows 16g .. 16g + 15, place (4w + q) ^ 4g: 32 lanes read 32 banks
//
// transposes 4 x 4 bytes at a time, and writes 16 bytes for each of its columns: eight lanes write a column's 128.
//
// Bytes of one element of I with gate_up in MXFP4: reads 2 + 1.06, writes 2 + 3 and scales: 8.1. Instructions: about 45, or 5.6
// a byte.
#pragma once

#include "row_groups.cuh"
#include "stored_rows.cuh"

namespace ds_fp4 {

struct swiglu_backward_params {
    int64 rows;   // of every input and of d_gate_up's rows
    int64 width;  // I, a multiple of 128
    const int* group_sizes;
    int64 groups;
    int64 padded_input;  // 1: rows lie at padded places, the rows between are padding
    const char* dh;
    int64 dh_stride;  // strides are in bytes; from row to row where nothing else is said
    const float* weights;  // null: 1
    const char* gate_up;
    int64 gate_up_stride;
    const uint8* gate_up_scales;
    int64 gate_up_scales_stride;
    int64 alpha;         // FP32 bits
    int64 limit;         // FP32 bits
    int64 lowest_scale;  // byte: 1 where subnormal scales are to be avoided, else 0
    uint8* row;
    int64 row_stride;
    char* row_scales;
    int64 row_scales_stride;
    int64 row_scales_group_stride;  // from group of 128 columns to group
    uint8* col;
    char* col_scales;
    int64 col_scales_stride;       // from column to column
    int64 col_scales_tile_stride;  // from tile of 128 rows to tile
    uint8* h_col;
    char* h_col_scales;
    int64 h_col_scales_stride;
    int64 h_col_scales_tile_stride;
    float* partial;  // [I/128, rows]
};

constexpr int kTileColumns = 128;
constexpr int kRowWords = kTileColumns / 4;
constexpr int kGateValues = 0, kUpValues = 1, kHValues = 2, kTensors = 3;

struct SwigluBackwardShared {
    uint32 codes[kTensors][kTileRows * kRowWords];
    uint16 factor[kTensors][kTileRows];  // FP16 2^-shift of a row
    uint32 row_scale[kTileRows];         // scale bytes of the three tensors
};
constexpr int kSwigluBackwardSharedBytes = 50432;
static_assert(sizeof(SwigluBackwardShared) == kSwigluBackwardSharedBytes, "ops/kernels.py has this number too");

// What a lane reads of one row.
template <typename Saved>
struct BackwardUnit {
    uint32 dh[4];
    uint32 gate[Saved::kWords], up[Saved::kWords];
    uint32 gate_scale, up_scale;  // UE8M0
    float weight;
};

template <typename Saved>
DS_FP4_DEVICE void load_backward_unit(const swiglu_backward_params& p, int64 row, int64 column, bool exists,
                                      BackwardUnit<Saved>& unit) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        unit.dh[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < Saved::kWords; ++i) {
        unit.gate[i] = unit.up[i] = 0;
    }
    unit.gate_scale = unit.up_scale = 0;
    unit.weight = 0.0f;
    if (!exists) {
        return;
    }
    load_words(p.dh + row * p.dh_stride + column * 2, unit.dh);
    const char* gate = p.gate_up + row * p.gate_up_stride + column / kUnit * Saved::kUnitBytes;
    load_words(gate, unit.gate);
    load_words(gate + p.width / kUnit * Saved::kUnitBytes, unit.up);
    if constexpr (Saved::kScaled) {
        const uint8* scale = p.gate_up_scales + row * p.gate_up_scales_stride + column / Saved::kScaleValues;
        unit.gate_scale = __ldg(scale);
        unit.up_scale = __ldg(scale + p.width / Saved::kScaleValues);
    }
    unit.weight = p.weights == nullptr ? 1.0f : __ldg(p.weights + row);
}

// Four codes of consecutive rows times the rows' factors (FP16, two a word), rounded to nearest even.
DS_FP4_HD uint32 scale_e4m3x4(uint32 codes, uint32 factor01, uint32 factor23) {
    uint32 low = decode_e4m3x2(codes & 0xFFFF), high = decode_e4m3x2(codes >> 16);
    low = Fp16::fma(low, factor01, 0x80008000u);
    high = Fp16::fma(high, factor23, 0x80008000u);
#if DS_FP4_ARCH >= 890
    uint16 codes01, codes23;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(codes01) : "r"(low));
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(codes23) : "r"(high));
    return codes01 | static_cast<uint32>(codes23) << 16;
#else
    const uint32 result = encode_e4m3x2_on_bits(Fp16::low(low), Fp16::high(low)) |
                          encode_e4m3x2_on_bits(Fp16::low(high), Fp16::high(high)) << 16;
    const uint32 nan = ((codes & kE4m3NanCodes) + 0x01010101u) >> 7 & 0x01010101u;
    return (result & ~(nan * 0xFF)) | nan * 0x7F;
#endif
}

// FP16 2^-shift; every E4M3 code rounds to zero long before that does.
DS_FP4_HD uint32 fp16_power(uint32 shift) {
    return shift <= 14 ? (15 - shift) << 10 : shift <= 24 ? 1u << (24 - shift) : 0;
}

// Word i of the result: byte i of each of the four words.
DS_FP4_HD void transpose_bytes(const uint32 (&in)[4], uint32 (&out)[4]) {
    const uint32 even01 = permute_bytes(in[0], in[1], 0x5140), even23 = permute_bytes(in[2], in[3], 0x5140);
    const uint32 odd01 = permute_bytes(in[0], in[1], 0x7362), odd23 = permute_bytes(in[2], in[3], 0x7362);
    out[0] = permute_bytes(even01, even23, 0x5410);
    out[1] = permute_bytes(even01, even23, 0x7632);
    out[2] = permute_bytes(odd01, odd23, 0x5410);
    out[3] = permute_bytes(odd01, odd23, 0x7632);
}

// The largest of two pairs of 16-bit numbers.
DS_FP4_HD uint32 larger_u16x2(uint32 a, uint32 b) {
#if DS_FP4_ARCH >= 900
    uint32 result;
    asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
#else
    return larger(a & 0xFFFF, b & 0xFFFF) | larger(a >> 16, b >> 16) << 16;
#endif
}

template <typename Activation, typename Saved>
__global__ void __launch_bounds__(kThreads, 3) swiglu_backward(const swiglu_backward_params p) {
    SwigluBackwardShared& shared = dynamic_shared<SwigluBackwardShared>();
    constexpr int kHalf = kLanes / 2;
    constexpr int kRowsAWarp = kTileRows / (kThreads / kLanes);
    const uint32 column_tiles = static_cast<uint32>(p.width / kTileColumns);
    const int64 tile = blockIdx.x / column_tiles;
    const int64 first_column = static_cast<int64>(blockIdx.x % column_tiles) * kTileColumns;
    const GroupTile place = find_tile(p.group_sizes, static_cast<int>(p.groups), tile, p.padded_input != 0);
    if (place.valid == 0) {
        return;
    }
    const int stored_rows = p.padded_input != 0 ? kTileRows : place.valid;
    if (place.first_row + stored_rows > p.rows) {
        __trap();  // sizes that do not add up to the rows
    }
    const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;

    // ---- rows ----
    {
        const ActivationScalars scalars = {float_of(static_cast<uint32>(p.alpha)), float_of(static_cast<uint32>(p.limit))};
        const uint32 lowest = static_cast<uint32>(p.lowest_scale);
        const int half_lane = lane % kHalf;
        const int first_local = warp * kRowsAWarp + lane / kHalf;
        const int64 column = first_column + half_lane * kUnit;
        const int place_in_row = (half_lane * 2) ^ (4 * warp);  // rows 16w and on belong to warp w
        BackwardUnit<Saved> next;
        load_backward_unit<Saved>(p, place.first_row + first_local, column, first_local < place.valid, next);
#pragma unroll 2
        for (int step = 0; step < kRowsAWarp / 2; ++step) {
            const int local = first_local + 2 * step;
            const int64 row = place.first_row + local;
            const BackwardUnit<Saved> unit = next;
            if (step + 1 < kRowsAWarp / 2) {
                load_backward_unit<Saved>(p, row + 2, column, local + 2 < place.valid, next);
            }
            const Floats8 gate = Saved::decode(unit.gate, ue8m0_scale_bits(unit.gate_scale));
            const Floats8 up = Saved::decode(unit.up, ue8m0_scale_bits(unit.up_scale));
            const Floats8 dh = Bf16Rows::decode(unit.dh, 0);
            Floats8 values[kTensors];
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                ActivationGradients gradients;
                gradients.weight_sum = sum;
                activation_backward<Activation>(float_at(gate, i), float_at(up, i), float_at(dh, i), unit.weight, scalars,
                                                gradients);
                sum = gradients.weight_sum;
                values[kGateValues].word[i] = bits_of(gradients.gate);
                values[kUpValues].word[i] = bits_of(gradients.up);
                values[kHValues].word[i] = bits_of(gradients.h);
            }
            uint32 fields = fp8_field(amax_of(values[kGateValues])) | fp8_field(amax_of(values[kUpValues])) << 16;
            uint32 h_field = fp8_field(amax_of(values[kHValues]));
#pragma unroll
            for (int distance = 1; distance < kHalf; distance *= 2) {
                fields = larger_u16x2(fields, __shfl_xor_sync(kAllLanes, fields, distance));
                h_field = larger(h_field, __shfl_xor_sync(kAllLanes, h_field, distance));
                sum += __shfl_xor_sync(kAllLanes, sum, distance);
            }
            const uint32 field[kTensors] = {fields & 0xFFFF, fields >> 16, h_field};
            uint32 scale[kTensors], codes[kTensors][2];
#pragma unroll
            for (int i = 0; i < kTensors; ++i) {
                scale[i] = fp8_scale_of_field(field[i], lowest);
                encode_e4m3x8_or_nan(values[i], field[i], scale[i], codes[i]);
                uint32* to = &shared.codes[i][local * kRowWords + place_in_row];
                *reinterpret_cast<uint2*>(to) = make_uint2(codes[i][0], codes[i][1]);
            }
            if (half_lane == 0) {
                shared.row_scale[local] = scale[kGateValues] | scale[kUpValues] << 8 | scale[kHValues] << 16;
            }
            if (local < stored_rows) {
                uint8* out = p.row + row * p.row_stride + column;
                store_words(out, codes[kGateValues]);
                store_words(out + p.width, codes[kUpValues]);
                if (half_lane < 2) {
                    const int64 group = (first_column + half_lane * p.width) / kFp8Group;
                    char* address = p.row_scales + row * p.row_scales_stride + group * p.row_scales_group_stride;
                    *reinterpret_cast<uint32*>(address) = ue8m0_scale_bits(half_lane == 0 ? scale[kGateValues] : scale[kUpValues]);
                } else if (half_lane == 2) {
                    p.partial[first_column / kTileColumns * p.rows + row] = sum;
                }
            }
        }
    }
    __syncthreads();

    // ---- the tile's scales, and each row's shift ----
    {
        uint32 low = 0, high = 0;  // 16-bit pairs: tensors 0 and 2, tensor 1
#pragma unroll
        for (int i = 0; i < kTileRows / kLanes; ++i) {
            const uint32 scales = shared.row_scale[lane + i * kLanes];
            low = larger_u16x2(low, scales & 0x00FF00FFu);
            high = larger(high, (scales >> 8) & 0xFF);
        }
#pragma unroll
        for (int distance = 1; distance < kLanes; distance *= 2) {
            low = larger_u16x2(low, __shfl_xor_sync(kAllLanes, low, distance));
            high = larger(high, __shfl_xor_sync(kAllLanes, high, distance));
        }
        const uint32 largest[kTensors] = {low & 0xFFFF, high, low >> 16};
        if (threadIdx.x < kTileRows) {
            const uint32 scales = shared.row_scale[threadIdx.x];
#pragma unroll
            for (int i = 0; i < kTensors; ++i) {
                const uint32 shift = largest[i] - ((scales >> (8 * i)) & 0xFF);
                shared.factor[i][threadIdx.x] = static_cast<uint16>(fp16_power(shift));
            }
        } else {
            const int64 column = first_column + threadIdx.x - kTileRows;
            char* gate = p.col_scales + column * p.col_scales_stride + tile * p.col_scales_tile_stride;
            *reinterpret_cast<uint32*>(gate) = ue8m0_scale_bits(largest[kGateValues]);
            *reinterpret_cast<uint32*>(gate + p.width * p.col_scales_stride) = ue8m0_scale_bits(largest[kUpValues]);
            char* h = p.h_col_scales + column * p.h_col_scales_stride + tile * p.h_col_scales_tile_stride;
            *reinterpret_cast<uint32*>(h) = ue8m0_scale_bits(largest[kHValues]);
        }
    }
    __syncthreads();

    // ---- columns ----
    constexpr int kRowsALane = 16;
    const int row_group = lane % 8, word = 4 * warp + lane / 8;
    const int place_in_row = word ^ (4 * row_group);
    const int64 run = place.number * kTileRows + row_group * kRowsALane;  // from a column's start to the lane's 16 bytes
    const int64 column = first_column + word * 4;
#pragma unroll
    for (int tensor = 0; tensor < kTensors; ++tensor) {
        const uint32* codes = shared.codes[tensor] + row_group * kRowsALane * kRowWords + place_in_row;
        const uint32* factors = reinterpret_cast<const uint32*>(shared.factor[tensor]) + row_group * (kRowsALane / 2);
        uint32 out[4][4];  // [column][four rows]
#pragma unroll
        for (int quad = 0; quad < 4; ++quad) {
            uint32 rows[4], columns[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                rows[i] = codes[(4 * quad + i) * kRowWords];
            }
            transpose_bytes(rows, columns);
            const uint32 factor01 = factors[2 * quad], factor23 = factors[2 * quad + 1];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                out[i][quad] = scale_e4m3x4(columns[i], factor01, factor23);
            }
        }
        uint8* base = tensor == kHValues ? p.h_col + place.padded_start * p.width : p.col + place.padded_start * p.width * 2;
        base += (column + (tensor == kUpValues ? p.width : 0)) * place.padded_rows + run;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            store_words(base + static_cast<int64>(i) * place.padded_rows, out[i]);
        }
    }
}

}  // namespace ds_fp4
