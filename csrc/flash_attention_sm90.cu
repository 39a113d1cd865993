// Attention forward on Hopper: out = softmax(softmax_scale * q k^T, masked) v.
//
// For query i of a sequence and key j, visible where
//   i + seqlen_k - seqlen_q - window_left <= j <= i + seqlen_k - seqlen_q + window_right
// (-1: no bound), with s = softmax_scale q_i k_j:
//   out_i = sum_j exp(s_ij) v_j / sum_j exp(s_ij)      lse_i = ln sum_j exp(s_ij)
// fp32 sums; a row that sees nothing gives zeros and -inf.
//
// Parallelisation: one persistent block an SM takes tiles of kBlockM = 64 kConsumers queries of one
// head. Warpgroup 0 gives its registers away; one of its threads finds the tiles and keeps the TMA
// busy. Each other warpgroup owns 64 query rows and walks the keys from right to left:
//   issue S = Q K(next)^T; issue O += P V(this); softmax of S while the second product runs
// "Next" passes the end of a tile: the first scores of the following tile are computed under the
// last product of this one, so that the tensor cores do not wait for a tile's beginning or end.
// The warpgroups issue in turns (named barriers), so that one's softmax lies under the others'
// products.
//
// Shared memory: Q (64 rows for each consumer, kQStages deep), K and V (kBlockN rows, kStages
// deep), mbarriers, a ring of tile descriptions. Rows of 64 columns (128 bytes) in the TMA's
// 128-byte swizzle; head_dim is filled up with zeros by the TMA.
//
// Tiles that see no keys are written by the three other warps of warpgroup 0.
// Tiles are handed out by a counter in device memory, which the last block sets back to zero.
// Causal: the tiles with the most keys first, within groups of heads whose K and V stay in the L2.
//
//   flash_attention_sm90_{dtype}_hdim{N}_full     no mask but the sequences' ends
//   ..._causal                                    window_right only (0: causal)
//   ..._window                                    both sides, either of them open
// head_dim is any multiple of 8 up to N. Strided dense or varlen by tensor maps of four dimensions,
// innermost first: head_dim, tokens, heads, batch (1 where varlen); boxes of 64 columns by 64 rows
// (Q) or kBlockN rows (K, V), 128-byte swizzle, zeros outside.
// Sources: Shah et al., "FlashAttention-3", 2024; Dao, "FlashAttention-2", 2023.
//
// kernel_hub: allow-local-memory: at most 24 bytes, between tiles or in the warpgroup that loads

#include "kernel_hub/flash_attention_sm90_consumer.cuh"
#include "kernel_hub/flash_attention_sm90_producer.cuh"

namespace kernel_hub {

template <class C>
__device__ __forceinline__ void flash_attention_sm90(const Parameters& p) {
    __shared__ __align__(8) uint64_t barriers[Shared<C>::kCount];
    __shared__ __align__(16) Tile tiles[kTileSlots];
    Shared<C> shared;
    shared.q = (shared_address(dynamic_shared()) + 1023) / 1024 * 1024;
    shared.k = shared.q + C::kQStages * C::kConsumers * C::kQBytes;
    shared.v = shared.k + C::kStages * C::kKVBytes;
    shared.barriers = shared_address(barriers);
    shared.tiles = tiles;
    shared.tiles_address = shared_address(tiles);

    if (threadIdx.x == 0) {
        tma_prefetch_map(p.q);
        tma_prefetch_map(p.k);
        tma_prefetch_map(p.v);
        for (int i = 0; i < C::kQStages * C::kConsumers; ++i) {
            mbarrier_init(shared.barrier(Shared<C>::kQFull + i), 1);
            mbarrier_init(shared.barrier(Shared<C>::kQEmpty + i), 1);
        }
        for (int i = 0; i < C::kStages; ++i) {
            mbarrier_init(shared.k_full(i), 1);
            mbarrier_init(shared.k_empty(i), C::kConsumers);
            mbarrier_init(shared.v_full(i), 1);
            mbarrier_init(shared.v_empty(i), C::kConsumers);
        }
        for (int i = 0; i < kTileSlots; ++i) {
            mbarrier_init(shared.tile_full(i), 1);
            mbarrier_init(shared.tile_empty(i), 4 * C::kConsumers);
        }
        fence_mbarrier_init();
    }
    __syncthreads();

    const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        release_registers<C::kProducerRegisters>();
        if (threadIdx.x == 0) {
            Producer<C> producer{p, shared};
            producer.run();
        } else if (threadIdx.x >= 32) {
            if (C::kMask != Mask::kFull || p.has_foreign_rows) {
                write_empty_tiles<C>(p);
            }
        }
    } else {
        acquire_registers<C::kConsumerRegisters>();
        Consumer<C> consumer(p, shared, warpgroup - 1);
        consumer.run();
    }
}

}  // namespace kernel_hub

#define EXPORT_FLASH_ATTENTION(DTYPE, T, HEAD_DIM, VARIANT, MASK, CONSUMERS, BLOCK_N)              \
    extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)                         \
    flash_attention_sm90_##DTYPE##_hdim##HEAD_DIM##_##VARIANT(                                     \
        T* out, float* lse, const __grid_constant__ CUtensorMap q,                                 \
        const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v,              \
        const int* cu_seqlens_q, const int* cu_seqlens_k, const int* cache_seqlens,                \
        int* tile_counter, int64_t out_batch_stride, int64_t out_token_stride,                     \
        int64_t out_head_stride, int64_t lse_batch_stride, int64_t lse_head_stride,                \
        int batch_size, int num_heads, int num_kv_heads, int head_dim, int seqlen_q, int seqlen_k, \
        int window_left, int window_right, int heads_a_group, int has_foreign_rows,                \
        float softmax_scale) {                                                                     \
        using C = kernel_hub::Config<T, HEAD_DIM, CONSUMERS, BLOCK_N, kernel_hub::Mask::MASK>;     \
        kernel_hub::flash_attention_sm90<C>({out,                                                  \
                                             lse,                                                  \
                                             &q,                                                   \
                                             &k,                                                   \
                                             &v,                                                   \
                                             cu_seqlens_q,                                         \
                                             cu_seqlens_k,                                         \
                                             cache_seqlens,                                        \
                                             tile_counter,                                         \
                                             out_batch_stride,                                     \
                                             out_token_stride,                                     \
                                             out_head_stride,                                      \
                                             lse_batch_stride,                                     \
                                             lse_head_stride,                                      \
                                             batch_size,                                           \
                                             num_heads,                                            \
                                             num_kv_heads,                                         \
                                             head_dim,                                             \
                                             seqlen_q,                                             \
                                             seqlen_k,                                             \
                                             window_left,                                          \
                                             window_right,                                         \
                                             heads_a_group,                                        \
                                             has_foreign_rows,                                     \
                                             softmax_scale});                                      \
    }

#define EXPORT_MASKS(DTYPE, T, HEAD_DIM, CONSUMERS, BLOCK_N)                        \
    EXPORT_FLASH_ATTENTION(DTYPE, T, HEAD_DIM, full, kFull, CONSUMERS, BLOCK_N)     \
    EXPORT_FLASH_ATTENTION(DTYPE, T, HEAD_DIM, causal, kCausal, CONSUMERS, BLOCK_N) \
    EXPORT_FLASH_ATTENTION(DTYPE, T, HEAD_DIM, window, kWindow, CONSUMERS, BLOCK_N)

#define EXPORT_HEAD_DIMS(DTYPE, T)      \
    EXPORT_MASKS(DTYPE, T, 64, 3, 128)  \
    EXPORT_MASKS(DTYPE, T, 96, 2, 128)  \
    EXPORT_MASKS(DTYPE, T, 128, 2, 128) \
    EXPORT_MASKS(DTYPE, T, 192, 2, 112) \
    EXPORT_MASKS(DTYPE, T, 256, 2, 80)

EXPORT_HEAD_DIMS(fp16, __half)
EXPORT_HEAD_DIMS(bf16, __nv_bfloat16)
