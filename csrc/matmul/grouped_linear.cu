// out = act(a b[e]^T + bias[e]) for the rows of every expert e, with mma.sync: the body for every
// GPU since sm_80.
//
//   a (total_tokens, k), rows sorted by expert, of fp16 or bf16, k a multiple of 8
//   b (num_experts, n, k), bias (num_experts, n); rows offsets[e] to offsets[e + 1] - 1 are of
//   expert e, offsets (num_experts + 1) on the device; sums in fp32; out (total_tokens, n)
//
// Parallelisation: a block computes one tile (matmul/grouped/mma.cuh). The host does not know how
// many there are: it launches as many blocks as there can be, each finds its tile from the offsets
// (matmul/grouped/walk.cuh), and those that find none leave. Rows of no expert are not written.
// Variants: 128x128 and 64x128 tiles. Source: NVIDIA, PTX ISA, "Matrix fragments for mma.m16n8k16".

#include "kernel_hub/launch_facts.cuh"
#include "matmul/grouped/mma.cuh"

namespace kernel_hub::matmul::grouped {

template <typename T, typename C>
__device__ __forceinline__ void grouped_linear(T* out, float* out_fp32, int* flag, const T* a,
                                               const T* b, const int* offsets, const T* bias,
                                               int64_t out_stride, int64_t a_stride,
                                               int64_t b_expert_stride, int64_t b_stride,
                                               int64_t bias_stride, int total_tokens, int n, int k,
                                               int num_experts, int activation) {
    GroupedWalk<false> walk(offsets, flag, num_experts, total_tokens, C::kBlockM,
                            (n + kBlockN - 1) / kBlockN, kRasterGroup);
    Place place;
    if (!walk.find(blockIdx.x, place)) {
        return;
    }
    const int64_t expert = place.matrix;
    const Target<T> target{out,        out_fp32,      bias ? bias + expert * bias_stride : nullptr,
                           out_stride, place.end_row, n,
                           activation};
    multiply_tile<true, T, C>(target, a, b + expert * b_expert_stride, a_stride, b_stride,
                              place.first_row + place.tile_row * C::kBlockM,
                              place.tile_column * kBlockN, k);
}

#define EXPORT_GROUPED_LINEAR(NAME, T, BLOCK_M)                                                    \
    DESCRIBED(                                                                                     \
        NAME, "x: tiles of block_m x block_n, as many as there can be",                            \
        (facts_of<Tile<BLOCK_M>>()),                                                               \
        extern "C" __global__ void __launch_bounds__(kThreads, 2) NAME(                            \
            T* out, float* out_fp32, int* flag, const T* a, const T* b, const int* offsets,        \
            const T* bias, int64_t out_stride, int64_t a_stride, int64_t b_expert_stride,          \
            int64_t b_stride, int64_t bias_stride, int total_tokens, int n, int k,                 \
            int num_experts, int activation) {                                                     \
            grouped_linear<T, Tile<BLOCK_M>>(out, out_fp32, flag, a, b, offsets, bias, out_stride, \
                                             a_stride, b_expert_stride, b_stride, bias_stride,     \
                                             total_tokens, n, k, num_experts, activation);         \
        })

EXPORT_GROUPED_LINEAR(grouped_linear_fp16_128x128, __half, 128)
EXPORT_GROUPED_LINEAR(grouped_linear_bf16_128x128, __nv_bfloat16, 128)
EXPORT_GROUPED_LINEAR(grouped_linear_fp16_64x128, __half, 64)
EXPORT_GROUPED_LINEAR(grouped_linear_bf16_64x128, __nv_bfloat16, 64)

}  // namespace kernel_hub::matmul::grouped
