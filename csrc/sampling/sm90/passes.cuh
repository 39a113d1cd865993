// Passes of a cluster over its row, and what they find out.
#pragma once

#include "sampling/search.cuh"
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
// some of what is large and close together. Fours that have something above `bound` are listed.
__device__ __forceinline__ void look(const Fours& fours, int from, int until, float bound,
                                     Seen& seen, Team& team) {
    const int step = team.size * kNumThreads * kFour;
    const int offset = (team.rank * kNumThreads + static_cast<int>(threadIdx.x)) * kFour;
    const auto visit = [&](int index, const float (&z)[kFour]) {
        const float most = fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3]));
        if (most > seen.of_thread) {
            seen.of_thread = most;
            seen.found = index;
        }
        if (most > bound) {
            const int place = atomicAdd(&team.shared.num_listed, 1);
            if (place < kListed) {
                team.shared.listed[place] = make_float4(z[0], z[1], z[2], z[3]);
                team.shared.firsts[place] = index;
            }
        }
    };
    if (fours.is_ahead) {
        fours.walk_ahead<kLoads>(from + offset, until, step, visit, [&](int at) {
            prefetch_share<kLoads>(fours.row, team, at - offset + kFetched * step);
        });
    } else {
        fours.walk(from + offset, until, step, visit);
    }
}

// What is listed and above `bound` becomes the block's candidates.
__device__ __forceinline__ void choose_listed(const Weigher& weigher, float bound, Team& team) {
    TeamShared& shared = team.shared;
    const int num = shared.num_listed;
    for (int i = threadIdx.x; i < min(num, kListed); i += kNumThreads) {
        const float4 each = shared.listed[i];
        const float z[kFour] = {each.x, each.y, each.z, each.w};
#pragma unroll 1
        for (int j = 0; j < kFour; ++j) {
            const float value = pick(z, j);
            if (value > bound && weigher.depth(value) >= weigher.least) {
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
// shared.pieces: what each piece has above pivots[0].
__device__ __forceinline__ void scan(const Fours& fours, const Weigher& weigher, Team& team) {
    TeamShared& shared = team.shared;
    Shared& s = shared.s;
    const Question question = s.question;
    Above above[kNumPivots];
    float first = 0.0f, second = 0.0f;
#pragma unroll
    for (int i = 0; i < kNumPivots; ++i) {
        above[i] = {0, 0};
    }
    const int lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32;
    const int a_piece = elements_a_piece(fours.p.size), num_pieces = pieces_a_warp(team);
    // What a search asks for is above one of its pivots.
    const float lowest =
        question.searches ? fminf(question.pivots[0], fminf(question.pivots[1], question.pivots[2]))
                          : question.pivots[0];
    bool has_room = true;
#pragma unroll 1
    for (int piece = 0; piece < num_pieces; ++piece) {
        const int of_block = warp_idx * num_pieces + piece;
        const int begin =
            min(fours.p.size, (team.rank * kNumWarps * num_pieces + of_block) * a_piece);
        const int end = min(fours.p.size, begin + a_piece);
        const uint64_t before = above[0].mass;
        fours.walk(begin + lane_idx * kFour, end, 32 * kFour,
                   [&](int index, const float (&z)[kFour]) {
                       float depths[kFour];
                       bool are_any = false;
#pragma unroll
                       for (int j = 0; j < kFour; ++j) {
                           depths[j] = weigher.depth(z[j]);
                           are_any |= z[j] > question.from && z[j] <= question.to;
                       }
                       if (are_any && has_room) {
#pragma unroll 1
                           for (int j = 0; j < kFour; ++j) {
                               const float value = pick(z, j);
                               if (value > question.from && value <= question.to &&
                                   pick(depths, j) >= weigher.least) {
                                   has_room = team.add(value, index + j);
                               }
                           }
                       }
                       const float most = fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3]));
                       if (!question.weighs || !(most > lowest) ||
                           !(question.searches || weigher.depth(most) > -kMassBits - 1)) {
                           return;
                       }
                       // NOTE: no branch on a value: four chains of the power side by side.
                       uint64_t masses[kFour];
                       bool are_weighed[kFour];
#pragma unroll
                       for (int j = 0; j < kFour; ++j) {
                           are_weighed[j] = z[j] > lowest && depths[j] >= weigher.least;
                           const uint64_t mass = mass_of_power(depths[j]);
                           masses[j] = are_weighed[j] ? mass : 0;
                       }
                       if (question.searches) {
#pragma unroll
                           for (int i = 0; i < kNumPivots; ++i) {
#pragma unroll
                               for (int j = 0; j < kFour; ++j) {
                                   const bool is_above = z[j] > question.pivots[i];
                                   above[i].count += is_above && are_weighed[j];
                                   above[i].mass += is_above ? masses[j] : 0;
                               }
                           }
                       } else {
#pragma unroll
                           for (int j = 0; j < kFour; ++j) {
                               above[0].mass += masses[j];
                               const float share =
                                   static_cast<float>(static_cast<uint32_t>(masses[j] >> 16));
                               const float part = share * depths[j];
                               first += part;
                               second += part * depths[j];
                           }
                       }
                   });
        const uint64_t of_piece =
            warp_reduce(above[0].mass - before, [](uint64_t a, uint64_t b) { return a + b; });
        if (lane_idx == 0) {
            shared.pieces[of_block] = of_piece;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.mine.num = max(shared.mine.num, shared.num_own);  // what was listed, too
    }
    if (question.weighs) {
#pragma unroll
        for (int i = 0; i < kNumPivots; ++i) {
            if (i == 0 || question.searches) {
                const uint32_t count = block_sum(above[i].count, s.count_slots);
                const uint64_t mass = block_sum(above[i].mass, s.mass_slots);
                if (threadIdx.x == 0) {
                    shared.mine.counts[i] = count;
                    shared.mine.masses[i] = mass;
                }
            }
        }
        if (!question.searches) {
            const auto sum = [](float a, float b) { return a + b; };
            first = block_reduce(first, s.float_slots, sum);
            second = block_reduce(second, s.float_slots, sum);
            if (threadIdx.x == 0) {
                shared.mine.first = first;
                shared.mine.second = second;
            }
        }
    }
}

// The answers of all blocks together, into s. By one thread.
__device__ __forceinline__ void sum_answers(Team& team) {
    Shared& s = team.shared.s;
    const bool searches = s.question.searches;
    for (int i = 0; i < kNumPivots; ++i) {
        s.above[i] = {0, 0};
    }
    s.first = s.second = 0.0f;
    for (int rank = 0; rank < team.size; ++rank) {
        const Note& note = team.shared.notes[rank];
        for (int i = 0; i < (searches ? kNumPivots : 1); ++i) {
            s.above[i].count += note.counts[i];
            s.above[i].mass += note.masses[i];
        }
        if (!searches) {
            s.first += note.first;
            s.second += note.second;
        }
    }
}

// Draws from all that is above `from`, in the order of indices; by the block that has it.
// shared.pieces and notes: as scan leaves them.
__device__ __forceinline__ void draw_in_row(const Row& row, const Weigher& weigher, float from,
                                            uint64_t total, uint64_t bits, Team& team) {
    Shared& s = team.shared.s;
    uint64_t drawn = below(total, bits);
    int rank = 0, piece = 0;
    while (drawn >= team.shared.notes[rank].masses[0]) {
        drawn -= team.shared.notes[rank++].masses[0];
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
