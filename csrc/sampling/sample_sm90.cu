// Token ids drawn from logits on Hopper: what sample.cu draws, bit for bit, a row a cluster.
//
// As many blocks of 256 threads share a row as the launch says (1 to 8). Each has a share of it and
// tells the others what it found in notes in shared memory, which all of them read: they know the
// same and decide the same, and one writes. Two blocks a multiprocessor: what one waits for, the
// other computes under.
//   1. One pass from DRAM. The largest; and where top_k asks for few, what is above a bound by as
//      many threads' largest, which rises as the pass goes on. What a block has above the least
//      bound of its share of top_k, hardly more than top_k of all blocks, is compared with each
//      other. Else, where there is a threshold, counts of a histogram: they say where it is,
//      nearly.
//   2. One pass over the L2, each block over a part of the row, that weighs the row and what is
//      above a window of few values, which become candidates: with them the threshold is known, and
//      what each piece of the row has above it, in which the draw looks. Where the guess was wrong,
//      or too many are too close: histograms of masses, each of one bin of the one before.
// Variants: none; dtype, alignment, what changes logits and the blocks of a cluster are asked as
// they are met.
// Shared memory: 62 KB, notes, candidates and bins.
// Source: as sample.cu.

#define KERNEL_HUB_SAMPLING_THREADS 256

#include "kernel_hub/launch_facts.cuh"
#include "sampling/sm90/chosen.cuh"
#include "sampling/sm90/passes.cuh"

namespace kernel_hub::sampling::sm90 {

constexpr int kMostByBound = 160;  // more threads' largest bound too loosely

// The first element of the row's that is as large as `largest`, if the thread has one.
__device__ __forceinline__ int find_index(const Row& row, const Seen& seen, float largest) {
    int index = row.p.size;
    if (seen.of_thread == largest && largest > -kInfinity) {
        index = seen.found;
#pragma unroll 1
        while (!(row.value(index) == largest)) {
            ++index;
        }
    }
    return index;
}

__device__ __forceinline__ void draw_row(const SampleParams& p, Team& team) {
    TeamShared& shared = team.shared;
    Shared& s = shared.s;
    const int row_idx = p.row_idx;
    Row row(p);
    prefetch_share<kFetched>(row, team, 0);
    const Fours fours(row);
    const float temperature = p.temperature ? p.temperature[row_idx] : 1.0f;
    const float min_p = p.min_p ? p.min_p[row_idx] : 0.0f;
    const int top_k = p.top_k ? p.top_k[row_idx] : 0;
    const float top_p = p.top_p ? p.top_p[row_idx] : 1.0f;
    const bool has_k = top_k > 0 && top_k < p.size;
    bool has_p = top_p < 1.0f;
    bool is_greedy = !(temperature > 0.0f);
    bool has_bound = has_k && top_k <= kMostByBound && !is_greedy;
    bool has_bins = (has_k || has_p) && !has_bound && !is_greedy;
    const Weigher scaled = weigher_of(0.0f, temperature);

    Seen seen;
    float largest, bound = kInfinity, bottom = kInfinity;
    const int chunk = elements_a_chunk(team);
    const bool is_long = p.size > 8 * chunk;
    bool is_second = false;  // what was looked at tells what to list, or to count
    int from_element = 0, until = is_long && has_bound ? chunk : p.size;
    // Of a long row that is counted, as much as a chunk from all of it.
    int every = is_long && has_bins ? p.size / chunk : 1;
    if (threadIdx.x == 0) {
        shared.num_listed = 0;
        s.range = -scaled.lowest;
    }
    if (has_bins) {
        empty_bins(shared.own_bins, false);
    }
    __syncthreads();
#pragma unroll 1
    while (true) {
        const bool counts = has_bins && is_second;
        if (counts) {
            look<true>(fours, from_element, until, bound, bottom, every, seen, team);
        } else {
            look<false>(fours, from_element, until, bound, bottom, every, seen, team);
        }
        if (has_bound && is_long && !(is_second && until == p.size)) {
            // Bounds rise as more is known; what comes first is looked at twice.
            bound = loose_bound(seen.of_thread, top_k);
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
            index = block_reduce(find_index(row, seen, of_block), s.int_slots,
                                 [](int a, int b) { return min(a, b); });
        }
        const float of_share =
            has_bound ? loose_bound(seen.of_thread, (top_k + team.size - 1) / team.size) : 0.0f;
        const float of_least_thread = has_bins && !counts ? least_of(seen.of_thread, s) : 0.0f;
        team.take_back();
        if (threadIdx.x == 0) {
            shared.mine.largest = of_block;
            shared.mine.index = index;
            shared.mine.bound = is_second ? bound : -kInfinity;
            shared.mine.least = of_share;
            shared.mine.least_of_thread = of_least_thread;
        }
        team.exchange<true>(counts ? Team::kCounts : Team::kNotes);
        largest = bound = -kInfinity;
        float least = kInfinity, lowest = kInfinity;
        for (int i = 0; i < team.size; ++i) {
            const Note& note = shared.notes[i];
            if (note.largest > largest) {
                largest = note.largest;
                index = note.index;
            } else if (note.largest == largest) {
                index = min(index, note.index);
            }
            bound = fmaxf(bound, note.bound);
            least = fminf(least, note.least);
            lowest = fminf(lowest, note.least_of_thread);
        }
        bound = has_bound ? fmaxf(bound, least) : kInfinity;
        if (has_bins && !is_second) {
            // As deep as rows that are normal are; what is larger is in the first bin.
            const float range = fminf(3.0f * (largest - lowest), -scaled.lowest);
            const float ruled = range * 1.0625f;
            const Ruler ruler = ruler_of(largest + ruled / 17.0f, ruled);
            bottom = from_key(key_of(ruler.top - ruled) - 1);
            if (threadIdx.x == 0) {
                s.range = largest > -kInfinity ? range : s.range;
                s.ruler = ruler;
            }
            __syncthreads();
            is_second = true;
            every = 1;
            continue;
        }
        if (!(largest > -kInfinity)) {
            if (row.has_mask) {
                // Nothing is allowed: as if all were.
                is_greedy = true;
                row.has_mask = has_bound = has_bins = is_second = false;
                every = 1;
                bound = bottom = kInfinity;
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
    const Weigher weigher = weigher_of(largest, temperature);

    enum Step { kBounded, kStarting, kSearching, kWeighing, kRanking };
    Step next = has_bound ? kBounded : has_bins ? kStarting : kWeighing;
    bool is_mass = !has_k, has_sums = has_bins;
    float from = floor_of(weigher, min_p);
    const int num_top = has_bound ? 0 : wanted_top(p);
    const float top_bound = num_top > 0 ? loose_bound(seen.of_thread, num_top) : -kInfinity;
    if (threadIdx.x == 0) {
        shared.largest = largest;
        shared.top_p = top_p;
        shared.top_k = top_k;
        shared.bound = fmaxf(bound, from);
        shared.top_bound = top_bound;
    }
    __syncthreads();
#pragma unroll 1
    while (true) {
        if (next == kStarting) {
            __syncthreads();
            if (threadIdx.x == 0) {
                start(s.search, is_mass, shared.top_k, from, shared.largest);
                s.wanted = shared.top_k;
            }
            __syncthreads();
            if (has_bins && is_mass) {
                guess_masses(shared.bins, s.ruler, weigher, from);
                const uint64_t guessed = sum_of_bins(shared.bins, true, s);
                if (threadIdx.x == 0) {
                    s.wanted = mass_needed(shared.top_p, guessed);
                }
            }
            has_sums = has_bins;
            next = kSearching;
        }
        if (has_sums && next == kSearching) {
            __syncthreads();
            find_window(shared.bins, s);
            has_sums = false;
        }
        const bool fills_bins = next == kSearching && !s.search.collects;
        team.take_back();
        if (threadIdx.x == 0) {
            shared.num_own = shared.mine.num = 0;
            shared.mine.least_binned = ~0u;
            shared.mine.most_binned = 0;
            s.question = {from, next == kWeighing ? from : shared.bound,
                          next == kWeighing ? -kInfinity : shared.largest, next == kWeighing, true};
            if (next == kSearching) {
                ask(s, weigher, from);
            }
        }
        if (fills_bins) {
            empty_bins(shared.own_bins, true);
            has_bins = false;
        }
        __syncthreads();
        if (threadIdx.x / 32 == kNumWarps - 1) {
            // Under what the other warps do.
            shared.bits =
                random_bits(p.seed ? p.seed[row_idx] : 0, p.offset ? p.offset[row_idx] : 0);
        }
        if (next == kBounded) {
            choose_listed(shared.bound, team);
        } else {
            scan(fours, weigher, team);
        }
        team.exchange<false>(fills_bins          ? Team::kBins
                             : next == kWeighing ? Team::kNotes
                                                 : Team::kCandidates);
        if (threadIdx.x == 0 && s.question.weighs) {
            sum_answers(team);
        }
        Chosen chosen;
        const bool has_chosen =
            !fills_bins && next != kWeighing && s.num_candidates <= kNumCandidates;
        uint64_t found = 0;
        if (has_chosen) {
            chosen.compare(weigher, s);
            if (next == kBounded) {
                chosen.keep([&](const Above& above) { return above.count < shared.top_k; });
            }
            found = chosen.kept_mass(s);
        } else if (fills_bins) {
            found = sum_of_bins(shared.bins, is_mass, s);
        }
        __syncthreads();
        bool is_among = has_chosen;  // what is drawn, or ranked
        if (next == kBounded) {
            if (!has_chosen) {
                next = kStarting;
                continue;
            }
            const uint64_t needed = has_p ? mass_needed(shared.top_p, found) : found;
            chosen.keep([&](const Above& above) { return above.mass < needed; });
        } else if (next == kSearching) {
            if (threadIdx.x == 0) {
                // Too many are where the steps of the first histogram did not count all.
                s.is_done = (fills_bins || has_chosen) && learn(s, shared.top_p, found);
                s.search.collects = s.search.collects && has_chosen;
            }
            __syncthreads();
            if (!s.is_done) {
                // The guess once more, by what it was wrong.
                has_sums = has_bins && has_chosen;
                has_bins = false;
                continue;
            }
            if (has_chosen) {
                from = from_key(chosen.end_search(s.search, s));
                keep_above(chosen, from, p.size, team);
            } else if (s.least < s.most) {
                has_sums = true;
                continue;
            } else {
                from = s.question.from;
            }
            if (!is_mass && has_p) {
                is_mass = true;
                next = kStarting;
                continue;
            }
            is_among = has_chosen && s.search.above == 0;
        }
        if (is_among) {
            if (team.rank == 0) {
                uint64_t total = s.above;
                if (next != kRanking) {
                    total = chosen.kept_mass(s);
                    chosen.draw(p, weigher, total, shared.bits, s);
                }
                chosen.write_top(p, weigher, total, s);
            }
            return;
        }
        if (next == kRanking) {
            if (team.rank == 0) {
                write_top_in_turn(row, weigher, from, s.above, s);
            }
            return;
        }
        draw_in_row(row, weigher, from, s.above, shared.bits, team);
        const int num = wanted_top(p);
        if (num == 0) {
            if (team.rank == 0) {
                end_top(p, 0);
            }
            return;
        }
        if (threadIdx.x == 0) {
            shared.bound = fmaxf(shared.top_bound, from);
        }
        next = kRanking;
    }
}

__device__ __forceinline__ void sample_row(const SampleParams& p) {
    Team team(*reinterpret_cast<TeamShared*>(dynamic_shared()));
    draw_row(p, team);
    team.take_back();
}

#define EXPORT_SAMPLE(NAME)                                                                \
    DESCRIBED(                                                                             \
        NAME, "x: blocks of clusters, one a row, of 1, 2, 4 or 8",                         \
        (.threads = kNumThreads, .shared_bytes = sizeof(TeamShared)),                      \
        extern "C" __global__ void __launch_bounds__(kNumThreads, 2) NAME(SAMPLE_PARAMS) { \
            sample_row({nullptr, nullptr, SAMPLE_ARGUMENTS,                                \
                        static_cast<int>(blockIdx.x / cluster_size())});                   \
        })

EXPORT_SAMPLE(sample)

}  // namespace kernel_hub::sampling::sm90
