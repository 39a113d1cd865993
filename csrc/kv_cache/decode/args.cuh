// The parameters of a decode kernel, and a block's segment of its work. Strides in elements.
#pragma once

#include <stdint.h>

#include "kernel_hub/dependent_launch.cuh"
#include "kv_cache/decode/work.cuh"

namespace kernel_hub::kv_cache::decode {

template <typename T, typename Cache>
struct DecodeArgs {
    T* out;                     // (batch_size, seqlen_q, num_heads, head_dim)
    float* lse;                 // (batch_size, num_heads, seqlen_q), or null
    float* partial_out;         // (gridDim.x, kRows, head_dim)
    float* partial_lse;         // (gridDim.x, kRows), base 2
    int* flag;                  // what tables led outside (bounds.cuh), or null
    Cache* k_cache;             // (num_pages or batch_size, page_size, num_kv_heads, head_dim)
    Cache* v_cache;             // same
    const T* q;                 // (batch_size, seqlen_q, num_heads, head_dim)
    const T* k;                 // (batch_size, seqlen_q, num_kv_heads, head_dim), or null
    const T* v;                 // same
    const int* cache_seqlens;   // (batch_size,)
    const int* block_table;     // (batch_size, max_pages), or null: one page a sequence
    const void* cos;            // (max_position, rotary_dim / 2), or null
    const void* sin;            // same
    const T* qkv_bias;          // ((num_heads + 2 num_kv_heads) * head_dim,), or null
    const float* k_scale;       // (num_kv_heads,), or null
    const float* v_scale;       // same
    const float* alibi_slopes;  // (num_heads,) or (batch_size, num_heads), or null
    const void* sinks;          // (num_heads,), or null
    const void* tree_mask;      // (batch_size, seqlen_q), or null: words, the low 32 bits first
    int64_t out_batch_stride, out_token_stride, out_head_stride;
    int64_t q_batch_stride, q_token_stride, q_head_stride;
    int64_t k_batch_stride, k_token_stride, k_head_stride;
    int64_t v_batch_stride, v_token_stride, v_head_stride;
    int64_t k_cache_page_stride, k_cache_token_stride, k_cache_head_stride;
    int64_t v_cache_page_stride, v_cache_token_stride, v_cache_head_stride;
    int64_t block_table_stride, table_stride, alibi_batch_stride;
    int64_t mask_batch_stride, mask_token_stride;  // in words of 32 bits
    int batch_size, seqlen_q, num_heads, num_kv_heads, head_dim, num_pages, page_size, max_tokens;
    int rotary_dim, max_position, table_bytes, is_interleaved, is_vectorised;
    int num_splits, parallel, fine_units, num_sms, window_left, sink_type;  // ElementType
    float softmax_scale, softcap;

    __device__ __forceinline__ int rows() const { return seqlen_q * (num_heads / num_kv_heads); }
    // The new tokens that one sees, a bit each: those of the mask, or all up to its own.
    __device__ __forceinline__ uint32_t seen_by(int batch_idx, int token) const {
        if (tree_mask == nullptr) {
            return (2u << token) - 1;
        }
        const int64_t at = batch_idx * mask_batch_stride + token * mask_token_stride;
        return __ldg(static_cast<const int*>(tree_mask) + at) & ((1u << seqlen_q) - 1);
    }
    // How many of its own sequence lie between it and the first: it is rotated by that.
    __device__ __forceinline__ int depth_of(int batch_idx, int token) const {
        return tree_mask == nullptr ? token : max(__popc(seen_by(batch_idx, token)) - 1, 0);
    }
    template <typename Config>
    __device__ __forceinline__ Work work() const {
        return {cache_seqlens, batch_size,
                seqlen_q,      k == nullptr ? 0 : seqlen_q,
                max_tokens,    Config::kGeneral ? window_left : -1,
                Config::kUnit, num_kv_heads * ((rows() + Config::kRows - 1) / Config::kRows),
                num_splits,    parallel,
                fine_units,    num_sms};
    }
};

// The same as parameters of a kernel, and as they are handed on.
// clang-format off: it would give each of them a line.
#define DECODE_PARAMS(T, CACHE)                                                                    \
    T* out, float* lse, float* partial_out, float* partial_lse, int* flag, CACHE* k_cache,         \
    CACHE* v_cache, const T* q, const T* k, const T* v, const int* cache_seqlens,                  \
    const int* block_table, const void* cos, const void* sin, const T* qkv_bias,                   \
    const float* k_scale, const float* v_scale, const float* alibi_slopes, const void* sinks,      \
    const void* tree_mask, int64_t out_batch_stride, int64_t out_token_stride,                     \
    int64_t out_head_stride, int64_t q_batch_stride, int64_t q_token_stride,                       \
    int64_t q_head_stride, int64_t k_batch_stride, int64_t k_token_stride, int64_t k_head_stride,  \
    int64_t v_batch_stride, int64_t v_token_stride, int64_t v_head_stride,                         \
    int64_t k_cache_page_stride, int64_t k_cache_token_stride, int64_t k_cache_head_stride,        \
    int64_t v_cache_page_stride, int64_t v_cache_token_stride, int64_t v_cache_head_stride,        \
    int64_t block_table_stride, int64_t table_stride, int64_t alibi_batch_stride,                  \
    int64_t mask_batch_stride, int64_t mask_token_stride, int batch_size, int seqlen_q,            \
    int num_heads, int num_kv_heads, int head_dim, int num_pages, int page_size, int max_tokens,   \
    int rotary_dim, int max_position, int table_bytes, int is_interleaved, int is_vectorised,      \
    int num_splits, int parallel, int fine_units, int num_sms, int window_left, int sink_type,     \
    float softmax_scale, float softcap
#define DECODE_ARGUMENTS                                                                           \
    .out = out, .lse = lse, .partial_out = partial_out, .partial_lse = partial_lse, .flag = flag,  \
    .k_cache = k_cache, .v_cache = v_cache, .q = q, .k = k, .v = v,                                \
    .cache_seqlens = cache_seqlens, .block_table = block_table, .cos = cos, .sin = sin,            \
    .qkv_bias = qkv_bias, .k_scale = k_scale, .v_scale = v_scale, .alibi_slopes = alibi_slopes,    \
    .sinks = sinks, .tree_mask = tree_mask, .out_batch_stride = out_batch_stride,                  \
    .out_token_stride = out_token_stride, .out_head_stride = out_head_stride,                      \
    .q_batch_stride = q_batch_stride, .q_token_stride = q_token_stride,                            \
    .q_head_stride = q_head_stride, .k_batch_stride = k_batch_stride,                              \
    .k_token_stride = k_token_stride, .k_head_stride = k_head_stride,                              \
    .v_batch_stride = v_batch_stride, .v_token_stride = v_token_stride,                            \
    .v_head_stride = v_head_stride, .k_cache_page_stride = k_cache_page_stride,                    \
    .k_cache_token_stride = k_cache_token_stride, .k_cache_head_stride = k_cache_head_stride,      \
    .v_cache_page_stride = v_cache_page_stride, .v_cache_token_stride = v_cache_token_stride,      \
    .v_cache_head_stride = v_cache_head_stride, .block_table_stride = block_table_stride,          \
    .table_stride = table_stride, .alibi_batch_stride = alibi_batch_stride,                        \
    .mask_batch_stride = mask_batch_stride, .mask_token_stride = mask_token_stride,                \
    .batch_size = batch_size, .seqlen_q = seqlen_q, .num_heads = num_heads,                        \
    .num_kv_heads = num_kv_heads, .head_dim = head_dim, .num_pages = num_pages,                    \
    .page_size = page_size, .max_tokens = max_tokens, .rotary_dim = rotary_dim,                    \
    .max_position = max_position, .table_bytes = table_bytes, .is_interleaved = is_interleaved,    \
    .is_vectorised = is_vectorised, .num_splits = num_splits, .parallel = parallel,                \
    .fine_units = fine_units, .num_sms = num_sms, .window_left = window_left,                      \
    .sink_type = sink_type, .softmax_scale = softmax_scale, .softcap = softcap
// clang-format on

// Caches of bytes whose scales may be a token's.
template <typename T, typename Cache>
struct ScaledArgs : DecodeArgs<T, Cache> {
    int64_t k_scale_page_stride, k_scale_token_stride, k_scale_head_stride;
    int64_t v_scale_page_stride, v_scale_token_stride, v_scale_head_stride;
    const float* k_scale_cache;  // (num_pages or batch_size, page_size, num_kv_heads), or null
    const float* v_scale_cache;  // same
};

// Behind the others.
#define SCALED_PARAMS                                                                           \
    int64_t k_scale_page_stride, int64_t k_scale_token_stride, int64_t k_scale_head_stride,     \
        int64_t v_scale_page_stride, int64_t v_scale_token_stride, int64_t v_scale_head_stride, \
        const float *k_scale_cache, const float *v_scale_cache
#define SCALED_ARGUMENTS                                                                 \
    k_scale_page_stride, k_scale_token_stride, k_scale_head_stride, v_scale_page_stride, \
        v_scale_token_stride, v_scale_head_stride, k_scale_cache, v_scale_cache

// The block's part of the work, as attend(segment, extent), if it has one.
template <typename Config, typename Args, typename Attend>
__device__ __forceinline__ void for_segment(const Args& args, const Attend& attend) {
    // NOTE: in this order: what may start next reads cache_seqlens before it waits.
    wait_for_launch_before();
    allow_next_launch();
    const Work work = args.template work<Config>();
    const Place place = find_place<false>(work, blockIdx.x);
    if (place.batch_idx < 0) {
        return;
    }
    const int row_blocks = (args.rows() + Config::kRows - 1) / Config::kRows;
    const Extent extent = work.extent_of(place.batch_idx);
    // In a tree a place is no position: the first new token's is known.
    const int last = extent.length - (args.tree_mask == nullptr ? 0 : args.seqlen_q - 1);
    const bool has_no_angle = args.cos != nullptr && last > args.max_position;
    report_if(args.flag, (extent.is_outside || has_no_angle) && threadIdx.x == 0, kLengthsOutside);
    const int count = extent.num_units / place.num_splits;
    const int rest = extent.num_units % place.num_splits;
    Segment segment;
    segment.batch_idx = place.batch_idx;
    segment.kv_head = place.item / row_blocks;
    segment.row_block = place.item % row_blocks;
    segment.first_unit = extent.first_unit + place.split * count + min(place.split, rest);
    segment.num_units = count + (place.split < rest ? 1 : 0);
    segment.is_whole = place.num_splits == 1;
    attend(segment, extent);
}

}  // namespace kernel_hub::kv_cache::decode
