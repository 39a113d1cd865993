// Candidates of a draw: few values of a row, one a thread, in shared memory, in any order.
#pragma once

#include "sampling/row.cuh"

namespace kernel_hub::sampling {

constexpr int kNumCandidates = 512;
// Of a window that counts guess at: they are compared in pairs, and a guess is wrong by few.
constexpr int kGuessed = 128;
constexpr int kNumPieces = 72;  // of a row, its blocks counted too, of which masses are known
constexpr int kBinBits = 11, kNumBins = 1 << kBinBits;

// What one pass over a row asks for.
struct Question {
    float floor;     // what is above is weighed, and apart what is above the window's lower end
    float from, to;  // the window: what is above `from`, up to `to`
    bool weighs;
    bool collects;  // what the window has becomes candidates; else it goes into bins
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
    bool collects;
    uint64_t target;
    uint32_t low, high;  // keys: it is in (low, high]
    uint32_t from, to;   // and the next pass looks for it in (from, to]
    uint64_t above;      // how much, or how many, is above `to`
    int round;           // passes that filled bins
};

// Words of masses apart: sums of 32 bits are what shared memory adds.
struct alignas(16) Bins {
    uint32_t counts[kNumBins], low[kNumBins], high[kNumBins];

    __device__ __forceinline__ uint64_t mass(int i) const {
        return static_cast<uint64_t>(high[i]) << 32 | low[i];
    }
};

// Which bin a value is in, the larger the earlier, by equal steps of values or of keys.
struct Ruler {
    float top, inverse;
    uint32_t high;
    int shift;
    bool is_by_keys;

    __device__ __forceinline__ int bin_of_value(float z) const {
        constexpr float kRound = 8388608.0f;  // 2^23: what is added to it is rounded
        const float along = __saturatef(__fmul_rn(__fsub_rn(top, z), inverse));
        return __float_as_uint(fmaf(along, kNumBins - 1, kRound)) & (kNumBins - 1);
    }
    __device__ __forceinline__ int bin_of(float z) const {
        return is_by_keys ? (high - key_of(z)) >> shift : bin_of_value(z);
    }
    // Of equal steps of values: what is in the middle of a bin.
    __device__ __forceinline__ float middle(int bin) const {
        return top - static_cast<float>(bin) / (kNumBins - 1) / inverse;
    }
};

struct Shared {
    Question question;
    Search search;
    Ruler ruler;
    float range;                    // what the row's values may lie in, below the largest
    uint64_t total, above;          // masses: above the floor, above the window's lower end
    uint32_t least, most;           // keys of what went into bins
    int bin, first_bin, last_bin;   // of the window
    uint32_t place, room;           // what is larger than this many is in it, and so many
    uint64_t wanted, above_window;  // of what bins hold: where the target is, before the window
    uint32_t dropped_low[kNumPieces], dropped_high[kNumPieces];  // words of masses
    alignas(16) uint64_t masses[kNumCandidates];
    alignas(16) float values[kNumCandidates];
    alignas(16) int indices[kNumCandidates];
    uint64_t mass_slots[kNumWarps];
    uint64_t warp_masses[kNumWarps];
    uint32_t count_slots[kNumWarps];
    float float_slots[kNumWarps];
    int int_slots[kNumWarps];
    bool is_done;
    int num_candidates;  // perhaps more than there is room for
};

// What a row is drawn by.
struct Weigher {
    float largest, scale;  // of the row; log2(e) / temperature
    float lowest;          // below the largest by this and more: nothing

    // log2 of the probability of z to that of the largest.
    __device__ __forceinline__ float depth(float z) const {
        return __fmul_rn(fmaxf(__fsub_rn(fminf(z, FLT_MAX), largest), -FLT_MAX), scale);
    }
    // The same, no further below than what weighs nothing.
    __device__ __forceinline__ float clamped_depth(float z) const {
        return __fmul_rn(fmaxf(__fsub_rn(fminf(z, FLT_MAX), largest), lowest), scale);
    }
    __device__ __forceinline__ uint64_t mass(float z) const {
        return mass_of_clamped(clamped_depth(z));
    }
};

__device__ __forceinline__ Weigher weigher_of(float largest, float temperature) {
    const float scale = fminf(__fdiv_rn(kLog2e, temperature), FLT_MAX);
    return {fminf(largest, FLT_MAX), scale, fmaxf(__fdiv_rn(kLeastPower, scale), -FLT_MAX)};
}

// What is above this has min_p of the largest's probability.
__device__ __forceinline__ float floor_of(const Weigher& weigher, float min_p) {
    uint32_t low = key_of(-kInfinity), high = key_of(weigher.largest);
    if (min_p > 0.0f) {
        const float least = static_cast<float>(log2(static_cast<double>(fminf(min_p, 1.0f))));
#pragma unroll 1
        while (low < high) {
            const uint32_t middle = high - (high - low) / 2;
            if (weigher.depth(from_key(middle)) < least) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
    }
    return from_key(low);
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
        mass = is_any ? weigher.mass(value) : 0;
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
