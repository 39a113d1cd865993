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
//      with each other. The same where only top_p is asked, with 256.
//   3. Where candidates are too many, or have less than top_p: passes that count and weigh what is
//      above three pivots, until few are left between two. The first stand where they would if
//      logits were normal. Where all is kept, one pass that weighs it.
// Where rows are few, several blocks share one: each leaves the candidates of its part, and the one
// that ends last goes on with them, or, where a part has too many or top_k does not ask for them,
// does the whole row alone.
// The most probable, where they are asked for, are among the candidates, or become candidates by a
// bound of their own in a further pass.
// One kernel for every dtype and alignment: walks are by vectors where is_plain says so, else by
// elements, which alone are biased, masked and penalised.
// Shared memory: 9 KB, candidates.
// Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020; Keskar et al.,
// "CTRL", 2019; Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024.

#include "kernel_hub/launch_facts.cuh"
#include "sampling/parts.cuh"
#include "sampling/top.cuh"

namespace kernel_hub::sampling {

constexpr int kMostByBound = 256;  // more threads' largest bound too loosely
constexpr int kMassCandidates = 256;

__device__ __forceinline__ void sample_row(const SampleParams& p) {
    __shared__ Shared s;
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
    Weigher weigher = {0.0f, 0.0f, -kInfinity};

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
        const int wanted = has_k ? top_k : kMassCandidates;
        bool has_bound = wanted <= kMostByBound && (has_k || has_p);
        if (next == kPart) {
            has_bound = has_bound && has_k && !is_greedy;
        } else if (!(top.of_row > -kInfinity) && row.has_mask) {
            // Nothing is allowed: as if all were.
            is_greedy = true;
            row.has_mask = false;
            continue;
        } else if (is_greedy || !(top.of_row > -kInfinity)) {
            write_largest(p, top.index);
            return;
        } else {
            weigher = weigher_of(top.of_row, temperature, min_p);
            next = has_bound ? kBounded : has_k ? kSearching : kWeighing;
        }
        float bound = has_bound ? bound_of(top.of_thread, wanted) : kInfinity;
        float from = -kInfinity;
        uint64_t total = 0;
        if (threadIdx.x == 0) {
            start_counting(s.search, top_k, from, top.of_row);
        }
#pragma unroll 1
        while (next != kWhole) {
            __syncthreads();
            if (threadIdx.x == 0) {
                s.num_candidates = 0;
                s.question = {bound,
                              kInfinity,
                              next == kWeighing || (next == kBounded && !has_k),
                              false,
                              {from}};
                if (next == kSearching) {
                    ask(s.search, s.question, weigher);
                }
            }
            __syncthreads();
            scan(row, weigher, begin, next == kPart && !has_bound ? begin : end, s);
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
                    weigher = weigher_of(top.of_row, temperature, min_p);
                    gather_parts(parts, weigher, s);
                    next = s.num_candidates <= kNumCandidates ? kBounded : kWhole;
                }
                if (next == kWhole) {
                    break;
                }
            }
            Candidate mine;
            if (s.question.from < kInfinity && s.num_candidates <= kNumCandidates) {
                mine.compare(weigher, s);
            }
            if (next == kBounded) {
                if (s.num_candidates <= kNumCandidates) {
                    bool is_kept = mine.is_any && !(has_k && mine.above.count >= top_k);
                    const uint64_t found = block_sum(is_kept ? mine.mass : 0, s.mass_slots);
                    const uint64_t needed =
                        has_p ? mass_needed(top_p, has_k ? found : s.above[0].mass) : found;
                    if (needed <= found) {
                        is_kept = is_kept && mine.above.mass < needed;
                        total = draw_candidate(p, weigher, mine, is_kept, bits, s);
                        write_top_candidates(p, weigher, mine, is_kept, total, s);
                        return;
                    }
                }
                bound = kInfinity;
                if (has_k) {
                    next = kSearching;
                    continue;
                }
                next = kWeighing;  // which this pass did
            }
            if (next == kRanking) {
                if (s.num_candidates <= kNumCandidates) {
                    write_top_candidates(p, weigher, mine, mine.is_any, total, s);
                } else {
                    write_top_in_turn(row, weigher, bound, total, s);
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
                    from = from_key(s.is_among ? end_search(s.search, mine, s) : s.search.low);
                    next = kWeighing;
                }
            } else if (has_p) {
                has_p = false;
                next = kSearching;
                if (threadIdx.x == 0) {
                    start_weighing(s, weigher, top_p, mass_needed(top_p, s.above[0].mass), from,
                                   top.of_row);
                }
            } else {
                total = s.above[0].mass;
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
