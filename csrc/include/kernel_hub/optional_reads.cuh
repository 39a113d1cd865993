// Reads of global memory that may not be there, without the branch that costs registers where
// products are under way. Portable to sm_80.
#pragma once

#include <stdint.h>

namespace kernel_hub {

// Reads 4 or 2 bytes if `is_there`, else 0.
__device__ __forceinline__ uint32_t ld_global_if(bool is_there, const uint32_t* address) {
    uint32_t bits;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.s32 p, %1, 0;\n"
        "mov.b32 %0, 0;\n"
        "@p ld.global.u32 %0, [%2];\n"
        "}"
        : "=r"(bits)
        : "r"(static_cast<int>(is_there)), "l"(address));
    return bits;
}
__device__ __forceinline__ uint16_t ld_global_if(bool is_there, const uint16_t* address) {
    uint16_t bits;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.s32 p, %1, 0;\n"
        "mov.b16 %0, 0;\n"
        "@p ld.global.u16 %0, [%2];\n"
        "}"
        : "=h"(bits)
        : "r"(static_cast<int>(is_there)), "l"(address));
    return bits;
}

}  // namespace kernel_hub
