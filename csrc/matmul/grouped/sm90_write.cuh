// How a consumer's sums leave grouped_linear_sm90.cu, and those of which two blocks share k. Plain
// results: rounded into boxes in shared memory, and from there by the copy engine where all rows of
// a box are the product's, else row by row. Others: as fp32 through shared memory, finished 8
// columns at a time.
#pragma once

#include "kernel_hub/ptx.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "matmul/grouped/out.cuh"
#include "matmul/grouped/sm90_loop.cuh"
#include "matmul/sm90/schedule.cuh"

namespace kernel_hub::matmul::grouped {

// The bytes of shared memory at an address.
__device__ __forceinline__ uint8_t* shared_bytes(uint32_t address) {
    return static_cast<uint8_t*>(__cvta_shared_to_generic(address));
}

// Sends a box of kBoxRows rows and 64 columns, swizzled as the copy engine does, to (row, column).
// All threads of a consumer, which has written the box. `outer`: the product's place in the map.
template <typename C, typename T>
__device__ __forceinline__ void send_box(const Target<T>& target, const CUtensorMap* out_map,
                                         int2 outer, uint32_t box, int row, int column) {
    const int thread = threadIdx.x % 128;
    const int rows = target.end_row - row;
    if (rows >= C::kBoxRows) {
        if (thread == 0 && column < target.columns) {
            tma_store_4d(out_map, box, column, row, outer.x, outer.y);
            tma_store_commit();
        }
        return;
    }
    const uint8_t* bytes = shared_bytes(box);
#pragma unroll 1
    for (int i = thread; i < 8 * rows; i += 128) {
        const int r = i / 8, chunk = i % 8, first = column + 8 * chunk;
        if (first < target.columns) {
            st_global(
                target.out + (row + r) * target.stride + first,
                *reinterpret_cast<const uint4*>(bytes + r * kRowBytes + (chunk ^ r % 8) * 16));
        }
    }
}

// Writes 64 rows of a tile whose rows are rows of a, from (row, column) on.
// NOTE: one group of 32 columns is rounded and gone before the next: the accumulators of wgmma are
// one block of registers, and a second copy of them spills.
template <typename C, typename T>
__device__ __forceinline__ void write_rows(const Target<T>& target, const CUtensorMap* out_map,
                                           int2 outer, uint32_t boxes, int barrier, int row,
                                           int column, const float (&acc)[C::kSums]) {
    const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    constexpr int kBatch = 2 * C::kBoxes, kGroups = C::kBlockN / 32;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
        if (group % kBatch == 0) {
            // The boxes must have been read by the stores before.
            if (thread == 0) {
                tma_store_wait<0>();
            }
            named_barrier_sync(barrier, 128);
        }
        const uint32_t box = boxes + group % kBatch / 2 * C::kOutBoxBytes;
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            const int chunk = group % 2 * 4 + j + lane / 16;
            const int box_row = warp * 16 + lane % 16;
            uint32_t words[4];
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const int at = 16 * group + 4 * j + 2 * w;
                words[w] = pack2<T>(acc[at], acc[at + 1]);
            }
            stmatrix_x4(box + box_row * kRowBytes + (chunk ^ (lane % 8)) * 16, words[0], words[1],
                        words[2], words[3]);
        }
        if ((group + 1) % kBatch == 0 || group + 1 == kGroups) {
            fence_proxy_async();
            named_barrier_sync(barrier, 128);
            const int first = group / kBatch * kBatch;
#pragma unroll
            for (int from = first; from <= group; from += 2) {
                send_box<C>(target, out_map, outer, boxes + (from - first) / 2 * C::kOutBoxBytes,
                            row, column + 32 * from);
            }
        }
    }
}

// Writes a tile whose rows are rows of b: 64 columns of out from `column` on, kBlockN rows.
template <typename C, typename T>
__device__ __forceinline__ void write_swapped(const Target<T>& target, const CUtensorMap* out_map,
                                              int2 outer, uint32_t box, int barrier, int row,
                                              int column, const float (&acc)[C::kSums]) {
    const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    if (thread == 0) {
        tma_store_wait<0>();
    }
    named_barrier_sync(barrier, 128);
#pragma unroll
    for (int j = 0; j < C::kSums / 4; j += 2) {
        uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            words[w] = pack2<T>(acc[4 * j + 2 * w], acc[4 * j + 2 * w + 1]);
        }
        const int box_row = 8 * (j + lane / 16) + lane % 8;
        const int chunk = 2 * warp + lane / 8 % 2;
        stmatrix_x4_trans(box + box_row * kRowBytes + (chunk ^ (lane % 8)) * 16, words[0], words[1],
                          words[2], words[3]);
    }
    fence_proxy_async();
    named_barrier_sync(barrier, 128);
    send_box<C>(target, out_map, outer, box, row, column);
}

// The same for any epilogue, type and alignment of out: rows of 64 sums take the place of the
// boxes, their 8 chunks of 32 bytes swapped by the row's number. `more`: 64 rows of kBlockN sums to
// add, or null.
// NOTE: they are added here, not in the accumulators: written to in a branch, those make the
// compiler wait for every product (C7518).
template <typename C, bool kFinishes, typename T>
__device__ __forceinline__ void write_finished(const Target<T>& target, const float* more,
                                               uint32_t boxes, int barrier, int row, int column,
                                               const float (&acc)[C::kSums]) {
    const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    constexpr int kParts = C::kSwaps ? 1 : C::kBlockN / 64;
    float* sums = reinterpret_cast<float*>(shared_bytes(boxes));
    if (thread == 0) {
        tma_store_wait<0>();
    }
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
        named_barrier_sync(barrier, 128);  // all have read the sums before
        if constexpr (C::kSwaps) {
#pragma unroll
            for (int i = 0; i < C::kSums; ++i) {
                const int r = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
                const int chunk = 2 * warp + i / 2 % 2;
                sums[64 * r + 8 * (chunk ^ r % 8) + lane / 4] = acc[i];
            }
        } else {
#pragma unroll
            for (int p = 0; p < kParts; ++p) {
                if (p == part) {  // registers have no run-time index
#pragma unroll
                    for (int i = 0; i < 32; i += 2) {
                        const int r = warp * 16 + lane / 4 + 8 * (i / 2 % 2);
                        float* to = sums + 64 * r + 8 * (i / 4 ^ r % 8) + 2 * (lane % 4);
                        *reinterpret_cast<float2*>(to) =
                            make_float2(acc[32 * p + i], acc[32 * p + i + 1]);
                    }
                }
            }
        }
        named_barrier_sync(barrier, 128);
        const int rows = min(C::kBoxRows, target.end_row - row);
#pragma unroll 1
        for (int i = thread; i < 8 * rows; i += 128) {
            const int r = i / 8, first = column + 64 * part + 8 * (i % 8);
            if (first < target.columns) {
                const float4* from =
                    reinterpret_cast<const float4*>(sums + 64 * r + 8 * (i % 8 ^ r % 8));
                const float4 low = from[0], high = from[1];
                float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
                if (more) {
                    const float4* added = reinterpret_cast<const float4*>(more + r * C::kBlockN +
                                                                          64 * part + 8 * (i % 8));
                    const float4 a = added[0], b = added[1];
                    values[0] += a.x, values[1] += a.y, values[2] += a.z, values[3] += a.w;
                    values[4] += b.x, values[5] += b.y, values[6] += b.z, values[7] += b.w;
                }
                write_chunk<kFinishes>(target, row + r, first, values);
            }
        }
    }
}

}  // namespace kernel_hub::matmul::grouped
