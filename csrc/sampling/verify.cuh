// What verifying drafts needs of a position, whether they follow one another or branch.
#pragma once

#include "kernel_hub/bounds.cuh"
#include "sampling/search.cuh"

namespace kernel_hub::sampling {

enum DraftsOutside : int {
    kDraftsOutside = 1 << 11,  // draft_ids; beside those of kernel_hub/bounds.cuh
};

constexpr int kFixBits = 56;  // in which p and q are compared
constexpr double kFixOne = 1ll << kFixBits;

// q of an id as a whole number of 2^-kFixBits.
__device__ __forceinline__ int64_t fixed_draft(float given) {
    const float q = fminf(fmaxf(given, 0.0f), 1.0f);
    return __double2ll_rn(__dmul_rn(static_cast<double>(q), kFixOne));
}

// The logits of a block's position; a position is a row of them.
__device__ __forceinline__ SampleParams position_params(
    int* state, int64_t* tokens, const void* logits, const float* temperature, const int64_t* seed,
    const int64_t* offset, int64_t logits_stride, int size, int dtype, int is_plain) {
    SampleParams p = {};
    p.state = state;
    p.out = tokens;
    p.logits = logits;
    p.temperature = temperature;
    p.seed = seed;
    p.offset = offset;
    p.logits_stride = logits_stride;
    p.size = size;
    p.dtype = dtype;
    p.is_plain = is_plain;
    p.row_idx = blockIdx.x;
    return p;
}

// Weighs all ids of a position, and their sum; false: the largest was drawn.
__device__ __forceinline__ bool weigh_position(const Row& row, int row_idx, Weigher& weigher,
                                               uint64_t& total, Shared& s) {
    const SampleParams& p = row.p;
    const float temperature = p.temperature ? p.temperature[row_idx] : 1.0f;
    const Largest top = find_largest(row, 0, p.size, s);
    if (!(temperature > 0.0f) || !(top.of_row > -kInfinity)) {
        if (threadIdx.x == 0) {
            p.out[blockIdx.x] = top.index;
        }
        return false;
    }
    weigher = weigher_of(top.of_row, temperature);
    __syncthreads();
    if (threadIdx.x == 0) {
        s.num_candidates = 0;
        s.question = {-kInfinity, -kInfinity, -kInfinity, true, true};
    }
    __syncthreads();
    scan<false>(row, weigher, 0, p.size, nullptr, s);
    total = s.total;
    return true;
}

}  // namespace kernel_hub::sampling
