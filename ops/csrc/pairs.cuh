// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// The three value types that rows can hold, as bits: Bf16 and Fp16 two to a 32-bit word, Fp32 one. Each names its
// words, its arithmetic on whole words, and how FP32 results become values. On the GPU each operation is one
// instruction (PTX, since its treatment of subnormals is then fixed); the plain C++ beside it computes the same for
// the host's tests.
#pragma once

#include "common.cuh"

namespace ds_fp4 {

constexpr uint32 kFp32NanBits = 0x7FC00000u;

#if !DS_FP4_ARCH
// Bits of the nearest number, ties to even, of a format with a 16-bit code (an FP64 value that does not overflow; or
// NaN).
inline uint32 round_to_16_bits(double value, int mantissa_bits, int min_exponent) {
    if (value != value) {
        return 0x7FFFu;
    }
    const uint32 sign = __builtin_signbit(value) ? 0x8000u : 0;
    const double magnitude = __builtin_fabs(value);
    const int ilogb = magnitude > 0 ? __builtin_ilogb(magnitude) : min_exponent;
    const int exponent = ilogb > min_exponent ? ilogb : min_exponent;
    // Steps count from zero: the implicit bit of a normal number adds one to the exponent field by itself.
    const double steps = __builtin_nearbyint(__builtin_ldexp(magnitude, mantissa_bits - exponent));
    return sign | (static_cast<uint32>(steps) + (static_cast<uint32>(exponent - min_exponent) << mantissa_bits));
}
#endif

struct Bf16 {
    using Element = uint16;
    static constexpr int kBytes = 2;
    static constexpr int kWords = 4;                // that hold eight values
    static constexpr bool kMultipliesPairs = true;  // by any power of two that FP32 has
    static constexpr float kUnitStep = 128.0f;      // numbers from here to twice as much are 1 apart
    static constexpr uint32 kNan = 0x7FC07FC0u;

    using Scale = uint32;

    DS_FP4_HD static float low(uint32 word) { return float_of(word << 16); }
    DS_FP4_HD static float high(uint32 word) { return float_of(word & 0xFFFF0000u); }

    // Both values the same; `value` needs no rounding.
    DS_FP4_HD static uint32 splat(float value) { return (bits_of(value) >> 16) * 0x10001u; }

    DS_FP4_HD static uint32 fma(uint32 a, uint32 b, uint32 c) {
#if DS_FP4_ARCH
        uint32 result;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
        return result;
#else
        return round_to_16_bits(double(low(a)) * low(b) + low(c), 7, -126) |
               round_to_16_bits(double(high(a)) * high(b) + high(c), 7, -126) << 16;
#endif
    }

    // Smaller of two positive numbers.
    DS_FP4_HD static uint32 min(uint32 a, uint32 b) {
#if DS_FP4_ARCH
        uint32 result;
        asm("min.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
        return result;
#else
        return smaller(a & 0xFFFF, b & 0xFFFF) | smaller(a >> 16, b >> 16) << 16;
#endif
    }

    // Larger of two numbers with no sign bit; NaN wins, infinity comes next.
    DS_FP4_HD static uint32 max_magnitude(uint32 a, uint32 b) {
#if DS_FP4_ARCH
        uint32 result;
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
        return result;
#else
        return larger(a & 0xFFFF, b & 0xFFFF) | larger(a >> 16, b >> 16) << 16;
#endif
    }

    DS_FP4_HD static Scale inverse_scale(uint32 byte) { return ((254 - byte) << 7) * 0x10001u; }

    DS_FP4_HD static uint32 scale(uint32 magnitudes, Scale inverse) {
        return fma(magnitudes, inverse, 0x80008000u);  // -0 as the addend leaves the product as it is
    }

    // FP32 bits of the larger of a word's two magnitudes.
    DS_FP4_HD static uint32 magnitude_bits(uint32 word) { return larger(word << 16, word & 0x7FFF0000u); }

    // Two finite or infinite values, to nearest even, saturating.
    DS_FP4_HD static uint32 pack(float low, float high) {
#if DS_FP4_ARCH
        uint32 result;
        asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
        return result;
#else
        const double max = 3.3895313892515355e38;
        const double a = low > max ? max : low < -max ? -max : low, b = high > max ? max : high < -max ? -max : high;
        return round_to_16_bits(a, 7, -126) | round_to_16_bits(b, 7, -126) << 16;
#endif
    }
};

struct Fp16 {
    using Element = uint16;
    static constexpr int kBytes = 2;
    static constexpr int kWords = 4;
    static constexpr bool kMultipliesPairs = false;
    static constexpr float kUnitStep = 1024.0f;
    static constexpr uint32 kNan = 0x7E007E00u;

    // 2^(127 - scale byte) reaches 2^26, beyond FP16: two factors.
    struct Scale {
        uint32 first, second;
    };

    DS_FP4_HD static float value(uint32 bits) {
#if DS_FP4_ARCH
        float result;
        asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(static_cast<uint16>(bits)));
        return result;
#else
        const uint32 magnitude = bits & 0x7FFF;
        if (magnitude >= 0x7C00) {
            return float_of((bits & 0x8000) << 16 | kInfinityBits | (magnitude & 0x3FF) << 13);
        }
        // With FP32's bias for FP16's, then corrected; subnormals come right too.
        return float_of((bits & 0x8000) << 16 | magnitude << 13) * float_of((127 + 127 - 15) << 23);
#endif
    }

    DS_FP4_HD static float low(uint32 word) { return value(word & 0xFFFF); }
    DS_FP4_HD static float high(uint32 word) { return value(word >> 16); }

    // A positive `value` in FP16's normal range that needs no rounding.
    DS_FP4_HD static uint32 splat(float value) { return ((bits_of(value) >> 13) - ((127 - 15) << 10)) * 0x10001u; }

    DS_FP4_HD static uint32 fma(uint32 a, uint32 b, uint32 c) {
#if DS_FP4_ARCH
        uint32 result;
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
        return result;
#else
        return round_to_16_bits(double(low(a)) * low(b) + low(c), 10, -14) |
               round_to_16_bits(double(high(a)) * high(b) + high(c), 10, -14) << 16;
#endif
    }

    DS_FP4_HD static uint32 min(uint32 a, uint32 b) {
#if DS_FP4_ARCH
        uint32 result;
        asm("min.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
        return result;
#else
        return smaller(a & 0xFFFF, b & 0xFFFF) | smaller(a >> 16, b >> 16) << 16;
#endif
    }

    DS_FP4_HD static uint32 max_magnitude(uint32 a, uint32 b) {
#if DS_FP4_ARCH
        uint32 result;
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
        return result;
#else
        return larger(a & 0xFFFF, b & 0xFFFF) | larger(a >> 16, b >> 16) << 16;
#endif
    }

    DS_FP4_HD static Scale inverse_scale(uint32 byte) {
        // Exponents -14 to 26 for blocks with a nonzero value; a zero block's, 127, may be anything.
        const int exponent = 127 - static_cast<int>(byte);
        const int first = exponent < 14 ? exponent : 14;
        const int second = exponent - first < 14 ? exponent - first : 14;
        return {static_cast<uint32>(first + 15) * 0x04000400u, static_cast<uint32>(second + 15) * 0x04000400u};
    }

    DS_FP4_HD static uint32 scale(uint32 magnitudes, const Scale& inverse) {
        return fma(fma(magnitudes, inverse.first, 0x80008000u), inverse.second, 0x80008000u);
    }

    DS_FP4_HD static uint32 magnitude_bits(uint32 word) { return bits_of(value(larger(word & 0xFFFF, word >> 16))); }

    DS_FP4_HD static uint32 pack(float low, float high) {
#if DS_FP4_ARCH
        uint32 result;
        asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
        return result;
#else
        const double max = 65504.0;
        const double a = low > max ? max : low < -max ? -max : low, b = high > max ? max : high < -max ? -max : high;
        return round_to_16_bits(a, 10, -14) | round_to_16_bits(b, 10, -14) << 16;
#endif
    }
};

struct Fp32 {
    using Element = uint32;
    static constexpr int kBytes = 4;
    static constexpr int kWords = 8;
    static constexpr bool kMultipliesPairs = false;
    static constexpr uint32 kNan = kFp32NanBits;

    DS_FP4_HD static uint32 max_magnitude(uint32 a, uint32 b) { return larger(a, b); }
    DS_FP4_HD static uint32 magnitude_bits(uint32 word) { return word; }

    // A finite value as it is; an infinity as the largest finite number.
    DS_FP4_HD static uint32 saturate(float value) {
        const uint32 bits = bits_of(value);
        return (bits & kMagnitudeMask) == kInfinityBits ? bits - 1 : bits;
    }
};

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

// Consecutive values of a row, what one thread holds at a time: eight, or four of each row that is turned into
// columns.
template <typename T, int kCount>
struct Values {
    static constexpr int kWords = T::kWords * kCount / 8;
    static constexpr uint32 kSignless = T::kWords == 8 ? kMagnitudeMask : 0x7FFF7FFFu;
    uint32 word[kWords];

    // Value i as FP32. The loops that call this are unrolled: `i` is a constant.
    DS_FP4_HD float value(int i) const {
        if constexpr (T::kWords == 8) {
            return float_of(word[i]);
        } else {
            return i % 2 == 0 ? T::low(word[i / 2]) : T::high(word[i / 2]);
        }
    }

    // FP32 bits of the largest magnitude; at least those of infinity if one of the values is not finite.
    DS_FP4_HD uint32 amax_bits() const {
        uint32 result = word[0] & kSignless;
#pragma unroll
        for (int i = 1; i < kWords; ++i) {
            result = T::max_magnitude(result, word[i] & kSignless);
        }
        return T::magnitude_bits(result);
    }
};

template <typename T>
using Values8 = Values<T, 8>;

}  // namespace ds_fp4
