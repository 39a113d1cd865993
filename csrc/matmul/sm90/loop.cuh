// The product of tiles in linear_sm90.cu: the producer that fetches, the consumers that multiply.
#pragma once

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/wgmma_200.cuh"
#include "matmul/sm90/schedule.cuh"
#include "matmul/sm90/tiles.cuh"

namespace kernel_hub::matmul::sm90 {

// Fetches what is added to a tile, through the ring as if it were steps of k: into each stage as
// much for each consumer as its boxes take of results, laid out as these are; for one consumer
// after another where a stage has no room for all.
template <typename C>
__device__ __forceinline__ void fetch_residual(const CUtensorMap* map, Ring<C::kStages>& ring,
                                               uint32_t ring_base, uint32_t full, uint32_t empty,
                                               int row, int column) {
    constexpr uint32_t kBytes = C::kOutBoxRows * kRowBytes;
#pragma unroll 1
    for (int fill = 0; fill < C::kFills; ++fill) {
        constexpr int kTurns = C::kConsumers / C::kFillConsumers;
        const int first = fill / kTurns * C::kFillBoxes;
        const int count = min(C::kFillBoxes, C::kTileBoxes - first);
        mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
        const uint32_t barrier = full + 8 * ring.stage;
        mbarrier_arrive_expect_tx(barrier, C::kFillConsumers * count * kBytes);
#pragma unroll 1
        for (int at = 0; at < C::kFillConsumers; ++at) {
            const int to_row = row + 64 * (fill % kTurns + at);
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
                const int to_column = column + (first + i) * C::kWidth;
                tma_load_2d(
                    ring_base + ring.stage * C::kStageBytes + at * C::kFillBytes + i * kBytes, map,
                    barrier, C::kSwaps ? to_row : to_column, C::kSwaps ? to_column : to_row);
            }
        }
        ring.next();
    }
}

// One operand as the copy engine fetches it: `map` has boxes of a block's share of a tile, `tail`
// of the rows that are left in the last share. What lies outside the operand is not fetched. NOTE:
// rows outside a tensor cost more than rows inside: all of them, of all boxes, ask the L2 for one
// line. What is stale in their place only reaches results that are not stored.
struct Operand {
    const CUtensorMap* map;
    const CUtensorMap* tail;
    int rows;

    // Of the tile from `first` on.
    template <int kTile>
    __device__ __forceinline__ uint32_t bytes(int first) const {
        return static_cast<uint32_t>(max(0, min(kTile, rows - first))) * kRowBytes;
    }
    // The map of the share from `first` on; null where it has no rows.
    template <int kShare>
    __device__ __forceinline__ const CUtensorMap* share(int first) const {
        return first + kShare <= rows ? map : first < rows ? tail : nullptr;
    }
    template <bool kMulticasts>
    __device__ static __forceinline__ void fetch(const CUtensorMap* from, uint32_t target,
                                                 uint32_t barrier, int x, int row, uint16_t mask) {
        if (from == nullptr) {
            return;
        }
        if constexpr (kMulticasts) {
            tma_load_2d_multicast(target, from, barrier, x, row, mask);
        } else {
            tma_load_2d(target, from, barrier, x, row);
        }
    }
};

// A block's share of the columns of a tile that begins at `first`, from `own` on; null where it has
// none, or another block's holds all that there are.
template <typename C>
__device__ __forceinline__ const CUtensorMap* share_of_columns(const Operand& columns, int first,
                                                               int own) {
    if (C::kTwiceN > 0 && own > first && first + C::kShareN >= columns.rows) {
        return nullptr;
    }
    return columns.template share<C::kShareN>(own);
}

// Of all blocks' shares.
template <typename C>
__device__ __forceinline__ uint32_t bytes_of_columns(const Operand& columns, int first) {
    const uint32_t bytes = columns.template bytes<C::kBlockN>(first);
    return C::kTwiceN > 0 && first + C::kShareN < columns.rows ? bytes + C::kTwiceN * kRowBytes
                                                               : bytes;
}

// Fills an empty ring with the steps from `step` on, as far as it goes: the weights of all, and,
// behind the launch before, the rows of a. Both as fetch(stage's address, its barrier, column of
// k); step becomes the first that is left.
template <typename C, typename FetchWeights, typename FetchRows>
__device__ __forceinline__ void fill_ring(Ring<C::kStages>& ring, uint32_t ring_base, uint32_t full,
                                          uint32_t bytes, int base_step, int& step, int end_step,
                                          const FetchWeights& fetch_weights,
                                          const FetchRows& fetch_rows) {
    const int first = step, count = min(end_step - first, C::kStages);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        mbarrier_arrive_expect_tx(full + 8 * i, bytes);
        fetch_weights(ring_base + i * C::kStageBytes, full + 8 * i,
                      (base_step + first + i) * kBlockK);
    }
    wait_for_launch_before();
#pragma unroll 1
    for (; step < first + count; ++step) {
        fetch_rows(ring_base + ring.stage * C::kStageBytes, full + 8 * ring.stage,
                   (base_step + step) * kBlockK);
        ring.next();
    }
}

// base_step: the first of this block's part of k, where the blocks of a cluster share it. leads:
// this thread has not waited for the launch before, and none that has not ended writes the weights.
template <typename C, bool kMayLead = false>
__device__ __forceinline__ void produce(const Operand& rows, const Operand& columns,
                                        const Raster& raster, Schedule schedule, uint32_t ring_base,
                                        uint32_t full, uint32_t empty, uint32_t rank, int base_step,
                                        const CUtensorMap* residual_map = nullptr,
                                        bool leads = false) {
    const int rank_m = rank % C::kClusterM, rank_n = rank / C::kClusterM % C::kClusterN;
    constexpr int kShareM = C::kBlockM / C::kClusterN;
    // Blocks of one row of the cluster share rows, those of one column share columns.
    const int first_sharer = rank / C::kSharers * C::kSharers;
    uint16_t row_mask = 0, column_mask = 0;
#pragma unroll
    for (int i = 0; i < C::kClusterN; ++i) {
        row_mask |= 1 << (first_sharer + rank_m + i * C::kClusterM);
    }
#pragma unroll
    for (int i = 0; i < C::kClusterM; ++i) {
        column_mask |= 1 << (first_sharer + rank_n * C::kClusterM + i);
    }
    Ring<C::kStages> ring;
    for (Segment segment; schedule.next(segment);) {
        int tile_m, tile_n;
        raster.place(segment.tile, tile_m, tile_n);
        const int row = (tile_m * C::kClusterM + rank_m) * C::kBlockM;
        const int column = (tile_n * C::kClusterN + rank_n) * C::kBlockN;
        const int own_row = row + rank_n * kShareM, own_column = column + rank_m * C::kStepN;
        const CUtensorMap* row_map = rows.template share<kShareM>(own_row);
        const CUtensorMap* column_map = share_of_columns<C>(columns, column, own_column);
        const uint32_t bytes =
            rows.template bytes<C::kBlockM>(row) + bytes_of_columns<C>(columns, column);
        int first_step = segment.first_step;
        if constexpr (kMayLead) {
            if (leads) {
                leads = false;
                const auto fetch_rows = [&](uint32_t stage, uint32_t barrier, int x) {
                    Operand::fetch<(C::kClusterN > 1)>(row_map,
                                                       stage + rank_n * kShareM * kRowBytes,
                                                       barrier, x, own_row, row_mask);
                };
                const auto fetch_columns = [&](uint32_t stage, uint32_t barrier, int x) {
                    Operand::fetch<(C::kClusterM > 1)>(
                        column_map, stage + C::kTileBytesM + rank_m * C::kStepN * kRowBytes,
                        barrier, x, own_column, column_mask);
                };
                const auto fill = [&](const auto& weights, const auto& others) {
                    fill_ring<C>(ring, ring_base, full, bytes, base_step, first_step,
                                 segment.end_step, weights, others);
                };
                if constexpr (C::kSwaps) {
                    fill(fetch_rows, fetch_columns);
                } else {
                    fill(fetch_columns, fetch_rows);
                }
            }
        }
#pragma unroll 1
        for (int step = first_step; step < segment.end_step; ++step) {
            mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
            const uint32_t barrier = full + 8 * ring.stage;
            mbarrier_arrive_expect_tx(barrier, bytes);
            const uint32_t stage = ring_base + ring.stage * C::kStageBytes;
            const int x = (base_step + step) * kBlockK;
            Operand::fetch<(C::kClusterN > 1)>(row_map, stage + rank_n * kShareM * kRowBytes,
                                               barrier, x, own_row, row_mask);
            Operand::fetch<(C::kClusterM > 1)>(
                column_map, stage + C::kTileBytesM + rank_m * C::kStepN * kRowBytes, barrier, x,
                own_column, column_mask);
            ring.next();
        }
        if constexpr (C::kFetchesResidual) {
            if (residual_map != nullptr && !schedule.leaves(segment)) {
                fetch_residual<C>(residual_map, ring, ring_base, full, empty, row, column);
            }
        }
    }
    if constexpr (C::kMinBlocks == 1) {
        allow_next_launch();
    }
}

// Says to every block that writes into this one that `stage` may be written anew.
template <typename C>
__device__ __forceinline__ void release(uint32_t empty, uint32_t stage, uint32_t rank, int thread) {
    const uint32_t barrier = empty + 8 * stage;
    if constexpr (C::kClusterM * C::kClusterN == 1) {
        if (thread == 0) {
            mbarrier_arrive(barrier);
        }
    } else {
        // One thread a block: those of this column of the cluster, then the others of this row.
        const int rank_m = rank % C::kClusterM, rank_n = rank / C::kClusterM % C::kClusterN;
        if (thread < C::kClusterM + C::kClusterN - 1) {
            const int other = thread - C::kClusterM;
            const int to_n = other + (other >= rank_n ? 1 : 0);
            const uint32_t to = rank / C::kSharers * C::kSharers +
                                (thread < C::kClusterM ? rank_n * C::kClusterM + thread
                                                       : to_n * C::kClusterM + rank_m);
            mbarrier_arrive_cluster(cluster_address(barrier, to));
        }
    }
}

// Lets go of the stages of the last two steps, out of which results were stored, once the copy
// engine has read all but the last group of stores. At the first step of the tile after it.
template <typename C>
__device__ __forceinline__ void release_borrowed(const Ring<C::kStages>& ring, uint32_t empty,
                                                 uint32_t rank, int thread) {
    if (thread < 32) {
        if (thread == 0) {
            tma_store_wait<1>();
        }
        __syncwarp();
    }
    release<C>(empty, ring.before(2), rank, thread);
    release<C>(empty, ring.before(1), rank, thread);
}

template <typename C>
__device__ __forceinline__ void hold_pieces(float (&acc)[C::kPieces][C::kSums]) {
#pragma unroll
    for (int part = 0; part < C::kPieces; ++part) {
        hold_registers(acc[part]);
    }
}

// Starts acc += the product of the ring's next stage; at step 0, acc = that.
template <typename T, typename C>
__device__ __forceinline__ void start_step(float (&acc)[C::kPieces][C::kSums], uint32_t stage,
                                           uint32_t rows, uint32_t columns, int step) {
    const uint32_t offset = stage * (C::kStageBytes >> 4);
    hold_pieces<C>(acc);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockK / 16; ++i) {
#pragma unroll
        for (int part = 0; part < C::kPieces; ++part) {
            const int row_bytes = 32 * i;
            const int column_bytes = 32 * i + part * C::kPieceN * kRowBytes;
            WgmmaOf<T, C::kPieceN>::ss(acc[part], descriptor(rows + offset, row_bytes),
                                       descriptor(columns + offset, column_bytes),
                                       step != 0 || i != 0);
        }
    }
    wgmma_commit();
}

// acc = the product of this consumer's rows over `num_steps` steps of k. borrows: the stages of the
// last two steps are kept for what follows, until release_borrowed, here in the next tile;
// has_borrowed: those of the last tile are.
template <typename T, typename C>
__device__ __forceinline__ void multiply(float (&acc)[C::kPieces][C::kSums], Ring<C::kStages>& ring,
                                         uint32_t rows, uint32_t columns, uint32_t full,
                                         uint32_t empty, uint32_t rank, int thread, int num_steps,
                                         bool borrows = false, bool has_borrowed = false) {
    uint32_t previous = 0;
#pragma unroll 1
    for (int step = 0; step < num_steps; ++step) {
        mbarrier_wait(full + 8 * ring.stage, ring.parity);
        start_step<T, C>(acc, ring.stage, rows, columns, step);
        if (step != 0) {
            wgmma_wait<1>();
            if (!borrows || step + 1 != num_steps) {
                release<C>(empty, previous, rank, thread);
            }
        } else if (has_borrowed) {
            release_borrowed<C>(ring, empty, rank, thread);
        }
        previous = ring.stage;
        ring.next();
    }
    wgmma_wait<0>();
    hold_pieces<C>(acc);
    if (!borrows) {
        release<C>(empty, previous, rank, thread);
    }
}

}  // namespace kernel_hub::matmul::sm90
