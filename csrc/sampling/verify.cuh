// What verifying drafts needs of a position, whether they follow one another or branch: which of
// the drafts behind it is kept, or what is drawn in their place.
//
// A position is a row of logits. Up to 16 blocks of 256 threads share it, a cluster, from compute
// capability 9.0 on; before, one. It is 128 pieces, some of a warp, one after another: each leaves
// one word a pass (its largest, or its sum), of which every warp of every block reads all, so that
// all know the same and go the same way. Sums are of whole numbers: as many blocks, as many pieces
// a warp, the same bits.
#pragma once

#include "kernel_hub/bounds.cuh"
#include "kernel_hub/follow_launch.cuh"
#include "sampling/verify_team.cuh"

namespace kernel_hub::sampling {

enum DraftsOutside : int {
    kDraftsOutside = 1 << 11,  // draft_ids; beside those of kernel_hub/bounds.cuh
};

constexpr int kFixBits = 56;  // in which p and q are compared
constexpr double kFixOne = 1ll << kFixBits;

// q of an id as a whole number of 2^-kFixBits.
// NOTE: a product by a power of 2 is exact, so that one conversion rounds once, as of a double.
__device__ __forceinline__ int64_t fixed_draft(float given) {
    return __float2ll_rn(__fmul_rn(fminf(fmaxf(given, 0.0f), 1.0f), 0x1p56f));
}

__device__ __forceinline__ int64_t scaled(double part, double scale) {
    return __double2ll_rn(__dmul_rn(part, scale));
}

// A number below 2^52 as a double: by its bits, where a conversion is as slow as sixteen sums.
__device__ __forceinline__ double small_double(int64_t part) {
    return __dadd_rn(__longlong_as_double(part | 0x4330000000000000), -0x1p52);
}

// The children of a position that were tried, and what brings what they left to the sum 1.
template <int kMost>
struct Tried {
    int child[kMost];
    double scale[kMost];
};

// Dynamic, so that the blocks of a cluster have each its own wherever they run.
template <int kMost>
struct VerifyShared {
    alignas(16) uint64_t words[2][kPieces];  // by turns: what is read is not written
    uint64_t seed, offset;                   // which registers would hold for long
    uint64_t parts[kNumWarps];               // of the piece in which what is drawn lies
    Tried<kMost> tried;
};

// What a warp reads of a position: its pieces.
struct Share {
    int begin, end;

    template <bool kIsPlain>
    __device__ __forceinline__ Share(const Position<kIsPlain>& x, const Team& team) {
        const int width = x.elements_a_piece(), first = team.first_piece();
        begin = part_begin(0, first, width, x.size);
        end = part_begin(0, first + team.pieces_a_warp(), width, x.size);
    }
};

// Before anything else is read: that takes as long as the first of it is under way.
template <bool kIsPlain>
__device__ __forceinline__ void fetch_share(const Position<kIsPlain>& x, const Team& team) {
    const Share share(x, team);
    fetch_ahead<kFetched>(x.logits, share.begin, share.end, x.dtype == kFp32 ? 4 : 2);
}

struct LargestOfAll {
    float value;  // -inf: nothing may be drawn
    int index;    // its first, if it is asked for; 0 where there is none
};

template <bool kIsPlain>
__device__ __forceinline__ LargestOfAll find_largest(const Position<kIsPlain>& x, bool has_index,
                                                     Team& team) {
    constexpr int kLoads = kIsPlain ? 4 : 2;
    const int before = threadIdx.x % 32 * kLane, piece = team.first_piece();
    const Share share(x, team);
    const int begin = share.begin, end = share.end;
    const int item_bytes = x.dtype == kFp32 ? 4 : 2;
    float best = -kInfinity;
    int found = 0;
    // Those of a round are compared while the next are under way: a block that has a multiprocessor
    // alone would wait for the L2 each time. Of the first round they are none.
    uint4 ahead[kLoads];
    x.load(begin, begin, ahead);
#pragma unroll 1
    for (int at = begin + before; at - before - kLoads * kStep < end; at += kLoads * kStep) {
        float z[kLoads * kLane];
        x.unpack(ahead, z);
        x.load(at, end, ahead);
        const int64_t next = static_cast<int64_t>(at - before) + kFetched * kLineBytes / item_bytes;
        fetch_ahead<32>(x.logits, next, static_cast<int>(min(next + kLoads * kStep, int64_t{end})),
                        item_bytes);
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const float most =
                fmaxf(fmaxf(z[4 * i], z[4 * i + 1]), fmaxf(z[4 * i + 2], z[4 * i + 3]));
            found = most > best ? at + (i - kLoads) * kStep : found;
            best = fmaxf(best, most);
        }
    }
    if (has_index && best > -kInfinity) {
#pragma unroll 1
        while (!(x.value(found) == best)) {
            ++found;
        }
    }
    // The larger, then the earlier.
    uint64_t key = static_cast<uint64_t>(key_of(best)) << 32 | ~static_cast<uint32_t>(found);
    key = warp_largest(key);
    if (static_cast<int>(threadIdx.x % 32) < team.pieces_a_warp()) {
        team.words[team.turn][piece + threadIdx.x % 32] = key;
    }
    const Words all = team.exchange();
    key = all.each[0];
#pragma unroll
    for (const uint64_t word : all.each) {
        key = max(key, word);
    }
    key = warp_largest(key);
    const float value = from_key(static_cast<uint32_t>(key >> 32));
    return {value, value > -kInfinity ? static_cast<int>(~static_cast<uint32_t>(key)) : 0};
}

// What is left of p after the children tried, as whole numbers: masses, then of 2^-kFixBits.
template <bool kIsPlain, int kMost>
struct Remainder {
    const Position<kIsPlain>& x;
    const Weigher& weigher;
    const Tried<kMost>& tried;

    __device__ __forceinline__ int64_t mass(float z) const {
        const float depth = weigher.clamped_depth(z);
        return static_cast<int64_t>(mass_of_clamped(z > -kInfinity ? depth : kLeastPower));
    }
    static __device__ __forceinline__ int64_t less(double part, double scale, float q) {
        return max(scaled(part, scale) - fixed_draft(q), static_cast<int64_t>(0));
    }

    // Of one element, behind `num` children.
    __device__ __forceinline__ int64_t left(int i, int num) const {
        int64_t part = mass(x.value(i));
#pragma unroll 1
        for (int n = 0; n < num; ++n) {
            part = less(static_cast<double>(part), tried.scale[n], x.draft(tried.child[n], i));
        }
        return part;
    }

    // The lane's sum of elements begin .. end - 1 that a warp shares: logits that come next are
    // under way, q of the child tried last on the way to the L2, where the others are.
    __device__ __forceinline__ uint64_t sum(int begin, int end, int num) const {
        constexpr int kLoads = kIsPlain ? 2 : 1, kNum = kLoads * kLane;
        const int before = threadIdx.x % 32 * kLane;
        if (num > 0) {
            const int child = tried.child[num - 1];
            fetch_ahead<kFetched>(x.draft_probs + child * x.draft_probs_stride, begin, end,
                                  sizeof(float));
        }
        uint64_t sum = 0;
        uint4 ahead[kLoads], drafts[kLoads];
        // NOTE: the first round asks for the first alone: one body, half the code of loads.
        x.load(begin, begin, ahead);
#pragma unroll 1
        for (int at = begin + before - kLoads * kStep; at - before < end; at += kLoads * kStep) {
            asm volatile("" : "+r"(at));
            float z[kNum], q[kNum];
            int64_t part[kNum];
            x.unpack(ahead, z);
            if (num > 0 && at >= begin) {
                x.load_drafts(tried.child[0], at, end, drafts);
            }
            x.load(at + kLoads * kStep, end, ahead);
            if (at < begin) {
                continue;
            }
#pragma unroll
            for (int j = 0; j < kNum; ++j) {
                part[j] = mass(z[j]);
            }
#pragma unroll 1
            for (int n = 0; n < num; ++n) {
                if (kMost > 1 && n > 0) {
                    x.load_drafts(tried.child[n], at, end, drafts);
                }
                x.unpack_floats(drafts, q);
#pragma unroll
                for (int j = 0; j < kNum; ++j) {
                    // Of one draft these are masses.
                    part[j] = less(kMost > 1 ? static_cast<double>(part[j]) : small_double(part[j]),
                                   tried.scale[n], q[j]);
                }
                if (kMost == 1) {
                    break;
                }
            }
#pragma unroll
            for (int j = 0; j < kNum; ++j) {
                sum += static_cast<uint64_t>(part[j]);
            }
        }
        return sum;
    }
};

// Where in the order of pieces a sum passes a number.
struct Place {
    int piece;
    uint64_t rest;  // of the number, in the piece
};

// By whole warps, of the words of all pieces; the number is below their sum.
__device__ __forceinline__ Place find_piece(const Words& all, uint64_t number) {
    const int lane_idx = threadIdx.x % 32;
    const uint64_t own = all.sum(), before = warp_sum_to(own) - own;
    const bool is_here = before <= number && number - before < own;
    uint64_t rest = number - before;
    int piece = kEach * lane_idx;
#pragma unroll
    for (int i = 0; i < kEach - 1; ++i) {
        const bool is_behind = rest >= all.each[i] && piece == kEach * lane_idx + i;
        rest -= is_behind ? all.each[i] : 0;
        piece += is_behind;
    }
    const int lane = __ffs(__ballot_sync(kAllLanes, is_here)) - 1;
    return {__shfl_sync(kAllLanes, piece, lane), __shfl_sync(kAllLanes, rest, lane)};
}

// Tries the children next(-1), next(that) .. until one is -1, and leaves a token: that of the child
// that is kept (token_of), or what is drawn in their place; id_of(child): what was drafted. By all
// threads of all blocks. Whether this block is the one that leaves it.
template <bool kIsPlain, int kMost, typename Next, typename IdOf, typename TokenOf>
__device__ __forceinline__ bool verify(const Position<kIsPlain>& x, float temperature,
                                       uint64_t seed, uint64_t offset, int64_t* token, Team& team,
                                       VerifyShared<kMost>& s, const Next& next, const IdOf& id_of,
                                       const TokenOf& token_of) {
    const int lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32;
    const bool is_greedy = !(temperature > 0.0f);
    if (threadIdx.x == 0) {
        s.seed = seed;
        s.offset = offset;
    }
    const LargestOfAll top = find_largest(x, is_greedy, team);
    const auto leave = [&](int64_t found) {
        team.arrive_last();
        if (team.rank == 0 && threadIdx.x == 0) {
            *token = found;
        }
        return team.rank == 0;
    };
    if (is_greedy || !(top.value > -kInfinity)) {
        return leave(top.index);
    }
    const Weigher weigher = weigher_of(top.value, temperature);
    const Remainder<kIsPlain, kMost> remainder = {x, weigher, s.tried};
    int num = 0, child = -1;
    bool is_exhausted = x.draft_probs == nullptr;
    // What a warp sums up: pieces of the row, and in the end a part of one.
    bool is_part = false;
    int first = team.first_piece(), num_pieces = team.pieces_a_warp(), origin = 0, limit = x.size;
    int width = x.elements_a_piece();
    uint64_t drawn = 0;
#pragma unroll 1
    while (true) {
        uint64_t* words = is_part ? s.parts : team.words[team.turn];
#pragma unroll 1
        for (int piece = first; piece < first + num_pieces; ++piece) {
            const int begin = part_begin(origin, piece, width, limit);
            const int end = part_begin(origin, piece + 1, width, limit);
            const uint64_t sum = warp_sum(remainder.sum(begin, end, num));
            if (lane_idx == 0) {
                words[piece] = sum;
            }
        }
        if (is_part) {
            break;
        }
        const Words all = team.exchange();
        const uint64_t total = warp_sum(all.sum());
        if (total == 0) {
            // Where nothing is left, by rounding alone, of p itself.
            num = 0;
            is_exhausted = true;
            continue;
        }
        if (!is_exhausted) {
            child = next(child);
        }
        if (is_exhausted || child < 0) {
            const Place place = find_piece(all, below(total, random_bits(s.seed, s.offset)));
            team.arrive_last();
            if (team.owner(place.piece) != team.rank) {
                return false;
            }
            constexpr int kParts = kNumWarps * kLane;
            drawn = place.rest;
            origin = part_begin(0, place.piece, width, x.size);
            limit = part_begin(0, place.piece + 1, width, x.size);
            width = (limit - origin + kParts - 1) / kParts * kLane;
            first = warp_idx;
            num_pieces = 1;
            is_part = true;
            continue;
        }
        const double scale = __ddiv_rn(kFixOne, static_cast<double>(total));
        const int id = id_of(child);
        const double chance =
            __dmul_rn(static_cast<double>(random_bits(s.seed, s.offset, 1 + num) >> 11), 0x1p-53);
        const int64_t target = scaled(static_cast<double>(remainder.left(id, num)), scale);
        if (__dmul_rn(chance, static_cast<double>(fixed_draft(x.draft(child, id)))) <
            static_cast<double>(target)) {
            return leave(token_of(child));
        }
        if (threadIdx.x == 0) {
            s.tried.child[num] = child;
            s.tried.scale[num] = scale;
        }
        ++num;
        __syncthreads();
    }
    __syncthreads();
    int part = 0;
#pragma unroll 1
    while (drawn >= s.parts[part]) {
        drawn -= s.parts[part++];
    }
    const int end = part_begin(origin, part + 1, width, limit);
#pragma unroll 1
    for (int at = part_begin(origin, part, width, limit); part == warp_idx && at < end; at += 32) {
        const int i = at + lane_idx;
        const uint64_t own = i < end ? static_cast<uint64_t>(remainder.left(i, num)) : 0;
        const uint64_t up_to = warp_sum_to(own);
        if (up_to - own <= drawn && drawn < up_to) {
            *token = i;
        }
        const uint64_t sum = __shfl_sync(kAllLanes, up_to, 31);
        if (drawn < sum) {
            break;
        }
        drawn -= sum;
    }
    return true;
}

// Whether all positions of a row have left their tokens, this the last. By the first warp, behind a
// barrier after what the block wrote, which one thread's fence orders for all.
__device__ __forceinline__ bool is_last_of_row(int* state, int positions) {
    int num = 0;
    if (threadIdx.x == 0) {
        __threadfence();
        num = atomicAdd(state, 1) + 1;
        if (num == positions) {
            *state = 0;
            __threadfence();
        }
    }
    return __shfl_sync(kAllLanes, num, 0) == positions;
}

__device__ __forceinline__ int64_t read_token(const int64_t* token) {
    return __ldcg(reinterpret_cast<const long long*>(token));
}

}  // namespace kernel_hub::sampling
