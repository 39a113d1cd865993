// Where the threshold of a row that is held is, nearly, by bins of masses of all blocks.
#pragma once

#include "sampling/sm90/held.cuh"
#include "sampling/sm90/window.cuh"

namespace kernel_hub::sampling::sm90 {

// A number of each warp of all blocks, into shared.pieces; their sum. By a warp.
__device__ __noinline__ uint64_t sum_pieces(const uint64_t* own_pieces) {
    const Team team(team_shared());
    const int lane_idx = threadIdx.x % 32;
    uint64_t sum = 0;
    const int pieces = team.pieces(), warps = kNumWarps << team.shift;
#pragma unroll
    for (int i = 0; i < kPieces / 32; ++i) {
        const int piece = lane_idx + 32 * i;
        uint2 words = make_uint2(0, 0);
        if (piece < warps) {
            const uint32_t at = shared_address(own_pieces + piece % kNumWarps);
            words = ld_shared_cluster_2(cluster_address(at, piece / kNumWarps));
        }
        const uint64_t word = static_cast<uint64_t>(words.y) << 32 | words.x;
        if (piece < pieces) {
            team.shared.pieces[piece] = word;
        }
        sum += word;
    }
    __syncwarp();
    return warp_sum(sum);
}

// The block's share of what all blocks have in bins, as masses; chunks of them together.
__device__ __forceinline__ void share_bins(const uint32_t* bins, const Team& team) {
    constexpr int kEach = 4, kOfChunk = kFewBins / kChunks / kEach;
    const int share = kFewBins >> team.shift, thread_idx = threadIdx.x;
    if (thread_idx / 32 * 32 * kEach >= share) {
        return;
    }
    const FewBins few = team.shared.few;
    const bool has_some = thread_idx * kEach < share;
    const int first = team.rank * share + (has_some ? thread_idx * kEach : 0);
    uint4 sum = make_uint4(0, 0, 0, 0);
#pragma unroll 8
    for (int rank = 0; rank < team.size; ++rank) {
        const uint4 four = team.read_four(bins + first, rank);
        sum = make_uint4(sum.x + four.x, sum.y + four.y, sum.z + four.z, sum.w + four.w);
    }
    const float4 masses = make_float4(few.mass(first, sum.x), few.mass(first + 1, sum.y),
                                      few.mass(first + 2, sum.z), few.mass(first + 3, sum.w));
    float of_chunk = (masses.x + masses.y) + (masses.z + masses.w);
#pragma unroll 1
    for (int mask = 1; mask < kOfChunk; mask *= 2) {
        of_chunk += __shfl_xor_sync(kAllLanes, of_chunk, mask);
    }
    if (has_some) {
        *reinterpret_cast<float4*>(&team.shared.few_masses[first]) = masses;
        team.shared.chunks[first / (kFewBins / kChunks)] = of_chunk;
    }
}

// Which of the lanes' masses, one after another behind `before`, a sum near to the target ends in.
struct Met {
    unsigned lanes;
    float before;  // of the lane
};
__device__ __forceinline__ Met meet_sum(float mass, float before, float least, float most) {
    const float until = before + warp_scan(mass, static_cast<int>(threadIdx.x) % 32);
    before = until - mass;
    return {__ballot_sync(kAllLanes, mass > 0.0f && before < most && until > least), before};
}

// Where in shared.near the threshold is, nearly, by the masses of bins. By a warp.
__device__ __noinline__ void narrow() {
    static_assert(kFewBins == 32 * kChunks && kChunks == 32);
    const Team team(team_shared());
    TeamShared& shared = team.shared;
    const int lane_idx = threadIdx.x % 32, shift = exponent_of(kChunks) - team.shift;
    const auto read = [&](const float* own, int chunk) {
        const uint32_t at = shared_address(own);
        const uint2 two = ld_shared_cluster_2(cluster_address(at & ~7u, chunk >> shift));
        return __uint_as_float(at & 4u ? two.y : two.x);
    };
    const float of_chunk = read(&shared.chunks[lane_idx], lane_idx);
    const float target = static_cast<float>(shared.target);
    // Of few values apart what is rounded adds up.
    const float slack =
        static_cast<float>(shared.s.total) * (shared.p.dtype == kFp32 ? 0x1p-16f : 0x1p-14f);
    const float most = target + slack, least = target - slack;
    const FewBins few = shared.few;
    const Near near = shared.near;
    const Met met = meet_sum(of_chunk, near.before, least, most);
    int first = kFewBins, last = -1;
    float before = 0.0f, num = 0.0f;
    // The first of the chunks, and the last.
#pragma unroll 1
    for (int turn = 0; turn < 2 && met.lanes != 0; ++turn) {
        const int chunk = turn == 0 ? __ffs(met.lanes) - 1 : 31 - __clz(met.lanes);
        const int bin = chunk * 32 + lane_idx;
        const float mass = read(&shared.few_masses[bin], chunk);
        const float of_chunk_before = __shfl_sync(kAllLanes, met.before, chunk);
        const Met within = meet_sum(mass, of_chunk_before, least, most);
        if (within.lanes != 0 && last < chunk * 32) {
            const int lane = __ffs(static_cast<int>(within.lanes)) - 1;
            const float of_lane = __shfl_sync(kAllLanes, within.before, lane);
            before = last < 0 ? of_lane : before;
            first = last < 0 ? chunk * 32 + lane : first;
            last = chunk * 32 + 31 - __clz(within.lanes);
            num += within.lanes >> lane_idx & 1 ? mass * few.num_a_mass(bin) : 0.0f;
        }
    }
    const bool is_tail = last == kFewBins - 1;
    if (lane_idx * 32 > first && lane_idx * 32 + 31 < last) {
        num += of_chunk * few.num_a_mass(lane_idx * 32 + 16);
    }
    const unsigned num_of_all = __reduce_add_sync(kAllLanes, static_cast<unsigned>(num + 0.999f));
    __syncwarp();  // that all have read what follows
    if (lane_idx == 0) {
        Near found = {is_tail ? near.from : fmaxf(near.from, few.edge(last, 0.5f)),
                      first == 0 ? near.to : few.edge(first, -0.5f),
                      before,
                      static_cast<int>(num_of_all),
                      first <= last,
                      is_tail};
        found.is_any = found.is_any && found.to > found.from;
        shared.near = found;
        shared.own_ends[0] = shared.own_ends[1] = 0;  // of what is near, from now on
    }
    __syncwarp();
}

// What is known of the row by the largest of all warps. By a warp.
__device__ __noinline__ void begin_whole() {
    const Team team(team_shared());
    TeamShared& shared = team.shared;
    const int lane_idx = threadIdx.x % 32;
    uint2 ends = make_uint2(0, 0);
    if (lane_idx < team.size) {
        ends = ld_shared_cluster_2(cluster_address(shared_address(shared.own_ends), lane_idx));
    }
    __syncwarp();
    const uint32_t highest = __reduce_max_sync(kAllLanes, ends.x);
    const uint32_t deepest = ~__reduce_max_sync(kAllLanes, ends.y);
    const float largest = from_key(highest);
    const Weigher weigher = {fminf(largest, FLT_MAX), shared.scale, shared.lowest};
    const SampleParams& p = shared.p;
    const float floor = floor_of_warp(weigher, p.min_p ? p.min_p[p.row_idx] : 0.0f);
    // Nothing that weighs something is not above it. NOTE: of a cold row what is added may be a few
    // floats, and rounded up: one below, if there is one.
    const uint32_t weightless = min(key_of(largest + weigher.lowest), highest) - 1;
    const float lowest = fmaxf(floor, from_key(max(weightless, key_of(-kInfinity))));
    if (lane_idx == 0) {
        const bool is_any = largest > -kInfinity && largest < FLT_MAX && shared.lowest > -FLT_MAX;
        shared.largest = largest;
        shared.near = {lowest, largest, 0.0f, 0, is_any, false};
        const float range = fminf(2.0f * (largest - from_key(deepest)), -weigher.lowest);
        shared.few = FewBins(weigher, largest, fmaxf(range, fabsf(largest) * 0x1p-16f + 0x1p-100f));
    }
    __syncwarp();
}

}  // namespace kernel_hub::sampling::sm90
