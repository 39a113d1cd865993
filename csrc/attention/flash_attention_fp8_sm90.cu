// Attention forward on Hopper in e4m3: out = softmax(softmax_scale * q k^T, masked) v.
//
// q = q_fp8 * q_scale, and k and v so too; a scale holds for a tensor, a head, or kScaleTokens
// tokens of a head. For query i of a sequence and key j, visible where (causal)
//   j <= i + seqlen_k - seqlen_q
// with s = softmax_scale q_i k_j:
//   out_i = sum_j exp(s_ij) v_j / sum_j exp(s_ij)      lse_i = ln sum_j exp(s_ij)
// A row that sees nothing gives zeros and -inf. The products' sums are the tensor cores' own (fp32
// registers; Hopper adds e4m3 products to them with fewer bits); sums of probabilities are fp32.
// Probabilities are rounded to e4m3 for the second product alone.
//
// Scales: q's, k's and softmax_scale become one factor of the exponent. V's scale of a head
// multiplies the output. V's scales of blocks: the output is kept in units of the block's own scale
// times a power of two (near the largest scale so far), and that power is taken off the exponent of
// the probabilities: one factor an output and block where scales differ, none where they do not,
// and probabilities are rounded as if there were no scales.
//
// Parallelisation: as flash_attention_sm90.cu (one persistent block an SM, tiles of 64 kConsumers
// queries of one head, each warpgroup's softmax under its own second product and the others'
// products), but for V: products of 8 bits take both operands with K innermost, so three warps of
// warpgroup 0 transpose V in shared memory, one block ahead (Transposer); its first warp loads.
//
// Shared memory: Q (64 rows a consumer), K, V and V transposed (two stages of kBlockN keys each),
// mbarriers, a ring of tile descriptions. Rows of kPanelColumns (V transposed: kPanelKeys) bytes,
// in the swizzle of as many; head_dim is filled up with zeros by the TMA.
//
//   flash_attention_fp8_sm90_e4m3_hdim{N}_{full|causal}          scales of tensors or heads
//   flash_attention_fp8_sm90_e4m3_hdim{N}_{full|causal}_long     the same, for more keys
//   flash_attention_fp8_sm90_e4m3_hdim{N}_{full|causal}_blocks   k's or v's of blocks
//   flash_attention_fp8_sm90_e4m3_hdim{N}_any                    causal or not, by keys_ahead
// head_dim is any multiple of 16 up to N. Tensor maps of four dimensions, innermost first:
// head_dim, tokens, heads, batch (1 where varlen), of Q head_dim, heads, tokens, batch; boxes of
// kPanelColumns columns by pack_heads heads and pack_tokens tokens (Q, up to 64 rows) or kBlockN
// rows (K, V), in their swizzle, zeros outside.
// Sources: Shah et al., "FlashAttention-3", 2024; PTX ISA 8.7 (wgmma, ldmatrix, stmatrix).
//
// kernel_hub: allow-local-memory: at most 128 bytes, between tiles or in the warp that loads

#include "attention/fp8/consumer.cuh"
#include "attention/fp8/producer.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"

namespace kernel_hub::attention::fp8 {
template <class C>
__device__ __forceinline__ void flash_attention(const Parameters& p) {
    __shared__ __align__(8) uint64_t barriers[Shared<C>::kCount];
    __shared__ __align__(16) Tile tiles[kTileSlots];
    __shared__ __align__(8) BlockScales block_scales[C::kStages];
    Shared<C> shared;
    shared.q = (shared_address(dynamic_shared()) + 1023) / 1024 * 1024;
    shared.k = shared.q + C::kConsumers * C::kQBytes;
    shared.v = shared.k + C::kStages * C::kKVBytes;
    shared.vt = shared.v + C::kStages * C::kKVBytes;
    shared.barriers = shared_address(barriers);
    shared.tiles = shared_address(tiles);
    shared.block_scales = shared_address(block_scales);

    if (threadIdx.x == 0) {
        tma_prefetch_map(p.q);
        tma_prefetch_map(p.k);
        tma_prefetch_map(p.v);
        shared.init_barriers();
    }
    __syncthreads();

    const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        release_registers<C::kProducerRegisters>();
        const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);
        if (warp > 0) {
            const int lane_idx = threadIdx.x % 32;
            Transposer<C> transposer{p, shared, warp - 1, lane_idx};
            transposer.run();
            if (C::kMask != Mask::kFull || p.has_foreign_rows || p.cu_seqlens_q) {
                write_empty_tiles<C>(p, threadIdx.x - 32);
            }
        } else if (threadIdx.x == 0) {
            Loader<C> loader{p, shared};
            loader.run();
        }
    } else {
        acquire_registers<C::kConsumerRegisters>();
        Consumer<C> consumer(p, shared, warpgroup - 1);
        consumer.run();
    }
}

#define EXPORT_FLASH_ATTENTION_FP8(HEAD_DIM, VARIANT, MASK, SCALES, CONSUMERS, BLOCK_N)        \
    DESCRIBED(                                                                                 \
        flash_attention_fp8_sm90_e4m3_hdim##HEAD_DIM##_##VARIANT,                              \
        "x: as many blocks as multiprocessors, or as tiles of block_m queries",                \
        (facts_of<Config<HEAD_DIM, CONSUMERS, BLOCK_N, Mask::MASK, Scales::SCALES>>()),        \
        extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)                 \
        flash_attention_fp8_sm90_e4m3_hdim##HEAD_DIM##_##VARIANT(                              \
            void* out, float* lse, int* flag, const __grid_constant__ CUtensorMap q,           \
            const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v,      \
            const float* q_scale, const float* k_scale, const float* v_scale,                  \
            const int* cu_seqlens_q, const int* cu_seqlens_k, const int* cache_seqlens,        \
            int* tile_counter, int64_t out_batch_stride, int64_t out_token_stride,             \
            int64_t out_head_stride, int64_t lse_batch_stride, int64_t lse_head_stride,        \
            int64_t q_scale_batch_stride, int64_t q_scale_head_stride,                         \
            int64_t q_scale_block_stride, int64_t k_scale_batch_stride,                        \
            int64_t k_scale_head_stride, int64_t k_scale_block_stride,                         \
            int64_t v_scale_batch_stride, int64_t v_scale_head_stride,                         \
            int64_t v_scale_block_stride, int batch_size, int num_packs, int head_dim,         \
            int seqlen_q, int seqlen_k, int total_q, int total_k, int heads_per_kv,            \
            int heads_per_q_scale, int packs_per_group, int has_foreign_rows, int is_out_fp16, \
            float softmax_scale, int keys_ahead, int pack_heads, int pack_tokens,              \
            int pack_reciprocal, int heads_alike, int packs_alike, int tiles_a_pack) {         \
            using C = Config<HEAD_DIM, CONSUMERS, BLOCK_N, Mask::MASK, Scales::SCALES>;        \
            flash_attention<C>({.out = out,                                                    \
                                .lse = lse,                                                    \
                                .flag = flag,                                                  \
                                .q = &q,                                                       \
                                .k = &k,                                                       \
                                .v = &v,                                                       \
                                .q_scale = q_scale,                                            \
                                .k_scale = k_scale,                                            \
                                .v_scale = v_scale,                                            \
                                .cu_seqlens_q = cu_seqlens_q,                                  \
                                .cu_seqlens_k = cu_seqlens_k,                                  \
                                .cache_seqlens = cache_seqlens,                                \
                                .tile_counter = tile_counter,                                  \
                                .out_batch_stride = out_batch_stride,                          \
                                .out_token_stride = out_token_stride,                          \
                                .out_head_stride = out_head_stride,                            \
                                .lse_batch_stride = lse_batch_stride,                          \
                                .lse_head_stride = lse_head_stride,                            \
                                .q_scale_batch_stride = q_scale_batch_stride,                  \
                                .q_scale_head_stride = q_scale_head_stride,                    \
                                .q_scale_block_stride = q_scale_block_stride,                  \
                                .k_scale_batch_stride = k_scale_batch_stride,                  \
                                .k_scale_head_stride = k_scale_head_stride,                    \
                                .k_scale_block_stride = k_scale_block_stride,                  \
                                .v_scale_batch_stride = v_scale_batch_stride,                  \
                                .v_scale_head_stride = v_scale_head_stride,                    \
                                .v_scale_block_stride = v_scale_block_stride,                  \
                                .batch_size = batch_size,                                      \
                                .num_packs = num_packs,                                        \
                                .head_dim = head_dim,                                          \
                                .seqlen_q = seqlen_q,                                          \
                                .seqlen_k = seqlen_k,                                          \
                                .total_q = total_q,                                            \
                                .total_k = total_k,                                            \
                                .heads_per_kv = heads_per_kv,                                  \
                                .heads_per_q_scale = heads_per_q_scale,                        \
                                .packs_per_group = packs_per_group,                            \
                                .has_foreign_rows = has_foreign_rows,                          \
                                .is_out_fp16 = is_out_fp16,                                    \
                                .softmax_scale = softmax_scale,                                \
                                .keys_ahead = keys_ahead,                                      \
                                .pack_heads = pack_heads,                                      \
                                .pack_tokens = pack_tokens,                                    \
                                .pack_reciprocal = pack_reciprocal,                            \
                                .heads_alike = heads_alike,                                    \
                                .packs_alike = packs_alike,                                    \
                                .tiles_a_pack = tiles_a_pack});                                \
        })

#define EXPORT_MASKS(HEAD_DIM, SUFFIX, SCALES, CONSUMERS, BLOCK_N)                        \
    EXPORT_FLASH_ATTENTION_FP8(HEAD_DIM, full##SUFFIX, kFull, SCALES, CONSUMERS, BLOCK_N) \
    EXPORT_FLASH_ATTENTION_FP8(HEAD_DIM, causal##SUFFIX, kCausal, SCALES, CONSUMERS, BLOCK_N)

EXPORT_MASKS(64, , kHeads, 3, 128)
EXPORT_MASKS(64, _long, kHeads, 3, 160)
EXPORT_MASKS(64, _blocks, kBlocks, 2, 128)
EXPORT_MASKS(96, , kHeads, 3, 128)
EXPORT_MASKS(128, , kHeads, 2, 128)
EXPORT_MASKS(128, _long, kHeads, 3, 96)
EXPORT_MASKS(128, _blocks, kBlocks, 2, 128)
EXPORT_FLASH_ATTENTION_FP8(160, any, kAny, kHeads, 2, 128)
EXPORT_FLASH_ATTENTION_FP8(192, full, kFull, kHeads, 2, 160)
EXPORT_FLASH_ATTENTION_FP8(192, causal, kCausal, kHeads, 2, 128)
EXPORT_FLASH_ATTENTION_FP8(224, any, kAny, kHeads, 2, 128)
EXPORT_MASKS(256, , kHeads, 2, 96)
EXPORT_MASKS(256, _blocks, kBlocks, 2, 64)

}  // namespace kernel_hub::attention::fp8
