// A stage of a product of fp32 rows: as stages.cuh has it, of 16 elements of k, 64 bytes a row; and
// what its results need besides.
#pragma once

#include "kernel_hub/three_products.cuh"
#include "matmul/stages.cuh"

namespace kernel_hub::matmul {

constexpr int kBlockKFp32 = kBlockK / 2;

// Brings kRows rows of a matrix to shared memory, a stage at a time.
template <int kRows>
struct RowsFp32 {
    const float* source;   // of this thread's first copy of the next stage
    int num_rows, column;  // that are left from its row on; its column in a stage
    uint32_t place;        // in a stage

    // from: the first row, at the column of the first stage; is_aligned: 16 bytes at a time.
    __device__ __forceinline__ RowsFp32(const float* from, int64_t stride, int rows_left,
                                        bool is_aligned) {
        const int thread = threadIdx.x;
        const int row = is_aligned ? thread / kChunks : thread / kBlockKFp32;
        column = is_aligned ? thread % kChunks * 4 : thread % kBlockKFp32;
        source = from + row * stride + column;
        num_rows = rows_left - row;
        place = place_of_chunk(row, column / 4) + column % 4 * 4;
    }

    __device__ __forceinline__ void fetch(uint32_t target, int64_t stride, int columns_left,
                                          bool is_aligned) {
        const float* at = source;
        if (is_aligned) {
            constexpr int kRowsAtOnce = kThreads / kChunks;
            const int bytes = 4 * max(0, min(4, columns_left - column));
#pragma unroll
            for (int row = 0; row < kRows; row += kRowsAtOnce) {
                cp_async_part(target + place + row * kRowBytes, at, row < num_rows ? bytes : 0);
                at += kRowsAtOnce * stride;
            }
        } else {
            constexpr int kRowsAtOnce = kThreads / kBlockKFp32;
#pragma unroll 1
            for (int row = 0; row < kRows; row += kRowsAtOnce) {
                cp_async_4(target + place + row * kRowBytes, at,
                           row < num_rows && column < columns_left);
                at += kRowsAtOnce * stride;
            }
        }
        source += kBlockKFp32;
    }

  private:
    static constexpr int kRowBytes = 4 * kBlockKFp32;
    static_assert(kThreads / kBlockKFp32 % (2 * kChunks) == 0, "rows at once have one swizzle");
};

// acc += the products of one stage.
template <typename C>
__device__ __forceinline__ void multiply_stage_fp32(uint32_t stage, int warp_row, int warp_column,
                                                    float (&acc)[C::kTilesM][C::kTilesN][4]) {
    const int lane = threadIdx.x % 32;
    const uint32_t b_stage = stage + C::kBlockM * kBlockK * 2;
#pragma unroll
    for (int step = 0; step < kBlockKFp32 / 8; ++step) {
        Parts<4> a[C::kTilesM];
#pragma unroll
        for (int i = 0; i < C::kTilesM; ++i) {
            uint32_t words[4];
            const int row = warp_row + 16 * i + lane % 16;
            ldmatrix_x4(words, stage + place_of_chunk(row, 2 * step + lane / 16));
            a[i].split(words);
        }
#pragma unroll
        for (int j = 0; j < C::kTilesN; j += 2) {
            uint32_t words[4];
            const int row = warp_column + 8 * j + lane / 16 * 8 + lane % 8;
            ldmatrix_x4(words, b_stage + place_of_chunk(row, 2 * step + lane / 8 % 2));
            Parts<4> b;
            b.split(words);
            float sums[C::kTilesM][2][4];
            multiply_parts(sums, a, b);
#pragma unroll
            for (int i = 0; i < C::kTilesM; ++i) {
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    acc[i][j + e / 4][e % 4] += sums[i][e / 4][e % 4];
                }
            }
        }
    }
}

// What the epilogue of fp32 products does first with values held as those of Epilogue::finish_32.
struct PlainProducts {
    const float* a;     // (m, k)
    const float* b;     // (n, k)
    const float* bias;  // (n,) or null
    int64_t a_stride, b_stride;
    int m, n, k;

    // Sums plainly what is no number: inf and nan have no parts.
    __device__ __forceinline__ void redo(int row, int column, float (&values)[16]) const {
        uint32_t odd = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            odd |= is_number(values[i]) ? 0u : 1u << i;
        }
#pragma unroll 1
        while (odd != 0) {
            const int at = __ffs(odd) - 1;
            odd &= odd - 1;
            const int64_t from = row + 8 * (at / 2 % 2), to = column_of(column, at);
            const float sum = from < m && to < n
                                  ? plain_product(a + from * a_stride, b + to * b_stride, k)
                                  : 0.0f;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                values[i] = i == at ? sum : values[i];
            }
        }
    }

    __device__ __forceinline__ void add_bias(int column, float (&values)[16]) const {
        if (bias) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int at = i / 2 * 4 + i % 2, to = column_of(column, at);
                const float more = to < n ? __ldg(bias + to) : 0.0f;
                values[at] += more;
                values[at + 2] += more;
            }
        }
    }

  private:
    static __device__ __forceinline__ int column_of(int column, int at) {
        return column + at / 4 * 8 + threadIdx.x % 4 * 2 + at % 2;
    }
};

}  // namespace kernel_hub::matmul
