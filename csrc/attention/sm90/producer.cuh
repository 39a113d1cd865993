// flash_attention_sm90.cu: the warpgroup that loads: a warp for Q and K, one for V, and two that
// write tiles without keys.
#pragma once

#include "attention/sm90/line.cuh"
#include "attention/sm90/schedule.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"

namespace kernel_hub::attention::sm90 {

// The next tile, to all that read the ring. A whole warp.
template <class C>
__device__ __forceinline__ void publish_tile(const Shared<C>& shared, const Place<kTileSlots>& slot,
                                             const Tile& tile) {
    mbarrier_wait(shared.tile_empty(slot.stage), slot.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
        int4* words = reinterpret_cast<int4*>(shared.tiles + slot.stage);
        words[0] = make_int4(tile.row_begin, tile.head, tile.batch, tile.q_begin);
        words[1] = make_int4(tile.seqlen_q, tile.seqlen_k, tile.block_begin, tile.block_end);
        mbarrier_arrive(shared.tile_full(slot.stage));
    }
}

// Split: the pieces of the block's share, one after another. A warp that loads nothing: finding the
// next one takes about as long as a block of keys. Those that are drawn it asks for when the
// loader of K does: who is busy for long would hold one that another could begin.
template <class C>
__device__ __forceinline__ void deal_share(const Parameters& p, const Shared<C>& shared) {
    Walker<C> walker(p, *shared.line);
    Place<kTileSlots> slot;
    Place<1> asked;
    bool is_found = true, is_first = true;
    while (is_found) {
        if (walker.is_drawn && !is_first) {
            mbarrier_wait(shared.asked(), asked.parity);
            asked.advance();
        }
        is_first = false;
        Tile tile;
        is_found = walker.next(tile);
        if (!is_found) {
            tile = {};
            tile.row_begin = -1;
        }
        publish_tile(shared, slot, tile);
        slot.advance();
    }
    if (walker.is_drawn && threadIdx.x % 32 == 0) {
        give_back(p.tile_counter);
    }
}

// A whole warp brings the blocks of K (and Q, and finds the tiles) or of V into their ring; one
// lane starts the copies. Two such warps run the same code.
template <class C>
struct Loader {
    const Parameters& p;
    const Shared<C>& shared;
    const bool has_values;  // V, else Q and K
    const CUtensorMap* const map;
    const uint32_t tiles, full, empty;  // of stage 0
    const int lane_idx;
    Place<C::kStages> place;
    Place<C::kQStages> q;
    Place<kTileSlots> slot;
    int ticket = 0;  // lane 0: what the counter said last

    __device__ __forceinline__ Loader(const Parameters& p_, const Shared<C>& shared_, bool values)
        : p(p_),
          shared(shared_),
          has_values(values),
          map(values ? p_.v : p_.k),
          tiles(values ? shared_.v : shared_.k),
          full(values ? shared_.v_full(0) : shared_.k_full(0)),
          empty(values ? shared_.v_empty(0) : shared_.k_empty(0)),
          lane_idx(threadIdx.x % 32) {}

    // Waits for room for a block and announces its bytes.
    __device__ __forceinline__ void open(bool is_leader) {
        mbarrier_wait(empty + 8 * place.stage, place.parity ^ 1);
        if (is_leader) {
            mbarrier_arrive_expect_tx(full + 8 * place.stage, has_values ? C::kVBytes : C::kKBytes);
        }
    }

    __device__ __forceinline__ void copy(uint32_t target, int row, int head, int batch) const {
#pragma unroll
        for (int panel = 0; panel < C::kVPanels; ++panel) {
            tma_load_4d(target + panel * C::kKVPanelBytes, map, full + 8 * place.stage,
                        panel * kPanelColumns, row, head, batch);
        }
        if constexpr (C::kVPanels < C::kPanels) {
#pragma unroll
            for (int panel = C::kVPanels; panel < C::kPanels && !has_values; ++panel) {
                tma_load_4d(target + panel * C::kKVPanelBytes, map, full + 8 * place.stage,
                            panel * kPanelColumns, row, head, batch);
            }
        }
    }

    // The blocks of a tile, from right to left.
    __device__ __forceinline__ void load(const Tile& tile) {
        // Split: with the piece's place in the upper half.
        const int q_head = C::kSplit ? tile.head & 0xffff : tile.head;
        const int head = q_head / (p.num_heads / p.num_kv_heads);
        if (p.block_table) {
            load_pages(tile, head);
            return;
        }
        const int begin = p.cu_seqlens_k ? p.cu_seqlens_k[tile.batch] : 0;
        const int batch = p.cu_seqlens_k ? 0 : tile.batch;
#pragma unroll 1
        for (int block = tile.block_end - 1; block >= tile.block_begin; --block) {
            const uint32_t target = tiles + place.stage * (has_values ? C::kVBytes : C::kKBytes);
            const int row = begin + block * C::kBlockN;
            const bool is_leader = elect_one();
            open(is_leader);
            if (is_leader) {
                copy(target, row, head, batch);
            }
            place.advance();
            follow(tile, block);
        }
    }

    // The same through the block table: lane i finds the page of the i-th box of a block, and reads
    // the table a block ahead. A box past the sequence's end, or on a page that is not there, has
    // page -1, for which the TMA writes zeros.
    __device__ __forceinline__ void load_pages(const Tile& tile, int head) {
        const int num_boxes = C::kBlockN / p.box_rows;
        const int step_pages = C::kBlockN / p.page_size;
        const int step_rows = C::kBlockN - step_pages * p.page_size;
        const int* table = p.block_table + tile.batch * p.block_table_stride;
        int key = (tile.block_end - 1) * C::kBlockN + lane_idx * p.box_rows;
        int index = key / p.page_size;        // of the lane's page in the sequence
        int row = key - index * p.page_size;  // of the box in it
        bool is_box = lane_idx < num_boxes && key < tile.seqlen_k;
        int page = is_box ? table[index] : 0;
#pragma unroll 1
        for (int block = tile.block_end - 1; block >= tile.block_begin; --block) {
            const bool is_there = is_box && is_index(page, p.num_pages);
            report_if(p.flag, is_box && !is_there, kPagesOutside);
            const int pages = is_there ? page : -1;
            int box_row = __shfl_sync(kAllLanes, row, 0);
            key -= C::kBlockN;
            index -= step_pages;
            row -= step_rows;
            if (row < 0) {
                row += p.page_size;
                --index;
            }
            is_box = block > tile.block_begin && lane_idx < num_boxes;
            if (is_box) {
                page = table[index];
            }
            uint32_t target = tiles + place.stage * (has_values ? C::kVBytes : C::kKBytes);
            const bool is_leader = elect_one();
            open(is_leader);
#pragma unroll 1
            for (int first = 0; first < num_boxes; first += kBoxes) {
                int found[kBoxes];
#pragma unroll
                for (int i = 0; i < kBoxes; ++i) {
                    found[i] = __shfl_sync(kAllLanes, pages, first + i);
                }
#pragma unroll
                for (int i = 0; i < kBoxes; ++i) {
                    if (is_leader && first + i < num_boxes) {
                        copy(target, box_row, head, found[i]);
                    }
                    target += p.box_rows * 128;
                    box_row += p.box_rows;
                    box_row = box_row == p.page_size ? 0 : box_row;
                }
            }
            place.advance();
            follow(tile, block);
        }
    }

    __device__ __forceinline__ void publish(const Tile& tile) const {
        publish_tile(shared, slot, tile);
    }

    // Split: the rows of all consumers in one copy a panel.
    __device__ __forceinline__ void load_packed_q(const Tile& tile) {
        const int row = tile.q_begin + tile.row_begin, batch = p.cu_seqlens_q ? 0 : tile.batch;
#pragma unroll
        for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
            mbarrier_wait(shared.q_empty(q.stage, consumer), q.parity ^ 1);
        }
        if (elect_one()) {
            const int rows = p.packing.heads * p.packing.tokens;
            const uint32_t target = shared.q + q.stage * (C::kConsumers * C::kQBytes);
            mbarrier_arrive_expect_tx(shared.q_full(q.stage, 0), C::kPanels * rows * 128);
#pragma unroll
            for (int panel = 0; panel < C::kPanels; ++panel) {
                tma_load_4d(target + panel * C::kQPanelStride, p.q, shared.q_full(q.stage, 0),
                            panel * kPanelColumns, tile.head & 0xffff, row, batch);
            }
        }
        q.advance();
    }

    // NOTE: one consumer after another: with three of them, and two panels, registers are too few.
    __device__ __forceinline__ void load_q(const Tile& tile) {
        const int row = tile.q_begin + tile.row_begin, batch = p.cu_seqlens_q ? 0 : tile.batch;
#pragma unroll 1
        for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
            const uint32_t full = shared.q_full(q.stage, consumer);
            mbarrier_wait(shared.q_empty(q.stage, consumer), q.parity ^ 1);
            if (elect_one()) {
                mbarrier_arrive_expect_tx(full, C::kQBytes);
#pragma unroll
                for (int panel = 0; panel < C::kPanels; ++panel) {
                    tma_load_4d(shared.q_tile(q.stage, consumer) + panel * C::kQPanelBytes, p.q,
                                full, panel * kPanelColumns, row + 64 * consumer, tile.head, batch);
                }
            }
        }
        q.advance();
    }

    __device__ __forceinline__ void prefetch_q(const Tile& tile) const {
        const int row = tile.q_begin + tile.row_begin, batch = p.cu_seqlens_q ? 0 : tile.batch;
        if (elect_one()) {
#pragma unroll 1
            for (int box = 0; box < C::kPanels * C::kConsumers; ++box) {
                tma_prefetch_4d(p.q, box % C::kPanels * kPanelColumns,
                                row + 64 * (box / C::kPanels), tile.head, batch);
            }
        }
    }

    // What comes after a block of K.
    __device__ __forceinline__ void follow(const Tile& tile, int block) {
        if (has_values) {
            return;
        }
        if (block == tile.block_end - 1) {
            if constexpr (C::kSplit) {
                load_packed_q(tile);
            } else {
                load_q(tile);
            }
        }
        // Before the answer is needed, by the blocks that lie in the ring. NOTE: no earlier: who is
        // busy for long would hold a tile that another could begin.
        if (block == min(tile.block_end - 1, tile.block_begin + kBlocksAhead)) {
            if constexpr (C::kSplit) {
                mbarrier_arrive_if(shared.asked(), lane_idx == 0);
            } else {
                take_ticket();
            }
        }
    }

    __device__ __forceinline__ void take_ticket() {
        ticket = lane_idx == 0 ? atomicAdd(p.tile_counter, 1) : 0;
    }

    // The tile after number `index`, as the ticket says. Dealt, no more than two a block: who had
    // the longest takes the shortest.
    __device__ __forceinline__ int following(int index) const {
        const int num_blocks = gridDim.x;
        if (C::kMask != Mask::kFull && p.heads_per_group < 0) {
            return index < num_blocks ? 2 * num_blocks - 1 - index : 2 * num_blocks;
        }
        return num_blocks + __shfl_sync(kAllLanes, ticket, 0);
    }

    // The next tile with keys of the schedule, published; one that is not valid after the last.
    __device__ __forceinline__ void find(Schedule<C>& schedule, int& index) {
        Tile tile;
        bool is_found = false;
        while (!is_found && schedule.find(index, tile)) {
            is_found = tile.row_begin < tile.seqlen_q && !tile.is_empty();
            if (!is_found) {
                take_ticket();
                index = following(index);
            }
        }
        if (is_found) {
            prefetch_q(tile);
        } else {
            tile = {};
            tile.row_begin = -1;
        }
        publish(tile);
    }

    // Split: what `deal_share` finds.
    __device__ __forceinline__ void run_share() {
        while (true) {
            mbarrier_wait(shared.tile_full(slot.stage), slot.parity);
            const Tile tile = shared.read_tile(slot.stage);
            __syncwarp();
            mbarrier_arrive_if(shared.tile_empty(slot.stage), lane_idx == 0);
            slot.advance();
            if (!tile.is_valid()) {
                return;
            }
            load(tile);
        }
    }

    __device__ __forceinline__ void run() {
        Schedule<C> schedule{p, *shared.order};
        int index = blockIdx.x;
        while (true) {
            if (!has_values) {
                find(schedule, index);
            }
            mbarrier_wait(shared.tile_full(slot.stage), slot.parity);
            const Tile tile = shared.read_tile(slot.stage);
            __syncwarp();
            mbarrier_arrive_if(shared.tile_empty(slot.stage), lane_idx == 0);
            slot.advance();
            if (!tile.is_valid()) {
                break;
            }
            load(tile);
            index = following(index);
        }
        if (!has_values && lane_idx == 0) {
            give_back(p.tile_counter);
        }
    }

    static constexpr int kBoxes = 2;  // whose pages are exchanged at a time
    // Narrower blocks are gone sooner. Split: another warp asks, and looks for it longer.
    static constexpr int kBlocksAhead = C::kSplit ? 3 : C::kBlockN < 128 ? 2 : 1;
};

}  // namespace kernel_hub::attention::sm90
