// Where the results of many products in one launch go, 8 columns of a row at a time.
#pragma once

#include "kernel_hub/ptx.cuh"
#include "kernel_hub/vec.cuh"
#include "matmul/epilogue.cuh"

namespace kernel_hub::matmul::grouped {

// Where the results of one product go, as T or as fp32: the other pointer is null.
template <typename T>
struct Target {
    T* out;
    float* out_fp32;
    const T* bias;   // of the product's columns, or null
    int64_t stride;  // of out
    int end_row, columns, activation;
};

// Finishes and writes 8 columns of one row. kFinishes: there may be a bias and an activation.
template <bool kFinishes, typename T>
__device__ __forceinline__ void write_chunk(const Target<T>& target, int row, int column,
                                            float (&values)[8]) {
    if constexpr (kFinishes) {
        if (target.bias) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                values[i] +=
                    column + i < target.columns ? to_float(__ldg(target.bias + column + i)) : 0.0f;
            }
        }
        activate(values, target.activation);
    }
    const int64_t at = row * target.stride + column;
    const bool is_whole = column + 8 <= target.columns;
    if (target.out_fp32) {
        float* to = target.out_fp32 + at;
        if (is_whole && reinterpret_cast<uint64_t>(to) % 16 == 0) {
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                st_global(
                    to + i,
                    make_uint4(__float_as_uint(values[i]), __float_as_uint(values[i + 1]),
                               __float_as_uint(values[i + 2]), __float_as_uint(values[i + 3])));
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (column + i < target.columns) {
                to[i] = values[i];
            }
        }
        return;
    }
    T* to = target.out + at;
    if (is_whole && reinterpret_cast<uint64_t>(to) % 16 == 0) {
        st_global(to, pack<T>(values));
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (column + i < target.columns) {
            to[i] = from_float<T>(values[i]);
        }
    }
}

}  // namespace kernel_hub::matmul::grouped
