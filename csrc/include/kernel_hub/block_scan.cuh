// A scan over the threads of a block. Portable to sm_80.
#pragma once

#include "kernel_hub/reduce.cuh"

namespace kernel_hub {

// The sum of `own` of the threads before this one. slots: shared memory, one a warp. By all
// threads.
template <typename V>
__device__ __forceinline__ V sum_before(V own, V* slots, int warp_idx, int lane_idx) {
    const V until = warp_scan(own, lane_idx);
    if (lane_idx == kWarpSize - 1) {
        slots[warp_idx] = until;
    }
    __syncthreads();
    V before = until - own;
#pragma unroll 1
    for (int i = 0; i < warp_idx; ++i) {
        before += slots[i];
    }
    return before;
}

}  // namespace kernel_hub
