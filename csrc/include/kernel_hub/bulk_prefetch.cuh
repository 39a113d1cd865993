// For sm_90a. Source: PTX ISA 8.7, cp.async.bulk.prefetch.
#pragma once

#include <stdint.h>

namespace kernel_hub {

// Brings `bytes` neighbours, a multiple of 16 like the address, into the L2.
__device__ __forceinline__ void bulk_prefetch(const void* source, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

}  // namespace kernel_hub
