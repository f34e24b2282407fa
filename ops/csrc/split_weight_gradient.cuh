// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// FP32 weight gradients [E, 2I, K] to BF16 gradients of w1 and w3, [E, I, K] each. Reads four bytes a value, writes
// two.
#pragma once

#include "pairs.cuh"
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
                    result[i] = pack_bf16x2(float_of(words[step][2 * i]), float_of(words[step][2 * i + 1]));
                }
                store_words(out + step * kThreads * 16, result);
            }
        }
    }
}

}  // namespace ds_fp4
