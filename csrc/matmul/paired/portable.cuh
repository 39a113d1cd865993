// a b^T where columns of the product are wanted two by two: a gate and what it multiplies, the two
// halves of a rotated head. Bodies with mma.sync, for every GPU since sm_80.
//
// The rows of b are taken in groups of 16, of 8 rows and the 8 rows that belong to them, whatever
// lies between: `Rows` says where. So a pair's sums are in one thread, which hands them to
// `Ending`:
//   Rows    int64_t at(group, half, w): row of b of pair w (0-7); below 0: none, counts as zeros
//   Ending  kUnit: groups that `write` takes at once
//           prepare(row, group, prepared): what is known of `row` and row + 8, which will be
//               written from `group` on, before their sums are
//           write<kGroups>(row, group, sums, prepared): lane l of a warp holds, for each group and
//               half, sums[..][..][0], [1] of `row` and [2], [3] of row + 8, for w = 2 (l % 4) and
//               the next one; all lanes of a warp call it
//           prepare_few(), write_pair(row, group, w, first, second): for at most 16 rows, with all
//               threads of the block, and a barrier between the two
#pragma once

#include <type_traits>

#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/vec.cuh"

namespace kernel_hub::matmul::paired {

// A block of 4 warps, 2 x 2, computes a kBlockM x 128 tile. Shared memory: a ring of kStages x
// (kBlockM rows of a, 128 rows of b), 32 elements of k each. Two rows share 128 bytes; their
// 16-byte chunks are swapped by the pair's index, so that ldmatrix meets no bank twice.
// NOTE: sm_89 has 99 KiB of shared memory: three stages let two blocks share a multiprocessor.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 890
constexpr int kPairedStages = 3;
#else
constexpr int kPairedStages = 4;
#endif

template <int kBlockM_>
struct PairedTile {
    static constexpr int kBlockM = kBlockM_, kBlockN = 128, kBlockK = 32, kThreads = 128;
    static constexpr int kChunks = kBlockK / 8;  // of 16 bytes, in a row of a stage
    static constexpr int kRowsAtOnce = kThreads / kChunks;
    static constexpr int kWarpM = kBlockM / 2, kWarpN = kBlockN / 2;
    static constexpr int kTilesM = kWarpM / 16, kTilesN = kWarpN / 8;  // of mma, a warp
    static constexpr int kStageBytes = (kBlockM + kBlockN) * kBlockK * 2;
    static constexpr int kStages = kPairedStages, kSharedBytes = kStages * kStageBytes;
    static constexpr int kRaster = 8;  // rows of tiles that are walked together

    // The place of a 16-byte chunk of a row in a stage, in bytes.
    static __device__ __forceinline__ uint32_t place(int row, int chunk) {
        const int pair = row / 2;
        return (pair * 2 * kChunks + row % 2 * kChunks + (chunk ^ (pair % kChunks))) * 16;
    }
};

template <typename C>
constexpr LaunchFacts paired_facts(int blocks_per_sm) {
    return {.threads = C::kThreads,
            .shared_bytes = C::kSharedBytes,
            .blocks_per_sm = blocks_per_sm,
            .block_m = C::kBlockM,
            .block_n = C::kBlockN,
            .block_k = C::kBlockK,
            .stages = C::kStages};
}

// acc += the products of one stage.
template <typename T, typename C>
__device__ __forceinline__ void multiply_paired(uint32_t stage, int warp_row, int warp_column,
                                                float (&acc)[C::kTilesM][C::kTilesN][4]) {
    const int lane = threadIdx.x % 32;
    const uint32_t b_stage = stage + C::kBlockM * C::kBlockK * 2;
#pragma unroll
    for (int step = 0; step < C::kBlockK / 16; ++step) {
        uint32_t a[C::kTilesM][4], b[C::kTilesN / 2][4];
#pragma unroll
        for (int i = 0; i < C::kTilesM; ++i) {
            ldmatrix_x4(a[i],
                        stage + C::place(warp_row + 16 * i + lane % 16, 2 * step + lane / 16));
        }
#pragma unroll
        for (int j = 0; j < C::kTilesN / 2; ++j) {
            ldmatrix_x4(b[j], b_stage + C::place(warp_column + 16 * j + lane / 16 * 8 + lane % 8,
                                                 2 * step + lane / 8 % 2));
        }
#pragma unroll
        for (int i = 0; i < C::kTilesM; ++i) {
#pragma unroll
            for (int j = 0; j < C::kTilesN; ++j) {
                mma_m16n8k16<T>(acc[i][j], a[i], b[j / 2][2 * (j % 2)], b[j / 2][2 * (j % 2) + 1]);
            }
        }
    }
}

// Calls `use(constant)` for the constant that `number` is, from kFirst to kEnd - 1.
// NOTE: what `use` does not do is there once, in a loop, and not once a constant: straight code for
// all sums of a tile misses the instruction cache.
template <int kFirst, int kEnd, typename Use>
__device__ __forceinline__ void with_constant(int number, const Use& use) {
    if (kFirst + 1 == kEnd || number == kFirst) {
        use(std::integral_constant<int, kFirst>());
    } else if constexpr (kFirst + 1 < kEnd) {
        with_constant<kFirst + 1, kEnd>(number, use);
    }
}

// a (m, k), b: num_groups groups of 16 rows of k.
template <typename T, typename C, typename Rows, typename Ending>
__device__ __forceinline__ void paired_linear(const Ending& ending, const Rows& rows_of_b,
                                              const T* a, const T* b, int64_t a_stride,
                                              int64_t b_stride, int m, int num_groups, int k) {
    const uint32_t ring = shared_address(dynamic_shared());
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
    constexpr int kTileGroups = C::kBlockN / 16;
    const int rows = (m + C::kBlockM - 1) / C::kBlockM;
    const int columns = (num_groups + kTileGroups - 1) / kTileGroups;
    const int of_raster = C::kRaster * columns, tile = blockIdx.x;
    const int raster = tile / of_raster * C::kRaster, in_raster = tile % of_raster;
    const int raster_rows = min(C::kRaster, rows - raster);
    const int row = (raster + in_raster % raster_rows) * C::kBlockM;
    const int group = in_raster / raster_rows * kTileGroups;

    // This thread's chunk of each row that it fetches; below 0 where there is no row.
    const int chunk = threadIdx.x % C::kChunks, own_row = threadIdx.x / C::kChunks;
    constexpr int kFetchesA = C::kBlockM / C::kRowsAtOnce, kFetchesB = C::kBlockN / C::kRowsAtOnce;
    int64_t from_b[kFetchesB];
#pragma unroll
    for (int i = 0; i < kFetchesB; ++i) {
        const int at = own_row + i * C::kRowsAtOnce, of_group = group + at / 16;
        const int64_t from =
            of_group < num_groups ? rows_of_b.at(of_group, at / 8 % 2, at % 8) : -1;
        from_b[i] = from < 0 ? -1 : from * b_stride + chunk * 8;
    }
    const T* a_tile = a + (row + own_row) * a_stride + chunk * 8;
    const int num_steps = (k + C::kBlockK - 1) / C::kBlockK;
    const auto fetch_step = [&](int step, int stage) {
        if (step < num_steps) {
            const int at = step * C::kBlockK;
            const bool is_inside = at + chunk * 8 < k;
            const uint32_t target = ring + stage * C::kStageBytes;
#pragma unroll
            for (int i = 0; i < kFetchesA; ++i) {
                const int own = own_row + i * C::kRowsAtOnce;
                cp_async_16(target + C::place(own, chunk),
                            a_tile + i * C::kRowsAtOnce * a_stride + at,
                            is_inside && row + own < m);
            }
#pragma unroll
            for (int i = 0; i < kFetchesB; ++i) {
                const uint32_t to = C::place(own_row + i * C::kRowsAtOnce, chunk);
                cp_async_16(target + C::kBlockM * C::kBlockK * 2 + to, b + (from_b[i] + at),
                            is_inside && from_b[i] >= 0);
            }
        }
        cp_async_commit();
    };

    float acc[C::kTilesM][C::kTilesN][4] = {};
    const int warp_row = warp_idx / 2 * C::kWarpM, warp_column = warp_idx % 2 * C::kWarpN;
    wait_for_launch_before();
#pragma unroll
    for (int i = 0; i < kPairedStages - 1; ++i) {
        fetch_step(i, i);
    }
    int stage = 0;
    for (int step = 0; step < num_steps; ++step) {
        cp_async_wait<kPairedStages - 2>();
        // All warps see this stage, and have left the one that is fetched into next.
        __syncthreads();
        fetch_step(step + kPairedStages - 1, stage == 0 ? kPairedStages - 1 : stage - 1);
        multiply_paired<T, C>(ring + stage * C::kStageBytes, warp_row, warp_column, acc);
        stage = stage + 1 == kPairedStages ? 0 : stage + 1;
    }

    constexpr int kUnits = C::kTilesN / 2 / Ending::kUnit;
    typename Ending::Prepared prepared;
#pragma unroll 1
    for (int at = 0; at < C::kTilesM * kUnits; ++at) {
        float sums[Ending::kUnit][2][4];
        with_constant<0, C::kTilesM * kUnits>(at, [&](auto constant) {
            constexpr int kAt = decltype(constant)::value;
#pragma unroll
            for (int e = 0; e < 8 * Ending::kUnit; ++e) {
                sums[e / 8][e / 4 % 2][e % 4] =
                    acc[kAt / kUnits][kAt % kUnits * 2 * Ending::kUnit + e / 4][e % 4];
            }
        });
        const int first_row = row + warp_row + at / kUnits * 16 + lane_idx / 4;
        const int first_group = group + warp_column / 16;
        if (at % kUnits == 0) {
            ending.prepare(first_row, first_group, prepared);
        }
        ending.template write<Ending::kUnit>(first_row, first_group + at % kUnits * Ending::kUnit,
                                             sums, prepared);
    }
}

}  // namespace kernel_hub::matmul::paired
