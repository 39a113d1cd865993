// out = silu(a gate^T) * (a up^T) on Hopper: bulk tensor copies and wgmma. sm_90a only.
//
//   a (m, k), b (2 columns, k): the rows of the gate, then those of up, columns a multiple of 8;
//   fp16 or bf16; sums in fp32, rounded once; out (m, columns)
//
// A tile's rows of b are 8 of the gate, the 8 of up that they belong to, and so on, which one
// tensor map gathers (matmul/paired/sm90.cuh): both sums of an element of out are in one thread,
// and a tile of kBlockN columns gives half as many of out. Parallelisation and shared memory as in
// linear_sm90.cu, without boxes for results: they leave from registers, 16 bytes a lane. Variants,
// [swapped_]{rows}x{columns of a block's tile}_c{blocks of a cluster along rows, columns}[_b2: two
// blocks a multiprocessor]; swapped: few rows of a, rows of b are the rows of the product. All
// deterministic. Source: Shazeer, "GLU Variants Improve Transformer", 2020; NVIDIA, PTX ISA,
// "Asynchronous warpgroup level matrix instructions".

#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "matmul/paired/sm90.cuh"
#include "matmul/paired/swiglu_ending.cuh"

namespace kernel_hub::matmul::paired {

// Also for swapped tiles: pair lane / 4 of `group`, sums[4 j + 2 half + e] of token + 8 j +
// 2 (lane % 4) + e.
template <typename T>
struct SwigluEndingSm90 : SwigluEnding<T> {
    using SwigluEnding<T>::SwigluEnding;
    static constexpr bool kUnrolls = true;  // 1 % faster than a loop that picks sums by jumps

    __device__ __forceinline__ void prepare_swapped(int, int) const {}

    template <int kSums>
    __device__ __forceinline__ void write_swapped(int token, int group,
                                                  const float (&sums)[kSums]) const {
        const int lane = threadIdx.x % 32;
        if (8 * group >= this->columns) {
            return;
        }
#pragma unroll
        for (int j = 0; j < kSums / 4; ++j) {
            // Two tokens of one column; transposed, two columns of one token.
            const uint32_t word =
                movmatrix_trans(pack2<T>(silu_16<T>(sums[4 * j]) * sums[4 * j + 2],
                                         silu_16<T>(sums[4 * j + 1]) * sums[4 * j + 3]));
            const int row = token + 8 * j + lane / 4, column = 8 * group + 2 * (lane % 4);
            if (row < this->m) {
                T* to = this->out + row * this->out_stride + column;
                if (this->is_aligned) {
                    *reinterpret_cast<uint32_t*>(to) = word;
                } else {
                    const uint16_t low = word, high = word >> 16;
                    reinterpret_cast<uint16_t*>(to)[0] = low;
                    reinterpret_cast<uint16_t*>(to)[1] = high;
                }
            }
        }
    }
};

#define EXPORT_SWIGLU_LINEAR(NAME, T, ...)                                                         \
    DESCRIBED(                                                                                     \
        NAME, "x: as many clusters as run at once, or as there are tiles of block_m x block_n",    \
        (facts_of<Config<__VA_ARGS__>>(Config<__VA_ARGS__>::kBiasAt)),                             \
        extern "C" __global__ void __cluster_dims__(Config<__VA_ARGS__>::kClusterSize, 1, 1)       \
        __launch_bounds__(Config<__VA_ARGS__>::kThreads, Config<__VA_ARGS__>::kMinBlocks) NAME(    \
            T* out, const __grid_constant__ CUtensorMap a_map,                                     \
            const __grid_constant__ CUtensorMap a_tail, const __grid_constant__ CUtensorMap b_map, \
            int64_t out_stride, int m, int columns, int k, int box_rows, int group) {              \
            paired_linear_sm90<T, Config<__VA_ARGS__>>(                                            \
                SwigluEndingSm90<T>(out, out_stride, m, columns), &a_map, &a_tail,                 \
                PairedBoxes{&b_map, columns / 8, box_rows}, m, columns / 8, k, group);             \
        })

#define EXPORT_BOTH(NAME, ...)                                           \
    EXPORT_SWIGLU_LINEAR(swiglu_linear_fp16_##NAME, __half, __VA_ARGS__) \
    EXPORT_SWIGLU_LINEAR(swiglu_linear_bf16_##NAME, __nv_bfloat16, __VA_ARGS__)
// clang-format off
EXPORT_BOTH(128x256_c21, kTogether, 2, 1, 256, 4, 2, 1, 1, 0, 1)
EXPORT_BOTH(128x320_c21, kTogether, 2, 2, 160, 4, 2, 1, 1, 0, 1)
EXPORT_BOTH(128x224_c21, kTogether, 2, 1, 224, 5, 2, 1, 1, 0, 1)
EXPORT_BOTH(128x128_c21, kTogether, 2, 1, 128, 6, 2, 1, 1, 0, 1)
EXPORT_BOTH(128x128_c11, kTogether, 2, 1, 128, 6, 1, 1, 1, 0, 1)
EXPORT_BOTH(swapped_64x16_c11_b2, kSwapped, 1, 1, 16, 10, 1, 1, 1, 0, 2)
EXPORT_BOTH(swapped_64x16_c11_k4_b2, kSwapped, 1, 1, 16, 10, 1, 1, 4, 0, 2)
EXPORT_BOTH(swapped_64x32_c11_b2, kSwapped, 1, 1, 32, 8, 1, 1, 1, 0, 2)
EXPORT_BOTH(swapped_64x64_c11_b2, kSwapped, 1, 1, 64, 6, 1, 1, 1, 0, 2)
EXPORT_BOTH(swapped_64x64_c11, kSwapped, 1, 1, 64, 13, 1, 1, 1, 0, 1)
EXPORT_BOTH(swapped_64x64_c11_k2, kSwapped, 1, 1, 64, 13, 1, 1, 2, 0, 1)
EXPORT_BOTH(swapped_64x64_c11_k4, kSwapped, 1, 1, 64, 13, 1, 1, 4, 0, 1)
EXPORT_BOTH(swapped_64x128_c11, kSwapped, 1, 1, 128, 9, 1, 1, 1, 0, 1)
EXPORT_BOTH(swapped_64x128_c11_k2, kSwapped, 1, 1, 128, 9, 1, 1, 2, 0, 1)
EXPORT_BOTH(swapped_128x128_c21, kSwapped, 2, 1, 128, 7, 2, 1, 1, 0, 1)
EXPORT_BOTH(swapped_128x160_c21, kSwapped, 2, 1, 160, 6, 2, 1, 1, 0, 1)
EXPORT_BOTH(swapped_128x192_c21, kSwapped, 2, 1, 192, 5, 2, 1, 1, 0, 1)
EXPORT_BOTH(swapped_128x224_c21, kSwapped, 2, 1, 224, 5, 2, 1, 1, 0, 1)
// clang-format on

}  // namespace kernel_hub::matmul::paired
