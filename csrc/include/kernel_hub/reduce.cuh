// Sums and maxima over a warp and over the threads of one row. Portable to sm_80. Fixed order: the
// same bits on every run.
#pragma once

#include "kernel_hub/ptx.cuh"

namespace kernel_hub {

constexpr int kWarpSize = 32;
constexpr int kMaxWarps = 32;  // 1,024 threads a block

// The sum of `value` over aligned groups of `width` lanes (a power of two, at most 32), in every
// lane.
__device__ __forceinline__ float group_sum(float value, int width) {
#pragma unroll
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
        if (mask < width) {
            value += __shfl_xor_sync(0xffffffffu, value, mask);
        }
    }
    return value;
}

// The sum of `value` of the lanes up to this one.
template <typename V>
__device__ __forceinline__ V warp_scan(V value, int lane_idx) {
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
        const V other = __shfl_up_sync(0xffffffffu, value, step);
        value += lane_idx >= step ? other : V(0);
    }
    return value;
}

// The sum of `value` over the blockDim.x threads that share threadIdx.y, in every one of them.
// blockDim.x is a power of two below 32, or a multiple of 32; every thread of the block calls this.
// `slots` is shared memory for one float a warp; a caller in a loop alternates between two of them,
// so that one barrier a call is enough.
__device__ __forceinline__ float row_sum(float value, float (&slots)[kMaxWarps]) {
    const int row_threads = blockDim.x;
    if (row_threads <= kWarpSize) {
        return group_sum(value, row_threads);
    }
    value = group_sum(value, kWarpSize);
    const int lane_idx = threadIdx.x % kWarpSize;
    const int row_warps = row_threads / kWarpSize;
    const int first_slot = threadIdx.y * row_warps;
    if (lane_idx == 0) {
        slots[first_slot + threadIdx.x / kWarpSize] = value;
    }
    __syncthreads();
    // Up to eight warps, the usual number: three shuffles, not five.
    const int width = row_warps <= 8 ? 8 : kWarpSize;
    const int slot = lane_idx % width;
    return group_sum(slot < row_warps ? slots[first_slot + slot] : 0.0f, width);
}

// The largest of aligned groups of `width` lanes, in every lane; nan where one is.
__device__ __forceinline__ float group_max(float value, int width) {
#pragma unroll
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
        if (mask < width) {
            value = max_nan(value, __shfl_xor_sync(0xffffffffu, value, mask));
        }
    }
    return value;
}

// As row_sum, of the largest.
__device__ __forceinline__ float row_max(float value, float (&slots)[kMaxWarps]) {
    const int row_threads = blockDim.x;
    value = group_max(value, row_threads);
    if (row_threads <= kWarpSize) {
        return value;
    }
    const int lane_idx = threadIdx.x % kWarpSize;
    const int row_warps = row_threads / kWarpSize;
    const int first_slot = threadIdx.y * row_warps;
    if (lane_idx == 0) {
        slots[first_slot + threadIdx.x / kWarpSize] = value;
    }
    __syncthreads();
    return group_max(lane_idx < row_warps ? slots[first_slot + lane_idx] : value, kWarpSize);
}

}  // namespace kernel_hub
