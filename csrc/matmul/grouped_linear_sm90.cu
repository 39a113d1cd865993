// out = act(a b[e]^T + bias[e]) for the rows of every expert e on Hopper: bulk tensor copies and
// wgmma. sm_90a only.
//
//   a (total_tokens, k), rows sorted by expert, of fp16 or bf16, k a multiple of 8
//   b (num_experts, n, k), bias (num_experts, n); rows offsets[e] to offsets[e + 1] - 1 are of
//   expert e, offsets (num_experts + 1) on the device; sums in fp32; out (total_tokens, n)
//
// Parallelisation and shared memory: matmul/grouped/sm90.cuh. A tile may reach into the next
// expert's rows of a; only its own are written. Variants, [swapped_]{rows x columns of a block's
// tile}[_c2: clusters of two blocks][_b2: two blocks a multiprocessor]:
//   plain    rows of the product are tokens, columns are weights
//   swapped  few tokens an expert: weights are the rows, so that each is read once
// Every variant gives the same bits when run again.
// Source: NVIDIA, PTX ISA, "Asynchronous warpgroup level matrix instructions".

#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/tma.cuh"
#include "matmul/grouped/sm90.cuh"

namespace kernel_hub::matmul::grouped {

// All rows lie in one matrix of a and one of out; each expert has its own matrix of b.
template <typename T>
struct ByExpert {
    static constexpr bool kClips = false, kFinishes = true;
    Target<T> all;
    int64_t bias_stride;

    __device__ __forceinline__ Side<false> side_a(const CUtensorMap* map) const {
        return {map, nullptr, 0};
    }
    __device__ __forceinline__ Side<false> side_b(const CUtensorMap* map) const {
        return {map, nullptr, 0};
    }
    __device__ __forceinline__ int2 of_a(int) const { return make_int2(0, 0); }
    __device__ __forceinline__ int2 of_b(int expert) const { return make_int2(expert, 0); }
    __device__ __forceinline__ int2 of_out(int) const { return make_int2(0, 0); }

    __device__ __forceinline__ Target<T> target(int expert, int end_row) const {
        Target<T> mine = all;
        mine.bias = all.bias ? all.bias + expert * bias_stride : nullptr;
        mine.end_row = end_row;
        return mine;
    }
};

template <typename T, typename C>
__device__ __forceinline__ void grouped_linear_sm90(
    T* out, float* out_fp32, int* flag, float* partials, int* arrivals, const CUtensorMap* out_map,
    const CUtensorMap* a_map, const CUtensorMap* b_map, const int* offsets, const T* bias,
    int64_t out_stride, int64_t bias_stride, int total_tokens, int n, int k, int num_experts,
    int activation, int group) {
    const int columns = (n + C::kWeights - 1) / C::kWeights;
    const ByExpert<T> policy{{out, out_fp32, bias, out_stride, 0, n, activation}, bias_stride};
    const auto make_walk = [&] {
        return GroupedWalk<C::kPairs>(offsets, flag, num_experts, total_tokens, C::kTokens, columns,
                                      group);
    };
    const bool is_aligned = ((n | out_stride) % 8 | reinterpret_cast<uint64_t>(out) % 16) == 0;
    grouped_sm90<T, C>(policy, make_walk, out_map, a_map, b_map, partials, arrivals, n, k,
                       out && is_aligned && !bias && activation == kIdentity);
}

#define EXPORT_GROUPED_LINEAR(NAME, T, ...)                                                       \
    DESCRIBED(                                                                                    \
        NAME, "x: as many clusters as run at once, or as there are tiles of block_m x block_n",   \
        (grouped_facts<GroupedConfig<__VA_ARGS__>>()),                                            \
        extern "C" __global__ void GROUPED_BOUNDS(GroupedConfig<__VA_ARGS__>) NAME(               \
            T* out, float* out_fp32, int* flag, float* partials, int* arrivals,                   \
            const __grid_constant__ CUtensorMap out_map,                                          \
            const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, \
            const int* offsets, const T* bias, int64_t out_stride, int64_t bias_stride,           \
            int total_tokens, int n, int k, int num_experts, int activation, int group) {         \
            grouped_linear_sm90<T, GroupedConfig<__VA_ARGS__>>(                                   \
                out, out_fp32, flag, partials, arrivals, &out_map, &a_map, &b_map, offsets, bias, \
                out_stride, bias_stride, total_tokens, n, k, num_experts, activation, group);     \
        })

#define EXPORT_BOTH(NAME, ...)                                             \
    EXPORT_GROUPED_LINEAR(grouped_linear_fp16_##NAME, __half, __VA_ARGS__) \
    EXPORT_GROUPED_LINEAR(grouped_linear_bf16_##NAME, __nv_bfloat16, __VA_ARGS__)
// clang-format off
EXPORT_BOTH(128x256_c2, false, 2, 256, 4, true, 2, 1)
EXPORT_BOTH(128x128_c2, false, 2, 128, 6, true, 2, 1)
EXPORT_BOTH(64x128_b2, false, 1, 128, 4, false, 2, 2)
EXPORT_BOTH(swapped_64x16_b2, true, 1, 16, 10, false, 2, 2)
// clang-format on

}  // namespace kernel_hub::matmul::grouped
