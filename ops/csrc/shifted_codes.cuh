// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// From one format's codes to the other's: target code = RNE(source value * 2^shift), shift being the source's scale
// exponent less the target's. ds_fp4/formats/convert.py states the same rules as tables. Scale exponents are biased by
// 127 here, so that a UE8M0 byte is one; FP32's subnormal powers of two go down to -22.
#pragma once

#include "formats.cuh"

namespace ds_fp4 {

// FP8's scale is 2^-6 of the largest MXFP4 scale in its group: E2M1's 6 becomes 384 of 448.
constexpr int kFp4ToFp8Shift = 6;

constexpr int kNanScale = 255;         // biased exponent that stands for a scale of NaN
constexpr int kLowestFp32Scale = -22;  // 2^-149
constexpr int kEmptyScale = 0;         // 2^-127, of a group that nothing decides the scale of

DS_FP4_HD int larger(int a, int b) {
    return a > b ? a : b;
}
DS_FP4_HD int smaller(int a, int b) {
    return a < b ? a : b;
}

// FP32 bits of the power of two with a biased exponent from kLowestFp32Scale to 254.
DS_FP4_HD uint32 fp32_power_bits(int exponent) {
    return exponent > 0 ? static_cast<uint32>(exponent) << 23 : 1u << (exponent - kLowestFp32Scale);
}

// Biased exponent of a scale as it is stored, FP32 or UE8M0. FP32 ones are read as the reference does
// (`fp32_scale_bits`): kNanScale for NaN and infinity.
template <bool kFp32>
DS_FP4_HD int scale_exponent(uint32 stored) {
    if constexpr (!kFp32) {
        return static_cast<int>(stored);
    }
    stored &= kMagnitudeMask;
    if (stored >= 0x00800000u) {
        return static_cast<int>(stored >> 23);
    }
    stored = larger(stored, 1u);
#if DS_FP4_ARCH
    return kLowestFp32Scale + 31 - __clz(stored);
#else
    return kLowestFp32Scale + 31 - __builtin_clz(stored);
#endif
}

// `permute_bytes` for a selector that is not a constant; bit 3 of each nibble must be zero.
DS_FP4_HD uint32 look_up_bytes(uint32 low, uint32 high, uint32 selector) {
#if DS_FP4_ARCH
    uint32 result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
    return result;
#else
    return permute_bytes(low, high, selector);
#endif
}

// ---- MXFP4 to FP8 ----

// E4M3 codes of E2M1's eight magnitudes under one shift, the code of magnitude i in byte i: what a byte permutation
// looks up.
struct E4m3Table {
    uint32 low, high;
    uint32 signs;  // sign bits that codes keep: all, or none where the codes are NaN
};

constexpr uint32 kE4m3Signs = 0x80808080u;

// `shift` is at most kFp4ToFp8Shift; any smaller one will do.
DS_FP4_HD E4m3Table e4m3_table(int shift) {
    E4m3Table table;
    if (shift >= -5) {
        // All codes are normal numbers: one more in `shift` is 8 more in a code. Code 0 stays.
        table.low = 0x3C383000u + static_cast<uint32>(shift) * 0x08080800u;
        table.high = 0x4C484440u + static_cast<uint32>(shift) * 0x08080808u;
    } else {
        const float scale = float_of(static_cast<uint32>(127 + larger(shift, -20)) << 23);
        table.low = encode_e4m3x2(0.0f, 0.5f * scale) | encode_e4m3x2(scale, 1.5f * scale) << 16;
        table.high = encode_e4m3x2(2.0f * scale, 3.0f * scale) | encode_e4m3x2(4.0f * scale, 6.0f * scale) << 16;
    }
    table.signs = kE4m3Signs;
    return table;
}

DS_FP4_HD E4m3Table e4m3_nan_table() {
    return {kE4m3NanCodes, kE4m3NanCodes, 0};
}

// Eight E4M3 codes in two words, of eight E2M1 codes, value 0 in the low nibble.
DS_FP4_HD void e2m1x8_to_e4m3(uint32 codes, const E4m3Table& table, uint32& first, uint32& second) {
    const uint32 magnitude = codes & 0x77777777u;
    const uint32 even_signs = codes << 4, odd_signs = codes;
    first =
        look_up_bytes(table.low, table.high, magnitude) | (permute_bytes(even_signs, odd_signs, 0x5140) & table.signs);
    second = look_up_bytes(table.low, table.high, magnitude >> 16) |
             (permute_bytes(even_signs, odd_signs, 0x7362) & table.signs);
}

// ---- FP8 to MXFP4 ----

// The largest magnitude among codes, as a code: 0x7F if one is NaN. Bytes compare as the high halves of 16-bit
// numbers; as BF16 numbers even the largest, 0x7F7F, is finite, and order is that of the bits.
template <int kWords>
DS_FP4_HD uint32 e4m3_amax(const uint32 (&codes)[kWords]) {
    uint32 odd = codes[0] & kE4m3NanCodes, even = odd << 8;
#pragma unroll
    for (int i = 1; i < kWords; ++i) {
        const uint32 magnitudes = codes[i] & kE4m3NanCodes;
        odd = Bf16::max_magnitude(odd, magnitudes);
        even = Bf16::max_magnitude(even, magnitudes << 8);
    }
    const uint32 both = Bf16::max_magnitude(odd, even);
    return larger(both & 0xFFFFu, both >> 16) >> 8;
}

// FP32 bits of an E4M3 magnitude that is not NaN.
DS_FP4_HD uint32 e4m3_magnitude_bits(uint32 code) {
    // In place as an FP32 number it has the bias 127 instead of 7, subnormals included.
    return bits_of(multiply(float_of(code << 20), float_of((127u + 120u) << 23)));
}

// A block's scale exponent, from the code of its largest magnitude (not NaN; 0 is taken for 1) and its group's scale
// exponent. Not bounded: MXFP4 holds 0 to kHighestFp4Scale.
DS_FP4_HD int fp8_to_fp4_exponent(uint32 amax, int exponent, uint32 rounding) {
    const int field = static_cast<int>((e4m3_magnitude_bits(larger(amax, 1u)) + rounding) >> 23);
    return field + exponent - kE2m1MaxPow2 - 127;
}

constexpr int kHighestFp4Scale = 254;

// Eight E2M1 codes, value 0 in the low nibble, of eight E4M3 codes times 2^shift, 11 at most. The rounding is that of
// encode_e2m1x8 (formats.cuh): values times 2^shift are exact within its fused multiply-adds. Without kSaturates,
// products must be below 7.
template <bool kSaturates>
DS_FP4_HD uint32 e4m3x8_to_e2m1(uint32 first, uint32 second, int shift) {
    const uint32 exponent = static_cast<uint32>(larger(shift, -12) + 15);  // at -12 every code rounds to zero
    const uint32 once = exponent * 0x04000400u, twice = once + 0x04000400u, half = once - 0x04000400u;
    const uint32 codes[2] = {first, second};
    uint32 bytes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32 magnitudes = codes[i] & kE4m3NanCodes;
        uint32 value[2], code[2];
        decode_e4m3x4(magnitudes, value[0], value[1]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const uint32 v = value[j];
            const uint32 below_2 = Fp16::fma(v, twice, Fp16::splat(Fp16::kUnitStep));
            const uint32 below_4 = Fp16::fma(v, once, Fp16::splat(Fp16::kUnitStep + 2));
            const uint32 from_4 = Fp16::fma(v, half, Fp16::splat(Fp16::kUnitStep + 4));
            code[j] = Fp16::min(Fp16::min(below_2, below_4), from_4);
            if constexpr (kSaturates) {
                code[j] = Fp16::min(code[j], Fp16::splat(Fp16::kUnitStep + 7));
            }
        }
        bytes[i] = permute_bytes(code[0], code[1], 0x6420) | ((codes[i] >> 4) & 0x08080808u);
    }
    return permute_bytes(bytes[0], bytes[1], 0x6420) + 16 * permute_bytes(bytes[0], bytes[1], 0x7531);
}

// ---- FP8 to FP8 ----

// Two codes of two FP16 values (`values` packed), which may be NaN.
DS_FP4_HD uint32 encode_e4m3x2_of_fp16(uint32 values) {
#if DS_FP4_ARCH >= 890
    uint16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(codes) : "r"(values));
    return codes;
#else
    return encode_e4m3x2_on_bits(Fp16::low(values), Fp16::high(values));
#endif
}

// `decode_e4m3x4` for codes that may be NaN.
DS_FP4_HD void decode_e4m3x4_with_nan(uint32 codes, uint32& low, uint32& high) {
    decode_e4m3x4(codes, low, high);
#if DS_FP4_ARCH < 890
    low = (codes & 0x7Fu) == 0x7Fu ? (low & 0xFFFF0000u) | 0x7E00u : low;
    low = (codes & 0x7F00u) == 0x7F00u ? (low & 0xFFFFu) | 0x7E000000u : low;
    high = (codes & 0x7F0000u) == 0x7F0000u ? (high & 0xFFFF0000u) | 0x7E00u : high;
    high = (codes & 0x7F000000u) == 0x7F000000u ? (high & 0xFFFFu) | 0x7E000000u : high;
#endif
}

// What codes are multiplied by: 2^shift twice as FP16, for a shift up to 0; at -19 all round to zero.
DS_FP4_HD uint32 e4m3_factor(int shift) {
    const int bounded = larger(shift, -19);
    const uint32 half = bounded >= -14 ? static_cast<uint32>(bounded + 15) << 10 : 1u << (bounded + 24);
    return half * 0x10001u;
}

constexpr uint32 kNanFactor = 0x7FFF7FFFu;  // makes every code NaN, 0x7F

// Four codes in a word times a factor. NaN codes become 0x7F.
DS_FP4_HD uint32 scale_e4m3x4(uint32 codes, uint32 factor) {
    uint32 low, high;
    decode_e4m3x4_with_nan(codes, low, high);
    low = Fp16::fma(low, factor, 0x80008000u);
    high = Fp16::fma(high, factor, 0x80008000u);
    return encode_e4m3x2_of_fp16(low) | encode_e4m3x2_of_fp16(high) << 16;
}

}  // namespace ds_fp4
