// flash_attention_backward_sm90.cu: what it alone asks of PTX.
#pragma once

#include <stdint.h>

namespace kernel_hub::attention::backward::sm90 {

// Says that what accumulators hold does not matter, so that nothing is moved there.
template <int kCount>
__device__ __forceinline__ void leave_undefined(float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        asm volatile("" : "=f"(values[i]));
    }
}

// Writes what another thread of the block acquires, behind all that this one has waited for.
__device__ __forceinline__ void st_shared_release(uint32_t address, int value) {
    asm volatile("st.release.cta.shared.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ int ld_shared_acquire(uint32_t address) {
    int value;
    asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

// What this thread does next comes, for all of the GPU, behind all that it has acquired.
__device__ __forceinline__ void fence_gpu() {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

__device__ __forceinline__ void red_add(int* address, int value) {
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

}  // namespace kernel_hub::attention::backward::sm90
