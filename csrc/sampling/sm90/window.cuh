// Where the threshold of a row is, nearly, by counts of the first pass: the window of the second.
#pragma once

#include "sampling/sm90/passes.cuh"

namespace kernel_hub::sampling::sm90 {

__device__ __forceinline__ float upper_of(uint64_t floats) {
    return __uint_as_float(static_cast<uint32_t>(floats >> 32));
}
__device__ __forceinline__ float lower_of(uint64_t floats) {
    return __uint_as_float(static_cast<uint32_t>(floats));
}

// Bins as deep as rows that are normal are, by a sample: of each thread the largest. A fifth of
// them are above the sample, which most of what is largest is, and weighs most: what one bin has
// together is guessed badly. s.range: at most so deep. Returns what is not counted: this, and what
// is less.
__device__ __forceinline__ float rule(float of_thread, Shared& s) {
    const float deepest = s.range;
    const float least_of_thread = of_thread > -kInfinity ? of_thread : kInfinity;
    const uint64_t ends = block_reduce(
        static_cast<uint64_t>(__float_as_uint(of_thread)) << 32 | __float_as_uint(least_of_thread),
        s.mass_slots, [](uint64_t a, uint64_t b) {
            const float most = fmaxf(upper_of(a), upper_of(b));
            const float least = fminf(lower_of(a), lower_of(b));
            return static_cast<uint64_t>(__float_as_uint(most)) << 32 | __float_as_uint(least);
        });
    const float largest = upper_of(ends);
    const float range = fminf(3.0f * (largest - lower_of(ends)), deepest);
    const float ruled = range * 1.25f;
    const Ruler ruler = ruler_of(largest + ruled / 5.0f, ruled);
    if (threadIdx.x == 0) {
        s.range = largest > -kInfinity ? range : deepest;
        s.ruler = ruler;
    }
    __syncthreads();
    return from_key(key_of(ruler.top - ruled) - 1);
}

// The largest key of (low, high] of which is_so is true, as of all below it; `low` where it is of
// none. By a warp: each lane asks of one of 32 keys.
template <typename IsSo>
__device__ __forceinline__ uint32_t last_of_warp(uint32_t low, uint32_t high, const IsSo& is_so) {
    const uint32_t lane_idx = threadIdx.x % 32;
#pragma unroll 1
    while (low < high) {
        const uint32_t span = high - low, step = span / 32 + 1;
        const uint32_t key = low + min(span, (lane_idx + 1) * step);
        const uint32_t num = __popc(__ballot_sync(kAllLanes, is_so(from_key(key))));
        high = num == 32 ? high : low + min(span, (num + 1) * step) - 1;
        low += min(span, num * step);
    }
    return high;
}

// As last_before.
__device__ __forceinline__ uint32_t last_before_of_warp(const Ruler& ruler, int bin, uint32_t low,
                                                        uint32_t high) {
    return bin > 0 ? last_of_warp(low, high, [&](float z) { return ruler.bin_of(z) >= bin; })
                   : high;
}

// As floor_of.
__device__ __forceinline__ float floor_of_warp(const Weigher& weigher, float min_p) {
    uint32_t low = key_of(-kInfinity);
    if (min_p > 0.0f) {
        const float least = static_cast<float>(log2(static_cast<double>(fminf(min_p, 1.0f))));
        low = last_of_warp(low, key_of(weigher.largest),
                           [&](float z) { return weigher.depth(z) < least; });
    }
    return from_key(low);
}

// What a thread's neighbouring bins have, and all before them.
struct OwnBins {
    static constexpr int kNum = kNumBins / kNumThreads;
    uint64_t amounts[kNum];  // masses, or counts
    uint64_t amount = 0, amount_before, of_all;
    uint32_t counts[kNum];
    uint32_t count = 0, count_before;

    static __device__ __forceinline__ int first() { return threadIdx.x * kNum; }
    __device__ __forceinline__ bool has_count(uint32_t place) const {
        return count_before <= place && place - count_before < count;
    }
};

// Between the middles of two bins of equal steps of values, nearly.
__device__ __forceinline__ float step_of(const Ruler& ruler) {
    return __fdividef(1.0f, ruler.inverse * (kNumBins - 1));
}

// is_guess: what the counts say that is above `from` weighs, all of a bin as what is nearest to its
// middle in bf16, if the row's values are: some bins have one of them.
__device__ __forceinline__ OwnBins sum_own(const Bins& bins, const Weigher& weigher, float from,
                                           bool is_guess, bool is_mass, bool is_bf16, Shared& s) {
    const Ruler ruler = s.ruler;
    OwnBins own;
#pragma unroll
    for (int i = 0; i < own.kNum; i += 2) {
        const uint2 counts = *reinterpret_cast<const uint2*>(&bins.counts[own.first() + i]);
        own.counts[i] = counts.x;
        own.counts[i + 1] = counts.y;
    }
    if (!is_mass) {
#pragma unroll
        for (int i = 0; i < own.kNum; ++i) {
            own.amounts[i] = own.counts[i];
        }
    } else if (is_guess) {
        const float step = step_of(ruler);
#pragma unroll
        for (int i = 0; i < own.kNum; ++i) {
            const int bin = own.first() + i;
            float middle = fmaf(static_cast<float>(-bin), step, ruler.top);
            if (is_bf16) {
                middle = to_float(from_float<__nv_bfloat16>(middle));
            }
            const float depth = weigher.clamped_depth(fminf(middle, weigher.largest));
            const float mass = exp2_approx(depth + kMassBits) * static_cast<float>(own.counts[i]);
            own.amounts[i] = middle > from ? static_cast<uint64_t>(mass) : 0;
            if (bin == 0 && own.counts[i] > 0) {
                own.amounts[i] = max(own.amounts[i], uint64_t{1} << kMassBits);  // the largest's
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < own.kNum; ++i) {
            own.amounts[i] = bins.mass(own.first() + i);
        }
    }
#pragma unroll
    for (int i = 0; i < own.kNum; ++i) {
        own.amount += own.amounts[i];
        own.count += own.counts[i];
    }
    const int lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32;
    const uint64_t amount_until = warp_scan(own.amount, lane_idx);
    const uint32_t count_until = warp_scan(own.count, lane_idx);
    if (lane_idx == 31) {
        s.mass_slots[warp_idx] = amount_until;
        s.count_slots[warp_idx] = count_until;
    }
    __syncthreads();
    const int slot = lane_idx % kNumWarps;
    const auto sum = [](auto a, auto b) { return a + b; };
    const uint64_t amount = s.mass_slots[slot];
    own.of_all = warp_reduce<kNumWarps>(amount, sum);
    own.amount_before =
        warp_reduce<kNumWarps>(slot < warp_idx ? amount : 0, sum) + amount_until - own.amount;
    const uint32_t count = slot < warp_idx ? s.count_slots[slot] : 0;
    own.count_before = warp_reduce<kNumWarps>(count, sum) + count_until - own.count;
    return own;
}

// One of a thread's bins, with what all before it have.
struct OwnBin {
    int bin;
    uint64_t amount, amount_before;
    uint32_t count, count_before;

    __device__ __forceinline__ explicit OwnBin(const OwnBins& own)
        : bin(own.first()),
          amount(own.amounts[0]),
          amount_before(own.amount_before),
          count(own.counts[0]),
          count_before(own.count_before) {}

    // The first for which is_it(this) is true; the last where none is.
    template <typename IsIt>
    __device__ __forceinline__ void find(const OwnBins& own, const IsIt& is_it) {
#pragma unroll
        for (int i = 1; i < own.kNum; ++i) {
            if (!is_it(*this)) {
                bin = own.first() + i;
                amount_before += amount;
                count_before += count;
                amount = own.amounts[i];
                count = own.counts[i];
            }
        }
    }
};

// A value that about `place` values are above, if those of its bin are alike, and the key of it;
// what bins have above it.
struct Cut {
    uint32_t key;
    uint64_t above;
};

// By the thread that has the bin of it.
__device__ __forceinline__ Cut cut_at(const Ruler& ruler, const OwnBins& own, uint32_t place) {
    OwnBin at(own);
    at.find(own, [&](const OwnBin& each) { return place - each.count_before < each.count; });
    const float part =
        __fdividef(static_cast<float>(place - at.count_before), static_cast<float>(at.count));
    const float along = static_cast<float>(at.bin) + (part - 0.5f);
    return {key_of(fmaf(-along, step_of(ruler), ruler.top)),
            at.amount_before + static_cast<uint64_t>(part * static_cast<float>(at.amount))};
}

// Makes the window that of the bin in which the bins together meet s.wanted of counts or masses, if
// one does. Where they hold counts of the first pass masses are guessed by them, and what is wanted
// by top_p where it is 0; then some values around the guess are in the window too, whose ends need
// not be those of bins: the pass that follows weighs what is above it. By all threads, and seen by
// all behind the next barrier.
__device__ __forceinline__ void find_window(const Bins& bins, const Weigher& weigher, float from,
                                            bool is_guess, float top_p, bool is_bf16, Shared& s) {
    constexpr uint32_t kAround = 24;  // guesses are wrong by two or three
    Search& search = s.search;
    const bool is_mass = search.is_mass, is_guessed = is_mass && is_guess;
    const Ruler ruler = s.ruler;
    if (threadIdx.x == 0) {
        s.bin = -1;
    }
    const OwnBins own = sum_own(bins, weigher, from, is_guess, is_mass, is_bf16, s);
    const uint64_t target = s.wanted > 0 ? s.wanted : mass_needed(top_p, own.of_all);
    if (own.amount_before < target && target - own.amount_before <= own.amount) {
        OwnBin it(own);
        it.find(own,
                [&](const OwnBin& each) { return target - each.amount_before <= each.amount; });
        const uint32_t before = it.count_before, count = it.count;
        const float share = __fdividef(static_cast<float>(target - it.amount_before),
                                       static_cast<float>(it.amount));
        const uint32_t place = before + static_cast<uint32_t>(share * static_cast<float>(count));
        const bool is_small = count + 2 * kAround <= kNumCandidates;
        const uint32_t begin = place - min(place, 2 * kAround);
        s.bin = it.bin;
        s.place = is_small ? min(before, begin + kAround) : begin;
        s.room = (is_small ? max(before + count, place + kAround) : place + 2 * kAround) - s.place;
        s.above_window = is_guessed ? 0 : it.amount_before;
        search.collects = is_guessed || count <= kNumCandidates;
        if (is_guessed) {
            search.from = search.low;
            search.to = search.high;
        }
    }
    __syncthreads();
    const int bin = s.bin, warp_idx = threadIdx.x / 32;
    if (bin < 0) {
        return;
    }
    if (is_guessed) {
        const uint32_t begin = s.place, end = begin + s.room;
        if (begin > 0 && own.has_count(begin)) {
            const Cut cut = cut_at(ruler, own, begin);
            search.to = max(search.low + 1, min(search.high, cut.key));
            s.above_window = cut.above;
        }
        if (own.has_count(end)) {
            search.from = max(search.low, cut_at(ruler, own, end).key);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            search.from = min(search.from, search.to - 1);
        }
    } else if (warp_idx == 0) {
        const uint32_t to = last_before_of_warp(ruler, bin, search.low, search.high);
        if (threadIdx.x == 0) {
            search.to = to;
            search.above += s.above_window;
        }
    } else if (warp_idx == 1) {
        const uint32_t after = bin == kNumBins - 1
                                   ? search.low
                                   : last_before_of_warp(ruler, bin + 1, search.low, search.high);
        if (threadIdx.x == 32) {
            search.from = after;
        }
    }
}

}  // namespace kernel_hub::sampling::sm90
