// flash_attention_backward_sm90.cu: a consumer's warpgroup: 64 keys of dk and dv, a part of dq.
#pragma once

#include "attention/backward/shared_rows.cuh"
#include "attention/backward/sm90/instructions.cuh"
#include "attention/backward/sm90/plan.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "kernel_hub/wgmma.cuh"

namespace kernel_hub::attention::backward::sm90 {

template <class C>
struct BackwardConsumer {
    using T = typename C::T;
    static constexpr int kBlockM = C::kBlockM, kHeadDim = C::kHeadDim;
    static constexpr int kScores = kBlockM / 2;  // of a thread
    static constexpr int kWords = kBlockM / 16;
    using Words = uint32_t[kWords][4];

    const BackwardParameters<T>& p;
    const BackwardShared<C>& shared;
    // NOTE: little is kept over the loop: what follows from the thread's index is worked out anew,
    // and so are the descriptors, by `keep`.
    uint32_t all16, mine16;  // shared memory in units of 16 bytes; the consumer's 64 rows of k
    uint32_t ds_mine;        // where this lane stores ds
    uint32_t dq_mine;        // and its part of dq

    __device__ __forceinline__ BackwardConsumer(const BackwardParameters<T>& p_,
                                                const BackwardShared<C>& shared_, int consumer)
        : p(p_), shared(shared_), all16(shared_.base / 16), mine16(all16 + consumer * kRows16) {
        const int lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32 % 4;
        dq_mine = shared.base + C::kDq + (threadIdx.x / 32 - 4) * (C::kDqBytes / 4) + 16 * lane_idx;
        const int tile = lane_idx / 8, row = lane_idx % 8;
        ds_mine = shared.base + C::kDs + consumer * C::kQPanel +
                  (8 * (tile / 2) + row) * kPanelBytes + ((2 * warp_idx + tile % 2) ^ row) * 16;
    }

    static constexpr int kRows16 = 64 * kPanelBytes / 16;
    static __device__ __forceinline__ int thread_idx() {
        return C::kReadsThread ? read_thread_idx() : threadIdx.x;
    }
    static __device__ __forceinline__ int consumer_idx() { return read_thread_idx() / 128 - 1; }
    static __device__ __forceinline__ bool is_first_lane() { return read_thread_idx() % 32 == 0; }

    // Lower halves of descriptors. Operands along head_dim, and along rows.
    static __device__ __forceinline__ uint32_t rows_low(int at) { return descriptor_low(at, 16); }
    static __device__ __forceinline__ uint32_t columns_low(int at, int panel) {
        return descriptor_low(at, panel);
    }

    // The first columns of 64 rows of k or v in registers, as the left operand of products.
    struct Rows {
        uint32_t words[C::kKeptColumns > 0 ? C::kKeptColumns / 16 : 1][4];
    };

    __device__ __forceinline__ void take_rows(Rows& rows, int at) {
        const int thread = thread_idx(), lane_idx = thread % 32, row = lane_idx % 16;
        const uint32_t mine = 16 * mine16 + at + (thread / 32 % 4 * 16 + row) * kPanelBytes;
#pragma unroll
        for (int i = 0; i < C::kKeptColumns / 16; ++i) {
            const int chunk = (i % 4 * 2 + lane_idx / 16) ^ (row % 8);
            ldmatrix_x4(rows.words[i], mine + i / 4 * C::kKPanel + chunk * 16);
        }
    }

    // scores = A B^T, both along head_dim: A 64 keys, the first columns in registers, B the
    // queries.
    template <int kKept = C::kKeptColumns>
    __device__ __forceinline__ void issue_scores(float (&scores)[kScores], const Rows& rows,
                                                 int a_at, int b_at, int stage) {
        const uint32_t a = mine16 + rows_low(a_at);
        const uint32_t b = all16 + rows_low(b_at) + stage * (C::kQBytes / 16);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kHeadDim / 16; ++i) {
            const int panel = i / 4, column_bytes = i % 4 * 32;
            const uint64_t step = descriptor(b, panel * C::kQPanel + column_bytes);
            if (16 * i < kKept) {
                Wgmma<T>::template rs<0>(scores, rows.words[i], step, i != 0);
            } else {
                Wgmma<T>::template ss<0, 0>(
                    scores, descriptor(a, panel * C::kKPanel + column_bytes), step, i != 0);
            }
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void issue_scores(float (&scores)[kScores], int a_at, int b_at,
                                                 int stage) {
        issue_scores<0>(scores, Rows{}, a_at, b_at, stage);
    }

    // sums += A B: A 64 keys by the queries, B the queries' rows.
    __device__ __forceinline__ void issue_sums(float (&sums)[kHeadDim / 2], const Words& a,
                                               int b_at, int stage) {
        const uint32_t b = all16 + columns_low(b_at, C::kQPanel) + stage * (C::kQBytes / 16);
        hold_registers(sums);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            Wgmma<T>::template rs<1>(sums, a[i], descriptor(b, i * 16 * kPanelBytes), 1);
        }
        wgmma_commit();
    }

    // dq = ds K: 64 queries by a panel.
    template <int kCount>
    __device__ __forceinline__ void issue_dq(float (&dq)[kCount], int buffer) {
        const uint32_t mine = mine16 - all16;  // 0, or that of the other consumer
        const uint32_t ds =
            (C::kSplitsRows ? mine16 : all16) + rows_low(C::kDs) + buffer * (C::kDsBytes / 16);
        const uint32_t k = all16 + columns_low(C::kK, C::kKPanel) +
                           (C::kSplitsRows ? 0 : mine * (C::kKPanel / 16 / kRows16));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::kBlockN / 16; ++i) {
            Wgmma<T>::template ss<0, 1>(dq, descriptor(ds, i / 4 * C::kQPanel + i % 4 * 32),
                                        descriptor(k, i * 16 * kPanelBytes), i != 0);
        }
        wgmma_commit();
    }

    // Scores of keys that a query does not see become -inf.
    __device__ __forceinline__ void hide(float (&scores)[kScores], Window window, int first_query) {
        const int thread_idx = read_thread_idx() - 128;
        const int key = thread_idx / 32 * 16 + thread_idx % 32 / 4;
        const int relative = key - first_query - 2 * (thread_idx % 4);
#pragma unroll
        for (int j = 0; j < kBlockM / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int down = e / 2 * 8;
                if (key + down >= window.num_keys ||
                    !window.sees(relative + down - 8 * j - e % 2)) {
                    scores[4 * j + e] = -INFINITY;
                }
            }
        }
    }

    // This thread's values of a row's numbers: queries 8j + 2 (lane % 4) and the next one.
    __device__ __forceinline__ float2 row_values(int at, int stage, int j) const {
        return *reinterpret_cast<const float2*>(shared_pointer(
            shared.base + at + stage * C::kRowBytes + 32 * j + 8 * (read_thread_idx() % 4)));
    }

    __device__ __forceinline__ void pack(const float (&values)[kScores], Words& words) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                words[i][j] = pack2<T>(values[8 * i + 2 * j], values[8 * i + 2 * j + 1]);
            }
        }
    }

    // Leaves this consumer's part of dq to the warp that adds it up.
    template <int kCount>
    __device__ __forceinline__ void leave_dq(const float (&dq)[kCount], int i) {
        mbarrier_wait(shared.dq_empty(consumer_idx()), i % 2 ^ 1);
        // The warps' parts lie one after another, however wide the panel is.
        const uint32_t target =
            dq_mine - read_thread_idx() / 32 % 4 * 128 * (C::kDqRegisters - kCount);
#pragma unroll
        for (int j = 0; j < kCount / 4; ++j) {
            st_shared(target + 512 * j, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
        }
        fence_proxy_async();
        named_barrier_arrive(BackwardShared<C>::kDqBarrier + consumer_idx(),
                             BackwardShared<C>::kDqThreads);
    }

    // Writes 64 rows of dk or dv, or of a part of them.
    __device__ __forceinline__ void store(bool is_dv, const float (&sums)[kHeadDim / 2],
                                          const BackwardWork& work) {
        const Heads<T>& target = is_dv ? p.dv : p.dk;
        const float factor = is_dv ? 1.0f : p.softmax_scale;
        const int thread = C::kHasRoles ? thread_idx() % 128 : thread_idx() - 128;
        const int lane_idx = thread % 32;
        const int first_column = 8 * (lane_idx % 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = thread / 32 * 16 + lane_idx / 4 + 8 * r;
            T* out =
                work.part < 0
                    ? target.at(work.batch_idx, work.first_key_row + row, work.head_idx)
                    : p.parts + (p.works.part_of(is_dv, work.part) * C::kBlockN + row) * p.head_dim;
#pragma unroll
            for (int i = 0; i < ceil_div(kHeadDim, 32); ++i) {
                uint32_t words[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int column = 4 * (4 * i + j) + 2 * r;
                    words[j] = 2 * column < kHeadDim
                                   ? pack2<T>(sums[column] * factor, sums[column + 1] * factor)
                                   : 0;
                }
                transpose_in_quad(words, lane_idx);
                if (row < work.num_key_rows && 32 * i + first_column < p.head_dim) {
                    st_global(out + 32 * i + first_column,
                              make_uint4(words[0], words[1], words[2], words[3]));
                }
            }
        }
    }

    // p of a block, from its scores.
    __device__ __forceinline__ void exponentials(float (&scores)[kScores], const BackwardWork& work,
                                                 bool must_hide, int first_query, int stage) {
        if (must_hide) {
            hide(scores, work.window, first_query);
        }
        const float scale_log2 = p.softmax_scale * kLog2e;
#pragma unroll
        for (int j = 0; j < kBlockM / 8; ++j) {
            const float2 lse = row_values(C::kLse, stage, j);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& score = scores[4 * j + e];
                score = exp2_approx(fmaf(score, scale_log2, e % 2 ? -lse.y : -lse.x));
            }
        }
    }

    // p as fp32 or, where that would take too many registers, as it was rounded.
    static __device__ __forceinline__ float prob(const float (&probs)[kScores],
                                                 const Words& p_words, int j, int e) {
        if constexpr (C::kKeepsProbs) {
            return probs[4 * j + e];
        } else {
            float pair[2];
            Word<T>::unpack(p_words[j / 2][j % 2 * 2 + e / 2], pair);
            return pair[e % 2];
        }
    }

    // ds of a block from p and dp, in registers and in shared memory.
    __device__ __forceinline__ void gradients(const float (&probs)[kScores], const Words& p_words,
                                              float (&dp)[kScores], int stage, int buffer,
                                              uint32_t parity, Words& words) {
#pragma unroll
        for (int j = 0; j < kBlockM / 8; ++j) {
            const float2 delta = row_values(C::kDelta, stage, j);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& ds = dp[4 * j + e];
                ds = prob(probs, p_words, j, e) * (ds - (e % 2 ? delta.y : delta.x));
            }
        }
        pack(dp, words);
        mbarrier_wait(shared.ds_empty(buffer), parity ^ 1);
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            stmatrix_x4_trans(ds_mine + buffer * C::kDsBytes + i * 16 * kPanelBytes, words[i][0],
                              words[i][1], words[i][2], words[i][3]);
        }
        fence_proxy_async();
        __syncwarp();
        mbarrier_arrive_if(shared.ds_full(buffer), is_first_lane());
    }

    __device__ __forceinline__ void run(const BackwardWork& work) {
        float dk[kHeadDim / 2], dv[kHeadDim / 2];
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; ++i) {
            dk[i] = dv[i] = 0.0f;
        }
        hold_registers(dk);
        hold_registers(dv);
        if (work.num_iterations == 0) {
        } else if (C::kIsLastNarrow && mine16 != all16) {
            walk<C::kLastColumns / 2>(work, dk, dv);
        } else {
            walk<C::kDqRegisters>(work, dk, dv);
        }
        if (work.num_iterations == 0) {
            store(true, dv, work);
        }
        store(false, dk, work);
    }

    __device__ __forceinline__ void issue_scores_of(int i, float (&scores)[kScores]) {
        mbarrier_wait(shared.q_full(i % 2), i / 2 % 2);
        leave_undefined(scores);
        issue_scores(scores, C::kK, C::kQ, i % 2);
    }

    // NOTE: nothing is under way where the loop closes: ptxas serialises all products otherwise.
    template <int kCount>
    __device__ __forceinline__ void walk(const BackwardWork& work, float (&dk)[kHeadDim / 2],
                                         float (&dv)[kHeadDim / 2]) {
        float scores[kScores], dp[kScores];
        leave_undefined(scores);
        leave_undefined(dp);
        const int first = work.first_iteration, parity = work.keys_parity;
        mbarrier_wait(shared.k_full(), parity);
        issue_scores_of(first, scores);
        mbarrier_wait(shared.v_full(), parity);
        Rows v;
        take_rows(v, C::kV);
        {
            const int stage = first % 2;
            mbarrier_wait(shared.dout_full(stage), first / 2 % 2);
            issue_scores(dp, v, C::kV, C::kDout, stage);
            const int m = shared.place(stage);
            const bool must_hide = work.is_masked(m);
            wgmma_wait<1>();
            hold_registers(scores);
            exponentials(scores, work, must_hide, m * kBlockM, stage);
        }
        wgmma_wait<0>();
        hold_registers(dp);
        Words ds_words;
#pragma unroll 1
        for (int i = first;;) {
            int stage = i % 2;
            const bool is_first = i == work.first_iteration;
            const bool is_last = i == work.last_iteration;
            mine16 = keep(mine16);
            Words p_words;
            pack(scores, p_words);
            issue_sums(dv, p_words, C::kDout, stage);
            gradients(scores, p_words, dp, stage, stage, i / 2 % 2, ds_words);
            wgmma_wait<0>();
            hold_registers(dv);
            mbarrier_arrive_if(shared.dout_empty(stage), is_first_lane());
            if (is_last) {
                break;
            }
            float dq[kCount];
            leave_undefined(dq);
            mbarrier_wait_unless(is_first, shared.ds_full(stage ^ 1), (i + 1) / 2 % 2 ^ 1);
            issue_dq(dq, stage ^ 1);
            issue_sums(dk, ds_words, C::kQ, stage);
            if constexpr (C::kScoresFirst) {
                issue_scores_of(i + 1, scores);
            }
            wgmma_wait<1 + C::kScoresFirst>();
            hold_registers(dq);
            if (!is_first) {
                mbarrier_arrive_if(shared.ds_empty(stage ^ 1), is_first_lane());
                leave_dq(dq, i - 1);
            }
            ++i;
            stage = i % 2;
            if constexpr (!C::kScoresFirst) {
                issue_scores_of(i, scores);
            }
            wgmma_wait<1>();
            hold_registers(dk);
            mbarrier_arrive_if(shared.q_empty(stage ^ 1), is_first_lane());
            mbarrier_wait(shared.dout_full(stage), i / 2 % 2);
            leave_undefined(dp);
            issue_scores(dp, v, C::kV, C::kDout, stage);
            const int m = shared.place(stage);
            const bool must_hide = work.is_masked(m);
            wgmma_wait<1>();
            hold_registers(scores);
            exponentials(scores, work, must_hide, m * kBlockM, stage);
            wgmma_wait<0>();
            hold_registers(dp);
        }
        float dq[kCount];
        leave_undefined(dq);
        const int last = work.last_iteration, stage = last % 2;
        const bool is_only = work.num_iterations == 1;
        mbarrier_wait_unless(is_only, shared.ds_full(stage ^ 1), (last + 1) / 2 % 2 ^ 1);
        issue_dq(dq, stage ^ 1);
        issue_sums(dk, ds_words, C::kQ, stage);
        wgmma_wait<1>();
        hold_registers(dq);
        if (!is_only) {
            mbarrier_arrive_if(shared.ds_empty(stage ^ 1), is_first_lane());
            leave_dq(dq, last - 1);
        }
        mbarrier_wait(shared.ds_full(stage), last / 2 % 2);
        leave_undefined(dq);
        issue_dq(dq, stage);
        store(true, dv, work);
        wgmma_wait<0>();
        hold_registers(dq);
        hold_registers(dk);
        mbarrier_arrive_if(shared.ds_empty(stage), is_first_lane());
        mbarrier_arrive_if(shared.q_empty(stage), is_first_lane());
        mbarrier_arrive_if(shared.kv_empty(), is_first_lane());
        leave_dq(dq, last);
    }
};

}  // namespace kernel_hub::attention::backward::sm90
