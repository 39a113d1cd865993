// Stands in for csrc/include/kernel_hub/shared_reads.cuh: same names.
#pragma once

#include "emulator.h"

namespace kernel_hub {

inline int4 ld_shared_volatile(uint32_t address) {
    int4 v;
    memcpy(&v, emulator::shared_place(address, sizeof v), sizeof v);
    return v;
}

}  // namespace kernel_hub
