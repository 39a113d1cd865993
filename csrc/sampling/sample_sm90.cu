// Token ids drawn from logits on Hopper: what sample.cu draws, bit for bit, a row a cluster.
//
// As many blocks of 256 threads share a row as the launch says (1 to 8). Each has a share of it and
// tells the others what it found in notes in shared memory, which all of them read: they know the
// same and decide the same, and one writes. Two blocks a multiprocessor: what one waits for, the
// other computes under.
//   1. One pass from DRAM. The largest; and where top_k, or top_p alone, asks for few, what is
//   above
//      a bound by as many threads' largest, which rises as the pass goes on. What a block has above
//      the least bound of its share of top_k, hardly more than top_k of all blocks, is compared
//      with each other.
//   2. Where that is not enough: the passes of search.cuh, each block over a part of the row, their
//      counts and masses added up.
// Variants: none; dtype, alignment, what changes logits and the blocks of a cluster are asked as
// they are met.
// Shared memory: 32 KB, notes and candidates.
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
    const uint64_t seed = p.seed ? p.seed[row_idx] : 0;
    const uint64_t offset = p.offset ? p.offset[row_idx] : 0;
    const int wanted = has_k ? top_k : kMostByBound;
    const bool may_bound = wanted <= kMostByBound && (has_k || has_p);

    Seen seen;
    float largest, bound = kInfinity;
    const int chunk = elements_a_chunk(team);
    const bool is_long = p.size > 8 * chunk;
    bool has_bound = may_bound && !is_greedy, lists = false;
    int from_element = 0, until = is_long && has_bound ? chunk : p.size;
    if (threadIdx.x == 0) {
        shared.num_listed = 0;
    }
    __syncthreads();
#pragma unroll 1
    while (true) {
        look(fours, from_element, until, bound, seen, team);
        if (has_bound && is_long && !(lists && until == p.size)) {
            // Bounds rise as more is known; what comes first is looked at twice.
            bound = loose_bound(seen.of_thread, wanted);
            from_element = lists ? until : 0;
            until = until > p.size / 4 ? p.size : 4 * until;
            lists = true;
            continue;
        }
        if (has_bound && !is_long && lists) {
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
            has_bound ? loose_bound(seen.of_thread, (wanted + team.size - 1) / team.size) : 0.0f;
        team.take_back();
        if (threadIdx.x == 0) {
            shared.mine.largest = of_block;
            shared.mine.index = index;
            shared.mine.bound = lists ? bound : -kInfinity;
            shared.mine.least = of_share;
        }
        team.exchange(false);
        largest = bound = -kInfinity;
        float least = kInfinity;
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
        }
        bound = has_bound ? fmaxf(bound, least) : kInfinity;
        if (!(largest > -kInfinity)) {
            if (row.has_mask) {
                // Nothing is allowed: as if all were.
                is_greedy = true;
                row.has_mask = has_bound = lists = false;
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
        lists = true;  // now that the bound of all blocks is known
    }
    const Weigher weigher = weigher_of(largest, temperature, min_p);

    enum Step { kBounded, kSearching, kWeighing, kRanking };
    Step next = has_bound ? kBounded : has_k ? kSearching : kWeighing;
    float from = -kInfinity;
    uint64_t total = 0;
    if (threadIdx.x == 0) {
        start_counting(s.search, top_k, from, largest);
    }
#pragma unroll 1
    while (true) {
        team.take_back();
        if (threadIdx.x == 0) {
            shared.num_own = shared.mine.num = 0;
            const bool weighs = next == kWeighing || (next == kBounded && !has_k);
            s.question = {next == kRanking ? bound : kInfinity, kInfinity, weighs, false, {from}};
            if (next == kSearching) {
                ask(s.search, s.question, weigher);
            }
        }
        __syncthreads();
        if (threadIdx.x / 32 == kNumWarps - 1) {
            shared.bits = random_bits(seed, offset);  // under what the other warps do
        }
        if (next == kBounded) {
            choose_listed(weigher, bound, team);
        }
        if (next != kBounded || !has_k) {
            scan(fours, weigher, team);
        }
        const bool gathers = next == kBounded || s.question.from < kInfinity;
        team.exchange(gathers);
        if (threadIdx.x == 0 && s.question.weighs) {
            sum_answers(team);
        }
        Chosen chosen;
        const bool has_chosen = gathers && s.num_candidates <= kNumCandidates;
        if (has_chosen) {
            chosen.compare(weigher, s);
        }
        __syncthreads();
        if (next == kBounded) {
            if (has_chosen) {
                chosen.keep([&](const Above& above) {
                    return !has_k || above.count < static_cast<uint32_t>(top_k);
                });
                const uint64_t found = chosen.kept_mass(s);
                const uint64_t needed =
                    has_p ? mass_needed(top_p, has_k ? found : s.above[0].mass) : found;
                if (needed <= found) {
                    if (team.rank == 0) {
                        chosen.keep([&](const Above& above) { return above.mass < needed; });
                        total = chosen.kept_mass(s);
                        chosen.draw(p, weigher, total, shared.bits, s);
                        chosen.write_top(p, weigher, total, s);
                    }
                    return;
                }
            }
            if (has_k) {
                next = kSearching;
                continue;
            }
            next = kWeighing;  // and weighed already
        }
        if (next == kRanking) {
            if (team.rank == 0) {
                if (has_chosen) {
                    chosen.write_top(p, weigher, total, s);
                } else {
                    write_top_in_turn(row, weigher, from, total, s);
                }
            }
            return;
        }
        if (next == kSearching) {
            if (threadIdx.x == 0) {
                s.is_among = true;
                s.is_done = !s.question.searches || learn(s);
            }
            __syncthreads();
            if (s.is_done) {
                from = from_key(s.is_among ? chosen.end_search(s.search, s) : s.search.low);
                next = kWeighing;
            }
        } else if (has_p) {
            has_p = false;
            next = kSearching;
            if (threadIdx.x == 0) {
                start_weighing(s, weigher, top_p, mass_needed(top_p, s.above[0].mass), from,
                               largest);
            }
        } else {
            total = s.above[0].mass;
            draw_in_row(row, weigher, from, total, shared.bits, team);
            const int num = wanted_top(p);
            if (num == 0) {
                if (team.rank == 0) {
                    end_top(p, 0);
                }
                return;
            }
            bound = fmaxf(loose_bound(seen.of_thread, num), from);
            next = kRanking;
        }
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
