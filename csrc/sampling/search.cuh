// The smallest value of a row that is kept, by passes over it.
#pragma once

#include "sampling/candidates.cuh"

namespace kernel_hub::sampling {

struct Largest {
    float of_row;  // -inf: nothing may be drawn
    int index;     // its first; 0 where there is none
    float of_thread;
};

// Threads take neighbouring vectors, so that what is large and close together is many threads'.
__device__ __forceinline__ Largest find_largest(const Row& row, int begin, int end, Shared& s) {
    float best = -kInfinity;
    int found = 0;
    row.walk(begin, end, threadIdx.x, kNumThreads, false, [&](int index, const auto& z) {
        float most = z[0];
        for (const float other : z) {
            most = fmaxf(most, other);
        }
        if (most > best) {
            best = most;
            found = index;
        }
    });
    const float of_row =
        block_reduce(best, s.float_slots, [](float a, float b) { return fmaxf(a, b); });
    int index = row.p.size;
    if (best == of_row && best > -kInfinity) {
        index = found;
#pragma unroll 1
        while (!(row.value(index) == best)) {
            ++index;
        }
    }
    index = block_reduce(index, s.int_slots, [](int a, int b) { return min(a, b); });
    return {of_row, index < row.p.size ? index : 0, best};
}

// A float below which `wanted` threads' largest do not all lie: so many values are above it.
// kBitsLeft: of no matter.
template <int kBitsLeft = 8>
__device__ __forceinline__ float bound_of(float of_thread, int wanted) {
    const uint32_t lowest = key_of(-FLT_MAX);
    const uint32_t key = key_of(of_thread);
    uint32_t bound = 0;
#pragma unroll 1
    for (int bit = 31; bit >= kBitsLeft; --bit) {
        const uint32_t higher = bound | 1u << bit;
        if (__syncthreads_count(key >= higher) >= wanted) {
            bound = higher;
        }
    }
    return bound <= lowest ? -kInfinity : from_key(bound - 1);
}

// Elements that a warp takes in a walk in order: whole lines.
__device__ __forceinline__ int elements_a_warp(const Row& row) {
    constexpr int kTogether = 64;
    return (row.p.size + kNumWarps * kTogether - 1) / (kNumWarps * kTogether) * kTogether;
}

// Answers s.question of elements begin .. end - 1, of the whole row where they are weighed.
// s.warp_masses: what each warp has above pivots[0].
__device__ __forceinline__ void scan(const Row& row, const Weigher& weigher, int begin, int end,
                                     Shared& s) {
    const Question question = s.question;
    Above above[kNumPivots];
    float first = 0.0f, second = 0.0f;
#pragma unroll
    for (int i = 0; i < kNumPivots; ++i) {
        above[i] = {0, 0};
    }
    int thread_idx = threadIdx.x, num = kNumThreads;
    if (question.weighs) {
        const int a_warp = elements_a_warp(row);
        begin = min(row.p.size, static_cast<int>(threadIdx.x / 32) * a_warp);
        end = min(row.p.size, begin + a_warp);
        thread_idx = threadIdx.x % 32;
        num = 32;
    }
    bool has_room = true;
    // Backward: what was read last is in the L2.
    row.walk(begin, end, thread_idx, num, !question.weighs, [&](int index, const auto& z) {
        float most = z[0];
        for (const float other : z) {
            most = fmaxf(most, other);
        }
        if (most > question.from && has_room) {
#pragma unroll 1
            for (int i = index; i < index + static_cast<int>(sizeof(z) / sizeof(z[0])); ++i) {
                const float value = row.value(i);
                if (value > question.from && value <= question.to && has_room &&
                    weigher.depth(value) >= weigher.least) {
                    const int place = atomicAdd(&s.num_candidates, 1);
                    has_room = place < kNumCandidates;
                    if (has_room) {
                        s.values[place] = value;
                        s.indices[place] = i;
                    }
                }
            }
        }
        // What is 2^-kMassBits of the largest weighs nothing, and is counted by searches alone.
        if (question.searches || (question.weighs && weigher.depth(most) > -kMassBits - 1)) {
            for (const float value : z) {
                const float depth = weigher.depth(value);
                if (value > -kInfinity && depth >= weigher.least) {
                    const uint64_t mass = mass_of_power(depth);
                    above[0].mass += value > question.pivots[0] ? mass : 0;
                    if (!question.searches && value > question.pivots[0]) {
                        const float share = static_cast<float>(static_cast<uint32_t>(mass >> 16));
                        first += share * depth;
                        second += share * depth * depth;
                    }
                    if (question.searches) {
                        above[0].count += value > question.pivots[0];
#pragma unroll
                        for (int i = 1; i < kNumPivots; ++i) {
                            if (value > question.pivots[i]) {
                                ++above[i].count;
                                above[i].mass += mass;
                            }
                        }
                    }
                }
            }
        }
    });
    __syncthreads();
    if (question.weighs) {
#pragma unroll
        for (int i = 0; i < kNumPivots; ++i) {
            const uint32_t count = block_sum(above[i].count, s.count_slots);
            const uint64_t mass = block_sum(above[i].mass, i == 0 ? s.warp_masses : s.mass_slots);
            s.above[i] = {count, mass};
        }
        if (!question.searches) {
            const auto sum = [](float a, float b) { return a + b; };
            s.first = block_reduce(first, s.float_slots, sum);
            s.second = block_reduce(second, s.float_slots, sum);
        }
    }
    __syncthreads();
}

// Counts from the top until there are `target`, in (from, to].
__device__ __forceinline__ void start_counting(Search& search, uint64_t target, float from,
                                               float to) {
    search.is_mass = false;
    search.target = target;
    search.low = key_of(from);
    search.high = key_of(to);
    search.above_low = {0xffffffffu, 0};
    search.above_high = {0, 0};
    search.round = 0;
}

// How many deviations below the mean p of what is normal lies above, to 4.5e-4.
// Source: Abramowitz and Stegun, "Handbook of Mathematical Functions", 1964, 26.2.23.
__device__ __forceinline__ float deviations_below(float p) {
    const float tail = fmaxf(fminf(p, 1.0f - p), 1e-30f);
    const float t = sqrtf(-2.0f * logf(tail));
    const float x = t - (2.515517f + t * (0.802853f + t * 0.010328f)) /
                            (1.0f + t * (1.432788f + t * (0.189269f + t * 0.001308f)));
    return p < 0.5f ? -x : x;
}

// Weighs from the top until there is what p of s.above[0] is, in (from, to]. A guess comes first:
// weighed by themselves, logits that are normal are so, with the same deviation.
__device__ __forceinline__ void start_weighing(Shared& s, const Weigher& weigher, float p,
                                               uint64_t target, float from, float to) {
    constexpr float kStep = 0.015f;  // of a deviation, which hardly 512 of 128k lie in
    const uint64_t total = s.above[0].mass;
    const float shares = fmaxf(ldexpf(static_cast<float>(total), -16), 1.0f);
    const float mean = s.first / shares;
    const float deviation = sqrtf(fmaxf(s.second / shares - mean * mean, 0.0f));
    const float top = fminf(to, FLT_MAX);
    Search& search = s.search;
    start_counting(search, target, from, to);
    search.is_mass = true;
    // What is no larger than this, rounded or not, weighs nothing.
    const uint32_t lowest = key_of(top - (kMassBits + 2) / weigher.scale);
    search.low = max(search.low, min(lowest, search.high) - 1);
    search.above_low.mass = total;
    search.guess = top + (mean - deviation * deviations_below(p)) / weigher.scale;
    search.step = kStep * deviation / weigher.scale;
}

__device__ __forceinline__ bool is_met(const Search& search, const Above& above) {
    return (search.is_mass ? above.mass : above.count) >= search.target;
}

__device__ __forceinline__ bool is_few(const Search& search) {
    return search.above_low.count - search.above_high.count <= kNumCandidates;
}

// What to ask next. By one thread.
__device__ __forceinline__ void ask(Search& search, Question& question, const Weigher& weigher) {
    constexpr int kLines = 9;  // rounds; then steps that end for certain
    const float low = from_key(search.low), high = from_key(search.high);
    const int round = search.round;
    question.weighs = question.searches = !is_few(search);
    question.from = low;
    question.to = high;
    if (!question.searches) {
        return;
    }
    // Around where a line between both ends meets the target.
    const bool is_line = round % 3 != 0 && round < kLines && low > -kInfinity;
    const float of_low = search.is_mass ? search.above_low.mass : search.above_low.count;
    const float of_high = search.is_mass ? search.above_high.mass : search.above_high.count;
    const uint32_t num = search.above_low.count - search.above_high.count;
    const float part = (of_low - static_cast<float>(search.target)) / (of_low - of_high);
    const float step = fminf(fmaxf(200.0f / static_cast<float>(num), 0.1f), 0.25f);
    const bool is_guess = round == 0 && search.is_mass;
#pragma unroll 1
    for (int i = 0; i < kNumPivots; ++i) {
        // By turns in equal steps of values and of keys.
        const float even = static_cast<float>(i + 1) / (kNumPivots + 1);
        const float along = is_line ? fminf(fmaxf(part + (i - 1) * step, 0.001f), 0.999f) : even;
        const float middle = low + (high - low) * along;
        const uint64_t keys = search.high - search.low;
        uint32_t key = search.low + static_cast<uint32_t>(keys * (i + 1) / (kNumPivots + 1));
        if (is_guess) {
            key = key_of(search.guess + (i - 1) * search.step);
        } else if (round == 0) {
            key = i == 0 ? search.low : key_of(high - ldexpf(1.5f, kNumPivots - i) / weigher.scale);
        } else if (round < kLines && !(low > -kInfinity)) {
            key = key_of(high - ldexpf(6.0f, 2 * round - i) / weigher.scale);
        } else if (round == 3 && i == kNumPivots - 1) {
            key = search.high - 1;  // many may be equal to the largest
        } else if ((round < kLines || round % 2 == 1) && middle > low && middle < high) {
            key = key_of(middle);
        }
        search.keys[i] = max(search.low + (round > 0), min(key, search.high - 1));
        question.pivots[i] = from_key(search.keys[i]);
    }
    const bool is_narrow = is_guess || (is_line && num <= 8 * kNumCandidates);
    question.from = is_narrow ? question.pivots[0] : kInfinity;
    question.to = question.pivots[kNumPivots - 1];
}

// Whether the search has ended, with `low`, or `is_among` what the question collected. By one
// thread.
__device__ __forceinline__ bool learn(Shared& s) {
    Search& search = s.search;
    const Above(&above)[kNumPivots] = s.above;
    s.is_among = false;
    if (search.round++ == 0 && !search.is_mass && !is_met(search, above[0])) {
        return true;
    }
    if (s.question.from < kInfinity && s.num_candidates <= kNumCandidates &&
        is_met(search, above[0]) && !is_met(search, above[kNumPivots - 1])) {
        search.high = search.keys[kNumPivots - 1];
        search.above_high = above[kNumPivots - 1];
        s.is_among = true;
        return true;
    }
#pragma unroll 1
    for (int i = 0; i < kNumPivots; ++i) {
        if (is_met(search, above[i])) {
            if (search.keys[i] >= search.low) {
                search.low = search.keys[i];
                search.above_low = above[i];
            }
        } else if (search.keys[i] < search.high) {
            search.high = search.keys[i];
            search.above_high = above[i];
        }
    }
    return search.high - search.low <= 1;
}

// The end of a search among few candidates: the key below the smallest that is kept.
__device__ __forceinline__ uint32_t end_search(const Search& search, const Candidate& mine,
                                               Shared& s) {
    const Above above = {search.above_high.count + mine.above.count,
                         search.above_high.mass + mine.above.mass};
    const bool is_kept = mine.is_any && !is_met(search, above);
    return block_reduce(is_kept ? key_of(mine.value) : search.high + 1, s.count_slots,
                        [](uint32_t a, uint32_t b) { return min(a, b); }) -
           1;
}

// Calls found(i) of the element, in the order of indices, with which the sums of weigh(i) from
// `begin` on pass `drawn`, among `elements` that weigh more; by the thread that meets it.
template <typename Weigh, typename Found>
__device__ __forceinline__ void find_in_piece(const Row& row, int begin, int elements,
                                              uint64_t drawn, Shared& s, const Weigh& weigh,
                                              const Found& found) {
    const int a_thread = elements / kNumThreads + 1;
    const int first = begin + threadIdx.x * a_thread;
    const int end = min(min(row.p.size, begin + elements), first + a_thread);
    uint64_t before = 0, mass = 0;
    // Once for the sum, once more where what is drawn lies.
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
        int i = first;
#pragma unroll 1
        for (uint64_t sum = before; i < end && (turn == 0 || sum <= drawn); ++i) {
            sum += weigh(i);
            mass = sum - before;
        }
        if (turn == 0) {
            before = block_sum_before(mass, s.mass_slots);
            if (!(before <= drawn && drawn - before < mass)) {
                return;
            }
        } else {
            found(i - 1);
        }
    }
}

// The same in the whole row, of a random number below `total`. s.warp_masses: as scan leaves them.
template <typename Weigh, typename Found>
__device__ __forceinline__ void find_drawn(const Row& row, uint64_t total, uint64_t bits, Shared& s,
                                           const Weigh& weigh, const Found& found) {
    uint64_t drawn = below(total, bits);
    int warp_idx = 0;
#pragma unroll 1
    while (drawn >= s.warp_masses[warp_idx]) {
        drawn -= s.warp_masses[warp_idx++];
    }
    const int elements = elements_a_warp(row);
    find_in_piece(row, warp_idx * elements, elements, drawn, s, weigh, found);
}

// What an element weighs that is above `from`, others nothing.
__device__ __forceinline__ uint64_t mass_above(const Row& row, const Weigher& weigher, float from,
                                               int i) {
    const float z = row.value(i), depth = weigher.depth(z);
    return z > from && depth >= weigher.least ? mass_of_power(depth) : 0;
}

// Draws from all that is above `from`.
__device__ __forceinline__ void draw_in_row(const Row& row, const Weigher& weigher, float from,
                                            uint64_t total, uint64_t bits, Shared& s) {
    const auto weigh = [&](int i) { return mass_above(row, weigher, from, i); };
    find_drawn(row, total, bits, s, weigh,
               [&](int i) { write_drawn(row.p, i, weigher.depth(row.value(i)), total); });
}

}  // namespace kernel_hub::sampling
