// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// The formats in which the fused kernels read and write rows, behind one interface: a unit of eight values with the scale that
// it is under. Bf16Rows have no scales, NoRows are not stored at all. A row's scales may be UE8M0 or (Fp8Rows) FP32.
//
// And how a warp walks over rows here: chunks of kChunkSteps x 32 units of a row, by grid strides, as in row_tiles.cuh but half
// as long, since several rows are in flight at once.
#pragma once

#include "activations.cuh"
#include "formats.cuh"
#include "row_tiles.cuh"
#include "scaled_values.cuh"

namespace ds_fp4 {

// ---- FP32 values of a thread ----

using Floats8 = Values8<Fp32>;

DS_FP4_HD float float_at(const Floats8& x, int i) { return float_of(x.word[i]); }

// Bits of the largest magnitude, at least infinity's if a value is not finite.
DS_FP4_HD uint32 amax_of(const Floats8& x) {
#if DS_FP4_ARCH
    float result = fabsf(float_of(x.word[0]));
#pragma unroll
    for (int i = 1; i < 8; ++i) {
        result = max_or_nan(result, fabsf(float_of(x.word[i])));
    }
    return bits_of(result);
#else
    return x.amax_bits();
#endif
}

// Exponent field of an FP8 group's rounded-up maximum: its scale byte plus 8. The maximum of fields is the field of the maximum.
constexpr uint32 kNonFiniteField = 256;

DS_FP4_HD uint32 fp8_field(uint32 amax_bits) {
    return amax_bits >= kInfinityBits ? kNonFiniteField : (amax_bits + kFp8ScaleRounding) >> 23;
}

// Scale byte from the field, not below `lowest`.
DS_FP4_HD uint32 fp8_scale_of_field(uint32 field, uint32 lowest) {
    return field == kNonFiniteField ? lowest : larger(field, kE4m3MaxPow2 + lowest) - kE4m3MaxPow2;
}

DS_FP4_HD void encode_e4m3x8_or_nan(const Floats8& x, uint32 field, uint32 scale_byte, uint32 (&codes)[2]) {
    encode_e4m3x8(x, scale_byte, codes);
    if (field == kNonFiniteField) {
        codes[0] = codes[1] = kE4m3NanCodes;
    }
}

// Two FP32 numbers to BF16, to nearest even; too large ones become infinite as in torch.
DS_FP4_HD uint32 pack_bf16x2(float low, float high) {
#if DS_FP4_ARCH
    uint32 result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
#else
    uint32 result = 0;
    const uint32 bits[2] = {bits_of(low), bits_of(high)};
    for (int i = 0; i < 2; ++i) {
        const bool nan = (bits[i] & kMagnitudeMask) > kInfinityBits;
        const uint32 rounded = nan ? 0x7FFFu : (bits[i] + 0x7FFF + ((bits[i] >> 16) & 1)) >> 16;
        result |= rounded << (16 * i);
    }
    return result;
#endif
}

// ---- formats ----

template <typename A, typename B>
struct Same {
    static constexpr bool value = false;
};
template <typename A>
struct Same<A, A> {
    static constexpr bool value = true;
};

struct NoRows {};

struct Bf16Rows {
    static constexpr int kWords = 4;  // of a unit
    using Element = uint16;
    static constexpr int kUnitBytes = 16;
    static constexpr bool kScaled = false;

    DS_FP4_HD static Floats8 decode(const uint32 (&word)[4], uint32) {
        Floats8 result;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            result.word[2 * i] = word[i] << 16;
            result.word[2 * i + 1] = word[i] & 0xFFFF0000u;
        }
        return result;
    }

    // sum += values
    DS_FP4_HD static void add(const uint32 (&word)[4], uint32, Floats8& sum) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32 bits = i % 2 == 0 ? word[i / 2] << 16 : word[i / 2] & 0xFFFF0000u;
            sum.word[i] = bits_of(float_of(sum.word[i]) + float_of(bits));
        }
    }
};

// Codes times a power of two: exact, or too large for FP32, where decoding saturates. `kLargest` is the exponent of the
// largest scale under which no code is.
template <typename Codes, int kLargestSafe>
struct ScaledRows {
    static constexpr bool kScaled = true;

    // `scale` is FP32 bits.
    template <int kCount>
    DS_FP4_HD static Floats8 decode(const uint32 (&word)[kCount], uint32 scale) {
        uint32 value[4];
        Codes::to_fp16(word, value);
        Floats8 result;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            result.word[2 * i] = bits_of(multiply(Fp16::low(value[i]), float_of(scale)));
            result.word[2 * i + 1] = bits_of(multiply(Fp16::high(value[i]), float_of(scale)));
        }
        if (scale > kLargestSafeBits) {  // rare
            saturate(result);
        }
        Codes::set_nans(word, result);
        return result;
    }

    template <int kCount>
    DS_FP4_HD static void add(const uint32 (&word)[kCount], uint32 scale, Floats8& sum) {
        if (scale > kLargestSafeBits || Codes::has_nan(word)) {  // rare
            const Floats8 values = decode(word, scale);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sum.word[i] = bits_of(float_of(sum.word[i]) + float_of(values.word[i]));
            }
            return;
        }
        uint32 value[4];
        Codes::to_fp16(word, value);
        // The product is exact, so that the sum is rounded once, fused or not.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float low = fused_multiply_add(Fp16::low(value[i]), float_of(scale), float_of(sum.word[2 * i]));
            const float high = fused_multiply_add(Fp16::high(value[i]), float_of(scale), float_of(sum.word[2 * i + 1]));
            sum.word[2 * i] = bits_of(low);
            sum.word[2 * i + 1] = bits_of(high);
        }
    }

  private:
    static constexpr uint32 kLargestSafeBits = static_cast<uint32>(kLargestSafe + 127) << 23;

    DS_FP4_HD static void saturate(Floats8& x) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x.word[i] = (x.word[i] & kMagnitudeMask) == kInfinityBits ? x.word[i] - 1 : x.word[i];
        }
    }
};

struct E2m1Codes {
    DS_FP4_HD static void to_fp16(const uint32 (&word)[1], uint32 (&value)[4]) { decode_e2m1x8(word[0], value); }
    DS_FP4_HD static bool has_nan(const uint32 (&)[1]) { return false; }
    DS_FP4_HD static void set_nans(const uint32 (&)[1], Floats8&) {}
};

struct E4m3Codes {
    DS_FP4_HD static void to_fp16(const uint32 (&word)[2], uint32 (&value)[4]) { decode_e4m3x8(word, value); }
#if DS_FP4_ARCH >= 890  // the conversion instruction knows NaN
    DS_FP4_HD static bool has_nan(const uint32 (&)[2]) { return false; }
    DS_FP4_HD static void set_nans(const uint32 (&)[2], Floats8&) {}
#else
    DS_FP4_HD static bool has_nan(const uint32 (&word)[2]) { return has_e4m3_nan(word[0]) || has_e4m3_nan(word[1]); }
    DS_FP4_HD static void set_nans(const uint32 (&word)[2], Floats8& x) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (has_e4m3_nan((word[i / 4] >> (8 * (i % 4))) & 0xFF)) {
                x.word[i] = kFp32NanBits;
            }
        }
    }
#endif
};

struct Mxfp4Rows : ScaledRows<E2m1Codes, 125> {
    static constexpr int kWords = 1;
    using Element = uint8;
    static constexpr int kUnitBytes = 4;
    static constexpr int kScaleValues = kMxfp4Block;
};

struct Fp8Rows : ScaledRows<E4m3Codes, 119> {
    static constexpr int kWords = 2;
    using Element = uint8;
    static constexpr int kUnitBytes = 8;
    static constexpr int kScaleValues = kFp8Group;
};

// ---- walking ----

constexpr int kChunkSteps = 2;
constexpr int kChunkValues = kStepValues * kChunkSteps;

// The chunks of one warp, and this lane's place in the current one.
struct Chunk {
    int64 row;
    int64 first;  // this lane's first value in the row; its unit of step s is s * kStepValues further on
    int left;     // values from there to the row's end, or more than a chunk

    DS_FP4_DEVICE Chunk(int64 width_, int64 chunks_a_row_) : width(width_), chunks_a_row(static_cast<uint32>(chunks_a_row_)) {
        const uint32 warp = blockIdx.x * (kThreads / kLanes) + __shfl_sync(kAllLanes, threadIdx.x / kLanes, 0);
        row = warp / chunks_a_row;
        number = warp % chunks_a_row;
        place();
    }

    DS_FP4_DEVICE void advance() {
        const uint32 warps = gridDim.x * (kThreads / kLanes);
        row += warps / chunks_a_row;
        number += warps % chunks_a_row;
        if (number >= chunks_a_row) {
            number -= chunks_a_row;
            ++row;
        }
        place();
    }

    DS_FP4_DEVICE bool has_unit(int step) const { return step * kStepValues < left; }

    // Values in a unit that exists; fewer than kUnit at the end of a row of FP8.
    DS_FP4_DEVICE int valid(int step) const { return min(left - step * kStepValues, kUnit); }

  private:
    int64 width;
    uint32 chunks_a_row, number;

    DS_FP4_DEVICE void place() {
        first = static_cast<int64>(number) * kChunkValues + threadIdx.x % kLanes * kUnit;
        left = static_cast<int>(min(width - first, static_cast<int64>(kChunkValues)));
    }
};

}  // namespace ds_fp4
