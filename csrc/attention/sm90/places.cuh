// flash_attention_split_sm90.cu: which tiles the merge has to write, and where their pieces are.
#pragma once

#include "attention/sm90/line.cuh"
#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/math.cuh"

namespace kernel_hub::attention::sm90 {

constexpr int kMergeWarps = 8;
constexpr int kMergeSlots = 512;  // pieces of a tile at most: two of each chunk

// The places of a tile's pieces that saw keys, in the order of the keys; -1: the tile is whole, and
// written. A warp.
template <class C>
__device__ __forceinline__ int find_pieces(const Parameters& p, const Sequence<C>& sequence,
                                           int batch, int kv_head, int which, int begin, int share,
                                           short* slots) {
    const int lane_idx = threadIdx.x % 32;
    int count = 0;
#pragma unroll 1
    for (int first = 0; first < 2 * sequence.chunks; first += 32) {
        const int index = (first + lane_idx) / 2, half = lane_idx % 2;
        bool is_there = false, is_whole = false;
        int slot = 0;
        if (index < sequence.chunks) {
            // A chunk of a tile lies in one share, or two.
            const int at = begin + sequence.place(kv_head, index, which);
            const int width = sequence.chunk_width(index);
            const int head = min(width, (at / share + 1) * share - at);
            const int skipped = half == 0 ? 0 : head;
            const Stretch s{sequence.chunk_begin(index) + skipped, half == 0 ? head : width - head,
                            at + skipped};
            if (s.count > 0) {
                slot = slot_of(s.at, s.count, share);
                is_there = !sequence.describe(p, batch, kv_head, which, s, slot).is_empty();
                is_whole = is_there && sequence.is_whole(s);
            }
        }
        if (__any_sync(kAllLanes, is_whole)) {
            return -1;
        }
        const unsigned there = __ballot_sync(kAllLanes, is_there);
        const int place = count + __popc(there & ((1u << lane_idx) - 1));
        if (is_there && place < kMergeSlots) {
            slots[place] = slot;
        }
        count += __popc(there);
    }
    __syncwarp();
    return min(count, kMergeSlots);
}

// Says which tables led outside.
__device__ __forceinline__ void report_lengths(const Parameters& p) {
#pragma unroll 1
    for (int batch = threadIdx.x; batch < p.batch_size; batch += blockDim.x) {
        const RowRange queries = find_queries(p, batch), keys = find_keys(p, batch);
        const bool is_outside_q = queries.is_outside || queries.count > p.seqlen_q;
        const bool is_outside_k = keys.is_outside || keys.count > p.seqlen_k;
        report(p.flag, (is_outside_q ? kQueriesOutside : 0) | (!is_outside_k     ? 0
                                                               : p.cache_seqlens ? kLengthsOutside
                                                                                 : kKeysOutside));
    }
}

// Tiles of a sequence and kv head, at most.
__device__ __forceinline__ int most_tiles(const Parameters& p) {
    return quotient(p.seqlen_q + p.packing.tokens - 1, p.packing.tokens) *
           p.packing.packs(quotient(p.num_heads, p.num_kv_heads));
}

// A tile's place among those that there are at most.
struct TileIndex {
    int batch, kv_head, which, packs;

    __device__ __forceinline__ TileIndex(const Parameters& p, int tile) {
        packs = p.packing.packs(quotient(p.num_heads, p.num_kv_heads));
        const int most = most_tiles(p), head = quotient(tile, most);
        batch = quotient(head, p.num_kv_heads);
        kv_head = head - batch * p.num_kv_heads;
        which = tile - head * most;
    }
};

// Deals the units of a sequence; where it begins in the line, and a block's share of it.
// NOTE: read past the L1, before this launch waits: the first block of the one before wrote it
// before it let this one begin.
template <class C>
__device__ __forceinline__ void find_in_line(const Parameters& p, Sequence<C>& sequence, int batch,
                                             int blocks, int& begin, int& share) {
    const bool has_line = has_device_lengths(p);
    const volatile int* line = p.packing.line;
    const int longest = has_line ? line[p.batch_size + 1] : p.packing.longest;
    int units = has_line ? line[p.batch_size] : 0;
    begin = has_line ? line[batch] : 0;
    if (!has_line) {
        const int own = p.num_kv_heads * sequence.tiles * parts_of(sequence.width, longest);
        units = own * p.batch_size;
        begin = own * batch;
    }
    share = share_of(p, longest, units, blocks);
    sequence.deal(longest, share);
}

// Where the pieces of a tile are that saw keys, in the order of the keys: one after the other, or
// step 0: in a list. count -1: the tile is whole, and written.
struct Places {
    int count = -1, first = 0, step = 0;
};

// slots: the list. A warp.
template <class C>
__device__ __forceinline__ Places find_places(const Parameters& p, Sequence<C>& sequence, int batch,
                                              int kv_head, int which, int packs, int blocks,
                                              short* slots) {
    const bool has_line = has_device_lengths(p);
    const volatile int* line = p.packing.line;
    const int longest = has_line ? line[p.batch_size + 1] : p.packing.longest;
    if (longest == 1) {
        int begin, share;
        find_in_line(p, sequence, batch, blocks, begin, share);
        return {find_pieces(p, sequence, batch, kv_head, which, begin, share, slots)};
    }
    // NOTE: all warps of a multiprocessor go through this one after the other, and what comes after
    // the wait waits for it: each quotient costs.
    const int parts = parts_of(sequence.width, longest), tiles = sequence.tiles;
    int end = sequence.seqlen_k;
    if (p.window_right >= 0) {
        const int token = quotient(which, packs) * p.packing.tokens;
        const int row_end = min(token + p.packing.tokens, sequence.seqlen_q);
        end = min(end, row_end + sequence.seqlen_k - sequence.seqlen_q + p.window_right);
    }
    const int seen = blocks_over<C>(p, max(0, end));
    if (parts <= 1) {
        return {seen > 0 ? -1 : 0};
    }
    const int begin = has_line ? line[batch] : batch * p.num_kv_heads * parts * tiles;
    const int unit = parts_of(sequence.width, parts);
    return {min(parts, parts_of(seen, unit)), begin + (kv_head * parts + 1) * tiles - 1 - which,
            tiles};
}

// Whether the first kernel did not write a tile: it has pieces, or sees no keys.
template <class C>
__device__ __forceinline__ bool is_left(const Parameters& p, int tile, int blocks) {
    const TileIndex at(p, tile);
    if (at.batch >= p.batch_size) {
        return false;
    }
    Sequence<C> sequence(p, at.batch);
    if (at.which >= sequence.tiles) {
        return false;
    }
    int begin, share;
    find_in_line(p, sequence, at.batch, blocks, begin, share);
    const int first = begin + sequence.place(at.kv_head, 0, at.which);
    const Stretch s{0, sequence.width, first};
    return sequence.chunks > 1 || sequence.width == 0 ||
           first / share != (first + sequence.width - 1) / share ||
           sequence.describe(p, at.batch, at.kv_head, at.which, s, 0).is_empty();
}

// Where tiles are whole or in parts: the tiles of sequences that `is_left` may be true of, as a
// line of these. begin: of each sequence's, then their number. Every thread of a block.
template <class C>
__device__ __forceinline__ void find_left(const Parameters& p, int (&begin)[Line::kMost + 1]) {
    __shared__ int sums[kMergeWarps];
    const int batch = threadIdx.x, lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32;
    int own = 0;
    if (batch < p.batch_size) {
        const volatile int* line = p.packing.line;
        const Sequence<C> sequence(p, batch);
        const int hidden = sequence.seqlen_q - sequence.seqlen_k - p.window_right;
        const bool is_whole = sequence.width > 0 && (p.window_right < 0 || hidden <= 0) &&
                              parts_of(sequence.width, line[p.batch_size + 1]) == 1;
        own = is_whole ? 0 : p.num_kv_heads * sequence.tiles;
    }
    int end = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int left = __shfl_up_sync(kAllLanes, end, step);
        end += lane_idx >= step ? left : 0;
    }
    if (lane_idx == 31) {
        sums[warp_idx] = end;
    }
    __syncthreads();
    for (int i = 0; i < warp_idx; ++i) {
        end += sums[i];
    }
    begin[batch + 1] = end;
    if (batch == 0) {
        begin[0] = 0;
    }
    __syncthreads();
}

// The tile that is the index-th of them, numbered as `TileIndex` does.
__device__ __forceinline__ int tile_left(const Parameters& p, const int (&begin)[Line::kMost + 1],
                                         int index) {
    int batch = 0, behind = Line::kMost;
#pragma unroll 1
    while (behind - batch > 1) {
        const int middle = (batch + behind) / 2;
        const bool is_before = begin[middle] <= index;
        batch = is_before ? middle : batch;
        behind = is_before ? behind : middle;
    }
    const int tiles = (begin[batch + 1] - begin[batch]) / p.num_kv_heads;
    const int kv_head = (index - begin[batch]) / tiles;
    return (batch * p.num_kv_heads + kv_head) * most_tiles(p) + index - begin[batch] -
           kv_head * tiles;
}

}  // namespace kernel_hub::attention::sm90
