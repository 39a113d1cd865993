// Tensor cores on fp32 and copies of part of a vector, one PTX instruction a function. Portable to
// sm_80; tests/ops/emulator has its own.
//
// Fragments of m16n8k8, with lane = threadIdx.x % 32, row = lane / 4, column = lane % 4: a[0] =
// A[row][column], a[1]: row + 8, a[2], a[3]: the same, column + 4; b0 = B[column][row], b1: column
// + 4; d as that of mma_m16n8k16. ldmatrix brings them: its 8x8 tiles of 16 bits are 8x4 of 32.
#pragma once

#include <stdint.h>

namespace kernel_hub {

// d += A B; of the operands' bits the lowest 13 are ignored.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = A B.
__device__ __forceinline__ void mma_tf32_first(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// Starts a copy of `source_bytes` (0 to 16) bytes to shared memory, and of zeros up to 16. Both
// addresses are multiples of 16.
__device__ __forceinline__ void cp_async_part(uint32_t target, const void* source,
                                              int source_bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target),
                 "l"(source), "r"(source_bytes)
                 : "memory");
}

}  // namespace kernel_hub
