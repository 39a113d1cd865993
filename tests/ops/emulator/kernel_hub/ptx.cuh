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

inline void red_add(float* address, float value) {
    *address += value;
}

inline void red_add_4(float* address, float a, float b, float c, float d) {
    emulator::check_aligned(address);
    const float values[4] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) address[i] += values[i];
}

inline void red_or_if(bool is_set, int* address, int bits) {
    if (is_set) *address |= bits;
}

// Others may run before it is read.
inline int ld_acquire(const int* address) {
    emulator::wait_at(emulator::kPoll);
    return *address;
}

inline void st_release(int* address, int value) {
    *address = value;
    emulator::has_moved = true;
}

inline void prefetch_l2(const void*) {}

inline int read_thread_idx() {
    return threadIdx.x;
}

inline float exp2_approx(float x) {
    return emulator::exp2_approx(x);
}

inline float max_nan(float x, float y) {
    return x != x || x > y ? x : y;
}

inline float tanh_approx(float x) {
    return tanhf(x);
}

inline float reciprocal_approx(float x) {
    return emulator::flushed(emulator::reciprocal(x));
}

}  // namespace kernel_hub
