// Words that say themselves whether they have come: memory that others write holds kNotCome in
// every word until one of theirs stands there. So nobody waits for a fence or a flag, of whatever
// GPU of the host the words are, and no more is sent than what is meant.
#pragma once

#include <stdint.h>

namespace kernel_hub {

constexpr uint32_t kNotCome = 0x80008000u;  // of halves of either kind: -0, -0

// What goes out in place of `bits`: nobody can wait for two -0 in one word, they are sent as +0.
__device__ __forceinline__ uint4 sent_bits(uint4 bits) {
    const auto sent = [](uint32_t word) { return word == kNotCome ? 0u : word; };
    return make_uint4(sent(bits.x), sent(bits.y), sent(bits.z), sent(bits.w));
}

__device__ __forceinline__ void st_sent(void* address, uint4 bits) {
    asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(bits.x),
                 "r"(bits.y), "r"(bits.z), "r"(bits.w)
                 : "memory");
}

// Waits until all four words have come.
__device__ __forceinline__ uint4 await_sent(const void* address) {
    uint4 bits;
    do {
        asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                     : "l"(address)
                     : "memory");
    } while (bits.x == kNotCome || bits.y == kNotCome || bits.z == kNotCome || bits.w == kNotCome);
    return bits;
}

}  // namespace kernel_hub
