// flash_attention_split_sm90.cu: the order of sequences of lengths that the device has.
#pragma once

#include "attention/sm90/plan.cuh"

namespace kernel_hub::attention::sm90 {

// How many sequences have longer parts, of so many blocks of keys, or as long ones and come before;
// is_alike: of this one's thread, where all may be as long. Every thread of the block.
__device__ __forceinline__ int find_rank(const Parameters& p, Line& line, int blocks,
                                         bool is_alike) {
    constexpr int kAtOnce = 16;
    const int own = threadIdx.x;
    // No two are the same, so that one comparison does.
    const int value = min(blocks, (1 << 23) - 1) << 8 | (Line::kMost - 1 - own);
    if (own < Line::kMost) {
        line.begin[own] = own < p.batch_size ? value : -1;
    }
    if (__syncthreads_count(own < p.batch_size && !is_alike) == 0) {
        return own;
    }
    int rank = 0;
    if (own < p.batch_size) {
#pragma unroll 1
        for (int first = 0; first < p.batch_size; first += kAtOnce) {
#pragma unroll
            for (int i = 0; i < kAtOnce; i += 4) {
                const int4 four = *reinterpret_cast<const int4*>(line.begin + first + i);
                rank += (four.x > value) + (four.y > value) + (four.z > value) + (four.w > value);
            }
        }
    }
    __syncthreads();
    return rank;
}

}  // namespace kernel_hub::attention::sm90
