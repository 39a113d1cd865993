// Arithmetic that kernels share: logarithms to base 2 and e, tanh, exchanges among four lanes.
#pragma once

#include "kernel_hub/ptx.cuh"

namespace kernel_hub {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr unsigned kAllLanes = 0xffffffffu;

// tanh by exp2, absolute error 1e-7: tanh_approx is off by 5e-4, which a softcap of 50 multiplies.
__device__ __forceinline__ float tanh_exact(float x) {
    return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(2.0f * kLog2e * x));
}

// In each four lanes, w[j] of lane q becomes w[q] of lane j: pairs of columns that the four hold
// become eight columns in a row.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&w)[4], int lane_idx) {
    const bool odd = lane_idx & 1, upper = lane_idx & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t got = __shfl_xor_sync(kAllLanes, odd ? w[i] : w[i + 1], 1);
        odd ? w[i] = got : w[i + 1] = got;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t got = __shfl_xor_sync(kAllLanes, upper ? w[i] : w[i + 2], 2);
        upper ? w[i] = got : w[i + 2] = got;
    }
}

}  // namespace kernel_hub
