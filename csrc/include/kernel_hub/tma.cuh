// Hopper's bulk tensor copy engine (TMA), and the fences before it. For sm_90a; one PTX instruction
// a function. Addresses of shared memory are 32 bits (`shared_address` of mma.cuh). Source: PTX
// ISA 8.7, cp.async.bulk.tensor.
#pragma once

#include <cuda.h>
#include <stdint.h>

namespace kernel_hub {

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Starts the copy of the box at (x, y, z, w), innermost first, to shared memory; `barrier` counts
// its bytes, those outside the tensor included.
__device__ __forceinline__ void tma_load_4d(uint32_t target, const CUtensorMap* map,
                                            uint32_t barrier, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// The same to all blocks in `block_mask`, at the same places in each.
__device__ __forceinline__ void tma_load_4d_multicast(uint32_t target, const CUtensorMap* map,
                                                      uint32_t barrier, uint16_t block_mask, int x,
                                                      int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(target),
        "l"(map), "r"(barrier), "h"(block_mask), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// Brings the box into the L2.
__device__ __forceinline__ void tma_prefetch_4d(const CUtensorMap* map, int x, int y, int z,
                                                int w) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map),
                 "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

// The box at (x, 0, 0, y, z) of five dimensions, innermost first; zeros outside them.
__device__ __forceinline__ void tma_load_5d(uint32_t target, const CUtensorMap* map,
                                            uint32_t barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, 0, 0, %4, %5}], [%2];" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// The same to all blocks in `block_mask`, at the same places in each.
__device__ __forceinline__ void tma_load_5d_multicast(uint32_t target, const CUtensorMap* map,
                                                      uint32_t barrier, int x, int y, int z,
                                                      uint16_t block_mask) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, 0, 0, %4, %5}], [%2], %6;" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(block_mask)
        : "memory");
}

// Starts the copy of `bytes` neighbours, a multiple of 16 like both addresses.
__device__ __forceinline__ void bulk_load(uint32_t target, const void* source, uint32_t bytes,
                                          uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(target),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

// The box at (column, row) of a matrix; zeros outside it.
__device__ __forceinline__ void tma_load_2d(uint32_t target, const CUtensorMap* map,
                                            uint32_t barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];" ::"r"(target),
        "l"(map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}

// The same to all blocks in `block_mask`, at the same places in each.
__device__ __forceinline__ void tma_load_2d_multicast(uint32_t target, const CUtensorMap* map,
                                                      uint32_t barrier, int column, int row,
                                                      uint16_t block_mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target),
        "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(block_mask)
        : "memory");
}

// The box at (column, row) of a matrix from shared memory; what lies outside it is left out.
__device__ __forceinline__ void tma_store_2d(const CUtensorMap* map, uint32_t source, int column,
                                             int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
        "r"(source), "r"(column), "r"(row)
        : "memory");
}

// The box at (x, y, z, w), innermost first, from shared memory.
__device__ __forceinline__ void tma_store_4d(const CUtensorMap* map, uint32_t source, int x, int y,
                                             int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
            map),
        "r"(source), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// Starts adding `bytes` of fp32 from shared to global memory, a multiple of 16 like both addresses.
__device__ __forceinline__ void bulk_reduce_add(float* target, uint32_t source, uint32_t bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target),
        "r"(source), "r"(bytes)
        : "memory");
}

// Closes the group of stores this thread has started since the last one.
__device__ __forceinline__ void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most `kPending` of this thread's groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// The same, until they have also written global memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_all() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Orders this thread's ordinary accesses to shared memory before those of TMA and wgmma.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same of global memory.
__device__ __forceinline__ void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace kernel_hub
