// Reads of shared memory that stay where they are written: what is read again is not kept in
// registers. Portable to sm_80.
#pragma once

#include <stdint.h>

namespace kernel_hub {

// Reads 16 bytes; volatile, so that no earlier read is used again.
__device__ __forceinline__ int4 ld_shared_volatile(uint32_t address) {
    int4 v;
    asm volatile("ld.volatile.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

}  // namespace kernel_hub
