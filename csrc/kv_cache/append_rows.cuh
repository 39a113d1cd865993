// Rows of heads as an append reads and writes them.
#pragma once

#include <stdint.h>

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

}  // namespace kernel_hub::kv_cache
