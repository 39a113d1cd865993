// Decode steps on Hopper whose caches are short, as one launch: what decode_attention.cu computes
// where there is nothing but attention to do (no new keys, rotation, bias, window, softcap or
// alibi), of up to 16 rows (tokens x query heads of a kv head), in caches of q's dtype that are
// contiguous or in pages of a multiple of 16 tokens.
//
//   out = softmax(softmax_scale q K^T, masked) V,  lse = log sum exp,  with sinks
//
// Parallelisation: a cluster is an item (a sequence and a kv head). Its blocks, of four or eight
// warps, take units of 16 tokens a warp in turn, whatever the length. At the end the warps merge in
// their block, and the blocks by sending each other their parts (st.async): each ends the vectors
// of four columns that are its own. There is no second launch, nothing of it goes through memory,
// and the same parts are added in the same order every time.
//
// Length, pages of 32 tiles a warp and queries are read side by side, then the first tiles.
//
// Shared memory: for each warp two pairs (one, where the cache fills no more) of a tile's keys and
// values, filled by cp.async, 16-byte chunks swizzled, or what the warps merge; what the cluster
// sends; an mbarrier that counts it.
//
// Variants: dtype x head_dim 64, 128 (smaller ones padded with zeros). Parameters as those of
// decode_attention.cu. Sources: Dao et al., "Flash-Decoding for long-context inference", 2023; PTX
// ISA 8.7, st.async.

#include "kv_cache/decode/args.cuh"
#include "kv_cache/decode/sm90/short.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

template <typename C>
constexpr LaunchFacts short_facts() {
    return {.shared_bytes = C::kFewestBytes,
            .blocks_per_sm = 1,
            .head_dim = C::kHeadDim,
            .element_bytes = sizeof(typename C::T),
            .block_m = C::kRows,
            .block_n = C::kTile,
            .warps = C::kMostWarps,
            .stages = C::kPairs};
}

#define EXPORT_SHORT(DTYPE, T, HEAD_DIM)                                          \
    DESCRIBED(                                                                    \
        decode_attention_sm90_##DTYPE##_hdim##HEAD_DIM,                           \
        "x: blocks of a cluster, y: kv heads, z: sequences",                      \
        (short_facts<ShortConfig<T, HEAD_DIM>>()),                                \
        extern "C" __global__ void                                                \
        __launch_bounds__(256, 1) decode_attention_sm90_##DTYPE##_hdim##HEAD_DIM( \
            DECODE_PARAMS(T, const T)) {                                          \
            const DecodeArgs<T, const T> args = {DECODE_ARGUMENTS};               \
            attend_short<ShortConfig<T, HEAD_DIM>>(args);                         \
        })

#define EXPORT_DTYPE(DTYPE, T) \
    EXPORT_SHORT(DTYPE, T, 64) \
    EXPORT_SHORT(DTYPE, T, 128)

// {op}_sm90_{dtype}_hdim{head_dim}
EXPORT_DTYPE(fp16, __half)
EXPORT_DTYPE(bf16, __nv_bfloat16)

}  // namespace kernel_hub::kv_cache::decode::sm90
