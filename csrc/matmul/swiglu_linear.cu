// out = activation(a gate^T) * (a up^T) with mma.sync: the body for every GPU since sm_80.
//
//   a (m, k), b (2 columns, k): the rows of the gate, then those of up, half_rows = columns of them
//   apart, or in turn (1); fp16 or bf16, k a multiple of 8; sums in fp32, rounded once; out (m,
//   columns); kind: which activation, alpha and limit of the clamped one (matmul/paired/gates.cuh)
//
// A tile's rows of b are 8 of the gate, the 8 of up that they belong to, and so on: both sums of an
// element of out are in one thread (matmul/paired/portable.cuh). Parallelisation: a block of 4
// warps computes a kBlockM x 64 tile of out; blockIdx.x walks tiles in groups of 8 rows of tiles,
// so that what is fetched stays in the L2. Variants:
//   128x128, 64x128   rows of a x rows of b in a tile
//   m8, m16           up to that many rows of a: b is read once (matmul/paired/small_m.cuh)
//   m8_deep           longer chunks, for the shared memory of sm_90
// All deterministic. Source: Shazeer, "GLU Variants Improve Transformer", 2020; NVIDIA, PTX ISA,
// "Matrix fragments for mma.m16n8k16".

#include "kernel_hub/launch_facts.cuh"
#include "matmul/paired/portable.cuh"
#include "matmul/paired/small_m.cuh"
#include "matmul/paired/swiglu_ending.cuh"

namespace kernel_hub::matmul::paired {

#define EXPORT_SWIGLU_LINEAR(NAME, T, BLOCKS, BODY, ...)                                          \
    DESCRIBED(                                                                                    \
        NAME, "x: tiles of block_m rows of a and block_n of b",                                   \
        (paired_facts<__VA_ARGS__>(BLOCKS)),                                                      \
        extern "C" __global__ void __launch_bounds__(__VA_ARGS__::kThreads, BLOCKS) NAME(         \
            T* out, const T* a, const T* b, int64_t out_stride, int64_t a_stride,                 \
            int64_t b_stride, int m, int columns, int k, int half_rows, int kind, float alpha,    \
            float limit, int weights_ready) {                                                     \
            BODY<T, __VA_ARGS__>(GatedEnding<T>(out, out_stride, m, columns, kind, alpha, limit), \
                                 GateUpRows{columns, half_rows}, a, b, a_stride, b_stride, m,     \
                                 (columns + 7) / 8, k, weights_ready);                            \
        })

// clang-format off
#define EXPORT_VARIANTS(DTYPE, T) \
    EXPORT_SWIGLU_LINEAR(swiglu_linear_##DTYPE##_128x128, T, 2, paired_linear, PairedTile<128>) \
    EXPORT_SWIGLU_LINEAR(swiglu_linear_##DTYPE##_64x128, T, 2, paired_linear, PairedTile<64>) \
    EXPORT_SWIGLU_LINEAR(swiglu_linear_##DTYPE##_m8, T, 2, paired_linear_small_m, PairedSmallM<1, 3, 2>) \
    EXPORT_SWIGLU_LINEAR(swiglu_linear_##DTYPE##_m8_deep, T, 1, paired_linear_small_m, PairedSmallM<1, 4, 4>) \
    EXPORT_SWIGLU_LINEAR(swiglu_linear_##DTYPE##_m16, T, 2, paired_linear_small_m, PairedSmallM<2, 2, 2>)
EXPORT_VARIANTS(fp16, __half)
EXPORT_VARIANTS(bf16, __nv_bfloat16)
// clang-format on

}  // namespace kernel_hub::matmul::paired
