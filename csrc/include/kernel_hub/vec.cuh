// 16-byte vectors of fp16, bf16 and fp32: memory, registers, floats. Portable to sm_80.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "kernel_hub/ptx.cuh"

namespace kernel_hub {

// Elements of T in one 16-byte vector.
template <typename T>
constexpr int kVecElems = 16 / static_cast<int>(sizeof(T));

// Reads 16 bytes that other blocks read too (weights, tables).
__device__ __forceinline__ uint4 load_shared_by_blocks(const void* address) {
    return __ldg(static_cast<const uint4*>(address));
}

__device__ __forceinline__ float to_float(float value) {
    return value;
}
__device__ __forceinline__ float to_float(__half value) {
    return __half2float(value);
}
__device__ __forceinline__ float to_float(__nv_bfloat16 value) {
    return __bfloat162float(value);
}

template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
    return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
    return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}

// Two packed 16-bit values or one float from a 32-bit word, and back.
template <typename T>
struct Word;

template <>
struct Word<float> {
    static constexpr int kElems = 1;
    static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
        values[0] = __uint_as_float(word);
    }
    static __device__ __forceinline__ uint32_t pack(const float* values) {
        return __float_as_uint(values[0]);
    }
};

template <>
struct Word<__half> {
    static constexpr int kElems = 2;
    static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
        values[0] = pair.x;
        values[1] = pair.y;
    }
    static __device__ __forceinline__ uint32_t pack(const float* values) {
        const __half2 pair = __floats2half2_rn(values[0], values[1]);
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
};

template <>
struct Word<__nv_bfloat16> {
    static constexpr int kElems = 2;
    static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
        values[0] = __uint_as_float(word << 16);
        values[1] = __uint_as_float(word & 0xffff0000u);
    }
    static __device__ __forceinline__ uint32_t pack(const float* values) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(values[0], values[1]);
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
};

// The 16 bytes of `bits` as floats.
template <typename T>
__device__ __forceinline__ void unpack(uint4 bits, float (&values)[kVecElems<T>]) {
    constexpr int kElems = Word<T>::kElems;
    Word<T>::unpack(bits.x, values);
    Word<T>::unpack(bits.y, values + kElems);
    Word<T>::unpack(bits.z, values + 2 * kElems);
    Word<T>::unpack(bits.w, values + 3 * kElems);
}

// `values` rounded to T (to nearest, ties to even), packed into 16 bytes.
template <typename T>
__device__ __forceinline__ uint4 pack(const float (&values)[kVecElems<T>]) {
    constexpr int kElems = Word<T>::kElems;
    return make_uint4(Word<T>::pack(values), Word<T>::pack(values + kElems),
                      Word<T>::pack(values + 2 * kElems), Word<T>::pack(values + 3 * kElems));
}

// An access of kWidth elements, 1 or kVecElems<T>, for code that is the same for aligned and
// unaligned rows. `Bits` is what is held in registers between the load and the use.
template <typename T, int kWidth>
struct Access {
    static_assert(kWidth == kVecElems<T>, "an access is one element or 16 bytes");
    using Bits = uint4;
    static __device__ __forceinline__ Bits read(const T* address) { return ld_global(address); }
    static __device__ __forceinline__ Bits read_shared_by_blocks(const T* address) {
        return load_shared_by_blocks(address);
    }
    static __device__ __forceinline__ void unpack(Bits bits, float (&values)[kWidth]) {
        kernel_hub::unpack<T>(bits, values);
    }
    static __device__ __forceinline__ void write(T* address, const float (&values)[kWidth]) {
        st_global(address, pack<T>(values));
    }
    static __device__ __forceinline__ void write_bits(T* address, Bits bits) {
        st_global(address, bits);
    }
};

template <typename T>
struct Access<T, 1> {
    using Bits = T;
    static __device__ __forceinline__ Bits read(const T* address) { return *address; }
    static __device__ __forceinline__ Bits read_shared_by_blocks(const T* address) {
        return __ldg(address);
    }
    static __device__ __forceinline__ void unpack(Bits bits, float (&values)[1]) {
        values[0] = to_float(bits);
    }
    static __device__ __forceinline__ void write(T* address, const float (&values)[1]) {
        *address = from_float<T>(values[0]);
    }
    static __device__ __forceinline__ void write_bits(T* address, Bits bits) { *address = bits; }
};

}  // namespace kernel_hub
