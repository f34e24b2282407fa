// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// The expert activations of DeepSpeed AutoEP, each a template parameter of the fused kernels. All are f(gate) * up
// with f(g) = g * sigmoid(z(g)); they differ in z, in a clamp of gate (from above) and up (both sides), and in up + 1:
//
//     Swiglu         z = g                                      Mixtral, Qwen, DeepSeek
//     SwigluClamped  z = g, clamped                             DeepSeek-V4
//     SwigluOai      z = alpha * g, clamped, up + 1             GPT-OSS
//     GegluTanh      z = 2 sqrt(2/pi) (g + 0.044715 g^3)        Gemma: GELU's tanh form, since
//                                                               (1 + tanh y) / 2 = sigmoid(2 y)
//
// Arithmetic is FP32; exp and 1/x are the GPU's approximations (2 ulp and 1 ulp), far below half a step of any output
// format.
#pragma once

#include "common.cuh"

namespace ds_fp4 {

DS_FP4_HD float exp2_approx(float x) {
#if DS_FP4_ARCH
    // Flushing is right here: what is below 2^-126 is added to 1.
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return __builtin_exp2f(x);
#endif
}

DS_FP4_HD float reciprocal_approx(float x) {
#if DS_FP4_ARCH
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return 1.0f / x;
#endif
}

// The smaller of two numbers; NaN if one is, which fminf would drop.
DS_FP4_HD float min_or_nan(float a, float b) {
#if DS_FP4_ARCH
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return a != a ? a : b != b ? b : a < b ? a : b;
#endif
}

DS_FP4_HD float max_or_nan(float a, float b) {
#if DS_FP4_ARCH
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return a != a ? a : b != b ? b : a > b ? a : b;
#endif
}

DS_FP4_HD float fused_multiply_add(float a, float b, float c) {
#if DS_FP4_ARCH
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
}

constexpr float kLog2E = 1.4426950408889634f;

struct Swiglu {
    static constexpr bool kClamped = false, kUpPlusOne = false, kUnitSlope = true;
    // -z(g) log2(e): sigmoid(z) = 1 / (1 + 2^exponent).
    DS_FP4_HD static float exponent(float g, float) { return g * -kLog2E; }
    // z'(g)
    DS_FP4_HD static float slope(float, float) { return 1.0f; }
};

struct SwigluClamped : Swiglu {
    static constexpr bool kClamped = true;
};

struct SwigluOai {
    static constexpr bool kClamped = true, kUpPlusOne = true, kUnitSlope = false;
    DS_FP4_HD static float exponent(float g, float alpha) { return (g * alpha) * -kLog2E; }
    DS_FP4_HD static float slope(float, float alpha) { return alpha; }
};

struct GegluTanh {
    static constexpr bool kClamped = false, kUpPlusOne = false, kUnitSlope = false;
    static constexpr float kLinear = 1.5957691216057308f;  // 2 sqrt(2/pi)
    static constexpr float kCubic = 0.044715f;
    DS_FP4_HD static float exponent(float g, float) {
        return g * fused_multiply_add(g * g, -kLog2E * kLinear * kCubic, -kLog2E * kLinear);
    }
    DS_FP4_HD static float slope(float g, float) {
        // Bounded: the sigmoid is flat where g^2 overflows, and zero times infinity would be NaN.
        return fused_multiply_add(min_or_nan(g * g, 1e30f), 3 * kLinear * kCubic, kLinear);
    }
};

struct ActivationScalars {
    float alpha, limit;
};

template <typename A>
DS_FP4_HD float activate(float gate, float up, const ActivationScalars& p) {
    if constexpr (A::kClamped) {
        gate = min_or_nan(gate, p.limit);
        up = max_or_nan(min_or_nan(up, p.limit), -p.limit);
    }
    if constexpr (A::kUpPlusOne) {
        up += 1.0f;
    }
    const float sigmoid = reciprocal_approx(1.0f + exp2_approx(A::exponent(gate, p.alpha)));
    return (gate * sigmoid) * up;
}

// Gradients of weight * h at one element, h = activate(gate, up), from d = the gradient of that product.
struct ActivationGradients {
    float h;  // times weight
    float gate, up;
    float weight_sum;  // d * h, added to what was there
};

template <typename A>
DS_FP4_HD void activation_backward(float gate, float up, float d, float weight, const ActivationScalars& p,
                                   ActivationGradients& out) {
    const float raw_gate = gate, raw_up = up;
    if constexpr (A::kClamped) {
        gate = min_or_nan(gate, p.limit);
        up = max_or_nan(min_or_nan(up, p.limit), -p.limit);
    }
    if constexpr (A::kUpPlusOne) {
        up += 1.0f;
    }
    const float sigmoid = reciprocal_approx(1.0f + exp2_approx(A::exponent(gate, p.alpha)));
    const float f = gate * sigmoid;
    const float f_slope = A::kUnitSlope ? fused_multiply_add(f, 1.0f - sigmoid, sigmoid)
                                        : fused_multiply_add(f * (1.0f - sigmoid), A::slope(gate, p.alpha), sigmoid);
    const float h = f * up;
    out.weight_sum = fused_multiply_add(d, h, out.weight_sum);
    out.h = h * weight;
    const float dw = d * weight;
    out.gate = (dw * up) * f_slope;
    out.up = dw * f;
    if constexpr (A::kClamped) {
        // NaN passes: comparing the other way round would hide it.
        out.gate = raw_gate > p.limit ? 0.0f : out.gate;
        out.up = raw_up > p.limit || raw_up < -p.limit ? 0.0f : out.up;
    }
}

}  // namespace ds_fp4
