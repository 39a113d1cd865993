// flash_attention_fp8_sm90.cu: warpgroup 0: one thread loads, three warps transpose V and write the
// tiles without keys.
#pragma once

#include "attention/fp8/plan.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"

namespace kernel_hub::attention::fp8 {
template <class C>
struct Loader {
    const Parameters& p;
    const Shared<C>& shared;
    uint32_t q_parity = 0;
    Place<C::kStages> k, v;
    Place<kTileSlots> slot;

    __device__ __forceinline__ void publish(const Tile& tile) {
        const uint32_t address = shared.tiles + slot.stage * sizeof(Tile);
        mbarrier_wait(shared.tile_empty(slot.stage), slot.parity ^ 1);
        st_shared_16(address, make_uint4(tile.row_begin, tile.head, tile.batch, tile.q_begin));
        st_shared_16(address + 16,
                     make_uint4(tile.seqlen_q, tile.seqlen_k, tile.block_begin, tile.block_end));
        st_shared_16(
            address + 32,
            make_uint4(__float_as_uint(tile.score_scale[0]), __float_as_uint(tile.score_scale[1]),
                       __float_as_uint(tile.score_scale[2]), __float_as_uint(tile.value_scale)));
        mbarrier_arrive(shared.tile_full(slot.stage));
        slot.advance();
    }

    __device__ __forceinline__ static float read(const float* scale, int64_t offset) {
        return scale ? __ldg(scale + offset) : 1.f;
    }

    __device__ __forceinline__ BlockScales read_block_scales(const Tile& tile, int kv_head,
                                                             int block) const {
        // There are as many scales as the longest sequence wants.
        block = min(block * C::kBlockN, max(p.seqlen_k - 1, 0)) / kScaleTokens;
        const int64_t k_offset = tile.batch * p.k_scale_batch_stride +
                                 kv_head * p.k_scale_head_stride + block * p.k_scale_block_stride;
        const int64_t v_offset = tile.batch * p.v_scale_batch_stride +
                                 kv_head * p.v_scale_head_stride + block * p.v_scale_block_stride;
        return {read(p.k_scale, k_offset), read(p.v_scale, v_offset)};
    }

    __device__ __forceinline__ void read_scales(Tile& tile, int kv_head) const {
        BlockScales scales = {1.f, 1.f};
        if constexpr (C::kScales == Scales::kHeads) {
            scales = read_block_scales(tile, kv_head, 0);
        }
        tile.value_scale = scales.v;
        const float scale = p.softmax_scale * kLog2e * scales.k;
        const int64_t offset = tile.batch * p.q_scale_batch_stride +
                               tile.head / p.heads_per_q_scale * p.q_scale_head_stride;
        const int last_row = min(tile.seqlen_q, p.seqlen_q) - 1;
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            const int row =
                min(tile.row_begin + pack_tokens<C>(p) * min(i, C::kConsumers - 1), last_row);
            tile.score_scale[i] =
                scale * read(p.q_scale, offset + row / kScaleTokens * p.q_scale_block_stride);
        }
    }

    __device__ __forceinline__ void load_q(int row, int head, int batch) {
#pragma unroll 1
        for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
            const uint32_t full = shared.q_full(consumer);
            mbarrier_wait(shared.q_empty(consumer), q_parity ^ 1);
            mbarrier_arrive_expect_tx(
                full, C::kPanels * C::kPanelColumns * pack_heads<C>(p) * pack_tokens<C>(p));
#pragma unroll
            for (int panel = 0; panel < C::kPanels; ++panel) {
                tma_load_4d(shared.q + consumer * C::kQBytes + panel * C::kQPanelBytes, p.q, full,
                            panel * C::kPanelColumns, head, row + consumer * pack_tokens<C>(p),
                            batch);
            }
        }
        q_parity ^= 1;
    }

    __device__ __forceinline__ void load_k(int row, int head, int batch,
                                           const BlockScales& scales) {
        const uint32_t full = shared.k_full(k.stage);
        mbarrier_wait(shared.k_empty(k.stage), k.parity ^ 1);
        if constexpr (C::kScales == Scales::kBlocks) {
            asm volatile(
                "st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared.block_scales + 8 * k.stage),
                "f"(scales.k), "f"(scales.v)
                : "memory");
        }
        mbarrier_arrive_expect_tx(full, C::kKVBytes);
#pragma unroll
        for (int panel = 0; panel < C::kPanels; ++panel) {
            tma_load_4d(shared.k + k.stage * C::kKVBytes + panel * C::kKVPanelBytes, p.k, full,
                        panel * C::kPanelColumns, row, head, batch);
        }
        k.advance();
    }

    __device__ __forceinline__ void load_v(int row, int head, int batch) {
        const uint32_t full = shared.v_full(v.stage);
        mbarrier_wait(shared.v_empty(v.stage), v.parity ^ 1);
        mbarrier_arrive_expect_tx(full, C::kKVBytes);
#pragma unroll
        for (int panel = 0; panel < C::kPanels; ++panel) {
            tma_load_4d(shared.v + v.stage * C::kKVBytes + panel * C::kKVPanelBytes, p.v, full,
                        panel * C::kPanelColumns, row, head, batch);
        }
        v.advance();
    }

    // Whether the next tile is asked for before a tile, not a few blocks before its end.
    // NOTE: who is busy for long would hold a tile that another could begin; where a tile has no
    // more blocks than this, the answer would be waited for.
    static constexpr int kBlocksAhead = 4;
    __device__ __forceinline__ bool asks_first() const {
        return p.seqlen_k <= kBlocksAhead * C::kBlockN;
    }

    __device__ __forceinline__ void run() {
        const int num_tiles = p.tiles_a_pack * p.batch_size * p.num_packs;
        // The next tile is asked for ahead, as the answer takes a while.
        for (int index = blockIdx.x, ticket = 0; index < num_tiles; index = gridDim.x + ticket) {
            if (asks_first()) {
                ticket = atomicAdd(p.tile_counter, 1);
            }
            Tile tile = locate<C>(p, index);
            if (tile.row_begin >= tile.seqlen_q || tile.is_empty()) {
                if (!asks_first()) {
                    ticket = atomicAdd(p.tile_counter, 1);
                }
                continue;
            }
            const int kv_begin = p.cu_seqlens_k ? p.cu_seqlens_k[tile.batch] : 0;
            const int kv_batch = p.cu_seqlens_k ? 0 : tile.batch;
            const int kv_head = tile.head / p.heads_per_kv;
            read_scales(tile, kv_head);
            const int last = tile.block_end - 1;
            int row = kv_begin + last * C::kBlockN;
            BlockScales ahead = {1.f, 1.f};
            if constexpr (C::kScales == Scales::kBlocks) {
                ahead = read_block_scales(tile, kv_head, last);
            }
            // NOTE: the first block is apart, so that the loop holds nothing of the tile but where
            // its keys lie: with three consumers a loader has 32 registers.
            load_k(row, kv_head, kv_batch, ahead);
            publish(tile);
            load_q(tile.q_begin + tile.row_begin, tile.head, p.cu_seqlens_q ? 0 : tile.batch);
            if constexpr (C::kScales == Scales::kBlocks) {
                ahead = read_block_scales(tile, kv_head, max(last - 1, 0));
            }
            load_v(row, kv_head, kv_batch);
            if (!asks_first() && last < kBlocksAhead) {
                ticket = atomicAdd(p.tile_counter, 1);
            }
#pragma unroll 1
            for (int block = last - 1; block >= 0; --block) {
                if (!asks_first() && block == kBlocksAhead - 1) {
                    ticket = atomicAdd(p.tile_counter, 1);
                }
                row -= C::kBlockN;
                const BlockScales scales = ahead;
                if constexpr (C::kScales == Scales::kBlocks) {
                    ahead = read_block_scales(tile, kv_head, max(block - 1, 0));
                }
                load_k(row, kv_head, kv_batch, scales);
                load_v(row, kv_head, kv_batch);
            }
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

// V as the product wants it: rows of head_dim, keys side by side. A warp turns 32 keys by 16
// columns at a time:
//   ldmatrix.trans of 16-bit pairs: lane 4 c + t gets the 2 x 2 bytes of keys 2 t, 2 t + 1 and
//   columns 2 c, 2 c + 1; with those of keys 8 + 2 t, 9 + 2 t one byte permutation gives four keys
//   of column 2 c, another four keys of column 2 c + 1; stmatrix writes them.
// So the keys of each 16 lie in the order {2 t, 2 t + 1, 8 + 2 t, 9 + 2 t}, t = 0..3, in which the
// scores' accumulators hold them: P becomes a fragment without shuffles. Of each 16 columns the
// even ones come first, then the odd ones: the eight rows that stmatrix writes at once lie in
// different banks, and a thread's outputs are four columns in a row.
template <class C>
struct Transposer {
    const Parameters& p;
    const Shared<C>& shared;
    const int warp, lane_idx;  // warp 0 to kTransposers - 1
    Place<C::kStages> v, vt;
    Place<kTileSlots> slot;

    static constexpr int kColumns = C::kHeadDim % 64 == 0 ? 64 : 32;  // of a warp's turn
    static constexpr int kTurns = C::kBlockN / 32 * (C::kHeadDim / kColumns);

    // Of this lane's row, of rows of 128 or 64 bytes.
    __device__ __forceinline__ uint32_t swizzle_of(int row_bytes) const {
        return (row_bytes == 128 ? lane_idx % 8 : lane_idx / 2 % 4) * 16;
    }

    __device__ __forceinline__ void transpose() const {
        constexpr int kSteps = C::kPanelKeys / 32;
        const uint32_t swizzle = swizzle_of(C::kPanelKeys);
        const uint32_t source = shared.v + v.stage * C::kKVBytes + lane_idx * C::kPanelColumns +
                                swizzle_of(C::kPanelColumns);
        const uint32_t target = shared.vt + vt.stage * C::kVtBytes + lane_idx % 16 * C::kPanelKeys;
        const uint32_t upper_keys = lane_idx / 16 * 16;
#pragma unroll 1
        for (int turn = warp; turn < kTurns; turn += kTransposers) {
            const int keys = turn / (C::kHeadDim / kColumns);  // 32 of them
            const int column = turn % (C::kHeadDim / kColumns) * kColumns;
            const uint32_t from = (source + column / C::kPanelColumns * C::kKVPanelBytes +
                                   keys * 32 * C::kPanelColumns) ^
                                  (column % C::kPanelColumns);
            const uint32_t to = target + keys / kSteps * C::kVtPanelBytes + column * C::kPanelKeys +
                                ((keys % kSteps * 32 + upper_keys) ^ swizzle);
            uint32_t tiles[kColumns / 16][4];
#pragma unroll
            for (int i = 0; i < kColumns / 16; ++i) {
                ldmatrix_x4_trans(tiles[i], from ^ (16 * i));
            }
#pragma unroll
            for (int i = 0; i < kColumns / 16; ++i) {
                const uint32_t (&w)[4] = tiles[i];
                stmatrix_x4(to + i * 16 * C::kPanelKeys, __byte_perm(w[0], w[1], 0x6420),
                            __byte_perm(w[0], w[1], 0x7531), __byte_perm(w[2], w[3], 0x6420),
                            __byte_perm(w[2], w[3], 0x7531));
            }
        }
    }

    // Zeros what the block holds beyond the sequence: 0 times a nan there is a nan.
    __device__ __forceinline__ void clear_foreign_rows(int rows) const {
        constexpr int kVecs = C::kPanelColumns / 16;  // of a row
        const uint32_t base = shared.v + v.stage * C::kKVBytes;
#pragma unroll 1
        for (int i = kVecs * rows + 32 * warp + lane_idx; i < kVecs * C::kBlockN;
             i += 32 * kTransposers) {
#pragma unroll
            for (int panel = 0; panel < C::kPanels; ++panel) {
                st_shared_16(base + panel * C::kKVPanelBytes + 16 * i, make_uint4(0, 0, 0, 0));
            }
        }
        // The copy engine writes here again.
        fence_proxy_async();
        named_barrier_sync(1 + C::kConsumers, 32 * kTransposers);
    }

    __device__ __forceinline__ void run() {
        while (true) {
            mbarrier_wait(shared.tile_full(slot.stage), slot.parity);
            const uint32_t address = shared.tiles + slot.stage * sizeof(Tile);
            const bool is_valid = static_cast<int>(ld_shared_16(address).x) >= 0;
            const uint4 lengths = ld_shared_16(address + 16);
            __syncwarp();
            mbarrier_arrive_if(shared.tile_empty(slot.stage), lane_idx == 0);
            slot.advance();
            if (!is_valid) {
                return;
            }
            const int seqlen_k = lengths.y, block_begin = lengths.z, block_end = lengths.w;
#pragma unroll 1
            for (int block = block_end - 1; block >= block_begin; --block) {
                mbarrier_wait(shared.v_full(v.stage), v.parity);
                const int rows = seqlen_k - block * C::kBlockN;
                if (p.has_foreign_rows && rows < C::kBlockN) {
                    clear_foreign_rows(rows);
                }
                mbarrier_wait(shared.vt_empty(vt.stage), vt.parity ^ 1);
                transpose();
                fence_proxy_async();
                __syncwarp();
                mbarrier_arrive_if(shared.vt_full(vt.stage), lane_idx == 0);
                mbarrier_arrive_if(shared.v_empty(v.stage), lane_idx == 0);
                v.advance();
                vt.advance();
            }
        }
    }
};

// Writes the tiles that see no keys, in fixed turn; says which tables led outside.
template <class C>
__device__ __forceinline__ void write_empty_tiles(const Parameters& p, int thread_idx) {
    const int tokens = C::kConsumers * pack_tokens<C>(p);
    const int num_tiles = p.tiles_a_pack * p.batch_size * p.num_packs;
#pragma unroll 1
    for (int index = blockIdx.x; index < num_tiles; index += gridDim.x) {
        const Tile tile = locate<C>(p, index);
        if (tile.head == 0 && tile.row_begin == 0) {
            report_lengths(p, tile.batch);
        }
        const int rows = min(tokens, tile.seqlen_q - tile.row_begin);
        if (rows <= 0 || !tile.is_empty()) {
            continue;
        }
        const int64_t token = tile.q_begin + tile.row_begin;
        const int vecs = p.head_dim / 8;
#pragma unroll 1
        for (int head = tile.head; head < tile.head + pack_heads<C>(p); ++head) {
            char* out = static_cast<char*>(p.out) +
                        2 * (tile.batch * p.out_batch_stride + token * p.out_token_stride +
                             head * p.out_head_stride);
#pragma unroll 1
            for (int i = thread_idx; i < rows * vecs; i += 32 * kTransposers) {
                const int row = i / vecs;
                *reinterpret_cast<uint4*>(out + 2 * row * p.out_token_stride +
                                          16 * (i - row * vecs)) = make_uint4(0, 0, 0, 0);
            }
            if (p.lse) {
                float* lse = p.lse + tile.batch * p.lse_batch_stride + head * p.lse_head_stride;
#pragma unroll 1
                for (int i = thread_idx; i < rows; i += 32 * kTransposers) {
                    lse[token + i] = -INFINITY;
                }
            }
        }
    }
}

}  // namespace kernel_hub::attention::fp8
