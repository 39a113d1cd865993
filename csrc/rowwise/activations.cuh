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

// One of two constants, the same of the whole grid.
// NOTE: as bits that the compiler does not look into: floats were chosen in registers of each
// thread, and the second load of a row waited for places.
__device__ __forceinline__ float pick(bool is_first, float a, float b) {
    uint32_t bits = is_first ? __float_as_uint(a) : __float_as_uint(b);
    asm("" : "+r"(bits));
    return __uint_as_float(bits);
}

// By the error function or by tanh: (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)).
template <typename T>
__device__ __forceinline__ float gelu(float x, bool is_tanh) {
    const float square = x * x;
    if constexpr (sizeof(T) == 2) {
        // Either is x / (1 + exp(-x p(x^2))); of erf p is minimax for |x| <= 5: absolute error of
        // gelu 1.4e-5.
        // NOTE: the bound keeps p above 0 far out, and lets nan through `x`.
        const float near = fminf(square, pick(is_tanh, 1e6f, 25.0f));
        float slope = pick(is_tanh, 0.0f, 6.93365690e-7f);
        slope = slope * near + pick(is_tanh, 0.0f, -2.39087450e-5f);
        slope = slope * near + pick(is_tanh, 0.0f, -5.02969312e-4f);
        slope = slope * near + pick(is_tanh, 0.0713548162726f, 7.34986891e-2f);
        slope = slope * near + pick(is_tanh, 1.59576912161f, 1.59533922f);
        return times_logistic<T>(x, x * slope);
    } else if (is_tanh) {
        return times_logistic<T>(x, x * (0.0713548162726f * square + 1.59576912161f));
    } else {
        return 0.5f * x * (1.0f + erff(0.70710678f * x));
    }
}

}  // namespace kernel_hub::rowwise
