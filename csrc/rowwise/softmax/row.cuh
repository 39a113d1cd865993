// Rows shared among threads and blocks: which accesses are whose, what the blocks of a cluster find
// together.
#pragma once

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/shared_size.cuh"
#include "kernel_hub/vec.cuh"
#include "rowwise/softmax/sum.cuh"

namespace kernel_hub::rowwise::softmax {

struct RowStrides {
    int64_t row, middle, outer;

    __device__ __forceinline__ int64_t start(int64_t row_idx) const {
        return row_idx * row + blockIdx.y * middle + blockIdx.z * outer;
    }
};

// How many elements of its 16 bytes come before this address.
template <typename T>
__device__ __forceinline__ int columns_before(const T* address) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(address) % 16 / sizeof(T));
}

// Which vectors of which row are a thread's: those from `first` on, `step` apart, before `end`.
// They are those of 16 aligned bytes that the row meets: the first may begin `lead` columns before
// it, the last end behind it.
struct Share {
    int64_t row_idx;
    int first, step, end = 0, lead = 0;

    __device__ __forceinline__ Share(int blocks_a_row) {
        const int part = blocks_a_row == 1 ? 0 : blockIdx.x % blocks_a_row;
        const int block_idx = blocks_a_row == 1 ? blockIdx.x : blockIdx.x / blocks_a_row;
        row_idx = static_cast<int64_t>(block_idx) * blockDim.y + threadIdx.y;
        first = part * blockDim.x + threadIdx.x;
        step = blocks_a_row * blockDim.x;
    }

    // Of a row at this address.
    template <typename T>
    __device__ __forceinline__ void lay_over(const T* row, int num_rows, int size) {
        lead = columns_before(row);
        end = row_idx < num_rows ? (lead + size + kVecElems<T> - 1) / kVecElems<T> : 0;
    }
    // Of one that is whole vectors.
    template <typename T>
    __device__ __forceinline__ void lay_over_whole(int num_rows, int size) {
        end = row_idx < num_rows ? size / kVecElems<T> : 0;
    }

    // Whether the vectors of another row lie as those of this.
    template <typename T>
    __device__ __forceinline__ bool fits(const T* other) const {
        return columns_before(other) == lead;
    }

    // The i-th of this thread's: whether it is there, its first column.
    __device__ __forceinline__ bool has(int i) const { return first + i * step < end; }
    template <typename T>
    __device__ __forceinline__ int column(int i) const {
        return (first + i * step) * kVecElems<T> - lead;
    }
};

__device__ __forceinline__ bool is_column(int column, int size) {
    return static_cast<uint32_t>(column) < static_cast<uint32_t>(size);
}
template <typename T>
__device__ __forceinline__ bool is_inside(int column, int size) {
    return column >= 0 && column + kVecElems<T> <= size;
}
// Of a vector what the row has, one by one, and beside it `beside`.
template <typename T>
__device__ __forceinline__ uint4 read_columns(const T* row, int column, int size,
                                              uint32_t beside = 0) {
    constexpr int kElems = Word<T>::kElems;
    using Bits = std::conditional_t<kElems == 1, uint32_t, uint16_t>;
    const Bits* bits = reinterpret_cast<const Bits*>(row) + column;
    uint32_t words[4] = {};
#pragma unroll
    for (int j = 0; j < kVecElems<T>; ++j) {
        const uint32_t element = is_column(column + j, size) ? bits[j] : beside;
        words[j / kElems] |= element << 16 * (j % kElems);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}
// is_whole: all of the vector is the row's, and 16 aligned bytes.
template <typename T>
__device__ __forceinline__ uint4 read_vec(const T* row, int column, int size, bool is_whole) {
    return is_whole ? ld_global(row + column) : read_columns(row, column, size);
}
template <typename T>
__device__ __forceinline__ void write_vec(T* row, int column, int size, bool is_whole,
                                          const float (&values)[kVecElems<T>]) {
    if (is_whole) {
        st_global(row + column, pack<T>(values));
        return;
    }
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

__device__ __forceinline__ SharedFound& shared_found() {
    return *reinterpret_cast<SharedFound*>(dynamic_shared());
}

// A thread's vectors in shared memory behind that, where the launch has some: only it reads them,
// so that no barrier is between a copy and its use.
__device__ __forceinline__ bool keeps_rows() {
    return dynamic_shared_bytes() > sizeof(SharedFound);
}
__device__ __forceinline__ uint4* kept_vecs() {
    static_assert(sizeof(SharedFound) % 16 == 0, "what is kept is vectors");
    return reinterpret_cast<uint4*>(&shared_found() + 1) + threadIdx.x;
}
template <typename T>
__device__ __forceinline__ void keep_vec(uint4* kept, const T* row, int column) {
    cp_async_16(shared_address(kept), row + column, true);
}

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
