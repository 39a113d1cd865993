// Products of fp32 by tensor cores that take tf32: x = high + low, both tf32, and
//   a b = a_high b_high + a_high b_low + a_low b_high    (a_low b_low: below 2^-22 of a b)
// Tensor cores cut sums off where fp32 rounds them, so a sum stays in them for few products only
// and is then added to the others by an ordinary addition.
// Source: Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022.
#pragma once

#include "kernel_hub/tf32.cuh"

namespace kernel_hub {

// The two parts of kCount values: the higher one to nearest, 11 bits. Values that round to inf, inf
// itself and nan give nan.
template <int kCount>
struct Parts {
    uint32_t high[kCount], low[kCount];

    __device__ __forceinline__ void split(const uint32_t (&words)[kCount]) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            high[i] = (words[i] + 0x1000u) & 0xffffe000u;
            low[i] = __float_as_uint(__uint_as_float(words[i]) - __uint_as_float(high[i]));
        }
    }
};

// sums[i][j] = a[i] b[j], for kCount 16x8 operands and 8x8 operands in pairs of words. Products
// that wait for each other are far apart.
template <int kRows, int kPairs>
__device__ __forceinline__ void multiply_parts(float (&sums)[kRows][kPairs][4],
                                               const Parts<4> (&a)[kRows],
                                               const Parts<2 * kPairs>& b) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            mma_tf32_first(sums[i][j], a[i].low, b.high[2 * j], b.high[2 * j + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            mma_tf32(sums[i][j], a[i].high, b.low[2 * j], b.low[2 * j + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            mma_tf32(sums[i][j], a[i].high, b.high[2 * j], b.high[2 * j + 1]);
        }
    }
}

// Whether the parts gave a number; else it is to be summed plainly.
__device__ __forceinline__ bool is_number(float value) {
    return fabsf(value) <= 3.402823466e38f;
}

// The product of two rows, one multiply-add after the other.
__device__ __forceinline__ float plain_product(const float* a, const float* b, int k) {
    float sum = 0.0f;
#pragma unroll 1
    for (int i = 0; i < k && sum == sum; ++i) {
        sum = fmaf(a[i], b[i], sum);
    }
    return sum;
}

}  // namespace kernel_hub
