// The pass that weighs a row, in pieces of it.
#pragma once

#include "sampling/sm90/fours.cuh"
#include "sampling/sm90/powers.cuh"
#include "sampling/sm90/team.cuh"

namespace kernel_hub::sampling::sm90 {

// A pass in order is one over pieces of the row. A warp has as many of them as there would be more
// blocks in the largest team: each time all warps of the cluster have neighbours, from the end of
// the row on, which the first pass has read last.
struct Pieces {
    TeamShared& shared;
    int rank, team_size, row_size;

    __device__ __forceinline__ int of_a_warp() const { return kMaxTeam / team_size; }

    // Whole lines.
    static __device__ __forceinline__ int elements(int row_size) {
        constexpr int kTogether = 64;
        constexpr int kNum = kPieces * kTogether;
        return (row_size + kNum - 1) / kNum * kTogether;
    }

    // The first element of the warp's `piece`.
    __device__ __forceinline__ int begin(int piece) const {
        const int of_row =
            (piece * team_size + rank) * kNumWarps + static_cast<int>(threadIdx.x) / 32;
        return static_cast<int>(
            min(static_cast<int64_t>(row_size), static_cast<int64_t>(of_row) * elements(row_size)));
    }
    __device__ __forceinline__ int end(int piece) const {
        return min(row_size, begin(piece) + elements(row_size));
    }

    // What the lanes have weighed of a piece above the window's lower end; returns the sum.
    __device__ __forceinline__ uint64_t close(int piece, uint64_t above) const {
        above = warp_reduce(above, [](uint64_t a, uint64_t b) { return a + b; });
        if (threadIdx.x % 32 == 0) {
            shared.own_pieces[piece * kNumWarps + threadIdx.x / 32] = above;
        }
        return above;
    }

    // What the lanes have weighed in all.
    __device__ __forceinline__ void close_all(uint64_t total) const {
        total = warp_reduce(total, [](uint64_t a, uint64_t b) { return a + b; });
        if (threadIdx.x % 32 == 0) {
            shared.own_totals[threadIdx.x / 32] = total;
        }
    }
};

// What is listed and above `from`, up to `to`, becomes the block's candidates.
__device__ __forceinline__ void choose_listed(float from, float to, TeamShared& shared) {
    const int num = shared.num_listed;
    for (int i = threadIdx.x; i < min(num, kListed); i += kNumThreads) {
        const float4 each = shared.listed[i];
        const float z[kFour] = {each.x, each.y, each.z, each.w};
#pragma unroll 1
        for (int j = 0; j < kFour; ++j) {
            const float value = pick(z, j);
            if (value > from && value <= to) {
                shared.add(value, shared.firsts[i] + j);
            }
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.mine.num = num > kListed ? kNumCandidates + 1 : shared.num_own;
    }
}

// What a question asks of values.
struct Asked {
    Question question;
    float middle, half;  // what is nearer to the middle than half the window may be in it
    bool has_room = true;

    __device__ __forceinline__ explicit Asked(const Question& asked) : question(asked) {
        const bool has_ends = question.from > -kInfinity && question.to < kInfinity;
        middle = has_ends ? question.from / 2 + question.to / 2 : 0.0f;
        half = !(question.to > -kInfinity) ? -1.0f
               : has_ends ? fmaxf(question.to - middle, middle - question.from) * 1.01f + FLT_MIN
                          : kInfinity;
    }

    __device__ __forceinline__ bool may_have(const float (&z)[kFour]) const {
        bool are_any = false;
#pragma unroll
        for (int j = 0; j < kFour; ++j) {
            are_any |= fabsf(z[j] - middle) <= half;
        }
        return are_any;
    }

    // What the window has of a four becomes candidates or goes into bins.
    __device__ __forceinline__ void take(int index, const float (&z)[kFour], const Weigher& weigher,
                                         TeamShared& shared) {
#pragma unroll 1
        for (int j = 0; j < kFour && has_room; ++j) {
            const float value = pick(z, j);
            if (!(value > question.from && value <= question.to)) {
                continue;
            }
            if (question.collects) {
                has_room = shared.add(value, index + j);
                continue;
            }
            add_to_bin(shared.own_bins, shared.s.ruler, weigher, value, shared.mine.least_binned,
                       shared.mine.most_binned);
        }
    }
};

// Rows that are plain and have a finite largest, by whole warps: kTurns fours of each lane under
// way all the time, the L2 a piece ahead. What is above the floor is all that weighs anything, or
// all that is above the window. Fours that may have something of the window are listed.
template <bool kIsFp32>
__device__ __forceinline__ void weigh_plain(const PlainRow& row, const Weigher& weigher,
                                            const Pieces& pieces) {
    constexpr int kTurns = 4, kTurn = 32 * kFour, kLine = 128 / (kIsFp32 ? 4 : 2);
    const uint32_t none = kIsFp32 ? 0xff800000u : row.dtype == kFp16 ? 0xfc00fc00u : 0xff80ff80u;
    Asked asked(pieces.shared.s.question);
    const int lane_idx = threadIdx.x % 32, lane = lane_idx * kFour;
    uint64_t total = 0, above = 0, all_above = 0;
    uint4 ahead[kTurns];
    int next_piece = pieces.of_a_warp(), next_at = 0, next_end = 0;
    const auto begin_next = [&] {
        --next_piece;
        next_at = next_end = 0;
        if (next_piece >= 0) {
            next_at = pieces.begin(next_piece) + lane;
            next_end = pieces.end(next_piece);
        }
        if (next_piece > 0) {
            const int end = pieces.end(next_piece - 1);
#pragma unroll 1
            for (int i = pieces.begin(next_piece - 1) + lane_idx * kLine; i < end;
                 i += 32 * kLine) {
                prefetch_l2(row.logits + static_cast<int64_t>(i) * (kIsFp32 ? 4 : 2));
            }
        }
    };
    const auto load_next = [&](int i) {
        ahead[i] = make_uint4(none, none, none, none);
        if (next_at + i * kTurn < next_end) {
            ahead[i] = row.load<kIsFp32>(next_at + i * kTurn);
        }
    };
    begin_next();
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
        load_next(i);
    }
#pragma unroll 1
    for (int piece = next_piece; piece >= 0;) {
        const int at = next_at;
        next_at += kTurns * kTurn;
        const bool is_last = next_at - lane >= next_end;
        if (is_last) {
            begin_next();
        }
#pragma unroll
        for (int i = 0; i < kTurns; ++i) {
            float z[kFour];
            row.unpack<kIsFp32>(ahead[i], z);
            load_next(i);
            uint64_t masses[kFour] = {};
            if (asked.question.weighs) {
                weigh_four(weigher, z, masses);
                total += (masses[0] + masses[1]) + (masses[2] + masses[3]);
            }
            // Few fours have something above the window's lower end, where few values are kept.
            const float most = fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3]));
            if (most > asked.question.from) {
#pragma unroll
                for (int j = 0; j < kFour; ++j) {
                    above += z[j] > asked.question.from ? masses[j] : 0;
                }
                if (asked.may_have(z)) {
                    pieces.shared.list(at + i * kTurn, z);
                }
            }
            __syncwarp();
        }
        if (is_last) {
            all_above += pieces.close(piece--, above);
            above = 0;
        }
    }
    // Of all lanes together; one gives it.
    const bool is_one = asked.question.floor == asked.question.from;
    pieces.close_all(!is_one ? total : lane == 0 ? all_above : 0);
}

// NOTE: a function of its own, so that nothing of the kernel is in its registers: else there are
// not enough for four powers side by side.
__device__ __noinline__ void weigh_plain_row(TeamShared& shared, const char* logits, int size,
                                             int dtype, float largest, float scale, float lowest,
                                             int rank, int team_size) {
    const PlainRow row = {logits, size, dtype};
    const Weigher weigher = {largest, scale, lowest};
    const Pieces pieces = {shared, rank, team_size, size};
    if (dtype == kFp32) {
        weigh_plain<true>(row, weigher, pieces);
    } else {
        weigh_plain<false>(row, weigher, pieces);
    }
}

// Rows of any kind, or whose windows go into bins.
__device__ __noinline__ void weigh_any_row(float largest, float scale, float lowest, int rank,
                                           int team_size) {
    TeamShared& shared = team_shared();
    Row row(shared.p);
    row.has_mask = shared.has_mask;
    const Fours fours(row);
    const Weigher weigher = {largest, scale, lowest};
    const Pieces pieces = {shared, rank, team_size, shared.p.size};
    Asked asked(shared.s.question);
    const Question& question = asked.question;
    uint64_t total = 0, above = 0;
    const auto visit = [&](int index, const float (&z)[kFour]) {
        if (question.weighs) {
#pragma unroll 1
            for (int j = 0; j < kFour; ++j) {
                const float value = pick(z, j);
                const uint64_t mass = value > question.floor ? weigher.mass(value) : 0;
                total += mass;
                above += value > question.from ? mass : 0;
            }
        }
        if (asked.may_have(z)) {
            asked.take(index, z, weigher, shared);
        }
    };
#pragma unroll 1
    for (int piece = pieces.of_a_warp() - 1; piece >= 0; --piece) {
        fours.walk(pieces.begin(piece) + threadIdx.x % 32 * kFour, pieces.end(piece), 32 * kFour,
                   visit);
        pieces.close(piece, above);
        above = 0;
    }
    pieces.close_all(total);
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.mine.num = shared.num_own;
    }
}

// Answers s.question of the block's pieces of the row: candidates or bins, and of what it weighs
// shared.own_pieces, what each piece has above the window's lower end, and shared.own_totals.
__device__ __forceinline__ void scan(const Fours& fours, const Weigher& weigher, Team& team) {
    TeamShared& shared = team.shared;
    const Question question = shared.s.question;
    const bool is_known = !(question.floor > -kInfinity) || question.floor == question.from;
    if (fours.is_ahead && weigher.largest < FLT_MAX && question.collects &&
        (is_known || !question.weighs)) {
        weigh_plain_row(shared, fours.row.logits, fours.p.size, fours.p.dtype, weigher.largest,
                        weigher.scale, weigher.lowest, team.rank, team.size);
        __syncthreads();
        choose_listed(question.from, question.to, shared);
    } else {
        weigh_any_row(weigher.largest, weigher.scale, weigher.lowest, team.rank, team.size);
    }
}

}  // namespace kernel_hub::sampling::sm90
