// Decode steps of multi-head latent attention on Hopper: what mla_decode.cu computes, by wgmma, of
// caches that are contiguous or in pages of a multiple of 8 tokens.
//
// A block is 64 rows (token num_heads + head); a tile of the cache, 64 tokens by 576, is loaded
// once and is key and value. A block a multiprocessor takes one part of the work (see
// decode_attention.cu, whose second kernel merges parts) after the other, while its producer
// already loads for the next.
//
// Parallelisation: a warp loads by TMA, two warpgroups compute. Tiles come in pairs: warpgroup 0
// has the scores of the even tile, warpgroup 1 those of the odd; each has half of the output's
// columns, 64 x 256 in 128 registers, of both tiles, so neither computes anything twice. An even
// tile's probabilities go to the other warpgroup multiplied by what the odd tile's maximum takes,
// an odd one's as they are: while one warpgroup exponentiates, the other's products run.
//
// Shared memory: two stages of a tile, the queries (73,728 bytes each, panels of 64 columns,
// 128-byte swizzle), maxima and sums of the rows. Probabilities lie over their tile's rope panel,
// which is key alone. A stage is released in halves, those of the output's columns, and filled
// panel by panel: the next scores begin with the panel that is there first.
//
// Variants: dtype. Tensor map of the cache: 576, tokens of a page, 1, pages; boxes of 64 columns by
// box_rows, which divides the page and 64.
// Sources: DeepSeek-AI, "DeepSeek-V2", 2024, 2.1; the exchange of probabilities between two
// warpgroups: DeepSeek-AI, "A deep dive into the new FlashMLA kernel", 2025.

#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kv_cache/decode/sm90/latent_consumer.cuh"
#include "kv_cache/decode/sm90/latent_shared.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

// Calls `body` with each part of the block.
template <typename T, typename Body>
__device__ __forceinline__ void for_each_part(const LatentArgs<T>& args, Body&& body) {
#pragma unroll 1
    for (int index = blockIdx.x; index < args.num_workers; index += gridDim.x) {
        const LatentPart part = find_part<LatentStages::kTile, LatentStages::kRows>(args, index);
        if (part.batch_idx >= 0) {
            body(part, index);
        }
    }
}

template <typename T>
__device__ __forceinline__ void mla_decode_sm90(const LatentArgs<T>& args, const CUtensorMap* map,
                                                int box_rows) {
    using C = LatentStages;
    const LatentShared shared = LatentShared::here();
    if (threadIdx.x == 0) {
        tma_prefetch_map(map);
        for (int i = 0; i < LatentStages::kFulls + LatentStages::kEmpties; ++i) {
            mbarrier_init(shared.full(0, 0) + 8 * i, 1);
        }
        fence_mbarrier_init();
    }
    // NOTE: in this order: what may start next reads cache_seqlens before it waits.
    wait_for_launch_before();
    allow_next_launch();
    __syncthreads();
    const int warp_idx = warp_index();
    if (warp_idx >= 8) {
        release_registers<C::kProducerRegisters>();
        if (warp_idx == 8) {
            LatentProducer<T> producer = {args, map, box_rows, shared, 0};
            for_each_part(args, [&](const LatentPart& part, int) {
                report_if(args.flag, part.is_outside && threadIdx.x % 32 == 0, kLengthsOutside);
                producer.load(part);
            });
        }
        return;
    }
    acquire_registers<C::kConsumerRegisters>();
    if (warp_idx < 4) {
        LatentConsumer<T, 0> consumer(args, shared);
        for_each_part(args,
                      [&](const LatentPart& part, int index) { consumer.attend(part, index); });
    } else {
        LatentConsumer<T, 1> consumer(args, shared);
        for_each_part(args,
                      [&](const LatentPart& part, int index) { consumer.attend(part, index); });
    }
}

#define EXPORT_MLA_DECODE(DTYPE, T)                                                               \
    DESCRIBED(                                                                                    \
        mla_decode_sm90_##DTYPE, "x: at most a block a multiprocessor, num_workers parts in all", \
        (.threads = LatentStages::kThreads, .shared_bytes = LatentStages::kSharedBytes,           \
         .blocks_per_sm = 1, .block_m = LatentStages::kRows, .block_n = LatentStages::kTile,      \
         .consumers = 2, .stages = 2),                                                            \
        extern "C" __global__ void __launch_bounds__(384, 1) mla_decode_sm90_##DTYPE(             \
            T* out, float* lse, float* partial_out, float* partial_lse, int* flag,                \
            const __grid_constant__ CUtensorMap kv_cache, const T* q, const int* cache_seqlens,   \
            const int* block_table, int64_t out_batch_stride, int64_t out_token_stride,           \
            int64_t out_head_stride, int64_t q_batch_stride, int64_t q_token_stride,              \
            int64_t q_head_stride, int64_t block_table_stride, int batch_size, int seqlen_q,      \
            int num_heads, int num_pages, int page_size, int max_tokens, int num_splits,          \
            int parallel, int num_workers, int box_rows, float softmax_scale) {                   \
            const LatentArgs<T> args = {LATENT_ARGUMENTS};                                        \
            mla_decode_sm90(args, &kv_cache, box_rows);                                           \
        })

// {op}_{dtype}
EXPORT_MLA_DECODE(fp16, __half)
EXPORT_MLA_DECODE(bf16, __nv_bfloat16)

}  // namespace kernel_hub::kv_cache::decode::sm90
