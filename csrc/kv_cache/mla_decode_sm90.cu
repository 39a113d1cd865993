// Decode steps of multi-head latent attention on Hopper: what mla_decode.cu computes, by wgmma, of
// caches that are contiguous or in pages of a multiple of 8 tokens.
//
// A block is 64 rows (token num_heads + head), and a cluster of two 128, whose tokens each brings
// half of to both: a read of the L2 less, whose rate is what binds there. A tile of the cache, 64
// tokens by 576, is loaded once and is key and value. A block a multiprocessor takes one part of
// the work after the other, while its producer already loads for the next. Parts are equal places
// of the line of all items (latent_line.cuh), and the block that has the end of an item merges it
// (latent_merge.cuh); or where there are few items for the blocks, or num_splits is given, what
// decode_attention.cu cuts, whose second kernel merges them (latent_shares.cuh). Where there are
// few and short ones, mla_team_sm90.cu has a cluster for each.
//
// Parallelisation: a warp finds the parts, the first one ahead of the end of the launch before; one
// brings their queries into the L2; two load by TMA, a stage each, and bring the next tile into the
// L2 meanwhile; two warpgroups compute. Tiles come in pairs: warpgroup 0 has the scores of the even
// tile, warpgroup 1 those of the odd; each has half of the output's columns, 64 x 256 in 128
// registers, of both tiles, so neither computes anything twice. The sides take turns (seesaw): the
// odd tile's scores come after the even one's, the even tile's product before the odd one's on both
// sides, so that while one warpgroup exponentiates, the other's products run.
//
// Shared memory: two stages of a tile, the queries (73,728 bytes each, panels of 64 columns,
// 128-byte swizzle), maxima and sums of the rows. Probabilities lie over their tile's rope panel,
// which is key alone. A stage is released in halves, those of the output's columns, and filled
// panel by panel: the next scores begin with the panel that is there first.
//
// Up to 32 rows need few products and all of the memory's rate: one warpgroup, whose products are
// transposed (tokens by rows, the output's columns by rows), over a ring of panels that are
// released one by one (latent_few.cuh); a block is 16 or 32 rows.
//
// Variants: dtype; rows of a block where they are few. Tensor map of the cache: 576, tokens of a
// page, 1, pages; boxes of 64 columns by box_rows, which divides the page and 64. Sources:
// DeepSeek-AI, "DeepSeek-V2", 2024, 2.1; the exchange of probabilities between two warpgroups:
// DeepSeek-AI, "A deep dive into the new FlashMLA kernel", 2025.

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kv_cache/decode/sm90/latent_few.cuh"
#include "kv_cache/decode/sm90/latent_output.cuh"
#include "kv_cache/decode/sm90/latent_parts.cuh"
#include "kv_cache/decode/sm90/latent_shared.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

template <typename T>
__device__ __forceinline__ void mla_decode_sm90(const LatentArgs<T>& args, const CUtensorMap* map,
                                                int box_rows) {
    using C = LatentStages;
    const LatentShared shared = LatentShared::here();
    LatentParts parts = {C::kParts, 0};
    if (threadIdx.x == 0) {
        tma_prefetch_map(map);
        for (int i = 0; i < C::kFulls + C::kEmpties; ++i) {
            mbarrier_init(shared.full(0, 0) + 8 * i, i < C::kFulls ? 1 : shared.num_blocks);
        }
        parts.init(8 + 3);  // the warps that compute, load and prefetch
        fence_mbarrier_init();
    }
    prefetch_tables(args);
    __syncthreads();
    cluster_arrive_relaxed();
    cluster_wait();
    LatentPart part;
    const int warp_idx = warp_index();
    if (warp_idx != C::kFinder) {
        // NOTE: in this order: what may start next reads cache_seqlens before it waits.
        wait_for_launch_before();
        allow_next_launch();
    }
    if (warp_idx >= C::kLoaders) {
        release_registers<C::kProducerRegisters>();
        if (warp_idx < C::kLoaders + 2) {
            LatentProducer<T> producer = {args, map, box_rows, shared, warp_idx - C::kLoaders,
                                          0,    true};
            while (parts.take(part)) {
                producer.load(part);
            }
        } else if (warp_idx == C::kFinder) {
            find_parts<C::kRows, 2 * C::kTile>(args, parts, shared.num_blocks, shared.rank);
        } else {
            while (parts.take(part)) {
                prefetch_queries(args, part);
            }
        }
    } else {
        acquire_registers<C::kConsumerRegisters>();
        uint32_t parities = 0;
        while (parts.take(part)) {
            if (warp_idx < 4) {
                LatentConsumer<T, 0> consumer(args, shared, parities);
                parities = consumer.attend(part);
            } else {
                LatentConsumer<T, 1> consumer(args, shared, parities);
                parities = consumer.attend(part);
            }
        }
    }
    // What another block brings, or says of its stages, arrives before this one ends.
    cluster_arrive_relaxed();
    cluster_wait();
}

template <typename T, int kRows>
__device__ __forceinline__ void mla_decode_few_sm90(const LatentArgs<T>& args,
                                                    const CUtensorMap* map, int box_rows) {
    using Ring = LatentRing<kRows>;
    const Ring ring = {shared_address(dynamic_shared()), 0, 0};
    LatentParts parts = {Ring::kParts, 0};
    if (threadIdx.x == 0) {
        tma_prefetch_map(map);
        for (int i = 0; i < 2 * Ring::kSlots; ++i) {
            mbarrier_init(ring.full(i), 1);
        }
        parts.init(4 + 1);  // the warps that compute and load
        fence_mbarrier_init();
    }
    prefetch_tables(args);
    __syncthreads();
    LatentPart part;
    if (warp_index() != Ring::kFinder) {
        // NOTE: in this order: what may start next reads cache_seqlens before it waits.
        wait_for_launch_before();
        allow_next_launch();
    }
    if (warp_index() < Ring::kLoader) {
        LatentRingConsumer<T, kRows> consumer(args, ring);
        while (parts.take(part)) {
            consumer.attend(part);
        }
    } else if (warp_index() == Ring::kLoader) {
        LatentRingProducer<T, kRows> producer = {args, map, box_rows, ring};
        while (parts.take(part)) {
            producer.load(part);
        }
    } else {
        find_parts<kRows, Ring::kTile>(args, parts, 1, 0);
    }
}

#define EXPORT_MLA_DECODE(NAME, T, FACTS, BODY)                                               \
    DESCRIBED(                                                                                \
        NAME, "x: at most a block a multiprocessor, num_workers parts of a cluster each",     \
        (.threads = FACTS::kThreads, .shared_bytes = FACTS::kSharedBytes, .blocks_per_sm = 1, \
         .block_m = FACTS::kRows, .block_n = FACTS::kTile),                                   \
        extern "C" __global__ void                                                            \
        __launch_bounds__(FACTS::kThreads, 1) NAME(LATENT_MAPPED_PARAMS(T)) {                 \
            const LatentArgs<T> args = {LATENT_ARGUMENTS, tickets};                           \
            BODY(args, &kv_cache, box_rows);                                                  \
        })
#define EXPORT_EVERY_ROWS(DTYPE, T)                                              \
    EXPORT_MLA_DECODE(mla_decode_sm90_##DTYPE, T, LatentStages, mla_decode_sm90) \
    EXPORT_MLA_DECODE(mla_decode_sm90_##DTYPE##_rows16, T, LatentRing<16>,       \
                      (mla_decode_few_sm90<T, 16>))                              \
    EXPORT_MLA_DECODE(mla_decode_sm90_##DTYPE##_rows32, T, LatentRing<32>,       \
                      (mla_decode_few_sm90<T, 32>))

// {op}_{dtype}, {op}_{dtype}_rows{R}
EXPORT_EVERY_ROWS(fp16, __half)
EXPORT_EVERY_ROWS(bf16, __nv_bfloat16)

}  // namespace kernel_hub::kv_cache::decode::sm90
