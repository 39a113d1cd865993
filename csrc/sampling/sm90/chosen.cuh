// Candidates of a row, some a thread: what is above each, which of them are kept, the draw.
#pragma once

#include "sampling/search.cuh"
#include "sampling/top.cuh"

namespace kernel_hub::sampling::sm90 {

struct Chosen {
    static constexpr int kNum = kNumCandidates / kNumThreads;
    float values[kNum];
    int indices[kNum];
    uint64_t masses[kNum];
    Above above[kNum];  // of the candidates
    bool are_kept[kNum];

    // Threads that share the thread's candidate, where these are few: 1 << shift.
    int split, shift;

    // Which candidate of the row the thread's i-th is.
    __device__ __forceinline__ int place(int i) const {
        return i == 0       ? threadIdx.x >> shift
               : split == 1 ? threadIdx.x + i * kNumThreads
                            : kNumCandidates;
    }

    // Of those that share a candidate, one counts it.
    __device__ __forceinline__ bool counts(int i) const {
        return are_kept[i] && (threadIdx.x & (split - 1)) == 0;
    }

    // Calls visit(value, index, mass) of the candidates, each by one of those that share one.
    template <typename Visit>
    __device__ __forceinline__ void all(const Shared& s, const Visit& visit) const {
#pragma unroll 1
        for (int i = (threadIdx.x & (split - 1)) * 4; i < s.num_candidates; i += 4 * split) {
            const float4 value = *reinterpret_cast<const float4*>(s.values + i);
            const int4 index = *reinterpret_cast<const int4*>(s.indices + i);
            const ulonglong2 low = *reinterpret_cast<const ulonglong2*>(s.masses + i);
            const ulonglong2 high = *reinterpret_cast<const ulonglong2*>(s.masses + i + 2);
            visit(value.x, index.x, low.x);
            visit(value.y, index.y, low.y);
            visit(value.z, index.z, high.x);
            visit(value.w, index.w, high.y);
        }
    }

    // The sum over those that share a candidate. By whole warps.
    template <typename V>
    __device__ __forceinline__ V joined(V value) const {
        for (int mask = 1; mask < split; mask *= 2) {
            value += __shfl_xor_sync(kAllLanes, value, mask);
        }
        return value;
    }

    // Of as many as there is room for. All are kept so far.
    __device__ __forceinline__ void compare(const Weigher& weigher, Shared& s) {
        const int num = s.num_candidates;
        const int padded = min(kNumCandidates, (num + 3) / 4 * 4);
        shift = num <= kNumThreads / 4 ? 2 : num <= kNumThreads / 2 ? 1 : 0;
        split = 1 << shift;
#pragma unroll
        for (int i = 0; i < kNum; ++i) {
            are_kept[i] = place(i) < num;
            values[i] = are_kept[i] ? s.values[place(i)] : -kInfinity;
            indices[i] = are_kept[i] ? s.indices[place(i)] : 0;
            masses[i] = are_kept[i] ? weigher.mass(values[i]) : 0;
            above[i] = {0, 0};
            if (place(i) < padded) {
                s.masses[place(i)] = masses[i];
                if (!are_kept[i]) {
                    s.values[place(i)] = values[i];
                    s.indices[place(i)] = indices[i];
                }
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kNum; ++i) {
            if (are_kept[i]) {
                all(s, [&](float value, int, uint64_t mass) {
                    above[i].count += value > values[i];
                    above[i].mass += value > values[i] ? mass : 0;
                });
            }
            __syncwarp();
            above[i] = {joined(above[i].count), joined(above[i].mass)};
        }
    }

    // Keeps those for which keeps(above) is true.
    template <typename Keeps>
    __device__ __forceinline__ void keep(const Keeps& keeps) {
#pragma unroll
        for (int i = 0; i < kNum; ++i) {
            are_kept[i] = are_kept[i] && keeps(above[i]);
        }
    }

    // What those weigh that are kept.
    __device__ __forceinline__ uint64_t kept_mass(Shared& s) const {
        uint64_t mass = 0;
#pragma unroll
        for (int i = 0; i < kNum; ++i) {
            mass += counts(i) ? masses[i] : 0;
        }
        return block_sum(mass, s.mass_slots);
    }

    // The end of a search among candidates: the key below the smallest that is kept.
    __device__ __forceinline__ uint32_t end_search(const Search& search, Shared& s) const {
        uint32_t least = search.to + 1;
#pragma unroll
        for (int i = 0; i < kNum; ++i) {
            if (are_kept[i] && !is_met(search, above[i])) {
                least = min(least, key_of(values[i]));
            }
        }
        return block_reduce(least, s.count_slots,
                            [](uint32_t a, uint32_t b) { return min(a, b); }) -
               1;
    }

    // Keeps what is above `from`; calls dropped(index, mass) of the others.
    template <typename Dropped>
    __device__ __forceinline__ void keep_above(float from, const Dropped& dropped) {
#pragma unroll
        for (int i = 0; i < kNum; ++i) {
            if (counts(i) && !(values[i] > from)) {
                dropped(indices[i], masses[i]);
            }
            are_kept[i] = are_kept[i] && values[i] > from;
        }
    }

    // Draws from those that are kept, which weigh `total`, in the order of their indices.
    __device__ __forceinline__ void draw(const SampleParams& p, const Weigher& weigher,
                                         uint64_t total, uint64_t bits, Shared& s) const {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kNum; ++i) {
            if (place(i) < s.num_candidates && !are_kept[i]) {
                s.masses[place(i)] = 0;
            }
        }
        __syncthreads();
        const uint64_t drawn = below(total, bits);
#pragma unroll
        for (int i = 0; i < kNum; ++i) {
            uint64_t before = 0;
            if (are_kept[i]) {
                all(s, [&](float, int index, uint64_t mass) {
                    before += index < indices[i] ? mass : 0;
                });
            }
            __syncwarp();
            before = joined(before);
            if (counts(i)) {
                if (before <= drawn && drawn - before < masses[i]) {
                    write_drawn(p, indices[i], weigher.depth(values[i]), total);
                }
            }
        }
    }

    // The most probable: all that is kept, or at least as many as are wanted.
    __device__ __forceinline__ void write_top(const SampleParams& p, const Weigher& weigher,
                                              uint64_t total, const Shared& s) const {
        int num = 0;
#pragma unroll
        for (int i = 0; i < kNum; ++i) {
            num += __syncthreads_count(counts(i));
        }
        num = min(wanted_top(p), num);
#pragma unroll
        for (int i = 0; i < kNum; ++i) {
            int rank = 0;
            if (are_kept[i] && num > 0) {
                all(s, [&](float value, int index, uint64_t) {
                    rank += value == values[i] && index < indices[i];
                });
            }
            __syncwarp();
            rank = joined(rank) + static_cast<int>(above[i].count);
            if (counts(i) && rank < num) {
                sampling::write_top(p, rank, indices[i],
                                    log_of_drawn(weigher.depth(values[i]), total));
            }
        }
        end_top(p, num);
    }
};

}  // namespace kernel_hub::sampling::sm90
