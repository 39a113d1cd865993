// Passes of a cluster over its row, and what they find out.
#pragma once

#include "sampling/search.cuh"
#include "sampling/sm90/chosen.cuh"
#include "sampling/sm90/fours.cuh"
#include "sampling/sm90/team.cuh"

namespace kernel_hub::sampling::sm90 {

struct Seen {
    float of_thread = -kInfinity;  // the largest of what the thread has seen
    int found = 0;                 // the first element of its four
};

constexpr int kFetched = 16;  // turns that are fetched to the L2 ahead: 64 KB of a block
// Fours that a thread has under way in a look at its share, and those of a cluster together.
constexpr int kLoads = 4;
__device__ __forceinline__ int elements_a_chunk(const Team& team) {
    return kLoads * team.size * kNumThreads * kFour;
}

// A float that is not above `wanted` threads' largest: so many values are above it.
__device__ __forceinline__ float loose_bound(float of_thread, int wanted) {
    return bound_of<14>(of_thread, wanted);
}

// Has the L2 fetch `turns` of the block's share, 256 fours each, from element `first` on of what
// the cluster shares.
template <int kTurns>
__device__ __forceinline__ void prefetch_share(const Row& row, const Team& team, int first) {
    constexpr int kLineBytes = 128;
    const int turn_bytes = kNumThreads * kFour * row.element_bytes();
    const int lines = turn_bytes / kLineBytes;
    const char* start = row.logits + static_cast<int64_t>(first) * row.element_bytes();
    const int64_t left = static_cast<int64_t>(row.p.size - first) * row.element_bytes();
#pragma unroll
    for (int i = 0; i < kTurns * 32; i += kNumThreads) {
        const int line = threadIdx.x + i, turn = line / lines;
        const int64_t at = static_cast<int64_t>(turn * team.size + team.rank) * turn_bytes +
                           line % lines * kLineBytes;
        if (turn < kTurns && at < left) {
            prefetch_l2(start + at);
        }
    }
}

// Looks at the block's share of elements from .. until - 1; blocks take turns, so that all have
// some of what is large and close together. Of turns only each `every`-th. Fours that have
// something above `bound` are listed; kCounts: what is above `bottom` is counted in bins.
template <bool kCounts>
__device__ __forceinline__ void look(const Fours& fours, int from, int until, float bound,
                                     float bottom, int every, Seen& seen, Team& team) {
    const Ruler ruler = team.shared.s.ruler;
    const int step = every * team.size * kNumThreads * kFour;
    const int offset = (team.rank * kNumThreads + static_cast<int>(threadIdx.x)) * kFour;
    const auto visit = [&](int index, const float (&z)[kFour]) {
        const float most = fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3]));
        if (most > seen.of_thread) {
            seen.of_thread = most;
            seen.found = index;
        }
        if (kCounts && most > bottom) {
#pragma unroll
            for (int j = 0; j < kFour; ++j) {
                if (z[j] > bottom) {
                    atomicAdd(&team.shared.own_bins.counts[ruler.bin_of_value(z[j])], 1u);
                }
            }
        }
        if (most > bound) {
            const int place = atomicAdd(&team.shared.num_listed, 1);
            if (place < kListed) {
                team.shared.listed[place] = make_float4(z[0], z[1], z[2], z[3]);
                team.shared.firsts[place] = index;
            }
        }
    };
    const auto fetch = [&](int at) {
        prefetch_share<kLoads>(fours.row, team, at - offset + kFetched * step);
    };
    if (!fours.is_ahead || every > 1) {
        fours.walk(from + offset, until, step, visit);
    } else if (fours.p.dtype == kFp32) {
        fours.walk_ahead<kLoads, true>(from + offset, until, step, visit, fetch);
    } else {
        fours.walk_ahead<kLoads, false>(from + offset, until, step, visit, fetch);
    }
}

// What is listed and above `bound` becomes the block's candidates.
__device__ __forceinline__ void choose_listed(float bound, Team& team) {
    TeamShared& shared = team.shared;
    const int num = shared.num_listed;
    for (int i = threadIdx.x; i < min(num, kListed); i += kNumThreads) {
        const float4 each = shared.listed[i];
        const float z[kFour] = {each.x, each.y, each.z, each.w};
#pragma unroll 1
        for (int j = 0; j < kFour; ++j) {
            const float value = pick(z, j);
            if (value > bound) {
                team.add(value, shared.firsts[i] + j);
            }
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.mine.num = num > kListed ? kNumCandidates + 1 : shared.num_own;
    }
}

// A pass in order is one over pieces of the row: a warp has as many of them, one after another, as
// there would be more blocks in the largest team.
__device__ __forceinline__ int pieces_a_warp(const Team& team) {
    return kMaxTeam / team.size;
}

// Elements of a piece: whole lines.
__device__ __forceinline__ int elements_a_piece(int size) {
    constexpr int kTogether = 64;
    constexpr int kNum = kMaxTeam * kNumWarps * kTogether;
    return (size + kNum - 1) / kNum * kTogether;
}

// Answers s.question of the block's part of the row, into its note.
// shared.pieces: what each piece has above the window's lower end.
__device__ __forceinline__ void scan(const Fours& fours, const Weigher& weigher, Team& team) {
    TeamShared& shared = team.shared;
    Shared& s = shared.s;
    const Question question = s.question;
    uint64_t total = 0;
    const int lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32;
    const int a_piece = elements_a_piece(fours.p.size), num_pieces = pieces_a_warp(team);
    // What is nearer to the middle than half the window may be in it.
    const bool has_ends = question.from > -kInfinity && question.to < kInfinity;
    const float middle = has_ends ? question.from / 2 + question.to / 2 : 0.0f;
    const float half = !(question.to > -kInfinity) ? -1.0f
                       : has_ends
                           ? fmaxf(question.to - middle, middle - question.from) * 1.01f + FLT_MIN
                           : kInfinity;
    bool has_room = true;
#pragma unroll 1
    for (int piece = 0; piece < num_pieces; ++piece) {
        const int of_block = warp_idx * num_pieces + piece;
        const int begin =
            min(fours.p.size, (team.rank * kNumWarps * num_pieces + of_block) * a_piece);
        const int end = min(fours.p.size, begin + a_piece);
        uint64_t above = 0;
        fours.walk(begin + lane_idx * kFour, end, 32 * kFour,
                   [&](int index, const float (&z)[kFour]) {
                       bool are_any = false;
#pragma unroll
                       for (int j = 0; j < kFour; ++j) {
                           are_any |= fabsf(z[j] - middle) <= half;
                       }
                       if (question.weighs) {
                // NOTE: no branch on a value: four chains of the power side by side.
#pragma unroll
                           for (int j = 0; j < kFour; ++j) {
                               const float depth = weigher.clamped_depth(z[j]);
                               const uint64_t mass =
                                   mass_of_clamped(z[j] > question.floor ? depth : kLeastPower);
                               total += mass;
                               above += z[j] > question.from ? mass : 0;
                           }
                       }
                       if (are_any && has_room) {
#pragma unroll 1
                           for (int j = 0; j < kFour; ++j) {
                               const float value = pick(z, j);
                               if (!(value > question.from && value <= question.to)) {
                                   continue;
                               }
                               if (question.collects) {
                                   has_room = team.add(value, index + j);
                                   continue;
                               }
                               add_to_bin(shared.own_bins, s.ruler, weigher, value,
                                          shared.mine.least_binned, shared.mine.most_binned);
                           }
                       }
                   });
        const uint64_t of_piece = warp_reduce(above, [](uint64_t a, uint64_t b) { return a + b; });
        if (lane_idx == 0) {
            shared.pieces[of_block] = of_piece;
        }
    }
    __syncthreads();
    if (question.weighs) {
        total = block_sum(total, s.mass_slots);
        const bool is_piece = threadIdx.x < kNumWarps * num_pieces;
        const uint64_t above = block_sum(is_piece ? shared.pieces[threadIdx.x] : 0, s.mass_slots);
        if (threadIdx.x == 0) {
            shared.mine.total = total;
            shared.mine.above = above;
        }
    }
    if (threadIdx.x == 0) {
        shared.mine.num = shared.num_own;
    }
}

// The answers of all blocks together, into s. By one thread.
__device__ __forceinline__ void sum_answers(Team& team) {
    Shared& s = team.shared.s;
    s.total = s.above = 0;
    s.least = ~0u;
    s.most = 0;
    for (int rank = 0; rank < team.size; ++rank) {
        const Note& note = team.shared.notes[rank];
        s.total += note.total;
        s.above += note.above;
        s.least = min(s.least, note.least_binned);
        s.most = max(s.most, note.most_binned);
    }
}

// Keeps of the candidates what is above `from`; others weigh nothing any more, in their pieces, the
// blocks and the row.
__device__ __forceinline__ void keep_above(Chosen& chosen, float from, int size, Team& team) {
    Shared& s = team.shared.s;
    const int a_piece = elements_a_piece(size), a_block = kNumWarps * pieces_a_warp(team);
    constexpr int kBlocks = kMaxTeam * kNumWarps;
    static_assert(kBlocks + kMaxTeam <= kNumPieces);
    drop_none(s);
    chosen.keep_above(from, [&](int index, uint64_t mass) {
        const int piece = index / a_piece;
        drop(piece, mass, s);
        drop(kBlocks + piece / a_block, mass, s);
    });
    __syncthreads();
    const int thread_idx = threadIdx.x;
    if (thread_idx < a_block) {
        team.shared.pieces[thread_idx] -= dropped(s, team.rank * a_block + thread_idx);
    }
    if (thread_idx < team.size) {
        team.shared.notes[thread_idx].above -= dropped(s, kBlocks + thread_idx);
    }
    if (thread_idx == 0) {
        for (int rank = 0; rank < team.size; ++rank) {
            s.above -= dropped(s, kBlocks + rank);
        }
    }
    __syncthreads();
}

// Draws from all that is above `from`, in the order of indices; by the block that has it.
// shared.pieces and notes: as scan leaves them.
__device__ __forceinline__ void draw_in_row(const Row& row, const Weigher& weigher, float from,
                                            uint64_t total, uint64_t bits, Team& team) {
    Shared& s = team.shared.s;
    uint64_t drawn = below(total, bits);
    int rank = 0, piece = 0;
    while (drawn >= team.shared.notes[rank].above) {
        drawn -= team.shared.notes[rank++].above;
    }
    if (rank != team.rank) {
        return;
    }
    while (drawn >= team.shared.pieces[piece]) {
        drawn -= team.shared.pieces[piece++];
    }
    const int elements = elements_a_piece(row.p.size);
    const int begin = (rank * kNumWarps * pieces_a_warp(team) + piece) * elements;
    const auto weigh = [&](int i) { return mass_above(row, weigher, from, i); };
    find_in_piece(row, begin, elements, drawn, s, weigh,
                  [&](int i) { write_drawn(row.p, i, weigher.depth(row.value(i)), total); });
}

}  // namespace kernel_hub::sampling::sm90
