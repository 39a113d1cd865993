// What softmax and its logarithm are given, and what both ways through a row share.
#pragma once

#include "rowwise/softmax/row.cuh"

namespace kernel_hub::rowwise::softmax {

template <typename T>
struct SoftmaxParams {
    T* out;            // (outer, middle, num_rows, size)
    const T* x;        // same shape
    const void* mask;  // same shape, T or bytes of 0 and 1, or null
    RowStrides out_strides, x_strides, mask_strides;
    int num_rows, size, blocks_a_row;
    int is_added;  // the mask is T
    int is_log;
    float scale;

    __device__ __forceinline__ const void* mask_of(int64_t row_idx) const {
        const int64_t start = mask_strides.start(row_idx) * (is_added ? sizeof(T) : 1);
        return static_cast<const uint8_t*>(mask) + start;
    }
    // Whether a row's mask is whole words where x is whole vectors.
    __device__ __forceinline__ bool fits(const Share& share, const void* of_row) const {
        return is_added ? share.fits(static_cast<const T*>(of_row))
                        : (reinterpret_cast<uintptr_t>(of_row) - share.lead) % 4 == 0;
    }
};

template <typename T>
__device__ __forceinline__ float quotient(float a, float b) {
    if constexpr (std::is_same_v<T, float>) {
        return a / b;
    }
    return __fdividef(a, b);
}

// What numbers are set off from, so that a part of -inf alone gives no nan.
__device__ __forceinline__ float base_of(float largest) {
    return largest == -INFINITY ? 0.0f : largest;
}

}  // namespace kernel_hub::rowwise::softmax
