// Hopper's own instructions, for files built for sm_90a: mbarriers, the bulk tensor copy engine
// (TMA), warpgroup matrix products (the shapes are in wgmma.cuh), named barriers, registers moved
// between warpgroups. One PTX instruction a function.
//
// Addresses of shared memory are 32 bits (`shared_address` of mma.cuh).
// Source: PTX ISA 8.7, sections mbarrier, cp.async.bulk.tensor, wgmma, setmaxnreg.
#pragma once

#include <cuda.h>
#include <stdint.h>

namespace kernel_hub {

// ---- mbarriers: 8 bytes of shared memory ------------------------------------------------------

// `arrivals` completes a phase.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

// Makes initialised barriers visible to the copy engine and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives where `condition` holds, without a branch.
__device__ __forceinline__ void mbarrier_arrive_if(uint32_t barrier, bool condition) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "setp.ne.u32 p, %1, 0;\n"
        "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier),
        "r"(static_cast<uint32_t>(condition))
        : "memory");
}

// Arrives, and holds the phase open until `bytes` more have been copied.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Whether the phase of this parity has completed; may sleep a while before it says no.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
    uint32_t is_done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(is_done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return is_done != 0;
}

// The same without sleeping.
__device__ __forceinline__ bool mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
    uint32_t is_done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(is_done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return is_done != 0;
}

// Waits until the phase of this parity has completed. A new barrier is in phase 0, and the phase
// before it, of parity 1, counts as completed.
// NOTE: a loop in PTX: bra.uni tells ptxas that the warp stays together. Around a loop in C++ it
// keeps descriptors in vector registers, and moves them for every product.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "WAIT_%=:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra.uni WAIT_%=;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// The same where `is_done` is false; does nothing where it is true.
__device__ __forceinline__ void mbarrier_wait_unless(bool is_done, uint32_t barrier,
                                                     uint32_t parity) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "setp.ne.u32 p, %2, 0;\n"
        "@p bra.uni DONE_%=;\n"
        "WAIT_%=:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra.uni WAIT_%=;\n"
        "DONE_%=:\n}" ::"r"(barrier),
        "r"(parity), "r"(static_cast<uint32_t>(is_done))
        : "memory");
}

// ---- Copies by the TMA ------------------------------------------------------------------------

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

// The same into every block of the cluster whose bit is set in `blocks`, at the same place, counted
// by each one's own barrier.
__device__ __forceinline__ void tma_load_4d_multicast(uint32_t target, const CUtensorMap* map,
                                                      uint32_t barrier, uint16_t blocks, int x,
                                                      int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(target),
        "l"(map), "r"(barrier), "h"(blocks), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// Brings the box into the L2.
__device__ __forceinline__ void tma_prefetch_4d(const CUtensorMap* map, int x, int y, int z,
                                                int w) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map),
                 "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

// Orders this thread's ordinary accesses to shared memory before those of TMA and wgmma.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Warpgroup products -----------------------------------------------------------------------

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

// ---- Clusters ---------------------------------------------------------------------------------

// This block's number in its cluster.
__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The cluster's address of what lies at `address` in the block `rank`.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, int rank) {
    uint32_t mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

// Arrives at a barrier of any block of the cluster where `condition` holds, without a branch.
// NOTE: the form with .release.cluster costs a memory barrier; what was read needs none.
__device__ __forceinline__ void mbarrier_arrive_cluster_if(uint32_t cluster_address,
                                                           bool condition) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "setp.ne.u32 p, %1, 0;\n"
        "@p mbarrier.arrive.shared::cluster.b64 _, [%0];\n}" ::"r"(cluster_address),
        "r"(static_cast<uint32_t>(condition))
        : "memory");
}

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Waits for every thread of the cluster.
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// ---- Warpgroups among themselves --------------------------------------------------------------

__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Gives registers back, down to `kRegisters` a thread. Every warp of the warpgroup.
template <int kRegisters>
__device__ __forceinline__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Takes registers, up to `kRegisters` a thread; waits until enough have been given back.
template <int kRegisters>
__device__ __forceinline__ void acquire_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace kernel_hub
