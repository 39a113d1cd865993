// int8: to pairs of fp16, exactly, and from floats.
#pragma once

#include <cuda_fp16.h>
#include <stdint.h>

namespace kernel_hub {

// Two bytes of a word as two of fp16: with their sign's bit flipped they become the lowest of a
// number whose spacing is 1, from which what it is too much is taken. kilo: the number 0x64646464,
// the upper bytes of 1024; where the compiler does not know it, it keeps it in a register.
template <int kFirst, int kSecond>
__device__ __forceinline__ uint32_t int8x2_to_half2(uint32_t word, uint32_t kilo = 0x64646464u) {
    const uint32_t sum =  // 1024 + 128 + value
        __byte_perm(word ^ 0x80808080u, kilo, 0x4040 | kSecond << 8 | kFirst);
    const __half2 pair =
        __hsub2(*reinterpret_cast<const __half2*>(&sum), __half2half2(__ushort_as_half(0x6480)));
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// In the lowest byte, rounded to nearest even; what is beyond +-127 becomes +-127.
__device__ __forceinline__ uint32_t round_to_int8(float value) {
    // The spacing of floats at 1.5 * 2^23 is 1: adding rounds, and leaves the integer lowest.
    return __float_as_uint(fminf(fmaxf(value, -127.0f), 127.0f) + 12582912.0f);
}

// Writes kCount values (1, 4 or 8), rounded, by one store as wide as they are.
template <int kCount>
__device__ __forceinline__ void write_int8(int8_t* address, const float (&values)[kCount]) {
    static_assert(kCount == 1 || kCount == 4 || kCount == 8, "one value, 4 bytes or 8 bytes");
    if constexpr (kCount == 1) {
        *address = static_cast<int8_t>(round_to_int8(values[0]) & 0xff);
    } else {
        uint32_t words[kCount / 4];
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
            const float* four = values + 4 * i;
            const uint32_t low =
                __byte_perm(round_to_int8(four[0]), round_to_int8(four[1]), 0x0040);
            const uint32_t high =
                __byte_perm(round_to_int8(four[2]), round_to_int8(four[3]), 0x0040);
            words[i] = __byte_perm(low, high, 0x5410);
        }
        if constexpr (kCount == 4) {
            *reinterpret_cast<uint32_t*>(address) = words[0];
        } else {
            *reinterpret_cast<uint2*>(address) = make_uint2(words[0], words[1]);
        }
    }
}

}  // namespace kernel_hub
