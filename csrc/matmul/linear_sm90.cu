// kernel_hub: allow-local-memory: at most 80 bytes, between tiles
// out = act(a b^T + bias) + residual on Hopper: bulk tensor copies and wgmma. sm_90a only.
//
//   a (m, k), b (n, k), of fp16 or bf16; sums in fp32; out (m, n) of the same dtype or fp32
//
// Parallelisation: a warpgroup of one thread's work fetches tiles (the producer), kConsumers
// warpgroups multiply them, 64 rows each of a (64 kConsumers) x kBlockN tile. Blocks are
// persistent: they walk the tiles in groups of rows, so that what is fetched stays in the L2. The
// blocks of a cluster work on neighbouring tiles; each fetches its share of what they have in
// common and multicasts it. A launch may overlap the end of the one before: it waits for it before
// it touches memory (dependent_launch.cuh), but for the weights of the first stages where the
// caller says that they are ready. Shared memory: a ring of kStages x (tile of rows, then tile of
// columns), 64 elements of K each, rows of 128 bytes, swizzled, through which the residual of a
// tile comes too, after its last step; behind it boxes for results on their way out, two
// transaction barriers a stage (full and empty), the bias of a tile. Variants,
// [swapped_]{rows}x{columns of a block's tile}_c{blocks of a cluster along rows, columns}[_k{blocks
// that share k}][_b2: two blocks a multiprocessor]:
//   plain       rows of the product are rows of a, columns rows of b
//   k2          few tiles: the blocks of a cluster share K and add their sums over distributed
//               shared memory, always in the same order
//   swapped     few rows of a: the product is transposed, weights are its rows
// Every variant gives the same bits when run again.
// Source: NVIDIA, PTX ISA, "Asynchronous warpgroup level matrix instructions".

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "kernel_hub/wgmma.cuh"
#include "matmul/epilogue.cuh"
#include "matmul/sm90/barriers.cuh"
#include "matmul/sm90/loop.cuh"
#include "matmul/sm90/tiles.cuh"
#include "matmul/sm90/write.cuh"
#include "matmul/sm90/write_swapped.cuh"

namespace kernel_hub::matmul::sm90 {

template <typename T, typename Out, typename C>
__device__ __forceinline__ void linear_sm90(
    Out* out, const CUtensorMap* out_map, const CUtensorMap* residual_map,
    const CUtensorMap* row_map, const CUtensorMap* row_tail, const CUtensorMap* column_map,
    const CUtensorMap* column_tail, const Partials& partials, const T* bias, const Out* residual,
    int64_t out_stride, int64_t residual_stride, int m, int n, int k, int activation, int group,
    int num_whole, int num_dealt, int weights_ready) {
    static_assert((C::kFetchesResidual && C::kFillConsumers == C::kConsumers) || C::kSplits > 1,
                  "a stage is as large as all boxes");
    const uint32_t ring_base = keep(shared_address(dynamic_shared()));
    const uint32_t full = ring_base + C::kBarriersAt, empty = full + 8 * C::kStages;
    const uint32_t rank = C::kClusterSize > 1 ? cluster_rank() : 0;
    const int warp = warp_index(), warpgroup = warp / 4;

    const int num_rows = C::kSwaps ? n : m, num_columns = C::kSwaps ? m : n;
    constexpr int kRows = C::kBlockM * C::kClusterM, kColumns = C::kBlockN * C::kClusterN;
    const Raster raster{(num_rows + kRows - 1) / kRows, (num_columns + kColumns - 1) / kColumns,
                        group};
    const int all_steps = (k + kBlockK - 1) / kBlockK;
    const int split = rank / C::kSharers;
    const int base_step = all_steps * split / C::kSplits;
    Schedule schedule(all_steps * (split + 1) / C::kSplits - base_step, num_whole, num_dealt,
                      blockIdx.x / C::kClusterSize, gridDim.x / C::kClusterSize);

    if (threadIdx.x == 0) {
        tma_prefetch_map(row_map);
        tma_prefetch_map(column_map);
        make_barriers<C::kStages>(full, empty, 1,
                                  C::kConsumers * (C::kClusterM + C::kClusterN - 1));
    }
    await_barriers<(C::kClusterSize > 1)>();

    // What is above reads nothing that the launch before may still write. A producer that leads
    // waits where it is right.
    const bool leads = sizeof(Out) == 2 && weights_ready != 0;
    if (warpgroup != 0 || !leads) {
        wait_for_launch_before();
    }
    if constexpr (C::kMinBlocks == 2) {
        allow_next_launch();
    }

    const Epilogue<T, Out> epilogue(out, bias, residual, out_stride, residual_stride, m, n,
                                    activation);
    if (warpgroup == 0) {
        if constexpr (C::kTradesRegisters) {
            release_registers<C::kProducerRegisters>();
        }
        if (warp == 0 && elect_one()) {
            produce<C, sizeof(Out) == 2>({row_map, row_tail, num_rows},
                                         {column_map, column_tail, num_columns}, raster, schedule,
                                         ring_base, full, empty, rank, base_step,
                                         epilogue.adds_vectors() ? residual_map : nullptr, leads);
        } else if (C::kSplits == 1 && warp == 3) {
            announce_sums<C>(partials, schedule);
        }
        attend_sums<(C::kSplits > 1)>();
    } else {
        if constexpr (C::kTradesRegisters) {
            acquire_registers<C::kConsumerRegisters>();
        }
        const int consumer = warpgroup - 1, thread = threadIdx.x % 128;
        const int rank_m = rank % C::kClusterM, rank_n = rank / C::kClusterM % C::kClusterN;
        const int row_in_tile = 64 * consumer;
        const uint32_t rows = descriptor_low(ring_base + row_in_tile * kRowBytes, 16);
        const uint32_t columns = descriptor_low(ring_base + C::kTileBytesM, 16);
        const uint32_t boxes = ring_base + C::kBoxesAt + consumer * C::kBoxes * kBoxBytes;
        uint32_t* tile_bias = reinterpret_cast<uint32_t*>(dynamic_shared() + C::kBiasAt) +
                              consumer * (C::kBlockN / 2);
        Ring<C::kStages> ring;
        for (Segment segment; schedule.next(segment);) {
            int tile_m, tile_n;
            raster.place(segment.tile, tile_m, tile_n);
            const int row = (tile_m * C::kClusterM + rank_m) * C::kBlockM + row_in_tile;
            const int column = (tile_n * C::kClusterN + rank_n) * C::kBlockN;
            const int thread_row = row + thread / 32 * 16 + thread % 32 / 4;
            const int thread_column = column + 2 * (thread % 4);
            uint32_t bias_words[C::kBiasWords];
            const bool leaves = C::kSplits == 1 && schedule.leaves(segment);
            if (C::kStagesBias && bias && !leaves) {
                epilogue.template load_bias<C::kBiasWords>(column + 2 * thread, bias_words);
            }
            std::conditional_t<(C::kSplits > 1), SplitExtras<C, T, Out>, SwappedExtras<C, T, Out>>
                extras;
            if constexpr (C::kSplits > 1) {
                extras.row = thread_row;
                extras.column = thread_column;
                extras.share = rank / C::kSharers;
                extras.load(epilogue);
            } else if constexpr (C::kSwaps) {
                if (!leaves) {
                    extras.load(epilogue, thread_row, thread_column, column);
                }
            }
            float acc[C::kPieces][C::kSums];
            multiply<T, C>(acc, ring, rows, columns, full, empty, rank, thread,
                           segment.end_step - segment.first_step);
            if constexpr (C::kSplits == 1) {
                if (leaves) {
                    leave_sums<C>(partials, acc, consumer, thread);
                    continue;
                }
                collect_sums<C>(partials, schedule, segment.first_step, acc, consumer, thread);
            }
            if constexpr (C::kSplits > 1) {
                merge_and_write<C>(epilogue, extras, acc[0], ring_base, rank,
                                   consumer * 128 + thread);
            } else if constexpr (C::kSwaps) {
                write_swapped<C>(epilogue, out_map, boxes, consumer, row, column, thread_row,
                                 thread_column, extras, acc[0],
                                 RingEnd<C>{ring, ring_base, full, empty, rank});
            } else {
                write_tile<C>(epilogue, out_map, tile_bias, bias_words, boxes, consumer, row,
                              column, acc, RingEnd<C>{ring, ring_base, full, empty, rank});
            }
        }
        if constexpr (C::kBoxes > 0) {
            if (thread == 0) {
                tma_store_wait<0>();
            }
        }
    }
    leave_together<(C::kClusterM * C::kClusterN > 1)>();
}

#define EXPORT_LINEAR(NAME, T, OUT, ...)                                                        \
    DESCRIBED(                                                                                  \
        NAME, "x: as many clusters as run at once, or as there are tiles of block_m x block_n", \
        (facts_of<Config<__VA_ARGS__>>()),                                                      \
        extern "C" __global__ void __cluster_dims__(Config<__VA_ARGS__>::kClusterSize, 1, 1)    \
        __launch_bounds__(Config<__VA_ARGS__>::kThreads, Config<__VA_ARGS__>::kMinBlocks) NAME( \
            OUT* out, const __grid_constant__ CUtensorMap out_map,                              \
            const __grid_constant__ CUtensorMap residual_map,                                   \
            const __grid_constant__ CUtensorMap row_map,                                        \
            const __grid_constant__ CUtensorMap row_tail,                                       \
            const __grid_constant__ CUtensorMap column_map,                                     \
            const __grid_constant__ CUtensorMap column_tail, float* partials, int* arrivals,    \
            const T* bias, const OUT* residual, int64_t out_stride, int64_t residual_stride,    \
            int m, int n, int k, int activation, int group, int num_whole, int num_dealt,       \
            int weights_ready) {                                                                \
            linear_sm90<T, OUT, Config<__VA_ARGS__>>(                                           \
                out, &out_map, &residual_map, &row_map, &row_tail, &column_map, &column_tail,   \
                {partials, arrivals}, bias, residual, out_stride, residual_stride, m, n, k,     \
                activation, group, num_whole, num_dealt, weights_ready);                        \
        })

#define EXPORT_BOTH(NAME, ...)                                     \
    EXPORT_LINEAR(linear_fp16_##NAME, __half, __half, __VA_ARGS__) \
    EXPORT_LINEAR(linear_bf16_##NAME, __nv_bfloat16, __nv_bfloat16, __VA_ARGS__)
#define EXPORT_WITH_FP32(NAME, ...)                                      \
    EXPORT_BOTH(NAME, __VA_ARGS__)                                       \
    EXPORT_LINEAR(linear_fp16_##NAME##_fp32, __half, float, __VA_ARGS__) \
    EXPORT_LINEAR(linear_bf16_##NAME##_fp32, __nv_bfloat16, float, __VA_ARGS__)
// clang-format off
EXPORT_WITH_FP32(128x256_c21, kTogether, 2, 1, 256, 4, 2, 1, 1, 2, 1)
EXPORT_BOTH(128x224_c21, kTogether, 2, 1, 224, 4, 2, 1, 1, 2, 1)
EXPORT_BOTH(128x192_c21, kTogether, 2, 1, 192, 4, 2, 1, 1, 2, 1)
EXPORT_BOTH(128x160_c21, kTogether, 2, 1, 160, 5, 2, 1, 1, 2, 1)
EXPORT_WITH_FP32(128x128_c21, kTogether, 2, 1, 128, 6, 2, 1, 1, 2, 1)
EXPORT_BOTH(128x128_c11, kTogether, 2, 1, 128, 6, 1, 1, 1, 2, 1)
EXPORT_BOTH(128x96_c21, kTogether, 2, 1, 96, 7, 2, 1, 1, 1, 1)
EXPORT_WITH_FP32(swapped_64x16_c11_b2, kSwapped, 1, 1, 16, 10, 1, 1, 1, 1, 2)
EXPORT_BOTH(swapped_64x16_c11_k2_b2, kSwapped, 1, 1, 16, 11, 1, 1, 2, 0, 2)
EXPORT_BOTH(swapped_64x32_c11_b2, kSwapped, 1, 1, 32, 8, 1, 1, 1, 1, 2)
EXPORT_BOTH(swapped_64x32_c11_k2_b2, kSwapped, 1, 1, 32, 9, 1, 1, 2, 0, 2)
EXPORT_WITH_FP32(swapped_64x64_c11_b2, kSwapped, 1, 1, 64, 6, 1, 1, 1, 1, 2)
EXPORT_BOTH(swapped_64x64_c11, kSwapped, 1, 1, 64, 13, 1, 1, 1, 1, 1)
EXPORT_BOTH(swapped_64x64_c11_k2, kSwapped, 1, 1, 64, 13, 1, 1, 2, 0, 1)
EXPORT_BOTH(swapped_64x64_c11_k4, kSwapped, 1, 1, 64, 13, 1, 1, 4, 0, 1)
EXPORT_WITH_FP32(swapped_64x128_c11, kSwapped, 1, 1, 128, 8, 1, 1, 1, 2, 1)
EXPORT_BOTH(swapped_64x128_c11_k2, kSwapped, 1, 1, 128, 9, 1, 1, 2, 0, 1)
EXPORT_BOTH(swapped_64x128_c11_k4, kSwapped, 1, 1, 128, 9, 1, 1, 4, 0, 1)
EXPORT_BOTH(swapped_64x160_c11_k2, kSwapped, 1, 1, 160, 8, 1, 1, 2, 0, 1)
EXPORT_BOTH(swapped_64x208_c11_k2, kSwapped, 1, 1, 208, 6, 1, 1, 2, 0, 1)
EXPORT_BOTH(swapped_64x160_c21, kSwapped, 1, 1, 160, 7, 2, 1, 1, 2, 1)
EXPORT_BOTH(swapped_64x224_c21, kSwapped, 1, 1, 224, 5, 2, 1, 1, 2, 1)
EXPORT_BOTH(swapped_128x96_c21, kSwapped, 2, 1, 96, 6, 2, 1, 1, 2, 1)
EXPORT_BOTH(swapped_128x128_c21, kSwapped, 2, 1, 128, 6, 2, 1, 1, 2, 1)
EXPORT_BOTH(swapped_128x160_c21, kSwapped, 2, 1, 160, 5, 2, 1, 1, 2, 1)
EXPORT_BOTH(swapped_128x192_c21, kSwapped, 2, 1, 192, 4, 2, 1, 1, 2, 1)
EXPORT_BOTH(swapped_128x200_c21, kSwapped, 2, 1, 200, 4, 2, 1, 1, 2, 1)
EXPORT_WITH_FP32(swapped_128x224_c21, kSwapped, 2, 1, 224, 4, 2, 1, 1, 2, 1)
// clang-format on

}  // namespace kernel_hub::matmul::sm90
