// Stands in for csrc/include/kernel_hub/st_async.cuh: same names.
#pragma once

#include "hopper.h"

namespace kernel_hub {

inline void st_async(uint32_t address, float4 v, uint32_t barrier) {
    *reinterpret_cast<float4*>(emulator::shared_place(address, 16)) = v;
    emulator::complete_bytes(barrier, 16);
}

inline void st_async(uint32_t address, float2 v, uint32_t barrier) {
    *reinterpret_cast<float2*>(emulator::shared_place(address, 8)) = v;
    emulator::complete_bytes(barrier, 8);
}

}  // namespace kernel_hub
