// The blocks that share a position, and what all of them know of its pieces.
#pragma once

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/mma.cuh"
#include "sampling/position.cuh"

namespace kernel_hub::sampling {

// Whose registers a multiprocessor has.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kBlocksAnSm = 2;
#else
constexpr int kBlocksAnSm = 3;
#endif

// The words of neighbouring pieces that a lane has.
constexpr int kEach = kPieces / 32;
struct Words {
    uint64_t each[kEach];

    __device__ __forceinline__ uint64_t sum() const {
        uint64_t sum = 0;
#pragma unroll
        for (const uint64_t word : each) {
            sum += word;
        }
        return sum;
    }
};

// The blocks that share a position.
struct Team {
    uint64_t (&words)[2][kPieces];
    int rank, size;
    int turn = 0;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    __device__ __forceinline__ explicit Team(uint64_t (&its)[2][kPieces])
        : words(its), rank(cluster_rank()), size(cluster_size()) {}
#else
    __device__ __forceinline__ explicit Team(uint64_t (&its)[2][kPieces])
        : words(its), rank(0), size(1) {}
#endif

    __device__ __forceinline__ int pieces_a_warp() const { return kPieces / kNumWarps / size; }
    __device__ __forceinline__ int first_piece() const {
        return (rank * kNumWarps + static_cast<int>(threadIdx.x) / 32) * pieces_a_warp();
    }
    __device__ __forceinline__ int owner(int piece) const { return piece * size / kPieces; }

    // What all pieces left in words[turn]: of a lane those of kEach neighbours.
    __device__ __forceinline__ Words exchange() {
        const int piece = threadIdx.x % 32 * kEach;
        Words found;
        const uint64_t* own = &words[turn][piece];
        turn ^= 1;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
        if (size > 1) {
            __syncwarp();
            cluster_arrive();
            cluster_wait();
            const uint32_t at = cluster_address(shared_address(own), owner(piece));
#pragma unroll
            for (int i = 0; i < kEach; i += 2) {
                const float4 v = ld_shared_cluster(at + i * sizeof(uint64_t));
                found.each[i] =
                    static_cast<uint64_t>(__float_as_uint(v.y)) << 32 | __float_as_uint(v.x);
                found.each[i + 1] =
                    static_cast<uint64_t>(__float_as_uint(v.w)) << 32 | __float_as_uint(v.z);
            }
            return found;
        }
#endif
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            found.each[i] = own[i];
        }
        return found;
    }

    // Behind the last exchange; no block ends before all have read.
    __device__ __forceinline__ void arrive_last() const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
        if (size > 1) {
            __syncwarp();
            cluster_arrive_relaxed();
        }
#endif
    }
    __device__ __forceinline__ void wait_last() const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
        if (size > 1) {
            __syncwarp();
            cluster_wait();
        }
#endif
    }
};

// Over a warp, by what it compares in one instruction.
__device__ __forceinline__ uint64_t warp_largest(uint64_t value) {
    const uint32_t own = static_cast<uint32_t>(value >> 32);
    const uint32_t high = __reduce_max_sync(kAllLanes, own);
    const uint32_t low =
        __reduce_max_sync(kAllLanes, own == high ? static_cast<uint32_t>(value) : 0u);
    return static_cast<uint64_t>(high) << 32 | low;
}

// The sum of the lanes up to this one.
__device__ __forceinline__ uint64_t warp_sum_to(uint64_t value) {
    const int lane_idx = threadIdx.x % 32;
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
        const uint64_t other = __shfl_up_sync(kAllLanes, value, step);
        value += lane_idx >= step ? other : 0;
    }
    return value;
}

}  // namespace kernel_hub::sampling
