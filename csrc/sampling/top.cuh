// The most probable of what a row keeps, the first of equal ones before the others, with the logs
// of their probabilities. Where fewer are kept than are asked for: -1, of probability 0.
#pragma once

#include "sampling/search.cuh"

namespace kernel_hub::sampling {

// How many the row asks for.
__device__ __forceinline__ int wanted_top(const SampleParams& p) {
    if (p.top_ids == nullptr) {
        return 0;
    }
    return p.top_n ? max(0, min(p.top_n[p.row_idx], p.most_top)) : p.most_top;
}

__device__ __forceinline__ void write_top(const SampleParams& p, int place, int index,
                                          float logprob) {
    const int64_t at = static_cast<int64_t>(p.row_idx) * p.most_top + place;
    p.top_ids[at] = index;
    p.top_logprobs[at] = logprob;
}

__device__ __forceinline__ void end_top(const SampleParams& p, int num) {
    const int most = p.top_ids == nullptr ? 0 : p.most_top;
    for (int place = num + threadIdx.x; place < most; place += kNumThreads) {
        write_top(p, place, -1, -kInfinity);
    }
}

// A greedy row's token, alone.
__device__ __forceinline__ void write_largest(const SampleParams& p, int index) {
    if (threadIdx.x == 0) {
        p.out[p.row_idx] = index;
        if (p.logprob) {
            p.logprob[p.row_idx] = 0.0f;
        }
        if (wanted_top(p) > 0) {
            write_top(p, 0, index, 0.0f);
        }
    }
    end_top(p, min(wanted_top(p), 1));
}

// Among candidates, all that is kept, or at least as many as are wanted.
__device__ __forceinline__ void write_top_candidates(const SampleParams& p, const Weigher& weigher,
                                                     const Candidate& mine, bool is_kept,
                                                     uint64_t total, const Shared& s) {
    const int num = min(wanted_top(p), __syncthreads_count(is_kept));
    if (is_kept && mine.above.count < static_cast<uint32_t>(num)) {
        int place = mine.above.count;
#pragma unroll 2
        for (int i = 0; i < s.num_candidates; ++i) {
            place += s.values[i] == mine.value && s.indices[i] < mine.index;
        }
        if (place < num) {
            write_top(p, place, mine.index, log_of_drawn(weigher.depth(mine.value), total));
        }
    }
    end_top(p, num);
}

// A pass for each: where so many are equal that they are too many to be compared.
__device__ __forceinline__ void write_top_in_turn(const Row& row, const Weigher& weigher,
                                                  float bound, uint64_t total, Shared& s) {
    const int wanted = wanted_top(row.p);
    uint64_t last = ~0ull;  // a value's key, then its index: the smaller, the later
    int place = 0;
#pragma unroll 1
    for (; place < wanted; ++place) {
        uint64_t best = 0;
#pragma unroll 1
        for (int i = threadIdx.x; i < row.p.size; i += kNumThreads) {
            const float value = row.value(i);
            const uint64_t key = static_cast<uint64_t>(key_of(value)) << 32 |
                                 (0xffffffffu - static_cast<uint32_t>(i));
            if (value > bound && key < last) {
                best = max(best, key);
            }
        }
        last = block_reduce(best, s.mass_slots, [](uint64_t a, uint64_t b) { return max(a, b); });
        if (last == 0) {
            break;
        }
        if (threadIdx.x == 0) {
            const float value = from_key(static_cast<uint32_t>(last >> 32));
            write_top(row.p, place, static_cast<int>(0xffffffffu - static_cast<uint32_t>(last)),
                      log_of_drawn(weigher.depth(value), total));
        }
    }
    end_top(row.p, place);
}

}  // namespace kernel_hub::sampling
