// Rows shared among threads and blocks: which accesses are whose, what the blocks of a cluster find
// together.
#pragma once

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/reduce.cuh"
#include "kernel_hub/vec.cuh"

namespace kernel_hub::rowwise::softmax {

// Which accesses of which row are a thread's: those from `first` on, `step` apart, before `end`.
struct Share {
    int64_t row_idx;
    int first, step, end;

    __device__ __forceinline__ Share(int num_rows, int num_accesses, int blocks_a_row) {
        const int part = blocks_a_row == 1 ? 0 : blockIdx.x % blocks_a_row;
        const int block_idx = blocks_a_row == 1 ? blockIdx.x : blockIdx.x / blocks_a_row;
        row_idx = static_cast<int64_t>(block_idx) * blockDim.y + threadIdx.y;
        first = part * blockDim.x + threadIdx.x;
        step = blocks_a_row * blockDim.x;
        end = row_idx < num_rows ? num_accesses : 0;
    }
};

struct RowStrides {
    int64_t row, middle, outer;

    __device__ __forceinline__ int64_t start(int64_t row_idx) const {
        return row_idx * row + blockIdx.y * middle + blockIdx.z * outer;
    }
};

// exp; 0 where that is subnormal.
__device__ __forceinline__ float power_of(float x) {
    return exp2_approx(x * kLog2e);
}

// What was found in a part of a row, or in all of it.
struct Found {
    float largest, sum;
};

// Dynamic, so that the blocks of a cluster have each its own wherever they run.
struct SharedFound {
    float slots[2][kMaxWarps];
    float4 given;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Of a cluster; more than 8 only where the launch asks for it.
constexpr int kMostBlocks = 16;

// Every thread of every block calls this, and wait_for_readers before it ends.
__device__ __forceinline__ Found of_all_blocks(Found own, int blocks_a_row, float4& given) {
    if (threadIdx.x == 0) {
        given = make_float4(own.largest, own.sum, 0.0f, 0.0f);
    }
    cluster_arrive();
    cluster_wait();
    const int from = threadIdx.x % kMostBlocks;
    Found found{-INFINITY, 0.0f};
    if (from < blocks_a_row) {
        const float4 other = ld_shared_cluster(cluster_address(shared_address(&given), from));
        found = {other.x, other.y};
    }
    cluster_arrive();
    const float largest = group_max(found.largest, kMostBlocks);
    return {largest, group_sum(found.sum * power_of(found.largest - largest), kMostBlocks)};
}

__device__ __forceinline__ void wait_for_readers() {
    cluster_wait();
}

#else

__device__ __forceinline__ Found of_all_blocks(Found own, int, float4&) {
    return own;
}

__device__ __forceinline__ void wait_for_readers() {}

#endif

}  // namespace kernel_hub::rowwise::softmax
