// Where the main kernel of attention backward leaves its sums.
#pragma once

#include "attention/backward/tiles.cuh"
#include "kernel_hub/ptx.cuh"

namespace kernel_hub::attention::backward {

// Adds a block's part of dq for one block of queries to the sums, in its turn where there are
// turns.
template <typename Tiles>
__device__ __forceinline__ void add_to_sums(
    const float (&dq)[Tiles::kDqRows16][2 * Tiles::kDqCols16][4], float* dq_sums, int* turns,
    int64_t first_tile, int first_query, const Work& work, const Thread<Tiles>& me) {
    int* turn = turns ? turns + first_tile : nullptr;
    if (turn) {
        if (threadIdx.x == 0) {
            // How many blocks of higher keys these queries see.
            const int earlier = min(
                ceil_div(work.window.num_keys, Tiles::kBlockN) - 1,
                floor_div(first_query + Tiles::kBlockM - 1 - work.window.start + work.window.span,
                          Tiles::kBlockN));
            // NOTE: not `!=`: sequences whose cu_seqlens overlap add to one turn, and may pass it.
            while (ld_acquire(turn) < earlier) {
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < Tiles::kDqRows16; ++i) {
        const int tile = i * Tiles::kWarpsDq + me.dq_row16;
        if (first_query + tile * kTileRows < work.seqlen_q) {
            float* sums =
                dq_sums +
                ((first_tile + tile) * (Tiles::kHeadDim / 8) + 2 * me.dq_col16) * kFragment;
#pragma unroll
            for (int j = 0; j < 2 * Tiles::kDqCols16; ++j) {
                float* fragment = sums + (j / 2 * 2 * Tiles::kDqWarpsCols + j % 2) * kFragment;
                const float (&part)[4] = dq[i][j];
                if constexpr (kAddsByFour) {
                    red_add_4(fragment + 4 * me.lane_idx, part[0], part[1], part[2], part[3]);
                } else {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        red_add(fragment + 32 * e + me.lane_idx, part[e]);
                    }
                }
            }
        }
    }
    if (turn) {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            atomicAdd(turn, 1);
        }
    }
}

// Leaves dk and dv, rounded to T, where k and v were in shared memory.
template <typename T, typename Tiles>
__device__ __forceinline__ void store_sums(
    const float (&dk_sums)[Tiles::kDkvRows16][2 * Tiles::kDkvCols16][4],
    const float (&dv_sums)[Tiles::kDkvRows16][2 * Tiles::kDkvCols16][4], float softmax_scale,
    uint32_t shared, const Thread<Tiles>& me) {
    using Rows = typename Tiles::Rows;
#pragma unroll
    for (int i = 0; i < Tiles::kDkvRows16; ++i) {
#pragma unroll
        for (int j = 0; j < 2 * Tiles::kDkvCols16; ++j) {
            const int chunk = 2 * (j / 2 * Tiles::kDkvWarpsCols + me.dkv_col16) + j % 2;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = me.dkv_key + i * 16 + half * 8 + me.lane_idx / 4;
                const uint32_t place = shared + Rows::offset(row, chunk) + me.lane_idx % 4 * 4;
                const float* dk_pair = dk_sums[i][j] + 2 * half;
                const float* dv_pair = dv_sums[i][j] + 2 * half;
                store_shared(place + Tiles::kK,
                             pack2<T>(dk_pair[0] * softmax_scale, dk_pair[1] * softmax_scale));
                store_shared(place + Tiles::kV, pack2<T>(dv_pair[0], dv_pair[1]));
            }
        }
    }
}

}  // namespace kernel_hub::attention::backward
