// What a decode step merges: the warps of a block at the end of its segment, and, in the second
// kernel, the partials of items that were cut into parts; in order.
#pragma once

#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/sinks.cuh"
#include "kernel_hub/vec.cuh"
#include "kv_cache/decode/tiles.cuh"
#include "kv_cache/decode/work.cuh"

namespace kernel_hub::kv_cache::decode {

// Merge the warps' sums and write the segment's rows: to `out`, or as partials.
template <typename Config, typename Args>
__device__ __forceinline__ void write_segment(const Args& args, const Segment& segment,
                                              Accumulator<Config>& sums, float scale_log2,
                                              float* merge) {
    using T = typename Config::T;
    constexpr int kStride = Config::kMergeStride, kRows = Config::kRows;
    constexpr int kWarps = Config::kWarps;
    const int lane_idx = threadIdx.x & 31, warp_idx = threadIdx.x >> 5;
    const int group = args.num_heads / args.num_kv_heads;
    const int first_row = segment.row_block * kRows;
    const int num_rows = min(args.rows() - first_row, kRows);
    float* row_maxima = merge + kWarps * kRows * kStride;
    float* row_sums = row_maxima + kWarps * kRows;
#pragma unroll
    for (int i = 0; i < 2 * Config::kRowTiles; ++i) {
        float sum = sums.row_sum[i];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int row = 8 * i + (lane_idx >> 2);
        if (row < num_rows) {
            float* target = merge + (warp_idx * kRows + row) * kStride;
            if ((lane_idx & 3) == 0) {
                row_maxima[warp_idx * kRows + row] = sums.row_max[i];
                row_sums[warp_idx * kRows + row] = sum;
            }
#pragma unroll
            for (int j = 0; j < Config::kHeadDim / 8; ++j) {
                const float (&out)[4] = sums.out[i / 2][j];
                if constexpr (Config::kQuantised) {
                    const float (&odd)[4] = sums.out[i / 2][j | 1];
                    if (j % 2 == 0) {
                        *reinterpret_cast<float4*>(target + 8 * j + 4 * (lane_idx & 3)) =
                            make_float4(out[2 * (i % 2)], odd[2 * (i % 2)], out[2 * (i % 2) + 1],
                                        odd[2 * (i % 2) + 1]);
                    }
                } else {
                    *reinterpret_cast<float2*>(target + 8 * j + 2 * (lane_idx & 3)) =
                        make_float2(out[2 * (i % 2)], out[2 * (i % 2) + 1]);
                }
            }
        }
    }
    __syncthreads();

    const int64_t slot = blockIdx.x;
    const float v_scale = args.v_scale == nullptr ? 1.0f : __ldg(args.v_scale + segment.kv_head);
    constexpr int kVectors = Config::kHeadDim / 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < num_rows * kVectors; i += Config::kThreads) {
        const int row = i / kVectors, column = i % kVectors * 4;
        if (column >= args.head_dim) {
            continue;
        }
        float largest = -INFINITY;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            largest = fmaxf(largest, row_maxima[w * kRows + row]);
        }
        // A warp without a key in this row has a maximum of -inf and sums of 0.
        const float base = largest == -INFINITY ? 0.0f : largest * scale_log2;
        float sum = 0.0f, x = 0.0f, y = 0.0f, z = 0.0f, t = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            const float weight = exp2_approx(row_maxima[w * kRows + row] * scale_log2 - base);
            const float4 part =
                *reinterpret_cast<const float4*>(merge + (w * kRows + row) * kStride + column);
            sum += weight * row_sums[w * kRows + row];
            x += weight * part.x, y += weight * part.y;
            z += weight * part.z, t += weight * part.w;
        }
        const int token = (first_row + row) / group;
        const int head = segment.kv_head * group + (first_row + row) % group;
        const float sink = segment.is_whole ? find_sink(args, segment.batch_idx, head) : -INFINITY;
        float shift = largest == -INFINITY ? largest : base;
        const float factor = v_scale * add_sink(sink, shift, sum);
        const float log2_sum = shift + __logf(sum) * kLog2e;
        if (segment.is_whole) {
            T* out = args.out + segment.batch_idx * args.out_batch_stride +
                     token * args.out_token_stride + head * args.out_head_stride + column;
            out[0] = from_float<T>(x * factor);
            out[1] = from_float<T>(y * factor);
            out[2] = from_float<T>(z * factor);
            out[3] = from_float<T>(t * factor);
            if (args.lse != nullptr && column == 0) {
                args.lse[(static_cast<int64_t>(segment.batch_idx) * args.num_heads + head) *
                             args.seqlen_q +
                         token] = log2_sum * kLn2;
            }
        } else {
            *reinterpret_cast<float4*>(args.partial_out + (slot * kRows + row) * args.head_dim +
                                       column) =
                make_float4(x * factor, y * factor, z * factor, t * factor);
            if (column == 0) {
                args.partial_lse[slot * kRows + row] = log2_sum;
            }
        }
    }
    __syncthreads();
}

// A row's partials merged so far, by a warp: lane l has columns 4 l .. 4 l + 3.
struct Merged {
    float row_max, row_sum;
    float4 out;

    // Takes partials first, first + step, ... below `num_parts`, six under way at a time.
    template <typename Slot>
    __device__ __forceinline__ void take(const float* partial_out, const float* partial_lse,
                                         Slot&& slot, int first, int step, int num_parts,
                                         int head_dim, int column) {
        constexpr int kAtOnce = 6;
        row_max = -INFINITY;
        row_sum = 0.0f;
        out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
        for (int begin = first; begin < num_parts; begin += kAtOnce * step) {
            float lse[kAtOnce];
            float4 values[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int part = begin + i * step;
                lse[i] = -INFINITY;
                values[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (part < num_parts) {
                    lse[i] = partial_lse[slot(part)];
                    if (column < head_dim) {
                        values[i] = *reinterpret_cast<const float4*>(
                            partial_out + slot(part) * head_dim + column);
                    }
                }
            }
            float largest = row_max;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                largest = fmaxf(largest, lse[i]);
            }
            const float base = largest == -INFINITY ? 0.0f : largest;
            scale(exp2_approx(row_max - base));
            row_max = largest;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const float weight = exp2_approx(lse[i] - base);
                row_sum += weight;
                out.x += weight * values[i].x, out.y += weight * values[i].y;
                out.z += weight * values[i].z, out.w += weight * values[i].w;
            }
        }
    }
    __device__ __forceinline__ void scale(float factor) {
        row_sum *= factor;
        out.x *= factor, out.y *= factor, out.z *= factor, out.w *= factor;
    }
};

// What `find_sink` reads.
struct MergeSinks {
    const void* sinks;
    int sink_type;
    const int* cache_seqlens;
};

// Merges the partials of the blockIdx.x-th item that is in parts. A task is 128 columns of a row: a
// warp's where there are few parts, else the block's, each warp taking every fourth.
template <typename T>
__device__ __forceinline__ void merge_decode_splits(
    T* out, float* lse, const float* partial_out, const float* partial_lse, const Work& work,
    const MergeSinks& sinks, int64_t out_batch_stride, int64_t out_token_stride,
    int64_t out_head_stride, int num_heads, int num_kv_heads, int head_dim, int block_rows) {
    constexpr int kWarps = 4, kColumns = 128, kFewParts = 6;
    __shared__ float4 sums[kWarps][kColumns / 4];
    __shared__ float row_maxima[kWarps], row_sums[kWarps];
    const Place place = find_place<true>(work, blockIdx.x);
    // NOTE: before any return: this launch must not end before the one it merges for.
    wait_for_launch_before();
    // NOTE: not before: blocks of the next step then take their places beside this step's,
    // unevenly, and stay there (a third slower at 64 items of 8k tokens on an H200).
    allow_next_launch();
    if (place.batch_idx < 0) {
        return;
    }
    const int num_parts = place.num_splits, item = place.item;

    const int group = num_heads / num_kv_heads, rows = work.seqlen_q * group;
    const int row_blocks = (rows + block_rows - 1) / block_rows;
    const int kv_head = item / row_blocks, first_row = item % row_blocks * block_rows;
    const int num_rows = min(rows - first_row, block_rows);
    const int halves = (head_dim + kColumns - 1) / kColumns;
    const int lane_idx = threadIdx.x & 31, warp_idx = threadIdx.x >> 5;
    const bool is_few = num_parts <= kFewParts;
    const int step = is_few ? kWarps * gridDim.y : gridDim.y;
#pragma unroll 1
    for (int task = is_few ? kWarps * blockIdx.y + warp_idx : blockIdx.y; task < num_rows * halves;
         task += step) {
        const int row = task / halves, column = task % halves * kColumns + 4 * lane_idx;
        auto slot = [&](int part) {
            return static_cast<int64_t>(place.first_worker + part * work.items) * block_rows + row;
        };
        Merged merged = {};
        merged.take(partial_out, partial_lse, slot, is_few ? 0 : warp_idx, is_few ? 1 : kWarps,
                    num_parts, head_dim, column);
        if (!is_few) {
            sums[warp_idx][lane_idx] = merged.out;
            if (lane_idx == 0) {
                row_maxima[warp_idx] = merged.row_max;
                row_sums[warp_idx] = merged.row_sum;
            }
            __syncthreads();
            float largest = -INFINITY;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) {
                largest = fmaxf(largest, row_maxima[w]);
            }
            merged = {largest, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll
            for (int w = 0; w < kWarps; ++w) {
                const float weight =
                    exp2_approx(row_maxima[w] - (largest == -INFINITY ? 0.0f : largest));
                merged.row_sum += weight * row_sums[w];
                merged.out.x += weight * sums[w][lane_idx].x;
                merged.out.y += weight * sums[w][lane_idx].y;
                merged.out.z += weight * sums[w][lane_idx].z;
                merged.out.w += weight * sums[w][lane_idx].w;
            }
            __syncthreads();
            if (warp_idx != 0) {
                continue;
            }
        }
        const int token = (first_row + row) / group;
        const int head = kv_head * group + (first_row + row) % group;
        const float sink = find_sink(sinks, place.batch_idx, head);
        const float factor = add_sink(sink, merged.row_max, merged.row_sum);
        const float log2_sum = merged.row_max + __logf(merged.row_sum) * kLog2e;
        merged.scale(factor);
        if (column < head_dim) {
            T* target = out + place.batch_idx * out_batch_stride + token * out_token_stride +
                        head * out_head_stride + column;
            target[0] = from_float<T>(merged.out.x);
            target[1] = from_float<T>(merged.out.y);
            target[2] = from_float<T>(merged.out.z);
            target[3] = from_float<T>(merged.out.w);
        }
        if (lse != nullptr && column == 0) {
            lse[(static_cast<int64_t>(place.batch_idx) * num_heads + head) * work.seqlen_q +
                token] = log2_sum * kLn2;
        }
    }
}

#define EXPORT_DECODE_MERGE(DTYPE, T)                                                          \
    DESCRIBED(                                                                                 \
        decode_attention_##DTYPE##_merge,                                                      \
        "x: items in more than one part, y: their rows and blocks of 128 columns",             \
        (.threads = 128, .shared_bytes = 0, .blocks_per_sm = 8, .warps = 4),                   \
        extern "C" __global__ void __launch_bounds__(128, 8) decode_attention_##DTYPE##_merge( \
            T* out, float* lse, const float* partial_out, const float* partial_lse,            \
            const int* cache_seqlens, const void* sinks, int64_t out_batch_stride,             \
            int64_t out_token_stride, int64_t out_head_stride, int batch_size, int seqlen_q,   \
            int num_new, int max_tokens, int window_left, int unit, int items, int num_splits, \
            int parallel, int fine_units, int num_sms, int num_heads, int num_kv_heads,        \
            int head_dim, int block_rows, int sink_type) {                                     \
            const Work work = {.cache_seqlens = cache_seqlens,                                 \
                               .batch_size = batch_size,                                       \
                               .seqlen_q = seqlen_q,                                           \
                               .num_new = num_new,                                             \
                               .max_tokens = max_tokens,                                       \
                               .window_left = window_left,                                     \
                               .unit = unit,                                                   \
                               .items = items,                                                 \
                               .num_splits = num_splits,                                       \
                               .parallel = parallel,                                           \
                               .fine_units = fine_units,                                       \
                               .num_sms = num_sms};                                            \
            merge_decode_splits(out, lse, partial_out, partial_lse, work,                      \
                                {sinks, sink_type, cache_seqlens}, out_batch_stride,           \
                                out_token_stride, out_head_stride, num_heads, num_kv_heads,    \
                                head_dim, block_rows);                                         \
        })

}  // namespace kernel_hub::kv_cache::decode
