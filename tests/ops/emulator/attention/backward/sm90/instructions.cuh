// Stands in for csrc/attention/backward/sm90/instructions.cuh: same names. What nobody defines is a
// nan here.
#pragma once

#include <limits>

namespace kernel_hub::attention::backward::sm90 {

template <int kCount>
inline void leave_undefined(float (&values)[kCount]) {
    for (float& value : values) value = std::numeric_limits<float>::quiet_NaN();
}

inline void st_shared_release(uint32_t address, int value) {
    memcpy(emulator::shared_place(address, sizeof value), &value, sizeof value);
    emulator::has_moved = true;
}

// Others may run before it is read.
inline int ld_shared_acquire(uint32_t address) {
    emulator::wait_at(emulator::kPoll);
    int value;
    memcpy(&value, emulator::shared_place(address, sizeof value), sizeof value);
    return value;
}

inline void fence_gpu() {}

inline void red_add(int* address, int value) {
    *address += value;
    emulator::has_moved = true;
}

}  // namespace kernel_hub::attention::backward::sm90
