// The products of matmul/paired/portable.cuh for few rows of a: b is read once, at the speed of
// memory.
//
// A block takes one group of 16 rows of b after another (persistent), its 8 warps take turns along
// k in chunks of 64, so that no warp waits for another before the block's one reduction. b is the
// side of 16 rows of mma.m16n8k16, a the side of 8 columns; so m <= 8 kColumnTiles. Shared memory:
// a ring of kStages chunks a warp; behind it two buffers for the reduction. A lane copies to the
// ring what it will read itself: 16 bytes of a row, of which mma takes words 0 and 1 as columns 2 q
// and 2 q + 8 of one step of k, words 2 and 3 of the next. As a and b are read alike, the order of
// k inside a step does not matter, and no lane waits for another.
#pragma once

#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/vec.cuh"
#include "matmul/few_rows.cuh"

namespace kernel_hub::matmul::paired {

template <int kColumnTiles_, int kStages_, int kSlices_>
struct PairedSmallM {
    static constexpr int kWarps = 8, kThreads = 32 * kWarps;
    static constexpr int kSlice = 32;  // of k, 16 bytes a lane
    static constexpr int kColumnTiles = kColumnTiles_, kStages = kStages_;
    static constexpr int kSlices = kSlices_, kChunk = kSlices * kSlice;  // of k, a warp's turn
    static constexpr int kWeights = 2 * kSlices;  // 16-byte vectors a lane and chunk
    static constexpr int kVectors = kWeights + kColumnTiles * kSlices;
    static constexpr int kSums = 4 * kColumnTiles;  // a lane
    static constexpr int kRingBytes = kWarps * kStages * kVectors * 32 * 16;
    static constexpr int kBufferFloats = kWarps * kSums * 32;
    static constexpr int kSharedBytes = kRingBytes + 2 * kBufferFloats * 4;
    static constexpr int kBlockM = 8 * kColumnTiles, kBlockN = 16, kBlockK = kChunk;
};

// Where a warp is in its list of (group, chunk), and the two rows of b that this lane copies.
template <typename Rows>
struct PairedWalk {
    const Rows& rows_of_b;
    int64_t b_stride;
    int group, num_groups, chunk, first_chunk, num_chunks;
    int64_t from[2];

    __device__ __forceinline__ void find_rows() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int64_t row =
                group < num_groups ? rows_of_b.at(group, half, threadIdx.x % 32 / 4) : -1;
            from[half] = row < 0 ? -1 : row * b_stride;
        }
    }
    __device__ __forceinline__ void next(int step) {
        chunk += step;
        if (chunk >= num_chunks) {
            chunk = first_chunk;
            group += gridDim.x;
            find_rows();
        }
    }
};

template <typename T, typename C, typename Rows, typename Ending>
__device__ __forceinline__ void paired_linear_small_m(const Ending& ending, const Rows& rows_of_b,
                                                      const T* a, const T* b, int64_t a_stride,
                                                      int64_t b_stride, int m, int num_groups,
                                                      int k, int weights_ready) {
    uint8_t* shared = dynamic_shared();
    float* buffer = reinterpret_cast<float*>(shared + C::kRingBytes);
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
    const int num_chunks = (k + C::kChunk - 1) / C::kChunk;
    const int chunks_per_group = max(0, (num_chunks - warp_idx + C::kWarps - 1) / C::kWarps);
    uint4* ring =
        reinterpret_cast<uint4*>(shared) + warp_idx * C::kStages * C::kVectors * 32 + lane_idx;
    const uint32_t ring_address = shared_address(ring);
    constexpr int kSlot = C::kVectors * 32;  // in vectors

    PairedWalk<Rows> ahead{
        rows_of_b,  b_stride, chunks_per_group > 0 ? static_cast<int>(blockIdx.x) : num_groups,
        num_groups, warp_idx, warp_idx,
        num_chunks};
    ahead.find_rows();
    // Starts this lane's copies of one chunk: of the weights, and of a where it may be read.
    const auto fetch = [&](int stage, bool has_rows) {
        if (ahead.group < num_groups) {
            const uint32_t slot = ring_address + stage * kSlot * 16;
            const int64_t column = static_cast<int64_t>(ahead.chunk) * C::kChunk + lane_idx % 4 * 8;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int slice = 0; slice < C::kSlices; ++slice) {
                    const int64_t at = column + slice * C::kSlice;
                    cp_async_16(slot + (half * C::kSlices + slice) * 512,
                                b + (ahead.from[half] + at), ahead.from[half] >= 0 && at < k);
                }
            }
#pragma unroll
            for (int i = 0; i < C::kColumnTiles; ++i) {
                const int row = 8 * i + lane_idx / 4;
                if (row < m && has_rows) {  // the places of other rows are zero from the start
#pragma unroll
                    for (int slice = 0; slice < C::kSlices; ++slice) {
                        const int64_t at = column + slice * C::kSlice;
                        cp_async_16(slot + (C::kWeights + i * C::kSlices + slice) * 512,
                                    a + (row * a_stride + at), at < k);
                    }
                }
            }
            ahead.next(C::kWarps);
        }
        cp_async_commit();
    };
    // Weights that are ready are read under the end of the launch before.
    const bool leads = kOverlapsLaunches && weights_ready != 0;
    PairedWalk<Rows> first = ahead;
    if (!leads) {
        wait_for_launch_before();
    }
#pragma unroll
    for (int stage = 0; stage < C::kStages; ++stage) {
        fetch(stage, !leads);
    }
    if (leads) {
        wait_for_launch_before();
        load_first_rows<C>(ring, a, a_stride, m, k, lane_idx, [&] {
            const int chunk = first.group < num_groups ? first.chunk : -1;
            first.next(C::kWarps);
            return chunk;
        });
    }
    ending.prepare_few();
    allow_next_launch();  // all blocks are resident: what begins takes nothing from them

    zero_missing_rows<C>(ring, lane_idx, m);

    int stage = 0;
    for (int group = blockIdx.x, turn = 0; group < num_groups; group += gridDim.x, turn ^= 1) {
        float sums[C::kColumnTiles][4] = {};
        for (int i = 0; i < chunks_per_group; ++i) {
            cp_async_wait<C::kStages - 1>();
            const uint4* slot = ring + stage * kSlot;
#pragma unroll
            for (int slice = 0; slice < C::kSlices; ++slice) {
                const uint4 low = slot[slice * 32], high = slot[(C::kSlices + slice) * 32];
                const uint32_t first[4] = {low.x, high.x, low.y, high.y};
                const uint32_t second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
                for (int j = 0; j < C::kColumnTiles; ++j) {
                    const uint4 input = slot[(C::kWeights + j * C::kSlices + slice) * 32];
                    mma_m16n8k16<T>(sums[j], first, input.x, input.y);
                    mma_m16n8k16<T>(sums[j], second, input.z, input.w);
                }
            }
            fetch(stage, true);
            stage = stage + 1 == C::kStages ? 0 : stage + 1;
        }

        // Add the warps' sums, in their order; a thread has both of a pair.
        float* mine = buffer + turn * C::kBufferFloats;
#pragma unroll
        for (int i = 0; i < C::kSums; ++i) {
            mine[(warp_idx * C::kSums + i) * 32 + lane_idx] = sums[i / 4][i % 4];
        }
        __syncthreads();
        for (int at = threadIdx.x; at < C::kSums * 16; at += C::kThreads) {
            const int lane = at % 32, column_tile = at / 64, e = at / 32 % 2;
            float pair[2] = {};
#pragma unroll
            for (int warp = 0; warp < C::kWarps; ++warp) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int sum = warp * C::kSums + 4 * column_tile + 2 * half + e;
                    pair[half] += mine[sum * 32 + lane];
                }
            }
            const int row = 8 * column_tile + lane % 4 * 2 + e;
            if (row < m) {
                ending.write_pair(row, group, lane / 4, pair[0], pair[1]);
            }
        }
    }
}

}  // namespace kernel_hub::matmul::paired
