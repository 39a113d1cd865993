// The product of tiles in linear_sm90.cu: the producer that fetches, the consumers that multiply.
#pragma once

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/wgmma.cuh"
#include "matmul/sm90/tiles.cuh"

namespace kernel_hub::matmul::sm90 {

// Fetches what is added to a tile, through the ring as if it were steps of k: into each stage as
// many boxes of 64 x 64 for each consumer as it has for its results.
template <typename C>
__device__ __forceinline__ void fetch_residual(const CUtensorMap* map, Ring<C::kStages>& ring,
                                               uint32_t ring_base, uint32_t full, uint32_t empty,
                                               int row, int column) {
    constexpr int kAll = (C::kBlockN + kBoxColumns - 1) / kBoxColumns;
#pragma unroll 1
    for (int first = 0; first < kAll; first += C::kBoxes) {
        const int count = min(C::kBoxes, kAll - first);
        mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
        const uint32_t barrier = full + 8 * ring.stage;
        mbarrier_arrive_expect_tx(barrier, C::kConsumers * count * kBoxBytes);
#pragma unroll 1
        for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
                tma_load_2d(ring_base + ring.stage * C::kStageBytes +
                                (consumer * C::kBoxes + i) * kBoxBytes,
                            map, barrier, column + (first + i) * kBoxColumns, row + 64 * consumer);
            }
        }
        ring.next();
    }
}

template <typename C>
__device__ __forceinline__ void produce(const CUtensorMap* row_map, const CUtensorMap* column_map,
                                        const Raster& raster, uint32_t ring_base, uint32_t full,
                                        uint32_t empty, uint32_t rank, int first_step,
                                        int last_step, const CUtensorMap* residual_map = nullptr) {
    const int rank_m = rank % C::kClusterM, rank_n = rank / C::kClusterM % C::kClusterN;
    constexpr int kShareM = C::kBlockM / C::kClusterN, kShareN = C::kBlockN / C::kClusterM;
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
    const int num_tiles = raster.rows * raster.columns;
    for (int tile = blockIdx.x / C::kClusterSize; tile < num_tiles;
         tile += gridDim.x / C::kClusterSize) {
        int tile_m, tile_n;
        raster.place(tile, tile_m, tile_n);
        const int row = (tile_m * C::kClusterM + rank_m) * C::kBlockM + rank_n * kShareM;
        const int column = (tile_n * C::kClusterN + rank_n) * C::kBlockN + rank_m * kShareN;
        for (int step = first_step; step < last_step; ++step) {
            mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
            const uint32_t barrier = full + 8 * ring.stage;
            mbarrier_arrive_expect_tx(barrier, C::kStageBytes);
            const uint32_t rows = ring_base + ring.stage * C::kStageBytes;
            const uint32_t to_rows = rows + rank_n * kShareM * kRowBytes;
            const uint32_t to_columns = rows + C::kTileBytesM + rank_m * kShareN * kRowBytes;
            if constexpr (C::kClusterN > 1) {
                tma_load_2d_multicast(to_rows, row_map, barrier, step * kBlockK, row, row_mask);
            } else {
                tma_load_2d(to_rows, row_map, barrier, step * kBlockK, row);
            }
            if constexpr (C::kClusterM > 1) {
                tma_load_2d_multicast(to_columns, column_map, barrier, step * kBlockK, column,
                                      column_mask);
            } else {
                tma_load_2d(to_columns, column_map, barrier, step * kBlockK, column);
            }
            ring.next();
        }
        if constexpr (C::kFetchesResidual) {
            if (residual_map != nullptr) {
                fetch_residual<C>(residual_map, ring, ring_base, full, empty,
                                  (tile_m * C::kClusterM + rank_m) * C::kBlockM,
                                  (tile_n * C::kClusterN + rank_n) * C::kBlockN);
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
        const uint32_t offset = ring.stage * (C::kStageBytes >> 4);
#pragma unroll
        for (int part = 0; part < C::kPieces; ++part) {
            hold_registers(acc[part]);
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBlockK / 16; ++i) {
#pragma unroll
            for (int part = 0; part < C::kPieces; ++part) {
                const int row_bytes = 32 * i;
                const int column_bytes = 32 * i + part * C::kPieceN * kRowBytes;
                Wgmma<T>::ss(acc[part], descriptor(rows + offset, row_bytes),
                             descriptor(columns + offset, column_bytes), step != 0 || i != 0);
            }
        }
        wgmma_commit();
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
#pragma unroll
    for (int part = 0; part < C::kPieces; ++part) {
        hold_registers(acc[part]);
    }
    if (!borrows) {
        release<C>(empty, previous, rank, thread);
    }
}

}  // namespace kernel_hub::matmul::sm90
