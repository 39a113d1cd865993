// Hopper's own instructions for the matrix product: bulk tensor copies, transaction barriers,
// clusters and wgmma. One PTX instruction a function. sm_90a only.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace kernel_hub {

// --- barriers in shared memory; addresses are 32-bit shared addresses ---

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialised barriers visible to the cluster and to the copy engine.
__device__ __forceinline__ void mbarrier_fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival, which also promises `bytes` of copies.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival at a barrier of any block of the cluster (an address from map_shared).
// NOTE: plain, not .release.cluster, which adds a MEMBAR: what it orders are reads by wgmma, and
// those were waited for.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t cluster_barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_barrier) : "memory");
}

// Waits until the phase of `parity` is over.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra.uni again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Barrier `id` of the block, among `num_threads` threads.
__device__ __forceinline__ void named_barrier_sync(int id, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int num_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// --- the cluster ---

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
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

// The address, in block `rank`, of what lies at `address` in this one.
__device__ __forceinline__ uint32_t map_shared(uint32_t address, uint32_t rank) {
    uint32_t mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

__device__ __forceinline__ float4 ld_shared_cluster(uint32_t cluster_address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(cluster_address)
                 : "memory");
    return v;
}

__device__ __forceinline__ void st_shared(uint32_t address, float x, float y, float z, float w) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x), "f"(y), "f"(z),
                 "f"(w)
                 : "memory");
}

// --- bulk tensor copies ---

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The box at (column, row) of a matrix; zeros outside it.
__device__ __forceinline__ void tma_load(uint32_t target, const CUtensorMap* map, uint32_t barrier,
                                         int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];" ::"r"(target),
        "l"(map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}

// The same to all blocks in `block_mask`, at the same places in each.
__device__ __forceinline__ void tma_load_multicast(uint32_t target, const CUtensorMap* map,
                                                   uint32_t barrier, int column, int row,
                                                   uint16_t block_mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target),
        "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(block_mask)
        : "memory");
}

// The box at (column, row) of a matrix from shared memory; what lies outside it is left out.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t source, int column,
                                          int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
        "r"(source), "r"(column), "r"(row)
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

// Shows ordinary writes to shared memory to the copy engine and the tensor cores.
__device__ __forceinline__ void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

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

// --- registers ---

// `value`, of which the compiler no longer knows how it was made, so that it keeps it.
__device__ __forceinline__ uint32_t keep(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

template <int kRegisters>
__device__ __forceinline__ void give_registers_back() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- wgmma ---

// Orders register accesses before the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kPending` groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses to accumulators across this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        asm volatile("" : "+f"(values[i])::"memory");
    }
}

// Describes a K-major tile of rows of 128 bytes, swizzled over 128 bytes as the copy engine does:
// groups of 8 rows 1024 bytes apart. A tile begins at a multiple of 1024, plus 32 for each step of
// K. The lower word holds the address, so that steps are added to it alone.
__device__ __forceinline__ uint32_t wgmma_descriptor_low(uint32_t address) {
    return ((address & 0x3ffff) >> 4) | (1 << 16);
}

__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t low) {
    constexpr uint64_t kLayout = (1ull << 62) | (static_cast<uint64_t>(1024 >> 4) << 32);
    return kLayout | low;
}

// d = A B (+ d where `accumulates`) for a 64x16 A and a 16xkColumns B of T in shared memory.
// Thread t of the warpgroup holds, of column pair j (columns 8 j + 2 (t % 4) and the next one),
// d[4 j], d[4 j + 1] of row 16 (t / 32) + t % 32 / 4, and d[4 j + 2], d[4 j + 3] of row + 8.
template <typename T, int kColumns>
struct Wgmma;

// The texts of the accumulators, and the accumulators, eight at a time.
#define KH_TEXT_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define KH_TEXT_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define KH_TEXT_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define KH_TEXT_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define KH_TEXT_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define KH_TEXT_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define KH_TEXT_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define KH_TEXT_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define KH_TEXT_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define KH_TEXT_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define KH_TEXT_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define KH_TEXT_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define KH_TEXT_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define KH_TEXT_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define KH_TEXT_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define KH_TEXT_15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define KH_D8(i)                                                                                \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define KH_WGMMA(T, TYPE, N, TEXT, A, B, P, ...)                                                   \
    template <>                                                                                    \
    struct Wgmma<T, N> {                                                                           \
        static __device__ __forceinline__ void mma(float (&d)[N / 2], uint64_t a, uint64_t b,      \
                                                   int accumulates) {                              \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P                                     \
                         ", 0;\n"                                                                  \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" TEXT \
                         "}, " A ", " B ", p, 1, 1, 0, 0;\n}"                                      \
                         : __VA_ARGS__                                                             \
                         : "l"(a), "l"(b), "r"(accumulates));                                      \
        }                                                                                          \
    };
#define KH_WGMMA_BOTH(N, TEXT, A, B, P, ...)               \
    KH_WGMMA(__half, "f16", N, TEXT, A, B, P, __VA_ARGS__) \
    KH_WGMMA(__nv_bfloat16, "bf16", N, TEXT, A, B, P, __VA_ARGS__)
KH_WGMMA_BOTH(16, KH_TEXT_0, "%8", "%9", "%10", KH_D8(0))
KH_WGMMA_BOTH(32, KH_TEXT_0 ", " KH_TEXT_1, "%16", "%17", "%18", KH_D8(0), KH_D8(8))
KH_WGMMA_BOTH(64, KH_TEXT_0 ", " KH_TEXT_1 ", " KH_TEXT_2 ", " KH_TEXT_3, "%32", "%33", "%34",
              KH_D8(0), KH_D8(8), KH_D8(16), KH_D8(24))
KH_WGMMA_BOTH(96,
              KH_TEXT_0 ", " KH_TEXT_1 ", " KH_TEXT_2 ", " KH_TEXT_3 ", " KH_TEXT_4 ", " KH_TEXT_5,
              "%48", "%49", "%50", KH_D8(0), KH_D8(8), KH_D8(16), KH_D8(24), KH_D8(32), KH_D8(40))
KH_WGMMA_BOTH(128,
              KH_TEXT_0 ", " KH_TEXT_1 ", " KH_TEXT_2 ", " KH_TEXT_3 ", " KH_TEXT_4 ", " KH_TEXT_5
                        ", " KH_TEXT_6 ", " KH_TEXT_7,
              "%64", "%65", "%66", KH_D8(0), KH_D8(8), KH_D8(16), KH_D8(24), KH_D8(32), KH_D8(40),
              KH_D8(48), KH_D8(56))
KH_WGMMA_BOTH(160,
              KH_TEXT_0 ", " KH_TEXT_1 ", " KH_TEXT_2 ", " KH_TEXT_3 ", " KH_TEXT_4 ", " KH_TEXT_5
                        ", " KH_TEXT_6 ", " KH_TEXT_7 ", " KH_TEXT_8 ", " KH_TEXT_9,
              "%80", "%81", "%82", KH_D8(0), KH_D8(8), KH_D8(16), KH_D8(24), KH_D8(32), KH_D8(40),
              KH_D8(48), KH_D8(56), KH_D8(64), KH_D8(72))
KH_WGMMA_BOTH(176,
              KH_TEXT_0 ", " KH_TEXT_1 ", " KH_TEXT_2 ", " KH_TEXT_3 ", " KH_TEXT_4 ", " KH_TEXT_5
                        ", " KH_TEXT_6 ", " KH_TEXT_7 ", " KH_TEXT_8 ", " KH_TEXT_9 ", " KH_TEXT_10,
              "%88", "%89", "%90", KH_D8(0), KH_D8(8), KH_D8(16), KH_D8(24), KH_D8(32), KH_D8(40),
              KH_D8(48), KH_D8(56), KH_D8(64), KH_D8(72), KH_D8(80))
KH_WGMMA_BOTH(192,
              KH_TEXT_0 ", " KH_TEXT_1 ", " KH_TEXT_2 ", " KH_TEXT_3 ", " KH_TEXT_4 ", " KH_TEXT_5
                        ", " KH_TEXT_6 ", " KH_TEXT_7 ", " KH_TEXT_8 ", " KH_TEXT_9 ", " KH_TEXT_10
                        ", " KH_TEXT_11,
              "%96", "%97", "%98", KH_D8(0), KH_D8(8), KH_D8(16), KH_D8(24), KH_D8(32), KH_D8(40),
              KH_D8(48), KH_D8(56), KH_D8(64), KH_D8(72), KH_D8(80), KH_D8(88))
KH_WGMMA_BOTH(208,
              KH_TEXT_0 ", " KH_TEXT_1 ", " KH_TEXT_2 ", " KH_TEXT_3 ", " KH_TEXT_4 ", " KH_TEXT_5
                        ", " KH_TEXT_6 ", " KH_TEXT_7 ", " KH_TEXT_8 ", " KH_TEXT_9 ", " KH_TEXT_10
                        ", " KH_TEXT_11 ", " KH_TEXT_12,
              "%104", "%105", "%106", KH_D8(0), KH_D8(8), KH_D8(16), KH_D8(24), KH_D8(32),
              KH_D8(40), KH_D8(48), KH_D8(56), KH_D8(64), KH_D8(72), KH_D8(80), KH_D8(88),
              KH_D8(96))
KH_WGMMA_BOTH(224,
              KH_TEXT_0 ", " KH_TEXT_1 ", " KH_TEXT_2 ", " KH_TEXT_3 ", " KH_TEXT_4 ", " KH_TEXT_5
                        ", " KH_TEXT_6 ", " KH_TEXT_7 ", " KH_TEXT_8 ", " KH_TEXT_9 ", " KH_TEXT_10
                        ", " KH_TEXT_11 ", " KH_TEXT_12 ", " KH_TEXT_13,
              "%112", "%113", "%114", KH_D8(0), KH_D8(8), KH_D8(16), KH_D8(24), KH_D8(32),
              KH_D8(40), KH_D8(48), KH_D8(56), KH_D8(64), KH_D8(72), KH_D8(80), KH_D8(88),
              KH_D8(96), KH_D8(104))
KH_WGMMA_BOTH(256,
              KH_TEXT_0 ", " KH_TEXT_1 ", " KH_TEXT_2 ", " KH_TEXT_3 ", " KH_TEXT_4 ", " KH_TEXT_5
                        ", " KH_TEXT_6 ", " KH_TEXT_7 ", " KH_TEXT_8 ", " KH_TEXT_9 ", " KH_TEXT_10
                        ", " KH_TEXT_11 ", " KH_TEXT_12 ", " KH_TEXT_13 ", " KH_TEXT_14
                        ", " KH_TEXT_15,
              "%128", "%129", "%130", KH_D8(0), KH_D8(8), KH_D8(16), KH_D8(24), KH_D8(32),
              KH_D8(40), KH_D8(48), KH_D8(56), KH_D8(64), KH_D8(72), KH_D8(80), KH_D8(88),
              KH_D8(96), KH_D8(104), KH_D8(112), KH_D8(120))
#undef KH_WGMMA_BOTH
#undef KH_WGMMA
#undef KH_D8
#undef KH_TEXT_0
#undef KH_TEXT_1
#undef KH_TEXT_2
#undef KH_TEXT_3
#undef KH_TEXT_4
#undef KH_TEXT_5
#undef KH_TEXT_6
#undef KH_TEXT_7
#undef KH_TEXT_8
#undef KH_TEXT_9
#undef KH_TEXT_10
#undef KH_TEXT_11
#undef KH_TEXT_12
#undef KH_TEXT_13
#undef KH_TEXT_14
#undef KH_TEXT_15

}  // namespace kernel_hub
