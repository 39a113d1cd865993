// How tiles leave linear_sm90.cu: rounded with their epilogue, transposed, or added up over blocks.
#pragma once

#include <type_traits>

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "kernel_hub/wgmma.cuh"
#include "matmul/epilogue.cuh"
#include "matmul/sm90/loop.cuh"
#include "matmul/sm90/tiles.cuh"

namespace kernel_hub::matmul::sm90 {

// How the groups of 32 columns of a tile are written: `kAny` in a loop, any epilogue and any
// alignment; otherwise straight, aligned results of 16 bits with one activation, or kPlain, with
// nothing added either.
// NOTE: straight code of every activation would be 5 times the size of all else, and the loop costs
// 300 cycles a group: relu and what is not aligned take it.
constexpr int kPlain = -1, kAny = -2;

// The ring after a tile's last step of k, where its residual arrives.
template <typename C>
struct RingEnd {
    Ring<C::kStages>& ring;
    uint32_t base, full, empty, rank;

    // What a consumer adds to the results of a filling of its boxes.
    __device__ __forceinline__ uint32_t arrivals(int consumer) const {
        const int at = C::kFillConsumers == C::kConsumers ? consumer : 0;
        return base + ring.stage * C::kStageBytes + at * C::kFillBytes;
    }
    __device__ __forceinline__ void wait() const {
        mbarrier_wait(full + 8 * ring.stage, ring.parity);
    }
    // All threads of the consumer have read them.
    __device__ __forceinline__ void release_stage(int thread) const {
        release<C>(empty, ring.stage, rank, thread);
        ring.next();
    }
    // Lets what fills the ring for `count` other consumers pass.
    __device__ __forceinline__ void pass(int count, int thread) const {
        for (int i = 0; i < count; ++i) {
            wait();
            release_stage(thread);
        }
    }
};

// Where a lane's 16 bytes are in a box of 64 x 64, for stmatrix and ldmatrix; `half`: which half of
// the 32 columns of a group.
__device__ __forceinline__ uint32_t place_in_box(int group, int half) {
    const int lane = threadIdx.x % 32;
    const int row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    const int chunk = group % 2 * 4 + half * 2 + lane / 16;
    return row * kRowBytes + (chunk ^ (lane % 8)) * 16;
}

template <typename Out>
__device__ __forceinline__ void put_in_box(uint32_t box, int group, const float (&values)[16]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[i] = pack2<Out>(values[8 * half + 2 * i], values[8 * half + 2 * i + 1]);
        }
        stmatrix_x4(box + place_in_box(group, half), words[0], words[1], words[2], words[3]);
    }
}

template <typename Out>
__device__ __forceinline__ void add_from_box(uint32_t box, int group, float (&values)[16]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t words[4];
        ldmatrix_x4(words, box + place_in_box(group, half));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float pair[2];
            Word<Out>::unpack(words[i], pair);
            values[8 * half + 2 * i] += pair[0];
            values[8 * half + 2 * i + 1] += pair[1];
        }
    }
}

// Returns when the stores before have read a consumer's boxes and, where it waits for one, the
// residual has arrived. By the consumer.
template <typename C>
__device__ __forceinline__ void await_boxes(const RingEnd<C>& end, bool has_arrivals, int consumer,
                                            int thread) {
    if (thread == 0) {
        tma_store_wait<0>();
    }
    if (has_arrivals) {
        end.wait();
    }
    named_barrier_sync(3 + consumer, 128);
}

// Writes 64 rows of a tile, of which this warpgroup's part begins at (first_row, column): 64
// columns at a time through boxes in shared memory and the copy engine, what is left of 64, fp32
// and unaligned results from registers.
template <typename C, int kHow, typename T, typename Out>
__device__ __forceinline__ void write_groups(const Epilogue<T, Out>& epilogue,
                                             const CUtensorMap* out_map, const uint32_t* tile_bias,
                                             uint32_t boxes, int consumer, int first_row,
                                             int column, const float (&acc)[C::kPieces][C::kSums],
                                             const RingEnd<C>& end) {
    constexpr bool kThroughBoxes = sizeof(Out) == 2;
    constexpr int kGroups = C::kBlockN / 32, kBoxGroups = C::kBlockN / kBoxColumns * 2;
    constexpr int kBatch = 2 * C::kBoxes, kUnroll = kHow == kAny ? 1 : kGroups;
    const int thread = threadIdx.x % 128;
    const int row = first_row + thread / 32 * 16 + thread % 32 / 4;
    const bool has_boxes = kThroughBoxes && (kHow != kAny || epilogue.is_aligned);
    const bool has_arrivals = kHow != kPlain && epilogue.adds_vectors();
#pragma unroll kUnroll
    for (int group = 0; group < kGroups; ++group) {
        const int in_batch = group % kBatch;
        if (kThroughBoxes && in_batch == 0) {
            await_boxes(end, has_arrivals, consumer, thread);
        }
        float values[16];
        pick<kGroups>(values, group, [&](int i) { return acc[i / C::kSums][i % C::kSums]; });
        if constexpr (kHow != kPlain) {
            if (epilogue.bias) {
                epilogue.add_bias(tile_bias + 16 * group, values);
            }
            activate<Out>(values, kHow == kAny ? epilogue.activation : kHow);
        }
        if constexpr (kHow == kAny) {
            hold_registers(values);  // one copy of what follows, not one for each activation
        }
        if constexpr (kThroughBoxes) {
            const uint32_t box = in_batch / 2 * kBoxBytes;
            if (has_arrivals) {
                add_from_box<Out>(end.arrivals(consumer) + box, group, values);
            }
            if (has_boxes && group < kBoxGroups) {
                put_in_box<Out>(boxes + box, group, values);
            } else if (kHow == kAny) {
                epilogue.put_32(row, column + 32 * group, values);
            } else {
                epilogue.put_32_aligned(row, column + 32 * group, values);
            }
            if (in_batch == kBatch - 1 || group == kGroups - 1) {
                fence_proxy_async();
                named_barrier_sync(3 + consumer, 128);
                if (has_arrivals) {
                    end.release_stage(thread);
                }
                if (has_boxes && thread == 0) {
                    const int first = group - in_batch;
#pragma unroll kUnroll
                    for (int from = first; from <= group && from < kBoxGroups; from += 2) {
                        tma_store_2d(out_map, boxes + (from - first) / 2 * kBoxBytes,
                                     column + 32 * from, first_row);
                    }
                    tma_store_commit();
                }
            }
        } else {
            epilogue.put_32(row, column + 32 * group, values);
        }
    }
}

// Calls write(form) with what of the above the launch asks for. kOwnActivations: gelu and silu have
// code of their own.
template <typename Out, bool kOwnActivations, typename T, typename Write>
__device__ __forceinline__ void write_in_form(const Epilogue<T, Out>& epilogue,
                                              const Write& write) {
    if constexpr (sizeof(Out) == 2) {
        if (epilogue.is_plain()) {
            return write(std::integral_constant<int, kPlain>());
        }
        if (epilogue.is_aligned && epilogue.activation == kIdentity) {
            return write(std::integral_constant<int, kIdentity>());
        }
        if constexpr (kOwnActivations) {
            if (epilogue.is_aligned && epilogue.activation == kGelu) {
                return write(std::integral_constant<int, kGelu>());
            }
            if (epilogue.is_aligned && epilogue.activation == kSilu) {
                return write(std::integral_constant<int, kSilu>());
            }
        }
    }
    write(std::integral_constant<int, kAny>());
}

// Writes 64 rows of a tile. `bias_words`: of this thread, of the bias of its columns.
template <typename C, typename T, typename Out>
__device__ __forceinline__ void write_tile(const Epilogue<T, Out>& epilogue,
                                           const CUtensorMap* out_map, uint32_t* tile_bias,
                                           const uint32_t (&bias_words)[C::kBiasWords],
                                           uint32_t boxes, int consumer, int first_row, int column,
                                           const float (&acc)[C::kPieces][C::kSums],
                                           const RingEnd<C>& end) {
    const auto write = [&](auto how) {
        write_groups<C, decltype(how)::value>(epilogue, out_map, tile_bias, boxes, consumer,
                                              first_row, column, acc, end);
    };
    if (epilogue.bias) {
        const int thread = threadIdx.x % 128;
        // All must have read the last tile's.
        named_barrier_sync(3 + consumer, 128);
#pragma unroll
        for (int i = 0; i < C::kBiasWords; ++i) {
            if (thread + 128 * i < C::kBlockN / 2) {
                tile_bias[thread + 128 * i] = bias_words[i];
            }
        }
        named_barrier_sync(3 + consumer, 128);
    }
    // Code for each activation: of the tiles of many rows.
    write_in_form<Out, (C::kBlockN % 64 == 0 && C::kBlockN > 64)>(epilogue, write);
}

// The groups of 8 columns of a swapped tile that a block of those that share k writes, and what is
// added to them, read before the product so that nothing waits for it.
template <typename C, typename T, typename Out>
struct SplitExtras {
    static constexpr int kGroups = C::kSums / 4 / C::kSplits;
    static_assert(kGroups * 4 * C::kSplits == C::kSums, "every block writes as many");
    static_assert(C::kSwaps, "a thread's sums are of two columns of out");
    T bias[2];
    Out residual[kGroups][4];
    int row, column, share;  // of the product: those of this thread's first sum

    // Calls visit(group, element, row of out, column of out) for those that are in out.
    template <typename Visit>
    __device__ __forceinline__ void for_each(const Epilogue<T, Out>& epilogue, Visit visit) const {
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int64_t to = column + 8 * (share + j * C::kSplits) + i % 2;
                const int at = row + 8 * (i / 2);
                if (to < epilogue.m && at < epilogue.n) {
                    visit(j, i, to, at);
                }
            }
        }
    }

    __device__ __forceinline__ void load(const Epilogue<T, Out>& epilogue) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (epilogue.bias && row + 8 * half < epilogue.n) {
                bias[half] = epilogue.bias[row + 8 * half];
            }
        }
        if (epilogue.residual) {
            for_each(epilogue, [&](int j, int i, int64_t to, int at) {
                residual[j][i] = epilogue.residual[to * epilogue.residual_stride + at];
            });
        }
    }
};

// Puts a thread's sums where the blocks of the cluster read them, and returns when all have.
template <typename C>
__device__ __forceinline__ void show_sums(const float (&acc)[C::kSums], uint32_t sums, int thread) {
    constexpr int kThreads = 128 * C::kConsumers;
    // The ring becomes the place of the sums: all must have read it.
    named_barrier_sync(2, kThreads);
#pragma unroll
    for (int i = 0; i < C::kSums / 4; ++i) {
        st_shared(sums + (i * kThreads + thread) * 16, acc[4 * i], acc[4 * i + 1], acc[4 * i + 2],
                  acc[4 * i + 3]);
    }
    cluster_arrive();
    cluster_wait();
}

// values = act(values), of which a thread has many: a loop through its own places in shared memory,
// every kThreads-th of `places`, as straight code of all activations would be most of a kernel.
template <typename Out, int kThreads, int kCount>
__device__ __forceinline__ void activate_in_loop(float (&values)[kCount], int activation,
                                                 float4* places) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
        places[i * kThreads] =
            make_float4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
    }
#pragma unroll 1
    for (int i = 0; i < kCount / 4; ++i) {
        const float4 four = places[i * kThreads];
        float some[4] = {four.x, four.y, four.z, four.w};
        activate<Out>(some, activation);
        places[i * kThreads] = make_float4(some[0], some[1], some[2], some[3]);
    }
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
        const float4 four = places[i * kThreads];
        values[4 * i] = four.x, values[4 * i + 1] = four.y;
        values[4 * i + 2] = four.z, values[4 * i + 3] = four.w;
    }
}

// Adds the sums of the blocks of a cluster, in order of their ranks, and writes the tile: each
// block every kSplits-th group of 8 columns.
template <typename C, typename T, typename Out>
__device__ __forceinline__ void merge_and_write(const Epilogue<T, Out>& epilogue,
                                                const SplitExtras<C, T, Out>& extras,
                                                float (&acc)[C::kSums], uint32_t sums,
                                                uint32_t rank, int thread) {
    constexpr int kThreads = 128 * C::kConsumers, kGroups = C::kSums / 4 / C::kSplits;
    constexpr bool kLoops = kGroups > 4;
    static_assert(!kLoops || kThreads * 4 * (C::kSums + 4 * kGroups) <= C::kBarriersAt,
                  "behind the sums the ring has room for those of a block");
    show_sums<C>(acc, sums, thread);
    float totals[4 * kGroups] = {};
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
        const int i = extras.share + j * C::kSplits;
#pragma unroll
        for (int split = 0; split < C::kSplits; ++split) {
            const float4 part = ld_shared_cluster(cluster_address(
                sums + (i * kThreads + thread) * 16, split * C::kSharers + rank % C::kSharers));
            totals[4 * j] += part.x, totals[4 * j + 1] += part.y;
            totals[4 * j + 2] += part.z, totals[4 * j + 3] += part.w;
        }
    }
    // No block may leave while its sums are read.
    cluster_arrive();
    if (epilogue.bias) {
#pragma unroll
        for (int i = 0; i < 4 * kGroups; ++i) {
            totals[i] += to_float(extras.bias[i / 2 % 2]);
        }
    }
    if constexpr (kLoops) {
        if (epilogue.activation != kIdentity) {
            auto* behind = reinterpret_cast<float4*>(dynamic_shared() + kThreads * C::kSums * 4);
            activate_in_loop<Out, kThreads>(totals, epilogue.activation, behind + thread);
        }
    } else {
        activate<Out>(totals, epilogue.activation);
    }
    hold_registers(totals);  // one copy of what follows, not one for each of what is before
    if (epilogue.residual) {
#pragma unroll
        for (int i = 0; i < 4 * kGroups; ++i) {
            totals[i] += to_float(extras.residual[i / 4][i % 4]);
        }
    }
    hold_registers(totals);
    extras.for_each(epilogue, [&](int j, int i, int64_t to, int at) {
        epilogue.out[to * epilogue.out_stride + at] = from_float<Out>(totals[4 * j + i]);
    });
    cluster_wait();
}

}  // namespace kernel_hub::matmul::sm90
