// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// FP32 weight gradients [E, 2I, K] to BF16 gradients of w1 and w3, [E, I, K] each. Reads four bytes a value, writes
// two.
#pragma once

#include "row_tiles.cuh"

namespace ds_fp4 {

struct split_weight_gradient_params {
    int64 tiles;         // of all halves, a half being one expert's w1 or w3
    int64 tiles_a_half;  // of four units a thread
    int64 half_units;    // I * K / 8
    const char* gradient;
    char* g1;
    char* g3;
};

DS_FP4_HD uint32 bf16x2_of(float low, float high) {
#if DS_FP4_ARCH
    uint32 result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
#else
    const auto one = [](float value) {
        const uint32 bits = bits_of(value);
        return value != value ? 0x7FFFu : (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
    };
    return one(low) | one(high) << 16;
#endif
}

// Template for the table of kernels' sake; there is one instantiation.
template <typename...>
__global__ void __launch_bounds__(kThreads, kMinBlocks) split_weight_gradient(const split_weight_gradient_params p) {
    for (uint32 tile = blockIdx.x; tile < static_cast<uint32>(p.tiles); tile += gridDim.x) {
        const uint32 half = tile / static_cast<uint32>(p.tiles_a_half);
        const uint32 number = tile - half * static_cast<uint32>(p.tiles_a_half);
        const int64 first = static_cast<int64>(number) * (kSteps * kThreads) + threadIdx.x,
                    left = p.half_units - first;
        const char* gradient = p.gradient + (half * p.half_units + first) * 32;
        char* out = (half % 2 == 0 ? p.g1 : p.g3) + (half / 2 * p.half_units + first) * 16;
        uint32 words[kSteps][8];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (step * kThreads < left) {
                load_words(gradient + step * kThreads * 32, words[step]);
            }
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (step * kThreads < left) {
                uint32 result[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    result[i] = bf16x2_of(float_of(words[step][2 * i]), float_of(words[step][2 * i + 1]));
                }
                store_words(out + step * kThreads * 16, result);
            }
        }
    }
}

}  // namespace ds_fp4
