// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// The format rules on bits: scales (UE8M0 and FP32 powers of two), E2M1 and E4M3 codes. ds_fp4/formats states the same
// rules in PyTorch; tests/unit/test_kernel_sources.py compares the two on the host, over every BF16 number.
#pragma once

#include "common.cuh"
#include "pairs.cuh"

namespace ds_fp4 {

constexpr int kMxfp4Block = 32;
constexpr int kFp8Group = 128;
constexpr uint32 kUe8m0Nan = 0xFF;
constexpr uint32 kE4m3NanCodes = 0x7F7F7F7Fu;

// Exponents of E2M1's and E4M3's largest values, 6 = 1.5 * 2^2 and 448 = 1.75 * 2^8.
constexpr int kE2m1MaxPow2 = 2;
constexpr int kE4m3MaxPow2 = 8;

// Carries into the exponent field where the significand is above that of 448: ceil(log2(amax / 448)) + 8.
constexpr uint32 kFp8ScaleRounding = 0x1FFFFF;

// A block's scale as a UE8M0 byte, from the FP32 bits of its largest magnitude. `rounding` is added to the bits first,
// so that they carry into the exponent where the mode rounds up (ds_fp4.formats.SCALE_ROUNDINGS). Subnormal maxima
// need no care of their own: their exponent field, 0 or after the carry 1, clamps to byte 0 as their true exponent
// would.
DS_FP4_HD uint32 mxfp4_scale(uint32 amax_bits, uint32 rounding) {
    if (amax_bits >= kInfinityBits) {
        return kUe8m0Nan;
    }
    const uint32 field = (amax_bits + rounding) >> 23;
    return larger(field, kE2m1MaxPow2) - kE2m1MaxPow2;
}

// The same for an FP8 group. A non-finite maximum gets byte 0 too; its codes say NaN.
DS_FP4_HD uint32 fp8_scale(uint32 amax_bits) {
    if (amax_bits >= kInfinityBits) {
        return 0;
    }
    const uint32 field = (amax_bits + kFp8ScaleRounding) >> 23;
    return larger(field, kE4m3MaxPow2) - kE4m3MaxPow2;
}

// 2^(127 - byte) for bytes up to 253; no block of finite values has a larger one.
DS_FP4_HD float inverse_scale(uint32 byte) {
    return float_of((254 - byte) << 23);
}

// FP32 bits of 2^(byte - 127); byte 0 is the subnormal 2^-127, byte 255 is NaN.
DS_FP4_HD uint32 ue8m0_scale_bits(uint32 byte) {
    if (byte == kUe8m0Nan) {
        return kFp32NanBits;
    }
    return byte == 0 ? 0x00400000u : byte << 23;
}

// An FP32 scale as the reference reads it: the power of two at or below it, NaN for NaN and infinity, 2^-149 for zero.
DS_FP4_HD uint32 fp32_scale_bits(uint32 bits) {
    bits &= kMagnitudeMask;
    if (bits >= kInfinityBits) {
        return kFp32NanBits;
    }
    if (bits >= 0x00800000u) {
        return bits & kInfinityBits;
    }
    bits = larger(bits, 1);
#if DS_FP4_ARCH
    return 1u << (31 - __clz(bits));
#else
    return 1u << (31 - __builtin_clz(bits));
#endif
}

// ---- E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 ----
//
// The code of a magnitude v is the integer nearest to min(2v, v + 2, v/2 + 4, 7): code values are the corners of that
// concave curve, which is straight between them, so that nearest on one side is nearest on the other, and a tie goes
// to the even code on both. Rounding comes from adding a power of two so large that numbers there are 1 apart: each of
// the three fused multiply-adds below rounds once, and the smallest of the rounded results is the rounded smallest
// one.

// Eight codes, value 0 in the low nibble, of Bf16 or Fp16 values (two a word) divided by the block's scale.
template <typename Pair>
DS_FP4_HD uint32 encode_e2m1x8(const uint32 (&x)[4], const typename Pair::Scale& inverse) {
    uint32 code[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32 v = Pair::scale(x[i] & 0x7FFF7FFFu, inverse);
        const uint32 below_2 = Pair::fma(v, Pair::splat(2.0f), Pair::splat(Pair::kUnitStep));
        const uint32 below_4 = Pair::fma(v, Pair::splat(1.0f), Pair::splat(Pair::kUnitStep + 2));
        const uint32 from_4 = Pair::fma(v, Pair::splat(0.5f), Pair::splat(Pair::kUnitStep + 4));
        code[i] = Pair::min(Pair::min(below_2, below_4), Pair::min(from_4, Pair::splat(Pair::kUnitStep + 7)));
    }
    // Bytes 0 and 2 of a word hold a code, bytes 1 and 3 of the input word end in a sign.
    const uint32 code03 = permute_bytes(code[0], code[1], 0x6240), code47 = permute_bytes(code[2], code[3], 0x6240);
    const uint32 sign03 = permute_bytes(x[0], x[1], 0x7351), sign47 = permute_bytes(x[2], x[3], 0x7351);
    const uint32 even =
        permute_bytes(code03, code47, 0x5410) | ((permute_bytes(sign03, sign47, 0x5410) >> 4) & 0x08080808u);
    const uint32 odd =
        (permute_bytes(code03, code47, 0x7632) << 4) | (permute_bytes(sign03, sign47, 0x7632) & 0x80808080u);
    return even | odd;
}

// One code with its sign, of an FP32 value given by its bits.
DS_FP4_HD uint32 encode_e2m1(uint32 x, float inverse) {
    constexpr float kUnitStep = 8388608.0f;  // 2^23
    const float v = multiply(float_of(x & kMagnitudeMask), inverse);
    const uint32 below_2 = bits_of(v * 2.0f + kUnitStep);  // 2v is exact, so that fused or not the sum rounds once
    const uint32 below_4 = bits_of(v + (kUnitStep + 2.0f));
    const uint32 from_4 = bits_of(v * 0.5f + (kUnitStep + 4.0f));
    const uint32 code = smaller(smaller(below_2, below_4), smaller(from_4, bits_of(kUnitStep + 7.0f))) & 7;
    return code | ((x >> 28) & 8);
}

template <typename In>
DS_FP4_HD uint32 encode_e2m1x8(const Values8<In>& x, uint32 scale_byte) {
    if constexpr (In::kWords == 4) {
        return encode_e2m1x8<In>(x.word, In::inverse_scale(scale_byte));
    } else {
        const float inverse = inverse_scale(scale_byte);
        uint32 codes = 0;
#pragma unroll
        for (int i = 7; i >= 0; --i) {
            codes = (codes << 4) | encode_e2m1(x.word[i], inverse);
        }
        return codes;
    }
}

// Eight codes as FP16 values, two a word. Every E2M1 value is an FP16 number whose low byte is zero, so that a byte
// permutation looks four of them up at once.
DS_FP4_HD void decode_e2m1x8(uint32 codes, uint32 (&value)[4]) {
    constexpr uint32 kLow = 0x3E3C3800u, kHigh = 0x46444240u;  // high bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6
    const uint32 magnitude = codes & 0x77777777u;
    const uint32 even_signs = codes << 4, odd_signs = codes;
    const uint32 byte03 =
        permute_bytes(kLow, kHigh, magnitude & 0xFFFF) | (permute_bytes(even_signs, odd_signs, 0x5140) & 0x80808080u);
    const uint32 byte47 =
        permute_bytes(kLow, kHigh, magnitude >> 16) | (permute_bytes(even_signs, odd_signs, 0x7362) & 0x80808080u);
    value[0] = permute_bytes(byte03, 0, 0x1404);
    value[1] = permute_bytes(byte03, 0, 0x3424);
    value[2] = permute_bytes(byte47, 0, 0x1404);
    value[3] = permute_bytes(byte47, 0, 0x3424);
}

// ---- E4M3: largest value 448, smallest 2^-9, NaN 0x7F ----

// Two codes (`low` in the low byte) of values that are NaN or up to 448 in magnitude.
DS_FP4_HD uint32 encode_e4m3x2_on_bits(float low, float high) {
    uint32 codes = 0;
    const uint32 bits[2] = {bits_of(low), bits_of(high)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32 magnitude = bits[i] & kMagnitudeMask;
        // From 2^-6 on the code is the top of the bit pattern, rounded. Below, codes are 2^-9 apart, as FP32 numbers
        // at 2^14 are.
        const uint32 normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3);
        const uint32 subnormal = bits_of(float_of(magnitude) + 16384.0f) - bits_of(16384.0f);
        const uint32 code = (magnitude >= 0x3C800000u ? normal : subnormal) | ((bits[i] >> 24) & 0x80);
        codes |= (magnitude > kInfinityBits ? 0x7Fu : code) << (8 * i);
    }
    return codes;
}

DS_FP4_HD uint32 encode_e4m3x2(float low, float high) {
#if DS_FP4_ARCH >= 890
    uint16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
#else
    return encode_e4m3x2_on_bits(low, high);
#endif
}

// Eight codes in two words of values divided by the group's scale.
template <typename In>
DS_FP4_HD void encode_e4m3x8(const Values8<In>& x, uint32 scale_byte, uint32 (&codes)[2]) {
    const float inverse = inverse_scale(scale_byte);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32 low = encode_e4m3x2(multiply(x.value(4 * i), inverse), multiply(x.value(4 * i + 1), inverse));
        const uint32 high =
            encode_e4m3x2(multiply(x.value(4 * i + 2), inverse), multiply(x.value(4 * i + 3), inverse));
        codes[i] = low | (high << 16);
    }
}

// What four values are multiplied by before they become codes: inverses of their scales. BF16 values are multiplied as
// pairs: powers of two leave them as they are, but for products so small that they round to zero anyway.
template <typename In>
struct Inverses4 {
    static constexpr bool kPairs = In::kMultipliesPairs;
    uint32 factor[kPairs ? 2 : 4];

    // FP32 bits for one scale byte; NaN, which makes NaN codes of whatever it is multiplied with, where the largest
    // magnitude (FP32 bits) is not finite.
    DS_FP4_HD static uint32 bits(uint32 amax, uint32 scale_byte) {
        return amax < kInfinityBits ? (254 - scale_byte) << 23 : kFp32NanBits;
    }

    DS_FP4_HD Inverses4(uint32 b0, uint32 b1, uint32 b2, uint32 b3) {
        if constexpr (kPairs) {
            factor[0] = permute_bytes(b0, b1, 0x7632);
            factor[1] = permute_bytes(b2, b3, 0x7632);
        } else {
            factor[0] = b0;
            factor[1] = b1;
            factor[2] = b2;
            factor[3] = b3;
        }
    }

    // The same for all four.
    DS_FP4_HD explicit Inverses4(uint32 b) : Inverses4(b, b, b, b) {}
};

// Four codes in a word.
template <typename In>
DS_FP4_HD uint32 encode_e4m3x4(const Values<In, 4>& x, const Inverses4<In>& inverse) {
    if constexpr (Inverses4<In>::kPairs) {
        const uint32 first = In::fma(x.word[0], inverse.factor[0], 0x80008000u);
        const uint32 second = In::fma(x.word[1], inverse.factor[1], 0x80008000u);
        return encode_e4m3x2(In::low(first), In::high(first)) | encode_e4m3x2(In::low(second), In::high(second)) << 16;
    } else {
        float scaled[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            scaled[i] = multiply(x.value(i), float_of(inverse.factor[i]));
        }
        return encode_e4m3x2(scaled[0], scaled[1]) | encode_e4m3x2(scaled[2], scaled[3]) << 16;
    }
}

// Two codes as FP16 values. NaN codes are the caller's business.
DS_FP4_HD uint32 decode_e4m3x2_on_bits(uint32 codes) {
    // Shifted into place a code is an FP16 number with 7 for the exponent's bias instead of 15, subnormals included.
    const uint32 bytes = permute_bytes(codes, 0, 0x1404);
    return Fp16::fma(((bytes & 0x7F007F00u) >> 1) | (bytes & 0x80008000u), Fp16::splat(256.0f), 0x80008000u);
}

// Two codes (in the low half) as FP16 values.
DS_FP4_HD uint32 decode_e4m3x2(uint32 codes) {
#if DS_FP4_ARCH >= 890
    uint32 value;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(value) : "h"(static_cast<uint16>(codes)));
    return value;
#else
    return decode_e4m3x2_on_bits(codes);
#endif
}

// Four codes in a word as FP16 values, two a word.
DS_FP4_HD void decode_e4m3x4(uint32 codes, uint32& low, uint32& high) {
#if DS_FP4_ARCH >= 890
    // Halves are named in PTX: shifted down by C++, the upper one would cost an instruction.
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}"
        : "=r"(low), "=r"(high)
        : "r"(codes));
#else
    low = decode_e4m3x2_on_bits(codes & 0xFFFFu);
    high = decode_e4m3x2_on_bits(codes >> 16);
#endif
}

// Eight codes in two words as FP16 values, two a word.
DS_FP4_HD void decode_e4m3x8(const uint32 (&codes)[2], uint32 (&value)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        decode_e4m3x4(codes[i], value[2 * i], value[2 * i + 1]);
    }
}

// Whether one of a word's four codes is NaN (0x7F or 0xFF): only those carry into a byte's top bit.
DS_FP4_HD bool has_e4m3_nan(uint32 codes) {
    return (((codes & kE4m3NanCodes) + 0x01010101u) & 0x80808080u) != 0;
}

}  // namespace ds_fp4
