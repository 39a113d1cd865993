// How transposed tiles leave linear_fp8_sm90.cu.
#pragma once

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "kernel_hub/wgmma.cuh"
#include "matmul/epilogue.cuh"
#include "matmul/fp8/scales.cuh"
#include "matmul/fp8/write.cuh"
#include "matmul/sm90/write.cuh"
#include "matmul/sm90/write_swapped.cuh"

namespace kernel_hub::matmul::fp8 {

// What a thread needs for the end of a swapped tile, read before its product: scale and bias of its
// two rows; scales of columns, of blocks that share k those of its own, else one in 128.
template <typename C, typename Out>
struct SwappedScales {
    static constexpr int kGroups = C::kSplits > 1 ? C::kSums / 4 / C::kSplits : 0;  // of 8 columns
    float of_rows[2], bias[2], of_columns[C::kSplits > 1 ? 2 * kGroups : C::kColumnsAThread];

    // row: the first of the thread's; column: the first of the tile.
    __device__ __forceinline__ void load(const ScaledEpilogue<Out>& epilogue, int row, int column,
                                         uint32_t rank) {
        const int thread = threadIdx.x % 128;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            of_rows[half] = epilogue.b_scales.of_row(row + 8 * half);
            bias[half] = epilogue.bias_of(row + 8 * half);
        }
        if constexpr (C::kSplits > 1) {
#pragma unroll
            for (int i = 0; i < 2 * kGroups; ++i) {
                const int group = rank / C::kSharers + i / 2 * C::kSplits;
                of_columns[i] =
                    epilogue.a_scales.of_row(column + 8 * group + 2 * (thread % 4) + i % 2);
            }
        } else {
#pragma unroll
            for (int i = 0; i < C::kColumnsAThread; ++i) {
                of_columns[i] =
                    epilogue.a_scales.of_row(column + min(128 * i + thread, C::kBlockN - 1));
            }
            if (!epilogue.adds_vectors()) {
                prefetch_residual<C::kBlockN>(epilogue, row / 64 * 64, column, thread);
            }
        }
    }
};

// Writes a transposed tile, of which this warpgroup's part begins at (first_row, column) of the
// product: through boxes where it can. kIsPlain: straight code, as in write_boxes.
template <typename C, bool kIsPlain, typename Out>
__device__ __forceinline__ void write_swapped_boxes(const ScaledEpilogue<Out>& epilogue,
                                                    const CUtensorMap* out_map, uint32_t boxes,
                                                    int consumer, int first_row, int column,
                                                    const SwappedScales<C, Out>& scales,
                                                    const float (&acc)[C::kSums],
                                                    const RingEnd<C>& end) {
    const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    const int row = first_row + warp * 16 + lane / 4, barrier = 3 + consumer;
    constexpr bool kHasBoxes = C::kBoxes > 0 && sizeof(Out) == 2;
    constexpr int kGroups = C::kSums / 8, kUnroll = kIsPlain ? kGroups : 1;  // of 16 columns
    const bool has_boxes = kIsPlain || (kHasBoxes && epilogue.is_aligned);
    float* of_columns =
        reinterpret_cast<float*>(dynamic_shared() + C::kColumnsAt) + consumer * C::kBlockN;
#pragma unroll
    for (int i = 0; i < C::kColumnsAThread; ++i) {
        if (128 * i + thread < C::kBlockN) {
            of_columns[128 * i + thread] = scales.of_columns[i];
        }
    }
    if (has_boxes && thread == 0) {
        tma_store_wait<0>();
    }
    const bool has_arrivals = !kIsPlain && kHasBoxes && epilogue.adds_vectors();
    constexpr int kOthers = C::kConsumers - C::kFillConsumers;  // whose residual comes apart
    if (has_arrivals) {
        end.pass(kOthers ? consumer : 0, thread);
        end.wait();
    }
    named_barrier_sync(barrier, 128);
    Out more[8], next[8];
    if (!kIsPlain && !has_arrivals) {
        load_residual(epilogue, row, column + 2 * (lane % 4), more);
    }
#pragma unroll kUnroll
    for (int at = 0; at < kGroups; ++at) {
        float values[8];
#pragma unroll
        for (int of = 0; of < kGroups; ++of) {
            if (of == at) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    values[i] = acc[8 * of + i];
                }
                hold_registers(values);
            }
        }
        const int first = column + 16 * at + 2 * (lane % 4);
        if (!kIsPlain && !has_arrivals) {
            load_residual(epilogue, row, first + 16, next);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float of_column = of_columns[16 * at + 8 * (i / 4) + 2 * (lane % 4) + i % 2];
            // NOTE: a's scale first, as straight tiles have it: a row's bits are the same by both.
            values[i] =
                fmaf(values[i] * of_column, scales.of_rows[i / 2 % 2], scales.bias[i / 2 % 2]);
        }
        if constexpr (!kIsPlain) {
            activate<Out>(values, epilogue.activation);
            if (has_arrivals) {
                if constexpr (kHasBoxes) {
                    add_transposed<Out>(end.arrivals(consumer) + 16 * at * kRowBytes, values);
                }
            } else if (epilogue.residual) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    values[i] += to_float(more[i]);
                    more[i] = next[i];
                }
            }
        }
        if (has_boxes) {
            if constexpr (kHasBoxes) {
                put_transposed<Out>(boxes + 16 * at * kRowBytes, values);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                epilogue.put_complete(first + 8 * (i / 4) + i % 2, row + 8 * (i / 2 % 2),
                                      values[i]);
            }
        }
    }
    if (has_boxes) {
        fence_proxy_async();
        named_barrier_sync(barrier, 128);
        if (thread == 0) {
            tma_store_2d(out_map, boxes, first_row, column);
            tma_store_commit();
        }
        if (has_arrivals) {
            end.release_stage(thread);
            end.pass(kOthers ? kOthers - consumer : 0, thread);
        }
    } else {
        named_barrier_sync(barrier, 128);  // all have read the scales
    }
}

template <typename C, typename Out>
__device__ __forceinline__ void write_scaled_swapped(const ScaledEpilogue<Out>& epilogue,
                                                     const CUtensorMap* out_map, uint32_t boxes,
                                                     int consumer, int first_row, int column,
                                                     const SwappedScales<C, Out>& scales,
                                                     const float (&acc)[C::kSums],
                                                     const RingEnd<C>& end) {
    if constexpr (C::kBoxes > 0 && sizeof(Out) == 2) {
        if (epilogue.is_aligned && !epilogue.residual && epilogue.activation == kIdentity) {
            write_swapped_boxes<C, true>(epilogue, out_map, boxes, consumer, first_row, column,
                                         scales, acc, end);
            return;
        }
    }
    write_swapped_boxes<C, false>(epilogue, out_map, boxes, consumer, first_row, column, scales,
                                  acc, end);
}

// Adds the sums of the blocks of a cluster, in order of their ranks, and writes the swapped tile:
// each block every kSplits-th group of 8 columns.
template <typename C, typename Out>
__device__ __forceinline__ void merge_and_write_scaled(const ScaledEpilogue<Out>& epilogue, int row,
                                                       int column,
                                                       const SwappedScales<C, Out>& scales,
                                                       const float (&acc)[C::kSums], uint32_t sums,
                                                       uint32_t rank, int thread) {
    constexpr int kThreads = 128 * C::kConsumers;
    static_assert(C::kSwaps, "only few rows share k");
    show_sums<C>(acc, sums, thread);
#pragma unroll
    for (int j = 0; j < scales.kGroups; ++j) {
        const int i = rank / C::kSharers + j * C::kSplits;
        float total[4] = {};
#pragma unroll
        for (int split = 0; split < C::kSplits; ++split) {
            const float4 part = ld_shared_cluster(cluster_address(
                sums + (i * kThreads + thread) * 16, split * C::kSharers + rank % C::kSharers));
            total[0] += part.x, total[1] += part.y, total[2] += part.z, total[3] += part.w;
        }
        const int to = column + 8 * i + 2 * (threadIdx.x % 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            total[e] = fmaf(total[e] * scales.of_columns[2 * j + e % 2], scales.of_rows[e / 2],
                            scales.bias[e / 2]);
        }
        activate<Out>(total, epilogue.activation);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            epilogue.put(to + e % 2, row + 8 * (e / 2), total[e]);
        }
    }
    // No block may leave while its sums are read.
    cluster_arrive();
    cluster_wait();
}

}  // namespace kernel_hub::matmul::fp8
