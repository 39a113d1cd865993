// Many products out = a b^T in one launch with mma.sync: the body of grouped_linear.cu and
// batched_matmul.cu.
//
// A block of 4 warps, 2 x 2, computes a kBlockM x 128 tile. Shared memory: a ring of kStages x
// (kBlockM rows of a, 128 rows of b), 32 elements of k each; two rows share 128 bytes, and their
// 16-byte chunks are swapped by the pair's index, so that ldmatrix meets no bank twice. The sums
// leave through the same memory as fp32, 32 rows a warp at a time.
#pragma once

#include "kernel_hub/grouped_out.cuh"
#include "kernel_hub/grouped_walk.cuh"
#include "kernel_hub/mma.cuh"

namespace kernel_hub {

constexpr int kThreads = 128;
constexpr int kBlockN = 128;
constexpr int kBlockK = 32;
constexpr int kChunks = kBlockK / 8;  // of 16 bytes, in a row of a stage
constexpr int kRasterGroup = 8;
// NOTE: sm_89 has 99 KiB of shared memory: three stages let two blocks share a multiprocessor.
// kernel_hub/ops/_grouped_plan.py knows these numbers.
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
};

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

// Writes a warp's sums, of which the first is at (row, column) of the product. `sums` is shared
// memory of the warp's own.
template <bool kFinishes, typename T, typename C>
__device__ __forceinline__ void write_sums(const Target<T>& target, float* sums, int row,
                                           int column,
                                           const float (&acc)[C::kTilesM][C::kTilesN][4]) {
    constexpr int kStride = C::kWarpN + 8;  // no two rows of a quarter warp meet in a bank
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < C::kTilesM / 2; ++half) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < C::kTilesN; ++j) {
                float* to = sums + (16 * i + lane / 4) * kStride + 8 * j + 2 * (lane % 4);
                const float (&from)[4] = acc[2 * half + i][j];
                *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
                *reinterpret_cast<float2*>(to + 8 * kStride) = make_float2(from[2], from[3]);
            }
        }
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i < 32 * C::kWarpN / 8; i += 32) {
            const int r = i / (C::kWarpN / 8), chunk = i % (C::kWarpN / 8);
            const int to_row = row + 32 * half + r, to_column = column + 8 * chunk;
            if (to_row >= target.end_row || to_column >= target.columns) {
                continue;
            }
            const float4* from = reinterpret_cast<const float4*>(sums + r * kStride + 8 * chunk);
            const float4 low = from[0], high = from[1];
            float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            write_chunk<kFinishes>(target, to_row, to_column, values);
        }
    }
}

// Computes one tile of a product, of which `a`, `b` and `target` are the beginnings.
template <bool kFinishes, typename T, typename C>
__device__ __forceinline__ void multiply_tile(const Target<T>& target, const T* a, const T* b,
                                              int64_t a_stride, int64_t b_stride, int row,
                                              int column, int k) {
    static_assert(4 * 32 * (C::kWarpN + 8) * 4 <= kStages * C::kStageBytes,
                  "the sums of four warps, 32 rows of each, take the place of the ring");
    const uint32_t ring = shared_address(dynamic_shared());
    const int warp_idx = threadIdx.x / 32;
    const int num_steps = (k + kBlockK - 1) / kBlockK;
    const auto fetch_step = [&](int step, int stage) {
        if (step < num_steps) {
            const int at = step * kBlockK;
            const uint32_t to = ring + stage * C::kStageBytes;
            fetch_rows<C::kBlockM>(to, a + row * a_stride + at, a_stride, target.end_row - row,
                                   k - at);
            fetch_rows<kBlockN>(to + C::kBlockM * kBlockK * 2, b + column * b_stride + at, b_stride,
                                target.columns - column, k - at);
        }
        cp_async_commit();
    };
    float acc[C::kTilesM][C::kTilesN][4] = {};
    const int warp_row = warp_idx / 2 * C::kWarpM, warp_column = warp_idx % 2 * C::kWarpN;
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
    cp_async_wait<0>();
    __syncthreads();
    float* sums = reinterpret_cast<float*>(dynamic_shared()) + warp_idx * 32 * (C::kWarpN + 8);
    write_sums<kFinishes, T, C>(target, sums, row + warp_row, column + warp_column, acc);
}

}  // namespace kernel_hub
