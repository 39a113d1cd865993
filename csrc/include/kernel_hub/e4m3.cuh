// e4m3 (torch.float8_e4m3fn: 4 exponent bits, 3 mantissa bits, no infinity, nan 0x7f): to 16-bit
// pairs, and from floats. Portable to sm_80, whose hardware does not know it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#include <type_traits>

namespace kernel_hub {

// The two bytes in the low half of `bytes` as two of fp16. Exact.
__device__ __forceinline__ uint32_t e4m3x2_to_half2(uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t word;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(word) : "h"(static_cast<uint16_t>(bytes)));
    return word;
#elif defined(__CUDA_ARCH__)
    // The bits of e4m3, one place above those of an fp16 that is 2^-8 of it.
    const uint32_t wide = (bytes & 0xff) << 8 | (bytes & 0xff00) << 16;
    const uint32_t small = (wide & 0x80008000u) | ((wide >> 1) & 0x3f803f80u);
    const __half2 values =
        __hmul2(*reinterpret_cast<const __half2*>(&small), __half2half2(__ushort_as_half(0x5c00)));
    const uint32_t is_nan = __vcmpeq2(wide & 0x7f007f00u, 0x7f007f00u);
    return *reinterpret_cast<const uint32_t*>(&values) | (is_nan & 0x7fff7fffu);
#else
    const __half2_raw values =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bytes), __NV_E4M3);
    return values.x | static_cast<uint32_t>(values.y) << 16;
#endif
}

// The same as two of T, fp16 or bf16.
template <typename T>
__device__ __forceinline__ uint32_t e4m3x2_to(uint32_t bytes) {
    const uint32_t halves = e4m3x2_to_half2(bytes);
    if constexpr (std::is_same_v<T, __half>) {
        return halves;
    } else {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&halves));
        const __nv_bfloat162 word = __floats2bfloat162_rn(pair.x, pair.y);
        return *reinterpret_cast<const uint32_t*>(&word);
    }
}

// Rounded to nearest even; what is beyond +-448 becomes +-448.
__device__ __forceinline__ __nv_fp8_e4m3 float_to_e4m3(float value) {
    __nv_fp8_e4m3 rounded;
    rounded.__x = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
    return rounded;
}

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
