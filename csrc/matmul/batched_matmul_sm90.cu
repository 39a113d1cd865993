// out = a b^T for every matrix of a batch on Hopper: bulk tensor copies and wgmma. sm_90a only.
//
//   a (batch, m, k), b (batch, n, k), of fp16 or bf16, k a multiple of 8; sums in fp32;
//   out (batch, m, n); the batch is num_outer x num_inner matrices, each of two strides, which may
//   be 0 in a and b
//
// Parallelisation and shared memory: matmul/grouped/sm90.cuh; blocks walk the tiles of one matrix
// after another. Tensor maps of four dimensions cut off what lies outside a matrix; others have
// boxes of the rows that are left for the last tile. Results leave as matmul/grouped/sm90_boxes.cuh
// says. Variants as in grouped_linear_sm90.cu, and [_x4: four boxes a consumer, for a short k],
// [_b3: three blocks a multiprocessor]. Every variant gives the same bits when run again. Source:
// NVIDIA, PTX ISA, "Asynchronous warpgroup level matrix instructions".

#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/tma.cuh"
#include "matmul/grouped/sm90.cuh"

namespace kernel_hub::matmul::grouped {

template <typename T>
struct ByMatrix {
    static constexpr bool kClips = true, kFinishes = false;
    Target<T> first;
    int64_t outer_stride, inner_stride;  // of out
    int num_inner;
    bool has_outer;
    Side<true> a, b;

    __device__ __forceinline__ const Side<true>& side_a(const CUtensorMap*) const { return a; }
    __device__ __forceinline__ const Side<true>& side_b(const CUtensorMap*) const { return b; }
    __device__ __forceinline__ int2 of_a(int matrix) const {
        return has_outer ? make_int2(matrix % num_inner, matrix / num_inner) : make_int2(matrix, 0);
    }
    __device__ __forceinline__ int2 of_b(int matrix) const { return of_a(matrix); }
    __device__ __forceinline__ int2 of_out(int matrix) const { return of_a(matrix); }

    // Of out.
    __device__ __forceinline__ int columns() const { return first.columns; }
    __device__ __forceinline__ int64_t stride() const { return first.stride; }
    __device__ __forceinline__ int64_t offset(int2 at, int row) const {
        return at.y * outer_stride + at.x * inner_stride + row * first.stride;
    }

    __device__ __forceinline__ Target<T> target(int matrix, int end_row) const {
        const int64_t offset = this->offset(of_out(matrix), 0);
        Target<T> mine = first;
        mine.out = first.out ? first.out + offset : nullptr;
        mine.out_fp32 = first.out_fp32 ? first.out_fp32 + offset : nullptr;
        mine.end_row = end_row;
        return mine;
    }
};

template <typename T, typename C>
__device__ __forceinline__ void batched_matmul_sm90(
    T* out, float* out_fp32, float* partials, int* arrivals, const CUtensorMap* out_map,
    const CUtensorMap* a_map, const CUtensorMap* a_tail, const CUtensorMap* b_map,
    const CUtensorMap* b_tail, int64_t out_outer_stride, int64_t out_inner_stride,
    int64_t out_stride, int num_matrices, int num_inner, int m, int n, int k, int group) {
    const int columns = (n + C::kWeights - 1) / C::kWeights;
    const ByMatrix<T> policy{{out, out_fp32, nullptr, out_stride, 0, n, kIdentity},
                             out_outer_stride,
                             out_inner_stride,
                             num_inner,
                             num_inner < num_matrices,
                             {a_map, a_tail, m},
                             {b_map, b_tail, n}};
    const auto make_walk = [&] {
        return BatchedWalk<C::kPairs>(num_matrices, m, C::kTokens, columns, group);
    };
    // NOTE: n too: the copy engine stores 16 bytes or none, also where a row ends among them.
    const int64_t spans = n | out_stride | out_inner_stride | out_outer_stride;
    const bool is_aligned = out ? (spans % 8 | reinterpret_cast<uint64_t>(out) % 16) == 0
                                : (spans % 4 | reinterpret_cast<uint64_t>(out_fp32) % 16) == 0;
    grouped_sm90<T, C>(policy, make_walk, out_map, a_map, b_map, partials, arrivals, n, k,
                       is_aligned);
}

#define EXPORT_BATCHED_MATMUL(NAME, T, ...)                                                        \
    DESCRIBED(                                                                                     \
        NAME, "x: as many clusters as run at once, or as there are tiles of block_m x block_n",    \
        (grouped_facts<GroupedConfig<__VA_ARGS__>>()),                                             \
        extern "C" __global__ void GROUPED_BOUNDS(GroupedConfig<__VA_ARGS__>) NAME(                \
            T* out, float* out_fp32, float* partials, int* arrivals,                               \
            const __grid_constant__ CUtensorMap out_map,                                           \
            const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap a_tail, \
            const __grid_constant__ CUtensorMap b_map, const __grid_constant__ CUtensorMap b_tail, \
            int64_t out_outer_stride, int64_t out_inner_stride, int64_t out_stride,                \
            int num_matrices, int num_inner, int m, int n, int k, int group) {                     \
            batched_matmul_sm90<T, GroupedConfig<__VA_ARGS__>>(                                    \
                out, out_fp32, partials, arrivals, &out_map, &a_map, &a_tail, &b_map, &b_tail,     \
                out_outer_stride, out_inner_stride, out_stride, num_matrices, num_inner, m, n, k,  \
                group);                                                                            \
        })

#define EXPORT_BOTH(NAME, ...)                                             \
    EXPORT_BATCHED_MATMUL(batched_matmul_fp16_##NAME, __half, __VA_ARGS__) \
    EXPORT_BATCHED_MATMUL(batched_matmul_bf16_##NAME, __nv_bfloat16, __VA_ARGS__)
// clang-format off
EXPORT_BOTH(128x256_c2, false, 2, 256, 4, true, 2, 1)
EXPORT_BOTH(128x256_c2_x4, false, 2, 256, 3, true, 4, 1)
EXPORT_BOTH(192x128, false, 3, 128, 4, false, 2, 1)
EXPORT_BOTH(128x128, false, 2, 128, 6, false, 2, 1)
EXPORT_BOTH(128x128_c2, false, 2, 128, 6, true, 2, 1)
EXPORT_BOTH(128x64_c2, false, 2, 64, 8, true, 2, 1)
EXPORT_BOTH(128x64_b2, false, 2, 64, 4, false, 1, 2, true)
EXPORT_BOTH(64x256_b2, false, 1, 256, 2, false, 4, 2, true)
EXPORT_BOTH(64x192_b2, false, 1, 192, 3, false, 2, 2, true)
EXPORT_BOTH(64x128_b2, false, 1, 128, 4, false, 2, 2, true)
EXPORT_BOTH(64x64_b3, false, 1, 64, 4, false, 1, 3, true)
EXPORT_BOTH(swapped_64x64_b2, true, 1, 64, 6, false, 2, 2)
EXPORT_BOTH(swapped_64x32_b2, true, 1, 32, 8, false, 2, 2)
EXPORT_BOTH(swapped_64x16_b2, true, 1, 16, 10, false, 2, 2)
// clang-format on

}  // namespace kernel_hub::matmul::grouped
