// Clusters of blocks: ranks, addresses in other blocks, barriers. For sm_90a; one PTX instruction a
// function. Source: PTX ISA 8.7, barrier.cluster, mapa.
#pragma once

#include <stdint.h>

namespace kernel_hub {

// This block's number in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Blocks of this cluster; 1 where none was asked for.
__device__ __forceinline__ uint32_t cluster_size() {
    uint32_t size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

// The cluster's address of what lies at `address` in the block `rank`.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
    uint32_t mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

// Arrives at a barrier of any block of the cluster, of which this is the cluster's address.
// NOTE: the form with .release.cluster costs a memory barrier; what was read needs none.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Whole warps, all of every block.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}

// Orders nothing but the arrival itself.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// Reads what cluster_address gave.
__device__ __forceinline__ float4 ld_shared_cluster(uint32_t address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ uint2 ld_shared_cluster_2(uint32_t address) {
    uint2 v;
    asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "r"(address)
                 : "memory");
    return v;
}

}  // namespace kernel_hub
