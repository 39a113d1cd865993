// q, k, v = rotated(a b^T + bias) with mma.sync, k and v written into a cache: the body for every
// GPU since sm_80.
//
//   a (m, k), b ((num_heads + 2 num_kv_heads) head_dim, k), of fp16 or bf16, k a multiple of 8,
//   head_dim and rotary_dim of 16; sums and rotation in fp32, rounded once
//
// A tile's rows of b are 8 and the 8 that a rotation pairs with them: both sums of a pair are in
// one thread (matmul/paired/portable.cuh). Where tokens go in the cache is worked out as
// append_kv.cu does (kv_place.cuh). Parallelisation: a block of 4 warps computes a kBlockM x 128
// tile; blockIdx.x walks tiles in groups of 8 rows of tiles, so that what is fetched stays in the
// L2. Variants:
//   128x128, 64x128   rows of a x rows of b in a tile
//   m8, m16           up to that many rows of a: b is read once (matmul/paired/small_m.cuh)
// All deterministic. Source: Su et al., "RoFormer", 2021; NVIDIA, PTX ISA, "Matrix fragments for
// mma.m16n8k16".

#include "kernel_hub/launch_facts.cuh"
#include "matmul/paired/portable.cuh"
#include "matmul/paired/qkv_ending.cuh"
#include "matmul/paired/small_m.cuh"

namespace kernel_hub::matmul::paired {

#define EXPORT_QKV_LINEAR(NAME, T, BLOCKS, BODY, ...)                                              \
    DESCRIBED(                                                                                     \
        NAME, "x: tiles of block_m rows of a and block_n of b",                                    \
        (paired_facts<__VA_ARGS__>(BLOCKS)),                                                       \
        extern "C" __global__ void __launch_bounds__(__VA_ARGS__::kThreads, BLOCKS) NAME(          \
            T* q, T* k_cache, T* v_cache, int* flag, const T* a, const T* b, QKV_TABLES(T),        \
            QKV_STRIDES, int64_t a_stride, int64_t b_stride, int m, int k, QKV_NUMBERS,            \
            int weights_ready) {                                                                   \
            const HeadRows heads{head_dim, rotary_dim, paired_dim, is_interleaved};                \
            BODY<T, __VA_ARGS__>(QkvEnding<T>{QKV_ENDING(heads)}, heads, a, b, a_stride, b_stride, \
                                 m, (num_heads + 2 * num_kv_heads) * (head_dim / 16), k,           \
                                 weights_ready);                                                   \
        })

// clang-format off
#define EXPORT_VARIANTS(DTYPE, T) \
    EXPORT_QKV_LINEAR(qkv_linear_##DTYPE##_128x128, T, 2, paired_linear, PairedTile<128>) \
    EXPORT_QKV_LINEAR(qkv_linear_##DTYPE##_64x128, T, 2, paired_linear, PairedTile<64>) \
    EXPORT_QKV_LINEAR(qkv_linear_##DTYPE##_m8, T, 2, paired_linear_small_m, PairedSmallM<1, 3, 2>) \
    EXPORT_QKV_LINEAR(qkv_linear_##DTYPE##_m8_deep, T, 1, paired_linear_small_m, PairedSmallM<1, 4, 4>) \
    EXPORT_QKV_LINEAR(qkv_linear_##DTYPE##_m16, T, 2, paired_linear_small_m, PairedSmallM<2, 2, 2>)
EXPORT_VARIANTS(fp16, __half)
EXPORT_VARIANTS(bf16, __nv_bfloat16)
// clang-format on

}  // namespace kernel_hub::matmul::paired
