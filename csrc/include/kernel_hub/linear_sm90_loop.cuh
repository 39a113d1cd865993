// The product of tiles in linear_sm90.cu: the producer that fetches, the consumers that multiply.
#pragma once

#include "kernel_hub/linear_sm90_tiles.cuh"
#include "kernel_hub/sm90.cuh"
#include "kernel_hub/wgmma.cuh"

namespace kernel_hub {

template <typename C>
__device__ __forceinline__ void produce(const CUtensorMap* row_map, const CUtensorMap* column_map,
                                        const Raster& raster, uint32_t ring_base, uint32_t full,
                                        uint32_t empty, uint32_t rank, int first_step,
                                        int last_step) {
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

// acc = the product of this consumer's rows over `num_steps` steps of k.
template <typename T, typename C>
__device__ __forceinline__ void multiply(float (&acc)[C::kParts][C::kSums], Ring<C::kStages>& ring,
                                         uint32_t rows, uint32_t columns, uint32_t full,
                                         uint32_t empty, uint32_t rank, int thread, int num_steps,
                                         int& steps_to_signal, int next_turn) {
    uint32_t previous = 0;
#pragma unroll 1
    for (int step = 0; step < num_steps; ++step) {
        mbarrier_wait(full + 8 * ring.stage, ring.parity);
        const uint32_t offset = ring.stage * (C::kStageBytes >> 4);
#pragma unroll
        for (int part = 0; part < C::kParts; ++part) {
            hold_registers(acc[part]);
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBlockK / 16; ++i) {
#pragma unroll
            for (int part = 0; part < C::kParts; ++part) {
                const int row_bytes = 32 * i + part / C::kPieces * 64 * kRowBytes;
                const int column_bytes = 32 * i + part % C::kPieces * C::kPieceN * kRowBytes;
                Wgmma<T>::ss(acc[part], descriptor(rows + offset, row_bytes),
                             descriptor(columns + offset, column_bytes), step != 0 || i != 0);
            }
        }
        wgmma_commit();
        if (step != 0) {
            wgmma_wait<1>();
            release<C>(empty, previous, rank, thread);
        }
        if constexpr (C::kSkew > 0) {
            if (--steps_to_signal == 0) {
                named_barrier_arrive(1, 256);
            }
        }
        previous = ring.stage;
        ring.next();
    }
    if (C::kTakesTurns && next_turn) {
        named_barrier_arrive(next_turn, 256);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
        hold_registers(acc[part]);
    }
    release<C>(empty, previous, rank, thread);
}

}  // namespace kernel_hub
