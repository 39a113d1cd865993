// Many products out = a b^T in one launch with mma.sync: the body of grouped_linear.cu and
// batched_matmul.cu.
//
// A block of 4 warps, 2 x 2, computes a kBlockM x 128 tile. Shared memory: a ring of kStages x
// (kBlockM rows of a, 128 rows of b), 32 elements of k each; two rows share 128 bytes, and their
// 16-byte chunks are swapped by the pair's index, so that ldmatrix meets no bank twice. The sums
// leave through the same memory as fp32, 32 rows a warp at a time.
#pragma once

#include "matmul/grouped/out.cuh"
#include "matmul/grouped/walk.cuh"
#include "matmul/stages.cuh"

namespace kernel_hub::matmul::grouped {

constexpr int kRasterGroup = 8;

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
    multiply_steps<T, C>(ring, num_steps, warp_row, warp_column, fetch_step, acc);
    cp_async_wait<0>();
    __syncthreads();
    float* sums = reinterpret_cast<float*>(dynamic_shared()) + warp_idx * 32 * (C::kWarpN + 8);
    write_sums<kFinishes, T, C>(target, sums, row + warp_row, column + warp_column, acc);
}

}  // namespace kernel_hub::matmul::grouped
