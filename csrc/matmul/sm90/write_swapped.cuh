// How transposed tiles leave linear_sm90.cu, whose rows are rows of b: through boxes of 64 of them.
#pragma once

#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "matmul/epilogue.cuh"
#include "matmul/sm90/tiles.cuh"

namespace kernel_hub::matmul::sm90 {

// The residual of a thread's sums, of which the first is that of (row, column) of the product.
template <typename T, typename Out, int kCount>
__device__ __forceinline__ void load_residual(const Epilogue<T, Out>& epilogue, int row, int column,
                                              Out (&values)[kCount]) {
    if (epilogue.residual) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int64_t token = column + 8 * (i / 4) + i % 2;
            const int from = row + 8 * (i / 2 % 2);
            if (token < epilogue.m && from < epilogue.n) {
                values[i] = epilogue.residual[token * epilogue.residual_stride + from];
            }
        }
    }
}

// Has the L2 fetch the residual of a transposed tile's part: 64 rows of the product from
// `first_row` on, the columns from `column` on, each of a thread and in one or two lines.
template <int kColumns, typename T, typename Out>
__device__ __forceinline__ void prefetch_residual(const Epilogue<T, Out>& epilogue, int first_row,
                                                  int column, int thread) {
    if (epilogue.residual == nullptr || first_row >= epilogue.n) {
        return;
    }
    const int last_row = min(first_row + 63, epilogue.n - 1);
#pragma unroll
    for (int i = 0; i < kColumns; i += 128) {
        const int token = column + i + thread;
        if (i + thread < kColumns && token < epilogue.m) {
            const Out* line = epilogue.residual + token * epilogue.residual_stride;
            prefetch_l2(line + first_row);
            prefetch_l2(line + last_row);
        }
    }
}

// What is added to a transposed tile, read before the product so that nothing waits for it; of a
// wide tile only the bias: its sums need the registers.
template <typename C, typename T, typename Out>
struct SwappedExtras {
    static constexpr bool kIsWide = C::kSums > 32;
    T bias[2];
    Out residual[kIsWide ? 1 : C::kSums];

    // row, column: the first of this thread's sums; tile_column: the first of the tile.
    __device__ __forceinline__ void load(const Epilogue<T, Out>& epilogue, int row, int column,
                                         int tile_column) {
        if (epilogue.bias) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (row + 8 * half < epilogue.n) {
                    bias[half] = epilogue.bias[row + 8 * half];
                }
            }
        }
        if constexpr (kIsWide) {
            prefetch_residual<C::kBlockN>(epilogue, row / 64 * 64, tile_column, threadIdx.x % 128);
        } else {
            load_residual(epilogue, row, column, residual);
        }
    }

    // Makes results of sums.
    template <int kCount>
    __device__ __forceinline__ void finish(const Epilogue<T, Out>& epilogue,
                                           const Out (&more)[kCount],
                                           float (&values)[kCount]) const {
        if (epilogue.bias) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                values[i] += to_float(bias[i / 2 % 2]);
            }
        }
        activate<Out>(values, epilogue.activation);
        if (epilogue.residual) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                values[i] += to_float(more[i]);
            }
        }
    }
};

// Puts results of 64 rows of a transposed tile and 2 kCount columns into a box.
template <typename Out, int kCount>
__device__ __forceinline__ void put_transposed(uint32_t box, const float (&values)[kCount]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
    for (int j = 0; j < kCount / 4; j += 2) {
        uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            words[w] = pack2<Out>(values[4 * j + 2 * w], values[4 * j + 2 * w + 1]);
        }
        const int box_row = 8 * (j + lane / 16) + lane % 8;
        const int chunk = 2 * warp + lane / 8 % 2;
        stmatrix_x4_trans(box + box_row * kRowBytes + (chunk ^ (lane % 8)) * 16, words[0], words[1],
                          words[2], words[3]);
    }
}

// Writes a wide transposed tile, 32 columns after another; kIsPlain: they are rounded sums.
template <typename C, bool kIsPlain, typename T, typename Out>
__device__ __forceinline__ void write_wide(const Epilogue<T, Out>& epilogue,
                                           const CUtensorMap* out_map, uint32_t boxes, int barrier,
                                           int first_row, int column, int row, int first_column,
                                           const SwappedExtras<C, T, Out>& extras,
                                           const float (&acc)[C::kSums]) {
    constexpr int kGroups = C::kBlockN / 32, kBatch = 2 * C::kBoxes;
    constexpr int kUnroll = kIsPlain ? kGroups : 1;
    const int thread = threadIdx.x % 128;
    constexpr bool kThroughBoxes = sizeof(Out) == 2;
    const bool has_boxes = kThroughBoxes && (kIsPlain || epilogue.is_aligned);
    Out more[16];
    if constexpr (!kIsPlain) {
        load_residual(epilogue, row, first_column, more);
    }
#pragma unroll kUnroll
    for (int group = 0; group < kGroups; ++group) {
        const int in_batch = group % kBatch;
        if (has_boxes && in_batch == 0) {
            // The boxes must have been read by the stores before.
            if (thread == 0) {
                tma_store_wait<0>();
            }
            named_barrier_sync(barrier, 128);
        }
        float values[16];
        pick<kGroups>(values, group, [&](int i) { return acc[i]; });
        if constexpr (!kIsPlain) {
            // NOTE: a group ahead; what is behind the tile's last column is never added.
            Out next[16];
            load_residual(epilogue, row, first_column + 32 * (group + 1), next);
            extras.finish(epilogue, more, values);
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                more[i] = next[i];
            }
        }
        if (has_boxes) {
            if constexpr (kThroughBoxes) {
                put_transposed<Out>(boxes + in_batch * 32 * kRowBytes, values);
            }
            if (in_batch == kBatch - 1 || group == kGroups - 1) {
                fence_proxy_async();
                named_barrier_sync(barrier, 128);
                if (thread == 0) {
                    for (int at = 0; at < 32 * (in_batch + 1); at += C::kOutBoxRows) {
                        tma_store_2d(out_map, boxes + at * kRowBytes, first_row,
                                     column + 32 * (group - in_batch) + at);
                    }
                    tma_store_commit();
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                epilogue.put_complete(first_column + 32 * group + 8 * (i / 4) + i % 2,
                                      row + 8 * (i / 2 % 2), values[i]);
            }
        }
    }
}

// Writes a transposed tile, of which this warpgroup's part begins at (first_row, column) of the
// product: through boxes where it can. A lane's first sum is that of (row, first_column).
template <typename C, typename T, typename Out>
__device__ __forceinline__ void write_swapped(const Epilogue<T, Out>& epilogue,
                                              const CUtensorMap* out_map, uint32_t boxes,
                                              int barrier, int first_row, int column, int row,
                                              int first_column,
                                              const SwappedExtras<C, T, Out>& extras,
                                              float (&acc)[C::kSums]) {
    if constexpr (extras.kIsWide) {
        if (sizeof(Out) == 2 && epilogue.is_plain()) {
            write_wide<C, true>(epilogue, out_map, boxes, barrier, first_row, column, row,
                                first_column, extras, acc);
        } else {
            write_wide<C, false>(epilogue, out_map, boxes, barrier, first_row, column, row,
                                 first_column, extras, acc);
        }
        return;
    } else {
        extras.finish(epilogue, extras.residual, acc);
        if constexpr (C::kBoxes > 0 && sizeof(Out) == 2) {
            if (epilogue.is_aligned) {
                const int thread = threadIdx.x % 128;
                if (thread == 0) {
                    tma_store_wait<0>();
                }
                named_barrier_sync(barrier, 128);
                put_transposed<Out>(boxes, acc);
                fence_proxy_async();
                named_barrier_sync(barrier, 128);
                if (thread == 0) {
                    tma_store_2d(out_map, boxes, first_row, column);
                    tma_store_commit();
                }
                return;
            }
        }
#pragma unroll
        for (int i = 0; i < C::kSums; ++i) {
            epilogue.put_complete(first_column + 8 * (i / 4) + i % 2, row + 8 * (i / 2 % 2),
                                  acc[i]);
        }
    }
}

}  // namespace kernel_hub::matmul::sm90
