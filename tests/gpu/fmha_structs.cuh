// The by-value parameters of TensorRT-LLM's fmha_v2 kernels, one of them by -DSTRUCT=…, and what
// older ones lack as the newest has it. See kernel_hub/formats/fmha_v2/_params.py.
#pragma once
#include <cstdint>

struct Paged {
    int max_seqs, max_blocks_per_seq, tokens_per_block, tokens_per_block_log2, bytes_per_block;
    const char* pool;
    const int* block_offsets;
};
struct Alibi {
    int num_heads_pow2;
    float neg4_div_num_heads, scale_after_alibi;
    int head_idx_offset, sequence_pos_offset;
};
struct Sage {
    int max_num_blocks;
    float* scales;
};
struct alignas(64) Descriptor {
    uint64_t words[8];
};
// Newest first.
#define CURRENT 0
#define WITHOUT_SINKS 1
#define EDGE 2
#define P640 3
#define P576 4
#define LONG512 5
#define P512 6
#ifndef STRUCT
#define STRUCT CURRENT
#endif
#define IS_OLD (STRUCT >= P640)
#define IS_512 (STRUCT >= LONG512)

struct Params {
#if IS_OLD
    const char *qkv, *q, *kv;
#else
    const char *qkv, *q, *k, *v, *kv;
#endif
    Paged paged;
    const uint32_t* packed_mask;
#if STRUCT == CURRENT || STRUCT == EDGE
    const float* sinks;
#endif
    char* out;
#if !IS_512
    float* stats;
#endif
#if IS_512
    int64_t qkv_stride, q_stride, kv_stride, mask_stride, out_stride;
#elif IS_OLD
    int64_t qkv_stride, q_stride, kv_stride, v_stride, mask_stride, out_stride, stats_stride;
#else
    int64_t q_stride, k_stride, v_stride, mask_stride, out_stride, stats_stride;
#endif
#if IS_OLD
    Descriptor tma_q, tma_kv, tma_out;
#else
    Descriptor tma_q, tma_k, tma_v, tma_out;
#endif
    int blocks_per_tma_load, blocks_per_tma_load_log2;
    int batch_size, num_heads, num_kv_heads, num_heads_per_kv, max_seqlen_q;
#if STRUCT == EDGE
    int max_seqlen_k;
#endif
    int head_dim;
#if !IS_512
    int head_dim_v;
#endif
#if STRUCT <= P640
    int num_grouped_heads;
#endif
    int window;
#if STRUCT <= P640
    int log2_chunk;
#endif
    uint32_t scale_bmm1, softcap, scale_softmax, scale_bmm2;
    const uint32_t *scale_bmm1_d, *scale_bmm2_d;
    const int *cu_seqlens_q, *cu_seqlens_k, *cu_mask_rows;
    bool has_alibi;
    Alibi alibi;
    uint32_t* tile_counter;
    uint32_t num_tiles, num_tiles_per_head;
    bool balanced, is_padded;
#if IS_512
    int head_dim_v;
    int64_t v_stride;
#else
    Sage sage_q, sage_k, sage_v;
#endif
#if STRUCT == LONG512
    Descriptor unknown[2];
#endif
};
constexpr int kStructBytes[] = {704, 704, 704, 640, 576, 640, 512};
static_assert(sizeof(Params) == kStructBytes[STRUCT] && alignof(Params) == 64, "their struct");

// What older structs lack, as it is in the newest.
__device__ int64_t row_stride(const Params& p, bool is_packed, char part) {
#if IS_OLD
    return is_packed     ? p.qkv_stride
           : part == 'q' ? p.q_stride
           : part == 'v' ? p.v_stride
                         : p.kv_stride;
#else
    return is_packed || part == 'q' ? p.q_stride : part == 'k' ? p.k_stride : p.v_stride;
#endif
}
__device__ int log2_chunk(const Params& p) {
#if STRUCT <= P640
    return p.log2_chunk;
#else
    return 0;
#endif
}
__device__ bool ungrouped(const Params& p) {
#if STRUCT <= P640
    return p.num_grouped_heads == 1;
#else
    return true;
#endif
}
