// Activations of linear and its kin, exact to fp32 or to results of 16 bits.
#pragma once

#include "kernel_hub/math.cuh"
#include "kernel_hub/mma.cuh"

namespace kernel_hub::matmul {

// As kernel_hub/ops/matmul/linear.py numbers them.
enum Activation { kIdentity = 0, kGelu = 1, kSilu = 2, kRelu = 3 };

// x Phi(x), with the error function of Abramowitz and Stegun 7.1.26 (absolute error 1.5e-7).
__device__ __forceinline__ float gelu(float x) {
    const float t = __fdividef(1.0f, 1.0f + 0.3275911f * 0.70710678f * fabsf(x));
    float tail = 1.061405429f;
    tail = tail * t - 1.453152027f;
    tail = tail * t + 1.421413741f;
    tail = tail * t - 0.284496736f;
    tail = tail * t + 0.254829592f;
    tail *= t * exp2_approx(-0.5f * kLog2e * x * x);
    // NOTE: the bound keeps inf * 0 out, and lets nan through `tail`.
    return fmaxf(x, 0.0f) - 0.5f * fminf(fabsf(x), 1e4f) * tail;
}

__device__ __forceinline__ float silu(float x) {
    return __fdividef(x, 1.0f + exp2_approx(-kLog2e * x));
}

// first x^n + ... + last, by Horner.
template <typename... More>
__device__ __forceinline__ float polynomial(float x, float first, More... more) {
    ((first = first * x + more), ...);
    return first;
}

// The same for results of 16 bits: x Phi(x), Phi as 1/2 and an odd polynomial, held between 0 and 1
// (minimax). For fp16 absolute error 6e-5, above 0 relative 8e-5; for bf16 2e-4 and 5e-4. 11 and 9
// instructions, none on the special unit.
// NOTE: the first coefficient is above 0 and belongs to an odd power: far out Phi is 0 or 1.
template <typename Out = __half>
__device__ __forceinline__ float gelu_16(float x) {
    const float square = x * x;
    constexpr bool kIsBf16 = std::is_same_v<Out, __nv_bfloat16>;
    const float slope =
        kIsBf16 ? polynomial(square, 2.27812986e-8f, -1.59859462e-6f, 4.79553601e-5f,
                             -8.14013940e-4f, 8.77238251e-3f, -6.45731091e-2f, 3.97883385e-1f)
                : polynomial(square, 3.57265259e-11f, -3.75666476e-9f, 1.74172641e-7f,
                             -4.72644979e-6f, 8.43094385e-5f, -1.05509139e-3f, 9.64335445e-3f,
                             -6.60769492e-2f, 3.98761898e-1f);
    return x * __saturatef(x * slope + 0.5f);
}

// silu for results of 16 bits: the reciprocal from a first guess by the bits of its argument (e, 5
// %), which 1 + e + e^2 (bf16, relative error 1.3e-4) or 1 + e + e^2 + e^3 (7e-6) improves, as the
// special unit has enough to do with the exponential.
template <typename Out = __half>
__device__ __forceinline__ float silu_16(float x) {
    x = max_nan(x, -44.0f);  // there it is 0
    const float divisor = 1.0f + exp2_approx(-kLog2e * x);
    const float guess = __int_as_float(0x7ef31000 - static_cast<int>(__float_as_uint(divisor)));
    const float error = 1.0f - divisor * guess;
    if constexpr (std::is_same_v<Out, __nv_bfloat16>) {
        return x * (guess * (error * error + error) + guess);
    } else {
        const float better = guess * error + guess;
        return x * (better * (error * error) + better);
    }
}

// One branch for many values: `activation` is the same for the whole grid. Out: what they are
// rounded to afterwards.
template <typename Out = float, int kCount>
__device__ __forceinline__ void activate(float (&values)[kCount], int activation) {
    constexpr bool kIs16 = sizeof(Out) == 2;
    if (activation == kGelu) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] = kIs16 ? gelu_16<Out>(values[i]) : gelu(values[i]);
        }
    } else if (activation == kSilu) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] = kIs16 ? silu_16<Out>(values[i]) : silu(values[i]);
        }
    } else if (activation == kRelu) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] = values[i] < 0.0f ? 0.0f : values[i];  // nan stays nan
        }
    }
}

}  // namespace kernel_hub::matmul
