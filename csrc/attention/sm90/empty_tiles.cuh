// flash_attention_sm90.cu: the tiles that see no keys, which two warps write that load nothing.
#pragma once

#include "attention/sm90/schedule.cuh"

namespace kernel_hub::attention::sm90 {

// Rows of one head in a tile, and tiles of so many of them.
template <class C>
__device__ __forceinline__ int tile_rows(const Parameters& p) {
    return C::kSplit ? p.packing.tokens : C::kBlockM;
}
template <class C>
__device__ __forceinline__ int count_row_blocks(const Parameters& p, int seqlen_q) {
    if constexpr (C::kSplit) {
        return quotient(min(seqlen_q, p.seqlen_q) + p.packing.tokens - 1, p.packing.tokens);
    } else {
        return count_rows<C>(p, seqlen_q);
    }
}

// Row blocks of a sequence that see no keys: the first ones, which end before the first key. Says
// which tables led outside.
template <class C>
__device__ __forceinline__ int count_empty_rows(const Parameters& p, int batch) {
    const RowRange queries = find_queries(p, batch), keys = find_keys(p, batch);
    const int seqlen_q = queries.count, seqlen_k = keys.count;
    const bool is_outside_q = queries.is_outside || seqlen_q > p.seqlen_q;
    const bool is_outside_k = keys.is_outside || seqlen_k > p.seqlen_k;
    report(p.flag, (is_outside_q ? kQueriesOutside : 0) | (!is_outside_k     ? 0
                                                           : p.cache_seqlens ? kLengthsOutside
                                                                             : kKeysOutside));
    if (seqlen_k == 0) {
        return count_row_blocks<C>(p, seqlen_q);
    }
    if (C::kMask == Mask::kFull || p.window_right < 0) {
        return 0;
    }
    const int hidden = max(0, seqlen_q - seqlen_k - p.window_right);
    return hidden >= seqlen_q ? count_row_blocks<C>(p, seqlen_q)
                              : min(hidden, p.seqlen_q) / tile_rows<C>(p);
}

// Writes one of them. A warp.
// NOTE: lse first: the other way round there are registers too few.
template <class C>
__device__ __forceinline__ void write_empty_tile(const Parameters& p, int batch, int head,
                                                 int row_begin) {
    const RowRange queries = find_queries(p, batch);
    const int rows = min(tile_rows<C>(p), queries.count - row_begin);
    const int64_t first = queries.start + row_begin;
    if (p.lse) {
        float* lse = p.lse + batch * p.lse_batch_stride + head * p.lse_head_stride + first;
        const float sink = find_sink(p, batch, head);
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < rows; i += 32) {
            lse[i] = sink;
        }
    }
    char* out =
        static_cast<char*>(p.out) +
        2 * (batch * p.out_batch_stride + first * p.out_token_stride + head * p.out_head_stride);
    const int vecs = p.head_dim_v / 8;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < rows * vecs; i += 32) {
        const int row = i / vecs;
        *reinterpret_cast<uint4*>(out + 2 * row * p.out_token_stride + 16 * (i - row * vecs)) =
            make_uint4(0, 0, 0, 0);
    }
}

// Writes the tiles that see no keys, in fixed turn: the warps that load nothing and deal nothing,
// each with 32 sequences at a time.
// NOTE: they must not take places in the ring: a consumer holds the place of its tile until it has
// found the next one with keys, and four without any in between would close the ring.
template <class C>
__device__ __forceinline__ void write_empty_tiles(const Parameters& p) {
    constexpr int kWarps = C::kSplit ? 1 : 2;
#pragma unroll 1
    for (int first = threadIdx.x / 32 * 32 - 128 + 32 * kWarps; first < p.batch_size;
         first += 32 * kWarps) {
        const int own = first + threadIdx.x % 32;
        const int num_rows = own < p.batch_size ? count_empty_rows<C>(p, own) : 0;
        unsigned left = __ballot_sync(kAllLanes, num_rows > 0);
#pragma unroll 1
        while (left != 0) {
            const int lane = __ffs(left) - 1;
            const int rows = __shfl_sync(kAllLanes, num_rows, lane);
            left &= left - 1;
#pragma unroll 1
            for (int index = blockIdx.x; index < rows * p.num_heads; index += gridDim.x) {
                const int head = index / rows;
                write_empty_tile<C>(p, first + lane, head, (index - head * rows) * tile_rows<C>(p));
            }
        }
    }
}

}  // namespace kernel_hub::attention::sm90
