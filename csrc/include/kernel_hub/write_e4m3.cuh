// Floats rounded to e4m3 (torch.float8_e4m3fn) several at a time: to nearest, ties to even, beyond
// +-448 to +-448; nan stays nan. By one instruction from sm_89 on, by integer arithmetic below.
#pragma once

#include <cuda_fp8.h>
#include <stdint.h>

namespace kernel_hub {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890

// Two floats in the low 16 bits, `low` in the lower byte.
__device__ __forceinline__ uint32_t pack_e4m3x2(float low, float high) {
    uint16_t bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
    return bits;
}

#else

__device__ __forceinline__ uint32_t round_to_e4m3(float value) {
    const uint32_t sign = __float_as_uint(value) >> 24 & 0x80;
    const float magnitude = fabsf(value);
    if (!(magnitude < 448.0f)) {
        return sign | (magnitude >= 448.0f ? 0x7e : 0x7f);
    }
    // Below 2^-6 e4m3 is a multiple of 2^-9, the spacing of floats at 2^14: adding rounds to it.
    const uint32_t subnormal = __float_as_uint(magnitude + 16384.0f) - 0x46800000;
    const uint32_t bits = __float_as_uint(magnitude);
    const uint32_t rounded = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
    return sign | (magnitude < 0.015625f ? subnormal : rounded - (120 << 3));
}

__device__ __forceinline__ uint32_t pack_e4m3x2(float low, float high) {
    return round_to_e4m3(low) | round_to_e4m3(high) << 8;
}

#endif

// Writes kCount values (1, 4 or 8), rounded, by one store as wide as they are.
template <int kCount>
__device__ __forceinline__ void write_e4m3(__nv_fp8_e4m3* address, const float (&values)[kCount]) {
    static_assert(kCount == 1 || kCount == 4 || kCount == 8, "one value, 4 bytes or 8 bytes");
    if constexpr (kCount == 1) {
        *reinterpret_cast<uint8_t*>(address) = static_cast<uint8_t>(pack_e4m3x2(values[0], 0.0f));
    } else {
        uint32_t words[kCount / 4];
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
            words[i] = pack_e4m3x2(values[4 * i], values[4 * i + 1]) |
                       pack_e4m3x2(values[4 * i + 2], values[4 * i + 3]) << 16;
        }
        if constexpr (kCount == 4) {
            *reinterpret_cast<uint32_t*>(address) = words[0];
        } else {
            *reinterpret_cast<uint2*>(address) = make_uint2(words[0], words[1]);
        }
    }
}

}  // namespace kernel_hub
