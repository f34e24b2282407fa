// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// The formats in which the fused kernels read and write rows, behind one interface: a unit of eight values with the
// scale that it is under. Bf16Rows have no scales, NoRows are not stored at all. A row's scales may be UE8M0 or
// (Fp8Rows) FP32.
//
// And how a warp walks over rows here: a chunk is a few times 32 units of a row, and a warp takes the same chunk of
// row after row, so that pointers move by additions.
#pragma once

#include "activations.cuh"
#include "formats.cuh"
#include "row_tiles.cuh"
#include "scaled_values.cuh"

namespace ds_fp4 {

// ---- FP32 values of a thread ----

using Floats8 = Values8<Fp32>;

DS_FP4_HD float float_at(const Floats8& x, int i) {
    return float_of(x.word[i]);
}

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

// Exponent field of an FP8 group's rounded-up maximum: its scale byte plus kFieldOfByte0. The maximum of fields is the
// field of the maximum.
constexpr uint32 kNonFiniteField = 256, kFieldOfByte0 = kE4m3MaxPow2;

DS_FP4_HD uint32 fp8_field(uint32 amax_bits) {
    return amax_bits >= kInfinityBits ? kNonFiniteField : (amax_bits + kFp8ScaleRounding) >> 23;
}

// A group's scale from its field, which becomes that of the scale, at least `lowest`. What values are to be multiplied
// with: NaN for a group with a value that is not finite, so that all of its codes become NaN.
DS_FP4_HD float settle_fp8_field(uint32& field, uint32 lowest) {
    const bool finite = field != kNonFiniteField;
    field = finite ? larger(field, lowest) : lowest;
    const uint32 inverse = (254 + kFieldOfByte0 - field) << 23;
    return float_of(finite ? inverse : kFp32NanBits);
}

// The same for activations, on fewer instructions: `rounded` is amax + kFp8ScaleRounding, whose upper 16 bits say
// everything. A magnitude above BF16's largest counts as infinite, as it would be in BF16. `rounded` becomes the
// scale's field, in its place.
constexpr uint32 kOverflow = 0x7F7F0001u + kFp8ScaleRounding;
static_assert((kOverflow & 0xFFFF) == 0, "decided by the upper 16 bits");

DS_FP4_HD float settle_activation_field(uint32& rounded, uint32 lowest) {
    const bool finite = rounded < kOverflow;
    rounded = finite ? larger(rounded & 0xFF800000u, lowest << 23) : lowest << 23;
    return float_of(finite ? ((254 + kFieldOfByte0) << 23) - rounded : kFp32NanBits);
}

DS_FP4_HD void encode_e4m3x8(const Floats8& x, float inverse, uint32 (&codes)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float v0 = multiply(float_at(x, 4 * i), inverse), v1 = multiply(float_at(x, 4 * i + 1), inverse);
        const float v2 = multiply(float_at(x, 4 * i + 2), inverse), v3 = multiply(float_at(x, 4 * i + 3), inverse);
        codes[i] = encode_e4m3x2(v0, v1) | encode_e4m3x2(v2, v3) << 16;
    }
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

// sum += values * weight. The product is rounded before it is added, as in the reference.
template <bool kWeighted>
DS_FP4_HD void add_values(const Floats8& values, float weight, Floats8& sum) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float value = kWeighted ? multiply(float_at(values, i), weight) : float_at(values, i);
        sum.word[i] = bits_of(float_at(sum, i) + value);
    }
}

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

    DS_FP4_HD static void decode_two(const uint32 (&a)[4], uint32, Floats8& a_values, const uint32 (&b)[4], uint32,
                                     Floats8& b_values) {
        a_values = decode(a, 0);
        b_values = decode(b, 0);
    }

    DS_FP4_HD static bool is_plain(const uint32 (&)[4], uint32) { return true; }

    template <bool kWeighted>
    DS_FP4_HD static void add(const uint32 (&word)[4], uint32, float weight, Floats8& sum) {
        add_values<kWeighted>(decode(word, 0), weight, sum);
    }
};

// Codes times a power of two: exact, or too large for FP32, where decoding saturates. `kLargest` is the exponent of
// the largest scale under which no code is.
template <typename Codes, int kLargestSafe>
struct ScaledRows {
    static constexpr bool kScaled = true;

    // `scale` is FP32 bits.
    template <int kCount>
    DS_FP4_HD static Floats8 decode(const uint32 (&word)[kCount], uint32 scale) {
        Floats8 result = products(word, scale);
        if (scale > kLargestSafeBits) {  // rare
            saturate(result);
        }
        Codes::set_nans(word, result);
        return result;
    }

    // Two units under UE8M0 scales (bytes), in fewer instructions than decoding each.
    template <int kCount>
    DS_FP4_HD static void decode_two(const uint32 (&a)[kCount], uint32 a_scale, Floats8& a_values,
                                     const uint32 (&b)[kCount], uint32 b_scale, Floats8& b_values) {
        constexpr uint32 kPlain = kLargestSafe + 127;  // bytes 1 to this one are normal numbers, and safe
        if (a_scale - 1 < kPlain && b_scale - 1 < kPlain && !Codes::has_nan(a) && !Codes::has_nan(b)) {
            a_values = products(a, a_scale << 23);
            b_values = products(b, b_scale << 23);
        } else {  // rare
            a_values = decode(a, ue8m0_scale_bits(a_scale));
            b_values = decode(b, ue8m0_scale_bits(b_scale));
        }
    }

    // Whether `add` may take codes under a scale (FP32 bits): a normal number under which no code is too large.
    template <int kCount>
    DS_FP4_HD static bool is_plain(const uint32 (&word)[kCount], uint32 scale) {
        constexpr uint32 kSmallest = 0x00800000u;
        return scale - kSmallest <= kLargestSafeBits - kSmallest && !Codes::has_nan(word);
    }

    // sum += codes * scale * weight.
    template <bool kWeighted, int kCount>
    DS_FP4_HD static void add(const uint32 (&word)[kCount], uint32 scale, float weight, Floats8& sum) {
        if constexpr (kWeighted) {
            add_values<true>(products(word, scale), weight, sum);
        } else {
            // The product is exact, so that the sum is rounded once, fused or not.
            uint32 value[4];
            Codes::to_fp16(word, value);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float code = i % 2 == 0 ? Fp16::low(value[i / 2]) : Fp16::high(value[i / 2]);
                sum.word[i] = bits_of(fused_multiply_add(code, float_of(scale), float_at(sum, i)));
            }
        }
    }

  private:
    static constexpr uint32 kLargestSafeBits = static_cast<uint32>(kLargestSafe + 127) << 23;

    template <int kCount>
    DS_FP4_HD static Floats8 products(const uint32 (&word)[kCount], uint32 scale) {
        uint32 value[4];
        Codes::to_fp16(word, value);
        Floats8 result;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            result.word[2 * i] = bits_of(multiply(Fp16::low(value[i]), float_of(scale)));
            result.word[2 * i + 1] = bits_of(multiply(Fp16::high(value[i]), float_of(scale)));
        }
        return result;
    }

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

// The chunks of one warp: always the same columns, of every `row_step`-th row. The host launches so many warps that
// they come out even.
template <int kChunkSteps>
struct Chunks {
    static constexpr int kChunkValues = kStepValues * kChunkSteps;

    int64 first_row;
    int64 row_step;
    int64 first;  // this lane's first value in a row; its unit of step s is s * kStepValues further on
    int left;     // values from there to the row's end, or more than a chunk

    DS_FP4_DEVICE Chunks(int64 width, int64 chunks_a_row) {
        const uint32 warp = blockIdx.x * (kThreads / kLanes) + __shfl_sync(kAllLanes, threadIdx.x / kLanes, 0);
        const uint32 chunks = static_cast<uint32>(chunks_a_row);
        first_row = warp / chunks;
        row_step = gridDim.x * (kThreads / kLanes) / chunks;
        first = static_cast<int64>(warp % chunks) * kChunkValues + threadIdx.x % kLanes * kUnit;
        left = static_cast<int>(min(width - first, static_cast<int64>(kChunkValues)));
    }

    DS_FP4_DEVICE bool has_unit(int step) const { return step * kStepValues < left; }

    // Values in a unit that exists; fewer than kUnit at the end of a row of FP8.
    DS_FP4_DEVICE int valid(int step) const { return min(left - step * kStepValues, kUnit); }
};

// Lane `lane` of these shares a group with the first; the first one stores the group's scale.
template <int kValues>
DS_FP4_DEVICE bool first_lane_of() {
    return threadIdx.x % (kValues / kUnit) == 0;
}

}  // namespace ds_fp4
