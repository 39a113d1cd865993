// Rows of heads as an append reads and writes them.
#pragma once

#include <stdint.h>

#include "kernel_hub/kv_place.cuh"

namespace kernel_hub::kv_cache {

// Rows of q, k or v: (batch, seqlen, heads, head_dim); of a cache: (pages, page_size, heads,
// head_dim). Strides in elements.
template <typename Pointer>
struct Rows {
    Pointer data;
    int64_t outer_stride, row_stride, head_stride;

    __device__ __forceinline__ Pointer at(int64_t outer, int64_t row) const {
        return data + outer * outer_stride + row * row_stride;
    }
};

// Bytes or 16-bit or 32-bit elements of a cache: strides count elements.
struct CacheRows {
    void* data;
    int64_t page_stride, row_stride, head_stride;
};

// What an append is given.
template <typename T>
struct AppendArgs {
    Rows<T*> out_q, out_k;
    CacheRows k_cache, v_cache;
    Rows<const T*> q, k, v;
    const void* cos;  // (max_position, rotary_dim / 2), fp32 or T; null: rotary_dim is 0
    const void* sin;
    const float* k_scale;       // (num_kv_heads,), or null
    const float* v_scale;       // same
    const void* q_norm_weight;  // (head_dim,), fp32 or T; null: not normed
    const void* k_norm_weight;  // same
    Routing routing;
    int64_t table_stride;
    int num_tokens, seqlen, num_heads, num_kv_heads, head_dim, rotary_dim, max_position, q_threads;
    int num_rounds;  // of vectors: the heads of a lane at a time
    int is_interleaved, is_table32, is_weight32, is_e4m3;
    float eps, weight_offset;
};

// What appends are told of their rows and of where these go, as parameters of a kernel.
// clang-format off: it would give each of them a line.
#define APPEND_LAYOUT                                                                              \
    int64_t out_q_batch_stride, int64_t out_q_token_stride, int64_t out_q_head_stride,             \
    int64_t out_k_batch_stride, int64_t out_k_token_stride, int64_t out_k_head_stride,             \
    int64_t k_cache_page_stride, int64_t k_cache_row_stride, int64_t k_cache_head_stride,          \
    int64_t v_cache_page_stride, int64_t v_cache_row_stride, int64_t v_cache_head_stride,          \
    int64_t q_batch_stride, int64_t q_token_stride, int64_t q_head_stride, int64_t k_batch_stride, \
    int64_t k_token_stride, int64_t k_head_stride, int64_t v_batch_stride, int64_t v_token_stride, \
    int64_t v_head_stride, int64_t table_stride, int64_t block_table_stride, int num_tokens,       \
    int seqlen, int batch_size, int num_heads, int num_kv_heads, int head_dim, int rotary_dim,     \
    int max_position, int num_pages, int page_size, int max_pages, int positions_bytes,            \
    int slot_bytes, int q_threads
// clang-format on

// Turns a pair by an angle. The products that are fused are named: the same bits in every kernel.
__device__ __forceinline__ void turn(float& a, float& b, float c, float s) {
    const float turned = fmaf(a, c, -__fmul_rn(b, s));
    b = fmaf(b, c, __fmul_rn(a, s));
    a = turned;
}

// The token of a thread, its sequence where all are of one length, and which of that one it is.
struct TokenOfThread {
    int token_idx, batch_idx, index;

    template <typename Args>
    __device__ __forceinline__ explicit TokenOfThread(const Args& args) {
        token_idx = blockIdx.x * blockDim.z + threadIdx.z;
        batch_idx = static_cast<uint32_t>(token_idx) / static_cast<uint32_t>(args.seqlen);
        index = token_idx - batch_idx * args.seqlen;
    }
};

// That and the heads of a thread: a and b are query heads `half_heads` apart, or a key and a value.
struct HeadsOfThread : TokenOfThread {
    bool is_query;
    int half_heads, num_units, first_unit, unit_step;

    template <typename Args>
    __device__ __forceinline__ explicit HeadsOfThread(const Args& args) : TokenOfThread(args) {
        is_query = static_cast<int>(threadIdx.y) < args.q_threads;
        half_heads = (args.num_heads + 1) / 2;
        num_units = is_query ? half_heads : args.num_kv_heads;
        first_unit = threadIdx.y - (is_query ? 0 : args.q_threads);
        unit_step = is_query ? args.q_threads : blockDim.y - args.q_threads;
    }
    template <typename Args>
    __device__ __forceinline__ bool has_b(const Args& args, int unit) const {
        return !is_query || unit + half_heads < args.num_heads;
    }
};

// Where a token is, as `find_place` says, in two halves: what waits for its position need not wait
// for its page. NOTE: what is read is waited for before the next branch, or it is waited for with
// all loads that are under way.
struct TokenPlace : Place {
    int token_idx, batch_idx, index;
    int64_t in_sequence;

    // Its sequence and its position, or nowhere; is_live: whether anything of it is to be written.
    template <typename Args>
    __device__ __forceinline__ TokenPlace(const Args& args, const TokenOfThread& token,
                                          bool& is_live, bool& is_known) {
        is_inside = is_stored = is_odd = false;
        page = row = 0;
        position = in_sequence = 0;
        token_idx = token.token_idx, batch_idx = token.batch_idx, index = token.index;
        if (!is_live) {
            return;
        }
        find_index(args.routing);
        is_live = is_inside;
        position = in_sequence;
        // What is too large for a position becomes none.
        if (args.routing.positions_bytes == 8) {
            position = read_index(args.routing.positions, token_idx, 8);
            position = position == static_cast<int>(position) ? position : -1;
        } else if (args.routing.positions_bytes != 0) {
            position = read_index(args.routing.positions, token_idx, 4);
        }
        if (args.cos != nullptr) {
            // A position outside the table must not read past it; it shows as nan.
            is_known = position >= 0 && position < args.max_position;
        }
    }
    // Where its key and value go.
    __device__ __forceinline__ void find_row(const Routing& to) {
        const uint32_t page_size = to.page_size;
        if (to.slot_bytes != 0) {
            const int64_t slot = read_index(to.slot_mapping, token_idx, to.slot_bytes);
            page = static_cast<uint32_t>(slot) / page_size;
            row = static_cast<uint32_t>(slot) % page_size;
            is_stored = slot >= 0 && slot < static_cast<int64_t>(to.num_pages) * to.page_size;
        } else if (to.max_pages >= 0) {
            const uint32_t page_idx = static_cast<uint32_t>(in_sequence) / page_size;
            row = static_cast<uint32_t>(in_sequence) % page_size;
            is_stored =
                in_sequence >= 0 && in_sequence < static_cast<int64_t>(to.max_pages) * to.page_size;
            page = -1;
            if (!is_stored) {
                row = -1;
            } else {
                page = __ldg(to.block_table + batch_idx * to.block_table_stride + page_idx);
                is_stored = is_index(page, to.num_pages);
            }
        } else {
            page = batch_idx;
            row = static_cast<int>(in_sequence);
            is_stored = in_sequence >= 0 && in_sequence < to.page_size;
        }
    }

  private:
    __device__ __forceinline__ void find_index(const Routing& to) {
        is_inside = true;
        if (to.cu_seqlens != nullptr) {
            batch_idx = find_sequence(to.cu_seqlens, to.batch_size, token_idx);
            const int start = __ldg(to.cu_seqlens + batch_idx);
            const int end = __ldg(to.cu_seqlens + batch_idx + 1);
            index = token_idx - start;
            is_inside = token_idx >= start && token_idx < end;
            is_odd = start < 0 || end > to.num_tokens;
        }
        in_sequence = index;
        if (to.cache_seqlens != nullptr) {
            const int length = __ldg(to.cache_seqlens + batch_idx);
            in_sequence += length;
            is_inside = is_inside && length >= 0;
        }
    }
};

// has_row: of a key or value, not of queries alone.
template <typename Args>
__device__ __forceinline__ void report_token(const Args& args, const TokenPlace& place,
                                             bool is_live, bool is_known, bool has_row) {
    const bool is_missing = is_live && has_row && !place.is_stored;
    const bool is_unknown = is_live && !is_known;
    if (place.is_odd || is_missing || is_unknown) {
        const int missing = is_missing ? find_missing(args.routing, place.token_idx, place.row) : 0;
        report(args.routing.flag, missing | (place.is_odd ? kTokensOutside : 0) |
                                      (is_unknown ? kPositionsOutside : 0));
    }
}

}  // namespace kernel_hub::kv_cache
