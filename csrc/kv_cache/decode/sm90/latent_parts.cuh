// mla_decode_sm90.cu: the warp that finds the block's parts, and what it tells the others.
#pragma once

#include "kernel_hub/bulk_prefetch.cuh"
#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/ptx.cuh"
#include "kernel_hub/shared_size.cuh"
#include "kv_cache/decode/sm90/latent_line.cuh"
#include "kv_cache/decode/sm90/latent_shares.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

// Two parts in shared memory: one that the block computes, and the next.
struct LatentParts {
    static constexpr int kDepth = 2, kPartBytes = 64;
    static constexpr int kBytes = kDepth * (kPartBytes + 16);
    static_assert(sizeof(LatentPart) <= kPartBytes, "a part has its place");

    int where;  // in shared memory
    int turn;

    __device__ __forceinline__ LatentPart* place() const {
        return reinterpret_cast<LatentPart*>(dynamic_shared() + where + turn % 2 * kPartBytes);
    }
    __device__ __forceinline__ uint32_t full(int i) const {
        return shared_address(dynamic_shared()) + where + kDepth * kPartBytes + 8 * i;
    }
    __device__ __forceinline__ uint32_t empty(int i) const { return full(kDepth + i); }
    // By one thread. num_readers: warps that take each part.
    __device__ __forceinline__ void init(int num_readers) const {
        for (int i = 0; i < kDepth; ++i) {
            mbarrier_init(full(i), 1);
            mbarrier_init(empty(i), num_readers);
        }
    }
    // By all lanes of a warp, both.
    __device__ __forceinline__ void put(const LatentPart& part) {
        mbarrier_wait(empty(turn % 2), (turn / 2 & 1) ^ 1);
        if (threadIdx.x % 32 == 0) {
            *place() = part;
        }
        mbarrier_arrive_if(full(turn % 2), threadIdx.x % 32 == 0);
        ++turn;
    }
    // False: it was the last.
    __device__ __forceinline__ bool take(LatentPart& part) {
        mbarrier_wait(full(turn % 2), turn / 2 & 1);
        part = *place();
        __syncwarp();
        mbarrier_arrive_if(empty(turn % 2), threadIdx.x % 32 == 0);
        ++turn;
        return part.batch_idx >= 0;
    }
};

// Brings cache_seqlens and the block table into the L2, a line a thread of the first kThreads of
// every block; nothing is read, so it may be before the launch before has ended.
template <typename T>
__device__ __forceinline__ void prefetch_tables(const LatentArgs<T>& args) {
    constexpr int kThreads = 64, kLine = 32;  // entries
    const int index = blockIdx.x * kThreads + threadIdx.x;
    if (threadIdx.x >= kThreads) {
        return;
    }
    if (index * kLine < args.batch_size) {
        prefetch_l2(args.cache_seqlens + index * kLine);
    }
    if (args.block_table != nullptr) {
        const int lines = (args.max_tokens / args.page_size + kLine - 1) / kLine;
        const int batch_idx = index / lines;
        if (batch_idx < args.batch_size) {
            prefetch_l2(args.block_table + batch_idx * args.block_table_stride +
                        index % lines * kLine);
        }
    }
}

// By all lanes of a warp: brings the rows of a part into the L2, before the keys are asked for,
// behind which they would wait.
template <typename T>
__device__ __forceinline__ void prefetch_queries(const LatentArgs<T>& args,
                                                 const LatentPart& part) {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < part.num_rows; i += 32) {
        const int row = part.first_row + i;
        bulk_prefetch(args.q + part.batch_idx * args.q_batch_stride +
                          row / args.num_heads * args.q_token_stride +
                          row % args.num_heads * args.q_head_stride,
                      kKeyDim * sizeof(T));
    }
}

// By all lanes of a warp: finds the parts of the block, one of `num_blocks` of a cluster, which
// share them: each has kRows of their rows. kUnit: tokens at whose multiples a line is cut.
//
// Waits for the launch before; the first part is found ahead of that, of lengths that are read
// again after it.
template <int kRows, int kUnit, typename T>
__device__ __forceinline__ void find_parts(const LatentArgs<T>& args, LatentParts parts,
                                           int num_blocks, int rank) {
    const int first = blockIdx.x / num_blocks, step = gridDim.x / num_blocks;
    const auto put = [&](LatentPart part) {
        report_if(args.flag, part.is_outside && threadIdx.x % 32 == 0, kLengthsOutside);
        part.first_row += rank * kRows, part.slot += rank * kRows;
        part.num_rows = min(part.num_rows - rank * kRows, kRows);
        parts.put(part);
    };
    LatentPart part;
    if (args.tickets != nullptr) {
        LatentLine<kUnit, T> line(args, kRows * num_blocks);
        if (!line.is_held()) {
            wait_for_launch_before();
        }
        bool is_found = false;
        while (true) {
            if (!is_found) {
                line.find();
            }
            const bool is_there = line.next(part, first, step);
            wait_for_launch_before();
            is_found = line.is_true();
            if (!is_found) {
                continue;
            }
            if (!is_there) {
                break;
            }
            put(part);
        }
    } else {
        LatentShares<T> shares(args, kRows * num_blocks);
        bool is_found = shares.is_held();
        if (is_found) {
            shares.find();
            part = shares.part(first);
        }
        wait_for_launch_before();
        if (is_found && !shares.is_true()) {
            shares.find();
            is_found = false;
        }
#pragma unroll 1
        for (int index = first; index < args.num_workers; index += step) {
            if (!is_found) {
                part = shares.part(index);
            }
            is_found = false;
            if (part.batch_idx >= 0) {
                put(part);
            }
        }
    }
    part.batch_idx = -1;
    parts.put(part);
}

}  // namespace kernel_hub::kv_cache::decode::sm90
