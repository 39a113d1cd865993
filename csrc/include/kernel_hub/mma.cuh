// Matrix tiles through shared memory and the tensor cores: asynchronous copies, ldmatrix, mma.sync.
// One PTX instruction a function. Portable to sm_80; tests/ops/emulator has its own.
//
// Fragments of mma_m16n8k16, with lane = threadIdx.x % 32, row = lane / 4, pair = 2 * (lane % 4):
//   a[0] = A[row][pair, pair + 1]   a[1] = A[row + 8][pair, ...]   a[2], a[3]: columns + 8
//   b0   = B[pair, pair + 1][row]   b1   = B[pair + 8, ...][row]
//   d[0], d[1] = D[row][pair, pair + 1]    d[2], d[3] = D[row + 8][pair, pair + 1]
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace kernel_hub {

// The block's dynamic shared memory.
__device__ __forceinline__ uint8_t* dynamic_shared() {
    extern __shared__ __align__(1024) uint8_t bytes[];
    return bytes;
}

// The address that the functions below take.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Starts a copy of 16 bytes to shared memory; zeros where `is_inside` is false (`source` is then
// not read). Both addresses are multiples of 16.
__device__ __forceinline__ void cp_async_16(uint32_t target, const void* source, bool is_inside) {
    const int source_bytes = is_inside ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target),
                 "l"(source), "r"(source_bytes)
                 : "memory");
}

// The same with 4 bytes, both addresses multiples of 4.
__device__ __forceinline__ void cp_async_4(uint32_t target, const void* source, bool is_inside) {
    const int source_bytes = is_inside ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source),
                 "r"(source_bytes)
                 : "memory");
}

// The L2 policy of data that is read once: first to be evicted.
__device__ __forceinline__ uint64_t read_once_policy() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// cp_async_16 under an L2 policy.
__device__ __forceinline__ void cp_async_16(uint32_t target, const void* source, bool is_inside,
                                            uint64_t policy) {
    const int source_bytes = is_inside ? 16 : 0;
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(target),
        "l"(source), "r"(source_bytes), "l"(policy)
        : "memory");
}

// Closes the group of copies this thread has started since the last one.
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `kPending` of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 tiles of 16-bit values; lane l gives the address of row l % 8 of tile l / 8 and gets
// row lane / 4, columns 2 * (lane % 4) and the next one, of each.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&tiles)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                 : "r"(address)
                 : "memory");
}

// The same, each tile transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&tiles)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                 : "r"(address)
                 : "memory");
}

// d += A B for a 16x16 A, a 16x8 B of T (fp16 or bf16) and an fp32 D.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        static_assert(std::is_same_v<T, __half>, "the tensor cores take fp16 and bf16 here");
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// Two floats rounded to T (to nearest even), `low` in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
    uint32_t word;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    } else {
        static_assert(std::is_same_v<T, __half>, "two 16-bit values are packed");
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    }
    return word;
}

}  // namespace kernel_hub
