// flash_attention_backward_sm90.cu: what is done row by row, before (delta) and after (convert) the
// main kernel.
#pragma once

#include "attention/backward/sm90/plan.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/vec.cuh"

namespace kernel_hub::attention::backward::sm90 {

constexpr int kRowThreads = 128;

// Which 16 rows of a head a block works on.
struct RowTile {
    int batch_idx, head_idx, first_query, seqlen;
    int64_t first_row;  // in the workspace
    int64_t token;      // of query 0, in the tensors
    bool is_outside;    // cu_seqlens_q

    template <int kBlockM>
    static __device__ __forceinline__ RowTile find(const int* cu_seqlens_q, int64_t num_blocks_q,
                                                   int num_tiles, int seqlen_q, int total_q) {
        RowTile tile;
        tile.batch_idx = blockIdx.x / num_tiles;
        tile.head_idx = blockIdx.y;
        tile.first_query = blockIdx.x % num_tiles * kTileRows;
        const Sequence queries(cu_seqlens_q, tile.batch_idx, seqlen_q, total_q);
        tile.seqlen = queries.seqlen;
        tile.is_outside = queries.is_outside;
        tile.token = queries.first_row;
        const int first_block =
            first_block_of<kBlockM>(cu_seqlens_q, queries.first_row, tile.batch_idx, seqlen_q);
        tile.first_row = (tile.head_idx * num_blocks_q + first_block) * kBlockM + tile.first_query;
        return tile;
    }
};

// delta, lse in units of log 2, zeros for the sums of dq, 0 for the turns; also in the rows that
// fill up a sequence's last block of kBlockM. Eight threads a row.
template <typename T, int kHeadDim, int kBlockM>
__device__ __forceinline__ void attention_delta_sm90(
    float* delta, float* lse_log2, float* dq_sums, int* turns, int* flag, const Heads<const T>& out,
    const Heads<const T>& dout, const float* lse, const int* cu_seqlens_q, int64_t lse_batch_stride,
    int64_t lse_head_stride, int64_t num_blocks_q, int num_tiles, int seqlen_q, int total_q,
    int head_dim) {
    const RowTile tile =
        RowTile::find<kBlockM>(cu_seqlens_q, num_blocks_q, num_tiles, seqlen_q, total_q);
    report_if(flag, tile.is_outside && threadIdx.x == 0, kQueriesOutside);
    if (tile.first_query >= ceil_div(tile.seqlen, kBlockM) * kBlockM) {
        return;
    }
    const int row_idx = threadIdx.x / 8, query = tile.first_query + row_idx;
    const bool is_inside = query < tile.seqlen;
    const T* out_row = out.at(tile.batch_idx, tile.token + query, tile.head_idx);
    const T* dout_row = dout.at(tile.batch_idx, tile.token + query, tile.head_idx);
    uint4 out_bits[kHeadDim / 64], dout_bits[kHeadDim / 64];
#pragma unroll
    for (int i = 0; i < kHeadDim / 64; ++i) {
        const int column = 64 * i + threadIdx.x % 8 * 8;
        const bool is_there = is_inside && column < head_dim;
        out_bits[i] = is_there ? ld_global(out_row + column) : make_uint4(0, 0, 0, 0);
        dout_bits[i] = is_there ? ld_global(dout_row + column) : make_uint4(0, 0, 0, 0);
    }
    float* sums = dq_sums + tile.first_row * kHeadDim;
#pragma unroll
    for (int i = 0; i < kTileRows * kHeadDim / (4 * kRowThreads); ++i) {
        st_global(sums + 4 * (i * kRowThreads + threadIdx.x), make_uint4(0, 0, 0, 0));
    }
    if (turns && threadIdx.x == 0 && tile.first_query % kBlockM == 0) {
        turns[2 * (tile.first_row / kBlockM)] = 0;
        turns[2 * (tile.first_row / kBlockM) + 1] = 0;
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeadDim / 64; ++i) {
        float a[8], b[8];
        unpack<T>(out_bits[i], a);
        unpack<T>(dout_bits[i], b);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            sum += a[e] * b[e];
        }
    }
#pragma unroll
    for (int mask = 4; mask > 0; mask /= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, mask);
    }
    if (threadIdx.x % 8 == 0) {
        // p = exp2(s - inf) = 0 past the sequence's end, and in rows that see no key.
        float row_lse = INFINITY;
        if (is_inside) {
            const float value = lse[tile.batch_idx * lse_batch_stride +
                                    tile.head_idx * lse_head_stride + tile.token + query];
            row_lse = value == -INFINITY ? INFINITY : value * kLog2e;
        }
        delta[tile.first_row + row_idx] = sum;
        lse_log2[tile.first_row + row_idx] = row_lse;
    }
}

// dq from its sums; a thread two rows of one fragment at a time.
template <typename T, int kHeadDim, int kBlockM>
__device__ __forceinline__ void convert_straight(const Heads<T>& dq, const float* dq_sums,
                                                 const int* cu_seqlens_q, int64_t num_blocks_q,
                                                 int num_tiles, int seqlen_q, int total_q,
                                                 int head_dim, float softmax_scale) {
    const RowTile tile =
        RowTile::find<kBlockM>(cu_seqlens_q, num_blocks_q, num_tiles, seqlen_q, total_q);
    if (tile.first_query >= tile.seqlen) {
        return;
    }
    const int row_idx = threadIdx.x % 8, row16 = tile.first_query % kBlockM / kTileRows;
#pragma unroll
    for (int step = 0; step < ceil_div(kHeadDim, kRowThreads); ++step) {
        const int col8 = step * (kRowThreads / 8) + threadIdx.x / 8;
        if (8 * col8 >= head_dim) {
            return;
        }
        // Parts of 64 x 64, as the consumers share them: first by rows or by columns.
        const int place = kBlockM == 64 ? (col8 / 8 * 4 + row16) * 8 + col8 % 8 : row16 * 8 + col8;
        const float* fragment =
            dq_sums + (tile.first_row - 16 * row16) * kHeadDim + place * kFragment + 16 * row_idx;
        float values[2][8];
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) {
            const uint4 bits = ld_global(fragment + 4 * lane);
            values[0][2 * lane] = __uint_as_float(bits.x) * softmax_scale;
            values[0][2 * lane + 1] = __uint_as_float(bits.y) * softmax_scale;
            values[1][2 * lane] = __uint_as_float(bits.z) * softmax_scale;
            values[1][2 * lane + 1] = __uint_as_float(bits.w) * softmax_scale;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = tile.first_query + half * 8 + row_idx;
            if (query < tile.seqlen) {
                st_global(dq.at(tile.batch_idx, tile.token + query, tile.head_idx) + col8 * 8,
                          pack<T>(values[half]));
            }
        }
    }
}

// The same where the sums are turned: 64 columns by kBlockM queries.
template <typename T, int kHeadDim, int kBlockM>
__device__ __forceinline__ void convert_turned(const Heads<T>& dq, const float* dq_sums,
                                               const int* cu_seqlens_q, int64_t num_blocks_q,
                                               int num_tiles, int seqlen_q, int total_q,
                                               int head_dim, float softmax_scale) {
    constexpr int kVecs = kHeadDim / 8;
    __shared__ __align__(16) T rows[kTileRows][kHeadDim + 8];
    const RowTile tile =
        RowTile::find<kBlockM>(cu_seqlens_q, num_blocks_q, num_tiles, seqlen_q, total_q);
    if (tile.first_query >= tile.seqlen) {
        return;
    }
    const int first = tile.first_query % kBlockM;
    const float* sums = dq_sums + (tile.first_row - first) * kHeadDim + first * 16;
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
    float4 values[kHeadDim / 64][2];
#pragma unroll
    for (int part = 0; part < kHeadDim / 64; ++part) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            values[part][j] = *reinterpret_cast<const float4*>(
                sums + (4 * part + warp_idx) * 16 * kBlockM + j * kFragment + 4 * lane_idx);
        }
    }
#pragma unroll
    for (int part = 0; part < kHeadDim / 64; ++part) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int column = 64 * part + 16 * warp_idx + lane_idx / 4;
            const int row = 8 * j + 2 * (lane_idx % 4);
            const float4 v = values[part][j];
            rows[row][column] = T(v.x * softmax_scale);
            rows[row + 1][column] = T(v.y * softmax_scale);
            rows[row][column + 8] = T(v.z * softmax_scale);
            rows[row + 1][column + 8] = T(v.w * softmax_scale);
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < kTileRows * kVecs; i += kRowThreads) {
        const int row = i / kVecs, column = i % kVecs * 8, query = tile.first_query + row;
        if (query < tile.seqlen && column < head_dim) {
            st_global(dq.at(tile.batch_idx, tile.token + query, tile.head_idx) + column,
                      *reinterpret_cast<const uint4*>(&rows[row][column]));
        }
    }
}

template <typename T, int kHeadDim, int kBlockM>
__device__ __forceinline__ void attention_convert_sm90(const Heads<T>& dq, const float* dq_sums,
                                                       const int* cu_seqlens_q,
                                                       int64_t num_blocks_q, int num_tiles,
                                                       int seqlen_q, int total_q, int head_dim,
                                                       float softmax_scale) {
    if constexpr (BackwardConfig<T, kHeadDim, kBlockM>::kTurnsDq) {
        convert_turned<T, kHeadDim, kBlockM>(dq, dq_sums, cu_seqlens_q, num_blocks_q, num_tiles,
                                             seqlen_q, total_q, head_dim, softmax_scale);
    } else {
        convert_straight<T, kHeadDim, kBlockM>(dq, dq_sums, cu_seqlens_q, num_blocks_q, num_tiles,
                                               seqlen_q, total_q, head_dim, softmax_scale);
    }
}

}  // namespace kernel_hub::attention::backward::sm90
