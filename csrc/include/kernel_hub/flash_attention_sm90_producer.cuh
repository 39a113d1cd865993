// flash_attention_sm90.cu: the warpgroup that loads (one thread) and writes tiles without keys
// (three warps).
#pragma once

#include "kernel_hub/flash_attention_sm90_plan.cuh"

namespace kernel_hub {

template <class C>
struct Producer {
    const Parameters& p;
    const Shared<C>& shared;
    Place<C::kQStages> q;
    Place<C::kStages> k, v;
    Place<kTileSlots> slot;

    __device__ __forceinline__ void publish(const Tile& tile) {
        mbarrier_wait(shared.tile_empty(slot.stage), slot.parity ^ 1);
        int4* words = reinterpret_cast<int4*>(shared.tiles + slot.stage);
        words[0] = make_int4(tile.row_begin, tile.head, tile.batch, tile.q_begin);
        words[1] = make_int4(tile.seqlen_q, tile.seqlen_k, tile.block_begin, tile.block_end);
        mbarrier_arrive(shared.tile_full(slot.stage));
        slot.advance();
    }

    __device__ __forceinline__ void load_q(int row, int head, int batch) {
#pragma unroll 1
        for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
            const uint32_t full = shared.q_full(q.stage, consumer);
            mbarrier_wait(shared.q_empty(q.stage, consumer), q.parity ^ 1);
            mbarrier_arrive_expect_tx(full, C::kQBytes);
#pragma unroll
            for (int panel = 0; panel < C::kPanels; ++panel) {
                tma_load_4d(shared.q_tile(q.stage, consumer) + panel * C::kQPanelBytes, p.q, full,
                            panel * kPanelColumns, row + 64 * consumer, head, batch);
            }
        }
        q.advance();
    }

    __device__ __forceinline__ void load_kv(Place<C::kStages>& place, const CUtensorMap* map,
                                            uint32_t tiles, uint32_t full, uint32_t empty, int row,
                                            int head, int batch) {
        mbarrier_wait(empty, place.parity ^ 1);
        mbarrier_arrive_expect_tx(full, C::kKVBytes);
#pragma unroll
        for (int panel = 0; panel < C::kPanels; ++panel) {
            tma_load_4d(tiles + place.stage * C::kKVBytes + panel * C::kKVPanelBytes, map, full,
                        panel * kPanelColumns, row, head, batch);
        }
        place.advance();
    }

    __device__ __forceinline__ void load_k(int row, int head, int batch) {
        load_kv(k, p.k, shared.k, shared.k_full(k.stage), shared.k_empty(k.stage), row, head,
                batch);
    }

    __device__ __forceinline__ void load_v(int row, int head, int batch) {
        load_kv(v, p.v, shared.v, shared.v_full(v.stage), shared.v_empty(v.stage), row, head,
                batch);
    }

    // Loads in the order the consumers need them: K of a block, then V of the block before it, also
    // when that one belongs to the tile before.
    __device__ __forceinline__ void run() {
        const int num_rows = (p.seqlen_q + C::kBlockM - 1) / C::kBlockM;
        const int num_tiles = num_rows * p.batch_size * p.num_heads;
        int last_row = -1, last_head = 0, last_batch = 0;  // the V that is still to be loaded
        int index = blockIdx.x;
        while (index < num_tiles) {
            // Asked for ahead: the answer takes a while.
            const int following = gridDim.x + atomicAdd(p.tile_counter, 1);
            const Tile tile = locate<C>(p, index);
            index = following;
            if (tile.row_begin >= tile.seqlen_q || tile.is_empty()) {
                continue;
            }
            const int q_batch = p.cu_seqlens_q ? 0 : tile.batch;
            const int q_row = tile.q_begin + tile.row_begin;
#pragma unroll 1
            for (int panel = 0; panel < C::kPanels; ++panel) {
#pragma unroll 1
                for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
                    tma_prefetch_4d(p.q, panel * kPanelColumns, q_row + 64 * consumer, tile.head,
                                    q_batch);
                }
            }
            publish(tile);
            const int kv_begin = p.cu_seqlens_k ? p.cu_seqlens_k[tile.batch] : 0;
            const int kv_batch = p.cu_seqlens_k ? 0 : tile.batch;
            const int kv_head = tile.head / (p.num_heads / p.num_kv_heads);
            for (int block = tile.block_end - 1; block >= tile.block_begin; --block) {
                const int row = kv_begin + block * C::kBlockN;
                load_k(row, kv_head, kv_batch);
                if (last_row >= 0) {
                    load_v(last_row, last_head, last_batch);
                }
                if (block == tile.block_end - 1) {
                    load_q(q_row, tile.head, q_batch);
                }
                last_row = row, last_head = kv_head, last_batch = kv_batch;
            }
        }
        if (last_row >= 0) {
            load_v(last_row, last_head, last_batch);
        }
        Tile none = {};
        none.row_begin = -1;
        publish(none);
        // The last block to come here leaves the counter as it found it.
        __threadfence();
        const unsigned last = gridDim.x - 1;
        if (atomicInc(reinterpret_cast<unsigned*>(p.tile_counter + 1), last) == last) {
            atomicExch(p.tile_counter, 0);
        }
    }
};

// Writes the tiles that see no keys, in fixed turn: the warps beside the producer's.
// NOTE: they must not take places in the ring: a consumer holds the place of its tile until it has
// found the next one with keys, and four without any in between would close the ring.
template <class C>
__device__ __forceinline__ void write_empty_tiles(const Parameters& p) {
    constexpr int kThreads = 96;
    const int thread_idx = threadIdx.x - 32;
    const int num_rows = (p.seqlen_q + C::kBlockM - 1) / C::kBlockM;
    const int num_tiles = num_rows * p.batch_size * p.num_heads;
#pragma unroll 1
    for (int index = blockIdx.x; index < num_tiles; index += gridDim.x) {
        const Tile tile = locate<C>(p, index);
        const int rows = min(C::kBlockM, tile.seqlen_q - tile.row_begin);
        if (rows <= 0 || !tile.is_empty()) {
            continue;
        }
        const int64_t token = tile.q_begin + tile.row_begin;
        char* out = static_cast<char*>(p.out) +
                    2 * (tile.batch * p.out_batch_stride + token * p.out_token_stride +
                         tile.head * p.out_head_stride);
        const int vecs = p.head_dim / 8;
#pragma unroll 1
        for (int i = thread_idx; i < rows * vecs; i += kThreads) {
            const int row = i / vecs;
            *reinterpret_cast<uint4*>(out + 2 * row * p.out_token_stride + 16 * (i - row * vecs)) =
                make_uint4(0, 0, 0, 0);
        }
        if (p.lse) {
            float* lse = p.lse + tile.batch * p.lse_batch_stride + tile.head * p.lse_head_stride;
#pragma unroll 1
            for (int i = thread_idx; i < rows; i += kThreads) {
                lse[token + i] = -INFINITY;
            }
        }
    }
}

}  // namespace kernel_hub
