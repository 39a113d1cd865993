// Slots of tokens: how many each expert has, and the rows that they are.
#pragma once

#include "kernel_hub/block_scan.cuh"
#include "kernel_hub/bounds.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/reduce.cuh"

namespace kernel_hub::moe {

constexpr int kThreads = 256;
constexpr int kAtOnce =
    8;  // experts read before they are counted, and places before rows are written

// Adds the slots begin .. end - 1 to their experts' counts, by all kBlock threads: to `later` those
// from `middle` on.
template <int kBlock>
__device__ __forceinline__ void count_slots(int* counts, int* later, const int* experts, int begin,
                                            int middle, int end, int num_experts, int thread_idx) {
#pragma unroll 1
    for (int first = begin + thread_idx; first < end; first += kAtOnce * kBlock) {
        int found[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int slot = first + i * kBlock;
            found[i] = slot < end ? __ldg(experts + slot) : -1;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (is_index(found[i], num_experts)) {
                atomicAdd((first + i * kBlock < middle ? counts : later) + found[i], 1);
            }
        }
    }
}

// Adds up the counts of chunks: those before `own` in `before`, those of all in `all`.
template <int kBlock>
__device__ __forceinline__ void add_counts(int* before, int* all, const int* counts, int own,
                                           int num_chunks, int num_experts, int thread_idx) {
    const int width = min(kBlock, (num_experts + kWarpSize - 1) / kWarpSize * kWarpSize);
    const int rows = kBlock / width, row = thread_idx / width;
    if (row >= rows) {
        return;
    }
#pragma unroll 1
    for (int expert = thread_idx - row * width; expert < num_experts; expert += width) {
        int earlier = 0, sum = 0;
#pragma unroll 8
        for (int chunk = row; chunk < num_chunks; chunk += rows) {
            const int count = __ldg(counts + static_cast<int64_t>(chunk) * num_experts + expert);
            earlier += chunk < own ? count : 0;
            sum += count;
        }
        atomicAdd(before + expert, earlier);
        atomicAdd(all + expert, sum);
    }
}

// Makes `before` the row of the block's first slot of each expert, and tells `offsets` if there. By
// the first kThreads threads; others add nothing, as one more warp.
__device__ __forceinline__ void find_starts(int* before, const int* all, bool adds_before,
                                            int* offsets, int num_experts, int thread_idx) {
    constexpr int kSums = kThreads / kWarpSize;
    __shared__ int sums[kSums + 1];
    const int each = (num_experts + kThreads - 1) / kThreads;
    const int begin = min(thread_idx * each, num_experts), end = min(begin + each, num_experts);
    const int warp_idx = min(thread_idx / kWarpSize, kSums), lane_idx = thread_idx % kWarpSize;
    int own = 0;
#pragma unroll 1
    for (int expert = begin; expert < end; ++expert) {
        own += all[expert] + (adds_before ? before[expert] : 0);
    }
    int start = sum_before(own, sums, warp_idx, lane_idx);
#pragma unroll 1
    for (int expert = begin; expert < end; ++expert) {
        if (offsets != nullptr) {
            offsets[expert] = start;
        }
        const int count = all[expert] + (adds_before ? before[expert] : 0);
        before[expert] += start;
        start += count;
    }
    if (offsets != nullptr && thread_idx == kThreads - 1) {
        offsets[num_experts] = start;
    }
    __syncthreads();
}

// write(slot, its row) of 32 slots of a warp, a lane's with `expert`; `starts` is the next row of
// each expert. Whether it is neither there nor -1.
template <typename Write>
__device__ __forceinline__ bool rank_32(int* starts, int expert, int slot, int num_slots,
                                        int num_experts, int lane_idx, const Write& write) {
    const bool is_placed = is_index(expert, num_experts);
    const unsigned same = __match_any_sync(kAllLanes, is_placed ? expert : -1);
    const int rank = __popc(same & ((1u << lane_idx) - 1));
    const int place = is_placed ? starts[expert] + rank : -1;
    __syncwarp();
    if (is_placed && rank == 0) {
        starts[expert] += __popc(same);
    }
    __syncwarp();
    if (slot < num_slots) {
        write(slot, place);
    }
    return !is_placed && expert != -1;
}

// All slots in their order, by one warp.
template <typename Write>
__device__ __forceinline__ bool rank_slots(int* starts, const int* experts, int num_slots,
                                           int num_experts, int lane_idx, const Write& write) {
    bool is_outside = false;
#pragma unroll 1
    for (int slot = lane_idx; slot - lane_idx < num_slots; slot += kWarpSize) {
        const int expert = slot < num_slots ? __ldg(experts + slot) : -1;
        is_outside |= rank_32(starts, expert, slot, num_slots, num_experts, lane_idx, write);
    }
    return is_outside;
}

}  // namespace kernel_hub::moe
