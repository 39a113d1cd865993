// What the attention forward kernels are asked for, and which part of it a block works on.
#pragma once

#include "attention/forward/tiles.cuh"
#include "kernel_hub/bounds.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/sinks.cuh"

namespace kernel_hub::attention::forward {

enum class Variant { kPlain, kPaged, kGeneral };

// Shared memory holds Q, the stages of K and V, 32 bytes per warp and, with pages, four tables.
constexpr LaunchFacts facts_of(int head_dim, int block_m, int block_n, int warps, int stages,
                               int blocks_per_sm, Variant variant) {
    const int rows = block_m + 2 * stages * block_n;
    const int tables = variant == Variant::kPlain ? 0 : 4 * block_n * 8;
    return {.threads = 32 * warps,
            .shared_bytes = rows * head_dim * 2 + 32 * warps + tables,
            .blocks_per_sm = blocks_per_sm,
            .head_dim = head_dim,
            .block_m = block_m,
            .block_n = block_n,
            .warps = warps,
            .stages = stages};
}

// The strides of one tensor, in elements.
struct Strides {
    int64_t batch, token, head;
};

template <typename T>
struct AttentionParams {
    T* out;                    // (batch, seqlen_q, num_heads, head_dim_v) or (total_q, ...)
    float* lse;                // (batch, num_heads, seqlen_q) or (num_heads, total_q); may be null
    int* flag;                 // what tables led outside (bounds.cuh), or null
    const T* q;                // (batch, seqlen_q, num_heads, head_dim) or (total_q, ...)
    const T* k;                // (batch, seqlen_k, num_kv_heads, head_dim), (total_k, ...) or pages
    const T* v;                // like k, of head_dim_v
    const int* cu_seqlens_q;   // (batch + 1) or null
    const int* cu_seqlens_k;   // (batch + 1) or null
    const int* cache_seqlens;  // (batch) or null: all keys there are
    const int* block_table;    // (batch, max_pages), or null where the variant allows
    const float* alibi_slopes;  // (num_heads) or (batch, num_heads), or null; general only
    const void* sinks;          // (num_heads), or null
    int sink_type;              // ElementType
    Strides out_strides, q_strides;
    Strides k_strides, v_strides;  // batch: of pages where paged
    int64_t lse_batch_stride, lse_head_stride;
    int64_t block_table_stride, alibi_batch_stride;
    int num_batch_heads;  // batch * num_heads
    int heads_per_group;  // (batch, head) pairs that are scheduled together
    int num_row_blocks;   // of the longest sequence
    int num_heads, num_kv_heads, head_dim, head_dim_v;
    int seqlen_q, seqlen_k;  // with cu_seqlens: of the longest; seqlen_k bounds cache_seqlens
    int total_q, total_k;    // rows of q and k that cu_seqlens tell apart
    int num_pages, page_size;
    int window_left, window_right;
    int is_aligned;  // general: pointers and strides are multiples of 16 bytes
    float softmax_scale_log2, softcap_log2;  // times log2(e); softcap 0: none
};

// The same as parameters of a kernel, and as they are handed on.
// NOTE: total_q, total_k and num_pages follow is_aligned: elsewhere ptxas spills hdim128 (sm_90).
// clang-format off: it would give each of them a line.
#define FORWARD_PARAMS(T)                                                                          \
    T* out, float* lse, int* flag, const T* q, const T* k, const T* v, const int* cu_seqlens_q,    \
    const int* cu_seqlens_k, const int* cache_seqlens, const int* block_table,                     \
    const float* alibi_slopes, const void* sinks, int64_t out_batch_stride,                        \
    int64_t out_token_stride, int64_t out_head_stride, int64_t lse_batch_stride,                   \
    int64_t lse_head_stride, int64_t q_batch_stride, int64_t q_token_stride,                       \
    int64_t q_head_stride, int64_t k_batch_stride, int64_t k_token_stride, int64_t k_head_stride,  \
    int64_t v_batch_stride, int64_t v_token_stride, int64_t v_head_stride,                         \
    int64_t block_table_stride, int64_t alibi_batch_stride, int num_batch_heads,                   \
    int heads_per_group, int num_row_blocks, int num_heads, int num_kv_heads, int head_dim,        \
    int seqlen_q, int seqlen_k, int page_size, int window_left, int window_right, int is_aligned,  \
    int total_q, int total_k, int num_pages, int sink_type, int head_dim_v,                        \
    float softmax_scale_log2, float softcap_log2
#define FORWARD_ARGUMENTS                                                                          \
    .out = out, .lse = lse, .flag = flag, .q = q, .k = k, .v = v, .cu_seqlens_q = cu_seqlens_q,    \
    .cu_seqlens_k = cu_seqlens_k, .cache_seqlens = cache_seqlens, .block_table = block_table,      \
    .alibi_slopes = alibi_slopes, .sinks = sinks, .sink_type = sink_type,                          \
    .out_strides = {out_batch_stride, out_token_stride, out_head_stride},                          \
    .q_strides = {q_batch_stride, q_token_stride, q_head_stride},                                  \
    .k_strides = {k_batch_stride, k_token_stride, k_head_stride},                                  \
    .v_strides = {v_batch_stride, v_token_stride, v_head_stride},                                  \
    .lse_batch_stride = lse_batch_stride, .lse_head_stride = lse_head_stride,                      \
    .block_table_stride = block_table_stride, .alibi_batch_stride = alibi_batch_stride,            \
    .num_batch_heads = num_batch_heads, .heads_per_group = heads_per_group,                        \
    .num_row_blocks = num_row_blocks, .num_heads = num_heads, .num_kv_heads = num_kv_heads,        \
    .head_dim = head_dim, .head_dim_v = head_dim_v, .seqlen_q = seqlen_q, .seqlen_k = seqlen_k,    \
    .total_q = total_q, .total_k = total_k, .num_pages = num_pages, .page_size = page_size,        \
    .window_left = window_left, .window_right = window_right, .is_aligned = is_aligned,            \
    .softmax_scale_log2 = softmax_scale_log2, .softcap_log2 = softcap_log2
// clang-format on

// What a block works on.
struct Tile {
    int batch_idx, head_idx, kv_head_idx, first_row;
};

// What a warp keeps in shared memory during the loop, which has no registers to spare.
struct __align__(16) WarpPlace {
    int64_t out_offset, lse_offset;  // of its first row
    int64_t table_offset;            // of the sequence's row of the block table
    int num_rows;                    // from its first to the end of the sequence; may be negative
    float sink;                      // of its head; -inf: none
};
static_assert(sizeof(WarpPlace) == 32, "the launch reckons with 32 bytes a warp");

template <typename T>
__device__ __forceinline__ Tile find_tile(const AttentionParams<T>& params, int block_m) {
    const int group_tiles = params.heads_per_group * params.num_row_blocks;
    const int group = blockIdx.x / group_tiles;
    const int first_pair = group * params.heads_per_group;
    const int num_pairs = min(params.heads_per_group, params.num_batch_heads - first_pair);
    const int in_group = blockIdx.x - group * group_tiles;
    const int row_rank = in_group / num_pairs;
    const int pair = first_pair + in_group - row_rank * num_pairs;
    Tile tile;
    tile.batch_idx = pair / params.num_heads;
    tile.head_idx = pair - tile.batch_idx * params.num_heads;
    tile.kv_head_idx = tile.head_idx / (params.num_heads / params.num_kv_heads);
    tile.first_row = (params.num_row_blocks - 1 - row_rank) * block_m;
    return tile;
}

// The rows of a sequence: in q and out, or in k and v.
struct Rows {
    int seqlen, start;
    int64_t batch;    // that the strides count; 0 where cu_seqlens tell the start
    bool is_outside;  // the bounds were not what they should be, or further apart than said
};

__device__ __forceinline__ Rows rows_of(const int* cu_seqlens, int seqlen, int total,
                                        int batch_idx) {
    if (!cu_seqlens) {
        return {seqlen, 0, batch_idx, false};
    }
    const RowRange range = find_rows(cu_seqlens, batch_idx, total);
    return {range.count, range.start, 0, range.is_outside || range.count > seqlen};
}

// Both of a sequence; says which tables led outside.
template <typename T>
__device__ __forceinline__ void find_sequence(const AttentionParams<T>& params, int batch_idx,
                                              Rows& queries, Rows& keys) {
    queries = rows_of(params.cu_seqlens_q, params.seqlen_q, params.total_q, batch_idx);
    keys = rows_of(params.cu_seqlens_k, params.seqlen_k, params.total_k, batch_idx);
    int outside = (queries.is_outside ? kQueriesOutside : 0) | (keys.is_outside ? kKeysOutside : 0);
    if (params.cache_seqlens) {
        const int length = params.cache_seqlens[batch_idx];
        outside |= length < 0 || length > keys.seqlen ? kLengthsOutside : 0;
        keys.seqlen = max(0, min(keys.seqlen, length));
    }
    report(params.flag, threadIdx.x == 0 ? outside : 0);
}

}  // namespace kernel_hub::attention::forward
