// A histogram of values in shared memory: how many there are in each of its bins, and their mass.
#pragma once

#include "sampling/candidates.cuh"

namespace kernel_hub::sampling {

// Adds to a number of which the words are in shared memory: the carry is told by what was there.
__device__ __forceinline__ void add_mass(uint32_t& low, uint32_t& high, uint64_t mass) {
    const uint32_t word = static_cast<uint32_t>(mass);
    const uint32_t before = atomicAdd(&low, word);
    const uint32_t more =
        static_cast<uint32_t>(mass >> 32) + (static_cast<uint32_t>(before + word) < before);
    if (more > 0) {
        atomicAdd(&high, more);
    }
}

// Counts a value; the least and the most of keys in bins become known.
__device__ __forceinline__ void add_to_bin(Bins& bins, const Ruler& ruler, const Weigher& weigher,
                                           float value, uint32_t& least, uint32_t& most) {
    const int bin = ruler.bin_of(value);
    const uint32_t key = key_of(value);
    atomicAdd(&bins.counts[bin], 1u);
    add_mass(bins.low[bin], bins.high[bin], weigher.mass(value));
    if (key < least) {
        atomicMin(&least, key);
    }
    if (key > most) {
        atomicMax(&most, key);
    }
}

// All threads, nothing but the counts where masses are not asked for.
__device__ __forceinline__ void empty_bins(Bins& bins, bool has_masses) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kNumBins; i += kNumThreads) {
        bins.counts[i] = 0;
        if (has_masses) {
            bins.low[i] = bins.high[i] = 0;
        }
    }
}

// Steps of what is at most `range` below `top`, the last bin's also of what is further below.
__device__ __forceinline__ Ruler ruler_of(float top, float range) {
    return {fminf(top, FLT_MAX), fminf(fmaxf(__fdiv_rn(1.0f, range), FLT_MIN), FLT_MAX), 0, 0,
            false};
}

// Of the window of a search: equal steps of values, later of keys, of which three are certain to
// end.
constexpr int kByValues = 2;
__device__ __forceinline__ Ruler ruler_of(const Search& search, const Weigher& weigher,
                                          float range) {
    const float top = fminf(from_key(search.to), FLT_MAX);
    if (search.round < kByValues) {
        const float from = from_key(search.from);
        const float most = from > -kInfinity   ? top - from
                           : search.round == 0 ? range
                                               : -weigher.lowest;
        return ruler_of(top, search.is_mass ? fminf(most, -weigher.lowest) : most);
    }
    const uint32_t last = search.to - search.from - 1;
    return {top, 0.0f, search.to, max(0, 32 - kBinBits - __clz(last)), true};
}

// The largest key of (low, high] that lies in `bin` or a later one; `low` where none does.
__device__ __forceinline__ uint32_t last_before(const Ruler& ruler, int bin, uint32_t low,
                                                uint32_t high) {
#pragma unroll 1
    while (bin > 0 && low < high) {
        const uint32_t middle = high - (high - low) / 2;
        if (ruler.bin_of(from_key(middle)) >= bin) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return high;
}

// What the bins weigh together, or how many there are. By all threads.
__device__ __forceinline__ uint64_t sum_of_bins(const Bins& bins, bool is_mass, Shared& s) {
    uint64_t sum = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < kNumBins; i += kNumThreads) {
        sum += is_mass ? bins.mass(i) : bins.counts[i];
    }
    return block_sum(sum, s.mass_slots);
}

// Makes the window that of the bin in which the bins together meet the target, and of as many
// around it as there is room for, if one does. By all threads.
__device__ __forceinline__ void find_window(const Bins& bins, Shared& s) {
    constexpr int kEach = kNumBins / kNumThreads;
    Search& search = s.search;
    const bool is_mass = search.is_mass;
    const uint64_t target = s.wanted;
    const Ruler ruler = s.ruler;
    const int first = threadIdx.x * kEach;
    const auto amount = [&](int i) { return is_mass ? bins.mass(i) : bins.counts[i]; };
    uint64_t own = 0, num = 0;
#pragma unroll 1
    for (int i = first; i < first + kEach; ++i) {
        own += amount(i);
        num += bins.counts[i];
    }
    const uint64_t before = block_sum_before(own, s.mass_slots);
    const uint32_t num_before = static_cast<uint32_t>(block_sum_before(num, s.mass_slots));
    if (threadIdx.x == 0) {
        s.bin = -1;
    }
    __syncthreads();
    if (before < target && target - before <= own) {
        uint64_t sum = before;
        uint32_t place = num_before;
        int i = first;
#pragma unroll 1
        for (; target - sum > amount(i); ++i) {
            sum += amount(i);
            place += bins.counts[i];
        }
        const uint32_t count = bins.counts[i];
        // Where it is if the bin's values are alike; half of the room on either side.
        const int room = min(kNumCandidates, max(kGuessed, static_cast<int>(count)));
        const float share = static_cast<float>(target - sum) / static_cast<float>(amount(i));
        const int middle = place + static_cast<int>(share * static_cast<float>(count));
        const int last = place, least = last + min(0, static_cast<int>(count) - room);
        s.bin = i;
        s.place = max(0, min(last, max(least, middle - room / 2)));
        s.room = room;
        s.first_bin = i;
        s.last_bin = max(i, kNumBins - 2);
        search.collects = count <= kNumCandidates;
    }
    __syncthreads();
    const int bin = s.bin;
    if (bin < 0) {
        return;
    }
    const uint32_t from = s.place, to = from + s.room;
    if (num_before <= to && from < num_before + num) {
        uint64_t sum = before;
        uint32_t place = num_before;
#pragma unroll 1
        for (int i = first; i < first + kEach; ++i) {
            const uint32_t count = bins.counts[i];
            if (place <= from && from - place < count) {
                s.first_bin = place == from ? i : i + 1;
                s.above_window = place == from ? sum : sum + amount(i);
            }
            if (place <= to && to - place < count) {
                s.last_bin = max(bin, i - 1);
            }
            sum += amount(i);
            place += count;
        }
    }
    __syncthreads();
    // Both from what the row is known to be between.
    if (threadIdx.x == 0) {
        search.to = last_before(ruler, s.first_bin, search.low, search.high);
        search.above += s.above_window;
    } else if (threadIdx.x == 32) {
        search.from = s.last_bin == kNumBins - 1
                          ? search.low
                          : last_before(ruler, s.last_bin + 1, search.low, search.high);
    }
    __syncthreads();
}

}  // namespace kernel_hub::sampling
