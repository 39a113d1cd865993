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

}  // namespace kernel_hub::attention::backward::sm90
