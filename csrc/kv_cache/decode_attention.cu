// Attention of 1 to 16 new tokens a sequence over a key/value cache, split over all SMs.
//
//   q', k' = rope(q + bias), rope(k + bias), v' = v + bias        (each part optional)
//   cache[length + i] = k'_i, v'_i                                (where k is given)
//   out = softmax(softcap(softmax_scale q' K^T) + alibi, masked) V,  lse = log sum exp
//
// over the cache of the sequence, contiguous or paged, in fp16 or bf16; decode_attention_e4m3.cu:
// in e4m3 with a scale a head.
// With sinks, exp(sink of the head) joins a row's complete sum of exponentials.
// Token i of seqlen_q sees the keys up to its own: length - seqlen_q + i, with the new ones; with a
// tree_mask all before the new ones, and of these those of its bits: it is rotated as behind them,
// and windows and alibi count by them (tree.cuh).
//
// Parallelisation: the rows (tokens x query heads of one kv head) are the M side of m16n8k16, so
// that keys and values are read once. An item is a (sequence, kv head, block of rows); its cache
// is cut into units of kWarps * kTile tokens, and runs of units go to the blocks ("workers"), one
// a worker. Into how many parts each item goes is worked out here from the lengths: equal shares
// of all units, as many as Work::shares_of says, an item shorter than that being one part. So one
// captured launch is spread well whatever the lengths have grown to. In a unit every warp has a
// tile of kTile tokens, and it meets the others at the end of its part only. num_splits > 0: that
// many parts an item. An item in one part is written to `out`; parts are written as fp32 partials,
// which the second kernel merges in order: the same bits every time.
//
// New tokens are written to the cache by the worker whose units hold their place, before it
// reads them; nobody else reads them. (Blocks of rows of the same head each write them, the same
// bytes.) Keys and values on pages that are not there count as zeros, and new tokens there or past
// the end of the cache are dropped.
//
// Shared memory: for each warp a ring of kSlots slots of kTile rows, keys and values in turn,
// filled by cp.async, 16-byte chunks swizzled; the queries. The ring is the warps' merge buffer at
// the end.
//
// Variants: dtype x head_dim 64, 128, 256 (smaller ones padded with zeros) x (16 rows a block |
// rows32: 32 rows, without window, softcap and alibi). Hopper has that of 256, with more under way,
// in decode_attention_wide_sm90.cu.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 has no instructions of its own for them
// Sources: Dao, "FlashAttention-2", 2023; Dao et al., "Flash-Decoding for long-context inference",
// 2023.

#include "kv_cache/decode/attend.cuh"

namespace kernel_hub::kv_cache::decode {

// TILE, SLOTS, ROW_TILES, MIN_BLOCKS: see DecodeConfig.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 900
#define EXPORT_WIDE(DTYPE, T) EXPORT_DECODE_ATTENTION(DTYPE, T, T, 256, , 16, 2, 1, 2)
#else
#define EXPORT_WIDE(DTYPE, T)
#endif

#define EXPORT_DTYPE(DTYPE, T)                                      \
    EXPORT_DECODE_ATTENTION(DTYPE, T, T, 64, , 32, 5, 1, 2)         \
    EXPORT_DECODE_ATTENTION(DTYPE, T, T, 64, _rows32, 32, 5, 2, 2)  \
    EXPORT_DECODE_ATTENTION(DTYPE, T, T, 128, , 16, 5, 1, 2)        \
    EXPORT_DECODE_ATTENTION(DTYPE, T, T, 128, _rows32, 16, 3, 2, 2) \
    EXPORT_WIDE(DTYPE, T)                                           \
    EXPORT_DECODE_MERGE(DTYPE, T)

// {op}_{dtype}_hdim{head_dim}[_rows32], {op}_{dtype}_merge
EXPORT_DTYPE(fp16, __half)
EXPORT_DTYPE(bf16, __nv_bfloat16)

}  // namespace kernel_hub::kv_cache::decode
