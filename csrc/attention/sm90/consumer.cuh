// flash_attention_sm90.cu: a consumer's warpgroup: waits, products, and the order of it all.
#pragma once

#include "attention/sm90/rows.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "kernel_hub/wgmma.cuh"

namespace kernel_hub::attention::sm90 {

template <class C>
struct Consumer : Rows<C> {
    using T = typename C::T;
    using Base = Rows<C>;
    using Base::consumer;
    using Base::k;
    using Base::k_is_there;
    using Base::k_low;
    using Base::lane_idx;
    using Base::must_rescale;
    using Base::output;
    using Base::p;
    using Base::probs;
    using Base::q;
    using Base::q_low;
    using Base::scores;
    using Base::shared;
    using Base::slot;
    using Base::thread_idx;
    using Base::v;
    using Base::v_is_there;
    using Base::v_low;

    __device__ __forceinline__ Consumer(const Parameters& p_, const Shared<C>& shared_,
                                        int consumer_)
        : Base(p_, shared_, consumer_) {}

    // Whether blocks with masks tell small scores from others.
    // NOTE: with three consumers there are registers too few; at d192 it is not worth its 15 KB.
    static constexpr bool kTellsMasked =
        C::kMask == Mask::kWindow && (C::kFindsTiny || (C::kFindsSmall && C::kHeadDim != 192));

    // Issues scores = Q K^T.
    __device__ __forceinline__ void issue_scores() {
        // Where there are many, ptxas would prepare Q's descriptors before the loop and keep them
        // in vector registers, to be moved for each product.
        const uint32_t a = (C::kHeadDim > 128 ? fresh(q_low) : q_low) +
                           q.stage * (C::kConsumers * C::kQBytes / 16);
        const uint32_t b = k_low + k.stage * (C::kKBytes / 16);
        hold_registers(scores);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::kHeadDim / 16; ++i) {
            const int panel = i / 4, column_bytes = i % 4 * 32;
            Wgmma<T>::ss(scores, descriptor(a, panel * C::kQPanelStride + column_bytes),
                         descriptor(b, panel * C::kKVPanelBytes + column_bytes), i != 0);
        }
        wgmma_commit();
    }

    // Issues output += P V.
    __device__ __forceinline__ void issue_output(int accumulate) {
        const uint32_t b = v_low + v.stage * (C::kVBytes / 16);
        hold_registers(output);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::kBlockN / 16; ++i) {
            Wgmma<T>::template rs<1>(output, probs[i], descriptor(b, i * 16 * 128),
                                     i != 0 ? 1 : accumulate);
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void wait_k() {
        mbarrier_wait_unless(k_is_there, shared.k_full(k.stage), k.parity);
        k_is_there = false;
    }
    __device__ __forceinline__ void wait_v() {
        mbarrier_wait_unless(v_is_there, shared.v_full(v.stage), v.parity);
        v_is_there = false;
    }
    // Asks ahead of the waits: most often they find K and V there, and the answer is known by then.
    __device__ __forceinline__ void look_ahead() {
        k_is_there = mbarrier_test_wait(shared.k_full(k.stage), k.parity);
        v_is_there = mbarrier_test_wait(shared.v_full(v.stage), v.parity);
    }
    __device__ __forceinline__ void wait_q() {
        mbarrier_wait(shared.q_full(q.stage, C::kSplit ? 0 : consumer), q.parity);
    }

    __device__ __forceinline__ void release_k(bool with_q) {
        mbarrier_arrive_if(shared.k_empty(k.stage), thread_idx == 0);
        mbarrier_arrive_if(shared.q_empty(q.stage, consumer), with_q && thread_idx == 0);
        k.advance();
        if (with_q) {
            q.advance();
        }
    }

    __device__ __forceinline__ void release_v() {
        mbarrier_arrive_if(shared.v_empty(v.stage), thread_idx == 0);
        v.advance();
    }

    // The consumers issue their products in turns.
    __device__ __forceinline__ void take_turn() {
        if constexpr (C::kConsumers > 1) {
            named_barrier_sync(1 + consumer, 256);
        }
    }
    __device__ __forceinline__ void pass_turn() {
        if constexpr (C::kConsumers > 1) {
            named_barrier_arrive(1 + (consumer + 1 == C::kConsumers ? 0 : consumer + 1), 256);
        }
    }

    // Scores of `block` under the product of the block before it, in the same tile.
    template <bool kMasked, bool kTells = false>
    __device__ __forceinline__ void step(const Range& tile, int block, int accumulate) {
        wait_k();
        take_turn();
        issue_scores();
        wait_v();
        issue_output(accumulate);
        pass_turn();
        wgmma_wait<1>();
        hold_registers(scores);
        release_k(block == tile.block_begin);
        this->template weigh<false, kMasked, kTells>(tile, block);
        hold_registers(scores);
        wgmma_wait<0>();
        hold_registers(output);
        release_v();
        look_ahead();
        this->pack_probs();
        this->rescale_output();
    }

    // The next tile, and its place in the ring.
    __device__ __forceinline__ Range next_tile(int& place) {
        mbarrier_wait(shared.tile_full(slot.stage), slot.parity);
        place = slot.stage;
        slot.advance();
        return this->read_range(place);
    }

    // Zeros what the first block of V holds beyond the sequence: 0 times a NaN there is a NaN.
    __device__ __forceinline__ void clear_foreign_rows(const Range& tile) {
        const int rows = tile.seqlen_k - (tile.block_end - 1) * C::kBlockN;
        if (!p.has_foreign_rows || rows >= C::kBlockN) {
            return;
        }
        wait_v();
        const uint32_t base = shared.v + v.stage * C::kVBytes;
        for (int panel = 0; panel < C::kVPanels; ++panel) {
            for (int i = 8 * rows + thread_idx; i < 8 * C::kBlockN; i += 128) {
                st_shared(base + panel * C::kKVPanelBytes + 16 * i, 0.f, 0.f, 0.f, 0.f);
            }
        }
        fence_proxy_async();
        named_barrier_sync(1 + C::kConsumers + consumer, 128);
    }

    // The thread's first row, of the warpgroup's 64.
    __device__ __forceinline__ int row_in_group() const {
        return 16 * (thread_idx / 32) + lane_idx / 4;
    }

    // The key under the query of row `i` of the warpgroup's 64.
    __device__ __forceinline__ int diagonal_of(const Range& tile, int i) const {
        return C::kSplit ? tile.diagonal + p.packing.token_of(64 * consumer + i)
                         : tile.diagonal - row_in_group() + i;
    }

    // Takes the tile's first block away where this warpgroup's rows see nothing of it and another
    // is left. Returns how many that are.
    __device__ __forceinline__ int trim(Range& tile) const {
        int is_skipped = 0;
        if constexpr (C::kTrims) {
            const int key_end = tile.diagonal - row_in_group() + 64 + p.window_right;
            const int end = max(tile.block_begin + 1, (key_end + C::kBlockN - 1) / C::kBlockN);
            // As a uniform value: it moves the places in the rings.
            is_skipped = __reduce_max_sync(kAllLanes, end < tile.block_end ? 1 : 0);
            tile.block_end -= is_skipped;
        }
        return is_skipped;
    }

    // Passes over a block of K or V. One warp waits for it and releases it; the others meet that
    // warp, at the turn, before they wait for the next block in the same place.
    __device__ __forceinline__ void skip(int is_skipped, uint32_t full, uint32_t empty,
                                         Place<C::kStages>& place) const {
        mbarrier_wait_unless(is_skipped == 0 || thread_idx >= 32, full, place.parity);
        mbarrier_arrive_if(empty, is_skipped != 0 && thread_idx == 0);
        place.advance_by(is_skipped);
    }

    __device__ __forceinline__ void skip_k(int is_skipped) {
        if constexpr (C::kTrims) {
            skip(is_skipped, shared.k_full(k.stage), shared.k_empty(k.stage), k);
            k_is_there = k_is_there && is_skipped == 0;  // it was about the block left out
            if (is_skipped) {
                take_turn();
                pass_turn();
            }
        }
    }

    __device__ __forceinline__ void skip_v(int is_skipped) {
        if constexpr (C::kTrims) {
            skip(is_skipped, shared.v_full(v.stage), shared.v_empty(v.stage), v);
        }
    }

    __device__ __forceinline__ void run() {
        int place, next_place;
        Range tile = next_tile(place);
        if (!tile.is_valid()) {
            return;
        }
        if (consumer == C::kConsumers - 1) {
            pass_turn();
        }
        int is_skipped = trim(tile);
        skip_k(is_skipped);
        skip_v(is_skipped);
        begin(tile);
        while (true) {
            clear_foreign_rows(tile);
            const int accumulate = walk(tile);
            Range next = next_tile(next_place);
            if (!next.is_valid()) {
                finish(place, accumulate);
                return;
            }
            is_skipped = trim(next);
            skip_k(is_skipped);
            cross(place, next, is_skipped, accumulate);
            tile = next;
            place = next_place;
        }
    }

    // The first scores of the first tile, with nothing to run under them.
    __device__ __forceinline__ void begin(const Range& tile) {
        wait_q();
        wait_k();
        issue_scores();
        wgmma_wait<0>();
        hold_registers(scores);
        const int block = tile.block_end - 1;
        release_k(block == tile.block_begin);
        // NOTE: as `cross` does: which of a block's tiles is its first may differ from run to run.
        this->template weigh<true, true, kTellsMasked>(tile, block);
        this->pack_probs();
    }

    // All blocks of the tile but the first one's scores and the last one's product. Returns whether
    // the output holds something.
    __device__ __forceinline__ int walk(const Range& tile) {
        int accumulate = 0;
        int block = tile.block_end - 2;
        if constexpr (C::kMask == Mask::kFull) {
#pragma unroll 1
            for (; block >= tile.block_begin; --block) {
                step<false>(tile, block, accumulate);
                accumulate = 1;
            }
        } else {
            constexpr bool kWindow = C::kMask == Mask::kWindow;
            // Blocks from `masked` on have keys that the warpgroup's first row does not see.
            int visible = tile.seqlen_k;
            if (!kWindow || p.window_right >= 0) {
                const int first_row = diagonal_of(tile, 0);
                visible = max(0, min(visible, first_row + p.window_right + 1));
            }
            int masked = max(tile.block_begin, visible / C::kBlockN);
            // And blocks below `unmasked` have keys that its last row does not see.
            int unmasked = tile.block_begin;
            if (kWindow && p.window_left >= 0) {
                const int hidden = max(0, diagonal_of(tile, 63) - p.window_left);
                unmasked = max(unmasked, (hidden + C::kBlockN - 1) / C::kBlockN);
            }
            // A window comes here twice: right of the blocks without masks, and left of them.
#pragma unroll 1
            while (true) {
#pragma unroll 1
                for (; block >= masked; --block) {
                    step<true, kTellsMasked>(tile, block, accumulate);
                    accumulate = 1;
                }
                // NOTE: a loop of its own: asked in the other one, it costs windows 3 %.
                if (C::kHasCap && p.cap_scale_log2 != 0.f) {
#pragma unroll 1
                    for (; block >= unmasked; --block) {
                        step<false, kWindow>(tile, block, accumulate);
                        accumulate = 1;
                    }
                }
#pragma unroll 1
                for (; C::kHasPlain && block >= unmasked; --block) {
                    step<false>(tile, block, accumulate);
                    accumulate = 1;
                }
                if (!kWindow || block < tile.block_begin) {
                    break;
                }
                masked = tile.block_begin;
            }
        }
        return accumulate;
    }

    // The first scores of the next tile under the last product of this one, then this one's output.
    __device__ __forceinline__ void cross(int place, const Range& next, int is_skipped,
                                          int accumulate) {
        wait_q();
        wait_k();
        take_turn();
        issue_scores();
        wait_v();
        issue_output(accumulate);
        pass_turn();
        float factor[2];
        this->finish_rows(place, factor);
        wgmma_wait<1>();
        hold_registers(scores);
        const int block = next.block_end - 1;
        release_k(block == next.block_begin);
        this->template weigh<true, true, kTellsMasked>(next, block);
        hold_registers(scores);
        wgmma_wait<0>();
        hold_registers(output);
        release_v();
        skip_v(is_skipped);
        look_ahead();
        this->pack_probs();
        this->store(place, factor);
    }

    // The last product of the last tile.
    __device__ __forceinline__ void finish(int place, int accumulate) {
        wait_v();
        issue_output(accumulate);
        float factor[2];
        this->finish_rows(place, factor);
        wgmma_wait<0>();
        hold_registers(output);
        release_v();
        this->store(place, factor);
    }
};

}  // namespace kernel_hub::attention::sm90
