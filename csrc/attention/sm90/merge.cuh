// flash_attention_split_sm90.cu: the second kernel, which merges the pieces of each tile in order.
#pragma once

#include "attention/sm90/line.cuh"
#include "attention/sm90/rows.cuh"
#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/math.cuh"

namespace kernel_hub::attention::sm90 {

constexpr int kMergeWarps = 8;
constexpr int kMergeSlots = 512;  // pieces of a tile at most: two of each chunk
constexpr int kAtOnce = 4;        // pieces on their way

// What a lane holds of a strip of 16 rows: rows lane / 4 and + 8, of 32 columns those that a
// consumer's thread holds (Wgmma).
struct Merged {
    float shift[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    float values[16] = {};

    // Adds states over other keys, in their order.
    template <int kCount>
    __device__ __forceinline__ void add(const float2 (&rows)[kCount][2],
                                        const float4 (&parts)[kCount][4]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest = shift[r];
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                largest = max_nan(largest, rows[i][r].x);
            }
            const float base = largest == -INFINITY ? 0.f : largest;
            float weight = exp2_approx(shift[r] - base);
            shift[r] = largest;
            sum[r] *= weight;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                values[4 * j + 2 * r] *= weight;
                values[4 * j + 2 * r + 1] *= weight;
            }
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                weight = exp2_approx(rows[i][r].x - base);
                sum[r] = fmaf(weight, rows[i][r].y, sum[r]);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float4& part = parts[i][j];
                    float& x = values[4 * j + 2 * r];
                    float& y = values[4 * j + 2 * r + 1];
                    x = fmaf(weight, r == 0 ? part.x : part.z, x);
                    y = fmaf(weight, r == 0 ? part.y : part.w, y);
                }
            }
        }
    }
};

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

// A tile's place among those that there are at most.
struct TileIndex {
    int batch, kv_head, which, packs;

    __device__ __forceinline__ TileIndex(const Parameters& p, int tile) {
        packs = p.packing.packs(p.num_heads / p.num_kv_heads);
        const int most = (p.seqlen_q + p.packing.tokens - 1) / p.packing.tokens * packs;
        batch = tile / (most * p.num_kv_heads);
        kv_head = tile / most % p.num_kv_heads;
        which = tile % most;
    }
};

// Deals the units of a sequence; where it begins in the line, and a block's share of it.
template <class C>
__device__ __forceinline__ void find_in_line(const Parameters& p, Sequence<C>& sequence, int batch,
                                             int blocks, int& begin, int& share) {
    const bool has_line = has_device_lengths(p);
    const int* line = p.packing.line;
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

// A strip of 16 rows by 32 columns of a tile, by `team` warps, each with every team-th piece.
// NOTE: several columns a warp, in fewer waves, take longer: steps of 4 us one after the other.
template <class C>
__device__ __forceinline__ void merge_strip(const Parameters& p, const Pieces& pieces, int blocks,
                                            int team, int tile, int strip, int column, short* slots,
                                            float (*sums)[20][32]) {
    using T = typename C::T;
    const int lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32, member = warp_idx % team;
    const TileIndex at(p, tile);
    const int batch = min(at.batch, p.batch_size - 1), kv_head = at.kv_head, which = at.which;
    const int packs = at.packs, token = which / packs * p.packing.tokens;
    const int row = 16 * strip + lane_idx / 4;
    Sequence<C> sequence(p, batch);
    int count = -1;
    const bool has_rows = at.batch < p.batch_size && which < sequence.tiles &&
                          16 * strip < p.packing.heads * p.packing.tokens &&
                          token + p.packing.token_of(16 * strip) < sequence.seqlen_q;
    if (has_device_lengths(p)) {
        wait_for_launch_before();  // for the line; without one all is known without it
    }
    if (has_rows) {
        int begin, share;
        find_in_line(p, sequence, batch, blocks, begin, share);
        count = find_pieces(p, sequence, batch, kv_head, which, begin, share, slots);
    }
    wait_for_launch_before();
    allow_next_launch();
    Merged merged;
#pragma unroll 1
    for (int first = member; first < count; first += kAtOnce * team) {
        float2 rows[kAtOnce][2];
        float4 parts[kAtOnce][4];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int index = first + i * team;
            const bool is_there = index < count;
            const int slot = is_there ? slots[index] : 0;
            const float2* states = pieces.states(slot) + row;
            const float4* values = pieces.sums(slot, strip, lane_idx) + 128 * column;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                rows[i][r] = is_there ? states[8 * r] : make_float2(-INFINITY, 0.f);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                parts[i][j] = is_there ? values[32 * j] : make_float4(0.f, 0.f, 0.f, 0.f);
            }
        }
        merged.add(rows, parts);
    }
    if (team > 1) {
        auto& own = sums[warp_idx];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            own[i][lane_idx] = merged.values[i];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            own[16 + r][lane_idx] = merged.shift[r];
            own[18 + r][lane_idx] = merged.sum[r];
        }
        __syncthreads();
        if (member != 0) {
            return;
        }
#pragma unroll 1
        for (int i = 1; i < min(team, count); ++i) {
            const auto& other = sums[warp_idx + i];
            float2 rows[1][2];
            float4 parts[1][4];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                rows[0][r] = make_float2(other[16 + r][lane_idx], other[18 + r][lane_idx]);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                parts[0][j] = make_float4(other[4 * j][lane_idx], other[4 * j + 1][lane_idx],
                                          other[4 * j + 2][lane_idx], other[4 * j + 3][lane_idx]);
            }
            merged.add(rows, parts);
        }
    }
    if (count < 0) {
        return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int token_in = p.packing.token_of(row + 8 * r), token_idx = token + token_in;
        const int head = (kv_head * packs + which % packs) * p.packing.heads + row + 8 * r -
                         token_in * p.packing.heads;
        const bool is_inside =
            head < p.num_heads && token_in < p.packing.tokens && token_idx < sequence.seqlen_q;
        float shift = merged.shift[r], sum = merged.sum[r];
        const float factor = add_sink(find_sink(p, batch, min(head, p.num_heads - 1)), shift, sum);
        T* out = static_cast<T*>(p.out) + batch * p.out_batch_stride +
                 (sequence.q_begin + token_idx) * p.out_token_stride + head * p.out_head_stride;
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            words[j] = pack2<T>(merged.values[4 * j + 2 * r] * factor,
                                merged.values[4 * j + 2 * r + 1] * factor);
        }
        transpose_in_quad(words, lane_idx);
        const int first_column = 32 * column + 8 * (lane_idx % 4);
        if (is_inside && first_column < p.head_dim_v) {
            *reinterpret_cast<uint4*>(out + first_column) =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
        if (p.lse && is_inside && column == 0 && lane_idx % 4 == 0) {
            p.lse[batch * p.lse_batch_stride + head * p.lse_head_stride + sequence.q_begin +
                  token_idx] = shift * kLn2 + __logf(sum);
        }
    }
}

// Warps, or teams of several, are numbered through groups of `scan` tiles (32 at most; 1 where a
// team has several warps), strips of a tile (those that have rows), columns. A lane looks at a
// tile: where there are many, nearly all are written already. A group is every groups-th: tiles
// that have pieces are neighbours.
template <class C>
__device__ __forceinline__ void merge_pieces(const Parameters& p, const Pieces& pieces, int blocks,
                                             int team, int scan, int groups, int strips) {
    const int columns = pieces.width / 32;
    __shared__ short slots[kMergeWarps][kMergeSlots];
    __shared__ float sums[kMergeWarps][20][32];
    const int lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32;
    if (blockIdx.x == 0) {
        report_lengths(p);
    }
    const int unit = (blockIdx.x * kMergeWarps + warp_idx) / team;
    const int column = unit % columns, strip = unit / columns % strips;
    const int first = unit / columns / strips;
    unsigned left = 1;
    if (scan > 1) {
        // NOTE: before any return: this launch must not end before the one it merges for.
        wait_for_launch_before();
        left = __ballot_sync(kAllLanes,
                             lane_idx < scan && is_left<C>(p, first + lane_idx * groups, blocks));
    }
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
        merge_strip<C>(p, pieces, blocks, team, first + (__ffs(left) - 1) * groups, strip, column,
                       slots[warp_idx], sums);
    }
}

}  // namespace kernel_hub::attention::sm90
