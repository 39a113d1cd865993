// The pass that weighs a row, in pieces of it.
#pragma once

#include "kernel_hub/copy_8.cuh"
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

    // What a warp weighs at once, or as often.
    static constexpr int kTogether = TeamShared::kTurns * 32 * kFour;
    static __device__ __forceinline__ int elements(int row_size) {
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

// Rows that are plain and have a finite largest, by whole warps, a step of fours of each lane after
// another: the next ones are under way to shared memory, where a lane reads what it has asked for.
// What is above the floor is all that weighs anything, or all that is above the window. Fours that
// may have something of the window are listed.
template <bool kIsFp32>
__device__ __forceinline__ void weigh_plain(const PlainRow& row, const Weigher& weigher,
                                            const Pieces& pieces) {
    constexpr int kTurn = 32 * kFour, kTurns = TeamShared::kTurns, kNum = kTurns * kFour;
    constexpr int kBytes = kIsFp32 ? 4 : 2;
    TeamShared& shared = pieces.shared;
    const Asked asked(shared.s.question);
    const float from = asked.question.from;
    const int lane = threadIdx.x % 32 * kFour, piece_size = pieces.elements(row.size);
    const uint32_t none = kIsFp32 ? 0xff800000u : row.dtype == kFp16 ? 0xfc00fc00u : 0xff80ff80u;
    // A slot has kTurns fours of each thread, each kNumThreads before the next.
    constexpr uint32_t kSlot = kTurns * kNumThreads * 16, kSlots = TeamShared::kSlots * kSlot;
    const uint32_t slots = shared_address(shared.under_way) + threadIdx.x * 16;
    const int of_all = pieces.team_size * kNumWarps * piece_size;  // a piece of each warp
    int piece_begin = pieces.rank * kNumWarps + static_cast<int>(threadIdx.x) / 32;
    piece_begin = piece_begin * piece_size + (pieces.of_a_warp() - 1) * of_all;
    int next_begin = piece_begin, next_step = 0;
    uint32_t next_slot = 0;
    const auto copy = [&](uint32_t to, const char* from) {
        if constexpr (kIsFp32) {
            cp_async_16(to, from, true);
        } else {
            cp_async_8(to, from);
        }
    };
    const auto fetch = [&] {
        if (next_begin >= 0) {
            const int first = next_begin + next_step, left = row.size - first;
            const char* from = row.logits + static_cast<int64_t>(first + lane) * kBytes;
            const uint32_t to = slots + next_slot;
            if (left >= kNum * 32) {
#pragma unroll
                for (int i = 0; i < kTurns; ++i) {
                    copy(to + i * kNumThreads * 16, from + i * kTurn * kBytes);
                }
            } else {
#pragma unroll 1
                for (int i = 0; i < kTurns; ++i) {
                    if (lane + i * kTurn < left) {
                        copy(to + i * kNumThreads * 16, from + i * kTurn * kBytes);
                    } else {
                        shared.under_way[next_slot / 16 + i * kNumThreads + threadIdx.x] =
                            make_uint4(none, none, none, none);
                    }
                }
            }
            next_step += kNum * 32;
            if (next_step >= piece_size) {
                next_step = 0;
                next_begin -= of_all;
            }
            next_slot = (next_slot + kSlot) % kSlots;
        }
        cp_async_commit();
    };
#pragma unroll 1
    for (int i = 1; i < TeamShared::kSlots; ++i) {
        fetch();
    }
    uint64_t total = 0, all_above = 0;
    uint32_t slot = 0;
#pragma unroll 1
    for (int piece = pieces.of_a_warp() - 1; piece >= 0; --piece, piece_begin -= of_all) {
        WholeSum totals[2], aboves[2];
#pragma unroll 1
        for (int step = 0; step < piece_size; step += kNum * 32) {
            cp_async_wait<TeamShared::kSlots - 2>();
            const int at = piece_begin + step + lane;
            float z[kNum], y[kNum];
#pragma unroll
            for (int i = 0; i < kTurns; ++i) {
                const uint4 bits = shared.under_way[slot / 16 + i * kNumThreads + threadIdx.x];
                row.unpack<kIsFp32>(bits, *reinterpret_cast<float (*)[kFour]>(z + i * kFour));
            }
            slot = (slot + kSlot) % kSlots;
            fetch();
            weigh_each(weigher, z, y);
            float nearest = fabsf(z[0] - asked.middle);
#pragma unroll
            for (int j = 0; j < kNum; ++j) {
                const double mass = y[j];
                totals[j % 2].add(mass);
                if (z[j] > from) {
                    aboves[j % 2].add(mass);
                }
                nearest = fminf(nearest, fabsf(z[j] - asked.middle));
            }
            if (nearest <= asked.half) {
#pragma unroll
                for (int i = 0; i < kTurns; ++i) {
                    const float four[] = {z[4 * i], z[4 * i + 1], z[4 * i + 2], z[4 * i + 3]};
                    if (asked.may_have(four)) {
                        shared.list(at + i * kTurn, four);
                    }
                }
            }
            __syncwarp();
        }
        total += totals[0].value() + totals[1].value();
        all_above += pieces.close(piece, aboves[0].value() + aboves[1].value());
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
