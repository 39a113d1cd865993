// flash_attention_split_sm90.cu: the second kernel, which merges the pieces of each tile in order.
#pragma once

#include "attention/sm90/places.cuh"
#include "attention/sm90/rows.cuh"
#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/math.cuh"

namespace kernel_hub::attention::sm90 {

constexpr int kAtOnce = 4;  // pieces on their way

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
    const int packs = at.packs, token = quotient(which, packs) * p.packing.tokens;
    const int pack = which - quotient(which, packs) * packs;
    const int row = 16 * strip + lane_idx / 4;
    Sequence<C> sequence(p, batch);
    Places places;
    const bool has_rows = at.batch < p.batch_size && which < sequence.tiles &&
                          16 * strip < p.packing.heads * p.packing.tokens &&
                          token + p.packing.token_of(16 * strip) < sequence.seqlen_q;
    if (has_rows) {
        places = find_places(p, sequence, batch, kv_head, which, packs, blocks, slots);
    }
    const int count = places.count;
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
            int slot = 0;
            if (is_there) {
                slot = places.step == 0 ? slots[index] : places.first + index * places.step;
            }
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
        const int head =
            (kv_head * packs + pack) * p.packing.heads + row + 8 * r - token_in * p.packing.heads;
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

// A block is of the tile blockIdx.y; warps, or teams of several, are numbered through strips of it
// and columns.
template <class C>
__device__ __forceinline__ void merge_pieces(const Parameters& p, const Pieces& pieces, int blocks,
                                             int team) {
    __shared__ short slots[kMergeWarps][kMergeSlots];
    __shared__ float sums[kMergeWarps][20][32];
    const int warp_idx = threadIdx.x / 32, columns = pieces.width / 32;
    const int unit = quotient(blockIdx.x * kMergeWarps + warp_idx, team);
    const int strip = quotient(unit, columns);
    merge_strip<C>(p, pieces, blocks, team, blockIdx.y, strip, unit - strip * columns,
                   slots[warp_idx], sums);
    if (blockIdx.x + blockIdx.y == 0) {
        report_lengths(p);
    }
}

// The same of few of many tiles: warps are numbered through groups of `scan` tiles (32 at most),
// strips, columns. A lane looks at a tile: nearly all are written already. A group is every
// groups-th: tiles that have pieces are neighbours. scan 0: groups of those that `find_left`.
template <class C>
__device__ __forceinline__ void merge_left(const Parameters& p, const Pieces& pieces, int blocks,
                                           int scan, int groups, int strips) {
    const int columns = pieces.width / 32;
    __shared__ short slots[kMergeWarps][kMergeSlots];
    __shared__ int begin[Line::kMost + 1];
    const int lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32;
    const int unit = blockIdx.x * kMergeWarps + warp_idx;
    const int column = unit % columns, strip = unit / columns % strips;
    int index = unit / columns / strips;
    unsigned left = 0;
    if (scan == 0) {
        find_left<C>(p, begin);
        index = index < groups ? index : begin[Line::kMost];
    } else {
        left = __ballot_sync(kAllLanes,
                             lane_idx < scan && is_left<C>(p, index + lane_idx * groups, blocks));
    }
#pragma unroll 1
    while (scan == 0 ? index < begin[Line::kMost] : left != 0) {
        const int tile =
            scan == 0 ? tile_left(p, begin, index) : index + (__ffs(left) - 1) * groups;
        merge_strip<C>(p, pieces, blocks, 1, tile, strip, column, slots[warp_idx], nullptr);
        index += scan == 0 ? groups : 0;
        left &= left - 1;
    }
    // NOTE: this launch must not end before the one it merges for.
    wait_for_launch_before();
    if (blockIdx.x == 0) {
        report_lengths(p);
    }
}

// kLeft: `merge_left`.
template <class C, bool kLeft>
__device__ __forceinline__ void merge(const Parameters& p, const Pieces& pieces, int blocks,
                                      int team, int scan, int groups, int strips) {
    if constexpr (kLeft) {
        merge_left<C>(p, pieces, blocks, scan, groups, strips);
    } else {
        merge_pieces<C>(p, pieces, blocks, team);
    }
}

}  // namespace kernel_hub::attention::sm90
