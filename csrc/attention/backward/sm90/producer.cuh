// flash_attention_backward_sm90.cu: the warp that loads, and the warps that add up dq.
#pragma once

#include "attention/backward/sm90/plan.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/ptx.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"

namespace kernel_hub::attention::backward::sm90 {

// Everything a block reads, in the order the consumers need it. All lanes of one warp.
template <class C>
struct BackwardProducer {
    using T = typename C::T;
    const BackwardParameters<T>& p;
    const BackwardShared<C>& shared;
    int lane_idx;
    uint32_t foreign_parity = 0;

    // A tile of kRows rows, of which `num_rows` are the sequence's and `row_values` (or null) holds
    // a number each; the rest is cleared where it may hold what is not the sequence's: 0 times a
    // NaN there is a NaN.
    template <int kRows>
    __device__ __forceinline__ void load(uint32_t target, const CUtensorMap* map, uint32_t full,
                                         int row, int head_idx, int batch_idx, int num_rows,
                                         uint32_t values_target, const float* row_values) {
        constexpr int kPanel = kRows * kPanelBytes;
        const bool has_foreign = num_rows < kRows;
        if (lane_idx == 0) {
            const uint32_t bytes = C::kPanels * kPanel;
            const uint32_t counted = has_foreign ? shared.foreign() : full;
            mbarrier_arrive_expect_tx(counted, bytes + (row_values ? 4 * kRows : 0));
#pragma unroll
            for (int panel = 0; panel < C::kPanels; ++panel) {
                tma_load_4d(target + panel * kPanel, map, counted, panel * kPanelColumns, row,
                            head_idx, batch_idx);
            }
            if (row_values) {
                bulk_load(values_target, row_values, 4 * kRows, counted);
            }
        }
        if (has_foreign) {
            mbarrier_wait(shared.foreign(), foreign_parity);
            foreign_parity ^= 1;
#pragma unroll 1
            for (int panel = 0; panel < C::kPanels; ++panel) {
#pragma unroll 1
                for (int i = 8 * max(num_rows, 0) + lane_idx; i < 8 * kRows; i += 32) {
                    st_shared(target + panel * kPanel + 16 * i, 0.0f, 0.0f, 0.0f, 0.0f);
                }
            }
            fence_proxy_async();
            __syncwarp();
            mbarrier_arrive_if(full, lane_idx == 0);
        }
    }

    __device__ __forceinline__ void run(const BackwardWork& work) {
        const bool is_varlen_q = p.cu_seqlens_q != nullptr;
        const bool is_varlen_k = p.cu_seqlens_k != nullptr;
        const int keys = is_varlen_k || p.cache_seqlens ? work.window.num_keys : C::kBlockN;
        const int kv_head = work.first_head / p.group;
        const int kv_batch = is_varlen_k ? 0 : work.batch_idx;
        const int q_batch = is_varlen_q ? 0 : work.batch_idx;
        int stage = 0, dout_stage = 0;
        uint32_t parity = 1, dout_parity = 1;
        bool is_first = true;
#pragma unroll 1
        for (int i = 0; i < p.heads_per_block; ++i) {
            const int head_idx = work.first_head + i;
#pragma unroll 1
            for (int m = work.first_m; m < work.end_m; ++m) {
                const int first_query = m * C::kBlockM;
                const int row = work.first_row + first_query;
                const int rows = is_varlen_q ? work.seqlen_q - first_query : C::kBlockM;
                const int64_t values =
                    (head_idx * p.num_blocks_q + work.first_block + m) * C::kBlockM;
                if (is_first) {
                    load<C::kBlockN>(shared.base + C::kK, p.k, shared.k_full(), work.first_key_row,
                                     kv_head, kv_batch, keys, 0, nullptr);
                }
                mbarrier_wait(shared.q_empty(stage), parity);
                load<C::kBlockM>(shared.base + C::kQ + stage * C::kQBytes, p.q,
                                 shared.q_full(stage), row, head_idx, q_batch, rows,
                                 shared.base + C::kLse + stage * C::kRowBytes, p.lse + values);
                if (is_first) {
                    load<C::kBlockN>(shared.base + C::kV, p.v, shared.v_full(), work.first_key_row,
                                     kv_head, kv_batch, keys, 0, nullptr);
                    is_first = false;
                }
                mbarrier_wait(shared.dout_empty(dout_stage), dout_parity);
                load<C::kBlockM>(shared.base + C::kDout + dout_stage * C::kQBytes, p.dout,
                                 shared.dout_full(dout_stage), row, head_idx, q_batch, rows,
                                 shared.base + C::kDelta + dout_stage * C::kRowBytes,
                                 p.delta + values);
                if (++stage == C::kStages) {
                    stage = 0;
                    parity ^= 1;
                }
                if (++dout_stage == C::kDoutStages) {
                    dout_stage = 0;
                    dout_parity ^= 1;
                }
            }
        }
    }
};

// Adds a consumer's parts of dq to their sums, block by block, in its turn where there are turns.
// All lanes of one warp.
template <class C>
__device__ __forceinline__ void add_dq(const BackwardParameters<typename C::T>& p,
                                       const BackwardShared<C>& shared, const BackwardWork& work,
                                       int consumer) {
    using Shared = BackwardShared<C>;
    const bool is_first_lane = threadIdx.x % 32 == 0;
    const int num_parts = consumer == 0 ? C::kFirstParts : C::kDqParts - C::kFirstParts;
    int64_t block = work.first_head * p.num_blocks_q + work.first_block + work.first_m;
    int m = work.first_m;
#pragma unroll 1
    for (int left = work.num_iterations; left > 0; --left) {
#pragma unroll 1
        for (int part = 0; part < num_parts; ++part) {
            named_barrier_sync(Shared::kDqBarrier + consumer, Shared::kDqThreads);
            if (is_first_lane) {
                int* turn = p.turns + 2 * block + consumer;
                if (p.turns && part == 0) {
                    // How many blocks of higher keys these queries see.
                    const int last_query = (m + 1) * C::kBlockM - 1;
                    const int earlier = min(
                        ceil_div(work.window.num_keys, C::kBlockN) - 1,
                        floor_div(last_query - work.window.start + work.window.span, C::kBlockN));
                    // NOTE: not `!=`: sequences whose cu_seqlens overlap add to one turn, and may
                    // pass it.
                    while (ld_acquire(turn) < earlier) {
                    }
                    fence_proxy_async_global();
                }
                const int panel = C::panel_of(consumer * C::kFirstParts + part);
                bulk_reduce_add(
                    p.dq_sums + block * (C::kBlockM * C::kHeadDim) + panel * (C::kDqBytes / 4),
                    shared.base + C::kDq + consumer * C::kDqBytes, C::part_bytes(panel));
                tma_store_commit();
                tma_store_wait<0>();
                mbarrier_arrive(shared.dq_empty(consumer));
                if (p.turns && part + 1 == num_parts) {
                    tma_store_wait_all<0>();
                    fence_proxy_async_global();
                    __threadfence();
                    atomicAdd(turn, 1);
                }
            }
            __syncwarp();
        }
        const bool is_last_of_head = m + 1 == work.end_m;
        block += is_last_of_head ? p.num_blocks_q - (m - work.first_m) : 1;
        m = is_last_of_head ? work.first_m : m + 1;
    }
}

}  // namespace kernel_hub::attention::backward::sm90
