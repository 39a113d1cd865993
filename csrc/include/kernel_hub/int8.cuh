// int8: to 16-bit pairs, exactly, and from floats.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace kernel_hub {

// The two bytes in the low half of `bytes` as two of T, fp16 or bf16: their bits become the lowest
// of a number whose spacing is 1, from which what it is too much is taken.
template <typename T>
__device__ __forceinline__ uint32_t int8x2_to(uint32_t bytes) {
    const uint32_t wide = __byte_perm(bytes, 0, 0x4140);
    if constexpr (std::is_same_v<T, __half>) {
        const uint32_t word = (wide ^ 0x00800080u) | 0x64006400u;  // 1024 + 128 + value
        const __half2 pair = __hsub2(*reinterpret_cast<const __half2*>(&word),
                                     __half2half2(__ushort_as_half(0x6480)));
        return *reinterpret_cast<const uint32_t*>(&pair);
    } else {
        // bf16 has seven bits there: 128 + those of the value, less 128, or 256 where it has the
        // sign, whose bit is then the lowest of the exponent.
        const uint32_t word = (wide & 0x007f007fu) | 0x43004300u;
        const uint32_t excess = (wide & 0x00800080u) | 0x43004300u;
        const __nv_bfloat162 pair = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&word),
                                            *reinterpret_cast<const __nv_bfloat162*>(&excess));
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
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
