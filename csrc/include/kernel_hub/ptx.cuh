// One PTX instruction a function. Portable to sm_80.
#pragma once

#include <stdint.h>

namespace kernel_hub {

// Reads 16 bytes. Volatile: loads stay in the order they are written in, before the stores.
// NOTE: the ordinary cache policy on purpose. On an H200 streaming loads (.cs, L1::no_allocate,
// evict_first) cost 2-7 % from 8k tokens on and gain 2 % below; .cs stores cost up to 1 %.
__device__ __forceinline__ uint4 ld_global(const void* address) {
    uint4 bits;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(address));
    return bits;
}

// Writes 16 bytes.
__device__ __forceinline__ void st_global(void* address, uint4 bits) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(bits.x),
                 "r"(bits.y), "r"(bits.z), "r"(bits.w)
                 : "memory");
}

// Has the L2 fetch the line of an address.
__device__ __forceinline__ void prefetch_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Adds to memory without reading it back; in no order.
__device__ __forceinline__ void red_add(float* address, float value) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}

// Sets bits of an int if `is_set`, without reading it back and without a branch.
__device__ __forceinline__ void red_or_if(bool is_set, int* address, int bits) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.s32 p, %0, 0;\n"
        "@p red.relaxed.gpu.global.or.b32 [%1], %2;\n"
        "}" ::"r"(static_cast<int>(is_set)),
        "l"(address), "r"(bits)
        : "memory");
}

// Reads what another block has released.
__device__ __forceinline__ int ld_acquire(const int* address) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// Writes what another block acquires, behind all that this thread has written or waited for.
__device__ __forceinline__ void st_release(int* address, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
__device__ void red_add_4(float* address, float a, float b, float c, float d);  // sm_90 and later
#else
// red_add of four neighbours, 16-byte aligned.
__device__ __forceinline__ void red_add_4(float* address, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a),
                 "f"(b), "f"(c), "f"(d)
                 : "memory");
}
#endif

// threadIdx.x, read again each time: what is worked out from it is not kept in registers.
__device__ __forceinline__ int read_thread_idx() {
    int value;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(value));
    return value;
}

// 2^x, relative error 2^-22; 0 for -inf. Subnormal results are zero.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The larger one; nan if one of them is.
__device__ __forceinline__ float max_nan(float x, float y) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
    return larger;
}

// tanh(x), relative error 2^-11.
__device__ __forceinline__ float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace kernel_hub
