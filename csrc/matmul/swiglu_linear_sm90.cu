// out = activation(a gate^T) * (a up^T) on Hopper: bulk tensor copies and wgmma. sm_90a only.
//
//   a (m, k), b (2 columns, k): the rows of the gate, then those of up, or in turn, as b_map says;
//   columns a multiple of 8; fp16 or bf16; sums in fp32, rounded once; out (m, columns); kind:
//   which activation, alpha and limit of the clamped one (matmul/paired/gates.cuh)
//
// A tile's rows of b are 8 of the gate, the 8 of up that they belong to, and so on, which one
// tensor map gathers (matmul/paired/sm90.cuh): both sums of an element of out are in one thread,
// and a tile of kBlockN columns gives half as many of out. Parallelisation and shared memory as in
// linear_sm90.cu, without boxes for results: they leave from registers, 16 bytes a lane. Variants,
// [swapped_]{rows}x{columns of a block's tile}_c{blocks of a cluster along rows, columns}[_b2: two
// blocks a multiprocessor]; swapped: few rows of a, rows of b are the rows of the product, 224 of
// them three and a half units of 64 (matmul/paired/seven.cuh). All
// deterministic. Source: Shazeer, "GLU Variants Improve Transformer", 2020; NVIDIA, PTX ISA,
// "Asynchronous warpgroup level matrix instructions".

#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "matmul/paired/sm90.cuh"
#include "matmul/paired/swiglu_ending.cuh"

namespace kernel_hub::matmul::paired {

// Writes a tile by one gate. Straight code is 1 % faster than a loop that picks sums by jumps:
// silu, by which most models gate, has it, the others are a loop for their size.
template <typename T, typename Gate, bool kUnrolls_>
struct GatedWriter {
    static constexpr bool kUnrolls = kUnrolls_;
    const GatedPlace<T>& place;
    Gate gate;

    template <int kGroups, typename Prepared>
    __device__ __forceinline__ void write(int row, int group, const float (&sums)[kGroups][2][4],
                                          const Prepared&) const {
        if constexpr (kUnrolls) {
            place.template store_groups<kGroups>(row, group, [&](int i) {
                return gate(sums[i / 4][0][i % 4], sums[i / 4][1][i % 4]);
            });
        } else {
            float joined[4 * kGroups];  // once for both ways to write
            join<kGroups>(joined, gate, sums);
            place.template store_groups<kGroups>(row, group, [&](int i) { return joined[i]; });
        }
    }

    // Pair lane / 4 of `group`, sums[4 j + 2 half + e] of token + 8 j + 2 (lane % 4) + e.
    template <int kSums>
    __device__ __forceinline__ void write_swapped(int token, int group,
                                                  const float (&sums)[kSums]) const {
        if constexpr (kUnrolls || kSums <= 16) {
            write_straight(token, group, sums);
        } else {
            constexpr int kSome = kSums % 16 == 0 ? 16 : kSums % 8 == 0 ? 8 : 4;
#pragma unroll 1
            for (int unit = 0; unit < kSums / kSome; ++unit) {
                float some[kSome];
                with_constant<0, kSums / kSome>(unit, [&](auto constant) {
#pragma unroll
                    for (int i = 0; i < kSome; ++i) {
                        some[i] = sums[kSome * decltype(constant)::value + i];
                    }
                });
                write_straight(token + 2 * kSome * unit, group, some);
            }
        }
    }

    template <int kSums>
    __device__ __forceinline__ void write_straight(int token, int group,
                                                   const float (&sums)[kSums]) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < kSums / 4; ++j) {
            // Two tokens of one column; transposed, two columns of one token.
            const uint32_t word = movmatrix_trans(pack2<T>(gate(sums[4 * j], sums[4 * j + 2]),
                                                           gate(sums[4 * j + 1], sums[4 * j + 3])));
            const int row = token + 8 * j + lane / 4, column = 8 * group + 2 * (lane % 4);
            if (row < place.m) {
                T* to = place.out + row * place.out_stride + column;
                if (place.is_aligned) {
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

template <typename T>
struct GatedEndingSm90 : GatedEnding<T> {
    using GatedEnding<T>::GatedEnding;
    static constexpr bool kChooses = true;

    template <typename Use>
    __device__ __forceinline__ void choose(const Use& use) const {
        this->with_gate([&](const auto& gate) {
            using Gate = std::decay_t<decltype(gate)>;
            use(GatedWriter<T, Gate, std::is_same_v<Gate, SiluGate<T>>>{*this, gate});
        });
    }

    __device__ __forceinline__ void prepare_swapped(int, int) const {}

    template <int kSums>
    __device__ __forceinline__ void write_swapped(int token, int group,
                                                  const float (&sums)[kSums]) const {
        if (8 * group < this->columns) {
            choose([&](const auto& writer) { writer.write_swapped(token, group, sums); });
        }
    }
};

#define EXPORT_SWIGLU_LINEAR(NAME, T, ...) EXPORT_OF(NAME, T, PairedConfig<__VA_ARGS__>)
#define EXPORT_OF(NAME, T, ...)                                                                    \
    DESCRIBED(                                                                                     \
        NAME, "x: as many clusters as run at once, or as there are tiles of block_m x block_n",    \
        (facts_of<__VA_ARGS__>(__VA_ARGS__::kBiasAt)),                                             \
        extern "C" __global__ void __cluster_dims__(__VA_ARGS__::kClusterSize, 1, 1)               \
        __launch_bounds__(__VA_ARGS__::kThreads, __VA_ARGS__::kMinBlocks) NAME(                    \
            T* out, const __grid_constant__ CUtensorMap a_map,                                     \
            const __grid_constant__ CUtensorMap a_tail, const __grid_constant__ CUtensorMap b_map, \
            int64_t out_stride, int m, int columns, int k, int box_rows, int group, int kind,      \
            float alpha, float limit, int weights_ready) {                                         \
            paired_linear_sm90<T, __VA_ARGS__>(                                                    \
                GatedEndingSm90<T>(out, out_stride, m, columns, kind, alpha, limit), &a_map,       \
                &a_tail, PairedBoxes{&b_map, columns / 8, box_rows}, m, columns / 8, k, group,     \
                weights_ready);                                                                    \
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
EXPORT_BOTH(swapped_112x64_c11_b2, kSwapped, 2, 1, 64, 5, 1, 1, 1, 0, 2, 112)
EXPORT_BOTH(swapped_128x128_c21, kSwapped, 2, 1, 128, 7, 2, 1, 1, 0, 1)
EXPORT_BOTH(swapped_128x160_c21, kSwapped, 2, 1, 160, 6, 2, 1, 1, 0, 1)
EXPORT_BOTH(swapped_128x192_c21, kSwapped, 2, 1, 192, 5, 2, 1, 1, 0, 1)
EXPORT_BOTH(swapped_128x200_c21, kSwapped, 2, 1, 200, 5, 2, 1, 1, 0, 1)
EXPORT_BOTH(swapped_128x224_c21, kSwapped, 2, 1, 224, 5, 2, 1, 1, 0, 1)
EXPORT_OF(swiglu_linear_fp16_swapped_224x208_c21, __half, SevenConfig<3>)
EXPORT_OF(swiglu_linear_bf16_swapped_224x208_c21, __nv_bfloat16, SevenConfig<3>)
// clang-format on

}  // namespace kernel_hub::matmul::paired
