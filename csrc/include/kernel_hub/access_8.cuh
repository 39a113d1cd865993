// Global accesses of 8 bytes, beside those of ptx.cuh: four elements of 16 bits, wherever fours are
// whole. Portable to sm_80; one PTX instruction a function.
#pragma once

#include <stdint.h>

namespace kernel_hub {

// Reads 8 bytes; volatile as `ld_global` is.
__device__ __forceinline__ uint2 ld_global_8(const void* address) {
    uint2 bits;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(bits.x), "=r"(bits.y) : "l"(address));
    return bits;
}

// Writes 8 bytes.
__device__ __forceinline__ void st_global_8(void* address, uint2 bits) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(bits.x), "r"(bits.y)
                 : "memory");
}

}  // namespace kernel_hub
