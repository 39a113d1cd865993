// Sums along a row, in a fixed order.
#pragma once

#include <float.h>

#include <type_traits>

#include "kernel_hub/math.cuh"
#include "kernel_hub/reduce.cuh"

namespace kernel_hub::rowwise::softmax {

// A sum in fp32: of fp32 rows with what its roundings lost.
// NOTE: beside a largest power of 1 those roundings are units in the last place of results.
template <typename T>
struct Sum {
    static constexpr bool kIsPaired = std::is_same_v<T, float>;
    float value = 0.0f, lost = 0.0f;

    // Knuth's two-sum: the same whichever of the two comes first.
    __device__ __forceinline__ void add(float more, float more_lost = 0.0f) {
        const float sum = __fadd_rn(value, more);
        if constexpr (kIsPaired) {
            const float added = __fsub_rn(sum, value);
            const float off = __fsub_rn(value, __fsub_rn(sum, added)) + __fsub_rn(more, added);
            lost = off + (lost + more_lost);
        }
        value = sum;
    }
    __device__ __forceinline__ Sum times(float factor) const {
        return {value * factor, kIsPaired ? lost * factor : 0.0f};
    }
    __device__ __forceinline__ float rounded() const {
        // NOTE: of infinities nothing was lost.
        return kIsPaired && fabsf(lost) <= FLT_MAX ? value + lost : value;
    }
};

// As group_sum and row_sum of reduce.cuh.
template <typename T>
__device__ __forceinline__ Sum<T> group_sum(Sum<T> sum, int width) {
#pragma unroll
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
        if (mask < width) {
            const float lost = Sum<T>::kIsPaired ? __shfl_xor_sync(kAllLanes, sum.lost, mask) : 0;
            sum.add(__shfl_xor_sync(kAllLanes, sum.value, mask), lost);
        }
    }
    return sum;
}

template <typename T>
__device__ __forceinline__ Sum<T> row_sum(Sum<T> sum, float (&slots)[2][kMaxWarps]) {
    const int row_threads = blockDim.x;
    sum = group_sum(sum, row_threads);
    if (row_threads <= kWarpSize) {
        return sum;
    }
    const int lane_idx = threadIdx.x % kWarpSize;
    const int row_warps = row_threads / kWarpSize;
    const int first_slot = threadIdx.y * row_warps;
    if (lane_idx == 0) {
        slots[0][first_slot + threadIdx.x / kWarpSize] = sum.value;
        if constexpr (Sum<T>::kIsPaired) {
            slots[1][first_slot + threadIdx.x / kWarpSize] = sum.lost;
        }
    }
    __syncthreads();
    const bool is_warp = lane_idx < row_warps;
    sum.value = is_warp ? slots[0][first_slot + lane_idx] : 0.0f;
    if constexpr (Sum<T>::kIsPaired) {
        sum.lost = is_warp ? slots[1][first_slot + lane_idx] : 0.0f;
    }
    return group_sum(sum, kWarpSize);
}

}  // namespace kernel_hub::rowwise::softmax
