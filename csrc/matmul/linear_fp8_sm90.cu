// kernel_hub: allow-local-memory: at most 80 bytes, between tiles
// out = act((a a_scale) (b b_scale)^T + bias) + residual on Hopper, a and b of e4m3: bulk tensor
// copies and wgmma. sm_90a only.
//
//   a (m, k), b (n, k) of e4m3; scales of fp32, x = x_e4m3 * scale: one for all, one for each row
//   of a and of b, or one for each 128 elements of k of a row of a and of 128 rows of b; out (m, n)
//   of bf16, fp16 or fp32, bias (n,) and residual (m, n) of its dtype
//
// Parallelisation, ring of tiles and clusters are those of linear_sm90.cu: a stage holds 128
// elements of k, rows of 128 bytes, swizzled; the tensor maps describe pairs of elements as one of
// 16 bits, so that its producer fetches the same boxes. The sums of the tensor cores keep about 14
// bits: all variants but `fast` add them to fp32 sums in registers, at every 512 of k, or with
// scales of blocks at every 128, times these. Of the producer's warpgroup one warp starts the
// copies of tiles, one fetches scales of blocks into the ring, one the scales and the bias of a
// tile, which are applied at its end. Shared memory: the ring; boxes for results on their way out;
// two transaction barriers a stage; scale and bias of each column, scale of each row; scales of
// blocks, for each stage. Variants, [swapped_]{rows}x{columns of a block's tile}_c{blocks of a
// cluster along rows}1[_k{blocks that share k}][_b2: two blocks a multiprocessor][_fast][_blocks]:
//   plain       rows of the product are rows of a, columns rows of b
//   swapped     few rows of a: the product is transposed, weights are its rows
//   k2          few tiles: the blocks of a cluster share k and add their sums over distributed
//               shared memory, always in the same order
//   fast        sums stay in the tensor cores over all of k; no scales of blocks
//   blocks      scales of blocks alone, where one body for both takes too many registers
// Every variant gives the same bits when run again.
// Source: NVIDIA, PTX ISA, "Asynchronous warpgroup level matrix instructions"; scales of blocks:
// DeepSeek-V3 Technical Report, section 3.3.

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "kernel_hub/wgmma.cuh"
#include "matmul/epilogue.cuh"
#include "matmul/fp8/loop.cuh"
#include "matmul/fp8/scales.cuh"
#include "matmul/fp8/write.cuh"
#include "matmul/fp8/write_swapped.cuh"
#include "matmul/sm90/barriers.cuh"

namespace kernel_hub::matmul::fp8 {

// The part of a consumer: its rows of each tile of this block, from the ring to `out`.
template <typename Out, typename C>
__device__ __forceinline__ void consume(const ScaledEpilogue<Out>& epilogue,
                                        const CUtensorMap* out_map, const Partials& partials,
                                        const Raster& raster, Schedule schedule, uint32_t ring_base,
                                        uint32_t full, uint32_t empty, uint32_t rank) {
    const int consumer = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
    const int thread_row = thread / 32 * 16 + thread % 32 / 4;
    const uint32_t rows = descriptor_low(ring_base + consumer * 64 * kRowBytes, 16);
    const uint32_t columns = descriptor_low(ring_base + C::kTileBytesM, 16);
    const uint32_t boxes = ring_base + C::kBoxesAt + consumer * C::kBoxes * kBoxBytes;
    const float* slots = epilogue.a_scales.is_blocked
                             ? reinterpret_cast<const float*>(dynamic_shared() + C::kSlotsAt)
                             : nullptr;
    bool has_borrowed = false;
    Ring<C::kStages> ring;
    for (Segment segment; schedule.next(segment);) {
        int tile_m, tile_n;
        raster.place(segment.tile, tile_m, tile_n);
        const int num_steps = segment.end_step - segment.first_step;
        const bool leaves = C::kSplits == 1 && schedule.leaves(segment);
        const bool borrows = C::kBorrows && sizeof(Out) == 2 && epilogue.is_aligned &&
                             !epilogue.residual && !leaves && num_steps >= 2;
        const int row = (tile_m * C::kClusterM + rank % C::kClusterM) * C::kBlockM + consumer * 64;
        const int column = tile_n * C::kBlockN;
        SwappedScales<C, Out> scales;
        if constexpr (C::kSwaps) {
            if (!leaves) {
                scales.load(epilogue, row + thread_row, column, rank);
            }
        }
        float acc[C::kPieces][C::kSums];
        if constexpr (C::kPromotes) {
            multiply_promoting<C>(acc[0], ring, rows, columns, full, empty, rank, thread, slots,
                                  consumer * 64 + thread_row, num_steps, borrows, has_borrowed);
        } else {
            multiply<__nv_fp8_e4m3, C>(acc, ring, rows, columns, full, empty, rank, thread,
                                       num_steps, borrows, has_borrowed);
        }
        has_borrowed = borrows;
        if constexpr (C::kSplits == 1) {
            if (leaves) {
                leave_sums<C>(partials, acc, consumer, thread);
                continue;
            }
            collect_sums<C>(partials, schedule, segment.first_step, acc, consumer, thread);
        }
        const RingEnd<C> end{ring, ring_base, full, empty, rank};
        if constexpr (C::kSplits > 1) {
            merge_and_write_scaled<C>(epilogue, row + thread_row, column, scales, acc[0], ring_base,
                                      rank, threadIdx.x - 128);
        } else if constexpr (C::kSwaps) {
            write_scaled_swapped<C>(epilogue, out_map, boxes, consumer, row, column, scales, acc[0],
                                    end);
        } else {
            named_barrier_sync(kColumnsFetched, 128 * C::kConsumers + 32);
            const Places<C> places{end, boxes, consumer, borrows};
            write_scaled<C>(epilogue, out_map, places, row, column, acc);
            named_barrier_arrive(kColumnsRead, 128 * C::kConsumers + 32);
        }
    }
    if constexpr (C::kBoxes > 0) {
        if (thread == 0) {
            tma_store_wait<0>();
        }
    }
}

template <typename Out, typename C>
__device__ __forceinline__ void linear_fp8(const CUtensorMap* out_map,
                                           const CUtensorMap* residual_map,
                                           const CUtensorMap* row_map, const CUtensorMap* row_tail,
                                           const CUtensorMap* column_map,
                                           const CUtensorMap* column_tail, const Partials& partials,
                                           const ScaledEpilogue<Out>& epilogue, int k, int group,
                                           int num_whole, int num_dealt) {
    const uint32_t ring_base = keep(shared_address(dynamic_shared()));
    const uint32_t full = ring_base + C::kBarriersAt, empty = full + 8 * C::kStages;
    const uint32_t rank = C::kClusterSize > 1 ? cluster_rank() : 0;
    const bool has_blocks = C::kTakesBlocks && epilogue.a_scales.is_blocked;
    if (threadIdx.x == 0) {
        tma_prefetch_map(row_map);
        tma_prefetch_map(column_map);
        const int fetching_scales = has_blocks ? 32 : 0;
        make_barriers<C::kStages>(full, empty, 1 + fetching_scales, C::kConsumers * C::kClusterM);
    }
    await_barriers<(C::kClusterSize > 1)>();
    // What is above needs no memory that the launch before may still write or read.
    wait_for_launch_before();

    const int num_rows = C::kSwaps ? epilogue.n : epilogue.m;
    const int num_columns = C::kSwaps ? epilogue.m : epilogue.n;
    constexpr int kRows = C::kBlockM * C::kClusterM;
    const Raster raster{(num_rows + kRows - 1) / kRows, (num_columns + C::kBlockN - 1) / C::kBlockN,
                        group};
    const int all_steps = (k + kRowBytes - 1) / kRowBytes;
    const int split = rank / C::kSharers;
    const int base_step = all_steps * split / C::kSplits;
    const Schedule schedule(all_steps * (split + 1) / C::kSplits - base_step, num_whole, num_dealt,
                            blockIdx.x / C::kClusterSize, gridDim.x / C::kClusterSize);
    const int warp = warp_index();
    if (warp < 4) {
        if constexpr (C::kTradesRegisters) {
            release_registers<C::kProducerRegisters>();
        }
        if (warp == 0 && elect_one()) {
            produce<C>({row_map, row_tail, num_rows}, {column_map, column_tail, num_columns},
                       raster, schedule, ring_base, full, empty, rank, base_step,
                       epilogue.adds_vectors() ? residual_map : nullptr);
        } else if (has_blocks && warp == 1) {
            fetch_scales<C>(epilogue.a_scales, epilogue.b_scales, raster, schedule, ring_base, full,
                            empty, rank, base_step, C::kFetchesResidual && epilogue.adds_vectors());
        } else if (!C::kSwaps && warp == 2) {
            fetch_columns<C>(epilogue, raster, schedule, rank);
        } else if (C::kSplits == 1 && warp == 3) {
            announce_sums<C>(partials, schedule);
        }
        attend_sums<(C::kSplits > 1)>();
    } else {
        if constexpr (C::kTradesRegisters) {
            acquire_registers<C::kConsumerRegisters>();
        }
        consume<Out, C>(epilogue, out_map, partials, raster, schedule, ring_base, full, empty,
                        rank);
    }
    leave_together<(C::kClusterM > 1)>();
}

#define EXPORT_LINEAR_FP8(NAME, OUT, ...)                                                          \
    DESCRIBED(                                                                                     \
        NAME, "x: as many clusters as run at once, or as there are tiles of block_m x block_n",    \
        (scaled_facts<ScaledConfig<__VA_ARGS__>>()),                                               \
        extern "C" __global__ void __cluster_dims__(ScaledConfig<__VA_ARGS__>::kClusterSize, 1, 1) \
        __launch_bounds__(ScaledConfig<__VA_ARGS__>::kThreads,                                     \
                          ScaledConfig<__VA_ARGS__>::kMinBlocks)                                   \
        NAME(OUT* out, const __grid_constant__ CUtensorMap out_map,                                \
             const __grid_constant__ CUtensorMap residual_map,                                     \
             const __grid_constant__ CUtensorMap row_map,                                          \
             const __grid_constant__ CUtensorMap row_tail,                                         \
             const __grid_constant__ CUtensorMap column_map,                                       \
             const __grid_constant__ CUtensorMap column_tail, float* partials, int* arrivals,      \
             const float* a_scale, const float* b_scale, const OUT* bias, const OUT* residual,     \
             int64_t out_stride, int64_t residual_stride, int64_t a_scale_stride,                  \
             int64_t a_scale_k_stride, int64_t b_scale_stride, int64_t b_scale_k_stride, int m,    \
             int n, int k, int activation, int group, int num_whole, int num_dealt,                \
             int has_blocks) {                                                                     \
            const Scales a{.values = a_scale,                                                      \
                           .stride = a_scale_stride,                                               \
                           .k_stride = a_scale_k_stride,                                           \
                           .num_rows = m,                                                          \
                           .shift = 0,                                                             \
                           .is_blocked = has_blocks != 0};                                         \
            const Scales b{.values = b_scale,                                                      \
                           .stride = b_scale_stride,                                               \
                           .k_stride = b_scale_k_stride,                                           \
                           .num_rows = n,                                                          \
                           .shift = 7,                                                             \
                           .is_blocked = has_blocks != 0};                                         \
            const Epilogue<OUT, OUT> epilogue(out, bias, residual, out_stride, residual_stride, m, \
                                              n, activation);                                      \
            linear_fp8<OUT, ScaledConfig<__VA_ARGS__>>(                                            \
                &out_map, &residual_map, &row_map, &row_tail, &column_map, &column_tail,           \
                {partials, arrivals}, {epilogue, a, b}, k, group, num_whole, num_dealt);           \
        })

#define EXPORT_ALL(NAME, ...)                                             \
    EXPORT_LINEAR_FP8(linear_fp8_bf16_##NAME, __nv_bfloat16, __VA_ARGS__) \
    EXPORT_LINEAR_FP8(linear_fp8_fp16_##NAME, __half, __VA_ARGS__)        \
    EXPORT_LINEAR_FP8(linear_fp8_fp32_##NAME, float, __VA_ARGS__)
// clang-format off
EXPORT_ALL(128x256_c21_fast, kFast, kTogether, 2, 1, 256, 4, 2, 1, 2, 1)
EXPORT_ALL(128x192_c21_fast, kFast, kTogether, 2, 1, 192, 5, 2, 1, 1, 1)
EXPORT_ALL(128x128_c21, kPromoting, kTogether, 2, 1, 128, 6, 2, 1, 1, 1)
EXPORT_ALL(128x128_c21_blocks, kBlocks, kTogether, 2, 1, 128, 6, 2, 1, 1, 1)
EXPORT_ALL(128x64_c21, kBoth, kTogether, 2, 1, 64, 8, 2, 1, 1, 1)
EXPORT_ALL(swapped_64x16_c11_b2, kBoth, kSwapped, 1, 1, 16, 10, 1, 1, 1, 2)
EXPORT_ALL(swapped_64x16_c11_k2_b2, kBoth, kSwapped, 1, 1, 16, 10, 1, 2, 0, 2)
EXPORT_ALL(swapped_64x64_c11_b2, kPromoting, kSwapped, 1, 1, 64, 6, 1, 1, 1, 2)
EXPORT_ALL(swapped_64x64_c11_b2_blocks, kBlocks, kSwapped, 1, 1, 64, 6, 1, 1, 1, 2)
EXPORT_ALL(swapped_64x64_c11, kBoth, kSwapped, 1, 1, 64, 12, 1, 1, 1, 1)
EXPORT_ALL(swapped_64x64_c11_k2, kBoth, kSwapped, 1, 1, 64, 13, 1, 2, 0, 1)
EXPORT_ALL(swapped_64x64_c11_k4, kBoth, kSwapped, 1, 1, 64, 13, 1, 4, 0, 1)
EXPORT_ALL(swapped_64x128_c11, kBoth, kSwapped, 1, 1, 128, 8, 1, 1, 2, 1)
EXPORT_ALL(swapped_64x128_c11_k2, kBoth, kSwapped, 1, 1, 128, 9, 1, 2, 0, 1)
EXPORT_ALL(swapped_128x128_c21, kPromoting, kSwapped, 2, 1, 128, 5, 2, 1, 2, 1)
EXPORT_ALL(swapped_128x160_c21, kPromoting, kSwapped, 2, 1, 160, 4, 2, 1, 3, 1)
EXPORT_ALL(swapped_128x160_c21_fast, kFast, kSwapped, 2, 1, 160, 4, 2, 1, 3, 1)
EXPORT_ALL(swapped_128x192_c21_fast, kFast, kSwapped, 2, 1, 192, 4, 2, 1, 3, 1)
EXPORT_ALL(swapped_128x128_c21_blocks, kBlocks, kSwapped, 2, 1, 128, 5, 2, 1, 2, 1)
// clang-format on

}  // namespace kernel_hub::matmul::fp8
