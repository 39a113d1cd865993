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

// A byte whose type is known at run time.
using EightBits = uint8_t;

template <int kWidth>
__device__ __forceinline__ float largest_of(const float (&values)[kWidth]) {
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        largest = max_nan(largest, fabsf(values[j]));
    }
    return largest;
}

// In the lowest byte, to nearest even, of what a row's scale leaves within +-127, or of a row that
// has nan, whose scale says so.
__device__ __forceinline__ uint32_t to_int8(float value) {
    // The spacing of floats at 1.5 * 2^23 is 1: adding rounds, and leaves the integer lowest.
    return __float_as_uint(__fadd_rn(value, 12582912.0f));
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
            const float* four = values + 4 * i;
            const uint32_t low = __byte_perm(to_int8(four[0]), to_int8(four[1]), 0x0040);
            const uint32_t high = __byte_perm(to_int8(four[2]), to_int8(four[3]), 0x0040);
            words[i] = __byte_perm(low, high, 0x5410);
        }
        if constexpr (kWidth == 4) {
            *reinterpret_cast<uint32_t*>(address) = words[0];
        } else {
            *reinterpret_cast<uint2*>(address) = make_uint2(words[0], words[1]);
        }
    }
}

// What the warps of a row have found, joined, as row_sum does it: `value` is the same in all lanes
// of a warp, `none` is of no warp; join(value, width) takes it over groups of lanes.
template <typename V, typename Join>
__device__ __forceinline__ V join_warps(V value, V none, V (&slots)[kMaxWarps], const Join& join) {
    const int row_warps = blockDim.x / kWarpSize;
    const int lane_idx = threadIdx.x % kWarpSize, first_slot = threadIdx.y * row_warps;
    if (lane_idx == 0) {
        slots[first_slot + threadIdx.x / kWarpSize] = value;
    }
    __syncthreads();
    const int width = row_warps <= 8 ? 8 : kWarpSize, slot = lane_idx % width;
    return join(slot < row_warps ? slots[first_slot + slot] : none, width);
}

// As row_max, of rows that are whole warps: without its questions.
__device__ __forceinline__ float whole_row_max(float value, float (&slots)[kMaxWarps]) {
    value = group_max(value, kWarpSize);
    return blockDim.x <= kWarpSize ? value : join_warps(value, value, slots, group_max);
}

// A row of zeros has a scale too.
constexpr float kLeastLargest = 1e-12f;

// A row's scale from its largest magnitude, which it writes; what values are multiplied by so that
// it becomes `most`.
__device__ __forceinline__ float scale_row(float most, float* out_scale, float largest,
                                           bool is_there) {
    largest = max_nan(largest, kLeastLargest);
    if (threadIdx.x == 0 && is_there) {
        *out_scale = largest / most;
    }
    return most / largest;
}

}  // namespace kernel_hub::rowwise
