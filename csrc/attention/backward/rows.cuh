// What attention backward does row by row, before (delta) and after (convert) its main kernel.
#pragma once

#include "attention/backward/problem.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/math.cuh"

namespace kernel_hub::attention::backward {

// A block of 128 threads: 16 query rows of one head, eight threads a row.
template <typename T>
__device__ __forceinline__ void attention_delta(float* delta, float* lse_log2, float* dq_sums,
                                                int* turns, int* flag, const Heads<const T>& out,
                                                const Heads<const T>& dout, const float* lse,
                                                const int* cu_seqlens_q, int64_t lse_batch_stride,
                                                int64_t lse_head_stride, int64_t num_tiles,
                                                int num_blocks, int seqlen_q, int total_q,
                                                int head_dim, int padded_head_dim, int is_aligned) {
    const int batch_idx = blockIdx.x / num_blocks, tile_idx = blockIdx.x % num_blocks;
    const int head_idx = blockIdx.y;
    const Sequence queries(cu_seqlens_q, batch_idx, seqlen_q, total_q);
    report_if(flag, queries.is_outside && threadIdx.x == 0, kQueriesOutside);
    if (tile_idx * kTileRows >= queries.seqlen) {
        return;
    }
    const int64_t tile = head_idx * num_tiles + queries.first_tile + tile_idx;
    if (turns && threadIdx.x == 0) {
        turns[tile] = 0;
    }
    float* sums = dq_sums + tile * kTileRows * padded_head_dim;
    for (int i = 4 * threadIdx.x; i < kTileRows * padded_head_dim; i += 4 * 128) {
        st_global(sums + i, make_uint4(0, 0, 0, 0));
    }

    const int row_idx = threadIdx.x / 8, query = tile_idx * kTileRows + row_idx;
    const int64_t row = queries.first_row + query;
    float sum = 0.0f;
    if (query < queries.seqlen) {
        const T* out_row = out.at(batch_idx, row, head_idx);
        const T* dout_row = dout.at(batch_idx, row, head_idx);
#pragma unroll 4
        for (int i = threadIdx.x % 8 * 8; i < head_dim; i += 64) {
            float a[8], b[8];
            unpack<T>(is_aligned ? ld_global(out_row + i) : read_elements(out_row + i), a);
            unpack<T>(is_aligned ? ld_global(dout_row + i) : read_elements(dout_row + i), b);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                sum += a[e] * b[e];
            }
        }
    }
#pragma unroll
    for (int mask = 4; mask > 0; mask /= 2) {
        sum += __shfl_xor_sync(~0u, sum, mask);
    }
    if (threadIdx.x % 8 == 0) {
        // p = exp2(s - inf) = 0 past the sequence's end, and in rows that see no key.
        float row_lse = INFINITY;
        if (query < queries.seqlen) {
            const float value =
                lse[batch_idx * lse_batch_stride + head_idx * lse_head_stride + row];
            row_lse = value == -INFINITY ? INFINITY : value * kLog2e;
        }
        delta[tile * kTileRows + row_idx] = sum;
        lse_log2[tile * kTileRows + row_idx] = row_lse;
    }
}

// A block of 128 threads: 16 query rows of one head; a thread two rows of one fragment at a time.
template <typename T>
__device__ __forceinline__ void attention_convert(const Heads<T>& dq, const float* dq_sums,
                                                  const int* cu_seqlens_q, int64_t num_tiles,
                                                  int num_blocks, int seqlen_q, int total_q,
                                                  int head_dim, int padded_head_dim, int is_aligned,
                                                  float softmax_scale) {
    const int batch_idx = blockIdx.x / num_blocks, tile_idx = blockIdx.x % num_blocks;
    const int head_idx = blockIdx.y;
    const Sequence queries(cu_seqlens_q, batch_idx, seqlen_q, total_q);
    if (tile_idx * kTileRows >= queries.seqlen) {
        return;
    }
    const int64_t tile = head_idx * num_tiles + queries.first_tile + tile_idx;
    const float* sums = dq_sums + tile * kTileRows * padded_head_dim;
    for (int i = threadIdx.x; i < head_dim; i += 128) {
        const int col8 = i / 8, row_idx = i % 8;
        const float* fragment = sums + col8 * kFragment;
        float values[2][8];
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            const uint4 bits = ld_global(
                fragment + (kAddsByFour ? 4 * (4 * row_idx + part) : 32 * part + 4 * row_idx));
            const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const int lane = kAddsByFour ? part : w, e = kAddsByFour ? w : part;
                values[e / 2][2 * lane + e % 2] = __uint_as_float(words[w]) * softmax_scale;
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = tile_idx * kTileRows + half * 8 + row_idx;
            if (query < queries.seqlen) {
                T* target = dq.at(batch_idx, queries.first_row + query, head_idx) + col8 * 8;
                const uint4 bits = pack<T>(values[half]);
                if (is_aligned) {
                    st_global(target, bits);
                } else {
                    write_elements(target, bits);
                }
            }
        }
    }
}

}  // namespace kernel_hub::attention::backward

// Both kernels of one dtype.
#define EXPORT_ROWS(DTYPE, T)                                                                      \
    DESCRIBED(                                                                                     \
        flash_attention_backward_##DTYPE##_delta,                                                  \
        "x: tiles of 16 query rows of every sequence, y: heads",                                   \
        (.threads = 128, .shared_bytes = 0, .block_m = 16),                                        \
        extern "C" __global__ void                                                                 \
        __launch_bounds__(128) flash_attention_backward_##DTYPE##_delta(                           \
            float* delta, float* lse_log2, float* dq_sums, int* turns, int* flag, const T* out,    \
            const T* dout, const float* lse, const int* cu_seqlens_q, int64_t out_batch_stride,    \
            int64_t out_row_stride, int64_t out_head_stride, int64_t dout_batch_stride,            \
            int64_t dout_row_stride, int64_t dout_head_stride, int64_t lse_batch_stride,           \
            int64_t lse_head_stride, int64_t num_tiles, int num_blocks, int seqlen_q, int total_q, \
            int head_dim, int padded_head_dim, int is_aligned) {                                   \
            attention_delta<T>(delta, lse_log2, dq_sums, turns, flag,                              \
                               {out, out_batch_stride, out_row_stride, out_head_stride},           \
                               {dout, dout_batch_stride, dout_row_stride, dout_head_stride}, lse,  \
                               cu_seqlens_q, lse_batch_stride, lse_head_stride, num_tiles,         \
                               num_blocks, seqlen_q, total_q, head_dim, padded_head_dim,           \
                               is_aligned);                                                        \
        })                                                                                         \
    DESCRIBED(                                                                                     \
        flash_attention_backward_##DTYPE##_convert,                                                \
        "x: tiles of 16 query rows of every sequence, y: heads",                                   \
        (.threads = 128, .shared_bytes = 0, .block_m = 16),                                        \
        extern "C" __global__ void                                                                 \
        __launch_bounds__(128) flash_attention_backward_##DTYPE##_convert(                         \
            T* dq, const float* dq_sums, const int* cu_seqlens_q, int64_t dq_batch_stride,         \
            int64_t dq_row_stride, int64_t dq_head_stride, int64_t num_tiles, int num_blocks,      \
            int seqlen_q, int total_q, int head_dim, int padded_head_dim, int is_aligned,          \
            float softmax_scale) {                                                                 \
            attention_convert<T>({dq, dq_batch_stride, dq_row_stride, dq_head_stride}, dq_sums,    \
                                 cu_seqlens_q, num_tiles, num_blocks, seqlen_q, total_q, head_dim, \
                                 padded_head_dim, is_aligned, softmax_scale);                      \
        })
