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

// By the error function or by tanh, of some at once: (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)).
// NOTE: one question for all of them. Coefficients chosen for each would be in registers, where the
// second load of a row waits for a place, and tanh would take as long as erf.
template <typename T, int kWidth>
__device__ __forceinline__ void gelu(const float (&x)[kWidth], bool is_tanh,
                                     float (&found)[kWidth]) {
    constexpr bool kIsNarrow = sizeof(T) == 2;
    float slope[kWidth];  // the logit's, of what is x / (1 + exp(-x slope))
    if (is_tanh) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            slope[j] = 0.0713548162726f * (x[j] * x[j]) + 1.59576912161f;
        }
    } else if constexpr (kIsNarrow) {
        // p(x^2), minimax for |x| <= 5: absolute error of gelu 1.4e-5.
        // NOTE: the bound keeps p above 0 far out, and lets nan through `x`.
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            const float near = fminf(x[j] * x[j], 25.0f);
            slope[j] = 6.93365690e-7f;
            slope[j] = slope[j] * near - 2.39087450e-5f;
            slope[j] = slope[j] * near - 5.02969312e-4f;
            slope[j] = slope[j] * near + 7.34986891e-2f;
            slope[j] = slope[j] * near + 1.59533922f;
        }
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        if (kIsNarrow || is_tanh) {
            found[j] = times_logistic<T>(x[j], x[j] * slope[j]);
        } else {
            found[j] = 0.5f * x[j] * (1.0f + erff(0.70710678f * x[j]));
        }
    }
}

}  // namespace kernel_hub::rowwise
