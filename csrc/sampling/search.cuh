// The smallest value of a row that is kept, by passes over it.
#pragma once

#include "sampling/bins.cuh"

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

// The least of what is the largest of a thread: how far down a row goes.
__device__ __forceinline__ float least_of(float of_thread, Shared& s) {
    return block_reduce(of_thread > -kInfinity ? of_thread : kInfinity, s.float_slots,
                        [](float a, float b) { return fminf(a, b); });
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
// s.warp_masses: what each warp has above the window's lower end.
template <bool kHasBins>
__device__ __forceinline__ void scan(const Row& row, const Weigher& weigher, int begin, int end,
                                     Bins* bins, Shared& s) {
    const Question question = s.question;
    uint64_t total = 0, above = 0;
    int thread_idx = threadIdx.x, num = kNumThreads;
    if (question.weighs) {
        const int a_warp = elements_a_warp(row);
        begin = min(row.p.size, static_cast<int>(threadIdx.x / 32) * a_warp);
        end = min(row.p.size, begin + a_warp);
        thread_idx = threadIdx.x % 32;
        num = 32;
    }
    // Backward: what was read last is in the L2.
    row.walk(begin, end, thread_idx, num, !question.weighs, [&](int index, const auto& z) {
        float most = z[0];
        for (const float other : z) {
            most = fmaxf(most, other);
        }
        if (most > question.from && question.to > -kInfinity) {
#pragma unroll 1
            for (int i = index; i < index + static_cast<int>(sizeof(z) / sizeof(z[0])); ++i) {
                const float value = row.value(i);
                if (!(value > question.from && value <= question.to)) {
                    continue;
                }
                if (!kHasBins || question.collects) {
                    if (s.num_candidates <= kNumCandidates) {
                        const int place = atomicAdd(&s.num_candidates, 1);
                        if (place < kNumCandidates) {
                            s.values[place] = value;
                            s.indices[place] = i;
                        }
                    }
                } else {
                    add_to_bin(*bins, s.ruler, weigher, value, s.least, s.most);
                }
            }
        }
        if (question.weighs) {
            for (const float value : z) {
                if (value > question.floor) {
                    const uint64_t mass = weigher.mass(value);
                    total += mass;
                    above += value > question.from ? mass : 0;
                }
            }
        }
    });
    __syncthreads();
    if (question.weighs) {
        total = block_sum(total, s.mass_slots);
        above = block_sum(above, s.warp_masses);
        if (threadIdx.x == 0) {
            s.total = total;
            s.above = above;
        }
    }
    __syncthreads();
}

// What of (from, to] has less than the target above it, of counts or of masses. By one thread.
__device__ __forceinline__ void start(Search& search, bool is_mass, int top_k, float from,
                                      float to) {
    search.is_mass = is_mass;
    search.collects = false;
    search.target = is_mass ? 0 : top_k;
    search.low = search.from = key_of(from);
    search.high = search.to = key_of(to);
    search.above = 0;
    search.round = 0;
}

// What to ask next. By one thread.
__device__ __forceinline__ void ask(Shared& s, const Weigher& weigher, float floor) {
    const Search& search = s.search;
    s.question = {floor, from_key(search.from), from_key(search.to), true, search.collects};
    if (!search.collects) {
        s.ruler = ruler_of(search, weigher, s.range);
        s.least = ~0u;
        s.most = 0;
    }
}

// What a pass over the window makes known, in which there is `of_window` of what is searched for;
// whether the end is in it. Bins that hold more than one value: s.least < s.most. By one thread.
__device__ __forceinline__ bool learn(Shared& s, float top_p, uint64_t of_window) {
    Search& search = s.search;
    if (search.is_mass) {
        search.target = mass_needed(top_p, s.total);
        search.above = s.above - of_window;
    }
    const bool is_above = search.above >= search.target;
    const bool is_below = search.is_mass && s.above < search.target;
    const bool is_binned = !search.collects;
    search.round += is_binned;
    if (is_above || is_below) {
        // As wide as it may be, of which bins are sure.
        (is_above ? search.low : search.high) = is_above ? search.to : search.from;
        search.from = search.low;
        search.to = search.high;
        search.collects = false;
        // What was guessed to be above the window says how far off the guess was.
        const uint64_t wanted = search.target + s.above_window;
        s.wanted = wanted > search.above ? wanted - search.above : 1;
        return false;
    }
    search.low = search.from;
    search.high = search.to;
    s.wanted = search.target - search.above;
    if (is_binned && search.above + of_window < search.target) {
        s.least = s.most;  // fewer than top_k have min_p: all of them are kept
    }
    return true;
}

// Whether a mass or count above a value is what is asked for.
__device__ __forceinline__ bool is_met(const Search& search, const Above& above) {
    return search.above + (search.is_mass ? above.mass : above.count) >= search.target;
}

// The end of a search among candidates: the key below the smallest that is kept.
__device__ __forceinline__ uint32_t end_search(const Search& search, const Candidate& mine,
                                               Shared& s) {
    const bool is_kept = mine.is_any && !is_met(search, mine.above);
    return block_reduce(is_kept ? key_of(mine.value) : search.to + 1, s.count_slots,
                        [](uint32_t a, uint32_t b) { return min(a, b); }) -
           1;
}

// By all threads, before any drops something.
__device__ __forceinline__ void drop_none(Shared& s) {
    if (threadIdx.x < kNumPieces) {
        s.dropped_low[threadIdx.x] = s.dropped_high[threadIdx.x] = 0;
    }
    __syncthreads();
}

__device__ __forceinline__ void drop(int piece, uint64_t mass, Shared& s) {
    add_mass(s.dropped_low[piece], s.dropped_high[piece], mass);
}

__device__ __forceinline__ uint64_t dropped(const Shared& s, int piece) {
    return static_cast<uint64_t>(s.dropped_high[piece]) << 32 | s.dropped_low[piece];
}

// Calls found(i) of the element, in the order of indices, with which the sums of weigh(i) from
// `begin` on pass `drawn`, among `elements` that weigh more; by the thread that meets it.
template <typename Weigh, typename Found>
__device__ __forceinline__ void find_in_piece(const Row& row, int begin, int elements,
                                              uint64_t drawn, Shared& s, const Weigh& weigh,
                                              const Found& found) {
    const int a_thread = (elements + kNumThreads - 1) / kNumThreads;
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
    const float z = row.value(i);
    return z > from ? weigher.mass(z) : 0;
}

// Draws from all that is above `from`.
__device__ __forceinline__ void draw_in_row(const Row& row, const Weigher& weigher, float from,
                                            uint64_t total, uint64_t bits, Shared& s) {
    const auto weigh = [&](int i) { return mass_above(row, weigher, from, i); };
    find_drawn(row, total, bits, s, weigh,
               [&](int i) { write_drawn(row.p, i, weigher.depth(row.value(i)), total); });
}

}  // namespace kernel_hub::sampling
