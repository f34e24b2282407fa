// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// The activation's backward pass between an expert's GEMMs. Reads dh [R, I] in BF16, gate_up [R, 2I] as it was kept
// and the routing weights; writes
//
//     d_gate_up        FP8 rows [R, 2I], for the data gradient
//     d_gate_up        FP8 columns, for gate_up's weight gradient: the codes of the rows, moved to the tile's scale
//     weight * h       FP8 columns, for down's weight gradient: the same, from rows that are never stored
//     partial sums     FP32 [I/128, R] of dh * h over 128 columns, which sum_partials adds up to the gradient of
//                      the routing weights
//
// A block takes a tile: 128 rows of one group (expert) x 128 columns of I, gate and up alike.
//
// First, rows. A half warp holds a row's 128 columns, eight a lane; warp w takes rows 16w to 16w + 15, two at a time:
//
//     row 16w + 2s      | lane 0: columns 0..7  | lane 1: 8..15  | ... | lane 15: 120..127 |
//     row 16w + 2s + 1  | lane 16: columns 0..7 | lane 17: 8..15 | ... | lane 31: 120..127 |
//
// The three values of each element are found, their FP8 groups' scales reduced over the half warp, and the codes
// written to shared memory, [3][128 rows][128 bytes]; those of d_gate_up leave for global memory too, 128 bytes a row.
// A row is 32 words of four columns; word c of row r lies at place c ^ 4(r / 16).
//
// Then, columns. All columns of the tile get one scale, the largest of its rows', so that a code moves by its row's
// shift, a factor 2^-n in FP16 in which the product is exact wherever it matters. A lane takes four columns (a word)
// of 16 rows:
//
//     lane 8q + g of warp w: word 4w + q of rows 16g .. 16g + 15, place (4w + q) ^ 4g: 32 lanes read 32 banks
//
// takes pairs of one column from two rows at a time, scales them, and writes 16 bytes for each of its columns: eight
// lanes write a column's 128.
//
// Bytes of one element of I with gate_up in MXFP4: reads 2 + 1.06, writes 2 + 3 and scales: 8.1. Instructions: 59, or
// 7.3 a byte, 44 of them in the first part.
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
    int64 tiles;         // of 128 padded rows
    const char* dh;
    int64 dh_stride;       // strides are in bytes; from row to row where nothing else is said
    const float* weights;  // null: 1
    const char* gate_up;
    int64 gate_up_stride;
    int64 up_offset;  // from a row's first gate to its first up
    const uint8* gate_up_scales;
    int64 gate_up_scales_stride;
    int64 up_scales_offset;
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
constexpr uint32 kStripTiles = 8;
constexpr int kHalfWarp = kLanes / 2;
constexpr int kGateValues = 0, kUpValues = 1, kHValues = 2, kTensors = 3;

struct SwigluBackwardShared {
    uint32 codes[kTensors][kTileRows * kRowWords];
    float weight_sum[kTileRows][kHalfWarp];  // each lane's part of dh * h
    uint2 field[kTileRows];                  // of the rows' scales, in FP32's place: upper halves of gate and up, h
    uint16 factor[kTensors][kTileRows];      // FP16 2^-shift of a row
};
constexpr int kSwigluBackwardSharedBytes = 59136;
static_assert(sizeof(SwigluBackwardShared) == kSwigluBackwardSharedBytes, "ops/kernels.py has this number too");

// What a lane reads of one row.
template <typename Saved>
struct BackwardUnit {
    uint32 dh[4];
    uint32 gate[Saved::kWords], up[Saved::kWords];
    uint32 gate_scale, up_scale;  // UE8M0
};

// Where it reads that: a row of every input, on to the next but one by additions.
template <typename Saved>
struct BackwardReader {
    const char* dh;
    const char* gate;
    const uint8* scale;

    DS_FP4_DEVICE BackwardReader(const swiglu_backward_params& p, int64 row, int64 column) {
        dh = p.dh + row * p.dh_stride + column * 2;
        gate = p.gate_up + row * p.gate_up_stride + column / kUnit * Saved::kUnitBytes;
        scale = nullptr;
        if constexpr (Saved::kScaled) {
            scale = p.gate_up_scales + row * p.gate_up_scales_stride + column / Saved::kScaleValues;
        }
    }

    DS_FP4_DEVICE void advance(const swiglu_backward_params& p) {
        dh += 2 * p.dh_stride;
        gate += 2 * p.gate_up_stride;
        scale += 2 * p.gate_up_scales_stride;
    }

    // Zeros for a row that does not exist.
    DS_FP4_DEVICE void load(const swiglu_backward_params& p, bool exists, BackwardUnit<Saved>& unit) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            unit.dh[i] = 0;
        }
#pragma unroll
        for (int i = 0; i < Saved::kWords; ++i) {
            unit.gate[i] = unit.up[i] = 0;
        }
        unit.gate_scale = unit.up_scale = 1;
        if (exists) {
            load_words(dh, unit.dh);
            load_words(gate, unit.gate);
            load_words(gate + p.up_offset, unit.up);
            if constexpr (Saved::kScaled) {
                unit.gate_scale = __ldg(scale);
                unit.up_scale = __ldg(scale + p.up_scales_offset);
            }
        }
    }
};

// Two codes (in the low half) of consecutive rows times the rows' factors (FP16, two a word), rounded to nearest even.
DS_FP4_HD uint32 scale_e4m3x2(uint32 codes, uint32 factors) {
    const uint32 product = Fp16::fma(decode_e4m3x2(codes & 0xFFFF), factors, 0x80008000u);
#if DS_FP4_ARCH >= 890
    uint16 result;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(result) : "r"(product));
    return result;
#else
    const uint32 result = encode_e4m3x2_on_bits(Fp16::low(product), Fp16::high(product));
    const uint32 nan = ((codes & 0x7F7F) + 0x0101) >> 7 & 0x0101;
    return (result & ~(nan * 0xFF)) | nan * 0x7F;
#endif
}

// FP16 2^-shift; every E4M3 code rounds to zero long before that does.
DS_FP4_HD uint32 fp16_power(uint32 shift) {
    return shift <= 14 ? (15 - shift) << 10 : shift <= 24 ? 1u << (24 - shift) : 0;
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

// Blocks on a multiprocessor: three, where 80 registers are enough.
template <typename Activation>
constexpr int kBackwardBlocks = Activation::kUpPlusOne ? 2 : 3;

template <typename Activation, typename Saved>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<Activation>)
    swiglu_backward(const swiglu_backward_params p) {
    SwigluBackwardShared& shared = dynamic_shared<SwigluBackwardShared>();
    constexpr int kRowsAWarp = kTileRows / (kThreads / kLanes);
    const uint32 column_tiles = static_cast<uint32>(p.width / kTileColumns);
    // Blocks go down a strip of tiles before they go on to the next columns: what they write of one column lies side
    // by side.
    const uint32 strip = blockIdx.x / (column_tiles * kStripTiles);
    const uint32 in_strip = blockIdx.x - strip * (column_tiles * kStripTiles);
    const uint32 strip_start = strip * kStripTiles;
    uint32 column_tile = in_strip / kStripTiles, tile_in_strip = in_strip % kStripTiles;
    if (strip_start + kStripTiles > p.tiles) {
        const uint32 strip_tiles = static_cast<uint32>(p.tiles) - strip_start;
        column_tile = in_strip / strip_tiles;
        tile_in_strip = in_strip % strip_tiles;
    }
    const int64 tile = strip_start + tile_in_strip;
    const int64 first_column = static_cast<int64>(column_tile) * kTileColumns;
    const GroupTile place = find_tile(p.group_sizes, static_cast<int>(p.groups), tile, p.tiles, p.padded_input != 0);
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
        const ActivationScalars scalars = {float_of(static_cast<uint32>(p.alpha)),
                                           float_of(static_cast<uint32>(p.limit))};
        const uint32 lowest = kFieldOfByte0 + static_cast<uint32>(p.lowest_scale);
        const int half_lane = lane % kHalfWarp;
        const int first_local = warp * kRowsAWarp + lane / kHalfWarp;
        const int64 first_row = place.first_row + first_local, column = first_column + half_lane * kUnit;
        // Lane l holds the weight of row 16w + l % 16.
        const int own_local = warp * kRowsAWarp + half_lane;
        float own_weight = 0.0f;
        if (own_local < place.valid) {
            own_weight = p.weights == nullptr ? 1.0f : __ldg(p.weights + place.first_row + own_local);
        }
        // Rows 16w and on belong to warp w.
        uint32* codes_at = &shared.codes[0][first_local * kRowWords + ((half_lane * 2) ^ (4 * warp))];
        uint8* out = p.row + first_row * p.row_stride + column;
        BackwardReader<Saved> reader(p, first_row, column);
        BackwardUnit<Saved> next;
        reader.load(p, first_local < place.valid, next);
#pragma unroll 2
        for (int step = 0; step < kRowsAWarp / 2; ++step) {
            const int local = first_local + 2 * step;
            const BackwardUnit<Saved> unit = next;
            reader.advance(p);
            reader.load(p, step + 1 < kRowsAWarp / 2 && local + 2 < place.valid, next);
            const float weight = __shfl_sync(kAllLanes, own_weight, 2 * step + lane / kHalfWarp);
            Floats8 gate, up;
            Saved::decode_two(unit.gate, unit.gate_scale, gate, unit.up, unit.up_scale, up);
            const Floats8 dh = Bf16Rows::decode(unit.dh, 0);
            Floats8 values[kTensors];
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                ActivationGradients gradients;
                gradients.weight_sum = sum;
                activation_backward<Activation>(float_at(gate, i), float_at(up, i), float_at(dh, i), weight, scalars,
                                                gradients);
                sum = gradients.weight_sum;
                values[kGateValues].word[i] = bits_of(gradients.gate);
                values[kUpValues].word[i] = bits_of(gradients.up);
                values[kHValues].word[i] = bits_of(gradients.h);
            }
            shared.weight_sum[local][half_lane] = sum;
            // Of gate and up the upper 16 bits, which is all that matters, in one word.
            uint32 gate_up = permute_bytes(amax_of(values[kGateValues]) + kFp8ScaleRounding,
                                           amax_of(values[kUpValues]) + kFp8ScaleRounding, 0x7632);
            uint32 h = amax_of(values[kHValues]) + kFp8ScaleRounding;
#pragma unroll
            for (int distance = 1; distance < kHalfWarp; distance *= 2) {
                gate_up = larger_u16x2(gate_up, __shfl_xor_sync(kAllLanes, gate_up, distance));
                h = larger(h, __shfl_xor_sync(kAllLanes, h, distance));
            }
            uint32 field[kTensors] = {gate_up << 16, gate_up, h}, codes[kTensors][2];
#pragma unroll
            for (int i = 0; i < kTensors; ++i) {
                const float inverse = settle_activation_field(field[i], lowest);
                encode_e4m3x8(values[i], inverse, codes[i]);
                uint32* to = codes_at + i * (kTileRows * kRowWords) + step * (2 * kRowWords);
                *reinterpret_cast<uint2*>(to) = make_uint2(codes[i][0], codes[i][1]);
            }
            if (half_lane == 0) {
                shared.field[local] =
                    make_uint2(permute_bytes(field[kGateValues], field[kUpValues], 0x7632), field[kHValues]);
            }
            if (local < stored_rows) {
                store_words(out, codes[kGateValues]);
                store_words(out + p.width, codes[kUpValues]);
            }
            out += 2 * p.row_stride;
        }
    }
    __syncthreads();

    // ---- scales: the rows', the tile's, and each row's shift ----
    {
        uint2 largest = make_uint2(0, 0);
#pragma unroll
        for (int i = 0; i < kTileRows / kLanes; ++i) {
            const uint2 fields = shared.field[lane + i * kLanes];
            largest = make_uint2(larger_u16x2(largest.x, fields.x), larger(largest.y, fields.y));
        }
#pragma unroll
        for (int distance = 1; distance < kLanes; distance *= 2) {
            largest.x = larger_u16x2(largest.x, __shfl_xor_sync(kAllLanes, largest.x, distance));
            largest.y = larger(largest.y, __shfl_xor_sync(kAllLanes, largest.y, distance));
        }
        const uint32 tile_field[kTensors] = {(largest.x & 0xFFFF) >> 7, largest.x >> 23, largest.y >> 23};
        if (threadIdx.x < kTileRows) {
            const int local = threadIdx.x;
            const uint2 fields = shared.field[local];
            const uint32 field[kTensors] = {(fields.x & 0xFFFF) >> 7, fields.x >> 23, fields.y >> 23};
#pragma unroll
            for (int i = 0; i < kTensors; ++i) {
                shared.factor[i][local] = static_cast<uint16>(fp16_power(tile_field[i] - field[i]));
            }
            if (local < stored_rows) {
                const int64 group = first_column / kFp8Group;
                char* gate =
                    p.row_scales + (place.first_row + local) * p.row_scales_stride + group * p.row_scales_group_stride;
                char* up = gate + p.width / kFp8Group * p.row_scales_group_stride;
                *reinterpret_cast<uint32*>(gate) = ue8m0_scale_bits(field[kGateValues] - kFieldOfByte0);
                *reinterpret_cast<uint32*>(up) = ue8m0_scale_bits(field[kUpValues] - kFieldOfByte0);
            }
        } else {
            const int local = threadIdx.x - kTileRows;
            const int64 column = first_column + local;
            char* gate = p.col_scales + column * p.col_scales_stride + tile * p.col_scales_tile_stride;
            *reinterpret_cast<uint32*>(gate) = ue8m0_scale_bits(tile_field[kGateValues] - kFieldOfByte0);
            *reinterpret_cast<uint32*>(gate + p.width * p.col_scales_stride) =
                ue8m0_scale_bits(tile_field[kUpValues] - kFieldOfByte0);
            char* h = p.h_col_scales + column * p.h_col_scales_stride + tile * p.h_col_scales_tile_stride;
            *reinterpret_cast<uint32*>(h) = ue8m0_scale_bits(tile_field[kHValues] - kFieldOfByte0);
            if (local < stored_rows) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < kHalfWarp; ++i) {
                    // Each thread starts elsewhere, so that a warp's threads read different banks.
                    sum += shared.weight_sum[local][(i + local / 2) % kHalfWarp];
                }
                p.partial[first_column / kTileColumns * p.rows + place.first_row + local] = sum;
            }
        }
    }
    __syncthreads();

    // ---- columns ----
    constexpr int kRowsALane = 16;
    const int row_group = lane % 8, word = 4 * warp + lane / 8;
    const int place_in_row = word ^ (4 * row_group);
    const int64 run =
        place.number * kTileRows + row_group * kRowsALane;  // from a column's start to the lane's 16 bytes
    const int64 column = first_column + word * 4;
#pragma unroll
    for (int tensor = 0; tensor < kTensors; ++tensor) {
        const uint32* codes = shared.codes[tensor] + row_group * kRowsALane * kRowWords + place_in_row;
        const uint32* factors = reinterpret_cast<const uint32*>(shared.factor[tensor]) + row_group * (kRowsALane / 2);
        uint32 out[4][4];  // [column][four rows]
#pragma unroll
        for (int quad = 0; quad < 4; ++quad) {
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                const uint32* two_rows = codes + (4 * quad + 2 * pair) * kRowWords;
                // Columns 0 and 1, and 2 and 3, of both rows.
                const uint32 pairs01 = permute_bytes(two_rows[0], two_rows[kRowWords], 0x5140);
                const uint32 pairs23 = permute_bytes(two_rows[0], two_rows[kRowWords], 0x7362);
                const uint32 factor = factors[2 * quad + pair];
                const uint32 scaled[4] = {scale_e4m3x2(pairs01, factor), scale_e4m3x2(pairs01 >> 16, factor),
                                          scale_e4m3x2(pairs23, factor), scale_e4m3x2(pairs23 >> 16, factor)};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    out[i][quad] = pair == 0 ? scaled[i] : out[i][quad] | scaled[i] << 16;
                }
            }
        }
        uint8* base =
            tensor == kHValues ? p.h_col + place.padded_start * p.width : p.col + place.padded_start * p.width * 2;
        base += (column + (tensor == kUpValues ? p.width : 0)) * place.padded_rows + run;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            store_words(base + static_cast<int64>(i) * place.padded_rows, out[i]);
        }
    }
}

}  // namespace ds_fp4
