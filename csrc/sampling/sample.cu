// Token ids drawn from logits, any mixture of rows in one launch.
//
//   z = penalised(masked(softcap * tanh(x / softcap) + bias)),  p = softmax(z / temperature)
//   kept: p >= min_p max(p); of these the top_k largest; of these the largest that together have
//   top_p of their mass. What equals the smallest that is kept is kept. One kept is drawn.
//
// A block of 512 threads a row. Probabilities are whole numbers (numbers.cuh), so that their sums
// are the same in any order, and the draw, the first whose sum with those before it is above a
// random number, depends on nothing but the row, its seed and its offset.
//   1. The largest, of the row and of each thread. A greedy row ends here.
//   2. As many threads' largest as top_k bound what the top_k are from below: what is above the
//      bound, hardly more than top_k, becomes candidates, in shared memory, which are compared
//      with each other.
//   3. Where these are too many, or top_p alone is asked: a pass weighs the row, with counts and
//      masses of a histogram (bins.cuh), a second has what the threshold's bin holds as candidates.
//      Where that bin holds too many, a histogram of it. Where all is kept, one pass that weighs
//      it.
// Where rows are few, several blocks share one: each leaves the candidates of its part, and the one
// that ends last goes on with them, or, where a part has too many or top_k does not ask for them,
// does the whole row alone.
// The most probable, where they are asked for, are among the candidates, or become candidates by a
// bound of their own in a further pass.
// One kernel for every dtype and alignment: walks are by vectors where is_plain says so, else by
// elements, which alone are biased, masked and penalised.
// Shared memory: 33 KB, candidates and bins.
// Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020; Keskar et al.,
// "CTRL", 2019; Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs the code of sm80

#include "kernel_hub/launch_facts.cuh"
#include "sampling/parts.cuh"
#include "sampling/top.cuh"

namespace kernel_hub::sampling {

constexpr int kMostByBound = 256;  // more threads' largest bound too loosely

__device__ __forceinline__ void sample_row(const SampleParams& p) {
    __shared__ Shared s;
    __shared__ Bins bins;
    const int64_t row_idx = p.row_idx;
    const float temperature = p.temperature ? p.temperature[row_idx] : 1.0f;
    const float min_p = p.min_p ? p.min_p[row_idx] : 0.0f;
    const int top_k = p.top_k ? p.top_k[row_idx] : 0;
    const float top_p = p.top_p ? p.top_p[row_idx] : 1.0f;
    const bool has_k = top_k > 0 && top_k < p.size;
    bool has_p = top_p < 1.0f;
    bool is_greedy = !(temperature > 0.0f);
    const uint64_t bits =
        random_bits(p.seed ? p.seed[row_idx] : 0, p.offset ? p.offset[row_idx] : 0);
    Weigher weigher = {};

    Row row(p);
    enum Step { kPart, kWhole, kBounded, kSearching, kWeighing, kRanking };
    Step next = gridDim.y > 1 ? kPart : kWhole;
    int begin = 0, end = p.size;
    if (next == kPart) {
        const int a_part = elements_a_part(p.size);
        begin = min(p.size, static_cast<int>(blockIdx.y) * a_part);
        end = min(p.size, begin + a_part);
    }
#pragma unroll 1
    while (true) {
        Largest top = find_largest(row, begin, end, s);
        bool has_bound = has_k && top_k <= kMostByBound;
        float floor = -kInfinity;
        if (next == kPart) {
            has_bound = has_bound && !is_greedy;
        } else if (!(top.of_row > -kInfinity) && row.has_mask) {
            // Nothing is allowed: as if all were.
            is_greedy = true;
            row.has_mask = false;
            continue;
        } else if (is_greedy || !(top.of_row > -kInfinity)) {
            write_largest(p, top.index);
            return;
        } else {
            weigher = weigher_of(top.of_row, temperature);
            floor = floor_of(weigher, min_p);
            next = has_bound ? kBounded : has_k || has_p ? kSearching : kWeighing;
        }
        float bound = has_bound ? fmaxf(bound_of(top.of_thread, top_k), floor) : kInfinity;
        float from = floor;
        uint64_t total = 0;
        const float range = 4.0f * (top.of_row - least_of(top.of_thread, s));
        if (threadIdx.x == 0) {
            s.range = range;
            start(s.search, !has_k, top_k, from, top.of_row);
        }
#pragma unroll 1
        while (next != kWhole) {
            __syncthreads();
            if (threadIdx.x == 0) {
                s.num_candidates = 0;
                if (next == kSearching) {
                    ask(s, weigher, from);
                } else {
                    s.question = {from, next == kWeighing ? from : bound,
                                  next == kWeighing ? -kInfinity : kInfinity, next == kWeighing,
                                  true};
                }
            }
            empty_bins(bins, true);
            __syncthreads();
            scan<true>(row, weigher, begin, next == kPart && !has_bound ? begin : end, &bins, s);
            if (next == kPart) {
                if (!leave_part(p, top, bound, s)) {
                    return;
                }
                const Part* parts = static_cast<const Part*>(p.parts) + row_idx * gridDim.y;
                top = largest_of_parts(parts);
                const bool is_any = top.of_row > -kInfinity;
                if (is_any && is_greedy) {
                    write_largest(p, top.index);
                    return;
                }
                next = kWhole;
                begin = 0;
                end = p.size;
                if (is_any && has_bound) {
                    weigher = weigher_of(top.of_row, temperature);
                    gather_parts(parts, floor_of(weigher, min_p), s);
                    next = s.num_candidates <= kNumCandidates ? kBounded : kWhole;
                }
                if (next == kWhole) {
                    break;
                }
            }
            Candidate mine;
            const bool has_candidates = s.question.collects && s.num_candidates <= kNumCandidates;
            if (has_candidates) {
                mine.compare(weigher, s);
            }
            if (next == kBounded) {
                if (has_candidates) {
                    bool is_kept = mine.is_any && mine.above.count < top_k;
                    const uint64_t found = block_sum(is_kept ? mine.mass : 0, s.mass_slots);
                    const uint64_t needed = has_p ? mass_needed(top_p, found) : found;
                    is_kept = is_kept && mine.above.mass < needed;
                    total = draw_candidate(p, weigher, mine, is_kept, bits, s);
                    write_top_candidates(p, weigher, mine, is_kept, total, s);
                    return;
                }
                next = kSearching;
                continue;
            }
            if (next == kRanking) {
                if (has_candidates) {
                    write_top_candidates(p, weigher, mine, mine.is_any, total, s);
                } else {
                    write_top_in_turn(row, weigher, bound, total, s);
                }
                return;
            }
            drop_none(s);
            if (next == kSearching) {
                uint64_t of_window = 0;
                if (!s.question.collects) {
                    of_window = sum_of_bins(bins, s.search.is_mass, s);
                } else if (has_candidates) {
                    of_window = block_sum(mine.mass, s.mass_slots);
                }
                if (threadIdx.x == 0) {
                    s.is_done = learn(s, top_p, of_window);
                }
                __syncthreads();
                if (!s.is_done) {
                    continue;
                }
                if (has_candidates) {
                    from = from_key(end_search(s.search, mine, s));
                } else if (s.least < s.most) {
                    find_window(bins, s);
                    continue;
                } else {
                    from = s.question.from;
                }
                if (mine.is_any && !(mine.value > from)) {
                    drop(mine.index / elements_a_warp(row), mine.mass, s);
                }
                __syncthreads();
                if (threadIdx.x < kNumWarps) {
                    s.warp_masses[threadIdx.x] -= dropped(s, threadIdx.x);
                }
                if (has_p && !s.search.is_mass) {
                    __syncthreads();
                    if (threadIdx.x == 0) {
                        start(s.search, true, 0, from, top.of_row);
                    }
                    continue;
                }
            }
            total =
                block_sum(threadIdx.x < kNumWarps ? s.warp_masses[threadIdx.x] : 0, s.mass_slots);
            draw_in_row(row, weigher, from, total, bits, s);
            const int num = wanted_top(p);
            if (num == 0) {
                end_top(p, 0);
                return;
            }
            bound = fmaxf(bound_of(top.of_thread, num), from);
            next = kRanking;
        }
    }
}

#define EXPORT_SAMPLE(NAME)                                                              \
    DESCRIBED(                                                                           \
        NAME, "x: rows, y: parts of a row", (.threads = kNumThreads, .shared_bytes = 0), \
        extern "C" __global__ void                                                       \
        __launch_bounds__(kNumThreads, 1) NAME(int* state, void* parts, SAMPLE_PARAMS) { \
            sample_row({state, parts, SAMPLE_ARGUMENTS, static_cast<int>(blockIdx.x)});  \
        })

EXPORT_SAMPLE(sample)

}  // namespace kernel_hub::sampling
