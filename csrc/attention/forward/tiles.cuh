// What attention kernels on mma.sync share: swizzled tiles in shared memory, and register economy.
#pragma once

#include "kernel_hub/mma.cuh"
#include "kernel_hub/vec.cuh"

namespace kernel_hub::attention::forward {

// Byte offset of 16-byte chunk `chunk` of row `row` of a tile: eight rows of one chunk column, and
// the chunks of one row, lie in different banks.
template <int kHeadDim>
__device__ __forceinline__ int swizzled(int row, int chunk) {
    constexpr int kRowBytes = kHeadDim * 2;
    const int flip = kHeadDim % 64 == 0 ? row & 7 : (row >> 1) & 3;
    return row * kRowBytes + ((chunk ^ flip) << 4);
}

// Where a lane reads for ldmatrix, `row` rows and `chunk` chunks after `lane_address`, its place in
// the first 16 x 16 operand of a tile. row: a multiple of 16; chunk: even.
template <int kHeadDim>
__device__ __forceinline__ uint32_t operand_at(uint32_t lane_address, int row, int chunk) {
    constexpr int kFlipMask = kHeadDim % 64 == 0 ? 0x70 : 0x30;
    return (lane_address ^ (chunk * 16 & kFlipMask)) + row * kHeadDim * 2 +
           (chunk * 16 & ~kFlipMask);
}

// Which 16-byte chunks of a tile a thread loads: rows first_row() + i * kRowStep, chunks
// first_chunk() + j * kLanes.
template <int kHeadDim, int kNumThreads>
struct LoadShape {
    static constexpr int kLanes = kHeadDim % 64 == 0 ? 8 : 4;  // threads side by side in a row
    static constexpr int kRowStep = kNumThreads / kLanes;
    static __device__ __forceinline__ int first_row() { return threadIdx.x / kLanes; }
    static __device__ __forceinline__ int first_chunk() { return threadIdx.x % kLanes; }
};

// Where chunk first_chunk() of a row is, if the row is anywhere.
template <typename T>
struct RowPlace {
    const T* data;
    bool is_there;
};

// Starts the copy of kRows rows to `tile`. `locate(row)` gives the RowPlace of a row; it is asked
// for rows first_row() + i * kRowStep, in order. Only `num_rows` rows and `num_cols` columns, both
// counted from this thread's first, are read; the others become zeros.
template <typename T, int kHeadDim, int kRows, int kNumThreads, bool kMayBeUnaligned,
          typename Locate>
__device__ __forceinline__ void load_tile(uint8_t* tile, int num_rows, int num_cols, int is_aligned,
                                          Locate locate) {
    using Shape = LoadShape<kHeadDim, kNumThreads>;
    constexpr int kLanes = Shape::kLanes;
    constexpr int kRowStep = Shape::kRowStep;
    const int first_row = Shape::first_row();
    const int first_chunk = Shape::first_chunk();
    const uint32_t address = shared_address(tile);
#pragma unroll
    for (int i = 0; i < (kRows + kRowStep - 1) / kRowStep; ++i) {
        const int row = first_row + i * kRowStep;
        if (kRows % kRowStep != 0 && row >= kRows) {
            break;
        }
        const RowPlace<T> place = locate(row);
        const T* source = place.data;
#pragma unroll
        for (int j = 0; j < kHeadDim / 8 / kLanes; ++j) {
            const bool is_inside =
                place.is_there && i * kRowStep < num_rows && j * kLanes * 8 < num_cols;
            const int offset = swizzled<kHeadDim>(row, first_chunk + j * kLanes);
            if (!kMayBeUnaligned || is_aligned) {
                cp_async_16(address + offset, source + j * kLanes * 8, is_inside);
            } else {
                uint32_t words[4] = {0, 0, 0, 0};
                if (is_inside) {
                    const auto* bits = reinterpret_cast<const uint16_t*>(source) + j * kLanes * 8;
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        words[e] = bits[2 * e] | static_cast<uint32_t>(bits[2 * e + 1]) << 16;
                    }
                }
                *reinterpret_cast<uint4*>(tile + offset) =
                    make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
}

// `value` of lane 0, for what all lanes have alike: it may then lie in a uniform register, and
// branches on it need no reconvergence.
__device__ __forceinline__ int warp_uniform(int value) {
    return __shfl_sync(~0u, value, 0);
}

// `value`, with its origin hidden: what follows from it is computed where it is used, not once
// before the loop and then held in registers, of which the loop has none to spare.
__device__ __forceinline__ int recomputed(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

// Lane q of each quad has the words of columns {2q, 2q + 1} of four 8-column tiles; afterwards it
// has tile q: 8 columns in order. A 4x4 transpose by two rounds of exchange.
// NOTE: does what transpose_in_quad (math.cuh) does; each is other machine code in the other's
// place.
__device__ __forceinline__ void transpose_by_steps(uint32_t (&words)[4], int lane_idx) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        const bool is_upper = lane_idx & step;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int low = step == 1 ? 2 * i : i;
            const int high = low + step;
            const uint32_t sent = is_upper ? words[low] : words[high];
            const uint32_t got = __shfl_xor_sync(~0u, sent, step);
            if (is_upper) {
                words[low] = got;
            } else {
                words[high] = got;
            }
        }
    }
}

}  // namespace kernel_hub::attention::forward
