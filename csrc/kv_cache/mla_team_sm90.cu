// Decode steps of multi-head latent attention on Hopper where there are few items: what
// mla_decode_sm90.cu computes, an item a cluster, whose blocks have a part of its tokens each and
// merge them through each other's shared memory; so there is neither a launch behind nor a partial.
//
// A cluster: num_parts parts of 1 or 2 blocks of 64 rows; those of a part share tokens as there.
#include "kernel_hub/cluster.cuh"
#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kv_cache/decode/sm90/latent_output.cuh"
#include "kv_cache/decode/sm90/latent_team.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

template <typename T>
__device__ __forceinline__ void mla_team_sm90(const LatentArgs<T>& args, const CUtensorMap* map,
                                              int box_rows) {
    using C = LatentStages;
    const int blocks = (args.seqlen_q * args.num_heads + C::kRows - 1) / C::kRows;
    LatentShared shared = {shared_address(dynamic_shared()), 2 - blocks % 2};
    const int at = cluster_rank();
    shared.rank = at % shared.num_blocks, shared.first = at - shared.rank;
    const LatentTeam team = LatentTeam::of(args, shared);
    if (threadIdx.x == 0) {
        tma_prefetch_map(map);
        for (int i = 0; i < C::kFulls + C::kEmpties; ++i) {
            mbarrier_init(shared.full(0, 0) + 8 * i, i < C::kFulls ? 1 : shared.num_blocks);
        }
        fence_mbarrier_init();
    }
    prefetch_tables(args);
    __syncthreads();
    cluster_arrive_relaxed();
    cluster_wait();
    wait_for_launch_before();
    allow_next_launch();
    const int warp_idx = warp_index();
    // NOTE: past the L1, which may keep what was there before the launch before had ended.
    const LatentPart part =
        team.part_of(args, *static_cast<const volatile int*>(args.cache_seqlens + team.batch_idx));
    if (warp_idx >= C::kLoaders) {
        release_registers<C::kProducerRegisters>();
        if (warp_idx < C::kLoaders + 2) {
            LatentProducer<T> producer = {args, map, box_rows, shared, warp_idx - C::kLoaders,
                                          0,    true};
            producer.load(part);
        } else if (warp_idx == C::kFinder) {
            report_if(args.flag, part.is_outside && threadIdx.x % 32 == 0, kLengthsOutside);
            prefetch_queries(args, part);
        }
        cluster_arrive();
        cluster_wait();
    } else {
        acquire_registers<C::kConsumerRegisters>();
        if (warp_idx < 4) {
            LatentConsumer<T, 0, true>(args, shared, 0).attend(part);
        } else {
            LatentConsumer<T, 1, true>(args, shared, 0).attend(part);
        }
        cluster_arrive();
        cluster_wait();
        merge_team(args, shared, team);
    }
    // What another block reads, or says of its stages, does before this one ends.
    cluster_arrive_relaxed();
    cluster_wait();
}

#define EXPORT_MLA_TEAM(DTYPE, T)                                                             \
    DESCRIBED(                                                                                \
        mla_team_sm90_##DTYPE, "x: an item a cluster, its parts of 1 or 2 blocks each",       \
        (.threads = LatentStages::kThreads, .shared_bytes = LatentStages::kSharedBytes,       \
         .blocks_per_sm = 1, .block_m = LatentStages::kRows, .block_n = LatentStages::kTile), \
        extern "C" __global__ void                                                            \
        __launch_bounds__(LatentStages::kThreads,                                             \
                          1) mla_team_sm90_##DTYPE(LATENT_MAPPED_PARAMS(T)) {                 \
            const LatentArgs<T> args = {LATENT_ARGUMENTS, tickets};                           \
            mla_team_sm90<T>(args, &kv_cache, box_rows);                                      \
        })

// {op}_{dtype}
EXPORT_MLA_TEAM(fp16, __half)
EXPORT_MLA_TEAM(bf16, __nv_bfloat16)

}  // namespace kernel_hub::kv_cache::decode::sm90
