// A stage of a product with mma.sync: its copies to shared memory, and what a warp multiplies of
// it. 4 warps, 2 x 2, on kBlockM rows of a and 128 rows of b, 32 elements of k. Two rows share 128
// bytes; their 16-byte chunks are swapped by the pair's index, so that ldmatrix meets no bank
// twice.
#pragma once

#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/mma.cuh"

namespace kernel_hub::matmul {

constexpr int kThreads = 128;
constexpr int kBlockN = 128;
constexpr int kBlockK = 32;
constexpr int kChunks = kBlockK / 8;  // of 16 bytes, in a row of a stage
// NOTE: sm_89 has 99 KiB of shared memory: three stages let two blocks share a multiprocessor.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 890
constexpr int kStages = 3;
#else
constexpr int kStages = 4;
#endif

template <int kBlockM_>
struct Tile {
    static constexpr int kBlockM = kBlockM_;
    static constexpr int kWarpM = kBlockM / 2, kWarpN = kBlockN / 2;
    static constexpr int kTilesM = kWarpM / 16, kTilesN = kWarpN / 8;  // of mma, a warp
    static constexpr int kStageBytes = (kBlockM + kBlockN) * kBlockK * 2;
    static constexpr int kSums = 4 * kTilesM * kTilesN;  // a lane
};

template <typename C>
constexpr LaunchFacts facts_of() {
    return {.threads = kThreads,
            .shared_bytes = kStages * C::kStageBytes,
            .blocks_per_sm = 2,
            .block_m = C::kBlockM,
            .block_n = kBlockN,
            .block_k = kBlockK,
            .stages = kStages};
}

// The place of a 16-byte chunk of a row in a stage, in bytes.
__device__ __forceinline__ uint32_t place_of_chunk(int row, int chunk) {
    const int pair = row / 2;
    return (pair * 2 * kChunks + row % 2 * kChunks + (chunk ^ (pair % kChunks))) * 16;
}

// Starts the block's copies of kRows rows of a matrix at `from` (its first row, first column).
template <int kRows, typename T>
__device__ __forceinline__ void fetch_rows(uint32_t target, const T* from, int64_t stride,
                                           int rows_left, int columns_left) {
    const int chunk = threadIdx.x % kChunks;
    constexpr int kRowsAtOnce = kThreads / kChunks;
#pragma unroll
    for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
        const int row = threadIdx.x / kChunks + i * kRowsAtOnce;
        cp_async_16(target + place_of_chunk(row, chunk), from + row * stride + chunk * 8,
                    row < rows_left && chunk * 8 < columns_left);
    }
}

// acc += the products of one stage.
template <typename T, typename C>
__device__ __forceinline__ void multiply_stage(uint32_t stage, int warp_row, int warp_column,
                                               float (&acc)[C::kTilesM][C::kTilesN][4]) {
    const int lane = threadIdx.x % 32;
    const uint32_t b_stage = stage + C::kBlockM * kBlockK * 2;
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {
        uint32_t a[C::kTilesM][4], b[C::kTilesN / 2][4];
#pragma unroll
        for (int i = 0; i < C::kTilesM; ++i) {
            const int row = warp_row + 16 * i + lane % 16;
            ldmatrix_x4(a[i], stage + place_of_chunk(row, 2 * step + lane / 16));
        }
#pragma unroll
        for (int j = 0; j < C::kTilesN / 2; ++j) {
            const int row = warp_column + 16 * j + lane / 16 * 8 + lane % 8;
            ldmatrix_x4(b[j], b_stage + place_of_chunk(row, 2 * step + lane / 8 % 2));
        }
#pragma unroll
        for (int i = 0; i < C::kTilesM; ++i) {
#pragma unroll
            for (int j = 0; j < C::kTilesN; ++j) {
                mma_m16n8k16<T>(acc[i][j], a[i], b[j / 2][2 * (j % 2)], b[j / 2][2 * (j % 2) + 1]);
            }
        }
    }
}

// acc += the products of num_steps stages; fetch_step(step, stage) starts the copies of one, if it
// is one of them.
template <typename T, typename C, typename FetchStep>
__device__ __forceinline__ void multiply_steps(uint32_t ring, int num_steps, int warp_row,
                                               int warp_column, const FetchStep& fetch_step,
                                               float (&acc)[C::kTilesM][C::kTilesN][4]) {
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        fetch_step(i, i);
    }
    int stage = 0;
    for (int step = 0; step < num_steps; ++step) {
        cp_async_wait<kStages - 2>();
        // All warps see this stage, and have left the one that is fetched into next.
        __syncthreads();
        fetch_step(step + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
        multiply_stage<T, C>(ring + stage * C::kStageBytes, warp_row, warp_column, acc);
        stage = stage + 1 == kStages ? 0 : stage + 1;
    }
}

}  // namespace kernel_hub::matmul
