// Activations, exact to fp32 or to results of 16 bits.
#pragma once

#include "kernel_hub/math.cuh"

namespace kernel_hub::rowwise {

// value / (1 + exp(-logit)). 16-bit results need neither the slow exponential nor the slow
// division; their error is far below the rounding.
// NOTE: __expf and __fdividef take five instructions more, for subnormal numbers that vanish here.
template <typename T>
__device__ __forceinline__ float times_logistic(float value, float logit) {
    if constexpr (sizeof(T) == 2) {
        return value * reciprocal_approx(1.0f + exp2_approx(-kLog2e * logit));
    } else {
        return value / (1.0f + expf(-logit));
    }
}

// By the error function or by tanh.
template <typename T, bool kIsTanh>
__device__ __forceinline__ float gelu(float x) {
    const float square = x * x;
    if constexpr (kIsTanh) {
        // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))
        return times_logistic<T>(x, x * (0.0713548162726f * square + 1.59576912161f));
    } else if constexpr (sizeof(T) == 2) {
        // Phi(x) = 1 / (1 + exp(-x p(x^2))), p minimax for |x| <= 5: absolute error of gelu 1.4e-5.
        // NOTE: the bound keeps p above 0 far out, and lets nan through `x`.
        const float near = fminf(square, 25.0f);
        float slope = 6.93365690e-7f;
        slope = slope * near - 2.39087450e-5f;
        slope = slope * near - 5.02969312e-4f;
        slope = slope * near + 7.34986891e-2f;
        slope = slope * near + 1.59533922f;
        return times_logistic<T>(x, x * slope);
    } else {
        return 0.5f * x * (1.0f + erff(0.70710678f * x));
    }
}

}  // namespace kernel_hub::rowwise
