// Rows of any alignment: runs of eight elements a thread, a warp's 32 apart, all asked for before
// the first is used. A row that one run of all threads holds is read once.
#pragma once

#include "kernel_hub/reduce.cuh"
#include "kernel_hub/vec.cuh"

namespace kernel_hub::rowwise {

constexpr int kRun = 8;

// The runs of this thread: `at`, its first element of one, and how many the row has from there on.
struct ElementRuns {
    int first, step, size;

    __device__ __forceinline__ explicit ElementRuns(int size)
        : first(threadIdx.x / kWarpSize * (kWarpSize * kRun) + threadIdx.x % kWarpSize),
          step(blockDim.x * kRun),
          size(size) {}

    __device__ __forceinline__ bool is_held() const { return size <= step; }

    template <typename Use>
    __device__ __forceinline__ void each(const Use& use) const {
#pragma unroll 1
        for (int at = first; at < size; at += step) {
            use(at, size - at);
        }
    }
};

template <typename T>
__device__ __forceinline__ void load_run(T (&run)[kRun], const T* from, int left) {
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
        run[j] = from_float<T>(0.0f);
        if (j * kWarpSize < left) {
            run[j] = from[j * kWarpSize];
        }
    }
}

// Calls use(j) for each element of a run that the row has.
template <typename Use>
__device__ __forceinline__ void each_of_run(int left, const Use& use) {
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
        if (j * kWarpSize < left) {
            use(j);
        }
    }
}

}  // namespace kernel_hub::rowwise
