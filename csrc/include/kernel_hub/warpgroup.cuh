// What warps of a block on Hopper do among themselves: named barriers, registers moved between
// warpgroups, tiles of a warp to shared memory. For sm_90a; one PTX instruction a function.
// Source: PTX ISA 8.7, bar, setmaxnreg, stmatrix, movmatrix.
#pragma once

#include <stdint.h>

namespace kernel_hub {

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

__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// threadIdx.x / 32, which ptxas then knows to be one number for a warp.
__device__ __forceinline__ int warp_index() {
    return __shfl_sync(~0u, threadIdx.x / 32, 0);
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

}  // namespace kernel_hub
