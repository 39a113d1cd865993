// Rows that several blocks share: each leaves its candidates, the one that ends last has them all.
#pragma once

#include "sampling/search.cuh"

namespace kernel_hub::sampling {

// What a block leaves of its part of a row.
struct Part {
    float largest, bound;
    int index;  // of the largest
    int num_candidates;
    float values[kNumCandidates];
    int indices[kNumCandidates];
};

// Elements of a part: whole lines.
__device__ __forceinline__ int elements_a_part(int size) {
    constexpr int kTogether = 64;
    const int num = gridDim.y * kTogether;
    return (size + num - 1) / num * kTogether;
}

// Leaves the block's largest and the candidates that scan found above `bound`; whether the other
// blocks of the row have left theirs.
__device__ __forceinline__ bool leave_part(const SampleParams& p, const Largest& top, float bound,
                                           Shared& s) {
    Part& part = static_cast<Part*>(p.parts)[blockIdx.x * gridDim.y + blockIdx.y];
    const int num = s.num_candidates;
    if (threadIdx.x == 0) {
        part.largest = top.of_row;
        part.bound = bound;
        part.index = top.index;
        part.num_candidates = num;
    }
    if (static_cast<int>(threadIdx.x) < min(num, kNumCandidates)) {
        part.values[threadIdx.x] = s.values[threadIdx.x];
        part.indices[threadIdx.x] = s.indices[threadIdx.x];
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        s.is_done = atomicAdd(p.state + blockIdx.x, 1) == static_cast<int>(gridDim.y) - 1;
        if (s.is_done) {
            p.state[blockIdx.x] = 0;
            s.num_candidates = 0;
        }
        __threadfence();
    }
    __syncthreads();
    return s.is_done;
}

// The largest of all parts.
__device__ __forceinline__ Largest largest_of_parts(const Part* parts) {
    Largest top = {-kInfinity, 0, 0.0f};
    for (int i = 0; i < static_cast<int>(gridDim.y); ++i) {
        const float largest = __ldcg(&parts[i].largest);
        if (largest > top.of_row) {
            top.of_row = largest;
            top.index = __ldcg(&parts[i].index);
        }
    }
    return top;
}

// Candidates of all parts become the block's. What is above every bound is more than enough; where
// one part has too many, so has the row.
__device__ __forceinline__ void gather_parts(const Part* parts, float floor, Shared& s) {
    const int thread_idx = threadIdx.x;
    float bound = floor;
    bool is_full = false;
    for (int i = 0; i < static_cast<int>(gridDim.y); ++i) {
        bound = fmaxf(bound, __ldcg(&parts[i].bound));
        is_full |= __ldcg(&parts[i].num_candidates) > kNumCandidates;
    }
    for (int i = 0; i < static_cast<int>(gridDim.y); ++i) {
        const bool is_any = thread_idx < __ldcg(&parts[i].num_candidates) && !is_full;
        const float value = is_any ? __ldcg(&parts[i].values[thread_idx]) : -kInfinity;
        if (value > bound) {
            const int place = atomicAdd(&s.num_candidates, 1);
            if (place < kNumCandidates) {
                s.values[place] = value;
                s.indices[place] = __ldcg(&parts[i].indices[thread_idx]);
            }
        }
    }
    __syncthreads();
    if (is_full && thread_idx == 0) {
        s.num_candidates = kNumCandidates + 1;
    }
    __syncthreads();
}

}  // namespace kernel_hub::sampling
