// Passes of a cluster over its row, and what they find out.
#pragma once

#include <stddef.h>

#include "sampling/search.cuh"
#include "sampling/sm90/chosen.cuh"
#include "sampling/sm90/fours.cuh"
#include "sampling/sm90/pieces.cuh"
#include "sampling/sm90/team.cuh"

namespace kernel_hub::sampling::sm90 {

struct Seen {
    float of_thread = -kInfinity;  // the largest of what the thread has seen
    int found = 0;                 // the first element of its four
};

constexpr int kFetched = 8;  // turns that are fetched to the L2 ahead: 64 KB of a block
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
    const int exponent = exponent_of(turn_bytes / kLineBytes), lines = 1 << exponent;
    const char* start = row.logits + static_cast<int64_t>(first) * row.element_bytes();
    const int64_t left = static_cast<int64_t>(row.p.size - first) * row.element_bytes();
#pragma unroll
    for (int i = 0; i < kTurns * 32; i += kNumThreads) {
        const int line = threadIdx.x + i, turn = line >> exponent;
        const int64_t at = static_cast<int64_t>(turn * team.size + team.rank) * turn_bytes +
                           (line & (lines - 1)) * kLineBytes;
        if (turn < kTurns && at < left) {
            prefetch_l2(start + at);
        }
    }
}

constexpr int kTurn = kNumThreads * kFour;
__device__ __forceinline__ int first_of_share(const Team& team) {
    return team.rank * kTurn + static_cast<int>(threadIdx.x) * kFour;
}

// What a look does with a four. counts: what is above `bottom` is counted in bins; else fours that
// have something above `bound` are listed.
struct Look {
    TeamShared& shared;
    Ruler ruler;
    float bound, bottom;
    Seen seen;

    __device__ __forceinline__ Look(TeamShared& its, float its_bound, float its_bottom,
                                    const Seen& before)
        : shared(its), ruler(its.s.ruler), bound(its_bound), bottom(its_bottom), seen(before) {}

    __device__ __forceinline__ void visit(bool counts, int index, const float (&z)[kFour]) {
        const float most = fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3]));
        if (most > seen.of_thread) {
            seen.of_thread = most;
            seen.found = index;
        }
        if (counts && most > bottom) {
            // NOTE: without a branch for each: what is not above it goes where masses would be.
            static_assert(offsetof(Bins, low) == kNumBins * sizeof(uint32_t));
            uint32_t* bins = shared.own_bins.counts;
            uint32_t places[kFour];
#pragma unroll
            for (int j = 0; j < kFour; ++j) {
                places[j] = z[j] > bottom ? ruler.bin_of_value(z[j]) : kNumBins;
            }
#pragma unroll
            for (int j = 0; j < kFour; ++j) {
                atomicAdd(bins + places[j], 1u);
            }
        }
        if (!counts && most > bound) {
            shared.list(index, z);
        }
    }
};

// Looks at the fours first, first + step .. below `until` of a row of any kind.
// NOTE: a function of its own, as all that changes logits: it is half of the code where it is
// inlined, and rows that nothing changes wait for code that they jump over.
__device__ __noinline__ Seen look_at_any(bool counts, int first, int step, int until, float bound,
                                         float bottom, Seen seen) {
    TeamShared& shared = team_shared();
    Row row(shared.p);
    row.has_mask = shared.has_mask;
    Look look(shared, bound, bottom, seen);
    Fours(row).walk(first, until, step,
                    [&](int index, const float (&z)[kFour]) { look.visit(counts, index, z); });
    return look.seen;
}

// Elements i .. i + 3 of any row, as they are drawn from; -inf from `end` on.
__device__ __noinline__ float4 read_any(int i, int end) {
    TeamShared& shared = team_shared();
    Row row(shared.p);
    row.has_mask = shared.has_mask;
    float z[kFour];
    Fours(row).read(i, end, z);
    return make_float4(z[0], z[1], z[2], z[3]);
}

// Looks at the block's share of elements from .. until - 1; blocks take turns, so that all have
// some of what is large and close together.
template <bool kCounts>
__device__ __forceinline__ void look(const Fours& fours, int from, int until, float bound,
                                     float bottom, Seen& seen, Team& team) {
    int step = team.size * kTurn, first = from + first_of_share(team);
    // NOTE: addresses worked out before the loop around this would be stored and read again.
    asm volatile("" : "+r"(step), "+r"(first));
    const auto fetch = [&](int at) {
        prefetch_share<kLoads>(fours.row, team, at - first_of_share(team) + kFetched * step);
    };
    if (!fours.is_ahead) {
        seen = look_at_any(kCounts, first, step, until, bound, bottom, seen);
        return;
    }
    Look look(team.shared, bound, bottom, seen);
    const auto visit = [&](int index, const float (&z)[kFour]) { look.visit(kCounts, index, z); };
    // NOTE: of 16 bits what threads have under way is not enough; of 32 bits to fetch more ahead
    // made greedy rows 12 % slower.
    if (fours.p.dtype == kFp32) {
        fours.walk_ahead<kLoads, true>(first, until, step, visit, [](int) {});
    } else {
        fours.walk_ahead<kLoads, false>(first, until, step, visit, fetch);
    }
    seen = look.seen;
}

constexpr int kSampled = 8;  // fours of a thread that are a sample of a row

template <bool kIsFp32>
__device__ __forceinline__ void look_at_some(const PlainRow& row, int step, Seen& seen) {
    const int first = static_cast<int>(threadIdx.x) * kFour;
    uint4 bits[kSampled];
#pragma unroll
    for (int i = 0; i < kSampled; ++i) {
        if (first + i * step < row.size) {
            bits[i] = row.load<kIsFp32>(first + i * step);
        }
    }
#pragma unroll
    for (int i = 0; i < kSampled; ++i) {
        float z[kFour];
        row.unpack<kIsFp32>(bits[i], z);
        const float most = fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3]));
        if (first + i * step < row.size && most > seen.of_thread) {
            seen.of_thread = most;
            seen.found = first + i * step;
        }
    }
}

// Looks at a sample of the row, every block at the same.
__device__ __forceinline__ void look_at_some(const Fours& fours, Seen& seen) {
    const int size = fours.p.size, step = max(1, size / (kSampled * kTurn)) * kTurn;
    if (!fours.is_ahead) {
        seen = look_at_any(false, static_cast<int>(threadIdx.x) * kFour, step, size, kInfinity,
                           kInfinity, seen);
    } else if (fours.p.dtype == kFp32) {
        look_at_some<true>(fours.row_as_it_is(), step, seen);
    } else {
        look_at_some<false>(fours.row_as_it_is(), step, seen);
    }
}

// The answers of all blocks together, into s. By a warp.
__device__ __forceinline__ void sum_answers(Team& team) {
    static_assert(kPieces % 32 == 0 && kMaxTeam <= 32);
    TeamShared& shared = team.shared;
    const int lane_idx = threadIdx.x % 32;
    const auto sum = [](uint64_t a, uint64_t b) { return a + b; };
    uint64_t total = 0, above = 0;
#pragma unroll 4
    for (int i = lane_idx; i < team.pieces(); i += 32) {
        above += shared.pieces[i];
    }
    total = lane_idx < (team.size + 1) / 2 ? shared.s.warp_masses[lane_idx] : 0;
    total = warp_reduce(total, sum);
    above = warp_reduce(above, sum);
    if (lane_idx == 0) {
        shared.s.total = total;
        shared.s.above = above;
    }
    if (shared.s.question.collects) {
        return;
    }
    const Note& note = shared.notes[lane_idx & (team.size - 1)];
    const uint32_t least =
        warp_reduce(note.least_binned, [](uint32_t a, uint32_t b) { return min(a, b); });
    const uint32_t most =
        warp_reduce(note.most_binned, [](uint32_t a, uint32_t b) { return max(a, b); });
    if (lane_idx == 0) {
        shared.s.least = least;
        shared.s.most = most;
    }
}

// Takes from a number in shared memory.
__device__ __forceinline__ void take_mass(uint64_t& number, uint64_t mass) {
    uint32_t* words = reinterpret_cast<uint32_t*>(&number);
    add_mass(words[0], words[1], 0 - mass);
}

// Keeps of the candidates what is above `from`; others weigh nothing any more, in their pieces and
// the row.
__device__ __forceinline__ void keep_above(Chosen& chosen, float from, Team& team) {
    TeamShared& shared = team.shared;
    const int a_piece = Pieces::elements(shared.p.size, team.pieces());
    chosen.keep_above(from, [&](int index, uint64_t mass) {
        take_mass(shared.pieces[index / a_piece], mass);
        take_mass(shared.s.above, mass);
    });
    __syncthreads();
}

// Where in the order of pieces their sums pass a number.
struct Place {
    int piece;
    uint64_t rest;  // of the number, in the piece
};
__device__ __forceinline__ Place find_piece(const Team& team, uint64_t drawn) {
    // Each lane has neighbouring pieces; one passes what is drawn.
    const uint64_t* pieces = team.shared.pieces;
    const int lane_idx = threadIdx.x % 32, each = team.pieces() / 32;
    uint64_t own = 0;
#pragma unroll 4
    for (int i = 0; i < each; ++i) {
        own += pieces[each * lane_idx + i];
    }
    uint64_t before = warp_scan(own, lane_idx) - own;
    const bool is_here = before <= drawn && drawn - before < own;
    const int lane = max(0, __ffs(static_cast<int>(__ballot_sync(kAllLanes, is_here))) - 1);
    before = __shfl_sync(kAllLanes, before, lane);
    drawn -= before;
    int piece = each * lane;
#pragma unroll 1
    for (int i = 1; i < each; ++i) {
        const uint64_t of_piece = pieces[piece];
        if (drawn >= of_piece) {
            drawn -= of_piece;
            ++piece;
        }
    }
    return {piece, drawn};
}

// Draws from all that is above `from`, in the order of indices; by the block that has it.
// shared.pieces: as scan leaves them.
__device__ __forceinline__ void draw_in_row(float from, uint64_t total, uint64_t bits, Team& team) {
    const SampleParams& p = team.shared.p;
    const Weigher weigher = team.shared.weigher();
    Shared& s = team.shared.s;
    const int size = p.size;
    auto [piece, drawn] = find_piece(team, below(total, bits));
    if ((piece / kNumWarps & (team.size - 1)) != team.rank) {
        return;
    }
    const int elements = Pieces::elements(size, team.pieces());
    const int begin = piece * elements, end = min(size, begin + elements);
#pragma unroll 1
    for (int at = begin; at < end; at += kNumThreads * kFour) {
        const int own = at + static_cast<int>(threadIdx.x) * kFour;
        float z[kFour] = {-kInfinity, -kInfinity, -kInfinity, -kInfinity};
        if (!team.shared.is_ahead) {
            const float4 four = read_any(own, end);
            z[0] = four.x, z[1] = four.y, z[2] = four.z, z[3] = four.w;
        } else if (own < end) {
            const PlainRow row = plain_row(p);
            if (row.dtype == kFp32) {
                row.unpack<true>(row.load<true>(own), z);
            } else {
                row.unpack<false>(row.load<false>(own), z);
            }
        }
        uint64_t mass = 0;
        if (own < end) {
#pragma unroll
            for (int i = 0; i < kFour; ++i) {
                mass += z[i] > from ? weigher.mass(z[i]) : 0;
            }
        }
        __syncwarp();
        uint64_t sum = block_sum_before(mass, s.mass_slots);
        if (sum <= drawn && drawn - sum < mass) {
#pragma unroll 1
            for (int i = 0; i < kFour; ++i) {
                const float value = pick(z, i);
                sum += value > from ? weigher.mass(value) : 0;
                if (sum > drawn) {
                    write_drawn(p, own + i, weigher.depth(value), total);
                    break;
                }
            }
        }
        if (at + kNumThreads * kFour >= end) {
            return;
        }
        uint64_t of_turn = 0;
#pragma unroll
        for (int i = 0; i < kNumWarps; ++i) {
            of_turn += s.mass_slots[i];
        }
        if (drawn < of_turn) {
            return;
        }
        drawn -= of_turn;
    }
}

}  // namespace kernel_hub::sampling::sm90
