// Which tiles and steps of k the clusters of a persistent grid compute, and how those that share a
// tile's k bring its sums together. Of linear_sm90.cu and its relatives.
#pragma once

#include <stdint.h>

#include "kernel_hub/ptx.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "matmul/sm90/tiles.cuh"

namespace kernel_hub::matmul::sm90 {

// A part of a product: some steps of k of a tile.
struct Segment {
    int tile, first_step, end_step;
};

// The segments of a cluster, one after another. The last tiles' steps are dealt out: every cluster
// has as many, one after another, and the share of a cluster begins where that of the one before
// ends. It walks its share backwards, so that what another cluster must add comes first; then it
// takes whole tiles, every num_clusters-th.
// NOTE: the cluster of the highest number completes a tile and waits for lower ones: blocks start
// in order, so that those waited for run even where few are resident at once.
// NOTE: what the launch says is read where it is needed; registers hold the two that change.
struct Schedule {
    int num_steps;  // of a tile
    int num_whole;  // tiles that one cluster computes each
    int num_dealt;  // steps of all other tiles
    int cluster, num_clusters;
    int end;         // of this cluster's dealt steps that are left
    int next_whole;  // tile

    __device__ __forceinline__ Schedule(int num_steps, int num_whole, int num_dealt, int cluster,
                                        int num_clusters)
        : num_steps(num_steps),
          num_whole(num_whole),
          num_dealt(num_dealt),
          cluster(cluster),
          num_clusters(num_clusters),
          end(first_dealt(cluster + 1)),
          next_whole(cluster) {}

    // The first of the dealt steps that a cluster has.
    __device__ __forceinline__ int first_dealt(int of) const {
        const int each = num_dealt / num_clusters;
        return each * of + min(of, num_dealt - each * num_clusters);
    }

    __device__ __forceinline__ bool next(Segment& segment) {
        const int begin = first_dealt(cluster);
        if (begin < end) {
            const int tile = (end - 1) / num_steps;
            const int first = max(begin, tile * num_steps);
            segment = {num_whole + tile, first - tile * num_steps, end - tile * num_steps};
            end = first;
            return true;
        }
        segment = {next_whole, 0, num_steps};
        next_whole += num_clusters;
        return segment.tile < num_whole;
    }

    // Whether another cluster completes the tile: it has later steps of it.
    __device__ __forceinline__ bool leaves(const Segment& segment) const {
        return segment.end_step < num_steps;
    }
};

// Says that this consumer's sums are in memory, to a block that waits for them.
__device__ __forceinline__ void announce(int* arrival, int thread, int barrier) {
    named_barrier_sync(barrier, 128);
    if (thread == 0) {
        st_release(arrival, 1);
    }
}

// Waits until that block has said so.
__device__ __forceinline__ void wait_for(int* arrival, int thread, int barrier) {
    if (thread == 0) {
        while (ld_acquire(arrival) == 0) {
        }
        *arrival = 0;  // for the next launch
    }
    named_barrier_sync(barrier, 128);
}

// Where the consumers of a launch leave sums for another cluster: of each block at most one tile's.
struct Partials {
    float* sums;    // of each consumer of each block
    int* arrivals;  // of each of them: whether they are there; zeros before and after the launch
};

// The barrier at which a consumer hands over its sums: its threads arrive, a spare warp waits.
constexpr int kSumsLeft = 8;

// Leaves this thread's sums. All threads of a consumer; announce_sums says that they are there.
template <typename C>
__device__ __forceinline__ void leave_sums(const Partials& partials,
                                           const float (&acc)[C::kPieces][C::kSums], int consumer,
                                           int thread) {
    const int place = blockIdx.x * C::kConsumers + consumer;
    float4* to = reinterpret_cast<float4*>(partials.sums) +
                 static_cast<int64_t>(place) * 16 * C::kBlockN + thread;
#pragma unroll
    for (int i = 0; i < C::kPieces * C::kSums; i += 4) {
        const int piece = i / C::kSums, at = i % C::kSums;
        __stcg(to + i * 32, make_float4(acc[piece][at], acc[piece][at + 1], acc[piece][at + 2],
                                        acc[piece][at + 3]));
    }
    named_barrier_arrive(kSumsLeft + consumer, 128 + 32);
}

// Announces what the consumers of this block leave: the first segment, or nothing. A spare warp:
// the consumers need not wait until their sums have arrived in memory.
template <typename C>
__device__ __forceinline__ void announce_sums(const Partials& partials, Schedule schedule) {
    Segment segment;
    if (schedule.next(segment) && schedule.leaves(segment)) {
#pragma unroll
        for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
            named_barrier_sync(kSumsLeft + consumer, 128 + 32);
            if (threadIdx.x % 32 == 0) {
                st_release(partials.arrivals + blockIdx.x * C::kConsumers + consumer, 1);
            }
        }
    }
}

// Adds to this thread's sums, of the segment that `schedule` gave last and that is the end of its
// tile, those of the clusters that had the steps before first_step, the latest first. All threads
// of a consumer.
template <typename C>
__device__ __forceinline__ void collect_sums(const Partials& partials, const Schedule& schedule,
                                             int first_step, float (&acc)[C::kPieces][C::kSums],
                                             int consumer, int thread) {
    int block = blockIdx.x;
#pragma unroll 1
    for (int step = schedule.end, first = step - first_step; step > first;) {
        block -= C::kClusterSize;
        step = schedule.first_dealt(block / C::kClusterSize);
        const int place = block * C::kConsumers + consumer;
        wait_for(partials.arrivals + place, thread, 3 + consumer);
        const float4* from = reinterpret_cast<const float4*>(partials.sums) +
                             static_cast<int64_t>(place) * 16 * C::kBlockN + thread;
#pragma unroll
        for (int i = 0; i < C::kPieces * C::kSums; i += 4) {
            const int piece = i / C::kSums, at = i % C::kSums;
            const float4 more = __ldcg(from + i * 32);
            acc[piece][at] += more.x, acc[piece][at + 1] += more.y;
            acc[piece][at + 2] += more.z, acc[piece][at + 3] += more.w;
        }
    }
}

}  // namespace kernel_hub::matmul::sm90
