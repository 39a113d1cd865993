// mla_team_sm90.cu: the parts of an item that are one cluster, merged through shared memory.
#pragma once

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mma.cuh"
#include "kv_cache/decode/sm90/latent_shared.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

// Where a block is: which part of which item it has, and which rows.
struct LatentTeam {
    int num_parts, part;  // of the item
    int batch_idx, first_row, num_rows;

    template <typename Args>
    static __device__ __forceinline__ LatentTeam of(const Args& args, const LatentShared& shared) {
        constexpr int kRows = LatentStages::kRows;
        const int rows = args.seqlen_q * args.num_heads, item_rows = kRows * shared.num_blocks;
        const int items = (rows + item_rows - 1) / item_rows;
        const int num_parts = cluster_size() / shared.num_blocks;
        const int item = blockIdx.x / (num_parts * shared.num_blocks);
        const int first_row = item % items * item_rows + shared.rank * kRows;
        return {num_parts, shared.first / shared.num_blocks, item / items, first_row,
                min(rows - first_row, kRows)};
    }
    // Of a sequence of a length; a short one leaves blocks without tokens.
    template <typename Args>
    __device__ __forceinline__ LatentPart part_of(const Args& args, int length) const {
        constexpr int kTile = LatentStages::kTile;
        const Extent extent = latent_extent<kTile>(args, length);
        LatentPart found = {};
        found.batch_idx = batch_idx, found.first_row = first_row, found.num_rows = num_rows;
        found.first_token = extent.num_units * part / num_parts * kTile;
        found.end_token = min(extent.num_units * (part + 1) / num_parts * kTile, extent.num_tokens);
        found.length = extent.length;
        found.is_outside = extent.is_outside;
        return found;
    }
    // Where a row lies for the others: fp32, over the stages, which are done with, its chunks of 16
    // bytes apart from those of the rows around; log2(sum exp), 8 bytes each, over maxima.
    static __device__ __forceinline__ int place(int row, int chunk) {
        return row * kLatentDim * 4 + ((chunk ^ (row & 7) * 2) << 4);
    }
    static __device__ __forceinline__ float* log2_sums() {
        return reinterpret_cast<float*>(dynamic_shared() + LatentStages::kMaxima);
    }
};

// By the consumers' warps, a row at a time, after a barrier of the cluster: each part's blocks have
// every num_parts-th row.
template <typename T>
__device__ __forceinline__ void merge_team(const LatentArgs<T>& args, const LatentShared& shared,
                                           const LatentTeam& team) {
    constexpr int kAtOnce = 4, kVectors = kLatentDim / 4 / 32, kWarps = 8;
    static_assert(2 * LatentStages::kStageBytes >= LatentStages::kRows * kLatentDim * 4,
                  "rows lie over stages");
    const int lane_idx = threadIdx.x & 31;
#pragma unroll 1
    for (int row = team.part + team.num_parts * warp_index(); row < team.num_rows;
         row += kWarps * team.num_parts) {
        float4 out[kVectors] = {};
        float largest = -INFINITY, sum = 0.0f;
#pragma unroll 1
        for (int first = 0; first < team.num_parts; first += kAtOnce) {
            float4 values[kAtOnce][kVectors];
            float log2_sums[kAtOnce], most = largest;
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                const bool is_there = first + k < team.num_parts;
                const uint32_t base = cluster_address(
                    shared.base, shared.rank + (is_there ? first + k : 0) * shared.num_blocks);
                const uint2 found = ld_shared_cluster_2(base + LatentStages::kMaxima + row * 8);
                log2_sums[k] = is_there ? __uint_as_float(found.x) : -INFINITY;
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
                    values[k][v] =
                        ld_shared_cluster(base + LatentTeam::place(row, lane_idx + 32 * v));
                }
                most = fmaxf(most, log2_sums[k]);
            }
            const float base = base_of(most), shrink = exp2_approx(largest - base);
            largest = most;
            sum *= shrink;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                out[v].x *= shrink, out[v].y *= shrink, out[v].z *= shrink, out[v].w *= shrink;
            }
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                const float weight = exp2_approx(log2_sums[k] - base);
                sum += weight;
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
                    out[v].x += weight * values[k][v].x, out[v].y += weight * values[k][v].y;
                    out[v].z += weight * values[k][v].z, out[v].w += weight * values[k][v].w;
                }
            }
        }
        const float factor = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
        const int token = (team.first_row + row) / args.num_heads;
        const int head = (team.first_row + row) % args.num_heads;
        T* to = args.out + team.batch_idx * args.out_batch_stride + token * args.out_token_stride +
                head * args.out_head_stride + 4 * lane_idx;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            *reinterpret_cast<uint2*>(to + 128 * v) =
                make_uint2(pack2<T>(out[v].x * factor, out[v].y * factor),
                           pack2<T>(out[v].z * factor, out[v].w * factor));
        }
        if (args.lse != nullptr && lane_idx == 0) {
            args.lse[(static_cast<int64_t>(team.batch_idx) * args.num_heads + head) *
                         args.seqlen_q +
                     token] = (largest + __logf(sum) * kLog2e) * kLn2;
        }
    }
}

}  // namespace kernel_hub::kv_cache::decode::sm90
