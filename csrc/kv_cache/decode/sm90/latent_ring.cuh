// mla_decode_sm90.cu: the shared memory of a block of few rows, and the warp that loads.
#pragma once

#include "kv_cache/decode/sm90/latent_shared.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

// A ring of panels (64 tokens by 64 columns), the queries' panels, probabilities (rows by tokens),
// and what the warps tell each other of every row. A tile is 9 panels, its rope panel first.
template <int kRows_>
struct LatentRing {
    static constexpr int kRows = kRows_, kTile = 64, kThreads = 192;
    static constexpr int kLoader = 4, kFinder = 5;  // warps
    static constexpr int kPanels = kKeyDim / 64, kPanelBytes = kTile * 128;
    static constexpr int kQueryBytes = kRows * 128;  // of a panel
    static constexpr int kWordsBytes = 4 * kRows * 4;
    static constexpr int kFixedBytes =
        (kPanels + 1) * kQueryBytes + 2 * kWordsBytes + LatentParts::kBytes;
    // Not all of the 227 KiB: blocks of the merge wait beside this one.
    static constexpr int kSlots = ((210 << 10) - kFixedBytes) / (kPanelBytes + 16);
    static constexpr int kQueries = kSlots * kPanelBytes, kProbs = kQueries + kPanels * kQueryBytes;
    static constexpr int kMaxima = kProbs + kQueryBytes, kSums = kMaxima + kWordsBytes;
    static constexpr int kBarriers = kSums + kWordsBytes;
    static constexpr int kParts = kBarriers + 16 * kSlots;
    static constexpr int kSharedBytes = kParts + LatentParts::kBytes;
    static_assert(kSlots >= 2 * kPanels, "loads go on under a tile's products");

    uint32_t base;
    int slot;         // of the next panel
    uint32_t parity;  // of its turn

    __device__ __forceinline__ uint32_t full(int i) const { return base + kBarriers + 8 * i; }
    __device__ __forceinline__ uint32_t empty(int i) const { return full(kSlots + i); }
    __device__ __forceinline__ void advance(int panels) {
        slot += panels;
        parity ^= slot >= kSlots;
        slot -= slot >= kSlots ? kSlots : 0;
    }
    // The place of the i-th panel from here, and its parity.
    __device__ __forceinline__ int at(int i) const {
        return slot + i - (slot + i >= kSlots ? kSlots : 0);
    }
    __device__ __forceinline__ uint32_t parity_at(int i) const {
        return parity ^ (slot + i >= kSlots);
    }
};

// The warp that loads.
template <typename T, int kRows>
struct LatentRingProducer {
    using Ring = LatentRing<kRows>;
    const LatentArgs<T>& args;
    const CUtensorMap* map;
    const int box_rows;
    Ring ring;

    // Lanes 0 .. 7 find the pages of a tile's boxes, a tile ahead. A box that is not there has page
    // -1, for which the TMA writes zeros.
    __device__ __forceinline__ void load(const LatentPart& part) {
        const int lane_idx = threadIdx.x & 31;
        const int boxes = Ring::kTile / box_rows;
        const int* table = args.block_table == nullptr
                               ? nullptr
                               : args.block_table + part.batch_idx * args.block_table_stride;
        int token = part.first_token + lane_idx * box_rows, page = part.batch_idx;
        bool is_box = lane_idx < boxes && token < part.end_token, is_outside = false;
        if (is_box && table != nullptr) {
            page = __ldg(table + token / args.page_size);
        }
#pragma unroll 1
        for (int first = part.first_token; first < part.end_token; first += Ring::kTile) {
            const bool is_there = is_box && is_index(page, args.num_pages);
            is_outside |= is_box && !is_there;
            const int found = is_there ? page : -1;
            const int in_page = is_there && table != nullptr ? token % args.page_size : token;
            token += Ring::kTile;
            is_box = lane_idx < boxes && token < part.end_token;
            if (is_box && table != nullptr) {
                page = __ldg(table + token / args.page_size);
            }
#pragma unroll 1
            for (int i = 0; i < Ring::kPanels; ++i) {
                const uint32_t full = ring.full(ring.slot);
                uint32_t target = ring.base + ring.slot * Ring::kPanelBytes;
                mbarrier_wait(ring.empty(ring.slot), ring.parity ^ 1);
                const bool is_leader = elect_one();
                if (is_leader) {
                    mbarrier_arrive_expect_tx(full, Ring::kPanelBytes);
                }
                const int column = (i == 0 ? Ring::kPanels - 1 : i - 1) * 64;
#pragma unroll 1
                for (int b = 0; b < boxes; ++b) {
                    const int box_page = __shfl_sync(~0u, found, b);
                    const int row = __shfl_sync(~0u, in_page, b);
                    if (is_leader) {
                        tma_load_4d(target, map, full, column, row, 0, box_page);
                    }
                    target += box_rows * 128;
                }
                __syncwarp();
                ring.advance(1);
            }
        }
        report_if(args.flag, is_outside, kPagesOutside);
    }
};

}  // namespace kernel_hub::kv_cache::decode::sm90
