// Few rows of a beside 16 of b: what the bodies that read b once have in common.
#pragma once

#include <stdint.h>

namespace kernel_hub::matmul {

// Whether a launch may begin under the end of the one before, and read weights that are ready.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kOverlapsLaunches = true;
#else
constexpr bool kOverlapsLaunches = false;
#endif

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

// Puts what this lane reads of a into a ring whose weights are on their way. next(): the chunk of k
// of one stage after another, below 0 where there is none left.
// NOTE: by loads: a copy that begins now could not be waited for without the weights of all stages.
template <typename C, typename T, typename Next>
__device__ __forceinline__ void load_first_rows(uint4* ring, const T* a, int64_t a_stride, int m,
                                                int k, int lane_idx, const Next& next) {
    constexpr int kRows = C::kColumnTiles * C::kSlices, kSlot = C::kVectors * 32;
    uint4 values[C::kStages][kRows];
    int chunks[C::kStages];
#pragma unroll
    for (int stage = 0; stage < C::kStages; ++stage) {
        chunks[stage] = next();
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int row = i / C::kSlices * 8 + lane_idx / 4;
            const int64_t column = static_cast<int64_t>(chunks[stage]) * C::kChunk +
                                   i % C::kSlices * C::kSlice + lane_idx % 4 * 8;
            values[stage][i] = make_uint4(0, 0, 0, 0);
            if (row < m && chunks[stage] >= 0 && column < k) {
                values[stage][i] =
                    __ldcg(reinterpret_cast<const uint4*>(a + row * a_stride + column));
            }
        }
    }
#pragma unroll
    for (int stage = 0; stage < C::kStages; ++stage) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            ring[stage * kSlot + (C::kWeights + i) * 32] = values[stage][i];
        }
    }
}

}  // namespace kernel_hub::matmul
