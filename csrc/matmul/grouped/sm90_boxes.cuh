// How sums leave batched_matmul_sm90.cu: rounded or as fp32 into boxes in shared memory, and from
// there by the copy engine or, where rows of out do not begin and end at multiples of 16 bytes, a
// row of a box a warp at a time, 4 bytes a lane.
#pragma once

#include "kernel_hub/ptx.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/vec.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "matmul/grouped/sm90_loop.cuh"
#include "matmul/grouped/sm90_write.cuh"

namespace kernel_hub::matmul::grouped {

// Puts the sums of box `number` of a tile's into a box: kBoxRows rows of 128 bytes, swizzled as the
// copy engine does.
template <typename C, typename Out>
__device__ __forceinline__ void put_box(uint32_t box, int number, const float (&acc)[C::kSums]) {
    const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    if constexpr (sizeof(Out) == 4) {
        uint8_t* bytes = shared_bytes(box);
        if constexpr (C::kSwaps) {
            if (warp / 2 == number) {  // 32 columns: of two warps
#pragma unroll
                for (int i = 0; i < C::kSums; ++i) {
                    const int r = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
                    const int chunk = warp % 2 * 4 + i / 2 % 2 * 2 + lane / 16;
                    *reinterpret_cast<float*>(bytes + r * kRowBytes + (chunk ^ r % 8) * 16 +
                                              lane / 4 % 4 * 4) = acc[i];
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < 16; i += 2) {
                const int r = warp * 16 + lane / 4 + 8 * (i / 2 % 2);
                const int chunk = 2 * (i / 4) + lane % 4 / 2;
                *reinterpret_cast<float2*>(bytes + r * kRowBytes + (chunk ^ r % 8) * 16 +
                                           lane % 2 * 8) =
                    make_float2(acc[16 * number + i], acc[16 * number + i + 1]);
            }
        }
    } else if constexpr (C::kSwaps) {
#pragma unroll
        for (int j = 0; j < C::kSums / 4; j += 2) {
            uint32_t words[4];
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                words[w] = pack2<Out>(acc[4 * j + 2 * w], acc[4 * j + 2 * w + 1]);
            }
            const int r = 8 * (j + lane / 16) + lane % 8, chunk = 2 * warp + lane / 8 % 2;
            stmatrix_x4_trans(box + r * kRowBytes + (chunk ^ (lane % 8)) * 16, words[0], words[1],
                              words[2], words[3]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            uint32_t words[4];
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const int at = 32 * number + 4 * j + 2 * w;
                words[w] = pack2<Out>(acc[at], acc[at + 1]);
            }
            const int r = warp * 16 + lane % 16, chunk = j + lane / 16;
            stmatrix_x4(box + r * kRowBytes + (chunk ^ (lane % 8)) * 16, words[0], words[1],
                        words[2], words[3]);
        }
    }
}

// Writes the first `count` elements of a row of a box, of which each lane has 4 bytes. Whole warps.
template <typename Out>
__device__ __forceinline__ void store_row(Out* to, uint32_t word, int count) {
    const int lane = threadIdx.x % 32;
    if constexpr (sizeof(Out) == 4) {
        if (lane < count) {
            reinterpret_cast<uint32_t*>(to)[lane] = word;
        }
    } else {
        // Where the row begins between two words of memory, those lie across the words of the box.
        const uint32_t next = __shfl_sync(~0u, word, (lane + 1) % 32);
        const int shift = static_cast<int>(reinterpret_cast<uint64_t>(to) / 2 % 2);
        const int at = 2 * lane + shift;
        const uint64_t both = static_cast<uint64_t>(next) << 32 | word;
        const uint32_t pair = static_cast<uint32_t>(both >> 16 * shift);
        if (at + 1 < count) {
            *reinterpret_cast<uint32_t*>(to + at) = pair;
        }
        if (at + 1 == count) {
            reinterpret_cast<uint16_t*>(to)[at] = static_cast<uint16_t>(pair);
        }
        if (lane < min(shift, count)) {
            reinterpret_cast<uint16_t*>(to)[0] = static_cast<uint16_t>(word);
        }
    }
}

// Writes the rows of `kCount` boxes side by side, those of this warp: 16 neighbours, or where
// kSwaps every fourth. `to`: where the boxes begin in out; rows, columns: those that are inside.
template <typename C, int kCount, typename Out>
__device__ __forceinline__ void store_rows(Out* to, int64_t stride, uint32_t boxes, int rows,
                                           int columns) {
    constexpr int kColumns = kRowBytes / sizeof(Out), kStep = C::kSwaps ? 4 : 1;
    constexpr int kRows = C::kBoxRows / 4;
    constexpr int kAtOnce = 4 / kCount < 1 ? 1 : 4 / kCount;
    // NOTE: a shuffled number: the loop's end is then known to be the warp's, else ptxas keeps the
    // descriptors of all products in vector registers (65 instructions a step of k instead of 48).
    const int lane = threadIdx.x % 32, warp = warp_index() % 4;
    const int first = C::kSwaps ? warp : 16 * warp;
    rows = min(rows, first + kStep * kRows);
    to += first * stride;
#pragma unroll 1
    for (int r = first; r < rows; r += kStep * kAtOnce) {
        uint32_t words[kAtOnce][kCount];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
            for (int b = 0; b < kCount; ++b) {
                const int at = r + kStep * i;
                words[i][b] = *reinterpret_cast<const uint32_t*>(
                    shared_bytes(boxes + b * C::kOutBoxBytes + at * kRowBytes +
                                 (lane / 4 ^ at % 8) * 16 + lane % 4 * 4));
            }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int inside = r + kStep * i < rows ? columns : 0;
#pragma unroll
            for (int b = 0; b < kCount; ++b) {
                store_row(to + b * kColumns, words[i][b], min(inside - b * kColumns, kColumns));
            }
            to += kStep * stride;
        }
    }
}

// Writes the tile of a consumer from (row, column) of a matrix on: 64 rows of out and kBlockN
// columns, or where kSwaps kBlockN rows and 64 columns. out: of the first matrix; map: null where
// the copy engine cannot store the results; outer: the matrix's place in the map; rows: of it.
template <typename C, typename Policy, typename Out>
__device__ __forceinline__ void write_boxes(const Policy& policy, Out* out, const CUtensorMap* map,
                                            int2 outer, uint32_t boxes, int barrier, int row,
                                            int rows, int column, const float (&acc)[C::kSums]) {
    constexpr int kColumns = kRowBytes / sizeof(Out);
    constexpr int kAll = (C::kSwaps ? 64 : C::kBlockN) / kColumns;
    constexpr int kBatch = kAll % C::kBoxes == 0 ? C::kBoxes : 1;
    const int thread = threadIdx.x % 128;
    const bool is_stored = map != nullptr;
    // A warp reads the rows that it wrote; of a swapped tile, and by the copy engine, all do.
    const bool meets = C::kSwaps || is_stored;
#pragma unroll
    for (int first = 0; first < kAll; first += kBatch) {
        const int at = column + first * kColumns;
        if (first != 0 && at >= policy.columns()) {
            break;
        }
        if (meets) {
            if (thread == 0) {
                tma_store_wait<0>();
            }
            named_barrier_sync(barrier, 128);
        } else {
            __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            put_box<C, Out>(boxes + i * C::kOutBoxBytes, first + i, acc);
        }
        if (meets) {
            fence_proxy_async();
            named_barrier_sync(barrier, 128);
        } else {
            __syncwarp();
        }
        if (is_stored) {
            if (thread == 0) {
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    if (at + i * kColumns < policy.columns()) {
                        tma_store_4d(map, boxes + i * C::kOutBoxBytes, at + i * kColumns, row,
                                     outer.x, outer.y);
                    }
                }
                tma_store_commit();
            }
            continue;
        }
        store_rows<C, kBatch>(out + policy.offset(outer, row) + at, policy.stride(), boxes,
                              rows - row, policy.columns() - at);
    }
}

}  // namespace kernel_hub::matmul::grouped
