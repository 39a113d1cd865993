// Rows of 16-bit values in shared memory, for ldmatrix: where they lie, copies from and to global
// memory of any alignment, and products of what is read from them. Portable to sm_80.
#pragma once

#include "kernel_hub/mma.cuh"
#include "kernel_hub/ptx.cuh"
#include "kernel_hub/vec.cuh"

namespace kernel_hub::attention::backward {

// The place in dynamic shared memory that shared_address gave `address` for.
__device__ __forceinline__ uint8_t* shared_pointer(uint32_t address) {
    return dynamic_shared() + (address - shared_address(dynamic_shared()));
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t word) {
    *reinterpret_cast<uint32_t*>(shared_pointer(address)) = word;
}

// Eight elements of any alignment.
template <typename T>
__device__ __forceinline__ uint4 read_elements(const T* source) {
    const uint16_t* bits = reinterpret_cast<const uint16_t*>(source);
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        words[i] = bits[2 * i] | static_cast<uint32_t>(bits[2 * i + 1]) << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

template <typename T>
__device__ __forceinline__ void write_elements(T* target, uint4 chunk) {
    uint16_t* bits = reinterpret_cast<uint16_t*>(target);
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        bits[i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
    }
}

// Rows of kCols values, their 16-byte chunks swizzled: eight rows of one chunk column lie in
// different banks.
template <int kCols>
struct SharedRows {
    static constexpr int kPitch = 2 * kCols;  // bytes
    static constexpr int kChunks = kCols / 8;
    static constexpr int kGroup = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
    static_assert(kCols % 16 == 0, "rows are read 16 columns at a time");

    static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
        return row * kPitch + ((chunk ^ (row / (8 / kGroup)) % kGroup) << 4);
    }
    // From the address of a chunk to that of the chunk `chunks` further in its row; the former and
    // `chunks` have no bit in common.
    static __device__ __forceinline__ uint32_t advance(uint32_t address, int chunks) {
        return (address ^ (chunks % kGroup << 4)) + chunks / kGroup * (kGroup << 4);
    }
};

// Moves rows of head_dim <= kCols values between global and shared memory, by all threads of the
// block. With kAnyAlignment, element by element where `is_aligned` is false.
template <typename T, int kCols, int kThreads, bool kAnyAlignment>
struct RowCopy {
    using Rows = SharedRows<kCols>;
    static constexpr int kPower = Rows::kChunks & -Rows::kChunks;
    static constexpr int kLanes = kPower < 16 ? kPower : 16;  // threads along a row
    static constexpr int kStep = kThreads / kLanes;           // rows at once
    static_assert(kThreads % kLanes == 0 && kStep % 8 == 0, "a thread's swizzle stays the same");

    int row, chunk, head_dim;
    bool is_aligned;

    __device__ __forceinline__ RowCopy(int thread_idx, int head_dim, bool is_aligned)
        : row(thread_idx / kLanes),
          chunk(thread_idx % kLanes),
          head_dim(head_dim),
          is_aligned(is_aligned) {}

    // Starts copying kRows rows; zeros from row num_rows and column head_dim on.
    template <int kRows>
    __device__ __forceinline__ void load(uint32_t target, const T* source, int64_t stride,
                                         int num_rows) const {
        source += row * stride + chunk * 8;
        target += Rows::offset(row, chunk);
#pragma unroll
        for (int r = 0; r < kRows; r += kStep) {
            if (kRows % kStep == 0 || row + r < kRows) {
#pragma unroll
                for (int c = 0; c < Rows::kChunks; c += kLanes) {
                    const bool is_inside = row + r < num_rows && (chunk + c) * 8 < head_dim;
                    const uint32_t address = target + r * Rows::kPitch + c * 16;
                    if (!kAnyAlignment || is_aligned) {
                        cp_async_16(address, source + c * 8, is_inside);
                    } else {
                        *reinterpret_cast<uint4*>(shared_pointer(address)) =
                            is_inside ? read_elements(source + c * 8) : make_uint4(0, 0, 0, 0);
                    }
                }
            }
            source += kStep * stride;
        }
    }

    // Writes the first num_rows of kRows rows.
    template <int kRows>
    __device__ __forceinline__ void store(T* target, uint32_t source, int64_t stride,
                                          int num_rows) const {
        target += row * stride + chunk * 8;
        source += Rows::offset(row, chunk);
#pragma unroll
        for (int r = 0; r < kRows; r += kStep) {
            if ((kRows % kStep == 0 || row + r < kRows) && row + r < num_rows) {
#pragma unroll
                for (int c = 0; c < Rows::kChunks; c += kLanes) {
                    if ((chunk + c) * 8 < head_dim) {
                        const uint4 bits = *reinterpret_cast<const uint4*>(
                            shared_pointer(source + r * Rows::kPitch + c * 16));
                        if (!kAnyAlignment || is_aligned) {
                            st_global(target + c * 8, bits);
                        } else {
                            write_elements(target + c * 8, bits);
                        }
                    }
                }
            }
            target += kStep * stride;
        }
    }
};

// Operands in shared memory, for `multiply`. In AlongColumns the sum runs along the columns: a left
// operand's rows, or a right one's columns, are rows here. In AlongRows it runs along the rows, and
// what is counted by `i` lies 16 * kApart columns apart. `address` is that of the lane's chunk.
template <typename Rows>
struct AlongColumns {
    uint32_t address;
    __device__ __forceinline__ void operator()(int step, int i, uint32_t (&tiles)[4]) const {
        ldmatrix_x4(tiles, Rows::advance(address, 2 * step) + i * 16 * Rows::kPitch);
    }
};

template <typename Rows, int kApart>
struct AlongRows {
    uint32_t address;
    __device__ __forceinline__ void operator()(int step, int i, uint32_t (&tiles)[4]) const {
        ldmatrix_x4_trans(tiles, Rows::advance(address, 2 * kApart * i) + step * 16 * Rows::kPitch);
    }
};

// A left operand in registers.
template <int kRows16, int kSteps>
struct Held {
    const uint32_t (&held)[kRows16][kSteps][4];
    __device__ __forceinline__ void operator()(int step, int i, uint32_t (&tiles)[4]) const {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            tiles[w] = held[i][step][w];
        }
    }
};

// sums += A B over kSteps times 16. load_a(step, i, tiles) gives the i-th 16 rows of A,
// load_b(step, j, tiles) the j-th 16 columns of B, as mma_m16n8k16 takes them.
template <typename T, int kSteps, int kRows16, int kCols8, typename LoadA, typename LoadB>
__device__ __forceinline__ void multiply(float (&sums)[kRows16][kCols8][4], const LoadA& load_a,
                                         const LoadB& load_b) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        uint32_t a[kRows16][4];
#pragma unroll
        for (int i = 0; i < kRows16; ++i) {
            load_a(step, i, a[i]);
        }
#pragma unroll
        for (int j = 0; j < kCols8; j += 2) {
            uint32_t b[4];
            load_b(step, j / 2, b);
#pragma unroll
            for (int i = 0; i < kRows16; ++i) {
                mma_m16n8k16<T>(sums[i][j], a[i], b[0], b[1]);
                mma_m16n8k16<T>(sums[i][j + 1], a[i], b[2], b[3]);
            }
        }
    }
}

template <int kRows16, int kCols8>
__device__ __forceinline__ void clear(float (&sums)[kRows16][kCols8][4]) {
#pragma unroll
    for (int i = 0; i < kRows16; ++i) {
#pragma unroll
        for (int j = 0; j < kCols8; ++j) {
            sums[i][j][0] = sums[i][j][1] = sums[i][j][2] = sums[i][j][3] = 0.0f;
        }
    }
}

}  // namespace kernel_hub::attention::backward
