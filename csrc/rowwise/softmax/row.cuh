// Rows shared among threads and blocks: which accesses are whose, what the blocks of a cluster find
// together.
#pragma once

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/vec.cuh"
#include "rowwise/softmax/sum.cuh"

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

// exp; of rows in 16 bits 0 where that is subnormal.
// NOTE: ex2.approx is off by 4 units of fp32's last place, x * kLog2e by as many where x is -8.
template <typename T>
__device__ __forceinline__ float power_of(float x) {
    if constexpr (std::is_same_v<T, float>) {
        return expf(x);
    }
    return exp2_approx(x * kLog2e);
}

// What was found in a part of a row, or in all of it.
template <typename T>
struct Found {
    float largest = -INFINITY;
    Sum<T> sum;
};

// Dynamic, so that the blocks of a cluster have each its own wherever they run.
struct SharedFound {
    float largest_slots[kMaxWarps], sum_slots[2][kMaxWarps];
    float4 given;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Of a cluster; more than 8 only where the launch asks for it.
constexpr int kMostBlocks = 16;

// Every thread of every block calls this, and wait_for_readers before it ends.
template <typename T>
__device__ __forceinline__ Found<T> of_all_blocks(Found<T> own, int blocks_a_row, float4& given) {
    if (threadIdx.x == 0) {
        given = make_float4(own.largest, own.sum.value, own.sum.lost, 0.0f);
    }
    cluster_arrive();
    cluster_wait();
    const int from = threadIdx.x % kMostBlocks;
    Found<T> found;
    if (from < blocks_a_row) {
        const float4 other = ld_shared_cluster(cluster_address(shared_address(&given), from));
        found = {other.x, {other.y, other.z}};
    }
    cluster_arrive();
    const float largest = group_max(found.largest, kMostBlocks);
    const float factor = power_of<T>(found.largest - largest);
    return {largest, group_sum(found.sum.times(factor), kMostBlocks)};
}

__device__ __forceinline__ void wait_for_readers() {
    cluster_wait();
}

#else

template <typename T>
__device__ __forceinline__ Found<T> of_all_blocks(Found<T> own, int, float4&) {
    return own;
}

__device__ __forceinline__ void wait_for_readers() {}

#endif

}  // namespace kernel_hub::rowwise::softmax
