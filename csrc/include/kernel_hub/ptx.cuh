// One PTX instruction a function: the memory accesses the compiler has no spelling for. Portable to sm_80.
#pragma once

#include <stdint.h>

namespace kernel_hub {

// Reads 16 bytes once: first to be evicted.
__device__ __forceinline__ uint4 ld_global_evict_first(const void* address) {
    uint4 bits;
    asm volatile("ld.global.L1::evict_first.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(address));
    return bits;
}

// Reads 16 bytes once: no room taken in L1, ordinary priority in L2.
__device__ __forceinline__ uint4 ld_global_no_allocate(const void* address) {
    uint4 bits;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(address));
    return bits;
}

// Reads 16 bytes, streaming: likely touched once.
__device__ __forceinline__ uint4 ld_global_cs(const void* address) {
    uint4 bits;
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(address));
    return bits;
}

// Reads 16 bytes with the ordinary cache policy.
__device__ __forceinline__ uint4 ld_global(const void* address) {
    uint4 bits;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(address));
    return bits;
}

// Writes 16 bytes, streaming: likely not read again soon.
__device__ __forceinline__ void st_global_cs(void* address, uint4 bits) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(bits.x), "r"(bits.y), "r"(bits.z),
                 "r"(bits.w)
                 : "memory");
}

// Writes 16 bytes with the ordinary cache policy.
__device__ __forceinline__ void st_global(void* address, uint4 bits) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(bits.x), "r"(bits.y), "r"(bits.z),
                 "r"(bits.w)
                 : "memory");
}

}  // namespace kernel_hub
