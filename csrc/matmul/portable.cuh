// The body of linear with mma.sync, for every GPU since sm_80.
//
// A block of 4 warps, 2 x 2, computes a kBlockM x 128 tile; blockIdx.x walks tiles in groups of 8
// rows of tiles, so that what is fetched stays in the L2; blockIdx.y is a share of k. The shares of
// a tile are added by the block that ends last, in the order of shares. Shared memory: a ring of
// kStages x (kBlockM rows of a, 128 rows of b), 64 bytes of k each.
#pragma once

#include "kernel_hub/vec.cuh"
#include "matmul/epilogue.cuh"
#include "matmul/stages_fp32.cuh"

namespace kernel_hub::matmul {

template <typename T>
constexpr bool kIsFp32 = std::is_same_v<T, float>;
// Elements of k in a stage.
template <typename T>
constexpr int kStepOf = kIsFp32<T> ? kBlockKFp32 : kBlockK;
constexpr int kGroup = 8;

// Starts the copies of a block's stages. a, b: its first rows; m, n: rows from there on.
template <typename T, typename C>
struct Fetcher {
    const T* a;
    const T* b;
    int64_t a_stride, b_stride;
    int m, n;

    __device__ __forceinline__ Fetcher(const T* a, const T* b, int64_t a_stride, int64_t b_stride,
                                       int m, int n, int)
        : a(a), b(b), a_stride(a_stride), b_stride(b_stride), m(m), n(n) {}

    __device__ __forceinline__ void fetch(uint32_t target, int step, int k) const {
        const int64_t at = static_cast<int64_t>(step) * kBlockK;
        const int columns_left = k - static_cast<int>(at);
        fetch_rows<C::kBlockM>(target, a + at, a_stride, m, columns_left);
        fetch_rows<kBlockN>(target + C::kBlockM * kBlockK * 2, b + at, b_stride, n, columns_left);
    }
};

// The same of fp32, for steps one after the other.
template <typename C>
struct Fetcher<float, C> {
    int64_t a_stride, b_stride;
    bool is_aligned;  // rows begin at multiples of 16 bytes
    RowsFp32<C::kBlockM> a;
    RowsFp32<kBlockN> b;

    __device__ __forceinline__ Fetcher(const float* a, const float* b, int64_t a_stride,
                                       int64_t b_stride, int m, int n, int first_step)
        : a_stride(a_stride),
          b_stride(b_stride),
          is_aligned(((a_stride | b_stride) % 4 | reinterpret_cast<uint64_t>(a) % 16 |
                      reinterpret_cast<uint64_t>(b) % 16) == 0),
          a(a + first_step * kBlockKFp32, a_stride, m, is_aligned),
          b(b + first_step * kBlockKFp32, b_stride, n, is_aligned) {}

    __device__ __forceinline__ void fetch(uint32_t target, int step, int k) {
        const int columns_left = k - step * kBlockKFp32;
        a.fetch(target, a_stride, columns_left, is_aligned);
        b.fetch(target + C::kBlockM * kBlockK * 2, b_stride, columns_left, is_aligned);
    }
};

// Leaves this block's sums in `partials`; in the block that comes last for its tile, acc becomes
// the sum of all shares, and the result is true.
template <typename C>
__device__ __forceinline__ bool merge(float (&acc)[C::kTilesM][C::kTilesN][4], float* partials,
                                      int* ticket, int tile, int num_tiles) {
    __shared__ int is_last;
    const int num_splits = gridDim.y;
    const int64_t share = static_cast<int64_t>(num_tiles) * C::kSums * kThreads;
    float* mine = partials + static_cast<int64_t>(tile) * C::kSums * kThreads + threadIdx.x;
#pragma unroll
    for (int i = 0; i < C::kSums; ++i) {
        mine[blockIdx.y * share + i * kThreads] =
            acc[i / 4 / C::kTilesN][i / 4 % C::kTilesN][i % 4];
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(ticket, 1) == num_splits - 1;
        if (is_last) {
            *ticket = 0;  // for the next launch
        }
    }
    __syncthreads();
    if (!is_last) {
        return false;
    }
    __threadfence();
    for (int split = 0; split < num_splits; ++split) {
#pragma unroll
        for (int i = 0; i < C::kSums; ++i) {
            float& sum = acc[i / 4 / C::kTilesN][i / 4 % C::kTilesN][i % 4];
            sum = mine[split * share + i * kThreads] + (split == 0 ? 0.0f : sum);
        }
    }
    return true;
}

template <typename T, typename Out, typename C>
__device__ __forceinline__ void linear(Out* out, float* partials, int* tickets, const T* a,
                                       const T* b, const T* bias, const Out* residual,
                                       int64_t out_stride, int64_t a_stride, int64_t b_stride,
                                       int64_t residual_stride, int m, int n, int k,
                                       int activation) {
    const uint32_t ring = shared_address(dynamic_shared());
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
    const int rows = (m + C::kBlockM - 1) / C::kBlockM, columns = (n + kBlockN - 1) / kBlockN;
    const int of_group = kGroup * columns, tile = blockIdx.x;
    const int first_row = tile / of_group * kGroup, in_group = tile % of_group;
    const int group_rows = min(kGroup, rows - first_row);
    const int row = (first_row + in_group % group_rows) * C::kBlockM;
    const int column = in_group / group_rows * kBlockN;

    constexpr int kStep = kStepOf<T>;
    const int all_steps = (k + kStep - 1) / kStep;
    const int first_step = static_cast<int64_t>(all_steps) * blockIdx.y / gridDim.y;
    const int last_step = static_cast<int64_t>(all_steps) * (blockIdx.y + 1) / gridDim.y;
    Fetcher<T, C> fetcher(a + row * a_stride, b + column * b_stride, a_stride, b_stride, m - row,
                          n - column, first_step);
    const auto fetch_step = [&](int step, int stage) {
        if (step < last_step) {
            fetcher.fetch(ring + stage * C::kStageBytes, step, k);
        }
        cp_async_commit();
    };

    float acc[C::kTilesM][C::kTilesN][4] = {};
    const int warp_row = warp_idx / 2 * C::kWarpM, warp_column = warp_idx % 2 * C::kWarpN;
#pragma unroll(kIsFp32<T> ? 1 : kStages - 1)
    for (int i = 0; i < kStages - 1; ++i) {
        fetch_step(first_step + i, i);
    }
    int stage = 0;
    for (int step = first_step; step < last_step; ++step) {
        cp_async_wait<kStages - 2>();
        // All warps see this stage, and have left the one that is fetched into next.
        __syncthreads();
        fetch_step(step + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
        if constexpr (kIsFp32<T>) {
            multiply_stage_fp32<C>(ring + stage * C::kStageBytes, warp_row, warp_column, acc);
        } else {
            multiply_stage<T, C>(ring + stage * C::kStageBytes, warp_row, warp_column, acc);
        }
        stage = stage + 1 == kStages ? 0 : stage + 1;
    }

    if (gridDim.y > 1 && !merge<C>(acc, partials, tickets + tile, tile, gridDim.x)) {
        return;
    }
    const Epilogue<T, Out> epilogue(out, kIsFp32<T> ? nullptr : bias, residual, out_stride,
                                    residual_stride, m, n, activation);
    constexpr int kGroups = C::kTilesM * C::kTilesN / 4;  // of two rows of 32 columns
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
        float values[16];
        pick<kGroups>(values, group,
                      [&](int i) { return acc[i / 4 / C::kTilesN][i / 4 % C::kTilesN][i % 4]; });
        const int first = row + warp_row + group / (C::kTilesN / 4) * 16 + lane_idx / 4;
        const int at = column + warp_column + group % (C::kTilesN / 4) * 32;
        if constexpr (kIsFp32<T>) {
            const PlainProducts plain{a, b, bias, a_stride, b_stride, m, n, k};
            plain.redo(first, at, values);
            plain.add_bias(at, values);
        }
        epilogue.finish_32(first, at, values);
        epilogue.put_32(first, at, values);
    }
}

}  // namespace kernel_hub::matmul
