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
    int num_rounds, is_interleaved, is_table32, is_weight32, is_e4m3;
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

// Where the token is, or nowhere; is_live: whether anything of it is to be written.
template <typename Args, typename Heads>
__device__ __forceinline__ Place find_token(const Args& args, const Heads& heads, bool& is_live,
                                            bool& is_known) {
    Place place;
    place.is_inside = place.is_stored = place.is_odd = false;
    place.page = place.row = 0;
    place.position = 0;
    if (is_live) {
        place =
            find_place(args.routing, heads.token_idx, heads.batch_idx, heads.index, heads.is_query);
        is_live = place.is_inside;
        if (args.cos != nullptr) {
            // A position outside the table must not read past it; it shows as nan.
            is_known = place.position >= 0 && place.position < args.max_position;
        }
    }
    return place;
}

// At the end, where no load waits for the tables.
template <typename Args, typename Heads>
__device__ __forceinline__ void report_token(const Args& args, const Heads& heads,
                                             const Place& place, bool is_live, bool is_known) {
    const bool is_missing = is_live && !heads.is_query && !place.is_stored;
    const bool is_unknown = is_live && !is_known;
    if (place.is_odd || is_missing || is_unknown) {
        const int missing = is_missing ? find_missing(args.routing, heads.token_idx, place.row) : 0;
        report(args.routing.flag, missing | (place.is_odd ? kTokensOutside : 0) |
                                      (is_unknown ? kPositionsOutside : 0));
    }
}

}  // namespace kernel_hub::kv_cache
