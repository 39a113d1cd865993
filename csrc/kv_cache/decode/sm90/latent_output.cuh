// mla_decode_sm90.cu: what a consumer's warpgroup has at the end of a part, to memory.
#pragma once

#include "kernel_hub/math.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "kv_cache/decode/sm90/latent_consumer.cuh"
#include "kv_cache/decode/sm90/latent_merge.cuh"
#include "kv_cache/decode/sm90/latent_team.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

// By both warpgroups: sums over all tokens, what other parts have, and then the rows.
template <typename T, int kSide, bool kTeam>
__device__ __forceinline__ void LatentConsumer<T, kSide, kTeam>::write(const LatentPart& part) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        row_sum[i] += __shfl_xor_sync(~0u, row_sum[i], 1);
        row_sum[i] += __shfl_xor_sync(~0u, row_sum[i], 2);
        if ((lane_idx & 3) == 0) {
            sums(kSide)[row_of(i)] = row_sum[i];
        }
    }
    named_barrier_sync(kJoin, 256);
    float factors[2], log2_sums[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float sum = sums(0)[row_of(i)] + sums(1)[row_of(i)];
        factors[i] = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
        log2_sums[i] = row_max[i] + __logf(sum) * kLog2e;
    }
#pragma unroll
    for (int e = 0; e < C::kHalfDim / 2; ++e) {
        output[e] *= factors[e / 2 % 2];
    }
    if constexpr (kTeam) {
        share(log2_sums);
        return;
    }
    bool is_whole = part.is_whole;
    const bool has_rows = kSide == 0 && (lane_idx & 3) == 0;
    if (part.num_parts > 1) {
        const LatentMerge<C::kRows, 256, C::kHalfDim / 2, 2, T> merge = {args, C::kQueries};
        is_whole = merge.merge(
            part, log2_sums, [&](int e) -> float& { return output[e]; },
            [](int e) { return e / 2 % 2; }, [&](int i) { return row_of(i); }, has_rows);
        if (!is_whole) {
            return;
        }
        named_barrier_sync(kJoin, 256);  // partials lay where rows are written through
    }
    if (has_rows) {
        write_lse(args, part, row_of(0), log2_sums[0], 1.0f, is_whole);
        write_lse(args, part, row_of(1), log2_sums[1], 1.0f, is_whole);
    }
    if (is_whole) {
        write_out(part);
        return;
    }
    // NOTE: a short part is late by the code it has to fetch, and its stores wait for nothing.
    constexpr int kShort = 4 * C::kTile;
    if (part.end_token - part.first_token > kShort) {
        write_partial(part);
        return;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const auto to = LatentRow<T>::of(args, part, row_of(i), false);
        to.template store<C::kHalfDim / 8>(kSide * C::kHalfDim + 2 * (lane_idx & 3), [&](int j) {
            return make_float2(output[4 * j + 2 * i], output[4 * j + 2 * i + 1]);
        });
    }
}

// Rows for the others of a team, and their log2(sum exp).
template <typename T, int kSide, bool kTeam>
__device__ __forceinline__ void LatentConsumer<T, kSide, kTeam>::share(
    const float (&log2_sums)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = row_of(i);
#pragma unroll
        for (int j = 0; j < C::kHalfDim / 8; ++j) {
            const int chunk = kSide * C::kHalfDim / 4 + 2 * j + (lane_idx & 3) / 2;
            *reinterpret_cast<float2*>(dynamic_shared() + LatentTeam::place(row, chunk) +
                                       (lane_idx & 1) * 8) =
                make_float2(output[4 * j + 2 * i], output[4 * j + 2 * i + 1]);
        }
        if (kSide == 0 && (lane_idx & 3) == 0) {
            LatentTeam::log2_sums()[2 * row] = log2_sums[i];
        }
    }
}

// A warp's rows of the output, through where the queries were, so that it writes 512 bytes of
// a row at a time.
template <typename T, int kSide, bool kTeam>
__device__ __forceinline__ void LatentConsumer<T, kSide, kTeam>::write_out(
    const LatentPart& part) const {
    const int first = 16 * (thread_idx / 32);
    constexpr int kWhere = C::kQueries + kSide * C::kHalfPanels * C::kPanelBytes;
    const auto place = [](int row, int chunk) {
        return kWhere + chunk / 8 * C::kPanelBytes + row * 128 + ((chunk ^ row) & 7) * 16;
    };
#pragma unroll
    for (int i = 0; i < C::kHalfDim / 16; ++i) {
        uint32_t packed[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            packed[e] = pack2<T>(output[8 * i + 2 * e], output[8 * i + 2 * e + 1]);
        }
        stmatrix_x4(shared.base + place(first + (lane_idx & 15), 2 * i + (lane_idx >> 4)),
                    packed[0], packed[1], packed[2], packed[3]);
    }
    __syncwarp();
    const int mine = part.first_row + first + (lane_idx & 15);
    const int64_t offset = part.batch_idx * args.out_batch_stride +
                           mine / args.num_heads * args.out_token_stride +
                           mine % args.num_heads * args.out_head_stride;
#pragma unroll 4
    for (int i = 0; i < 16; ++i) {
        T* to = args.out + __shfl_sync(~0u, offset, i) + kSide * C::kHalfDim + 8 * lane_idx;
        const uint4 values =
            *reinterpret_cast<const uint4*>(dynamic_shared() + place(first + i, lane_idx));
        if (first + i < part.num_rows) {
            *reinterpret_cast<uint4*>(to) = values;
        }
    }
}

// The same of a part among others, in fp32, half of the side's columns at a time.
template <typename T, int kSide, bool kTeam>
__device__ __forceinline__ void LatentConsumer<T, kSide, kTeam>::write_partial(
    const LatentPart& part) const {
    constexpr int kWhere = C::kQueries + kSide * C::kHalfPanels * C::kPanelBytes;
    constexpr int kColumns = C::kHalfDim / 2, kLine = kColumns * 4;
    const int first = 16 * (thread_idx / 32);
    const auto place = [first](int row, int chunk) {
        return kWhere + (first + row) * kLine + ((chunk ^ (row & 3) * 2) << 4);
    };
    float* to = args.partial_out + static_cast<int64_t>(part.slot + first) * kLatentDim +
                kSide * C::kHalfDim + 4 * lane_idx;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float* both = output + 4 * (half * (kColumns / 8) + j) + 2 * i;
                *reinterpret_cast<float2*>(dynamic_shared() +
                                           place(lane_idx / 4 + 8 * i, 2 * j + (lane_idx & 3) / 2) +
                                           (lane_idx & 1) * 8) = make_float2(both[0], both[1]);
            }
        }
        __syncwarp();
#pragma unroll 4
        for (int i = 0; i < 16; ++i) {
            const float4 values =
                *reinterpret_cast<const float4*>(dynamic_shared() + place(i, lane_idx));
            if (first + i < part.num_rows) {
                *reinterpret_cast<float4*>(to + i * kLatentDim + half * kColumns) = values;
            }
        }
        __syncwarp();
    }
}

}  // namespace kernel_hub::kv_cache::decode::sm90
