// flash_attention_backward_sm90.cu: what it alone asks of PTX.
#pragma once

namespace kernel_hub::attention::backward::sm90 {

// Says that what accumulators hold does not matter, so that nothing is moved there.
template <int kCount>
__device__ __forceinline__ void leave_undefined(float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        asm volatile("" : "=f"(values[i]));
    }
}

// Adds to what another block acquires, behind all that this thread has written or waited for.
// NOTE: `relaxed` behind the TMA's wait is faster (up to 20 %), but of 116 cases two did not repeat
// their bits.
__device__ __forceinline__ void red_add_release(int* address, int value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

}  // namespace kernel_hub::attention::backward::sm90
