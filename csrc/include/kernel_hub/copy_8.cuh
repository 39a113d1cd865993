// cp.async of 8 bytes, beside those of mma.cuh: four elements of 16 bits, wherever fours are whole.
// Portable to sm_80; one PTX instruction a function.
#pragma once

#include <stdint.h>

namespace kernel_hub {

// Starts a copy of 8 bytes to shared memory. Both addresses are multiples of 8.
__device__ __forceinline__ void cp_async_8(uint32_t target, const void* source) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8;" ::"r"(target), "l"(source)
                 : "memory");
}

}  // namespace kernel_hub
