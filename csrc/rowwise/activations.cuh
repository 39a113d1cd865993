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

// By the error function or by tanh, of some at once: (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)). Of 16
// bits both are x / (1 + 2^(x p)), p a polynomial of x^2. Results are multiples of `unit`.
// NOTE: one question for all of them. Coefficients chosen for each would be in registers, where the
// second load of a row waits for a place, and tanh would take as long as erf.
template <typename T, int kWidth>
__device__ __forceinline__ void gelu(const float (&x)[kWidth], bool is_tanh, float unit,
                                     float (&found)[kWidth]) {
    if constexpr (sizeof(T) == 2) {
        float p[kWidth];
        if (is_tanh) {
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                p[j] = -0.10294324f * (x[j] * x[j]) - 2.3022082f;
            }
        } else {
            // Minimax for |x| <= 5: absolute error of gelu 1.4e-5. Beyond, p falls on.
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                const float square = x[j] * x[j];
                p[j] = -1.00031524e-6f;
                p[j] = p[j] * square + 3.44930278e-5f;
                p[j] = p[j] * square + 7.25631332e-4f;
                p[j] = p[j] * square - 0.106036194f;
                p[j] = p[j] * square - 2.30158798f;
            }
        }
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            found[j] = x[j] * reciprocal_approx(unit + unit * exp2_approx(x[j] * p[j]));
        }
    } else {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            if (is_tanh) {
                const float slope = 0.0713548162726f * (x[j] * x[j]) + 1.59576912161f;
                found[j] = times_logistic<T>(x[j], x[j] * slope) / unit;
            } else {
                found[j] = 0.5f * x[j] * (1.0f + erff(0.70710678f * x[j])) / unit;
            }
        }
    }
}

}  // namespace kernel_hub::rowwise
