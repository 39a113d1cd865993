// flash_attention_backward_sm90.cu: the consumers of wide heads, which share 64 keys: one makes p
// and dv, the other ds and dk, each a half of dq or, of three panels, two and one.
#pragma once

#include "attention/backward/sm90/consumer.cuh"
#include "kernel_hub/shared_reads.cuh"

namespace kernel_hub::attention::backward::sm90 {

template <class C>
struct RoleConsumer : BackwardConsumer<C> {
    using Base = BackwardConsumer<C>;
    using T = typename C::T;
    using Words = typename Base::Words;
    using Rows = typename Base::Rows;
    using Base::all16, Base::mine16, Base::p, Base::shared;
    static constexpr int kBlockM = C::kBlockM, kHeadDim = C::kHeadDim;
    static constexpr int kFirstParts = C::kFirstParts, kLastParts = C::kDqParts - kFirstParts;
    // The registers of a consumer's second part of dq.
    template <bool kIsNarrow>
    using Part = float[kIsNarrow ? C::kDqRegisters / 2 : C::kDqRegisters];
    using Second = Part<C::kIsLastNarrow && kLastParts == 1>;
    using Last = Part<C::kIsLastNarrow && kLastParts == 2>;

    __device__ __forceinline__ RoleConsumer(const BackwardParameters<T>& p_,
                                            const BackwardShared<C>& shared_)
        : Base(p_, shared_, 0) {}

    // Block i's stage and parity of dout and delta.
    static __device__ __forceinline__ int dout_stage(int i) { return i % C::kDoutStages; }
    static __device__ __forceinline__ int dout_parity(int i) { return i / C::kDoutStages % 2; }

    // Says that this warp has read a tile.
    __device__ __forceinline__ void release(uint32_t barrier) {
        mbarrier_arrive_if(barrier, Base::is_first_lane());
    }

    // 64 queries by a panel of dq = ds K.
    template <int kCount>
    __device__ __forceinline__ void issue_part(float (&dq)[kCount], int part, int buffer) {
        const uint32_t ds = all16 + Base::rows_low(C::kDs) + buffer * (C::kDsBytes / 16);
        const uint32_t k = all16 + Base::columns_low(C::kK, C::kKPanel);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::kBlockN / 16; ++i) {
            Wgmma<T>::template ss<0, 1>(
                dq, descriptor(ds, i * 32),
                descriptor(k, C::panel_of(part) * C::kKPanel + i * 16 * kPanelBytes), i != 0);
        }
        wgmma_commit();
    }

    // Where this thread leaves p, and its like in the other consumer finds it.
    __device__ __forceinline__ uint32_t probs_at() const {
        return shared.base + C::kProbs + read_thread_idx() % 128 * 16;
    }

    __device__ __forceinline__ void leave_probs(const Words& words, int i) {
        mbarrier_wait(shared.probs_empty(), i % 2 ^ 1);
#pragma unroll
        for (int j = 0; j < Base::kWords; ++j) {
            st_shared(probs_at() + 2048 * j, __uint_as_float(words[j][0]),
                      __uint_as_float(words[j][1]), __uint_as_float(words[j][2]),
                      __uint_as_float(words[j][3]));
        }
        __syncwarp();
        mbarrier_arrive_if(shared.probs_full(), Base::is_first_lane());
    }

    __device__ __forceinline__ void take_probs(Words& words, int i) {
        mbarrier_wait(shared.probs_full(), i % 2);
#pragma unroll
        for (int j = 0; j < Base::kWords; ++j) {
            const int4 four = ld_shared_volatile(probs_at() + 2048 * j);
            words[j][0] = four.x;
            words[j][1] = four.y;
            words[j][2] = four.z;
            words[j][3] = four.w;
        }
        __syncwarp();
        mbarrier_arrive_if(shared.probs_empty(), Base::is_first_lane());
    }

    __device__ __forceinline__ void run(const BackwardWork& work, bool makes_probs) {
        float sums[kHeadDim / 2];
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; ++i) {
            sums[i] = 0.0f;
        }
        hold_registers(sums);
        if (makes_probs) {
            if (work.num_iterations > 0) {
                make_probs(work, sums);
            }
            this->store(true, sums, work);
        } else {
            if (work.num_iterations > 0) {
                make_gradients(work, sums);
            }
            this->store(false, sums, work);
        }
    }

    // p of block i, from its scores, for both consumers.
    __device__ __forceinline__ void finish_probs(float (&scores)[Base::kScores], Words& words,
                                                 const BackwardWork& work, int i) {
        const int m = shared.place(i % 2);
        this->exponentials(scores, work, work.is_masked(m), m * kBlockM, i % 2);
        release(shared.q_empty(i % 2));
        this->pack(scores, words);
        leave_probs(words, i);
    }

    // dq lags a block behind, so that this consumer does not wait for the other's ds.
    __device__ __forceinline__ void make_probs(const BackwardWork& work,
                                               float (&dv)[kHeadDim / 2]) {
        const int first = work.first_iteration;
        Words words;
        float scores[Base::kScores];
        leave_undefined(scores);
        mbarrier_wait(shared.k_full(), work.keys_parity);
        mbarrier_wait(shared.q_full(first % 2), first / 2 % 2);
        Rows k;
        this->take_rows(k, C::kK);
        this->issue_scores(scores, k, C::kK, C::kQ, first % 2);
        wgmma_wait<0>();
        hold_registers(scores);
        finish_probs(scores, words, work, first);
        int i = first;
#pragma unroll 1
        for (; i < work.last_iteration; ++i) {
            const int stage = i % 2;
            const bool is_first = i == work.first_iteration;
            all16 = mine16 = keep(all16);
            mbarrier_wait(shared.dout_full(dout_stage(i)), dout_parity(i));
            this->issue_sums(dv, words, C::kDout, dout_stage(i));
            float dq[C::kDqRegisters];
            leave_undefined(dq);
            mbarrier_wait_unless(is_first, shared.ds_full(stage ^ 1), (i + 1) / 2 % 2 ^ 1);
            issue_part(dq, 0, stage ^ 1);
            mbarrier_wait(shared.q_full(stage ^ 1), (i + 1) / 2 % 2);
            leave_undefined(scores);
            this->issue_scores(scores, k, C::kK, C::kQ, stage ^ 1);
            wgmma_wait<2>();
            hold_registers(dv);
            release(shared.dout_empty(dout_stage(i)));
            wgmma_wait<1>();
            hold_registers(dq);
            if (!is_first) {
                this->leave_dq(dq, kFirstParts * (i - 1));
            }
            Second& second = reinterpret_cast<Second&>(dq);
            leave_undefined(second);
            issue_part(second, 1, stage ^ 1);
            wgmma_wait<1>();
            hold_registers(scores);
            finish_probs(scores, words, work, i + 1);
            wgmma_wait<0>();
            hold_registers(second);
            if (!is_first) {
                release(shared.ds_empty(stage ^ 1));
                this->leave_dq(second, kFirstParts * (i - 1) + 1);
            }
        }
        mbarrier_wait(shared.dout_full(dout_stage(i)), dout_parity(i));
        this->issue_sums(dv, words, C::kDout, dout_stage(i));
        wgmma_wait<0>();
        hold_registers(dv);
        release(shared.dout_empty(dout_stage(i)));
#pragma unroll 1
        for (i = max(i - 1, work.first_iteration); i <= work.last_iteration; ++i) {
            mbarrier_wait(shared.ds_full(i % 2), i / 2 % 2);
            float dq[C::kDqRegisters];
            leave_part(dq, 0, i);
            leave_part(reinterpret_cast<Second&>(dq), 1, i);
            release(shared.ds_empty(i % 2));
        }
        release(shared.kv_empty());
    }

    // The first consumer's parts of the last blocks.
    template <int kCount>
    __device__ __forceinline__ void leave_part(float (&dq)[kCount], int part, int i) {
        leave_undefined(dq);
        issue_part(dq, part, i % 2);
        wgmma_wait<0>();
        hold_registers(dq);
        this->leave_dq(dq, kFirstParts * i + part);
    }

    // NOTE: nothing is under way where the loop closes: ptxas serialises all products otherwise.
    __device__ __forceinline__ void make_gradients(const BackwardWork& work,
                                                   float (&dk)[kHeadDim / 2]) {
        float dp[Base::kScores];
        leave_undefined(dp);
        const int first = work.first_iteration, parity = work.keys_parity;
        mbarrier_wait(shared.v_full(), parity);
        mbarrier_wait(shared.dout_full(dout_stage(first)), dout_parity(first));
        Rows v;
        this->take_rows(v, C::kV);
        this->issue_scores(dp, v, C::kV, C::kDout, dout_stage(first));
        wgmma_wait<0>();
        hold_registers(dp);
        // Before the first product with k and with q, which the other consumer has seen come.
        mbarrier_wait(shared.k_full(), parity);
#pragma unroll 1
        for (int i = first;; ++i) {
            const int stage = i % 2;
            const bool is_last = i == work.last_iteration;
            all16 = mine16 = keep(all16);
            Words p_words, words;
            take_probs(p_words, i);
            this->gradients(dp, p_words, dp, dout_stage(i), stage, i / 2 % 2, words);
            release(shared.dout_empty(dout_stage(i)));
            mbarrier_wait(shared.q_full(stage), i / 2 % 2);
            this->issue_sums(dk, words, C::kQ, stage);
            mbarrier_wait(shared.ds_full(stage), i / 2 % 2);
            float dq[C::kDqRegisters];
            leave_undefined(dq);
            issue_part(dq, kFirstParts, stage);
            wgmma_wait<1>();
            hold_registers(dk);
            release(shared.q_empty(stage));
            wgmma_wait<0>();
            hold_registers(dq);
            if constexpr (kLastParts == 1) {
                release(shared.ds_empty(stage));
            }
            this->leave_dq(dq, kLastParts * i);
            if (is_last) {
                break;
            }
            Last& second = reinterpret_cast<Last&>(dq);
            if constexpr (kLastParts == 2) {
                leave_undefined(second);
                issue_part(second, kFirstParts + 1, stage);
            }
            mbarrier_wait(shared.dout_full(dout_stage(i + 1)), dout_parity(i + 1));
            leave_undefined(dp);
            this->issue_scores(dp, v, C::kV, C::kDout, dout_stage(i + 1));
            if constexpr (kLastParts == 2) {
                wgmma_wait<1>();
                hold_registers(second);
                release(shared.ds_empty(stage));
                this->leave_dq(second, kLastParts * i + 1);
            }
            wgmma_wait<0>();
            hold_registers(dp);
        }
        if constexpr (kLastParts == 2) {
            const int last = work.last_iteration;
            Last dq;
            leave_undefined(dq);
            issue_part(dq, kFirstParts + 1, last % 2);
            wgmma_wait<0>();
            hold_registers(dq);
            release(shared.ds_empty(last % 2));
            this->leave_dq(dq, kLastParts * last + 1);
        }
        release(shared.kv_empty());
    }
};

}  // namespace kernel_hub::attention::backward::sm90
