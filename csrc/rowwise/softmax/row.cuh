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

    // Whether the i-th is there.
    __device__ __forceinline__ bool has(int i) const { return first + i * step < end; }
};

struct RowStrides {
    int64_t row, middle, outer;

    __device__ __forceinline__ int64_t start(int64_t row_idx) const {
        return row_idx * row + blockIdx.y * middle + blockIdx.z * outer;
    }
};

// Columns of a row whose vectors are aligned, but not its ends: the first vector may begin before
// the row, the last end behind it.
__device__ __forceinline__ bool is_column(int column, int size) {
    return static_cast<uint32_t>(column) < static_cast<uint32_t>(size);
}
template <typename T>
__device__ __forceinline__ bool is_inside(int column, int size) {
    return column >= 0 && column + kVecElems<T> <= size;
}
// How many elements of its 16 bytes come before this address.
template <typename T>
__device__ __forceinline__ int columns_before(const T* address) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(address) % 16 / sizeof(T));
}
// Of a vector of 16-bit elements what the row has, one by one.
template <typename T>
__device__ __forceinline__ uint4 read_columns(const T* row, int column, int size) {
    const uint16_t* bits = reinterpret_cast<const uint16_t*>(row) + column;
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t low = is_column(column + 2 * i, size) ? bits[2 * i] : 0;
        const uint32_t high = is_column(column + 2 * i + 1, size) ? bits[2 * i + 1] : 0;
        words[i] = low | high << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}
template <typename T>
__device__ __forceinline__ void write_columns(T* row, int column, int size,
                                              const float (&values)[kVecElems<T>]) {
#pragma unroll
    for (int j = 0; j < kVecElems<T>; ++j) {
        if (is_column(column + j, size)) {
            row[column + j] = from_float<T>(values[j]);
        }
    }
}

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
    const float largest = group_max(found.largest, kMostBlocks);
    // NOTE: what was read is here, as the maximum is: nothing else is to be ordered.
    cluster_arrive_relaxed();
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
