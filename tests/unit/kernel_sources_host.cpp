// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// The kernels' format rules as host code, for test_kernel_sources.py: what one warp does with rows of whole units, one
// unit after the other. Compiled by the host's compiler from the headers that nvcc and NVRTC get.
#include <cmath>

#include "formats.cuh"
#include "scaled_values.cuh"
#include "shifted_codes.cuh"

#ifdef DS_FP4_WITH_CUDA_HEADERS
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#endif

using namespace ds_fp4;

namespace {

template <typename T>
Values8<T> load(const void* base, int64 unit) {
    Values8<T> result;
    __builtin_memcpy(&result, static_cast<const char*>(base) + unit * 8 * T::kBytes, 8 * T::kBytes);
    return result;
}

template <typename T>
uint32 amax_of(const void* x, int64 first_unit, int units) {
    uint32 amax = 0;
    for (int i = 0; i < units; ++i) {
        amax = larger(amax, load<T>(x, first_unit + i).amax_bits());
    }
    return amax;
}

template <typename T>
void to_fp4(const void* x, int64 blocks, uint32 rounding, uint32* packed, uint8* scales) {
    for (int64 block = 0; block < blocks; ++block) {
        const uint32 scale = mxfp4_scale(amax_of<T>(x, 4 * block, 4), rounding);
        scales[block] = static_cast<uint8>(scale);
        for (int64 unit = 4 * block; unit < 4 * block + 4; ++unit) {
            packed[unit] = scale == kUe8m0Nan ? 0 : encode_e2m1x8(load<T>(x, unit), scale);
        }
    }
}

template <typename T>
void from_fp4(const uint32* packed, const uint8* scales, int64 blocks, char* out) {
    for (int64 unit = 0; unit < 4 * blocks; ++unit) {
        uint32 value[4];
        decode_e2m1x8(packed[unit], value);
        const uint32 scale = scales[unit / 4];
        const Values8<T> values =
            scale == kUe8m0Nan ? nan_values<T>() : scaled_values<T>(value, ue8m0_scale_bits(scale));
        __builtin_memcpy(out + unit * 8 * T::kBytes, &values, 8 * T::kBytes);
    }
}

template <typename T>
void to_fp8(const void* x, int64 groups, uint32* q, uint8* ue8m0, uint32* fp32) {
    for (int64 group = 0; group < groups; ++group) {
        const uint32 amax = amax_of<T>(x, 16 * group, 16);
        const uint32 scale = fp8_scale(amax);
        ue8m0[group] = static_cast<uint8>(scale);
        fp32[group] = ue8m0_scale_bits(scale);
        for (int64 unit = 16 * group; unit < 16 * group + 16; ++unit) {
            uint32 codes[2] = {kE4m3NanCodes, kE4m3NanCodes};
            if (amax < kInfinityBits) {
                encode_e4m3x8(load<T>(x, unit), scale, codes);
            }
            q[2 * unit] = codes[0];
            q[2 * unit + 1] = codes[1];
        }
    }
}

template <typename T>
void from_fp8(const uint32* q, const uint32* scale_bits, int64 groups, char* out) {
    for (int64 unit = 0; unit < 16 * groups; ++unit) {
        const uint32 codes[2] = {q[2 * unit], q[2 * unit + 1]};
        uint32 value[4];
        decode_e4m3x8(codes, value);
        Values8<T> values = scaled_values<T>(value, scale_bits[unit / 16]);
        for (int i = 0; i < 8; ++i) {
            if (scale_bits[unit / 16] == kFp32NanBits || has_e4m3_nan((codes[i / 4] >> (8 * (i % 4))) & 0xFF)) {
                set_nan(values, i);
            }
        }
        __builtin_memcpy(out + unit * 8 * T::kBytes, &values, 8 * T::kBytes);
    }
}

}  // namespace

// `type`: 0 BF16, 1 FP16, 2 FP32.
#define DISPATCH(type, function, ...) \
    if (type == 0) {                  \
        function<Bf16>(__VA_ARGS__);  \
    } else if (type == 1) {           \
        function<Fp16>(__VA_ARGS__);  \
    } else {                          \
        function<Fp32>(__VA_ARGS__);  \
    }

extern "C" {

void host_to_fp4(int type, const void* x, int64 blocks, uint32 rounding, uint32* packed, uint8* scales) {
    DISPATCH(type, to_fp4, x, blocks, rounding, packed, scales)
}

void host_from_fp4(int type, const uint32* packed, const uint8* scales, int64 blocks, char* out) {
    DISPATCH(type, from_fp4, packed, scales, blocks, out)
}

void host_to_fp8(int type, const void* x, int64 groups, uint32* q, uint8* ue8m0, uint32* fp32) {
    DISPATCH(type, to_fp8, x, groups, q, ue8m0, fp32)
}

void host_from_fp8(int type, const uint32* q, const uint32* scale_bits, int64 groups, char* out) {
    DISPATCH(type, from_fp8, q, scale_bits, groups, out)
}

void host_scale_bits(const uint32* fp32, int64 count, uint32* out) {
    for (int64 i = 0; i < count; ++i) {
        out[i] = fp32_scale_bits(fp32[i]);
    }
}

// Every pair of packed E2M1 bytes under `count` shifts: eight codes (four bytes alike) to E4M3.
void host_fp4_to_fp8(const int32* shifts, int64 count, uint8* codes) {
    for (int64 i = 0; i < count; ++i) {
        const E4m3Table table = shifts[i] > kFp4ToFp8Shift ? e4m3_nan_table() : e4m3_table(shifts[i]);
        for (uint32 byte = 0; byte < 256; ++byte, codes += 8) {
            uint32 words[2];
            e2m1x8_to_e4m3(byte * 0x01010101u, table, words[0], words[1]);
            __builtin_memcpy(codes, words, 8);
        }
    }
}

// Eight E4M3 codes at a time under one shift to packed E2M1, and to E4M3.
void host_fp8_to_fp4(const uint32* codes, int64 units, int32 shift, uint32* packed) {
    for (int64 i = 0; i < units; ++i) {
        packed[i] = e4m3x8_to_e2m1<true>(codes[2 * i], codes[2 * i + 1], shift);
    }
}

void host_fp8_to_fp8(const uint32* codes, int64 words, int32 shift, uint32* result) {
    for (int64 i = 0; i < words; ++i) {
        result[i] = scale_e4m3x4(codes[i], e4m3_factor(shift));
    }
}

// Largest magnitude code of each 16 codes.
void host_e4m3_amax(const uint32* codes, int64 units, uint32* result) {
    for (int64 i = 0; i < units; ++i) {
        const uint32 words[4] = {codes[4 * i], codes[4 * i + 1], codes[4 * i + 2], codes[4 * i + 3]};
        result[i] = e4m3_amax(words);
    }
}

#ifdef DS_FP4_WITH_CUDA_HEADERS
// The same conversions in NVIDIA's terms: decoded, scaled in FP64, which is exact, and encoded.
uint8 nvidia_shifted(uint8 code, int from_fp4, int to_fp4, int shift) {
    const __half_raw half =
        from_fp4 ? __nv_cvt_fp4_to_halfraw(code, __NV_E2M1) : __nv_cvt_fp8_to_halfraw(code, __NV_E4M3);
    const double value = std::ldexp(static_cast<double>(__half2float(__half(half))), shift);
    return to_fp4 ? __nv_cvt_double_to_fp4(value, __NV_E2M1, cudaRoundNearest)
                  : __nv_cvt_double_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

// NVIDIA's own conversions of the same scaled values, one code a byte.
void nvidia_e2m1(const float* x, int64 count, uint8* codes) {
    for (int64 i = 0; i < count; ++i) {
        codes[i] = __nv_cvt_float_to_fp4(x[i], __NV_E2M1, cudaRoundNearest);
    }
}

void nvidia_e4m3(const float* x, int64 count, uint8* codes) {
    for (int64 i = 0; i < count; ++i) {
        codes[i] = __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, __NV_E4M3);
    }
}
#endif
}
