// The last step of attention forward: rows to global memory.
#pragma once

#include "attention/forward/problem.cuh"
#include "kernel_hub/ptx.cuh"

namespace kernel_hub::attention::forward {

// The sum over the four lanes that share a row.
__device__ __forceinline__ float quad_sum(float sum) {
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
}

// Writes columns col to col + 7 of a row of out, where they exist.
template <bool kMayBeUnaligned, typename T>
__device__ __forceinline__ void write_columns(const AttentionParams<T>& params, T* out_row, int col,
                                              bool is_row, const uint32_t (&words)[4]) {
    const bool is_inside = is_row && col < params.head_dim_v;
    if (is_inside && (!kMayBeUnaligned || params.is_aligned)) {
        st_global(out_row + col, make_uint4(words[0], words[1], words[2], words[3]));
    }
    if (kMayBeUnaligned && is_inside && !params.is_aligned) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            reinterpret_cast<uint16_t*>(out_row)[col + e] =
                static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16));
        }
    }
}

}  // namespace kernel_hub::attention::forward
