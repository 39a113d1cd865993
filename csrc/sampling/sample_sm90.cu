// Token ids drawn from logits on Hopper: what sample.cu draws, bit for bit, a row a cluster.
//
// As many blocks of 512 threads share a row as the launch says (1 to 16), one a multiprocessor.
// Each has a share of it and tells the others what it found in notes in shared memory, which all of
// them read: they know the same and decide the same, and one writes.
//   1. One pass from DRAM. The largest; and where top_k asks for few, what is above a bound by as
//      many threads' largest, which rises as the pass goes on. What a block has above the least
//      bound of its share of top_k, hardly more than top_k of all blocks, is compared with each
//      other. Else, where there is a threshold, counts of a histogram: they say where it is,
//      nearly. What its bins are is known by a sample of the row that each block reads for itself.
//      Where threads have few elements each and top_k is small, they stay in shared memory, and
//      the bound is by groups of threads of all blocks (held.cuh).
//   2. One pass over the L2, warps taking pieces of the row from its end on, that weighs the row,
//      and what is above a window of few values, which become candidates: with them the threshold
//      is known, and what each piece has above it, in which the draw looks. Where the guess was
//      wrong, or too many are too close: histograms of masses, each of one bin of the one before.
// Variants: none; dtype, alignment, what changes logits and the blocks of a cluster are asked as
// they are met.
// Shared memory: 130 KB: what is under way to be weighed, notes, candidates and bins.
// Source: as sample.cu.

#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "sampling/sm90/by_search.cuh"
#include "sampling/sm90/held.cuh"
#include "sampling/sm90/held_whole.cuh"
#include "sampling/sm90/passes.cuh"

namespace kernel_hub::sampling::sm90 {

constexpr int kMostByBound = 160;  // more threads' largest bound too loosely

// The first element of the row's that is as large as `largest`, if the thread has one.
__device__ __forceinline__ int find_index(const Fours& fours, const Seen& seen, float largest) {
    int index = fours.p.size;
    if (seen.of_thread == largest && largest > -kInfinity) {
        const float4 z = read_any(seen.found, fours.p.size);
        index = seen.found + (z.x == largest ? 0 : z.y == largest ? 1 : z.z == largest ? 2 : 3);
    }
    return index;
}

// Draws where what is listed, or held, has all of top_k, unless it is too much. Leaves the row's
// number to draw in shared.bits.
__device__ __forceinline__ bool draw_listed(const SampleParams& p, const Weigher& weigher,
                                            bool is_held, float of_thread, Team& team) {
    TeamShared& shared = team.shared;
    Shared& s = shared.s;
    team.take_back();
    if (threadIdx.x == 0) {
        shared.num_own = shared.mine.num = 0;
    }
    __syncthreads();
    shared.find_bits();
    if (is_held) {
        choose_held(of_thread);
    } else {
        choose_listed(shared.bound, kInfinity, shared);
    }
    team.exchange<false>(Team::kCandidates);
    if (s.num_candidates > kNumCandidates) {
        return false;
    }
    Chosen chosen;
    chosen.compare(weigher, s);
    chosen.keep([&](const Above& above) { return above.count < shared.top_k; });
    const uint64_t found = chosen.kept_mass(s);
    __syncthreads();
    // Without top_p all else is kept, though it be of no mass.
    const uint64_t needed = shared.top_p < 1.0f ? mass_needed(shared.top_p, found) : ~0ull;
    chosen.keep([&](const Above& above) { return above.mass < needed; });
    if (team.rank == 0) {
        const uint64_t total = chosen.kept_mass(s);
        chosen.draw(p, weigher, total, shared.bits, s);
        chosen.write_top(p, weigher, total, s);
    }
    return true;
}

// What the row asks for, known to all threads.
__device__ __forceinline__ void begin_row(const SampleParams& p, Team& team) {
    TeamShared& shared = team.shared;
    const int row_idx = p.row_idx;
    Row row(p);
    if (threadIdx.x == 0) {
        const float temperature = p.temperature ? p.temperature[row_idx] : 1.0f;
        const int top_k = p.top_k ? p.top_k[row_idx] : 0;
        shared.top_p = p.top_p ? p.top_p[row_idx] : 1.0f;
        shared.seed = p.seed ? p.seed[row_idx] : 0;
        shared.offset = p.offset ? p.offset[row_idx] : 0;
        shared.top_k = top_k > 0 && top_k < p.size ? top_k : 0;
        shared.is_greedy = !(temperature > 0.0f);
        shared.num_listed = shared.num_own = 0;
        const Weigher any = weigher_of(0.0f, temperature);
        shared.scale = any.scale;
        shared.lowest = any.lowest;
        shared.is_ahead = Fours(row).is_ahead;
        shared.own_ends[0] = shared.own_ends[1] = 0;
        shared.s.range = -any.lowest;
    }
    prefetch_share<kFetched>(row, team, 0);  // behind what the row asks for
    __syncthreads();
}

__device__ __forceinline__ void draw_row(const SampleParams& p, Team& team) {
    TeamShared& shared = team.shared;
    Shared& s = shared.s;
    const int row_idx = p.row_idx, top_k = shared.top_k;
    const bool has_k = top_k > 0;
    const bool has_p = shared.top_p < 1.0f;
    bool is_greedy = shared.is_greedy;
    bool has_bound = has_k && top_k <= kMostByBound && !is_greedy;
    bool has_bins = (has_k || has_p) && !has_bound && !is_greedy;

    Seen seen;
    float largest, bound = kInfinity, bottom = kInfinity;
    bool is_held = has_bound && top_k <= kMostByGroups && may_hold(p, team);
    if (is_held) {
        seen.of_thread = look_and_hold();
        largest = shared.largest;
        bound = shared.bound;
        is_held = largest > -kInfinity;
    }
    Row row(p);
    const Fours fours(row);
    const int chunk = elements_a_chunk(team);
    const bool is_long = p.size > 8 * chunk;
    bool is_second = false;  // what was looked at tells what to list
    int from_element = 0, until = is_long && has_bound ? chunk : p.size;
    if (has_bins) {
        empty_bins(shared.own_bins, false);
        if (threadIdx.x == 0) {
            shared.own_bins.low[0] = 0;  // counts what is in no bin
        }
    }
    if (has_bins) {
        __syncthreads();
        look_at_some(fours, seen);
        bottom = rule(seen.of_thread, s);
    }
#pragma unroll 1
    while (!is_held) {
        if (has_bins) {
            look<true>(fours, 0, p.size, kInfinity, bottom, seen, team);
        } else {
            look<false>(fours, from_element, until, bound, kInfinity, seen, team);
        }
        if (has_bound && is_long && !(is_second && until == p.size)) {
            // Bounds rise as more is known; what comes first is looked at twice.
            bound = loose_bound(seen.of_thread, shared.top_k);
            from_element = is_second ? until : 0;
            until = until > p.size / 4 ? p.size : 4 * until;
            is_second = true;
            continue;
        }
        if (has_bound && !is_long && is_second) {
            break;
        }
        const float of_block = block_reduce(seen.of_thread, s.float_slots,
                                            [](float a, float b) { return fmaxf(a, b); });
        int index = p.size;
        if (is_greedy) {
            index = block_reduce(find_index(fours, seen, of_block), s.int_slots,
                                 [](int a, int b) { return min(a, b); });
        }
        const float of_share =
            has_bound ? loose_bound(seen.of_thread, (shared.top_k + team.size - 1) >> team.shift)
                      : 0.0f;
        team.take_back();
        if (threadIdx.x == 0) {
            shared.mine.largest = of_block;
            shared.mine.index = index;
            shared.mine.bound = is_second ? bound : -kInfinity;
            shared.mine.least = of_share;
        }
        team.exchange<true>(has_bins ? Team::kCounts : Team::kNotes);
        // A lane for each block.
        const Note& note = shared.notes[threadIdx.x & (team.size - 1)];
        const auto most_of = [](float a, float b) { return fmaxf(a, b); };
        largest = warp_reduce<kMaxTeam>(note.largest, most_of);
        bound = kInfinity;
        if (is_greedy) {
            index = warp_reduce<kMaxTeam>(note.largest == largest ? note.index : p.size,
                                          [](int a, int b) { return min(a, b); });
        } else if (has_bound) {
            const float least =
                warp_reduce<kMaxTeam>(note.least, [](float a, float b) { return fminf(a, b); });
            bound = fmaxf(warp_reduce<kMaxTeam>(note.bound, most_of), least);
        }
        if (!(largest > -kInfinity)) {
            if (shared.has_mask) {
                // Nothing is allowed: as if all were.
                __syncthreads();
                shared.has_mask = false;
                __syncthreads();
                is_greedy = true;
                has_bound = has_bins = is_second = false;
                bound = kInfinity;
                from_element = 0;
                until = p.size;
                continue;
            }
            index = 0;
            is_greedy = true;
        }
        if (is_greedy) {
            if (team.rank == 0) {
                write_largest(p, index);
            }
            return;
        }
        if (!has_bound || is_long) {
            break;
        }
        is_second = true;  // now that the bound of all blocks is known
    }
    const Weigher weigher = {fminf(largest, FLT_MAX), shared.scale, shared.lowest};
    const float from = floor_of_warp(weigher, p.min_p ? p.min_p[row_idx] : 0.0f);
    const int num_top = has_bound ? 0 : wanted_top(p);
    const float top_bound = num_top > 0 ? loose_bound(seen.of_thread, num_top) : -kInfinity;
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.largest = largest;
        shared.floor = from;
        shared.bound = fmaxf(bound, from);
        shared.top_bound = top_bound;
    }
    __syncthreads();
    if (has_bound && draw_listed(p, weigher, is_held, seen.of_thread, team)) {
        return;
    }
    draw_by_search(has_bins, shared);
}

__device__ __forceinline__ void sample_row(const SampleParams& p) {
    Team team(team_shared());
    if (threadIdx.x == 0) {
        team.shared.p = p;
        team.shared.has_mask = p.allowed != nullptr;
    }
    team.begin();
    follow_launch_before();
    begin_row(p, team);
    const TeamShared& shared = team.shared;
    // Of 16 bits so many values are equal that their additions to a bin wait for each other.
    const bool is_fine = p.dtype == kFp32 || !(shared.top_p < 1.0f);
    const bool has_all = !shared.is_greedy && shared.top_k == 0 && wanted_top(p) == 0;
    const bool may_be_whole = is_fine && has_all && may_hold(p, team);
    if (may_be_whole && team.rank == 0) {
        end_top(p, 0);
    }
    // NOTE: before all else, so that nothing is in registers that the call would have stored.
    if (!(may_be_whole && draw_whole())) {
        draw_row(p, team);
    }
    team.take_back();
}

#define EXPORT_SAMPLE(NAME)                                                                \
    DESCRIBED(                                                                             \
        NAME, "x: blocks of clusters, one a row, of 1, 2, 4, 8 or 16",                     \
        (.threads = kNumThreads, .shared_bytes = offsetof(TeamShared, weighed),            \
         .block_n = kHeld * kTurn),                                                        \
        extern "C" __global__ void __launch_bounds__(kNumThreads, 1) NAME(SAMPLE_PARAMS) { \
            sample_row({nullptr, nullptr, SAMPLE_ARGUMENTS,                                \
                        static_cast<int>(blockIdx.x >> exponent_of(cluster_size()))});     \
        })

EXPORT_SAMPLE(sample)

}  // namespace kernel_hub::sampling::sm90
