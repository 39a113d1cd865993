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
#include "matmul/paired/constant.cuh"
#include "matmul/stages.cuh"

namespace kernel_hub::matmul::paired {

template <int kBlockM_>
struct PairedTile : Tile<kBlockM_> {
    static constexpr int kThreads = matmul::kThreads, kRowsAtOnce = kThreads / kChunks;
    static constexpr int kBlockN = matmul::kBlockN, kBlockK = matmul::kBlockK;
    static constexpr int kStages = matmul::kStages;
    static constexpr int kSharedBytes = kStages * Tile<kBlockM_>::kStageBytes;
    static constexpr int kRaster = 8;  // rows of tiles that are walked together
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

// a (m, k), b: num_groups groups of 16 rows of k.
template <typename T, typename C, typename Rows, typename Ending>
__device__ __forceinline__ void paired_linear(const Ending& ending, const Rows& rows_of_b,
                                              const T* a, const T* b, int64_t a_stride,
                                              int64_t b_stride, int m, int num_groups, int k,
                                              int /*weights_ready*/) {
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
    const int chunk = threadIdx.x % kChunks, own_row = threadIdx.x / kChunks;
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
                cp_async_16(target + place_of_chunk(own, chunk),
                            a_tile + i * C::kRowsAtOnce * a_stride + at,
                            is_inside && row + own < m);
            }
#pragma unroll
            for (int i = 0; i < kFetchesB; ++i) {
                const uint32_t to = place_of_chunk(own_row + i * C::kRowsAtOnce, chunk);
                cp_async_16(target + C::kBlockM * C::kBlockK * 2 + to, b + (from_b[i] + at),
                            is_inside && from_b[i] >= 0);
            }
        }
        cp_async_commit();
    };

    float acc[C::kTilesM][C::kTilesN][4] = {};
    const int warp_row = warp_idx / 2 * C::kWarpM, warp_column = warp_idx % 2 * C::kWarpN;
    wait_for_launch_before();
    multiply_steps<T, C>(ring, num_steps, warp_row, warp_column, fetch_step, acc);

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
