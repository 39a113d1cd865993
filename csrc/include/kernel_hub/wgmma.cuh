// Warpgroup products D (+)= A B of 64 x N, fp32 sums; N by the accumulator array, N / 2 a thread.
//   Wgmma<T>::ss<kTransA, kTransB>(d, a, b, accumulate)   A and B in shared memory
//   Wgmma<T>::rs<kTransB>(d, a, b, accumulate)            A in registers
// T is __half or __nv_bfloat16 (16 of K a product), or __nv_fp8_e4m3 (32 of K, K-major alone). `a`
// and `b` are descriptors; kTrans says that an operand is MN-major. A in registers is
// the fragment of mma_m16n8k16 (of m16n8k32 for e4m3), 16 rows a warp. Where `accumulate` is 0, D
// is overwritten. Thread t of the warpgroup holds rows 16 (t / 32) + lane / 4 and + 8: d[4j],
// d[4j + 1] are columns 8j + 2 (lane % 4) and the next one of the first row, d[4j + 2], d[4j + 3]
// of the second.
// Source: PTX ISA 8.7, asynchronous warpgroup level matrix instructions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

namespace kernel_hub {

// The upper half of a descriptor: 128-byte swizzle, 1024 bytes from one group of 8 rows to the
// next. The lower half is the address and the leading offset, both in units of 16 bytes.
constexpr uint32_t kDescriptorHigh = (1u << 30) | (1024u >> 4);

__device__ __forceinline__ uint32_t descriptor_low(uint32_t address, uint32_t leading_bytes) {
    return (address >> 4) | ((leading_bytes >> 4) << 16);
}

// `low` plus an offset that the compiler folds.
__device__ __forceinline__ uint64_t descriptor(uint32_t low, uint32_t offset_bytes) {
    return (static_cast<uint64_t>(kDescriptorHigh) << 32) | (low + (offset_bytes >> 4));
}

// Orders this warpgroup's writes to registers before the products that read them.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kPending` of this warpgroup's groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses to accumulators across this point.
template <int kCount>
__device__ __forceinline__ void hold_registers(float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        asm volatile("" : "+f"(values[i])::"memory");
    }
}

// `value`, of which the compiler no longer knows how it was made, so that it keeps it.
__device__ __forceinline__ uint32_t keep(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

template <typename T>
struct Wgmma;

// Eight columns: places in the text, and operands.
#define KH_TEXT_0 "%0, %1, %2, %3"
#define KH_TEXT_1 "%4, %5, %6, %7"
#define KH_TEXT_2 "%8, %9, %10, %11"
#define KH_TEXT_3 "%12, %13, %14, %15"
#define KH_TEXT_4 "%16, %17, %18, %19"
#define KH_TEXT_5 "%20, %21, %22, %23"
#define KH_TEXT_6 "%24, %25, %26, %27"
#define KH_TEXT_7 "%28, %29, %30, %31"
#define KH_TEXT_8 "%32, %33, %34, %35"
#define KH_TEXT_9 "%36, %37, %38, %39"
#define KH_TEXT_10 "%40, %41, %42, %43"
#define KH_TEXT_11 "%44, %45, %46, %47"
#define KH_TEXT_12 "%48, %49, %50, %51"
#define KH_TEXT_13 "%52, %53, %54, %55"
#define KH_TEXT_14 "%56, %57, %58, %59"
#define KH_TEXT_15 "%60, %61, %62, %63"
#define KH_TEXT_16 "%64, %65, %66, %67"
#define KH_TEXT_17 "%68, %69, %70, %71"
#define KH_TEXT_18 "%72, %73, %74, %75"
#define KH_TEXT_19 "%76, %77, %78, %79"
#define KH_TEXT_20 "%80, %81, %82, %83"
#define KH_TEXT_21 "%84, %85, %86, %87"
#define KH_TEXT_22 "%88, %89, %90, %91"
#define KH_TEXT_23 "%92, %93, %94, %95"
#define KH_TEXT_24 "%96, %97, %98, %99"
#define KH_TEXT_25 "%100, %101, %102, %103"
#define KH_TEXT_26 "%104, %105, %106, %107"
#define KH_TEXT_27 "%108, %109, %110, %111"
#define KH_TEXT_28 "%112, %113, %114, %115"
#define KH_TEXT_29 "%116, %117, %118, %119"
#define KH_TEXT_30 "%120, %121, %122, %123"
#define KH_TEXT_31 "%124, %125, %126, %127"
#define KH_D(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
// All columns of N: each list holds the one before.
#define KH_TEXTS_8 KH_TEXT_0
#define KH_D_8 KH_D(0)
#define KH_TEXTS_16 KH_TEXTS_8 ", " KH_TEXT_1
#define KH_D_16 KH_D_8, KH_D(4)
#define KH_TEXTS_24 KH_TEXTS_16 ", " KH_TEXT_2
#define KH_D_24 KH_D_16, KH_D(8)
#define KH_TEXTS_32 KH_TEXTS_24 ", " KH_TEXT_3
#define KH_D_32 KH_D_24, KH_D(12)
#define KH_TEXTS_40 KH_TEXTS_32 ", " KH_TEXT_4
#define KH_D_40 KH_D_32, KH_D(16)
#define KH_TEXTS_48 KH_TEXTS_40 ", " KH_TEXT_5
#define KH_D_48 KH_D_40, KH_D(20)
#define KH_TEXTS_56 KH_TEXTS_48 ", " KH_TEXT_6
#define KH_D_56 KH_D_48, KH_D(24)
#define KH_TEXTS_64 KH_TEXTS_56 ", " KH_TEXT_7
#define KH_D_64 KH_D_56, KH_D(28)
#define KH_TEXTS_72 KH_TEXTS_64 ", " KH_TEXT_8
#define KH_D_72 KH_D_64, KH_D(32)
#define KH_TEXTS_80 KH_TEXTS_72 ", " KH_TEXT_9
#define KH_D_80 KH_D_72, KH_D(36)
#define KH_TEXTS_88 KH_TEXTS_80 ", " KH_TEXT_10
#define KH_D_88 KH_D_80, KH_D(40)
#define KH_TEXTS_96 KH_TEXTS_88 ", " KH_TEXT_11
#define KH_D_96 KH_D_88, KH_D(44)
#define KH_TEXTS_104 KH_TEXTS_96 ", " KH_TEXT_12
#define KH_D_104 KH_D_96, KH_D(48)
#define KH_TEXTS_112 KH_TEXTS_104 ", " KH_TEXT_13
#define KH_D_112 KH_D_104, KH_D(52)
#define KH_TEXTS_120 KH_TEXTS_112 ", " KH_TEXT_14
#define KH_D_120 KH_D_112, KH_D(56)
#define KH_TEXTS_128 KH_TEXTS_120 ", " KH_TEXT_15
#define KH_D_128 KH_D_120, KH_D(60)
#define KH_TEXTS_136 KH_TEXTS_128 ", " KH_TEXT_16
#define KH_D_136 KH_D_128, KH_D(64)
#define KH_TEXTS_144 KH_TEXTS_136 ", " KH_TEXT_17
#define KH_D_144 KH_D_136, KH_D(68)
#define KH_TEXTS_152 KH_TEXTS_144 ", " KH_TEXT_18
#define KH_D_152 KH_D_144, KH_D(72)
#define KH_TEXTS_160 KH_TEXTS_152 ", " KH_TEXT_19
#define KH_D_160 KH_D_152, KH_D(76)
#define KH_TEXTS_168 KH_TEXTS_160 ", " KH_TEXT_20
#define KH_D_168 KH_D_160, KH_D(80)
#define KH_TEXTS_176 KH_TEXTS_168 ", " KH_TEXT_21
#define KH_D_176 KH_D_168, KH_D(84)
#define KH_TEXTS_184 KH_TEXTS_176 ", " KH_TEXT_22
#define KH_D_184 KH_D_176, KH_D(88)
#define KH_TEXTS_192 KH_TEXTS_184 ", " KH_TEXT_23
#define KH_D_192 KH_D_184, KH_D(92)
#define KH_TEXTS_200 KH_TEXTS_192 ", " KH_TEXT_24
#define KH_D_200 KH_D_192, KH_D(96)
#define KH_TEXTS_208 KH_TEXTS_200 ", " KH_TEXT_25
#define KH_D_208 KH_D_200, KH_D(100)
#define KH_TEXTS_216 KH_TEXTS_208 ", " KH_TEXT_26
#define KH_D_216 KH_D_208, KH_D(104)
#define KH_TEXTS_224 KH_TEXTS_216 ", " KH_TEXT_27
#define KH_D_224 KH_D_216, KH_D(108)
#define KH_TEXTS_232 KH_TEXTS_224 ", " KH_TEXT_28
#define KH_D_232 KH_D_224, KH_D(112)
#define KH_TEXTS_240 KH_TEXTS_232 ", " KH_TEXT_29
#define KH_D_240 KH_D_232, KH_D(116)
#define KH_TEXTS_248 KH_TEXTS_240 ", " KH_TEXT_30
#define KH_D_248 KH_D_240, KH_D(120)
#define KH_TEXTS_256 KH_TEXTS_248 ", " KH_TEXT_31
#define KH_D_256 KH_D_248, KH_D(124)

// I0 to I6 are the numbers of the operands behind the accumulators.
#define KH_BEGIN(P) "{\n.reg .pred p;\nsetp.ne.u32 p, %" #P ", 0;\n"
#define KH_SS16(TYPE, N, I0, I1, I2, I3, I4)                                                      \
    template <int kTransA = 0, int kTransB = 0>                                                   \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b,          \
                                              int accumulate) {                                   \
        asm volatile(KH_BEGIN(I2) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE \
                                  " {" KH_TEXTS_##N "}, %" #I0 ", %" #I1 ", p, 1, 1, %" #I3       \
                                                    ", %" #I4 ";\n}"                              \
                     : KH_D_##N                                                                   \
                     : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB));              \
    }
#define KH_RS16(TYPE, N, I0, I1, I2, I3, I4, I5, I6)                                              \
    template <int kTransB = 0>                                                                    \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t (&a)[4],          \
                                              uint64_t b, int accumulate) {                       \
        asm volatile(KH_BEGIN(I5) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE \
                                  " {" KH_TEXTS_##N "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3     \
                                                    "}, %" #I4 ", p, 1, 1, %" #I6 ";\n}"          \
                     : KH_D_##N                                                                   \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),       \
                       "n"(kTransB));                                                             \
    }
#define KH_SS32(TYPE, N, I0, I1, I2)                                                              \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b,          \
                                              int accumulate) {                                   \
        asm volatile(KH_BEGIN(I2) "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPE "." TYPE \
                                  " {" KH_TEXTS_##N "}, %" #I0 ", %" #I1 ", p, 1, 1;\n}"          \
                     : KH_D_##N                                                                   \
                     : "l"(a), "l"(b), "r"(accumulate));                                          \
    }
#define KH_RS32(TYPE, N, I0, I1, I2, I3, I4, I5)                                                  \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t (&a)[4],          \
                                              uint64_t b, int accumulate) {                       \
        asm volatile(KH_BEGIN(I5) "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPE "." TYPE \
                                  " {" KH_TEXTS_##N "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3     \
                                                    "}, %" #I4 ", p, 1, 1;\n}"                    \
                     : KH_D_##N                                                                   \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));      \
    }
#define KH_BOTH16(TYPE, N, I0, I1, I2, I3, I4, I5, I6) \
    KH_SS16(TYPE, N, I0, I1, I2, I3, I4)               \
    KH_RS16(TYPE, N, I0, I1, I2, I3, I4, I5, I6)
#define KH_BOTH32(TYPE, N, I0, I1, I2, I3, I4, I5, I6) \
    KH_SS32(TYPE, N, I0, I1, I2)                       \
    KH_RS32(TYPE, N, I0, I1, I2, I3, I4, I5)
// clang-format off
#define KH_EVERY_N(TYPE, SHAPE) \
    SHAPE(TYPE, 8, 4, 5, 6, 7, 8, 9, 10) \
    SHAPE(TYPE, 16, 8, 9, 10, 11, 12, 13, 14) \
    SHAPE(TYPE, 24, 12, 13, 14, 15, 16, 17, 18) \
    SHAPE(TYPE, 32, 16, 17, 18, 19, 20, 21, 22) \
    SHAPE(TYPE, 48, 24, 25, 26, 27, 28, 29, 30) \
    SHAPE(TYPE, 64, 32, 33, 34, 35, 36, 37, 38) \
    SHAPE(TYPE, 80, 40, 41, 42, 43, 44, 45, 46) \
    SHAPE(TYPE, 96, 48, 49, 50, 51, 52, 53, 54) \
    SHAPE(TYPE, 112, 56, 57, 58, 59, 60, 61, 62) \
    SHAPE(TYPE, 128, 64, 65, 66, 67, 68, 69, 70) \
    SHAPE(TYPE, 144, 72, 73, 74, 75, 76, 77, 78) \
    SHAPE(TYPE, 160, 80, 81, 82, 83, 84, 85, 86) \
    SHAPE(TYPE, 176, 88, 89, 90, 91, 92, 93, 94) \
    SHAPE(TYPE, 192, 96, 97, 98, 99, 100, 101, 102) \
    SHAPE(TYPE, 208, 104, 105, 106, 107, 108, 109, 110) \
    SHAPE(TYPE, 224, 112, 113, 114, 115, 116, 117, 118) \
    SHAPE(TYPE, 240, 120, 121, 122, 123, 124, 125, 126) \
    SHAPE(TYPE, 256, 128, 129, 130, 131, 132, 133, 134)
// clang-format on

template <>
struct Wgmma<__half> {
    KH_EVERY_N("f16", KH_BOTH16)
};

template <>
struct Wgmma<__nv_bfloat16> {
    KH_EVERY_N("bf16", KH_BOTH16)
};

template <>
struct Wgmma<__nv_fp8_e4m3> {
    KH_EVERY_N("e4m3", KH_BOTH32)
};

}  // namespace kernel_hub
