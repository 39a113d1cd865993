// How transposed tiles leave linear_sm90.cu, whose rows are rows of b: through boxes of 64 of them.
#pragma once

#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "matmul/epilogue.cuh"
#include "matmul/sm90/tiles.cuh"
#include "matmul/sm90/write.cuh"

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

// Where a lane's 16 bytes are in a box of a transposed tile, for stmatrix and ldmatrix; `group`:
// the first of two groups of 8 columns of the product.
__device__ __forceinline__ uint32_t place_transposed(int group) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const int chunk = 2 * warp + lane / 8 % 2;
    return (8 * (group + lane / 16) + lane % 8) * kRowBytes + (chunk ^ (lane % 8)) * 16;
}

// Puts results of 64 rows of a transposed tile and 2 kCount columns into a box.
template <typename Out, int kCount>
__device__ __forceinline__ void put_transposed(uint32_t box, const float (&values)[kCount]) {
#pragma unroll
    for (int j = 0; j < kCount / 4; j += 2) {
        uint32_t words[4] = {};
#pragma unroll
        for (int w = 0; w < min(4, kCount / 2 - 2 * j); ++w) {
            words[w] = pack2<Out>(values[4 * j + 2 * w], values[4 * j + 2 * w + 1]);
        }
        stmatrix_x4_trans(box + place_transposed(j), words[0], words[1], words[2], words[3]);
    }
}

// Adds what lies in a box as put_transposed puts it.
template <typename Out, int kCount>
__device__ __forceinline__ void add_transposed(uint32_t box, float (&values)[kCount]) {
#pragma unroll
    for (int j = 0; j < kCount / 4; j += 2) {
        uint32_t words[4];
        ldmatrix_x4_trans(words, box + place_transposed(j));
#pragma unroll
        for (int w = 0; w < min(4, kCount / 2 - 2 * j); ++w) {
            float pair[2];
            Word<Out>::unpack(words[w], pair);
            values[4 * j + 2 * w] += pair[0];
            values[4 * j + 2 * w + 1] += pair[1];
        }
    }
}

// What is added to a transposed tile, read before the product so that nothing waits for it: the
// bias, and of a narrow tile the residual that does not come through the ring.
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
        if (!epilogue.adds_vectors()) {
            if constexpr (kIsWide) {
                prefetch_residual<C::kBlockN>(epilogue, row / 64 * 64, tile_column,
                                              threadIdx.x % 128);
            } else {
                load_residual(epilogue, row, column, residual);
            }
        }
    }

    template <int kCount>
    __device__ __forceinline__ void add_bias(const Epilogue<T, Out>& epilogue,
                                             float (&values)[kCount]) const {
        if (epilogue.bias) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                values[i] += to_float(bias[i / 2 % 2]);
            }
        }
    }
};

// Adds what load_residual read.
template <typename T, typename Out, int kCount>
__device__ __forceinline__ void add_loaded(const Epilogue<T, Out>& epilogue,
                                           const Out (&more)[kCount], float (&values)[kCount]) {
    if (epilogue.residual && !epilogue.adds_vectors()) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] += to_float(more[i]);
        }
    }
}

// Writes a wide transposed tile, some columns after another; kHow: as in write_groups. Of one
// consumer, whose blocks have few tiles each, code of an activation is a loop: straight code is
// fetched anew in the first tile.
template <typename C, int kHow, typename T, typename Out>
__device__ __forceinline__ void write_wide(const Epilogue<T, Out>& epilogue,
                                           const CUtensorMap* out_map, uint32_t boxes, int consumer,
                                           int first_row, int column, int row, int first_column,
                                           const SwappedExtras<C, T, Out>& extras,
                                           const float (&acc)[C::kSums], const RingEnd<C>& end) {
    constexpr bool kThroughBoxes = sizeof(Out) == 2;
    constexpr int kColumns = C::kGroupColumns, kSome = kColumns / 2;
    constexpr int kGroups = C::kBlockN / kColumns, kBatch = 64 * C::kBoxes / kColumns;
    constexpr bool kLoops = kHow == kAny || (kHow > kIdentity && C::kConsumers == 1);
    constexpr int kUnroll = kLoops ? 1 : kGroups;
    const int thread = threadIdx.x % 128;
    const bool has_boxes = kThroughBoxes && (kHow != kAny || epilogue.is_aligned);
    const bool has_arrivals = kHow != kPlain && epilogue.adds_vectors();
    Out more[kSome];
    if (kHow == kAny && !has_boxes) {
        load_residual(epilogue, row, first_column, more);
    }
#pragma unroll kUnroll
    for (int group = 0; group < kGroups; ++group) {
        const int in_batch = group % kBatch;
        if (has_boxes && in_batch == 0) {
            await_boxes(end, has_arrivals, consumer, thread);
        }
        float values[kSome];
        if constexpr (kSome == 16) {
            pick<kGroups>(values, group, [&](int i) { return acc[i]; });
        } else {
#pragma unroll
            for (int i = 0; i < C::kSums; ++i) {
                if (i < kSome || group == i / kSome) {
                    values[i % kSome] = acc[i];
                }
            }
        }
        Out next[kSome];
        if (kHow == kAny && !has_boxes) {
            // NOTE: a group ahead; what is behind the tile's last column is never added.
            load_residual(epilogue, row, first_column + kColumns * (group + 1), next);
        }
        if constexpr (kHow != kPlain) {
            extras.add_bias(epilogue, values);
            activate<Out>(values, kHow == kAny ? epilogue.activation : kHow);
        }
        if (has_boxes) {
            if constexpr (kThroughBoxes) {
                const uint32_t box = in_batch * kColumns * kRowBytes;
                if (has_arrivals) {
                    add_transposed<Out>(end.arrivals(consumer) + box, values);
                }
                put_transposed<Out>(boxes + box, values);
            }
            if (in_batch == kBatch - 1 || group == kGroups - 1) {
                fence_proxy_async();
                named_barrier_sync(3 + consumer, 128);
                if (has_arrivals) {
                    end.release_stage(thread);
                }
                if (thread == 0) {
                    for (int at = 0; at < kColumns * (in_batch + 1); at += C::kOutBoxRows) {
                        tma_store_2d(out_map, boxes + at * kRowBytes, first_row,
                                     column + kColumns * (group - in_batch) + at);
                    }
                    tma_store_commit();
                }
            }
        } else {
            add_loaded(epilogue, more, values);
#pragma unroll
            for (int i = 0; i < kSome; ++i) {
                more[i] = next[i];
                epilogue.put_complete(first_column + kColumns * group + 8 * (i / 4) + i % 2,
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
                                              int consumer, int first_row, int column, int row,
                                              int first_column,
                                              const SwappedExtras<C, T, Out>& extras,
                                              float (&acc)[C::kSums], const RingEnd<C>& end) {
    if constexpr (extras.kIsWide) {
        const auto write = [&](auto how) {
            write_wide<C, decltype(how)::value>(epilogue, out_map, boxes, consumer, first_row,
                                                column, row, first_column, extras, acc, end);
        };
        write_in_form<Out, C::kGroupColumns == 32>(epilogue, write);
    } else {
        extras.add_bias(epilogue, acc);
        activate<Out>(acc, epilogue.activation);
        if constexpr (sizeof(Out) == 2) {
            if (epilogue.is_aligned) {
                const int thread = threadIdx.x % 128;
                if (thread == 0) {
                    tma_store_wait<0>();
                }
                if (epilogue.residual) {
                    end.wait();
                    add_transposed<Out>(end.arrivals(consumer), acc);
                }
                named_barrier_sync(3 + consumer, 128);
                put_transposed<Out>(boxes, acc);
                fence_proxy_async();
                named_barrier_sync(3 + consumer, 128);
                if (epilogue.residual) {
                    end.release_stage(thread);
                }
                if (thread == 0) {
                    tma_store_2d(out_map, boxes, first_row, column);
                    tma_store_commit();
                }
                return;
            }
        }
        add_loaded(epilogue, extras.residual, acc);
#pragma unroll
        for (int i = 0; i < C::kSums; ++i) {
            epilogue.put_complete(first_column + 8 * (i / 4) + i % 2, row + 8 * (i / 2 % 2),
                                  acc[i]);
        }
    }
}

}  // namespace kernel_hub::matmul::sm90
