// out = act(a b^T + bias) + residual with mma.sync: the body for every GPU since sm_80.
//
//   a (m, k), b (n, k), of fp16 or bf16, k a multiple of 8; sums in fp32; out (m, n)
//
// Parallelisation and shared memory: portable.cuh; 32 elements of k a stage. Two rows share 128
// bytes; their 16-byte chunks are swapped by the pair's index, so that ldmatrix meets no bank
// twice. Variants: 128x128 and 64x128, for few tiles. All deterministic. Source: NVIDIA, PTX
// ISA, "Matrix fragments for mma.m16n8k16".

#include "kernel_hub/launch_facts.cuh"
#include "matmul/portable.cuh"

namespace kernel_hub::matmul {

#define EXPORT_LINEAR(NAME, T, OUT, BLOCK_M)                                                     \
    DESCRIBED(                                                                                   \
        NAME, "x: tiles of block_m x block_n, y: shares of k", (facts_of<Tile<BLOCK_M>>()),      \
        extern "C" __global__ void __launch_bounds__(kThreads, 2) NAME(                          \
            OUT* out, float* partials, int* tickets, const T* a, const T* b, const T* bias,      \
            const OUT* residual, int64_t out_stride, int64_t a_stride, int64_t b_stride,         \
            int64_t residual_stride, int m, int n, int k, int activation) {                      \
            linear<T, OUT, Tile<BLOCK_M>>(out, partials, tickets, a, b, bias, residual,          \
                                          out_stride, a_stride, b_stride, residual_stride, m, n, \
                                          k, activation);                                        \
        })

#define EXPORT_LINEAR_TILES(NAME, T, OUT, SUFFIX)      \
    EXPORT_LINEAR(NAME##_128x128##SUFFIX, T, OUT, 128) \
    EXPORT_LINEAR(NAME##_64x128##SUFFIX, T, OUT, 64)

EXPORT_LINEAR_TILES(linear_fp16, __half, __half, )
EXPORT_LINEAR_TILES(linear_bf16, __nv_bfloat16, __nv_bfloat16, )
EXPORT_LINEAR_TILES(linear_fp16, __half, float, _fp32)
EXPORT_LINEAR_TILES(linear_bf16, __nv_bfloat16, float, _fp32)

}  // namespace kernel_hub::matmul
