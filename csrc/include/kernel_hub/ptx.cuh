// One PTX instruction a function. Portable to sm_80.
#pragma once

#include <stdint.h>

namespace kernel_hub {

// Reads 16 bytes. Volatile: loads stay in the order they are written in, before the stores.
// NOTE: the ordinary cache policy on purpose. On an H200 streaming loads (.cs, L1::no_allocate,
// evict_first) cost 2-7 % from 8k tokens on and gain 2 % below; .cs stores cost up to 1 %.
__device__ __forceinline__ uint4 ld_global(const void* address) {
    uint4 bits;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(address));
    return bits;
}

// Writes 16 bytes.
__device__ __forceinline__ void st_global(void* address, uint4 bits) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(bits.x),
                 "r"(bits.y), "r"(bits.z), "r"(bits.w)
                 : "memory");
}

}  // namespace kernel_hub
