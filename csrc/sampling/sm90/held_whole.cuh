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

#include "sampling/sm90/held.cuh"
#include "sampling/sm90/window.cuh"

namespace kernel_hub::sampling::sm90 {

constexpr int kMostNear = 64;  // values that are compared in pairs
constexpr int kLevels = 4;     // of bins

// A number of each warp of all blocks, into shared.pieces; their sum. By a warp.
__device__ __noinline__ uint64_t sum_pieces(const uint64_t* own_pieces) {
    const Team team(team_shared());
    const int piece = threadIdx.x % 32 * Team::kEach;
    uint64_t pieces[Team::kEach], sum = 0;
    team.read_words(own_pieces, pieces);
#pragma unroll
    for (int i = 0; i < Team::kEach; ++i) {
        team.shared.pieces[piece + i] = pieces[i];
        sum += pieces[i];
    }
    __syncwarp();
    return warp_sum(sum);
}

// The block's share of what all blocks have in bins, as masses.
__device__ __forceinline__ void share_bins(const uint32_t* bins, const Team& team) {
    const FewBins few = team.shared.few;
    int first;
    uint4 sum;
    if (team.sum_few(bins, first, sum)) {
        *reinterpret_cast<float4*>(&team.shared.few_masses[first]) =
            make_float4(few.mass(first, sum.x), few.mass(first + 1, sum.y),
                        few.mass(first + 2, sum.z), few.mass(first + 3, sum.w));
    }
}

// Where in shared.near the threshold is, nearly, by the masses of bins. By a warp.
__device__ __noinline__ void narrow(bool is_first) {
    const Team team(team_shared());
    TeamShared& shared = team.shared;
    constexpr int kEach = kFewBins / 32;
    const int lane_idx = threadIdx.x % 32, begin = lane_idx * kEach;
    const int its_rank = begin >> (exponent_of(kFewBins) - team.shift);
    const FewBins few = shared.few;
    float masses[kEach], own = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
        const uint4 four = team.read_four(&shared.few_masses[begin + i], its_rank);
        masses[i] = __uint_as_float(four.x);
        masses[i + 1] = __uint_as_float(four.y);
        masses[i + 2] = __uint_as_float(four.z);
        masses[i + 3] = __uint_as_float(four.w);
    }
    if (is_first) {
        const uint64_t total = sum_pieces(shared.own_totals);
        const uint64_t target = mass_needed(shared.top_p, total);
        if (lane_idx == 0) {
            shared.s.total = total;
            shared.target = target;
        }
        __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        own += masses[i];
    }
    const float target = static_cast<float>(shared.target);
    const float slack = static_cast<float>(shared.s.total) * 0x1p-13f;
    const float most = target + slack, least = target - slack;
    const Near near = shared.near;
    float before = near.before + (warp_scan(own, lane_idx) - own), before_first = 0.0f;
    float within = 0.0f;
    int first = kFewBins, last = -1;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const float until = before + masses[i];
        if (masses[i] > 0.0f && before < most && until > least) {
            before_first = last < 0 ? before : before_first;
            first = last < 0 ? begin + i : first;
            last = begin + i;
            within += masses[i];
        }
        before = until;
    }
    __syncwarp();
    const int first_of_all = __reduce_min_sync(kAllLanes, first);
    const int last_of_all = __reduce_max_sync(kAllLanes, last);
    const float num = first < kFewBins ? within * few.num_a_mass(last) : 0.0f;
    const unsigned num_of_all = __reduce_add_sync(kAllLanes, static_cast<unsigned>(num + 0.999f));
    before_first = __shfl_sync(kAllLanes, before_first, first_of_all / kEach % 32);
    const bool is_tail = last_of_all == kFewBins - 1;
    const float to = few.edge(first_of_all, -0.51f), from = few.edge(last_of_all, 0.51f);
    if (lane_idx == 0) {
        Near found = {is_tail ? near.from : fmaxf(near.from, from),
                      first_of_all == 0 ? near.to : to, before_first,
                      static_cast<int>(num_of_all), first_of_all <= last_of_all, is_tail};
        found.is_any = found.is_any && found.to > found.from;
        shared.near = found;
    }
    __syncwarp();
}

// What is left of a number in the part of a warp, by any warp of its block.
__device__ __forceinline__ void draw_of_warp(const HeldInOrder& part, int warp, float from,
                                             uint64_t total, uint64_t drawn, TeamShared& shared) {
    const int lane_idx = threadIdx.x % 32, slot = warp % kNumWarps * 32 + lane_idx;
#pragma unroll 1
    for (int i = 0; i < part.turns; ++i) {
        float z[kFour];
        get(shared.under_way + i * kNumThreads + slot, z);
        const float4 y = shared.weighed[i * kNumThreads + slot];
        const float masses[kFour] = {y.x, y.y, y.z, y.w};
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
    TeamShared& shared = team.shared;
    const HeldInOrder part(shared.p.size, team);
    const Place place = find_piece(shared, below(total, shared.bits));
    if (place.piece / kNumWarps == team.rank) {
        draw_of_warp(part, place.piece, from, total, place.rest, shared);
    }
    __syncwarp();
}

// Draws from what has less than the target above it, if that ends in `near`, of which all blocks
// have left their candidates, and what warps have above its end. By a warp of each block.
__device__ __noinline__ bool draw_near() {
    const Team team(team_shared());
    TeamShared& shared = team.shared;
    Shared& s = shared.s;
    const HeldInOrder part(shared.p.size, team);
    const Weigher weigher = shared.weigher();
    const int lane_idx = threadIdx.x % 32;
    const uint64_t of_all = sum_pieces(shared.own_pieces);
    int of_block = 0;
    if (lane_idx < team.size) {
        of_block = static_cast<int>(
            ld_shared_cluster_2(cluster_address(shared_address(&shared.num_own), lane_idx)).x);
    }
    __syncwarp();
    const int until = warp_scan(min(of_block, kMostNear + 1), lane_idx);
    const int num = __shfl_sync(kAllLanes, until, 31);
    if (num > kMostNear) {
        return false;
    }
    // Two candidates of a lane.
    constexpr int kNum = kMostNear / 32;
    float values[kNum];
    int indices[kNum];
    uint64_t masses[kNum], above[kNum];
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
        const int place = lane_idx + 32 * i;
        int from = 0, before = 0;
#pragma unroll 1
        for (int rank = 0; rank < team.size; ++rank) {
            const int end = __shfl_sync(kAllLanes, until, rank);
            from += place >= end;
            before = place >= end ? end : before;
        }
        values[i] = -kInfinity;
        indices[i] = 0;
        if (place < num) {
            const uint2 found = team.read_candidate(place - before, from);
            values[i] = __uint_as_float(found.x);
            indices[i] = static_cast<int>(found.y);
        }
        masses[i] = place < num ? weigher.mass(values[i]) : 0;
        s.values[place] = values[i];
        s.masses[place] = masses[i];
        above[i] = 0;
    }
    __syncwarp();
#pragma unroll 2
    for (int j = 0; j < num; ++j) {
        const float value = s.values[j];
        const uint64_t mass = s.masses[j];
#pragma unroll
        for (int i = 0; i < kNum; ++i) {
            above[i] += value > values[i] ? mass : 0;
        }
    }
    uint64_t found = 0, dropped = 0;
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
        found += masses[i];
    }
    found = warp_sum(found);
    const uint64_t target = shared.target, of_above = of_all - found;
    if (of_above >= target || of_all < target) {
        return false;
    }
    uint32_t least = key_of(shared.near.to) + 1;
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
        if (lane_idx + 32 * i < num) {
            if (of_above + above[i] < target) {
                least = min(least, key_of(values[i]));
            } else {
                dropped += masses[i];
                const int piece = indices[i] / part.of_warp;
                add_mass(shared.dropped_low[piece], shared.dropped_high[piece], masses[i]);
            }
        }
    }
    __syncwarp();
    least = __reduce_min_sync(kAllLanes, least);
    dropped = warp_sum(dropped);
#pragma unroll
    for (int i = 0; i < Team::kEach; ++i) {
        const int piece = lane_idx + 32 * i;
        shared.pieces[piece] -= static_cast<uint64_t>(shared.dropped_high[piece]) << 32 |
                                shared.dropped_low[piece];
    }
    __syncwarp();
    draw_held(from_key(least - 1), of_all - dropped);
    return true;
}

// What is known of the row by the largest of all warps. By a warp.
__device__ __noinline__ void begin_whole() {
    const Team team(team_shared());
    TeamShared& shared = team.shared;
    const int lane_idx = threadIdx.x % 32;
    uint64_t ends[Team::kEach];
    team.read_words(shared.own_ends, ends);
    uint32_t highest = 0, deepest = ~0u;
#pragma unroll
    for (const uint64_t each : ends) {
        highest = max(highest, static_cast<uint32_t>(each >> 32));
        deepest = min(deepest, each > 0 ? static_cast<uint32_t>(each) : ~0u);
    }
    highest = __reduce_max_sync(kAllLanes, highest);
    deepest = __reduce_min_sync(kAllLanes, deepest);
    const float largest = from_key(highest);
    const Weigher weigher = {fminf(largest, FLT_MAX), shared.scale, shared.lowest};
    const SampleParams& p = shared.p;
    const float floor = floor_of_warp(weigher, p.min_p ? p.min_p[p.row_idx] : 0.0f);
    // Nothing that weighs something is not above it.
    const float lowest = fmaxf(floor, fminf(largest + weigher.lowest, from_key(highest - 1)));
    if (lane_idx == 0) {
        const bool is_any = largest > -kInfinity && largest < FLT_MAX && shared.lowest > -FLT_MAX;
        shared.largest = largest;
        shared.near = {lowest, largest, 0.0f, 0, is_any, false};
        const float range = fminf(2.0f * (largest - from_key(deepest)), -weigher.lowest);
        shared.few = FewBins(weigher, largest, fmaxf(range, fabsf(largest) * 0x1p-16f + 0x1p-100f));
    }
    __syncwarp();
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
    const uint32_t least = __reduce_min_sync(kAllLanes, of_thread > -kInfinity ? key : ~0u);
    team.take_back();
    if (lane_idx == 0) {
        shared.own_ends[warp_idx] = static_cast<uint64_t>(most) << 32 | least;
    }
    for (int i = thread_idx; i < 2 * kFewBins; i += kNumThreads) {
        shared.few_bins[0][i] = 0;
    }
    if (thread_idx <= kPieces) {
        shared.dropped_low[thread_idx] = shared.dropped_high[thread_idx] = 0;
    }
    if (thread_idx == 0) {
        shared.num_own = 0;
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
        __syncwarp();
        team.meet();
        if (warp_idx == 0) {
            narrow(level == 0);
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
            float z[kFour];
            get(held + i * kNumThreads, z);
            const float4 y = weighed[i * kNumThreads];
            const float masses[kFour] = {y.x, y.y, y.z, y.w};
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
#pragma unroll 1
    for (int i = 0; i < part.turns; ++i) {
        float z[kFour];
        get(held + i * kNumThreads, z);
        const float4 y = weighed[i * kNumThreads];
        const float masses[kFour] = {y.x, y.y, y.z, y.w};
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
                }
            }
        }
    }
    __syncwarp();
    const uint64_t of_warp_above = warp_sum(above[0].value() + above[1].value());
    if (lane_idx == 0) {
        shared.own_pieces[warp_idx] = of_warp_above;
    }
    team.meet();
    if (warp_idx == 0) {
        const bool is_drawn = draw_near();
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
