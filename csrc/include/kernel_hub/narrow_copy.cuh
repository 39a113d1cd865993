// cp.async of 16 bytes around which the L2 gets 64 bytes, not 128 as in mma.cuh: where rows are an
// odd number of 64 bytes, the other half is another row's, and may be gone before it is asked for.
// Portable to sm_80; one PTX instruction a function.
#pragma once

#include <stdint.h>

namespace kernel_hub {

// Like cp_async_16 of mma.cuh, under an L2 policy.
__device__ __forceinline__ void cp_async_16_narrow(uint32_t target, const void* source,
                                                   bool is_inside, uint64_t policy) {
    const int source_bytes = is_inside ? 16 : 0;
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint.L2::64B [%0], [%1], 16, %2, %3;" ::"r"(target),
        "l"(source), "r"(source_bytes), "l"(policy)
        : "memory");
}

}  // namespace kernel_hub
