// Stands in for csrc/include/kernel_hub/ptx.cuh when a kernel is compiled for the CPU: same names,
// plain accesses, misaligned ones recorded.
#pragma once

#include "emulator.h"

namespace kernel_hub {

inline uint4 ld_global(const void* address) {
    emulator::check_aligned(address);
    uint4 bits;
    __builtin_memcpy(&bits, address, sizeof(bits));
    return bits;
}

inline void st_global(void* address, uint4 bits) {
    emulator::check_aligned(address);
    __builtin_memcpy(address, &bits, sizeof(bits));
}

}  // namespace kernel_hub
