// Stands in for csrc/include/kernel_hub/awaited.cuh when a kernel is compiled for the CPU: same
// names, plain memory.
#pragma once

#include <stdint.h>

namespace kernel_hub {

constexpr uint32_t kNotCome = 0x80008000u;

inline uint4 sent_bits(uint4 bits) {
    const auto sent = [](uint32_t word) { return word == kNotCome ? 0u : word; };
    return make_uint4(sent(bits.x), sent(bits.y), sent(bits.z), sent(bits.w));
}

inline void st_sent(void* address, uint4 bits) {
    __builtin_memcpy(address, &bits, sizeof(bits));
}

inline uint4 await_sent(const void* address) {
    volatile const uint32_t* words = static_cast<const uint32_t*>(address);
    while (words[0] == kNotCome || words[1] == kNotCome || words[2] == kNotCome ||
           words[3] == kNotCome) {
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace kernel_hub
