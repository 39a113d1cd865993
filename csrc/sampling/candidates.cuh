// Candidates of a draw: few values of a row, one a thread, in shared memory, in any order.
#pragma once

#include "sampling/row.cuh"

namespace kernel_hub::sampling {

constexpr int kNumCandidates = 512;
constexpr int kNumPivots = 3;

// What one pass over a row asks for.
struct Question {
    float from, to;  // values above `from`, up to `to`, become candidates
    bool weighs;     // the mass of what is above the first pivot
    bool searches;   // counts and masses of what is above each
    float pivots[kNumPivots];
};

// How much is strictly above a value.
struct Above {
    uint32_t count;
    uint64_t mass;
};

// A search for the float above which all is kept: under the smallest value that has less than the
// target strictly above it.
struct Search {
    bool is_mass;
    uint64_t target;
    uint32_t low, high;  // keys; all up to `low` is known not to be kept, but for the first round
    Above above_low, above_high;
    int round;
    float guess, step;  // of a mass: where it may be found first, and how far off
    uint32_t keys[kNumPivots];
};

struct Shared {
    Question question;
    Above above[kNumPivots];
    float first, second;  // where all is weighed: sums of depths, and of their squares, by shares
    Search search;
    alignas(16) uint64_t masses[kNumCandidates];
    alignas(16) float values[kNumCandidates];
    alignas(16) int indices[kNumCandidates];
    uint64_t mass_slots[kNumWarps];
    uint64_t warp_masses[kNumWarps];
    uint32_t count_slots[kNumWarps];
    float float_slots[kNumWarps];
    int int_slots[kNumWarps];
    bool is_done, is_among;  // the search has ended; among the candidates
    int num_candidates;      // perhaps more than there is room for
};

// What a row is drawn by.
struct Weigher {
    float largest, scale;  // of the row; log2(e) / temperature
    float least;           // log2 of min_p

    // log2 of the probability of z to that of the largest.
    __device__ __forceinline__ float depth(float z) const {
        return __fmul_rn(fmaxf(__fsub_rn(fminf(z, FLT_MAX), largest), -FLT_MAX), scale);
    }
};

__device__ __forceinline__ Weigher weigher_of(float largest, float temperature, float min_p) {
    return {fminf(largest, FLT_MAX), fminf(__fdiv_rn(kLog2e, temperature), FLT_MAX),
            min_p > 0.0f ? static_cast<float>(log2(static_cast<double>(fminf(min_p, 1.0f))))
                         : -kInfinity};
}

// A thread's candidate.
struct Candidate {
    float value;
    int index;
    uint64_t mass;
    bool is_any = false;
    Above above;  // of the candidates

    __device__ __forceinline__ void compare(const Weigher& weigher, Shared& s) {
        const int num = s.num_candidates;
        is_any = static_cast<int>(threadIdx.x) < num;
        value = is_any ? s.values[threadIdx.x] : 0.0f;
        index = is_any ? s.indices[threadIdx.x] : 0;
        mass = is_any ? mass_of_power(weigher.depth(value)) : 0;
        s.masses[threadIdx.x] = mass;
        __syncthreads();
        above = {0, 0};
        if (is_any) {
#pragma unroll 2
            for (int i = 0; i < num; ++i) {
                if (s.values[i] > value) {
                    ++above.count;
                    above.mass += s.masses[i];
                }
            }
        }
    }
};

// What is kept has less than this above it: at least what p of `total` is.
__device__ __forceinline__ uint64_t mass_needed(float p, uint64_t total) {
    const double needed = ceil(static_cast<double>(p) * static_cast<double>(total));
    return needed > 1.0 ? static_cast<uint64_t>(needed) : 1;
}

// A number below `total` for random bits.
__device__ __forceinline__ uint64_t below(uint64_t total, uint64_t bits) {
    return __umul64hi(total, bits);
}

// The log of the probability with which what has `depth` is drawn from what weighs `total`.
__device__ __forceinline__ float log_of_drawn(float depth, uint64_t total) {
    const float of_largest = ldexpf(static_cast<float>(total), -kMassBits);
    return __fmul_rn(depth, kLn2) - logf(of_largest);
}

__device__ __forceinline__ void write_drawn(const SampleParams& p, int index, float depth,
                                            uint64_t total) {
    p.out[p.row_idx] = index;
    if (p.logprob) {
        p.logprob[p.row_idx] = log_of_drawn(depth, total);
    }
}

// Draws from the candidates that are kept, in the order of their indices; what these weigh.
__device__ __forceinline__ uint64_t draw_candidate(const SampleParams& p, const Weigher& weigher,
                                                   const Candidate& mine, bool is_kept,
                                                   uint64_t bits, Shared& s) {
    const uint64_t mass = is_kept ? mine.mass : 0;
    const uint64_t total = block_sum(mass, s.mass_slots);
    s.masses[threadIdx.x] = mass;
    __syncthreads();
    const uint64_t drawn = below(total, bits);
    if (mass > 0) {
        uint64_t before = 0;
#pragma unroll 2
        for (int i = 0; i < s.num_candidates; ++i) {
            before += s.indices[i] < mine.index ? s.masses[i] : 0;
        }
        if (before <= drawn && drawn - before < mass) {
            write_drawn(p, mine.index, weigher.depth(mine.value), total);
        }
    }
    return total;
}

}  // namespace kernel_hub::sampling
