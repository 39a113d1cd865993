// Copies one tile by TMA: out = in[row .. row + box_rows, col .. col + box_cols], what lies outside
// the tensor filled by the hardware. One block a launch; thread 0 issues, all threads write out.
// Shared memory, all dynamic: the tile, 1024-byte aligned as swizzle patterns follow the address,
// then one mbarrier of 8 bytes.
// Source: PTX ISA, cp.async.bulk.tensor and mbarrier; CUDA C++ programming guide, "Using TMA".
#include <cuda.h>

#include <cstdint>

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// out: (tile_bytes)
extern "C" __global__ void __launch_bounds__(128) tma_copy_2d(unsigned char* out,
                                                              const
                                                              __grid_constant__ CUtensorMap map,
                                                              int col, int row, int tile_bytes) {
    extern __shared__ __align__(1024) unsigned char tile[];
    const uint32_t barrier_at = shared_address(tile + tile_bytes);

    // Make the barrier visible to the copy engine.
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier_at));
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();

    // Issue the copy and announce its bytes.
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_at),
                     "r"(tile_bytes)
                     : "memory");
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(tile)),
            "l"(&map), "r"(col), "r"(row), "r"(barrier_at)
            : "memory");
    }

    // Wait for phase 0 to end.
    uint32_t done = 0;
    while (!done) {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; "
            "selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier_at)
            : "memory");
    }
    for (int i = threadIdx.x; i < tile_bytes; i += blockDim.x) out[i] = tile[i];
}
