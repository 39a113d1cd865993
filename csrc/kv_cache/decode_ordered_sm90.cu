// Decode steps of one token on Hopper with the bits of a prompt's row: what flash_attention_sm90.cu
// computes of one query, with every addition in its order, by many multiprocessors.
//
//   out = softmax(softmax_scale q K^T) V,  lse = log sum exp
//
// That kernel takes blocks of 128 keys from the last one to the first. Scores are sums of their
// own, so whoever makes them; so are a block's probabilities once the running maximum is known;
// what has an order is the sum over keys, a column at a time. Here a cluster is an item (a sequence
// and a kv head). Warps that score have a block of keys of each round of 16, or two of them have
// one where there are few; all blocks of the cluster get the keys' blocks' largest scores, from
// which each finds the running maximum; all get all probabilities (st.async), and warps that add
// have eight columns of values each, in that order. Rounds are scored while those before are added.
// Rows are the query heads of the kv head, up to 8.
//
// NOTE: mma.sync's 16 products and an addend have the bits of one step of wgmma; tests hold it.
//
// Shared memory: the warps' rings of keys; two rounds' probabilities; the block's columns of
// values, of 10 or 20 blocks of keys; eight rounds' largest scores; mbarriers.
//
// Variants: dtype, of head_dim 128; clusters of four, or of eight, which find half the places.
// Sources: Dao et al., "FlashAttention-2", 2023; PTX ISA 8.7, st.async.

#include "kv_cache/decode/sm90/ordered.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

template <typename C>
constexpr LaunchFacts ordered_facts() {
    return {.threads = C::kThreads,
            .shared_bytes = C::kSharedBytes,
            .blocks_per_sm = 1,
            .head_dim = C::kHeadDim,
            .block_m = C::kRows,
            .block_n = kBlockKeys,
            .cluster_n = C::kBlocks};
}

#define EXPORT_ORDERED(DTYPE, T, HEAD_DIM, BLOCKS, SUFFIX)                                         \
    DESCRIBED(                                                                                     \
        decode_ordered_sm90_##DTYPE##_hdim##HEAD_DIM##SUFFIX,                                      \
        "x: blocks of a cluster, y: kv heads, z: sequences",                                       \
        (ordered_facts<OrderedConfig<T, HEAD_DIM, BLOCKS>>()),                                     \
        extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1)                                  \
        __launch_bounds__(OrderedConfig<T, HEAD_DIM, BLOCKS>::kThreads, 1)                         \
        decode_ordered_sm90_##DTYPE##_hdim##HEAD_DIM##SUFFIX(                                      \
            T* out, float* lse, int* flag, const T* q, const T* k_cache, const T* v_cache,         \
            const int* cache_seqlens, const int* block_table, int64_t out_batch_stride,            \
            int64_t out_head_stride, int64_t q_batch_stride, int64_t q_head_stride,                \
            int64_t k_cache_page_stride, int64_t k_cache_token_stride,                             \
            int64_t k_cache_head_stride, int64_t v_cache_page_stride,                              \
            int64_t v_cache_token_stride, int64_t v_cache_head_stride, int64_t block_table_stride, \
            int num_heads, int num_kv_heads, int num_pages, int page_size, int max_tokens,         \
            float scale_log2) {                                                                    \
            attend_in_order<OrderedConfig<T, HEAD_DIM, BLOCKS>>({out,                              \
                                                                 lse,                              \
                                                                 flag,                             \
                                                                 q,                                \
                                                                 k_cache,                          \
                                                                 v_cache,                          \
                                                                 cache_seqlens,                    \
                                                                 block_table,                      \
                                                                 out_batch_stride,                 \
                                                                 out_head_stride,                  \
                                                                 q_batch_stride,                   \
                                                                 q_head_stride,                    \
                                                                 k_cache_page_stride,              \
                                                                 k_cache_token_stride,             \
                                                                 k_cache_head_stride,              \
                                                                 v_cache_page_stride,              \
                                                                 v_cache_token_stride,             \
                                                                 v_cache_head_stride,              \
                                                                 block_table_stride,               \
                                                                 num_heads,                        \
                                                                 num_kv_heads,                     \
                                                                 num_pages,                        \
                                                                 page_size,                        \
                                                                 max_tokens,                       \
                                                                 scale_log2});                     \
        })

// {op}_sm90_{dtype}_hdim{head_dim}
EXPORT_ORDERED(fp16, __half, 128, 4, )
EXPORT_ORDERED(bf16, __nv_bfloat16, 128, 4, )
EXPORT_ORDERED(fp16, __half, 128, 8, _cluster8)
EXPORT_ORDERED(bf16, __nv_bfloat16, 128, 8, _cluster8)

}  // namespace kernel_hub::kv_cache::decode::sm90
