// Rows that are held and drawn from all they keep: read once, weighed where they lie.
//
//   1. The largest of all blocks.
//   2. Each value is weighed, for the total, and added to one of 1,024 bins, by its mass beside
//      that of the bin's middle: one addition of 32 bits. Their sums are right to 2^-14, so that
//      the bin in which top_p is met is known, or two of them; where these have too much, bins of
//      their own follow.
//   3. What is in the bin becomes candidates; what is above it is added up, exactly, a sum a warp:
//      whether the guess was right is known, else the row is searched as others are.
// What is done once a row is done by a warp: all would wait for each other's instructions.
// Warps have neighbours of the row, so that what is drawn lies in what one of them has.
#pragma once

#include "sampling/sm90/held_bins.cuh"

namespace kernel_hub::sampling::sm90 {

constexpr int kMostNear = 32;  // values that are compared in pairs, each by a lane
constexpr int kLevels = 2;     // of bins

// A four that is held, and what each weighs.
__device__ __forceinline__ void get_weighed(const uint4* held, const float4* weighed,
                                            float (&z)[kFour], float (&masses)[kFour]) {
    get(held, z);
    const float4 y = *weighed;
    masses[0] = y.x, masses[1] = y.y, masses[2] = y.z, masses[3] = y.w;
}

// What is left of a number in the part of a warp, by any warp of its block.
__device__ __forceinline__ void draw_of_warp(const HeldInOrder& part, int warp, float from,
                                             uint64_t total, uint64_t drawn, TeamShared& shared) {
    const int lane_idx = threadIdx.x % 32, slot = warp % kNumWarps * 32 + lane_idx;
#pragma unroll 1
    for (int i = 0; i < part.turns; ++i) {
        float z[kFour], masses[kFour];
        get_weighed(shared.under_way + i * kNumThreads + slot,
                    shared.weighed + i * kNumThreads + slot, z, masses);
        uint64_t own = 0;
#pragma unroll
        for (int j = 0; j < kFour; ++j) {
            WholeSum one;
            one.add(masses[j]);
            own += z[j] > from ? one.value() : 0;
        }
        const uint64_t of_turn = warp_sum(own);
        if (drawn >= of_turn) {
            drawn -= of_turn;
            continue;
        }
        const uint64_t until = warp_scan(own, lane_idx);
        uint64_t sum = until - own;
        if (sum <= drawn && drawn < until) {
#pragma unroll 1
            for (int j = 0; j < kFour; ++j) {
                WholeSum one;
                one.add(pick(masses, j));
                const float value = pick(z, j);
                sum += value > from ? one.value() : 0;
                if (sum > drawn) {
                    write_drawn(shared.p, part.first(warp) + i * part.kTurn + j,
                                shared.weigher().depth(value), total);
                    break;
                }
            }
        }
        return;
    }
}

// Draws from what is above `from`, which shared.pieces have together. By a warp of each block.
__device__ __noinline__ void draw_held(float from, uint64_t total) {
    const Team team(team_shared());
    const Place place = find_piece(team, below(total, team.shared.bits));
    if (place.piece / kNumWarps == team.rank) {
        const HeldInOrder part(team.shared.p.size, team);
        draw_of_warp(part, place.piece, from, total, place.rest, team.shared);
    }
    __syncwarp();
}

// A candidate of a lane, of those that all blocks have left in shared.near.
struct NearOne {
    float value;
    int index, num;  // num: of all lanes; perhaps more than there are
    uint64_t mass, above;
};

__device__ __forceinline__ NearOne gather_near(const Team& team) {
    TeamShared& shared = team.shared;
    const int lane_idx = threadIdx.x % 32;
    int of_block = 0;
    if (lane_idx < team.size) {
        of_block = static_cast<int>(
            ld_shared_cluster_2(cluster_address(shared_address(&shared.num_own), lane_idx)).x);
    }
    __syncwarp();
    const int until = warp_scan(of_block, lane_idx);
    NearOne mine = {-kInfinity, 0, __shfl_sync(kAllLanes, until, 31), 0, 0};
    if (mine.num > kMostNear) {
        // One value, though there are many of it, is one candidate.
        uint2 ends = make_uint2(0, 0);
        if (lane_idx < team.size) {
            ends = ld_shared_cluster_2(cluster_address(shared_address(shared.own_ends), lane_idx));
        }
        __syncwarp();
        const uint32_t largest = __reduce_max_sync(kAllLanes, ends.x);
        if (largest == ~__reduce_max_sync(kAllLanes, ends.y)) {
            mine.value = lane_idx == 0 ? from_key(largest) : -kInfinity;
            mine.mass = lane_idx == 0 ? mine.num * shared.weigher().mass(mine.value) : 0;
            mine.num = 1;
        }
        return mine;
    }
    // Which of a block's the lane's is.
    int* places = shared.s.indices;
#pragma unroll 1
    for (int i = 0; i < of_block; ++i) {
        places[until - of_block + i] = lane_idx * kMostNear + i;
    }
    __syncwarp();
    if (lane_idx < mine.num) {
        const int place = places[lane_idx];
        const uint2 found = team.read_candidate(place % kMostNear, place / kMostNear);
        mine.value = __uint_as_float(found.x);
        mine.index = static_cast<int>(found.y);
        mine.mass = shared.weigher().mass(mine.value);
    }
    __syncwarp();
#pragma unroll 4
    for (int i = 0; i < mine.num; ++i) {
        const uint64_t other = __shfl_sync(kAllLanes, mine.mass, i);
        mine.above += __shfl_sync(kAllLanes, mine.value, i) > mine.value ? other : 0;
    }
    return mine;
}

// Draws from what has less than the target above it, if that ends in shared.near, behind whose
// lower end shared.pieces have s.above. By a warp of each block.
__device__ __forceinline__ bool draw_near(const NearOne& mine, const Team& team) {
    TeamShared& shared = team.shared;
    if (mine.num > kMostNear) {
        return false;
    }
    const uint64_t of_all = shared.s.above, target = shared.target;
    const uint64_t of_above = of_all - warp_sum(mine.mass);
    if (of_above >= target || of_all < target) {
        return false;
    }
    const bool is_any = static_cast<int>(threadIdx.x % 32) < mine.num;
    const bool is_kept = is_any && of_above + mine.above < target;
    const uint32_t least =
        __reduce_min_sync(kAllLanes, is_kept ? key_of(mine.value) : key_of(shared.near.to) + 1);
    const uint64_t dropped = is_kept ? 0 : mine.mass;
    if (dropped > 0) {
        const int of_warp = HeldInOrder(shared.p.size, team).of_warp;
        take_mass(shared.pieces[mine.index / of_warp], dropped);
    }
    __syncwarp();
    draw_held(from_key(least - 1), of_all - warp_sum(dropped));
    return true;
}

// Whether the row is drawn. By all blocks, with what was said taken back or not said yet, as it is
// left.
__device__ __noinline__ bool draw_whole() {
    Team team(team_shared());
    TeamShared& shared = team.shared;
    Shared& s = shared.s;
    const int thread_idx = threadIdx.x, lane_idx = thread_idx % 32, warp_idx = thread_idx / 32;
    const HeldInOrder part(shared.p.size, team);
    const int first = part.first(team.rank * kNumWarps + warp_idx);
    const bool has_p = shared.top_p < 1.0f;
    const uint4* held = held_of_thread(shared);
    float4* weighed = shared.weighed + thread_idx;

    const float of_thread = hold(shared);
    const uint32_t key = key_of(of_thread);
    const uint32_t most = __reduce_max_sync(kAllLanes, key);
    const uint32_t least = __reduce_max_sync(kAllLanes, of_thread > -kInfinity ? ~key : 0u);
    if (lane_idx == 0) {
        atomicMax(&shared.own_ends[0], most);
        atomicMax(&shared.own_ends[1], least);
    }
    team.take_back();
    for (int i = thread_idx; i < 2 * kFewBins; i += kNumThreads) {
        shared.few_bins[0][i] = 0;
    }
    team.meet();
    if (warp_idx == 0) {
        begin_whole();
    } else {
        shared.find_bits();
    }
    __syncthreads();
    Near near = shared.near;
    if (!near.is_any) {
        team.give_back();
        return false;
    }
    const Weigher weigher = shared.weigher();
    const float lowest = near.from;
    FewBins few = shared.few;
    WholeSum totals[2];
#pragma unroll 1
    for (int i = 0; i < part.turns; i += 2) {
        constexpr int kNum = 2 * kFour;
        float z[kNum], y[kNum];
        get(held + i * kNumThreads, *reinterpret_cast<float (*)[kFour]>(z));
        get(held + (i + 1) * kNumThreads, *reinterpret_cast<float (*)[kFour]>(z + kFour));
#pragma unroll
        for (int j = 0; j < kNum; ++j) {
            z[j] = z[j] > lowest ? z[j] : -kInfinity;
        }
        weigh_each(weigher, z, y);
#pragma unroll
        for (int j = 0; j < kNum; ++j) {
            totals[j % 2].add(y[j]);
        }
        weighed[i * kNumThreads] = make_float4(y[0], y[1], y[2], y[3]);
        weighed[(i + 1) * kNumThreads] = make_float4(y[4], y[5], y[6], y[7]);
        if (has_p) {
#pragma unroll
            for (int j = 0; j < kNum; ++j) {
                if (z[j] > -kInfinity) {
                    few.add(shared.few_bins[0], z[j], y[j]);
                }
            }
        }
    }
    const uint64_t of_warp = warp_sum(totals[0].value() + totals[1].value());
    if (lane_idx == 0) {
        shared.own_totals[warp_idx] = of_warp;
    }
    team.meet();
    if (!has_p) {
        if (warp_idx == 0) {
            draw_held(lowest, sum_pieces(shared.own_totals));
        }
        __syncwarp();
        team.give_back();
        return true;
    }
#pragma unroll 1
    for (int level = 0;; ++level) {
        share_bins(shared.few_bins[level % 2], team);
        if (level == 0 && warp_idx == kNumWarps - 1) {
            const uint64_t total = sum_pieces(shared.own_totals);
            const uint64_t target = mass_needed(shared.top_p, total);
            if (lane_idx == 0) {
                s.total = total;
                shared.target = target;
            }
        }
        __syncwarp();
        team.meet();
        if (warp_idx == 0) {
            narrow();
        }
        __syncthreads();
        near = shared.near;
        if (!near.is_any) {
            team.give_back();
            return false;
        }
        const bool is_tail = level == 0 && near.is_tail;
        if ((near.num < kMostNear && !is_tail) || level == kLevels - 1) {
            break;
        }
        few = FewBins(weigher, near.to, near.to - near.from);
        if (thread_idx == 0) {
            shared.few = few;
        }
        uint32_t* bins = shared.few_bins[(level + 1) % 2];
        if (level > 0) {
            for (int i = thread_idx; i < kFewBins; i += kNumThreads) {
                bins[i] = 0;
            }
            __syncthreads();
        }
#pragma unroll 1
        for (int i = 0; i < part.turns; ++i) {
            float z[kFour], masses[kFour];
            get_weighed(held + i * kNumThreads, weighed + i * kNumThreads, z, masses);
#pragma unroll
            for (int j = 0; j < kFour; ++j) {
                if (z[j] > near.from && z[j] <= near.to) {
                    few.add(bins, z[j], masses[j]);
                }
            }
        }
        __syncwarp();
        team.meet();
    }
    WholeSum above[2];
    uint32_t ends[2] = {0, 0};
#pragma unroll 1
    for (int i = 0; i < part.turns; ++i) {
        float z[kFour], masses[kFour];
        get_weighed(held + i * kNumThreads, weighed + i * kNumThreads, z, masses);
        bool has_any = false;
#pragma unroll
        for (int j = 0; j < kFour; ++j) {
            if (z[j] > near.from) {
                above[j % 2].add(masses[j]);
                has_any |= z[j] <= near.to;
            }
        }
        if (has_any) {
#pragma unroll 1
            for (int j = 0; j < kFour; ++j) {
                const float value = pick(z, j);
                if (value > near.from && value <= near.to) {
                    shared.add(value, first + i * part.kTurn + j);
                    ends[0] = max(ends[0], key_of(value));
                    ends[1] = max(ends[1], ~key_of(value));
                }
            }
        }
    }
    if (ends[0] > 0) {
        atomicMax(&shared.own_ends[0], ends[0]);
        atomicMax(&shared.own_ends[1], ends[1]);
    }
    __syncwarp();
    const uint64_t of_warp_above = warp_sum(above[0].value() + above[1].value());
    if (lane_idx == 0) {
        shared.own_pieces[warp_idx] = of_warp_above;
    }
    team.meet();
    NearOne mine;
    if (warp_idx == 0) {
        mine = gather_near(team);
    } else if (warp_idx == 1) {
        const uint64_t of_all = sum_pieces(shared.own_pieces);
        if (lane_idx == 0) {
            s.above = of_all;
        }
    }
    __syncthreads();
    if (warp_idx == 0) {
        const bool is_drawn = draw_near(mine, team);
        if (lane_idx == 0) {
            s.is_done = is_drawn;
        }
        __syncwarp();
    }
    __syncthreads();
    team.give_back();
    return s.is_done;
}

}  // namespace kernel_hub::sampling::sm90
