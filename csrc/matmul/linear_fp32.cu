// out = act(a b^T + bias) + residual of fp32 by three products of tf32, on every GPU since sm_80.
//
//   a (m, k), b (n, k), out (m, n), any k, rows that begin anywhere
//
// Parallelisation and shared memory: portable.cuh; 16 elements of k a stage. Every 8 of them the
// sums leave the tensor cores (three_products.cuh). Results that are no numbers are summed once
// more without tensor cores: inf and nan have no parts. Rows off 16 bytes are fetched 4 at a time.
// Variants: 96x128, what registers hold beside the parts; 32x128, for few rows or tiles. All
// deterministic. Source: NVIDIA, PTX ISA, "Matrix fragments for mma.m16n8k8".

#include "kernel_hub/launch_facts.cuh"
#include "matmul/portable.cuh"

namespace kernel_hub::matmul {

template <typename C>
constexpr LaunchFacts facts_of_fp32() {
    LaunchFacts facts = facts_of<C>();
    facts.block_k = kBlockKFp32;
    return facts;
}

#define EXPORT_LINEAR_FP32(NAME, BLOCK_M)                                                        \
    DESCRIBED(                                                                                   \
        NAME, "x: tiles of block_m x block_n, y: shares of k", (facts_of_fp32<Tile<BLOCK_M>>()), \
        extern "C" __global__ void __launch_bounds__(kThreads, 2) NAME(                          \
            float* out, float* partials, int* tickets, const float* a, const float* b,           \
            const float* bias, const float* residual, int64_t out_stride, int64_t a_stride,      \
            int64_t b_stride, int64_t residual_stride, int m, int n, int k, int activation) {    \
            linear<float, float, Tile<BLOCK_M>>(out, partials, tickets, a, b, bias, residual,    \
                                                out_stride, a_stride, b_stride, residual_stride, \
                                                m, n, k, activation);                            \
        })

EXPORT_LINEAR_FP32(linear_fp32_96x128, 96)
EXPORT_LINEAR_FP32(linear_fp32_32x128, 32)

}  // namespace kernel_hub::matmul
