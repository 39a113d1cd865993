// Stores to the shared memory of any block of a cluster, which its mbarriers count. For sm_90a; one
// PTX instruction a function. Source: PTX ISA 8.7, st.async.
#pragma once

#include <stdint.h>

namespace kernel_hub {

// Writes to what cluster_address gave, and counts the bytes at a barrier of the same block.
__device__ __forceinline__ void st_async(uint32_t address, float4 v, uint32_t barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(address),
        "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void st_async(uint32_t address, float2 v, uint32_t barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
            address),
        "f"(v.x), "f"(v.y), "r"(barrier)
        : "memory");
}

}  // namespace kernel_hub
