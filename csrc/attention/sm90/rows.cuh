// flash_attention_sm90.cu: what a consumer does with rows that are complete: sums, lse, output.
#pragma once

#include "attention/sm90/scores.cuh"
#include "kernel_hub/math.cuh"

namespace kernel_hub::attention::sm90 {

template <class C>
struct Rows : Scores<C> {
    using T = typename C::T;
    using Base = Scores<C>;
    using Base::consumer;
    using Base::lane_idx;
    using Base::output;
    using Base::p;
    using Base::row;
    using Base::row_shift;
    using Base::row_sum;
    using Base::shared;
    using Base::token;

    __device__ __forceinline__ Rows(const Parameters& p_, const Shared<C>& shared_, int consumer_)
        : Base(p_, shared_, consumer_) {}

    __device__ __forceinline__ Range read_range(int place) const {
        const Tile tile = shared.read_tile(place);
        const int diagonal =
            tile.is_valid() ? tile.row_begin + (C::kSplit ? 0 : row) + tile.offset() : Range::kOver;
        // Known to be 0 without a left bound: a register less.
        const int block_begin = C::kSplit || C::kMask == Mask::kWindow ? tile.block_begin : 0;
        return {diagonal, tile.seqlen_k, block_begin, tile.block_end};
    }

    __device__ __forceinline__ void release_tile(int place) {
        __syncwarp();
        mbarrier_arrive_if(shared.tile_empty(place), lane_idx == 0);
    }

    // The rows' sums are complete: writes lse; `factor` becomes what the output must be multiplied
    // by.
    __device__ __forceinline__ void finish_rows(int place, float (&factor)[2]) {
        // Before the rest of the tile is read: there are registers for one of them.
        const float sink = C::kSplit ? 0.f : load_sink(p, shared.read_head(place));
        const Tile tile = shared.read_tile(place);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum = row_sum[r];
            sum += __shfl_xor_sync(kAllLanes, sum, 1);
            sum += __shfl_xor_sync(kAllLanes, sum, 2);
            if constexpr (C::kSplit) {
                finish_packed_row(tile, r, sum, factor);
            } else {
                factor[r] = add_sink(sink, row_shift[r], sum);
                const int row_idx = tile.row_begin + row + 8 * r;
                if (p.lse && row_idx < tile.seqlen_q && lane_idx % 4 == 0) {
                    p.lse[tile.batch * p.lse_batch_stride + tile.head * p.lse_head_stride +
                          tile.q_begin + row_idx] = row_shift[r] * kLn2 + __logf(sum);
                }
            }
        }
    }

    // Split: where the thread's row r of a whole tile lies, and whether there is such a row.
    __device__ __forceinline__ bool find_packed(const Tile& tile, int r, int& token_idx,
                                                int& head) const {
        token_idx = tile.row_begin + token[r];
        const int last = p.num_heads - 1;
        head = (tile.head & 0xffff) + row + 8 * r - token[r] * p.packing.heads;
        const bool is_head = head <= last;
        head = min(head, last);
        return is_head && token[r] < p.packing.tokens && token_idx < tile.seqlen_q;
    }

    // Split: lse of a whole tile's row; of a piece what its merge needs of the row.
    __device__ __forceinline__ void finish_packed_row(const Tile& tile, int r, float sum,
                                                      float (&factor)[2]) {
        const int slot = (tile.head >> 16) - 1;
        if (slot >= 0) {
            factor[r] = 1.f;
            if (lane_idx % 4 == 0) {
                pieces().states(slot)[row + 8 * r] = make_float2(row_shift[r], sum);
            }
            return;
        }
        int token_idx, head;
        const bool is_inside = find_packed(tile, r, token_idx, head);
        factor[r] = add_sink(load_sink(p, head), row_shift[r], sum);
        if (is_inside && p.lse && lane_idx % 4 == 0) {
            p.lse[tile.batch * p.lse_batch_stride + head * p.lse_head_stride + tile.q_begin +
                  token_idx] = row_shift[r] * kLn2 + __logf(sum);
        }
    }

    __device__ __forceinline__ Pieces pieces() const {
        return {p.packing.partials, C::kBlockM, C::kHeadDimV};
    }

    // Split: a piece's sums.
    __device__ __forceinline__ void store_piece(const Tile& tile, int slot) const {
        // Warps whose rows are none have nothing that anyone reads.
        if (tile.row_begin + p.packing.token_of(row - lane_idx / 4) >= tile.seqlen_q) {
            return;
        }
        float4* sums = pieces().sums(slot, row / 16, lane_idx);
#pragma unroll
        for (int i = 0; i < C::kHeadDimV / 8; ++i) {
            sums[32 * i] =
                make_float4(output[4 * i], output[4 * i + 1], output[4 * i + 2], output[4 * i + 3]);
        }
    }

    // Writes the tile's output.
    __device__ __forceinline__ void store(int place, const float (&factor)[2]) {
        const Tile tile = shared.read_tile(place);  // again: it would take registers until here
        release_tile(place);
        if constexpr (C::kSplit) {
            const int slot = (tile.head >> 16) - 1;
            if (slot >= 0) {
                store_piece(tile, slot);
                return;
            }
        }
        const int first_column = 8 * (lane_idx % 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int row_idx = tile.row_begin + row + 8 * r, head = tile.head;
            bool is_inside = row_idx < tile.seqlen_q;
            if constexpr (C::kSplit) {
                is_inside = find_packed(tile, r, row_idx, head);
            }
            T* out = static_cast<T*>(p.out) + tile.batch * p.out_batch_stride +
                     (tile.q_begin + row_idx) * p.out_token_stride + head * p.out_head_stride;
#pragma unroll
            for (int i = 0; i < (C::kHeadDimV + 31) / 32; ++i) {
                uint32_t words[4] = {};
#pragma unroll
                for (int j = 0; j < min(4, C::kHeadDimV / 8 - 4 * i); ++j) {
                    const int column = 4 * (4 * i + j) + 2 * r;
                    words[j] = pack2<T>(output[column] * factor[r], output[column + 1] * factor[r]);
                }
                transpose_in_quad(words, lane_idx);
                if (is_inside && 32 * i + first_column < p.head_dim_v) {
                    *reinterpret_cast<uint4*>(out + 32 * i + first_column) =
                        make_uint4(words[0], words[1], words[2], words[3]);
                }
            }
        }
    }
};

}  // namespace kernel_hub::attention::sm90
