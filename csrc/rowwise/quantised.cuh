// Results of 8 bits: the largest magnitude, the scale it makes, numbers rounded and written.
#pragma once

#include "kernel_hub/e4m3.cuh"
#include "kernel_hub/reduce.cuh"
#include "kernel_hub/vec.cuh"

namespace kernel_hub::rowwise {

// The largest that Out holds.
template <typename Out>
constexpr float kLargest = sizeof(Out) == 1 ? 127.0f : 0.0f;
template <>
constexpr float kLargest<__nv_fp8_e4m3> = 448.0f;

template <int kWidth>
__device__ __forceinline__ float largest_of(const float (&values)[kWidth]) {
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        largest = max_nan(largest, fabsf(values[j]));
    }
    return largest;
}

__device__ __forceinline__ uint32_t to_int8(float value) {
    return static_cast<uint32_t>(static_cast<int>(rintf(fminf(fmaxf(value, -127.0f), 127.0f)))) &
           0xff;
}

// Writes kWidth values, rounded to Out.
template <typename Out, int kWidth>
__device__ __forceinline__ void write_row(Out* address, const float (&values)[kWidth]) {
    if constexpr (sizeof(Out) > 1) {
        Access<Out, kWidth>::write(address, values);
    } else if constexpr (std::is_same_v<Out, __nv_fp8_e4m3>) {
        write_e4m3(address, values);
    } else if constexpr (kWidth == 1) {
        *address = static_cast<Out>(to_int8(values[0]));
    } else {
        uint32_t words[kWidth / 4];
#pragma unroll
        for (int i = 0; i < kWidth / 4; ++i) {
            words[i] = to_int8(values[4 * i]) | to_int8(values[4 * i + 1]) << 8 |
                       to_int8(values[4 * i + 2]) << 16 | to_int8(values[4 * i + 3]) << 24;
        }
        if constexpr (kWidth == 4) {
            *reinterpret_cast<uint32_t*>(address) = words[0];
        } else {
            *reinterpret_cast<uint2*>(address) = make_uint2(words[0], words[1]);
        }
    }
}

// A row's scale from its largest magnitude, which it writes; what values are multiplied by.
template <typename Out>
__device__ __forceinline__ float scale_row(float* out_scale, float largest, bool is_there) {
    // A row of zeros has a scale too, and that of one with nan says so.
    largest = max_nan(largest, 1e-12f);
    if (threadIdx.x == 0 && is_there) {
        *out_scale = largest / kLargest<Out>;
    }
    return kLargest<Out> / largest;
}

}  // namespace kernel_hub::rowwise
