// Hopper's mbarriers, 8 bytes of shared memory each, and small copies that they count. For sm_90a;
// one PTX instruction a function. Addresses of shared memory are 32 bits (`shared_address` of
// mma.cuh). Source: PTX ISA 8.7, mbarrier.
#pragma once

#include <stdint.h>

namespace kernel_hub {

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

// Starts a copy of 4 bytes to shared memory.
__device__ __forceinline__ void cp_async_4(uint32_t target, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

// Arrives at a barrier, which counts this thread, once its copies have arrived.
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace kernel_hub
