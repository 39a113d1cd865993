// What all of TensorRT-LLM's fmha_v2 kernels of such a name do: the assertion of some, and the
// fields of their struct that they read.
#pragma once
#include <cassert>
#include <cstdint>

#include "fmha_structs.cuh"

enum Layout { QKV, Q_KV, Q_K_V, Q_PAGED_KV };
enum Mask { PADDING, CAUSAL, SLIDING, CUSTOM };
enum Variant { NL, NL_TILED, TMA_WS };

// As those of 0.16, which do not know where V is in such rows.
template <Layout kLayout>
__device__ void check_heads(const Params& p) {
#if STRUCT != CURRENT
    if (kLayout == QKV && p.head_dim != p.head_dim_v) assert(p.num_kv_heads == p.num_heads);
#endif
}

// What every kernel reads, or every one of such a name.
template <Layout kLayout, Mask kMask, bool kSoftcap, bool kThroughTma, bool kAlibi, bool kSoftmax>
__device__ void read_always(const Params& p) {
    int64_t found = p.out_stride + p.cu_seqlens_q[0] + p.num_heads * p.max_seqlen_q + p.is_padded;
    if (kThroughTma)
        found += *p.tile_counter + p.num_tiles / p.num_tiles_per_head;
    else
        found += *(kLayout == QKV ? p.qkv : p.q) * row_stride(p, kLayout == QKV, 'q');
    if (kLayout == Q_PAGED_KV)
        found += p.paged.block_offsets[p.paged.max_blocks_per_seq >> p.paged.tokens_per_block_log2];
    if (kMask == CUSTOM) found += p.packed_mask[p.mask_stride] + p.cu_mask_rows[0];
    if (kSoftcap) found += (int64_t)(float)p.softcap;
    const bool is_causal = kMask == CAUSAL || kMask == SLIDING;
    if (kMask == SLIDING) found += p.window;
    if (kAlibi || (is_causal && !kThroughTma && p.has_alibi)) found += p.alibi.num_heads_pow2;
#if !IS_512
    if ((!kThroughTma || kSoftmax) && p.stats) found += p.stats_stride;
#endif
#if STRUCT == CURRENT || STRUCT == EDGE
    if (kThroughTma && p.sinks) found += (int64_t)p.sinks[0];
#endif
    if (kThroughTma && kMask == SLIDING) found += log2_chunk(p);
    check_heads<kLayout>(p);
    *(int64_t*)p.out = found;
}
