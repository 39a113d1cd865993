// Rows of which a thread has few enough elements to hold them from the one read on.
#pragma once

#include "sampling/sm90/passes.cuh"

namespace kernel_hub::sampling::sm90 {

constexpr int kHeld = 8;  // fours of a thread
// More groups' largest bound too loosely.
constexpr int kMostByGroups = kNumGroups / 2;
static_assert(kNumGroups % (4 * kMaxTeam) == 0 && 4 * kNumGroups == kNumThreads);

__device__ __forceinline__ bool may_hold(const Fours& fours, const Team& team) {
    return fours.is_ahead && fours.p.size <= kHeld * kTurn * team.size;
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

// Reads the thread's part of the block's share; returns the largest. It stays in shared memory,
// what is under way to be weighed is not yet.
template <bool kIsFp32>
__device__ __forceinline__ float hold(const PlainRow& row, int first, int step, uint4* held) {
    uint4 bits[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        if (first + i * step < row.size) {
            bits[i] = row.load<kIsFp32>(first + i * step);
        }
    }
    float largest = -kInfinity;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        float z[kFour];
        row.unpack<kIsFp32>(bits[i], z);
        if (first + i * step < row.size) {
            held[i * kNumThreads] = bits[i];
            largest = fmaxf(largest, fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3])));
        }
    }
    return largest;
}

__device__ __forceinline__ uint4* held_of_thread(TeamShared& shared) {
    static_assert(kHeld <= TeamShared::kSlots * TeamShared::kTurns);
    return shared.under_way + threadIdx.x;
}

// Holds the row; shared.largest and shared.bound become known. Returns the thread's largest.
// NOTE: the bound is by groups of threads, each compared with all others: by threads it is found
// bit by bit, by 18 barriers, and a second look reads the share again. Functions of their own, so
// that rows that are not held do not wait for their code.
__device__ __noinline__ float look_and_hold() {
    Team team(team_shared());
    TeamShared& shared = team.shared;
    const PlainRow row = plain_row(shared.p);
    const int step = team.size * kTurn, first = first_of_share(team);
    uint4* held = held_of_thread(shared);
    const float of_thread = row.dtype == kFp32 ? hold<true>(row, first, step, held)
                                               : hold<false>(row, first, step, held);
    // Lanes apart are a group: what is large and close together is in more of them.
    const int of_warp = kMaxTeam >> team.shift, lane_idx = threadIdx.x % 32;
    float largest = of_thread;
#pragma unroll 1
    for (int mask = 16; mask >= of_warp; mask /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, mask));
    }
    team.take_back();
    if (lane_idx < of_warp) {
        shared.own_groups[threadIdx.x / 32 * of_warp + lane_idx] = largest;
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
    const PlainRow row = plain_row(shared.p);
    const uint4* held = held_of_thread(shared);
    const float bound = shared.bound;
    if (of_thread > bound) {
#pragma unroll 1
        for (int at = first_of_share(team); at < row.size; at += team.size * kTurn) {
            float z[kFour];
            if (row.dtype == kFp32) {
                row.unpack<true>(*held, z);
            } else {
                row.unpack<false>(*held, z);
            }
            held += kNumThreads;
            if (fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3])) > bound) {
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
