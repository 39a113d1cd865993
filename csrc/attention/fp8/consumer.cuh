// flash_attention_fp8_sm90.cu: a consumer's warpgroup: waits, products, and the order of it all.
#pragma once

#include "attention/fp8/rows.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "kernel_hub/wgmma.cuh"

namespace kernel_hub::attention::fp8 {
template <class C>
struct Consumer : Rows<C> {
    using Base = Rows<C>;
    using Products = Wgmma<__nv_fp8_e4m3>;
    using Base::consumer;
    using Base::k;
    using Base::k_is_there;
    using Base::k_low;
    using Base::output;
    using Base::probs;
    using Base::q_low;
    using Base::q_parity;
    using Base::queries;
    using Base::row;
    using Base::scores;
    using Base::shared;
    using Base::slot;
    using Base::thread_idx;
    using Base::vt;
    using Base::vt_is_there;
    using Base::vt_low;

    __device__ __forceinline__ Consumer(const Parameters& p_, const Shared<C>& shared_,
                                        int consumer_)
        : Base(p_, shared_, consumer_) {}

    // descriptor(), of panels of rows of 64 bytes too.
    template <int kRowBytes>
    __device__ __forceinline__ static uint64_t panel_descriptor(uint32_t low,
                                                                uint32_t offset_bytes) {
        constexpr uint32_t kHigh = kRowBytes == 128 ? kDescriptorHigh : (2u << 30) | (512u >> 4);
        return (static_cast<uint64_t>(kHigh) << 32) | (low + (offset_bytes >> 4));
    }

    // Issues scores = Q K^T.
    __device__ __forceinline__ void issue_scores() {
        constexpr int kSteps = C::kPanelColumns / 32;
        const uint32_t b = k_low + k.stage * (C::kKVBytes / 16);
        hold_registers(scores);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::kHeadDim / 32; ++i) {
            const int panel = i / kSteps, column_bytes = i % kSteps * 32;
            const uint64_t b_desc =
                panel_descriptor<C::kPanelColumns>(b, panel * C::kKVPanelBytes + column_bytes);
            if constexpr (C::kQInRegisters) {
                Products::rs(scores, queries[i], b_desc, i != 0);
            } else {
                const int offset = panel * C::kQPanelBytes + column_bytes;
                Products::ss(scores, panel_descriptor<C::kPanelColumns>(q_low, offset), b_desc,
                             i != 0);
            }
        }
        wgmma_commit();
    }

    // Issues output += P V.
    __device__ __forceinline__ void issue_output(int accumulate) {
        constexpr int kSteps = C::kPanelKeys / 32;
        const uint32_t b = vt_low + vt.stage * (C::kVtBytes / 16);
        hold_registers(output);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::kBlockN / 32; ++i) {
            const int offset = i / kSteps * C::kVtPanelBytes + i % kSteps * 32;
            Products::rs(output, probs[i], panel_descriptor<C::kPanelKeys>(b, offset),
                         i != 0 ? 1 : accumulate);
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void wait_k() {
        mbarrier_wait_unless(k_is_there, shared.k_full(k.stage), k.parity);
        k_is_there = false;
    }
    __device__ __forceinline__ void wait_vt() {
        mbarrier_wait_unless(vt_is_there, shared.vt_full(vt.stage), vt.parity);
        vt_is_there = false;
    }
    // Asks ahead of the waits: most often they find K and V there, and the answer is known by then.
    __device__ __forceinline__ void look_ahead() {
        k_is_there = mbarrier_test_wait(shared.k_full(k.stage), k.parity);
        vt_is_there = mbarrier_test_wait(shared.vt_full(vt.stage), vt.parity);
    }
    __device__ __forceinline__ void wait_q() {
        mbarrier_wait(shared.q_full(consumer), q_parity);
        if constexpr (C::kQInRegisters) {
            this->read_queries();
        }
    }

    // And Q with it, where these were its last scores.
    __device__ __forceinline__ void release_k(bool is_last) {
        mbarrier_arrive_if(shared.k_empty(k.stage), thread_idx == 0);
        if constexpr (!C::kQInRegisters) {
            mbarrier_arrive_if(shared.q_empty(consumer), is_last && thread_idx == 0);
            q_parity ^= is_last;
        }
        k.advance();
    }

    __device__ __forceinline__ void release_vt() {
        mbarrier_arrive_if(shared.vt_empty(vt.stage), thread_idx == 0);
        vt.advance();
    }

    // The consumers issue their products in turns.
    __device__ __forceinline__ void take_turn() { named_barrier_sync(1 + consumer, 256); }
    __device__ __forceinline__ void pass_turn() {
        named_barrier_arrive(1 + (consumer + 1 == C::kConsumers ? 0 : consumer + 1), 256);
    }

    // Scores of `block` under the product of the block before it, in the same tile.
    template <bool kMasked>
    __device__ __forceinline__ void step(const Tile& tile, int block, int accumulate) {
        wait_k();
        const BlockScales scales = this->read_block_scales();
        take_turn();
        issue_scores();
        wait_vt();
        issue_output(accumulate);
        pass_turn();
        wgmma_wait<1>();
        hold_registers(scores);
        const float output_factor = this->template take_scales<false>(scales);
        release_k(block == tile.block_begin);
        if constexpr (kMasked) {
            this->template mask<true>(tile, block);
        }
        this->template softmax<false>(output_factor);
        hold_registers(scores);
        wgmma_wait<0>();
        hold_registers(output);
        release_vt();
        look_ahead();
        this->pack_probs();
        this->rescale_output();
    }

    // The next tile, and its place in the ring.
    __device__ __forceinline__ Tile next_tile(int& place) {
        mbarrier_wait(shared.tile_full(slot.stage), slot.parity);
        place = slot.stage;
        slot.advance();
        return this->read_tile(place);
    }

    __device__ __forceinline__ void run() {
        int place, next_place;
        Tile tile = next_tile(place);
        if (!tile.is_valid()) {
            return;
        }
        if (consumer == C::kConsumers - 1) {
            pass_turn();
        }
        begin(tile, place);
        while (true) {
            const int accumulate = walk(tile);
            const Tile next = next_tile(next_place);
            if (!next.is_valid()) {
                finish(place, accumulate);
                return;
            }
            cross(place, next, next_place, accumulate);
            tile = next;
            place = next_place;
        }
    }

    // The first scores of the first tile, with nothing to run under them.
    __device__ __forceinline__ void begin(const Tile& tile, int place) {
        wait_q();
        wait_k();
        const BlockScales scales = this->read_block_scales();
        if constexpr (C::kScales == Scales::kBlocks) {
            named_barrier_sync(2 + C::kConsumers + consumer, 128);
        }
        issue_scores();
        this->read_score_scale(place);
        wgmma_wait<0>();
        hold_registers(scores);
        this->template take_scales<true>(scales);
        const int block = tile.block_end - 1;
        release_k(block == tile.block_begin);
        this->mask_first(tile, block);
        this->template softmax<true>(1.f);
        this->pack_probs();
    }

    // All blocks of the tile but the first one's scores and the last one's product. Returns whether
    // the output holds something.
    __device__ __forceinline__ int walk(const Tile& tile) {
        int accumulate = 0;
        int block = tile.block_end - 2;
        if constexpr (C::kMask != Mask::kFull) {
            // Blocks from `masked` on have keys that the warpgroup's first row does not see.
            const int first_row =
                tile.row_begin + consumer * pack_tokens<C>(this->p) + diagonal_of<C>(this->p, tile);
            const int visible = max(0, min(tile.seqlen_k, first_row + 1));
            const int masked = max(tile.block_begin, visible / C::kBlockN);
#pragma unroll 1
            for (; block >= masked; --block) {
                step<true>(tile, block, accumulate);
                accumulate = 1;
            }
        }
#pragma unroll 1
        for (; block >= tile.block_begin; --block) {
            step<false>(tile, block, accumulate);
            accumulate = 1;
        }
        return accumulate;
    }

    // The first scores of the next tile under the last product of this one, then this one's output.
    __device__ __forceinline__ void cross(int place, const Tile& next, int next_place,
                                          int accumulate) {
        wait_q();
        wait_k();
        const BlockScales scales = this->read_block_scales();
        take_turn();
        issue_scores();
        wait_vt();
        issue_output(accumulate);
        pass_turn();
        float factor[2];
        this->finish_rows(place, factor);
        this->read_score_scale(next_place);
        wgmma_wait<1>();
        hold_registers(scores);
        this->template take_scales<true>(scales);
        const int block = next.block_end - 1;
        release_k(block == next.block_begin);
        this->mask_first(next, block);
        this->template softmax<true>(1.f);
        hold_registers(scores);
        wgmma_wait<0>();
        hold_registers(output);
        release_vt();
        look_ahead();
        this->pack_probs();
        this->store(place, factor);
    }

    // The last product of the last tile.
    __device__ __forceinline__ void finish(int place, int accumulate) {
        wait_vt();
        issue_output(accumulate);
        float factor[2];
        this->finish_rows(place, factor);
        wgmma_wait<0>();
        hold_registers(output);
        release_vt();
        this->store(place, factor);
    }
};

}  // namespace kernel_hub::attention::fp8
