// flash_attention_backward_sm90.cu: the order of sequences whose keys are told apart by bounds on
// the device.
#pragma once

#include "attention/backward/problem.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/reduce.cuh"

namespace kernel_hub::attention::backward::sm90 {

// Of numbers that are not negative: half of the instructions of `/`.
__device__ __forceinline__ int over(int a, int b) {
    return static_cast<int>(static_cast<unsigned>(a) / static_cast<unsigned>(b));
}

// Where keys of sequences lie, and, as the first kernel leaves it for the others, how many blocks
// of keys the sequences have up to each, then which those are: the longest first, so that short
// works are the last.
struct RaggedKeys {
    static constexpr int kMost = 256;  // more stay as they are. ragged.py knows

    const int* cu_seqlens;  // null: all have as many, and there is no order
    int longest, total, block_n, batch_size;
    int* order;

    // How many numbers it is.
    static __device__ __forceinline__ int count(const int* cu_seqlens, int batch_size) {
        return cu_seqlens ? 2 * batch_size : 0;
    }
    // Blocks of keys of the first sequences.
    __device__ __forceinline__ int end(int sequences) const {
        return sequences > 0 ? order[sequences - 1] : 0;
    }
    __device__ __forceinline__ int blocks(int nth) const { return end(nth + 1) - end(nth); }
    __device__ __forceinline__ int batch(int nth) const { return order[batch_size + nth]; }
    __device__ __forceinline__ int find_blocks(int batch_idx) const {
        return ceil_div(Sequence(cu_seqlens, batch_idx, longest, total).seqlen, block_n);
    }
};

// Makes it. All threads of a block.
__device__ __forceinline__ void make_order(const RaggedKeys& keys) {
    __shared__ int blocks[RaggedKeys::kMost], ordered[RaggedKeys::kMost];
    const int count = keys.batch_size;
    const bool sorts = count <= RaggedKeys::kMost;
    if (sorts) {
        for (int own = threadIdx.x; own < count; own += blockDim.x) {
            blocks[own] = keys.find_blocks(own);
        }
        __syncthreads();
    }
#pragma unroll 1
    for (int own = threadIdx.x; own < count; own += blockDim.x) {
        int rank = sorts ? 0 : own;
        if (sorts) {
            const int value = blocks[own];
#pragma unroll 8
            for (int i = 0; i < count; ++i) {
                rank += blocks[i] > value || (blocks[i] == value && i < own);
            }
            ordered[rank] = value;
        }
        keys.order[count + rank] = own;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        int sum = 0;
#pragma unroll 1
        for (int first = 0; first < count; first += 32) {
            const int nth = first + threadIdx.x;
            int own = 0;
            if (nth < count) {
                own = sorts ? ordered[nth] : keys.find_blocks(nth);
            }
            const int end = sum + warp_scan(own, threadIdx.x % 32);
            if (nth < count) {
                keys.order[nth] = end;
            }
            sum = __shfl_sync(kAllLanes, end, 31);
        }
    }
}

}  // namespace kernel_hub::attention::backward::sm90
