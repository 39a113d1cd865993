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

// Whether the phase of this parity has completed; does not sleep.
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

// ---- Small copies, counted by an mbarrier ------------------------------------------------------

// Starts a copy of 4 bytes to shared memory.
__device__ __forceinline__ void cp_async_4(uint32_t target, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

// Arrives at a barrier, which counts this thread, once its copies have arrived.
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- Shared memory -----------------------------------------------------------------------------

// Four 8x8 tiles of 16-bit values, laid out in registers as ldmatrix_x4 leaves them.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t tile0, uint32_t tile1,
                                            uint32_t tile2, uint32_t tile3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(tile0), "r"(tile1), "r"(tile2), "r"(tile3)
                 : "memory");
}

// The same, each tile transposed.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t tile0, uint32_t tile1,
                                                  uint32_t tile2, uint32_t tile3) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(tile0), "r"(tile1), "r"(tile2), "r"(tile3)
        : "memory");
}

// An 8x8 tile of 16-bit values, two a lane as ldmatrix leaves them, transposed over the warp.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t tile) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(tile));
    return transposed;
}

__device__ __forceinline__ void st_shared(uint32_t address, float x, float y, float z, float w) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x), "f"(y), "f"(z),
                 "f"(w)
                 : "memory");
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

// `value`, of which the compiler no longer knows how it was made, so that it keeps it.
__device__ __forceinline__ uint32_t keep(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

// ---- Clusters ---------------------------------------------------------------------------------

// This block's number in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The cluster's address of what lies at `address` in the block `rank`.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
    uint32_t mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

// Arrives at a barrier of any block of the cluster, of which this is the cluster's address.
// NOTE: the form with .release.cluster costs a memory barrier; what was read needs none.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Whole warps, all of every block.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}

// Orders nothing but the arrival itself.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// Reads what cluster_address gave.
__device__ __forceinline__ float4 ld_shared_cluster(uint32_t address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

// True in one lane of the warp, which must be converged. A branch on it tells ptxas that one thread
// starts the copies behind it; else it writes a loop over the lanes around each.
__device__ __forceinline__ bool elect_one() {
    uint32_t is_elected;
    asm volatile(
        "{\n.reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(is_elected));
    return is_elected != 0;
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
