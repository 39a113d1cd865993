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

    __device__ __forceinline__ int of_a_warp() const {
        return max(1, kLeastPieces / kNumWarps >> exponent_of(team_size));
    }

    // What a warp weighs at once, or as often.
    static constexpr int kTogether = TeamShared::kTurns * 32 * kFour;
    // Of a row of which a lane's part of a piece is a WholeSum.
    static constexpr int kMostWhole = kLeastPieces * 32 << (52 - kMassBits - 1);
    static __device__ __forceinline__ int elements(int row_size, int pieces) {
        const int shift = exponent_of(pieces * kTogether);
        return ((row_size + (1 << shift) - 1) >> shift) * kTogether;
    }
    __device__ __forceinline__ int elements() const {
        return elements(row_size, max(kLeastPieces, team_size * kNumWarps));
    }

    // The first element of the warp's `piece`.
    __device__ __forceinline__ int begin(int piece) const {
        const int of_row =
            (piece * team_size + rank) * kNumWarps + static_cast<int>(threadIdx.x) / 32;
        return static_cast<int>(
            min(static_cast<int64_t>(row_size), static_cast<int64_t>(of_row) * elements()));
    }
    __device__ __forceinline__ int end(int piece) const {
        return min(row_size, begin(piece) + elements());
    }

    // What the lanes have weighed of a piece above the window's lower end.
    __device__ __forceinline__ void close(int piece, uint64_t above) const {
        above = warp_reduce(above, [](uint64_t a, uint64_t b) { return a + b; });
        if (threadIdx.x % 32 == 0) {
            shared.own_pieces[piece * kNumWarps + threadIdx.x / 32] = above;
        }
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

// What a lane has under way to shared memory of the steps of its warp, of rows that are plain: in
// the order in which they are weighed, each of as many fours as a slot has of a thread.
template <bool kIsFp32>
struct Ahead {
    static constexpr int kTurn = 32 * kFour, kTurns = TeamShared::kTurns;
    static constexpr int kStep = kTurns * kTurn, kBytes = kIsFp32 ? 4 : 2;
    // A slot has kTurns fours of each thread, each kNumThreads before the next.
    static constexpr uint32_t kSlot = kTurns * kNumThreads * 16;
    static constexpr uint32_t kLast = (TeamShared::kSlots - 1) * kSlot;
    const PlainRow& row;
    const char* from;              // what the lane has of the row's first step
    char* own;                     // and of the first slot
    int lane, piece_size, of_all;  // of_all: a piece of each warp
    int next, piece_end;           // elements of the warp that come next; below 0: none
    uint32_t whole_end;            // a step that begins before it is whole

    __device__ __forceinline__ Ahead(const PlainRow& its, const Pieces& pieces) : row(its) {
        own = reinterpret_cast<char*>(pieces.shared.under_way + threadIdx.x);
        lane = threadIdx.x % 32 * kFour;
        from = row.logits + lane * kBytes;
        whole_end = max(0, row.size - kStep + 1);
        piece_size = pieces.elements();
        of_all = pieces.team_size * kNumWarps * piece_size;
        const int warp = pieces.rank * kNumWarps + static_cast<int>(threadIdx.x) / 32;
        next = warp * piece_size + (pieces.of_a_warp() - 1) * of_all;
        piece_end = next + piece_size;
    }

    static __device__ __forceinline__ uint32_t next_of(uint32_t slot) {
        return slot == kLast ? 0 : slot + kSlot;
    }

    __device__ __forceinline__ void fetch(uint32_t slot) {
        copy(slot);
        cp_async_commit();
        next += kStep;
        if (next == piece_end) {
            piece_end -= of_all;
            next = piece_end - piece_size;
        }
    }

    // As much as there are slots for, but for the last.
    __device__ __forceinline__ void fetch_first() {
#pragma unroll 1
        for (uint32_t slot = 0; slot < kLast; slot += kSlot) {
            fetch(slot);
        }
    }

  private:
    static __device__ __forceinline__ void copy_four(char* to, const char* from) {
        if constexpr (kIsFp32) {
            cp_async_16(shared_address(to), from, true);
        } else {
            cp_async_8(shared_address(to), from);
        }
    }

    __device__ __forceinline__ void copy(uint32_t slot) const {
        const char* first = from + static_cast<int64_t>(next) * kBytes;
        char* to = own + slot;
        if (static_cast<uint32_t>(next) < whole_end) {
#pragma unroll
            for (int i = 0; i < kTurns; ++i) {
                copy_four(to + i * kNumThreads * 16, first + i * kTurn * kBytes);
            }
        } else if (next >= 0) {
            const uint32_t none = kIsFp32              ? 0xff800000u
                                  : row.dtype == kFp16 ? 0xfc00fc00u
                                                       : 0xff80ff80u;
#pragma unroll 1
            for (int i = 0; i < kTurns; ++i) {
                if (next + lane + i * kTurn < row.size) {
                    copy_four(to + i * kNumThreads * 16, first + i * kTurn * kBytes);
                } else {
                    *reinterpret_cast<uint4*>(to + i * kNumThreads * 16) =
                        make_uint4(none, none, none, none);
                }
            }
        }
    }
};

// Rows that are plain and have a finite largest, by whole warps, a step of fours of each lane after
// another: the next ones are under way to shared memory, where a lane reads what it has asked for.
// Fours that have something of the window are listed.
template <bool kIsFp32>
__device__ __forceinline__ void weigh_plain(const PlainRow& row, const Weigher& weigher,
                                            const Pieces& pieces) {
    Ahead<kIsFp32> ahead(row, pieces);
    constexpr int kTurn = ahead.kTurn, kTurns = ahead.kTurns, kNum = kTurns * kFour;
    TeamShared& shared = pieces.shared;
    const Question question = shared.s.question;
    const int lane = ahead.lane, piece_size = ahead.piece_size, of_all = ahead.of_all;
    int piece_begin = ahead.next;
    ahead.fetch_first();
    uint64_t total = 0;
    uint32_t slot = 0, free_slot = ahead.kLast;
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
                const uint4 bits =
                    *reinterpret_cast<const uint4*>(ahead.own + slot + i * kNumThreads * 16);
                row.unpack<kIsFp32>(bits, *reinterpret_cast<float (*)[kFour]>(z + i * kFour));
            }
            ahead.fetch(free_slot);
            free_slot = slot;
            slot = ahead.next_of(slot);
            if (question.floor > -kInfinity) {
                // What is not above it weighs nothing, as what is excluded.
                float most = -kInfinity;
#pragma unroll
                for (int j = 0; j < kNum; ++j) {
                    z[j] = z[j] > question.floor ? z[j] : -kInfinity;
                    most = fmaxf(most, z[j]);
                }
                if (!__any_sync(kAllLanes, most > -kInfinity)) {
                    continue;
                }
            }
            weigh_each(weigher, z, y);
            float least_above = kInfinity;
#pragma unroll
            for (int j = 0; j < kNum; ++j) {
                const double mass = y[j];
                totals[j % 2].add(mass);
                if (z[j] > question.from) {
                    aboves[j % 2].add(mass);
                    least_above = fminf(least_above, z[j]);
                }
            }
            if (least_above <= question.to) {
#pragma unroll
                for (int i = 0; i < kTurns; ++i) {
                    bool has_any = false;
#pragma unroll
                    for (int j = i * kFour; j < (i + 1) * kFour; ++j) {
                        has_any |= z[j] > question.from && z[j] <= question.to;
                    }
                    if (has_any) {
                        const float four[] = {z[4 * i], z[4 * i + 1], z[4 * i + 2], z[4 * i + 3]};
                        shared.list(at + i * kTurn, four);
                    }
                }
            }
            __syncwarp();
        }
        total += totals[0].value() + totals[1].value();
        pieces.close(piece, aboves[0].value() + aboves[1].value());
    }
    pieces.close_all(total);
}

// NOTE: a function of its own, so that nothing of the kernel is in its registers: else there are
// not enough for powers side by side. What takes nothing leaves its caller as many.
__device__ __noinline__ void weigh_plain_row() {
    TeamShared& shared = team_shared();
    const PlainRow row = plain_row(shared.p);
    const Pieces pieces = {shared, static_cast<int>(cluster_rank()),
                           static_cast<int>(cluster_size()), row.size};
    if (row.dtype == kFp32) {
        weigh_plain<true>(row, shared.weigher(), pieces);
    } else {
        weigh_plain<false>(row, shared.weigher(), pieces);
    }
}

// Rows of any kind, or whose windows go into bins.
__device__ __noinline__ void weigh_any_row() {
    TeamShared& shared = team_shared();
    Row row(shared.p);
    row.has_mask = shared.has_mask;
    const Fours fours(row);
    const Weigher weigher = shared.weigher();
    const Pieces pieces = {shared, static_cast<int>(cluster_rank()),
                           static_cast<int>(cluster_size()), shared.p.size};
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
__device__ __noinline__ void scan() {
    TeamShared& shared = team_shared();
    const Question question = shared.s.question;
    // At temperatures at which `lowest` is the least of all floats it weighs something.
    if (shared.is_ahead && shared.largest < FLT_MAX && shared.lowest > -FLT_MAX &&
        question.collects && shared.p.size <= Pieces::kMostWhole) {
        weigh_plain_row();
        __syncthreads();
        shared.find_bits();
        choose_listed(question.from, question.to, shared);
    } else {
        shared.find_bits();
        weigh_any_row();
    }
}

}  // namespace kernel_hub::sampling::sm90
