// Stands in for csrc/include/kernel_hub/shared_size.cuh when a kernel is compiled for the CPU.
#pragma once

#include "emulator.h"

namespace kernel_hub {

inline uint32_t dynamic_shared_bytes() {
    return emulator::shared_bytes;
}

}  // namespace kernel_hub
