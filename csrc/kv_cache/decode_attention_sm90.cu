// Decode steps on Hopper whose caches are short, as one launch: what decode_attention.cu computes
// where there is nothing but attention to do (no new keys, rotation, bias, window, softcap or
// alibi), in caches of q's dtype that are contiguous or in pages of a multiple of 16 tokens.
//
//   out = softmax(softmax_scale q K^T, masked) V,  lse = log sum exp,  with sinks
//
// Parallelisation: a cluster is an item (a sequence, a kv head and a block of its rows: tokens x
// query heads). Its blocks, of four or eight warps, take units of 16 tokens a warp in turn,
// whatever the length. At the end the warps merge in their block, and the blocks by sending each
// other their parts (st.async): each ends the vectors of four columns that are its own. There is no
// second launch, nothing of it goes through memory, and the same parts are added in the same order
// every time.
//
// Length, pages of 32 tiles a warp and queries are read side by side, then the first tiles.
//
// Shared memory: queries, where there are no registers for them; for each warp two pairs (one,
// where the cache fills no more) of a tile's keys and values, filled by cp.async, 16-byte chunks
// swizzled, or what the warps merge; what the cluster sends; an mbarrier that counts it.
//
// Variants: dtype x head_dim 64, 80, 96, 128 (smaller ones padded with zeros), 16 rows a block;
// decode_attention_wide_sm90.cu has more rows and columns. Parameters as those of
// decode_attention.cu. Sources: Dao et al., "Flash-Decoding for long-context inference", 2023; PTX
// ISA 8.7, st.async.

#include "kv_cache/decode/sm90/short.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

#define EXPORT_DTYPE(DTYPE, T)                                              \
    EXPORT_SHORT(decode_attention_sm90_##DTYPE##_hdim64, T, 64, 1, false)   \
    EXPORT_SHORT(decode_attention_sm90_##DTYPE##_hdim80, T, 80, 1, false)   \
    EXPORT_SHORT(decode_attention_sm90_##DTYPE##_hdim96, T, 96, 1, false)   \
    EXPORT_SHORT(decode_attention_sm90_##DTYPE##_hdim128, T, 128, 1, false) \
    EXPORT_SHORT(decode_attention_sm90_##DTYPE##_hdim128_ready, T, 128, 1, true)

// {op}_sm90_{dtype}_hdim{head_dim}[_ready]; ready: caches are, before the launch ahead ends, which
// takes registers.
EXPORT_DTYPE(fp16, __half)
EXPORT_DTYPE(bf16, __nv_bfloat16)

}  // namespace kernel_hub::kv_cache::decode::sm90
