// flash_attention_backward_sm90.cu: the warp that loads, and the warps that add up dq.
#pragma once

#include "attention/backward/sm90/instructions.cuh"
#include "attention/backward/sm90/plan.cuh"
#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/ptx.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "kernel_hub/wgmma.cuh"

namespace kernel_hub::attention::backward::sm90 {

// Everything a block reads, in the order the consumers need it. All lanes of one warp.
template <class C>
struct BackwardProducer {
    using T = typename C::T;
    const BackwardParameters<T>& p;
    const BackwardShared<C>& shared;
    int lane_idx;
    uint32_t foreign_parity = 0;
    int num_loaded = 0;  // works with a query
    bool has_waited = false;

    // A tile of kRows rows, of which `num_rows` are the sequence's and `row_values` (or null) holds
    // a number each; the rest is cleared where it may hold what is not the sequence's: 0 times a
    // NaN there is a NaN.
    template <int kRows>
    __device__ __forceinline__ void load(uint32_t target, const CUtensorMap* map, uint32_t full,
                                         int row, int head_idx, int batch_idx, int num_rows,
                                         uint32_t values_target, const float* row_values,
                                         bool values_later = false) {
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
            if (row_values && !values_later) {
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

    // What the launch before makes: lse, delta, the zeros that dq is added to and the counter.
    __device__ __forceinline__ void wait_once() {
        if (!has_waited) {
            wait_for_launch_before();
            has_waited = true;
        }
    }

    // The works of the block, one after another. has_first: that is known; has_one: no more.
    __device__ __forceinline__ void run(bool has_first, bool has_one) {
        int at_iteration = 0;
#pragma unroll 1
        for (int nth = 0;; ++nth) {
            BackwardWork& work = shared.work(nth);
            if (nth > 0 || !has_first) {
                find(work, nth, at_iteration);
            }
            mbarrier_arrive_if(shared.work_full(nth), lane_idx == 0);
            if (work.num_iterations < 0) {
                break;
            }
            if (work.num_iterations > 0) {
                load_all(work);
            }
            if (has_one) {
                break;
            }
            at_iteration += work.num_iterations;
        }
        wait_once();
    }

    __device__ __forceinline__ void find(BackwardWork& work, int nth, int at_iteration) {
        const int num_works = p.works.count();
        const bool is_all = num_works <= static_cast<int>(gridDim.x);  // each block has one
        const bool has_turns = p.workspace.sums.has_turns;
        if (nth > 0 || p.cu_seqlens_k || (has_turns && !is_all)) {
            wait_once();  // for the order of sequences, and the counter
        }
        int index = nth == 0 ? blockIdx.x : num_works;
        // In turns no block has a work before it runs: those that run may wait for it.
        if (!is_all && (nth > 0 || has_turns)) {
            if (lane_idx == 0) {
                index = atomicAdd(p.workspace.taken, 1) + (has_turns ? 0 : keep(gridDim.x));
            }
            index = __shfl_sync(kAllLanes, index, 0);
        }
        if (nth > 1) {
            mbarrier_wait(shared.work_empty(nth), nth / 2 % 2 ^ 1);
        }
        Place place;
        const bool is_there =
            index < num_works && p.works.find(BackwardWork::template work_of<C>(p, index),
                                              keys_of(p, C::kBlockN), place);
        if (lane_idx == 0) {
            work.template begin<C>(p, is_there, index, place, at_iteration, num_loaded);
        }
        __syncwarp();
    }

    __device__ __forceinline__ void load_keys(const BackwardWork& work, bool is_v) {
        const bool is_varlen = p.cu_seqlens_k != nullptr;
        const int keys = is_varlen || p.cache_seqlens ? work.window.num_keys : C::kBlockN;
        load<C::kBlockN>(shared.base + (is_v ? C::kV : C::kK), is_v ? p.v : p.k,
                         is_v ? shared.v_full() : shared.k_full(), work.first_key_row,
                         work.head_idx, is_varlen ? 0 : work.batch_idx, keys, 0, nullptr);
    }

    __device__ __forceinline__ void load_all(const BackwardWork& work) {
        const bool is_varlen_q = p.cu_seqlens_q != nullptr;
        const int q_batch = is_varlen_q ? 0 : work.batch_idx;
        bool is_first = true;
        // Those of the work before, which still reads them.
        const bool has_keys = num_loaded > 0;
        if (is_varlen_q || p.cu_seqlens_k) {
            wait_once();
        }
        const bool values_later = !has_waited;
        int head_idx = work.begin_head, m = work.begin_m;
#pragma unroll 1
        for (int i = work.first_iteration; i <= work.last_iteration; ++i) {
            const int stage = i % C::kStages, dout_stage = i % C::kDoutStages;
            const int first_query = m * C::kBlockM;
            const int row = work.first_row + first_query;
            const int rows = is_varlen_q ? work.seqlen_q - first_query : C::kBlockM;
            const int64_t values = (head_idx * p.num_blocks_q + work.first_block + m) * C::kBlockM;
            if (is_first && !has_keys) {
                load_keys(work, false);
            }
            mbarrier_wait(shared.q_empty(stage), i / C::kStages % 2 ^ 1);
            if (lane_idx == 0) {
                shared.place(stage) = m;
            }
            load<C::kBlockM>(shared.base + C::kQ + stage * C::kQBytes, p.q, shared.q_full(stage),
                             row, head_idx, q_batch, rows,
                             shared.base + C::kLse + stage * C::kRowBytes, p.workspace.lse + values,
                             is_first && values_later);
            if (is_first && !has_keys) {
                load_keys(work, true);
            }
            mbarrier_wait(shared.dout_empty(dout_stage), i / C::kDoutStages % 2 ^ 1);
            load<C::kBlockM>(shared.base + C::kDout + dout_stage * C::kQBytes, p.dout,
                             shared.dout_full(dout_stage), row, head_idx, q_batch, rows,
                             shared.base + C::kDelta + dout_stage * C::kRowBytes,
                             p.workspace.delta + values, is_first && values_later);
            if (is_first && values_later) {
                wait_once();
                if (lane_idx == 0) {
                    bulk_load(shared.base + C::kLse, p.workspace.lse + values, C::kRowBytes,
                              shared.q_full(0));
                    bulk_load(shared.base + C::kDelta, p.workspace.delta + values, C::kRowBytes,
                              shared.dout_full(0));
                }
            }
            if (is_first && has_keys) {
                mbarrier_wait(shared.kv_empty(), num_loaded % 2 ^ 1);
                load_keys(work, false);
                load_keys(work, true);
            }
            is_first = false;
            work.advance(head_idx, m);
        }
        ++num_loaded;
    }
};

// Where blocks take turns, the block of queries of which a consumer's turn is about next.
template <class C>
struct Turns {
    static_assert(C::kConsumers == Workspace::kTurns, "each has turns of its own");
    const BackwardParameters<typename C::T>& p;
    const BackwardWork& work;
    int consumer, head_idx, m;

    __device__ __forceinline__ Turns(const BackwardParameters<typename C::T>& p_,
                                     const BackwardWork& work_, int consumer_)
        : p(p_),
          work(work_),
          consumer(C::kHasOwnTurns ? consumer_ : 0),
          head_idx(work.begin_head),
          m(work.begin_m) {}

    // In the workspace, counted over sums, heads and sequences.
    __device__ __forceinline__ int64_t block() const {
        return head_idx * p.num_blocks_q + work.sum_block + m;
    }
    __device__ __forceinline__ int* turn() const {
        return p.workspace.turns + Workspace::kTurns * block() + consumer;
    }
    // How many must have added to the sum before this one. A sum of 0, a and b has one order: of
    // causal blocks the first two go together, and the chain of waits is shorter by one (full,
    // where neighbours then run into each other: +1 %).
    __device__ __forceinline__ int earlier() const {
        const int before = over(work.template earlier<C>(m), p.workspace.sums.num_sums);
        return before == 1 && p.window_right >= 0 ? 0 : before;
    }
    __device__ __forceinline__ void advance() { work.advance(head_idx, m); }
};

// Adds a consumer's parts of dq to their sums, block by block, in its turn where there are turns.
// All lanes of one warp.
template <class C>
__device__ __forceinline__ void add_dq(const BackwardParameters<typename C::T>& p,
                                       const BackwardShared<C>& shared, const BackwardWork& work,
                                       int consumer, int& added) {
    using Shared = BackwardShared<C>;
    const bool is_first_lane = threadIdx.x % 32 == 0;
    const bool has_turns = p.workspace.sums.has_turns;
    const int num_parts = consumer == 0 ? C::kFirstParts : C::kDqParts - C::kFirstParts;
    Turns<C> at(p, work, consumer);
    int passed = 0;
#pragma unroll 1
    for (int left = work.num_iterations; left > 0; --left) {
        float* sums = p.workspace.dq_sums + at.block() * (C::kBlockM * C::kHeadDim);
        // Of a part's four tiles of 16 rows, those with rows of the sequence.
        const int first_row = at.m * C::kBlockM + (C::kSplitsRows ? 64 * consumer : 0);
        const int tiles = max(0, min(4, ceil_div(work.seqlen_q - first_row, kTileRows)));
        if (has_turns && is_first_lane) {
            // Before there is anything to add: it has mostly been passed on by then.
            const int earlier = at.earlier();
            // NOTE: not `!=`: sequences whose cu_seqlens overlap add to one turn, and may pass it.
            while (passed < earlier) {
                passed = ld_acquire(at.turn());
            }
            fence_proxy_async_global();
        }
#pragma unroll 1
        for (int part = 0; part < num_parts; ++part) {
            named_barrier_sync(Shared::kDqBarrier + consumer, Shared::kDqThreads);
            if (is_first_lane) {
                const int panel = C::panel_of(consumer * C::kFirstParts + part);
                const int bytes = tiles * (C::part_bytes(panel) / 4);
                if (bytes > 0) {
                    bulk_reduce_add(sums + panel * (C::kDqBytes / 4),
                                    shared.base + C::kDq + consumer * C::kDqBytes, bytes);
                }
                tma_store_commit();
                tma_store_wait<0>();
                mbarrier_arrive(shared.dq_empty(consumer));
            }
            __syncwarp();
        }
        at.advance();
        if (has_turns) {
            if (is_first_lane) {
                // The next turn is looked at while the sums are on their way.
                passed = left > 1 ? ld_acquire(at.turn()) : 0;
                tma_store_wait_all<0>();
                fence_proxy_async_global();
                st_shared_release(shared.added(consumer), ++added);
            }
            __syncwarp();
        }
    }
}

// Passes turns on, once a consumer's parts have been added: a warp of its own, which waits for
// fences while the others go on. All lanes of one warp, of which the first ones do so, each for a
// consumer. added: as add_dq's.
template <class C>
__device__ __forceinline__ void pass_turns(const BackwardParameters<typename C::T>& p,
                                           const BackwardShared<C>& shared,
                                           const BackwardWork& work, int& added) {
    if (p.workspace.sums.has_turns) {
        const int lane_idx = threadIdx.x % 32;
        const int num_turns = C::kHasOwnTurns ? C::kConsumers : 1, consumer = lane_idx % num_turns;
        Turns<C> at(p, work, consumer);
        const int all = added + work.num_iterations;
#pragma unroll 1
        while (__any_sync(kAllLanes, added < all)) {
            int there = min(ld_shared_acquire(shared.added(consumer)), all);
            if constexpr (!C::kHasOwnTurns) {
                there = min(there, ld_shared_acquire(shared.added(1)));
            }
            // One for all, as it takes the longest.
            if (__any_sync(kAllLanes, there > added)) {
                fence_gpu();
            }
#pragma unroll 1
            for (; added < there; ++added) {
                if (lane_idx < num_turns) {
                    red_add(at.turn(), 1);
                }
                at.advance();
            }
        }
    }
    __syncwarp();
}

}  // namespace kernel_hub::attention::backward::sm90
