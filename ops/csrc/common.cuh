// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// What every header here stands on: integer types, bits of floats, and the few instructions that have no C++ spelling.
// Compiles under nvcc, under NVRTC (which has no host headers) and, for the tests of the format rules, as plain C++.
#pragma once

#ifdef __CUDACC__
#define DS_FP4_HD __host__ __device__ __forceinline__
#define DS_FP4_DEVICE __device__ __forceinline__
#else
#define DS_FP4_HD inline
#endif

// Whether this pass makes code for a GPU, and for which.
#ifdef __CUDA_ARCH__
#define DS_FP4_ARCH __CUDA_ARCH__
#else
#define DS_FP4_ARCH 0
#endif

namespace ds_fp4 {

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using int32 = int;
using int64 = long long;
using uint64 = unsigned long long;

constexpr uint32 kMagnitudeMask = 0x7FFFFFFFu;
constexpr uint32 kInfinityBits = 0x7F800000u;

DS_FP4_HD uint32 bits_of(float value) {
#if DS_FP4_ARCH
    return __float_as_uint(value);
#else
    uint32 bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    return bits;
#endif
}

DS_FP4_HD float float_of(uint32 bits) {
#if DS_FP4_ARCH
    return __uint_as_float(bits);
#else
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
#endif
}

// a * b, rounded to nearest even. Spelled in PTX because a plain product would flush subnormals under -ftz=true.
DS_FP4_HD float multiply(float a, float b) {
#if DS_FP4_ARCH
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return a * b;
#endif
}

// Four bytes chosen from the eight of (low, high): nibble i of `selector` names the source of byte i.
DS_FP4_HD uint32 permute_bytes(uint32 low, uint32 high, uint32 selector) {
#if DS_FP4_ARCH
    return __byte_perm(low, high, selector);
#else
    uint32 result = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32 source = (selector >> (4 * i)) & 7;
        const uint32 byte = (source < 4 ? low >> (8 * source) : high >> (8 * (source - 4))) & 0xFF;
        result |= byte << (8 * i);
    }
    return result;
#endif
}

DS_FP4_HD uint32 larger(uint32 a, uint32 b) {
    return a > b ? a : b;
}
DS_FP4_HD uint32 smaller(uint32 a, uint32 b) {
    return a < b ? a : b;
}

}  // namespace ds_fp4
