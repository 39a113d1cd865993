// mla_decode_sm90.cu: blocks of few rows, whose products have tokens and columns where wgmma has
// its 64 rows, and the block's rows where it has N.
#pragma once

#include "kernel_hub/mma.cuh"
#include "kernel_hub/wgmma.cuh"
#include "kv_cache/decode/sm90/latent_merge.cuh"
#include "kv_cache/decode/sm90/latent_ring.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

// The warpgroup that computes: scores (tokens by rows), then the output's columns by rows.
template <typename T, int kRows>
struct LatentRingConsumer {
    using Ring = LatentRing<kRows>;
    static constexpr int kMine = kRows / 4;  // rows of a thread: 8 (i / 2) + 2 (lane % 4) + i % 2
    const LatentArgs<T>& args;
    Ring ring;
    const int warp_idx, lane_idx;
    const uint32_t queries_low, probs_low;

    float output[kLatentDim / 64][kRows / 2], scores[kRows / 2];
    float row_max[kMine], row_sum[kMine];

    __device__ __forceinline__ LatentRingConsumer(const LatentArgs<T>& args_, Ring ring_)
        : args(args_),
          ring(ring_),
          warp_idx(warp_index()),
          lane_idx(threadIdx.x & 31),
          queries_low(descriptor_low(ring.base + Ring::kQueries, 16)),
          probs_low(descriptor_low(ring.base + Ring::kProbs, 16)) {}

    __device__ __forceinline__ int row_of(int i) const {
        return i / 2 * 8 + 2 * (lane_idx & 3) + i % 2;
    }
    // A word a warp and row.
    __device__ __forceinline__ float* words(int where, int warp) const {
        return reinterpret_cast<float*>(dynamic_shared() + where) + warp * kRows;
    }
    __device__ __forceinline__ uint32_t panel_low(int i) const {
        return descriptor_low(ring.base + ring.at(i) * Ring::kPanelBytes, 16);
    }
    __device__ __forceinline__ void wait_for(int i) const {
        mbarrier_wait(ring.full(ring.at(i)), ring.parity_at(i));
    }
    __device__ __forceinline__ void release(int i) const {
        mbarrier_arrive_if(ring.empty(ring.at(i)), threadIdx.x == 0);
    }

    // The block's queries, zeros where there are no rows: four rows a warp at a time.
    __device__ __forceinline__ void load_queries(const LatentPart& part) const {
        constexpr int kChunks = kKeyDim / 8;
#pragma unroll 1
        for (int first = warp_idx; first < kRows; first += 16) {
            uint4 values[4][3];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = part.first_row + first + 4 * i;
                const T* from = args.q + part.batch_idx * args.q_batch_stride +
                                row / args.num_heads * args.q_token_stride +
                                row % args.num_heads * args.q_head_stride;
#pragma unroll
                for (int j = 0; j < 3; ++j) {
                    const int chunk = lane_idx + 32 * j;
                    const bool is_there = first + 4 * i < part.num_rows && chunk < kChunks;
                    values[i][j] = is_there
                                       ? __ldg(reinterpret_cast<const uint4*>(from + chunk * 8))
                                       : make_uint4(0, 0, 0, 0);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = first + 4 * i;
#pragma unroll
                for (int j = 0; j < 3; ++j) {
                    const int chunk = lane_idx + 32 * j;
                    if (chunk < kChunks) {
                        *reinterpret_cast<uint4*>(dynamic_shared() + Ring::kQueries +
                                                  chunk / 8 * Ring::kQueryBytes + row * 128 +
                                                  ((chunk ^ row) & 7) * 16) = values[i][j];
                    }
                }
            }
        }
        fence_proxy_async();
        named_barrier_sync(kJoin, 128);
    }

    // Zeros what the tile holds beyond the sequence: 0 times a NaN there is a NaN.
    __device__ __forceinline__ void clear_rows_from(int first) const {
#pragma unroll 1
        for (int i = 0; i < Ring::kPanels; ++i) {
            wait_for(i);
            uint8_t* panel = dynamic_shared() + ring.at(i) * Ring::kPanelBytes;
#pragma unroll 1
            for (int j = 8 * first + threadIdx.x; j < 8 * Ring::kTile; j += 128) {
                *reinterpret_cast<uint4*>(panel + 16 * j) = make_uint4(0, 0, 0, 0);
            }
        }
        fence_proxy_async();
        named_barrier_sync(kJoin, 128);
    }

    // scores = K Q^T, panel by panel as they come.
    __device__ __forceinline__ void multiply_keys() {
        hold_registers(scores);
#pragma unroll
        for (int i = 0; i < Ring::kPanels; ++i) {
            wait_for(i);
            const uint32_t a = panel_low(i), b = keep(queries_low);
            const int panel = i == 0 ? Ring::kPanels - 1 : i - 1;
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                Wgmma<T>::ss(scores, descriptor(a, k * 32),
                             descriptor(b, panel * Ring::kQueryBytes + k * 32), i + k != 0);
            }
            wgmma_commit();
        }
        wgmma_wait<0>();
        hold_registers(scores);
        release(0);
    }

    // Scores become probabilities. Returns in `shrink` what the output is to be multiplied by.
    __device__ __forceinline__ void exponentiate(const LatentPart& part, int first, float scale,
                                                 float (&shrink)[kMine]) {
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) {
            scores[i] *= scale;
        }
        if (first + Ring::kTile > part.common_end(args)) {
            const int token = first + 16 * warp_idx + lane_idx / 4;
#pragma unroll
            for (int i = 0; i < kMine; ++i) {
                const int end = part.end_of(args, row_of(i));
                float(&low) = scores[i / 2 * 4 + i % 2], (&high) = scores[i / 2 * 4 + 2 + i % 2];
                low = token < end ? low : -INFINITY;
                high = token + 8 < end ? high : -INFINITY;
            }
        }
        float largest[kMine];
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            largest[i] = fmaxf(scores[i / 2 * 4 + i % 2], scores[i / 2 * 4 + 2 + i % 2]);
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) {
                largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], mask));
            }
            if (lane_idx < 4) {
                words(Ring::kMaxima, warp_idx)[row_of(i)] = largest[i];
            }
        }
        named_barrier_sync(kJoin, 128);
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            float found = row_max[i];
#pragma unroll
            for (int warp = 0; warp < 4; ++warp) {
                found = fmaxf(found, words(Ring::kMaxima, warp)[row_of(i)]);
            }
            const float base = base_of(found);
            shrink[i] = exp2_approx(row_max[i] - base);
            row_max[i] = found;
            float(&low) = scores[i / 2 * 4 + i % 2], (&high) = scores[i / 2 * 4 + 2 + i % 2];
            low = exp2_approx(low - base), high = exp2_approx(high - base);
            row_sum[i] = row_sum[i] * shrink[i] + (low + high);
        }
    }

    // The probabilities to shared memory, a line of 64 tokens a row.
    __device__ __forceinline__ void share_probs() const {
        const int tile = lane_idx >> 3, in_tile = lane_idx & 7;
#pragma unroll
        for (int i = 0; i < kRows / 16; ++i) {
            uint32_t packed[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                packed[e] = pack2<T>(scores[8 * i + 2 * e], scores[8 * i + 2 * e + 1]);
            }
            const int row = 16 * i + 8 * (tile >> 1) + in_tile, chunk = 2 * warp_idx + (tile & 1);
            stmatrix_x4_trans(ring.base + Ring::kProbs + row * 128 + ((chunk ^ in_tile) << 4),
                              packed[0], packed[1], packed[2], packed[3]);
        }
        fence_proxy_async();
        named_barrier_sync(kJoin, 128);
    }

    // output += V^T P^T, a panel's columns a group; panels are released as they end.
    __device__ __forceinline__ void multiply_values() {
        const uint32_t b = keep(probs_low);
#pragma unroll
        for (int p = 0; p < kLatentDim / 64; ++p) {
            hold_registers(output[p]);
        }
        wgmma_fence();
#pragma unroll
        for (int p = 0; p < kLatentDim / 64; ++p) {
            const uint32_t a = panel_low(1 + p);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                Wgmma<T>::template ss<1, 0>(output[p], descriptor(a, k * 16 * 128),
                                            descriptor(b, k * 32), 1);
            }
            wgmma_commit();
        }
        release_panels<1>();
#pragma unroll
        for (int p = 0; p < kLatentDim / 64; ++p) {
            hold_registers(output[p]);
        }
    }
    template <int kPanel>
    __device__ __forceinline__ void release_panels() const {
        wgmma_wait<Ring::kPanels - 1 - kPanel>();
        release(kPanel);
        if constexpr (kPanel + 1 < Ring::kPanels) {
            release_panels<kPanel + 1>();
        }
    }

    // A part, from its queries to its rows.
    __device__ __forceinline__ void attend(const LatentPart& part) {
        const float scale_log2 = args.softmax_scale * kLog2e;
        load_queries(part);
#pragma unroll
        for (int p = 0; p < kLatentDim / 64; ++p) {
#pragma unroll
            for (int i = 0; i < kRows / 2; ++i) {
                output[p][i] = 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            row_max[i] = -INFINITY, row_sum[i] = 0.0f;
        }
#pragma unroll 1
        for (int first = part.first_token; first < part.end_token; first += Ring::kTile) {
            if (part.end_token - first < Ring::kTile) {
                clear_rows_from(part.end_token - first);
            }
            multiply_keys();
            float shrink[kMine];
            exponentiate(part, first, scale_log2, shrink);
            share_probs();
            bool is_same = true;
#pragma unroll
            for (int i = 0; i < kMine; ++i) {
                is_same &= shrink[i] == 1.0f;
            }
            if (__any_sync(~0u, !is_same)) {
#pragma unroll
                for (int p = 0; p < kLatentDim / 64; ++p) {
#pragma unroll
                    for (int i = 0; i < kMine; ++i) {
                        output[p][i / 2 * 4 + i % 2] *= shrink[i];
                        output[p][i / 2 * 4 + 2 + i % 2] *= shrink[i];
                    }
                }
            }
            multiply_values();
            ring.advance(Ring::kPanels);
        }
        write(part);
    }

    __device__ __forceinline__ void write(const LatentPart& part) {
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) {
                row_sum[i] += __shfl_xor_sync(~0u, row_sum[i], mask);
            }
            if (lane_idx < 4) {
                words(Ring::kSums, warp_idx)[row_of(i)] = row_sum[i];
            }
        }
        named_barrier_sync(kJoin, 128);
        float log2_sums[kMine];
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const int row = row_of(i);
            float sum = 0.0f;
#pragma unroll
            for (int warp = 0; warp < 4; ++warp) {
                sum += words(Ring::kSums, warp)[row];
            }
            const float factor = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
#pragma unroll
            for (int p = 0; p < kLatentDim / 64; ++p) {
                output[p][i / 2 * 4 + i % 2] *= factor;
                output[p][i / 2 * 4 + 2 + i % 2] *= factor;
            }
            log2_sums[i] = row_max[i] + __logf(sum) * kLog2e;
        }
        bool is_whole = part.is_whole;
        if (part.num_parts > 1) {
            const LatentMerge<kRows, 128, kRows * 4, kMine, T> merge = {args, Ring::kQueries};
            is_whole = merge.merge(
                part, log2_sums,
                [&](int e) -> float& { return output[e / (kRows / 2)][e % (kRows / 2)]; },
                [](int e) { return e % (kRows / 2) / 4 * 2 + e % 2; },
                [&](int i) { return row_of(i); }, threadIdx.x < 4);
            if (!is_whole) {
                return;
            }
            if constexpr (kRows != 16) {
                named_barrier_sync(kJoin, 128);  // partials lay over the queries
            }
        }
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            if (threadIdx.x < 4) {
                write_lse(args, part, row_of(i), log2_sums[i], 1.0f, is_whole);
            }
        }
        if (is_whole) {
            write_out(part);
            return;
        }
        // Eight lanes have eight columns of a row.
        const int column = 16 * warp_idx + lane_idx / 4;
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const auto target = LatentRow<T>::of(args, part, row_of(i), false);
            if (target.partial == nullptr) {
                continue;
            }
#pragma unroll
            for (int p = 0; p < kLatentDim / 64; ++p) {
                target.partial[64 * p + column] = output[p][i / 2 * 4 + i % 2];
                target.partial[64 * p + column + 8] = output[p][i / 2 * 4 + 2 + i % 2];
            }
        }
    }

    // Transposed by eights, so that a lane has two columns of a row.
    __device__ __forceinline__ void write_out(const LatentPart& part) const {
        const int column = 16 * warp_idx + 2 * (lane_idx & 3);
#pragma unroll
        for (int j = 0; j < kRows / 8; ++j) {
            const auto target = LatentRow<T>::of(args, part, 8 * j + lane_idx / 4, true);
#pragma unroll
            for (int p = 0; p < kLatentDim / 64; ++p) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float* both = output[p] + 4 * j + 2 * i;
                    const uint32_t turned = movmatrix_trans(pack2<T>(both[0], both[1]));
                    if (target.out != nullptr) {
                        *reinterpret_cast<uint32_t*>(target.out + 64 * p + column + 8 * i) = turned;
                    }
                }
            }
        }
    }
};

}  // namespace kernel_hub::kv_cache::decode::sm90
