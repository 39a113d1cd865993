// Attention forward on Hopper: out = softmax(softcap(softmax_scale * q k^T), masked) v.
//
// For query i of a sequence and key j, visible where
//   i + seqlen_k - seqlen_q - window_left <= j <= i + seqlen_k - seqlen_q + window_right
// (-1: no bound), with s = softmax_scale q_i k_j, or softcap tanh(s / softcap):
//   out_i = sum_j exp(s_ij) v_j / sum_j exp(s_ij)      lse_i = ln sum_j exp(s_ij)
// fp32 sums; a row that sees nothing gives zeros and -inf. With sinks both sums of exponentials
// have exp(sink of the head) besides, which the last step of a row adds.
//
// Parallelisation: one persistent block an SM takes tiles of kBlockM = 64 kConsumers queries of one
// head. Warpgroup 0 gives its registers away: one warp finds the tiles and loads Q and K, one loads
// V, two write the tiles that see no keys. Each other warpgroup owns 64 query rows and walks the
// keys from right to left:
//   issue S = Q K(next)^T; issue O += P V(this); softmax of S while the second product runs
// "Next" passes the end of a tile: the first scores of the following tile are computed under the
// last product of this one, so that the tensor cores do not wait for a tile's beginning or end.
// The warpgroups issue in turns (named barriers), so that one's softmax lies under the others'
// products. Causal: a warpgroup leaves out a tile's first block of keys where it sees none of it.
//
// Shared memory: Q (64 rows for each consumer, kQStages deep), K and V (kBlockN rows, kStages
// deep), mbarriers, a ring of tile descriptions, the order of up to 256 sequences. Rows of 64
// columns (128 bytes) in the TMA's 128-byte swizzle; head_dim is filled up with zeros by the TMA.
//
// Tiles are handed out by a counter in device memory, which the last block sets back to zero.
// Sequences whose lengths are on the device: the longest first. Causal: of a sequence the tiles
// with the most keys first, within groups of heads whose K and V stay in the L2.
//
//   flash_attention_sm90_{dtype}_hdim{N}_full     no mask but the sequences' ends
//   ..._causal                                    window_right only (0: causal)
//   ..._full_short, ..._causal_short (64)         the same in tiles of 128 rows for 192
//   ..._window                                    both sides, each of them may be open;
//                                                 softcap, but for bf16_hdim64 and fp16_hdim96
//   ..._bf16_hdim64_window_capped, and of 96, 160 with softcap alone
//   ..._window_rows192                            without it, in larger tiles: K and V are read by
//                                                 fewer of them
//   flash_attention_sm90_{dtype}_hdim{N}_v{M}_...   the same with fewer columns of v and out
// head_dim is any multiple of 8 up to N, and so is v's own, or up to M: what is left of its columns
// are zeros, and are not written. Strided dense or varlen by tensor maps of four dimensions,
// innermost first: head_dim, tokens, heads, batch (1 where varlen; with block_table tokens of a
// page and pages); boxes of 64 columns by 64 rows (Q), kBlockN rows (K, V) or box_rows (K, V in
// pages: a divisor of the page and of kBlockN, a multiple of 8), 128-byte swizzle, zeros outside.
// Sources: Shah et al., "FlashAttention-3", 2024; Dao, "FlashAttention-2", 2023.

#include "attention/sm90/block.cuh"
#include "kernel_hub/launch_facts.cuh"

namespace kernel_hub::attention::sm90 {

#define EXPORT_BODY(DTYPE, T, NAME, HEAD_DIM, HEAD_DIM_V, VARIANT, MASK, CONSUMERS, BLOCK_N, CAP) \
    DESCRIBED(                                                                                    \
        flash_attention_sm90_##DTYPE##_##NAME##_##VARIANT,                                        \
        "x: as many blocks as multiprocessors, or as tiles of block_m queries",                   \
        (facts_of<Config<T, HEAD_DIM, CONSUMERS, BLOCK_N, Mask::MASK, false, HEAD_DIM_V,          \
                         Softcap::CAP>>()),                                                       \
        extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)                    \
        flash_attention_sm90_##DTYPE##_##NAME##_##VARIANT(                                        \
            T* out, float* lse, int* flag, ATTENTION_INPUTS, int* tile_counter, ATTENTION_SHAPE,  \
            int num_pages, int page_size, int box_rows, int window_left, int window_right,        \
            int heads_per_group, ATTENTION_SCORES) {                                              \
            using C = Config<T, HEAD_DIM, CONSUMERS, BLOCK_N, Mask::MASK, false, HEAD_DIM_V,      \
                             Softcap::CAP>;                                                       \
            flash_attention_sm90<C>({ATTENTION_INPUT_ARGUMENTS, .tile_counter = tile_counter,     \
                                     ATTENTION_SHAPE_ARGUMENTS,                                   \
                                     .heads_per_group = heads_per_group,                          \
                                     ATTENTION_SCORE_ARGUMENTS});                                 \
        })

#define EXPORT_FLASH_ATTENTION(DTYPE, T, HEAD_DIM, VARIANT, MASK, CONSUMERS, BLOCK_N)            \
    EXPORT_BODY(DTYPE, T, hdim##HEAD_DIM, HEAD_DIM, HEAD_DIM, VARIANT, MASK, CONSUMERS, BLOCK_N, \
                kMaybe)

#define EXPORT_WINDOW(DTYPE, T, HEAD_DIM, VARIANT, CONSUMERS, BLOCK_N, CAP)                \
    EXPORT_BODY(DTYPE, T, hdim##HEAD_DIM, HEAD_DIM, HEAD_DIM, VARIANT, kWindow, CONSUMERS, \
                BLOCK_N, CAP)

#define EXPORT_MASKS(DTYPE, T, HEAD_DIM, CONSUMERS, BLOCK_N, CAP)                   \
    EXPORT_FLASH_ATTENTION(DTYPE, T, HEAD_DIM, full, kFull, CONSUMERS, BLOCK_N)     \
    EXPORT_FLASH_ATTENTION(DTYPE, T, HEAD_DIM, causal, kCausal, CONSUMERS, BLOCK_N) \
    EXPORT_WINDOW(DTYPE, T, HEAD_DIM, window, CONSUMERS, BLOCK_N, CAP)

#define EXPORT_HEAD_DIMS(DTYPE, T, CAP_64, CAP_96)                                 \
    EXPORT_MASKS(DTYPE, T, 64, 3, 128, CAP_64)                                     \
    EXPORT_FLASH_ATTENTION(DTYPE, T, 64, full_short, kFull, 2, 128)                \
    EXPORT_FLASH_ATTENTION(DTYPE, T, 64, causal_short, kCausal, 2, 128)            \
    EXPORT_FLASH_ATTENTION(DTYPE, T, 96, causal, kCausal, 3, 96)                   \
    EXPORT_WINDOW(DTYPE, T, 96, window, 2, 128, CAP_96)                            \
    EXPORT_WINDOW(DTYPE, T, 96, window_rows192, 3, 96, kNever)                     \
    EXPORT_WINDOW(DTYPE, T, 112, window_rows192, 3, 96, kNever)                    \
    EXPORT_MASKS(DTYPE, T, 128, 2, 128, kMaybe)                                    \
    EXPORT_FLASH_ATTENTION(DTYPE, T, 192, full, kFull, 2, 112)                     \
    EXPORT_FLASH_ATTENTION(DTYPE, T, 192, causal, kCausal, 2, 64)                  \
    EXPORT_WINDOW(DTYPE, T, 192, window, 2, 64, kMaybe)                            \
    EXPORT_BODY(DTYPE, T, hdim192_v128, 192, 128, full, kFull, 2, 128, kMaybe)     \
    EXPORT_BODY(DTYPE, T, hdim192_v128, 192, 128, causal, kCausal, 2, 128, kMaybe) \
    EXPORT_FLASH_ATTENTION(DTYPE, T, 256, full, kFull, 2, 80)                      \
    EXPORT_FLASH_ATTENTION(DTYPE, T, 256, causal, kCausal, 2, 64)                  \
    EXPORT_WINDOW(DTYPE, T, 256, window, 2, 64, kMaybe)

EXPORT_HEAD_DIMS(fp16, __half, kMaybe, kNever)
EXPORT_HEAD_DIMS(bf16, __nv_bfloat16, kNever, kMaybe)
EXPORT_WINDOW(bf16, __nv_bfloat16, 64, window_capped, 3, 96, kAlways)
EXPORT_WINDOW(bf16, __nv_bfloat16, 96, window_capped, 3, 80, kAlways)
EXPORT_WINDOW(bf16, __nv_bfloat16, 160, window_capped, 2, 96, kAlways)

}  // namespace kernel_hub::attention::sm90
