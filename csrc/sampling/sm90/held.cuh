// Rows of which a thread has few enough elements to hold them from the one read on.
#pragma once

#include "sampling/sm90/passes.cuh"

namespace kernel_hub::sampling::sm90 {

constexpr int kHeld = 8;  // fours of a thread
// More groups' largest bound too loosely.
constexpr int kMostByGroups = kNumGroups / 2;
static_assert(4 * kNumGroups == kNumThreads);

__device__ __forceinline__ bool may_hold(const SampleParams& p, const Team& team) {
    return p.size <= kHeld * kTurn << team.shift;
}

// Of the largest of all groups of the cluster's threads the `wanted`-th: so many values are not
// less. By one thread, into shared.bound: what is above it, with the row's largest.
__device__ __forceinline__ void rank_groups(int wanted, TeamShared& shared) {
    constexpr int kSplit = kNumThreads / kNumGroups, kEach = kNumGroups / kSplit;
    const int mine = threadIdx.x / kSplit, first = threadIdx.x % kSplit * kEach;
    const float own = shared.groups[mine];
    int place = 0;
#pragma unroll 1
    for (int i = 0; i < kEach; i += kFour) {
        const float4 each = *reinterpret_cast<const float4*>(&shared.groups[first + i]);
        const float z[kFour] = {each.x, each.y, each.z, each.w};
#pragma unroll
        for (int j = 0; j < kFour; ++j) {
            place += z[j] > own || (z[j] == own && first + i + j < mine);
        }
    }
#pragma unroll
    for (int mask = 1; mask < kSplit; mask *= 2) {
        place += __shfl_xor_sync(kAllLanes, place, mask);
    }
    if (threadIdx.x % kSplit == 0) {
        if (place == 0) {
            shared.largest = own;
        }
        if (place == wanted - 1) {
            shared.bound = own > -FLT_MAX ? from_key(key_of(own) - 1) : -kInfinity;
        }
    }
}

__device__ __forceinline__ uint4* held_of_thread(TeamShared& shared) {
    static_assert(kHeld <= TeamShared::kSlots * TeamShared::kTurns);
    return shared.under_way + threadIdx.x;
}

__device__ __forceinline__ float largest_of(const float (&z)[kFour]) {
    return fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3]));
}

__device__ __forceinline__ void put(uint4* held, const float (&z)[kFour]) {
    *held = make_uint4(__float_as_uint(z[0]), __float_as_uint(z[1]), __float_as_uint(z[2]),
                       __float_as_uint(z[3]));
}
__device__ __forceinline__ void get(const uint4* held, float (&z)[kFour]) {
    const uint4 bits = *held;
    unpack<float>(bits, z);
}

// What a thread holds of a row of which each warp has neighbours.
struct HeldInOrder {
    static constexpr int kTurn = 32 * kFour;
    int turns, of_warp;  // fours of a thread; elements

    __device__ __forceinline__ HeldInOrder(int size, const Team& team) {
        const int shift = exponent_of(kNumWarps * kTurn) + team.shift;
        turns = (size + (1 << shift) - 1) >> shift;
        of_warp = turns * kTurn;
    }
    // The first element of a lane of one of all warps.
    __device__ __forceinline__ int first(int warp) const {
        return warp * of_warp + static_cast<int>(threadIdx.x) % 32 * kFour;
    }
};

// Which fours a thread holds: of rows of top_k blocks take turns, so that all have some of what is
// large and close together; of others warps have neighbours.
struct HeldFours {
    int first, step, end;

    __device__ __forceinline__ HeldFours(const TeamShared& shared, const Team& team)
        : first(first_of_share(team)), step(team.size * kTurn), end(shared.p.size) {
        if (shared.top_k == 0) {
            const HeldInOrder part(end, team);
            const int warp = team.rank * kNumWarps + static_cast<int>(threadIdx.x) / 32;
            first = part.first(warp);
            step = part.kTurn;
            end = min(end, (warp + 1) * part.of_warp);
        }
    }
};

// Holds the thread's fours as they are drawn from, in place of what there is not -inf; returns the
// largest. Where what is weighed is under way: it is not yet.
__device__ __noinline__ float hold_plain() {
    TeamShared& shared = team_shared();
    const auto [first, step, end] = HeldFours(shared, Team(shared));
    const PlainRow row = plain_row(shared.p);
    const bool is_fp32 = row.dtype == kFp32;
    const int four_bytes = is_fp32 ? 16 : 8;
    const char* from = row.logits + static_cast<int64_t>(first / kFour) * four_bytes;
    uint4* held = held_of_thread(shared);
    int at = first;
#pragma unroll 1
    for (int i = 0; i < kHeld; ++i, at += step, from += step / kFour * four_bytes) {
        const uint32_t to = shared_address(held + i * kNumThreads);
        if (at >= end) {
            const float none[kFour] = {-kInfinity, -kInfinity, -kInfinity, -kInfinity};
            put(held + i * kNumThreads, none);
        } else if (is_fp32) {
            cp_async_16(to, from, true);
        } else {
            cp_async_8(to, from);
        }
    }
    cp_async_commit();
    cp_async_wait<0>();
    float largest = -kInfinity;
#pragma unroll 2
    for (int i = 0; i < kHeld; ++i) {
        float z[kFour];
        get(held + i * kNumThreads, z);
        if (!is_fp32 && first + i * step < end) {
            row.unpack<false>(held[i * kNumThreads], z);
            put(held + i * kNumThreads, z);
        }
        largest = fmaxf(largest, largest_of(z));
    }
    return largest;
}

// The same of any row.
__device__ __noinline__ float hold_any() {
    TeamShared& shared = team_shared();
    const SampleParams& p = shared.p;
    const auto [first, step, end] = HeldFours(shared, Team(shared));
    Row row(p);
    row.has_mask = shared.has_mask;
    const Fours fours(row);
    uint4* held = held_of_thread(shared);
    constexpr int kTogether = 2;
    float largest = -kInfinity;
    // A line is some lanes'.
#pragma unroll 1
    for (int i = 0; i < kHeld && threadIdx.x % 8 == 0; ++i) {
        const int at = first + i * step;
        if (at < end) {
            prefetch_l2(fours.row.logits + static_cast<int64_t>(at) * fours.row.element_bytes());
            if (p.bias) {
                prefetch_l2(p.bias + p.row_idx * p.bias_stride + at);
            }
            if (fours.has_counts) {
                prefetch_l2(p.counts + p.row_idx * p.counts_stride + at);
            }
            if (threadIdx.x % 32 == 0 && row.has_mask) {
                prefetch_l2(p.allowed + p.row_idx * p.allowed_stride + at / 32);
            }
            if (threadIdx.x % 32 == 0 && fours.has_prompt) {
                prefetch_l2(p.in_prompt + p.row_idx * p.in_prompt_stride + at / 32);
            }
        }
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < kHeld; i += kTogether) {
        uint4 bits[kTogether];
        Changes changes[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            const int at = first + (i + j) * step;
            if (at < end) {
                bits[j] = fours.load(at);
                changes[j] = fours.load_changes(at);
            }
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            const int at = first + (i + j) * step;
            float z[kFour] = {-kInfinity, -kInfinity, -kInfinity, -kInfinity};
            if (at < end) {
                fours.unpack(bits[j], z);
                if (fours.is_changed) {
                    fours.apply(changes[j], at, z);
                }
            }
            put(held + (i + j) * kNumThreads, z);
            largest = fmaxf(largest, largest_of(z));
        }
        __syncwarp();
    }
    return largest;
}

__device__ __forceinline__ float hold(const TeamShared& shared) {
    return shared.is_ahead ? hold_plain() : hold_any();
}

// Holds the row; shared.largest and shared.bound become known. Returns the thread's largest.
// NOTE: the bound is by groups of threads, each compared with all others: by threads it is found
// bit by bit, by 18 barriers, and a second look reads the share again. Functions of their own, so
// that rows that are not held do not wait for their code.
__device__ __noinline__ float look_and_hold() {
    Team team(team_shared());
    TeamShared& shared = team.shared;
    const float of_thread = hold(shared);
    // Lanes apart are a group, or two warps: what is large and close together is in more of them.
    const int of_block = kNumGroups >> team.shift, warp_idx = threadIdx.x / 32;
    const int of_warp = max(1, of_block / kNumWarps), lane_idx = threadIdx.x % 32;
    float largest = of_thread;
#pragma unroll 1
    for (int mask = 16; mask >= of_warp; mask /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, mask));
    }
    team.take_back();
    if (lane_idx < of_warp) {
        const int place = of_block < kNumWarps ? warp_idx : warp_idx * of_warp + lane_idx;
        shared.own_groups[place] = largest;
    }
    if (of_block < kNumWarps) {
        __syncthreads();
        const float other = shared.own_groups[(2 * threadIdx.x + 1) % kNumWarps];
        largest = fmaxf(shared.own_groups[2 * threadIdx.x % kNumWarps], other);
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < of_block) {
            shared.own_groups[threadIdx.x] = largest;
        }
    }
    team.exchange_groups();
    rank_groups(shared.top_k, shared);
    __syncthreads();
    return of_thread;
}

// What is held and above shared.bound becomes the block's candidates.
__device__ __noinline__ void choose_held(float of_thread) {
    Team team(team_shared());
    TeamShared& shared = team.shared;
    const uint4* held = held_of_thread(shared);
    const float bound = shared.bound;
    if (of_thread > bound) {
#pragma unroll 1
        for (int at = first_of_share(team); at < shared.p.size; at += team.size * kTurn) {
            float z[kFour];
            get(held, z);
            held += kNumThreads;
            if (largest_of(z) > bound) {
#pragma unroll 1
                for (int j = 0; j < kFour; ++j) {
                    const float value = pick(z, j);
                    if (value > bound) {
                        shared.add(value, at + j);
                    }
                }
            }
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.mine.num = shared.num_own;
    }
}

}  // namespace kernel_hub::sampling::sm90
