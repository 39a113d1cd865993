// Few rows of a beside 16 of b: what the bodies that read b once have in common.
#pragma once

#include <stdint.h>

namespace kernel_hub::matmul {

// Zeroes the places of rows that a does not have, of this lane's in a ring of stages.
template <typename C>
__device__ __forceinline__ void zero_missing_rows(uint4* ring, int lane_idx, int m) {
    constexpr int kSlot = C::kVectors * 32;
#pragma unroll
    for (int i = 0; i < C::kColumnTiles * C::kSlices; ++i) {
        if (i / C::kSlices * 8 + lane_idx / 4 >= m) {
            for (int stage = 0; stage < C::kStages; ++stage) {
                ring[stage * kSlot + (C::kWeights + i) * 32] = make_uint4(0, 0, 0, 0);
            }
        }
    }
}

}  // namespace kernel_hub::matmul
