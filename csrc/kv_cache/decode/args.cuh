// The parameters of a decode kernel. Strides in elements.
#pragma once

#include <stdint.h>

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
    int64_t out_batch_stride, out_token_stride, out_head_stride;
    int64_t q_batch_stride, q_token_stride, q_head_stride;
    int64_t k_batch_stride, k_token_stride, k_head_stride;
    int64_t v_batch_stride, v_token_stride, v_head_stride;
    int64_t k_cache_page_stride, k_cache_token_stride, k_cache_head_stride;
    int64_t v_cache_page_stride, v_cache_token_stride, v_cache_head_stride;
    int64_t block_table_stride, table_stride, alibi_batch_stride;
    int batch_size, seqlen_q, num_heads, num_kv_heads, head_dim, num_pages, page_size, max_tokens;
    int rotary_dim, max_position, table_bytes, is_interleaved, is_vectorised;
    int num_splits, parallel, fine_units, num_sms, window_left, sink_type;  // ElementType
    float softmax_scale, softcap;

    __device__ __forceinline__ int rows() const { return seqlen_q * (num_heads / num_kv_heads); }
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

}  // namespace kernel_hub::kv_cache::decode
