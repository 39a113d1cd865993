// How much shared memory a launch gives its blocks. Portable to sm_80; one PTX instruction.
#pragma once

#include <stdint.h>

namespace kernel_hub {

// Bytes of the dynamic part.
__device__ __forceinline__ uint32_t dynamic_shared_bytes() {
    uint32_t bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

}  // namespace kernel_hub
