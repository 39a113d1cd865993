// Warpgroup products D += A B of 64 x N by 16, fp32 accumulators; written by make_wgmma.py.
//   Wgmma<T>::ss(d, a, b, accumulate)   A and B in shared memory, both K-major
//   Wgmma<T>::rs(d, a, b, accumulate)   A in registers (mma_m16n8k16's fragment), B MN-major
// `a`, `b` are descriptors (sm90.cuh). Where `accumulate` is 0, D is overwritten. Thread t of the
// warpgroup holds rows 16 (t / 32) + lane / 4 and + 8: d[4j], d[4j + 1] are columns
// 8j + 2 (lane % 4) and the next one of the first row, d[4j + 2], d[4j + 3] of the second.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace kernel_hub {

template <typename T>
struct Wgmma;

#define KERNEL_HUB_ACCUMULATORS(i)                                                            \
    "+f"(d[(i) + 0]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]), \
        "+f"(d[(i) + 5]), "+f"(d[(i) + 6]), "+f"(d[(i) + 7])

template <>
struct Wgmma<__nv_bfloat16> {
    static __device__ __forceinline__ void ss(float (&d)[40], uint64_t a, uint64_t b,
                                              int accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
            "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
            "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
            "%36, %37, %38, %39}, %40, %41, p, 1, 1, 0, 0;\n}"
            : KERNEL_HUB_ACCUMULATORS(0), KERNEL_HUB_ACCUMULATORS(8), KERNEL_HUB_ACCUMULATORS(16),
              KERNEL_HUB_ACCUMULATORS(24), KERNEL_HUB_ACCUMULATORS(32)
            : "l"(a), "l"(b), "r"(accumulate));
    }

    static __device__ __forceinline__ void ss(float (&d)[56], uint64_t a, uint64_t b,
                                              int accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %58, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n112k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
            "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
            "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
            "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55}, %56, %57, p, 1, 1, 0, 0;\n}"
            : KERNEL_HUB_ACCUMULATORS(0), KERNEL_HUB_ACCUMULATORS(8), KERNEL_HUB_ACCUMULATORS(16),
              KERNEL_HUB_ACCUMULATORS(24), KERNEL_HUB_ACCUMULATORS(32), KERNEL_HUB_ACCUMULATORS(40),
              KERNEL_HUB_ACCUMULATORS(48)
            : "l"(a), "l"(b), "r"(accumulate));
    }

    static __device__ __forceinline__ void ss(float (&d)[64], uint64_t a, uint64_t b,
                                              int accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
            "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
            "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
            "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
            "%60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0;\n}"
            : KERNEL_HUB_ACCUMULATORS(0), KERNEL_HUB_ACCUMULATORS(8), KERNEL_HUB_ACCUMULATORS(16),
              KERNEL_HUB_ACCUMULATORS(24), KERNEL_HUB_ACCUMULATORS(32), KERNEL_HUB_ACCUMULATORS(40),
              KERNEL_HUB_ACCUMULATORS(48), KERNEL_HUB_ACCUMULATORS(56)
            : "l"(a), "l"(b), "r"(accumulate));
    }

    static __device__ __forceinline__ void rs(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                              int accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
            "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
            "%24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
            : KERNEL_HUB_ACCUMULATORS(0), KERNEL_HUB_ACCUMULATORS(8), KERNEL_HUB_ACCUMULATORS(16),
              KERNEL_HUB_ACCUMULATORS(24)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }

    static __device__ __forceinline__ void rs(float (&d)[48], const uint32_t (&a)[4], uint64_t b,
                                              int accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %53, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
            "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
            "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
            "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, {%48, %49, %50, %51}, "
            "%52, p, 1, 1, 1;\n}"
            : KERNEL_HUB_ACCUMULATORS(0), KERNEL_HUB_ACCUMULATORS(8), KERNEL_HUB_ACCUMULATORS(16),
              KERNEL_HUB_ACCUMULATORS(24), KERNEL_HUB_ACCUMULATORS(32), KERNEL_HUB_ACCUMULATORS(40)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }

    static __device__ __forceinline__ void rs(float (&d)[64], const uint32_t (&a)[4], uint64_t b,
                                              int accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
            "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
            "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
            "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
            "%60, %61, %62, %63}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
            : KERNEL_HUB_ACCUMULATORS(0), KERNEL_HUB_ACCUMULATORS(8), KERNEL_HUB_ACCUMULATORS(16),
              KERNEL_HUB_ACCUMULATORS(24), KERNEL_HUB_ACCUMULATORS(32), KERNEL_HUB_ACCUMULATORS(40),
              KERNEL_HUB_ACCUMULATORS(48), KERNEL_HUB_ACCUMULATORS(56)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }

    static __device__ __forceinline__ void rs(float (&d)[96], const uint32_t (&a)[4], uint64_t b,
                                              int accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %101, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
            "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
            "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
            "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
            "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "
            "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "
            "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, {%96, %97, %98, %99}, "
            "%100, p, 1, 1, 1;\n}"
            : KERNEL_HUB_ACCUMULATORS(0), KERNEL_HUB_ACCUMULATORS(8), KERNEL_HUB_ACCUMULATORS(16),
              KERNEL_HUB_ACCUMULATORS(24), KERNEL_HUB_ACCUMULATORS(32), KERNEL_HUB_ACCUMULATORS(40),
              KERNEL_HUB_ACCUMULATORS(48), KERNEL_HUB_ACCUMULATORS(56), KERNEL_HUB_ACCUMULATORS(64),
              KERNEL_HUB_ACCUMULATORS(72), KERNEL_HUB_ACCUMULATORS(80), KERNEL_HUB_ACCUMULATORS(88)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }

    static __device__ __forceinline__ void rs(float (&d)[128], const uint32_t (&a)[4], uint64_t b,
                                              int accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
            "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
            "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
            "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
            "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "
            "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "
            "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
            "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, "
            "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, "
            "%120, %121, %122, %123, %124, %125, %126, %127}, {%128, %129, %130, %131}, %132, p, "
            "1, 1, 1;\n}"
            : KERNEL_HUB_ACCUMULATORS(0), KERNEL_HUB_ACCUMULATORS(8), KERNEL_HUB_ACCUMULATORS(16),
              KERNEL_HUB_ACCUMULATORS(24), KERNEL_HUB_ACCUMULATORS(32), KERNEL_HUB_ACCUMULATORS(40),
              KERNEL_HUB_ACCUMULATORS(48), KERNEL_HUB_ACCUMULATORS(56), KERNEL_HUB_ACCUMULATORS(64),
              KERNEL_HUB_ACCUMULATORS(72), KERNEL_HUB_ACCUMULATORS(80), KERNEL_HUB_ACCUMULATORS(88),
              KERNEL_HUB_ACCUMULATORS(96), KERNEL_HUB_ACCUMULATORS(104),
              KERNEL_HUB_ACCUMULATORS(112), KERNEL_HUB_ACCUMULATORS(120)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }
};

template <>
struct Wgmma<__half> {
    static __device__ __forceinline__ void ss(float (&d)[40], uint64_t a, uint64_t b,
                                              int accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
            "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
            "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
            "%36, %37, %38, %39}, %40, %41, p, 1, 1, 0, 0;\n}"
            : KERNEL_HUB_ACCUMULATORS(0), KERNEL_HUB_ACCUMULATORS(8), KERNEL_HUB_ACCUMULATORS(16),
              KERNEL_HUB_ACCUMULATORS(24), KERNEL_HUB_ACCUMULATORS(32)
            : "l"(a), "l"(b), "r"(accumulate));
    }

    static __device__ __forceinline__ void ss(float (&d)[56], uint64_t a, uint64_t b,
                                              int accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %58, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n112k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
            "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
            "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
            "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55}, %56, %57, p, 1, 1, 0, 0;\n}"
            : KERNEL_HUB_ACCUMULATORS(0), KERNEL_HUB_ACCUMULATORS(8), KERNEL_HUB_ACCUMULATORS(16),
              KERNEL_HUB_ACCUMULATORS(24), KERNEL_HUB_ACCUMULATORS(32), KERNEL_HUB_ACCUMULATORS(40),
              KERNEL_HUB_ACCUMULATORS(48)
            : "l"(a), "l"(b), "r"(accumulate));
    }

    static __device__ __forceinline__ void ss(float (&d)[64], uint64_t a, uint64_t b,
                                              int accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
            "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
            "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
            "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
            "%60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0;\n}"
            : KERNEL_HUB_ACCUMULATORS(0), KERNEL_HUB_ACCUMULATORS(8), KERNEL_HUB_ACCUMULATORS(16),
              KERNEL_HUB_ACCUMULATORS(24), KERNEL_HUB_ACCUMULATORS(32), KERNEL_HUB_ACCUMULATORS(40),
              KERNEL_HUB_ACCUMULATORS(48), KERNEL_HUB_ACCUMULATORS(56)
            : "l"(a), "l"(b), "r"(accumulate));
    }

    static __device__ __forceinline__ void rs(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                              int accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
            "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
            "%24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
            : KERNEL_HUB_ACCUMULATORS(0), KERNEL_HUB_ACCUMULATORS(8), KERNEL_HUB_ACCUMULATORS(16),
              KERNEL_HUB_ACCUMULATORS(24)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }

    static __device__ __forceinline__ void rs(float (&d)[48], const uint32_t (&a)[4], uint64_t b,
                                              int accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %53, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
            "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
            "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
            "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, {%48, %49, %50, %51}, "
            "%52, p, 1, 1, 1;\n}"
            : KERNEL_HUB_ACCUMULATORS(0), KERNEL_HUB_ACCUMULATORS(8), KERNEL_HUB_ACCUMULATORS(16),
              KERNEL_HUB_ACCUMULATORS(24), KERNEL_HUB_ACCUMULATORS(32), KERNEL_HUB_ACCUMULATORS(40)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }

    static __device__ __forceinline__ void rs(float (&d)[64], const uint32_t (&a)[4], uint64_t b,
                                              int accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
            "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
            "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
            "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
            "%60, %61, %62, %63}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
            : KERNEL_HUB_ACCUMULATORS(0), KERNEL_HUB_ACCUMULATORS(8), KERNEL_HUB_ACCUMULATORS(16),
              KERNEL_HUB_ACCUMULATORS(24), KERNEL_HUB_ACCUMULATORS(32), KERNEL_HUB_ACCUMULATORS(40),
              KERNEL_HUB_ACCUMULATORS(48), KERNEL_HUB_ACCUMULATORS(56)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }

    static __device__ __forceinline__ void rs(float (&d)[96], const uint32_t (&a)[4], uint64_t b,
                                              int accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %101, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
            "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
            "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
            "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
            "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "
            "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "
            "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, {%96, %97, %98, %99}, "
            "%100, p, 1, 1, 1;\n}"
            : KERNEL_HUB_ACCUMULATORS(0), KERNEL_HUB_ACCUMULATORS(8), KERNEL_HUB_ACCUMULATORS(16),
              KERNEL_HUB_ACCUMULATORS(24), KERNEL_HUB_ACCUMULATORS(32), KERNEL_HUB_ACCUMULATORS(40),
              KERNEL_HUB_ACCUMULATORS(48), KERNEL_HUB_ACCUMULATORS(56), KERNEL_HUB_ACCUMULATORS(64),
              KERNEL_HUB_ACCUMULATORS(72), KERNEL_HUB_ACCUMULATORS(80), KERNEL_HUB_ACCUMULATORS(88)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }

    static __device__ __forceinline__ void rs(float (&d)[128], const uint32_t (&a)[4], uint64_t b,
                                              int accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
            "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
            "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
            "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
            "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "
            "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "
            "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
            "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, "
            "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, "
            "%120, %121, %122, %123, %124, %125, %126, %127}, {%128, %129, %130, %131}, %132, p, "
            "1, 1, 1;\n}"
            : KERNEL_HUB_ACCUMULATORS(0), KERNEL_HUB_ACCUMULATORS(8), KERNEL_HUB_ACCUMULATORS(16),
              KERNEL_HUB_ACCUMULATORS(24), KERNEL_HUB_ACCUMULATORS(32), KERNEL_HUB_ACCUMULATORS(40),
              KERNEL_HUB_ACCUMULATORS(48), KERNEL_HUB_ACCUMULATORS(56), KERNEL_HUB_ACCUMULATORS(64),
              KERNEL_HUB_ACCUMULATORS(72), KERNEL_HUB_ACCUMULATORS(80), KERNEL_HUB_ACCUMULATORS(88),
              KERNEL_HUB_ACCUMULATORS(96), KERNEL_HUB_ACCUMULATORS(104),
              KERNEL_HUB_ACCUMULATORS(112), KERNEL_HUB_ACCUMULATORS(120)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }
};

#undef KERNEL_HUB_ACCUMULATORS

}  // namespace kernel_hub
