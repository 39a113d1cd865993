// The products of matmul/paired/portable.cuh on Hopper: a producer fetches tiles by bulk tensor
// copies, consumers multiply them by wgmma. sm_90a only. Ring, order of tiles and registers are
// those of linear_sm90.cu. Tensor maps of five dimensions put the rows of b in order; `Boxes` says
// where the next box of a tile begins (PairedBoxes: whole groups of 16 rows). Tiles:
//   kTogether   columns of the product are rows of b: a consumer's thread holds sums[8 g + 4 half +
//               e] of group g, as Ending::write takes them; where Ending::kChooses, that of what
//               Ending::choose(use) calls use(writer) with
//   kSwapped    few rows of a: rows of the product are rows of b, a warp has one group of them, a
//               thread both of pair lane / 4: Ending::write_swapped takes its sums, after
//               prepare_swapped(thread, threads) by all consumers. kSplits blocks of a cluster
//               share k, and add their sums over distributed shared memory, in order
#pragma once

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "kernel_hub/wgmma.cuh"
#include "matmul/paired/constant.cuh"
#include "matmul/paired/seven.cuh"
#include "matmul/sm90/barriers.cuh"
#include "matmul/sm90/loop.cuh"
#include "matmul/sm90/tiles.cuh"

namespace kernel_hub::matmul::paired {

using namespace sm90;  // the ring and the tiles of linear_sm90.cu

// A variant: as Config of matmul/sm90/tiles.cuh, but a swapped tile may have fewer rows than its
// consumers multiply, any multiple of 16, so that there is about one for each multiprocessor.
template <Sharing kSharing, int kConsumers_, int kPieces_, int kPieceN_, int kStages_,
          int kClusterM_, int kClusterN_, int kSplits_, int kBoxes_, int kMinBlocks_,
          int kRows = 64 * kConsumers_>
struct PairedConfig : Config<kSharing, kConsumers_, kPieces_, kPieceN_, kStages_, kClusterM_,
                             kClusterN_, kSplits_, kBoxes_, kMinBlocks_> {
    static constexpr bool kIsSeven = false;
    static constexpr int kBlockM = kRows, kFetchedRows = kRows;
    static constexpr uint32_t kTileBytesM = kBlockM * kRowBytes;
    static constexpr uint32_t kStageBytes = kTileBytesM + PairedConfig::kTileBytesN;
    static constexpr uint32_t kBarriersAt = kStages_ * kStageBytes;
    static constexpr uint32_t kBiasAt = kBarriersAt + 16 * kStages_;  // the end: there is none

    // The first row of a block's tile.
    __device__ static __forceinline__ int first_of(int tile, uint32_t rank) {
        return (tile * kClusterM_ + rank) * kBlockM;
    }
    // The row of a tile at which a consumer's 64 begin: of a last one that has fewer of its own,
    // among those of the one before it, or with some of what lies behind the tile.
    __device__ static __forceinline__ int first_row(int consumer) {
        return kBlockM % 64 == 0 ? 64 * consumer : min(64 * consumer, max(0, kBlockM - 64));
    }
    // Whether a consumer writes a row of a tile that it multiplies.
    __device__ static __forceinline__ bool owns(int consumer, int row) {
        return kBlockM % 64 == 0 || (row >= 64 * consumer && row < kBlockM);
    }

    static_assert(kBoxes_ == 0, "results leave from registers");
    static_assert(kBlockM > 64 * (kConsumers_ - 1) && kBlockM <= 64 * kConsumers_,
                  "every consumer has rows of its own");
    static_assert(kBlockM % 64 == 0 || (PairedConfig::kSwaps && kSplits_ == 1 && kBlockM % 16 == 0),
                  "warps that own no rows stay away where they are written");
    static_assert(kBlockM >= 64 || kStageBytes >= 64 * kRowBytes,
                  "64 rows from the last stage's first on are the block's memory");
};

// Rows of b for tiles by groups of 16 (8 rows and their partners): where boxes lie in the tensor
// map, and how many rows each has (a multiple of 16).
// NOTE: no division in a step: it made the producer the slowest part of all.
struct PairedBoxes {
    const CUtensorMap* map;
    int groups_per_block, rows;

    struct Walk {
        int of_block, block;
    };
    __device__ __forceinline__ Walk begin(int first_row) const {
        const int group = first_row / 16, block = group / groups_per_block;
        return {group - block * groups_per_block, block};
    }
    // The place of the next box, innermost first: (k, 0, 0, y, z).
    __device__ __forceinline__ void next(Walk& walk, int& y, int& z) const {
        y = walk.of_block, z = walk.block;
        walk.of_block += rows / 16;
        if (walk.of_block >= groups_per_block) {
            walk.of_block = 0;
            ++walk.block;
        }
    }
    __device__ __forceinline__ int box_rows() const { return rows; }
};

// Starts the copies of kRows rows of b.
template <int kRows, bool kMulticasts, typename Boxes>
__device__ __forceinline__ void fetch_boxes(const Boxes& boxes, typename Boxes::Walk walk,
                                            uint32_t target, uint32_t barrier, int x,
                                            uint16_t mask) {
    for (int row = 0; row < kRows; row += boxes.box_rows()) {
        int y, z;
        boxes.next(walk, y, z);
        if constexpr (kMulticasts) {
            tma_load_5d_multicast(target + row * kRowBytes, boxes.map, barrier, x, y, z, mask);
        } else {
            tma_load_5d(target + row * kRowBytes, boxes.map, barrier, x, y, z);
        }
    }
}

template <typename C, typename Boxes>
__device__ __forceinline__ void produce_paired(const Operand& a, const Boxes& boxes,
                                               const Raster& raster, uint32_t ring_base,
                                               uint32_t full, uint32_t empty, uint32_t rank,
                                               int first_step, int num_steps, bool leads) {
    // Blocks of a cluster have rows of their own and share columns.
    constexpr int kShareN = C::kShareN;
    constexpr uint16_t kMask = (1 << C::kClusterM) - 1;
    Ring<C::kStages> ring;
    const int num_tiles = raster.rows * raster.columns;
    for (int tile = blockIdx.x / C::kClusterSize; tile < num_tiles;
         tile += gridDim.x / C::kClusterSize) {
        int tile_m, tile_n;
        raster.place(tile, tile_m, tile_n);
        const int row = C::first_of(tile_m, rank);
        const int column = tile_n * C::kBlockN + rank * C::kStepN;
        const typename Boxes::Walk walk = boxes.begin(C::kSwaps ? row : column);
        constexpr int kTile = C::kSwaps ? C::kBlockN : C::kBlockM;
        constexpr int kShare = C::kSwaps ? kShareN : C::kBlockM;
        const int first = C::kSwaps ? tile_n * C::kBlockN : row, own = C::kSwaps ? column : row;
        const CUtensorMap* a_map =
            C::kSwaps ? share_of_columns<C>(a, first, own) : a.template share<kShare>(own);
        const uint32_t bytes =
            C::kStageBytes - kTile * kRowBytes +
            (C::kSwaps ? bytes_of_columns<C>(a, first) : a.template bytes<kTile>(first));
        const uint32_t own_columns = C::kTileBytesM + rank * C::kStepN * kRowBytes;
        const auto fetch_weights = [&](uint32_t stage, uint32_t barrier, int x) {
            if constexpr (C::kSwaps) {
                fetch_boxes<C::kFetchedRows, false>(boxes, walk, stage, barrier, x, 0);
            } else {
                fetch_boxes<kShareN, (C::kClusterM > 1)>(boxes, walk, stage + own_columns, barrier,
                                                         x, kMask);
            }
        };
        const auto fetch_rows = [&](uint32_t stage, uint32_t barrier, int x) {
            Operand::fetch<(C::kSwaps && C::kClusterM > 1)>(
                a_map, stage + (C::kSwaps ? own_columns : 0), barrier, x, own, kMask);
        };
        int step = 0;
        if (leads) {
            leads = false;
            fill_ring<C>(ring, ring_base, full, bytes, first_step, step, num_steps, fetch_weights,
                         fetch_rows);
        }
#pragma unroll 1
        for (; step < num_steps; ++step) {
            mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
            const uint32_t barrier = full + 8 * ring.stage;
            mbarrier_arrive_expect_tx(barrier, bytes);
            const uint32_t stage = ring_base + ring.stage * C::kStageBytes;
            const int x = (first_step + step) * kBlockK;
            if constexpr (C::kSwaps) {
                fetch_weights(stage, barrier, x);
                fetch_rows(stage, barrier, x);
            } else {
                fetch_rows(stage, barrier, x);
                fetch_weights(stage, barrier, x);
            }
            ring.next();
        }
    }
    allow_next_launch();
}

// Hands a tile to a writer of `Ending`, some groups at a time.
template <typename C, typename Ending, typename Writer>
__device__ __forceinline__ void write_groups(const Writer& writer, int row, int group,
                                             const float (&acc)[C::kPieces][C::kSums],
                                             typename Ending::Prepared& prepared) {
    constexpr int kGroups = C::kBlockN / 16, kUnits = kGroups / Ending::kUnit;
    const auto copy = [&](auto first, auto& sums) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(sums) / 4); ++i) {
            const int at = 8 * decltype(first)::value + i;
            sums[i / 8][i / 4 % 2][i % 4] = acc[at / C::kSums][at % C::kSums];
        }
    };
    const auto write = [&](int unit) {
        float sums[Ending::kUnit][2][4];
        with_constant<0, kUnits>(unit, [&](auto constant) {
            constexpr int kFirst = decltype(constant)::value * Ending::kUnit;
            copy(std::integral_constant<int, kFirst>(), sums);
        });
        writer.template write<Ending::kUnit>(row, group + unit * Ending::kUnit, sums, prepared);
    };
    if constexpr (Writer::kUnrolls) {
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            write(unit);
        }
    } else {
#pragma unroll 1
        for (int unit = 0; unit < kUnits; ++unit) {
            write(unit);
        }
    }
    if constexpr (constexpr int kLeft = kGroups % Ending::kUnit; kLeft > 0) {
        float sums[kLeft][2][4];
        copy(std::integral_constant<int, kGroups - kLeft>(), sums);
        writer.template write<kLeft>(row, group + kGroups - kLeft, sums, prepared);
    }
}

// acc = the product of this consumer's rows over `num_steps` steps of k, as `multiply` of
// matmul/sm90/loop.cuh; `meanwhile` runs under the first step's.
template <typename T, typename C, typename Meanwhile>
__device__ __forceinline__ void multiply_while(float (&acc)[C::kPieces][C::kSums],
                                               Ring<C::kStages>& ring, uint32_t rows,
                                               uint32_t columns, uint32_t full, uint32_t empty,
                                               uint32_t rank, int thread, int num_steps,
                                               const Meanwhile& meanwhile) {
    uint32_t previous = 0;
#pragma unroll 1
    for (int step = 0; step < num_steps; ++step) {
        mbarrier_wait(full + 8 * ring.stage, ring.parity);
        start_step<T, C>(acc, ring.stage, rows, columns, step);
        if (step == 0) {
            meanwhile();
        } else {
            wgmma_wait<1>();
            release<C>(empty, previous, rank, thread);
        }
        previous = ring.stage;
        ring.next();
    }
    wgmma_wait<0>();
    hold_pieces<C>(acc);
    release<C>(empty, previous, rank, thread);
}

// Adds the sums of the blocks of a cluster, in order of their ranks: each block for every
// kSplits-th warp's rows. Whether this warp's are among them; then `acc` are the totals.
template <typename C>
__device__ __forceinline__ bool merge_splits(float (&acc)[C::kSums], uint32_t sums, uint32_t split,
                                             int thread) {
    // The ring becomes the place of the sums: all must have read it.
    named_barrier_sync(2, 128);
#pragma unroll
    for (int i = 0; i < C::kSums / 4; ++i) {
        st_shared(sums + (i * 128 + thread) * 16, acc[4 * i], acc[4 * i + 1], acc[4 * i + 2],
                  acc[4 * i + 3]);
    }
    cluster_arrive();
    cluster_wait();
    if (thread / 32 % C::kSplits != split) {
        return false;
    }
#pragma unroll
    for (int i = 0; i < C::kSums / 4; ++i) {
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int from = 0; from < C::kSplits; ++from) {
            const float4 part =
                ld_shared_cluster(cluster_address(sums + (i * 128 + thread) * 16, from));
            total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
        }
        acc[4 * i] = total.x, acc[4 * i + 1] = total.y;
        acc[4 * i + 2] = total.z, acc[4 * i + 3] = total.w;
    }
    return true;
}

// ready: what no launch just ahead writes, as the caller promises. Bit 0: the weights; bit 1: what
// the ending reads before it has sums.
template <typename T, typename C, typename Ending, typename Boxes>
__device__ __forceinline__ void paired_linear_sm90(const Ending& ending, const CUtensorMap* a_map,
                                                   const CUtensorMap* a_tail, const Boxes& boxes,
                                                   int m, int num_groups, int k, int group,
                                                   int ready) {
    static_assert(C::kSplits == 1 ||
                      (C::kSwaps && C::kConsumers == 1 && C::kSharers == 1 && 4 % C::kSplits == 0),
                  "blocks share the k of one swapped tile a cluster, whose 4 warps they finish");
    static_assert(C::kClusterN == 1,
                  "the producer and the ending know columns that the cluster shares");
    static_assert(C::kBlockN / C::kClusterM % 16 == 0 || C::kSwaps, "a box is whole groups");
    const uint32_t ring_base = keep(shared_address(dynamic_shared()));
    const uint32_t full = ring_base + C::kBarriersAt, empty = full + 8 * C::kStages;
    const uint32_t in_cluster = C::kClusterSize > 1 ? cluster_rank() : 0;
    const uint32_t rank = in_cluster % C::kSharers, split = in_cluster / C::kSharers;
    const int warpgroup = threadIdx.x / 128;

    if (threadIdx.x == 0) {
        tma_prefetch_map(a_map);
        tma_prefetch_map(boxes.map);
        for (int i = 0; i < C::kStages; ++i) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i, C::kConsumers * C::kClusterM);
        }
        fence_mbarrier_init();
    }
    await_barriers<(C::kClusterSize > 1)>();
    const bool leads = (ready & 1) != 0;  // then the producer waits where it is right
    // NOTE: what consumers write is behind rows of a, and so behind the launch before.
    if (warpgroup == 0 ? !leads : ready != 3) {
        wait_for_launch_before();
    }

    const int num_rows = C::kSwaps ? 16 * num_groups : m;
    const int num_columns = C::kSwaps ? m : 16 * num_groups;
    constexpr int kRows = C::kBlockM * C::kClusterM;
    const Raster raster{(num_rows + kRows - 1) / kRows, (num_columns + C::kBlockN - 1) / C::kBlockN,
                        group};
    const int all_steps = (k + kBlockK - 1) / kBlockK;
    const int first_step = all_steps * split / C::kSplits;
    const int num_steps = all_steps * (split + 1) / C::kSplits - first_step;

    if (warpgroup == 0) {
        if constexpr (C::kTradesRegisters) {
            release_registers<C::kProducerRegisters>();
        }
        if (warp_index() == 0 && elect_one()) {
            produce_paired<C>({a_map, a_tail, m}, boxes, raster, ring_base, full, empty, rank,
                              first_step, num_steps, leads);
        }
        attend_sums<(C::kSplits > 1)>();
    } else if constexpr (C::kIsSeven) {
        acquire_registers<C::kConsumerRegisters>();
        consume_seven<T, C>(ending, raster, ring_base, full, empty, rank, num_steps);
    } else {
        if constexpr (C::kTradesRegisters) {
            acquire_registers<C::kConsumerRegisters>();
        }
        const int consumer = warpgroup - 1, thread = threadIdx.x % 128;
        const uint32_t rows = descriptor_low(ring_base + C::first_row(consumer) * kRowBytes, 16);
        const uint32_t columns = descriptor_low(ring_base + C::kTileBytesM, 16);
        const int num_tiles = raster.rows * raster.columns;
        if constexpr (C::kSwaps) {
            ending.prepare_swapped(consumer * 128 + thread, 128 * C::kConsumers);
        }
        Ring<C::kStages> ring;
        for (int tile = blockIdx.x / C::kClusterSize; tile < num_tiles;
             tile += gridDim.x / C::kClusterSize) {
            int tile_m, tile_n;
            raster.place(tile, tile_m, tile_n);
            const int row_in_tile = C::first_row(consumer) + thread / 32 * 16;
            const int tile_row = (tile_m * C::kClusterM + rank) * C::kBlockM;
            // NOTE: added up in two orders, so that whole tiles have the code they had.
            const int row = C::kBlockM % 64 == 0 ? tile_row + consumer * 64 + thread / 32 * 16
                                                 : tile_row + row_in_tile;
            const int column = tile_n * C::kBlockN;
            typename Ending::Prepared prepared;
            float acc[C::kPieces][C::kSums];
            multiply_while<T, C>(
                acc, ring, rows, columns, full, empty, rank, thread, num_steps, [&] {
                    if constexpr (!C::kSwaps) {
                        ending.prepare(row + thread % 32 / 4, column / 16, prepared);
                    }
                });
            if constexpr (C::kSplits > 1) {
                if (merge_splits<C>(acc[0], ring_base, split, thread)) {
                    ending.template write_swapped<C::kSums>(column, row / 16, acc[0]);
                }
                // No block may leave while its sums are read.
                __syncwarp();
                cluster_arrive();
                cluster_wait();
            } else if constexpr (C::kSwaps) {
                if (C::owns(consumer, row_in_tile)) {
                    ending.template write_swapped<C::kSums>(column, row / 16, acc[0]);
                }
            } else if constexpr (Ending::kChooses) {
                ending.choose([&](const auto& writer) {
                    write_groups<C, Ending>(writer, row + thread % 32 / 4, column / 16, acc,
                                            prepared);
                });
            } else {
                write_groups<C, Ending>(ending, row + thread % 32 / 4, column / 16, acc, prepared);
            }
        }
    }
    leave_together<(C::kSharers > 1)>();
}

}  // namespace kernel_hub::matmul::paired
