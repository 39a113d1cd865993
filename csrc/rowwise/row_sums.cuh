// A row's sum and its sum of squares in one go, by the tensor cores: 8 elements of a thread an
// instruction, where unpacking and adding takes 40.
#pragma once

#include "kernel_hub/mma.cuh"
#include "kernel_hub/reduce.cuh"
#include "rowwise/row_vecs.cuh"

namespace kernel_hub::rowwise {

struct TwoSums {
    float values, squares;
};

// Of the vectors of a whole warp, in every lane. With A of 16 x 16 elements, a vector of each lane:
// A times ones has the sums of its rows in each column, and the diagonals of A times the transposes
// of its halves are the squares of its rows.
// kBoth: without it `values` is 0.
template <bool kBoth, typename T, int kVecs>
__device__ __forceinline__ TwoSums warp_sums(const RowVecs<T, kVecs>& row) {
    const uint32_t ones = pack2<T>(1.0f, 1.0f);
    float sums[4] = {}, upper[4] = {}, lower[4] = {};
#pragma unroll
    for (const uint4& bits : row.bits) {
        const uint32_t a[4] = {bits.x, bits.y, bits.z, bits.w};
        if constexpr (kBoth) {
            mma_m16n8k16<T>(sums, a, ones, ones);
        }
        mma_m16n8k16<T>(upper, a, a[0], a[2]);
        mma_m16n8k16<T>(lower, a, a[1], a[3]);
    }
    const int lane_idx = threadIdx.x % kWarpSize;
    const int from_diagonal = lane_idx / 4 - 2 * (lane_idx % 4);
    float squares = 0.0f;
    if (from_diagonal == 0) {
        squares = upper[0] + lower[2];
    } else if (from_diagonal == 1) {
        squares = upper[1] + lower[3];
    }
    float values = sums[0] + sums[2];
    if constexpr (kBoth) {
#pragma unroll
        for (int mask = 4; mask < kWarpSize; mask *= 2) {
            values += __shfl_xor_sync(0xffffffffu, values, mask);
        }
    }
    return {values, group_sum(squares, kWarpSize)};
}

// Of rows of whole warps, in every thread of a row; as row_sum.
template <bool kBoth, typename T, int kVecs>
__device__ __forceinline__ TwoSums row_sums(const RowVecs<T, kVecs>& row,
                                            TwoSums (&slots)[kMaxWarps]) {
    TwoSums found = warp_sums<kBoth>(row);
    const int row_warps = blockDim.x / kWarpSize;
    if (row_warps == 1) {
        return found;
    }
    const int lane_idx = threadIdx.x % kWarpSize, first_slot = threadIdx.y * row_warps;
    if (lane_idx == 0) {
        slots[first_slot + threadIdx.x / kWarpSize] = found;
    }
    __syncthreads();
    const int width = row_warps <= 8 ? 8 : kWarpSize, slot = lane_idx % width;
    found = slot < row_warps ? slots[first_slot + slot] : TwoSums{0.0f, 0.0f};
    return {kBoth ? group_sum(found.values, width) : 0.0f, group_sum(found.squares, width)};
}

}  // namespace kernel_hub::rowwise
