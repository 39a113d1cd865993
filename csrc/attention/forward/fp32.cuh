// Attention forward in fp32: rows of keys and values to shared memory, and products in parts.
#pragma once

#include "attention/forward/problem.cuh"
#include "attention/forward/softmax.cuh"
#include "kernel_hub/three_products.cuh"

namespace kernel_hub::attention::forward {

constexpr int kFp32HeadDim = 128, kFp32BlockM = 64, kFp32BlockN = 32, kFp32Warps = 4;
constexpr int kFp32RowBytes = 4 * kFp32HeadDim;

// Byte offset of a 16-byte chunk in a tile.
__device__ __forceinline__ int place_fp32(int row, int chunk) {
    return swizzled<2 * kFp32HeadDim>(row, chunk);
}

// Starts this lane's copy of one of a row's chunks; a null row, and columns past head_dim, are
// zeros. Rows off 16 bytes are copied 4 at a time.
__device__ __forceinline__ void copy_chunk(uint32_t tile, int row, const float* source,
                                           int head_dim, bool is_aligned) {
    const int lane = threadIdx.x % 32;
    const uint32_t target = tile + place_fp32(row, lane);
    const bool is_inside = source && lane * 4 < head_dim;
    if (is_aligned) {
        cp_async_16(target, source + lane * 4, is_inside);
    } else {
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
            cp_async_4(target + 4 * i, source + lane * 4 + i, is_inside);
        }
    }
}

// Where the keys and values of a block of 32 lie: those of key `lane` in each lane.
struct KeyRowsFp32 {
    const AttentionParams<float>& params;
    const float* k_head;  // of the sequence, or of the first page
    const float* v_head;
    int64_t table_offset;
    int seqlen_k, start;
    int page;  // looked up
    const float* k_row;
    const float* v_row;  // null: no such row

    __device__ __forceinline__ void look_up(int n) {
        const int key = n * kFp32BlockN + static_cast<int>(threadIdx.x % 32);
        page = 0;
        if (params.block_table && key >= 0 && key < seqlen_k) {
            page = __ldg(params.block_table + table_offset + key / params.page_size);
        }
    }

    // Of block n, whose pages were looked up.
    __device__ __forceinline__ void find(int n) {
        const int key = n * kFp32BlockN + static_cast<int>(threadIdx.x % 32);
        const bool is_key = key >= 0 && key < seqlen_k;
        const bool is_there = is_index(page, params.num_pages);
        report_if(params.flag, is_key && !is_there, kPagesOutside);
        const int row = params.block_table ? key % params.page_size : start + key;
        const int64_t in_k = page * params.k_strides.batch + row * params.k_strides.token;
        const int64_t in_v = page * params.v_strides.batch + row * params.v_strides.token;
        k_row = is_key && is_there ? k_head + in_k : nullptr;
        v_row = is_key && is_there ? v_head + in_v : nullptr;
    }

    // Starts the copies of a tile whose rows the lanes hold.
    __device__ __forceinline__ void load(uint32_t tile, const float* row, int columns) const {
#pragma unroll
        for (int i = 0; i < kFp32BlockN / kFp32Warps; ++i) {
            const int at = threadIdx.x / 32 + i * kFp32Warps;
            const uint64_t source = __shfl_sync(~0u, reinterpret_cast<uint64_t>(row), at);
            copy_chunk(tile, at, reinterpret_cast<const float*>(source), columns,
                       params.is_aligned);
        }
    }
};

using Fp32Scores = Scores<1, kFp32BlockN / 8>;

// s = the warp's 16 queries x 32 keys, 16 columns a step. q_tile: of the warp's first row.
__device__ __forceinline__ void multiply_keys_fp32(uint32_t q_tile, uint32_t k_tile, int head_dim,
                                                   Fp32Scores& s) {
    constexpr int kTiles = kFp32BlockN / 8;
    const int lane = threadIdx.x % 32;
    clear(s);
#pragma unroll 2
    for (int kk = 0; kk < (head_dim + 15) / 16; ++kk) {
        Parts<4> q[2], k[kTiles];
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            ldmatrix_x4(words, q_tile + place_fp32(lane & 15, 4 * kk + 2 * i + (lane >> 4)));
            q[i].split(words);
        }
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            ldmatrix_x4(words, k_tile + place_fp32(8 * j + (lane & 7), 4 * kk + (lane >> 3)));
            k[j].split(words);
        }
        float sums[kTiles][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
                if (i == 0) {
                    mma_tf32_first(sums[j], q[i].low, k[j].high[0], k[j].high[1]);
                } else {
                    mma_tf32(sums[j], q[i].low, k[j].high[2], k[j].high[3]);
                }
            }
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
                mma_tf32(sums[j], q[i].high, k[j].low[2 * i], k[j].low[2 * i + 1]);
            }
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
                mma_tf32(sums[j], q[i].high, k[j].high[2 * i], k[j].high[2 * i + 1]);
            }
        }
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                s[0][j][e] += sums[j][e];
            }
        }
    }
}

// acc += weights x the tile's 32 values. Keys are taken in the order in which a lane has their
// weights: columns t and t + 4 of A are keys 2 t and 2 t + 1 of each 8.
__device__ __forceinline__ void multiply_values_fp32(const Fp32Scores& s, const uint8_t* v_tile,
                                                     int head_dim_v,
                                                     float (&acc)[1][kFp32HeadDim / 8][4]) {
    constexpr int kAtOnce = 4;  // tiles of 8 columns
    const int lane = threadIdx.x % 32, key = 2 * (lane & 3), column = lane >> 2;
    Parts<4> weights[kFp32BlockN / 8];
#pragma unroll
    for (int j = 0; j < kFp32BlockN / 8; ++j) {
        const float (&w)[4] = s[0][j];
        weights[j].split({__float_as_uint(w[0]), __float_as_uint(w[2]), __float_as_uint(w[1]),
                          __float_as_uint(w[3])});
    }
#pragma unroll
    for (int first = 0; first < kFp32HeadDim / 8; first += kAtOnce) {
        if (8 * first >= head_dim_v) {
            continue;
        }
        float sums[kAtOnce][4] = {};
#pragma unroll
        for (int j = 0; j < kFp32BlockN / 8; ++j) {
            Parts<2> values[kAtOnce];
#pragma unroll
            for (int c = 0; c < kAtOnce; ++c) {
                const uint8_t* at = v_tile + column % 4 * 4;
                const int chunk = 2 * (first + c) + column / 4;
                values[c].split(
                    {*reinterpret_cast<const uint32_t*>(at + place_fp32(8 * j + key, chunk)),
                     *reinterpret_cast<const uint32_t*>(at + place_fp32(8 * j + key + 1, chunk))});
            }
#pragma unroll
            for (int c = 0; c < kAtOnce; ++c) {
                mma_tf32(sums[c], weights[j].low, values[c].high[0], values[c].high[1]);
            }
#pragma unroll
            for (int c = 0; c < kAtOnce; ++c) {
                mma_tf32(sums[c], weights[j].high, values[c].low[0], values[c].low[1]);
            }
#pragma unroll
            for (int c = 0; c < kAtOnce; ++c) {
                mma_tf32(sums[c], weights[j].high, values[c].high[0], values[c].high[1]);
            }
        }
#pragma unroll
        for (int c = 0; c < kAtOnce; ++c) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                acc[0][first + c][e] += sums[c][e];
            }
        }
    }
}

}  // namespace kernel_hub::attention::forward
