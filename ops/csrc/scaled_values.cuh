// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// The second half of both decoders: eight FP16 code values times one scale, as values of the output type.
#pragma once

#include "formats.cuh"

namespace ds_fp4 {

// `scale_bits` is an FP32 power of two. Products are exact in FP32, or infinite: what rounds or saturates is `Out`.
template <typename Out>
DS_FP4_HD Values8<Out> scaled_values(const uint32 (&value)[4], uint32 scale_bits) {
    const float scale = float_of(scale_bits);
    Values8<Out> result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float low = multiply(Fp16::low(value[i]), scale), high = multiply(Fp16::high(value[i]), scale);
        if constexpr (Out::kWords == 4) {
            result.word[i] = Out::pack(low, high);
        } else {
            result.word[2 * i] = Out::saturate(low);
            result.word[2 * i + 1] = Out::saturate(high);
        }
    }
    return result;
}

template <typename Out>
DS_FP4_HD Values8<Out> nan_values() {
    Values8<Out> result;
#pragma unroll
    for (int i = 0; i < Out::kWords; ++i) {
        result.word[i] = Out::kNan;
    }
    return result;
}

// Value i becomes NaN. For the rare row that holds NaN codes.
template <typename Out>
DS_FP4_HD void set_nan(Values8<Out>& values, int i) {
    if constexpr (Out::kWords == 8) {
        values.word[i] = Out::kNan;
    } else {
        const uint32 half = i % 2 == 0 ? 0x0000FFFFu : 0xFFFF0000u;
        values.word[i / 2] = (values.word[i / 2] & ~half) | (Out::kNan & half);
    }
}

}  // namespace ds_fp4
