// Stands in for csrc/include/kernel_hub/access_8.cuh when a kernel is compiled for the CPU: plain
// accesses, misaligned ones recorded.
#pragma once

#include "emulator.h"

namespace kernel_hub {

inline uint2 ld_global_8(const void* address) {
    emulator::check_aligned<8>(address);
    uint2 bits;
    __builtin_memcpy(&bits, address, sizeof(bits));
    return bits;
}

inline void st_global_8(void* address, uint2 bits) {
    emulator::check_aligned<8>(address);
    __builtin_memcpy(address, &bits, sizeof(bits));
}

}  // namespace kernel_hub
