// What the blocks of a cluster wait for together: barriers of the ring, sums, the end.
#pragma once

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/mbarrier.cuh"

namespace kernel_hub::matmul::sm90 {

// Makes the barriers of a ring, of which so many threads arrive. By one thread.
template <int kStages>
__device__ __forceinline__ void make_barriers(uint32_t full, uint32_t empty, int filling,
                                              int emptying) {
    for (int i = 0; i < kStages; ++i) {
        mbarrier_init(full + 8 * i, filling);
        mbarrier_init(empty + 8 * i, emptying);
    }
    fence_mbarrier_init();
}

// Returns when those of the whole cluster can be used.
template <bool kIsCluster>
__device__ __forceinline__ void await_barriers() {
    if constexpr (kIsCluster) {
        __syncwarp();
        cluster_arrive_relaxed();
        cluster_wait();
    } else {
        __syncthreads();
    }
}

// What a producer has to do with the consumers' sums, where a cluster adds them up: be there.
template <bool kAdds>
__device__ __forceinline__ void attend_sums() {
    if constexpr (kAdds) {
        __syncwarp();
        cluster_arrive();
        cluster_wait();
        cluster_arrive();
        cluster_wait();
    }
}

// No block may leave while another still multicasts to it or arrives at its barriers.
template <bool kIsCluster>
__device__ __forceinline__ void leave_together() {
    if constexpr (kIsCluster) {
        __syncwarp();
        cluster_arrive();
        cluster_wait();
    }
}

}  // namespace kernel_hub::matmul::sm90
