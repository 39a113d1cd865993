// Where the tokens of packed sequences lie, from the sequences' lengths.
//
//   cu_seqlens[b] = sum over a < b of max(lengths[a], 0)
//   of token t of sequence b:  position = cache_seqlens[b] + t - cu_seqlens[b]
//   slot = block_table[b, position / page_size] * page_size + position % page_size
// Without cache_seqlens they count as 0. Tokens behind the last, and those of a sequence whose
// cache_seqlens is below 0, have position 0 and slot -1. A sequence without a page for a position
// has no slot for it (-1), which is reported.
//
// Parallelisation: 256 threads, a token each; every block adds up all lengths by itself, a few a
// thread, then a scan of the block's; the first one writes cu_seqlens. Nothing waits for another.
// Shared memory: cu_seqlens (batch_size + 1).
// Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
// PagedAttention", 2023, for pages and slots.

#include "kernel_hub/block_scan.cuh"
#include "kernel_hub/bounds.cuh"
#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/reduce.cuh"

namespace kernel_hub::tokens {

constexpr int kThreads = 256;
constexpr int64_t kMost = 0x7fffffff;

// The lengths summed up in `starts`, none below 0, no sum above kMost. By all threads.
__device__ __forceinline__ void sum_up(int* starts, const int* lengths, int batch_size) {
    __shared__ int64_t sums[kThreads / kWarpSize];
    const int each = (batch_size + kThreads - 1) / kThreads;
    const int begin = min(static_cast<int>(threadIdx.x) * each, batch_size);
    const int end = min(begin + each, batch_size);
    const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
    int64_t own = 0;
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
        own += max(__ldg(lengths + i), 0);
    }
    int64_t start = sum_before(own, sums, warp_idx, lane_idx);
    if (threadIdx.x == 0) {
        starts[0] = 0;
    }
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
        start += max(__ldg(lengths + i), 0);
        starts[i + 1] = static_cast<int>(start < kMost ? start : kMost);
    }
    __syncthreads();
}

// The sequence that has token `token`: the last that begins at it or before, and is not empty.
__device__ __forceinline__ int find_sequence(const int* starts, int batch_size, int token) {
    int low = 0, high = batch_size - 1;
#pragma unroll 1
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (starts[middle] <= token) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

__device__ __forceinline__ void place_tokens(int* cu_seqlens, int64_t* positions,
                                             int64_t* slot_mapping, int* flag, const int* lengths,
                                             const int* cache_seqlens, const int* block_table,
                                             int64_t table_stride, int batch_size, int num_tokens,
                                             int max_pages, int page_size) {
    int* starts = reinterpret_cast<int*>(dynamic_shared());  // (batch_size + 1)
    follow_launch_before();
    sum_up(starts, lengths, batch_size);
    if (blockIdx.x == 0) {
        for (int i = threadIdx.x; i <= batch_size; i += kThreads) {
            cu_seqlens[i] = starts[i];
        }
    }
    const int token = blockIdx.x * kThreads + threadIdx.x;
    if (token >= num_tokens) {
        return;
    }
    int64_t position = 0, slot = -1;
    bool is_outside = false;
    if (token < starts[batch_size]) {
        const int sequence = find_sequence(starts, batch_size, token);
        const int cached = cache_seqlens == nullptr ? 0 : __ldg(cache_seqlens + sequence);
        if (cached >= 0) {
            position = static_cast<int64_t>(cached) + (token - starts[sequence]);
            if (block_table != nullptr) {
                const int64_t column = position / page_size;
                is_outside = column >= max_pages;
                const int page =
                    is_outside ? -1 : __ldg(block_table + sequence * table_stride + column);
                slot =
                    page < 0 ? -1 : static_cast<int64_t>(page) * page_size + position % page_size;
            }
        }
    }
    report_if(flag, is_outside, kLengthsOutside);
    if (positions != nullptr) {
        positions[token] = position;
    }
    if (slot_mapping != nullptr) {
        slot_mapping[token] = slot;
    }
}

#define EXPORT_CU_SEQLENS(NAME)                                                                    \
    DESCRIBED(                                                                                     \
        NAME, "x: tokens in steps of 256, at least one", (.threads = kThreads),                    \
        extern "C" __global__ void __launch_bounds__(kThreads) NAME(                               \
            int* out, int64_t* out_positions, int64_t* out_slots, int* flag, const int* lengths,   \
            const int* cache_seqlens, const int* block_table, int64_t table_stride,                \
            int batch_size, int num_tokens, int max_pages, int page_size) {                        \
            place_tokens(out, out_positions, out_slots, flag, lengths, cache_seqlens, block_table, \
                         table_stride, batch_size, num_tokens, max_pages, page_size);              \
        })

EXPORT_CU_SEQLENS(cu_seqlens)

}  // namespace kernel_hub::tokens
