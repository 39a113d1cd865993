// out = a b^T for every matrix of a batch, with mma.sync: the body for every GPU since sm_80.
//
//   a (batch, m, k), b (batch, n, k), of fp16 or bf16, k a multiple of 8; sums in fp32;
//   out (batch, m, n); the batch is num_outer x num_inner matrices, each of two strides, which may
//   be 0 in a and b
//
// Parallelisation: a block computes one tile (matmul/grouped/mma.cuh); blockIdx.x walks the tiles
// of a matrix in groups of 8 rows of tiles, matrix after matrix. Variants: 128x128 and 64x128
// tiles. Source: NVIDIA, PTX ISA, "Matrix fragments for mma.m16n8k16".

#include "kernel_hub/launch_facts.cuh"
#include "matmul/grouped/mma.cuh"

namespace kernel_hub::matmul::grouped {

template <typename T, typename C>
__device__ __forceinline__ void batched_matmul(T* out, float* out_fp32, const T* a, const T* b,
                                               int64_t out_outer_stride, int64_t out_inner_stride,
                                               int64_t out_stride, int64_t a_outer_stride,
                                               int64_t a_inner_stride, int64_t a_stride,
                                               int64_t b_outer_stride, int64_t b_inner_stride,
                                               int64_t b_stride, int num_matrices, int num_inner,
                                               int m, int n, int k) {
    const BatchedWalk<false> walk(num_matrices, m, C::kBlockM, (n + kBlockN - 1) / kBlockN,
                                  kRasterGroup);
    Place place;
    if (!walk.find(blockIdx.x, place)) {
        return;
    }
    const int64_t outer = place.matrix / num_inner, inner = place.matrix % num_inner;
    const int64_t to = outer * out_outer_stride + inner * out_inner_stride;
    const Target<T> target{out ? out + to : nullptr,
                           out_fp32 ? out_fp32 + to : nullptr,
                           nullptr,
                           out_stride,
                           m,
                           n,
                           kIdentity};
    multiply_tile<false, T, C>(target, a + outer * a_outer_stride + inner * a_inner_stride,
                               b + outer * b_outer_stride + inner * b_inner_stride, a_stride,
                               b_stride, place.tile_row * C::kBlockM, place.tile_column * kBlockN,
                               k);
}

#define EXPORT_BATCHED_MATMUL(NAME, T, BLOCK_M)                                                  \
    DESCRIBED(                                                                                   \
        NAME, "x: tiles of block_m x block_n, matrix after matrix", (facts_of<Tile<BLOCK_M>>()), \
        extern "C" __global__ void __launch_bounds__(kThreads, 2) NAME(                          \
            T* out, float* out_fp32, const T* a, const T* b, int64_t out_outer_stride,           \
            int64_t out_inner_stride, int64_t out_stride, int64_t a_outer_stride,                \
            int64_t a_inner_stride, int64_t a_stride, int64_t b_outer_stride,                    \
            int64_t b_inner_stride, int64_t b_stride, int num_matrices, int num_inner, int m,    \
            int n, int k) {                                                                      \
            batched_matmul<T, Tile<BLOCK_M>>(                                                    \
                out, out_fp32, a, b, out_outer_stride, out_inner_stride, out_stride,             \
                a_outer_stride, a_inner_stride, a_stride, b_outer_stride, b_inner_stride,        \
                b_stride, num_matrices, num_inner, m, n, k);                                     \
        })

EXPORT_BATCHED_MATMUL(batched_matmul_fp16_128x128, __half, 128)
EXPORT_BATCHED_MATMUL(batched_matmul_bf16_128x128, __nv_bfloat16, 128)
EXPORT_BATCHED_MATMUL(batched_matmul_fp16_64x128, __half, 64)
EXPORT_BATCHED_MATMUL(batched_matmul_bf16_64x128, __nv_bfloat16, 64)

}  // namespace kernel_hub::matmul::grouped
