// Attention forward on Hopper for few queries over many keys: what flash_attention_sm90.cu
// computes, with the work cut along the keys: into equal shares, or parts, or long tiles alone.
//
// A tile is block_m rows: `tokens` tokens of `heads` query heads that share a kv head (row = token
// heads + head), so that K and V are read once for them; masks go by the token. A launch's tiles
// and their blocks of keys are one line (sm90/line.cuh), dealt to the blocks by the lengths on the
// device. A tile that one block has is written as it is; else its pieces, fp32 sums with the shift
// and the sum of their exponents, go to memory, and ..._merge adds them up in the order of the
// keys: the same bits every time. It also writes the rows that see no keys; where all tiles are
// whole there is no merge, and a warp that loads nothing writes them. Pieces have no sinks: those
// join the sum of a whole tile, or the merge's.
//
// Parallelisation, shared memory and products of a block: flash_attention_sm90.cu. The merge: 16
// rows by 32 columns a warp, or `team` warps where a tile has many pieces.
//
//   flash_attention_split_sm90_{dtype}_hdim{N}_causal   window_right only; 2^29: no mask
//   ..._causal_rows192 (64, 96)                         the same in tiles of 192 rows
//   ..._causal_rows64, ..._window_rows64 (128)          of 64, two blocks a multiprocessor
//   ..._bf16_hdim64_window_rows64                       the same
//   ..._window (64, 128, 256)                           both sides, either of them open; softcap
//   flash_attention_split_sm90_{dtype}_merge            after each; grid and blocks of theirs
//   flash_attention_split_sm90_{dtype}_merge_left       the same, where most tiles are written
// Tensor maps as there, but for q: head_dim, heads, tokens, batch; boxes of 64 columns by `heads`
// by `tokens`.
// Source: Dao et al., "Flash-Decoding", 2023; Osama et al., "Stream-K", 2023.
//
// kernel_hub: allow-local-memory: 8 bytes with windows and of 192 rows, in the warps that load

#include "attention/sm90/block.cuh"
#include "attention/sm90/merge.cuh"
#include "kernel_hub/launch_facts.cuh"

namespace kernel_hub::attention::sm90 {

#define EXPORT_SPLIT(DTYPE, T, HEAD_DIM, VARIANT, MASK, CONSUMERS, BLOCK_N)                   \
    DESCRIBED(                                                                                \
        flash_attention_split_sm90_##DTYPE##_hdim##HEAD_DIM##_##VARIANT,                      \
        "x: as many blocks as run at once, or as shares",                                     \
        (facts_of<Config<T, HEAD_DIM, CONSUMERS, BLOCK_N, Mask::MASK, true>>(                 \
            Warpgroups<CONSUMERS>::kBlocks)),                                                 \
        extern "C" __global__ void                                                            \
        __launch_bounds__(128 * (1 + CONSUMERS), Warpgroups<CONSUMERS>::kBlocks)              \
        flash_attention_split_sm90_##DTYPE##_hdim##HEAD_DIM##_##VARIANT(                      \
            T* out, float* lse, int* flag, float* partials, int* line, ATTENTION_INPUTS,      \
            int* tile_counter, ATTENTION_SHAPE, int window_left, int window_right, int heads, \
            int tokens, int reciprocal, int least_blocks, int longest, int together,          \
            int num_pages, int page_size, int box_rows, ATTENTION_SCORES) {                   \
            using C = Config<T, HEAD_DIM, CONSUMERS, BLOCK_N, Mask::MASK, true>;              \
            const Packing packing = {heads,   tokens,   reciprocal, least_blocks,             \
                                     longest, partials, line,       together};                \
            flash_attention_sm90<C>({ATTENTION_INPUT_ARGUMENTS, .tile_counter = tile_counter, \
                                     ATTENTION_SHAPE_ARGUMENTS, ATTENTION_SCORE_ARGUMENTS,    \
                                     .packing = packing});                                    \
        })

#define EXPORT_MERGE(DTYPE, T, NAME, IS_LEFT, GRID)                                                \
    DESCRIBED(                                                                                     \
        flash_attention_split_sm90_##DTYPE##_##NAME, GRID, (.threads = 256, .shared_bytes = 0),    \
        extern "C" __global__ void                                                                 \
        __launch_bounds__(256, 2) flash_attention_split_sm90_##DTYPE##_##NAME(                     \
            T* out, float* lse, int* flag, float* partials, int* line, const int* cu_seqlens_q,    \
            const int* cu_seqlens_k, const int* cache_seqlens, const void* sinks,                  \
            int64_t out_batch_stride, int64_t out_token_stride, int64_t out_head_stride,           \
            int64_t lse_batch_stride, int64_t lse_head_stride, int batch_size, int num_heads,      \
            int num_kv_heads, int head_dim_v, int seqlen_q, int seqlen_k, int total_q,             \
            int total_k, int window_left, int window_right, int heads, int tokens, int reciprocal, \
            int least_blocks, int longest, int sink_type, int blocks, int team, int scan,          \
            int groups, int strips, int width, int rows, int reciprocal_n) {                       \
            using C = MergeConfig<T>;                                                              \
            const Packing packing = {heads,        tokens,  reciprocal,                            \
                                     least_blocks, longest, partials,                              \
                                     line,         1,       static_cast<uint32_t>(reciprocal_n)};  \
            merge<C, IS_LEFT>({.out = out,                                                         \
                               .lse = lse,                                                         \
                               .flag = flag,                                                       \
                               .cu_seqlens_q = cu_seqlens_q,                                       \
                               .cu_seqlens_k = cu_seqlens_k,                                       \
                               .cache_seqlens = cache_seqlens,                                     \
                               .sinks = sinks,                                                     \
                               .out_batch_stride = out_batch_stride,                               \
                               .out_token_stride = out_token_stride,                               \
                               .out_head_stride = out_head_stride,                                 \
                               .lse_batch_stride = lse_batch_stride,                               \
                               .lse_head_stride = lse_head_stride,                                 \
                               .batch_size = batch_size,                                           \
                               .num_heads = num_heads,                                             \
                               .num_kv_heads = num_kv_heads,                                       \
                               .head_dim_v = head_dim_v,                                           \
                               .seqlen_q = seqlen_q,                                               \
                               .seqlen_k = seqlen_k,                                               \
                               .total_q = total_q,                                                 \
                               .total_k = total_k,                                                 \
                               .window_left = window_left,                                         \
                               .window_right = window_right,                                       \
                               .sink_type = sink_type,                                             \
                               .packing = packing},                                                \
                              {partials, rows, width}, blocks, team, scan, groups, strips);        \
        })

#define EXPORT_MASKS(DTYPE, T, HEAD_DIM, BLOCK_N)                 \
    EXPORT_SPLIT(DTYPE, T, HEAD_DIM, causal, kCausal, 2, BLOCK_N) \
    EXPORT_SPLIT(DTYPE, T, HEAD_DIM, window, kWindow, 2, BLOCK_N)

#define EXPORT_HEAD_DIMS(DTYPE, T)                                                                \
    EXPORT_MASKS(DTYPE, T, 64, 128)                                                               \
    EXPORT_SPLIT(DTYPE, T, 64, causal_rows192, kCausal, 3, 112)                                   \
    EXPORT_SPLIT(DTYPE, T, 96, causal, kCausal, 2, 128)                                           \
    EXPORT_SPLIT(DTYPE, T, 96, causal_rows192, kCausal, 3, 96)                                    \
    EXPORT_MASKS(DTYPE, T, 128, 128)                                                              \
    EXPORT_SPLIT(DTYPE, T, 128, causal_rows64, kCausal, 1, 64)                                    \
    EXPORT_SPLIT(DTYPE, T, 128, window_rows64, kWindow, 1, 64)                                    \
    EXPORT_SPLIT(DTYPE, T, 192, causal, kCausal, 2, 112)                                          \
    EXPORT_MASKS(DTYPE, T, 256, 80)                                                               \
    EXPORT_MERGE(DTYPE, T, merge, false, "x: 8 / team strips of 16 rows by 32 columns; y: tiles") \
    EXPORT_MERGE(DTYPE, T, merge_left, true, "x: 8 strips of 16 rows of groups, by 32 columns")

EXPORT_HEAD_DIMS(fp16, __half)
EXPORT_HEAD_DIMS(bf16, __nv_bfloat16)
EXPORT_SPLIT(bf16, __nv_bfloat16, 64, window_rows64, kWindow, 1, 64)

}  // namespace kernel_hub::attention::sm90
