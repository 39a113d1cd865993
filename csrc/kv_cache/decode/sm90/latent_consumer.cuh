// mla_decode_sm90.cu: a consumer's warpgroup.
#pragma once

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/wgmma.cuh"
#include "kv_cache/decode/sm90/latent_shared.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

// Side 0 has the even tiles' scores and columns 0 .. 255 of the output, side 1 the odd ones' and
// the rest. An even tile's probabilities are of its own maximum for side 0, of the pair's for
// side 1.
template <typename T, int kSide>
struct LatentConsumer {
    using C = LatentStages;
    static constexpr int kOther = 1 - kSide;
    const LatentArgs<T>& args;
    const LatentShared shared;
    const int thread_idx, lane_idx;  // of the warpgroup
    uint32_t parity;                 // of the pair's stages
    const uint32_t queries_low, keys_low, values_low[2], probs_low;

    float output[C::kHalfDim / 2], scores[C::kTile / 2];
    uint32_t probs[C::kTile / 16][4];
    float row_max[2], row_sum[2];

    __device__ __forceinline__ LatentConsumer(const LatentArgs<T>& args_, LatentShared shared_,
                                              uint32_t parity_)
        : args(args_),
          shared(shared_),
          thread_idx(threadIdx.x & 127),
          lane_idx(threadIdx.x & 31),
          parity(parity_),
          queries_low(low_of(shared.base + C::kQueries, 16)),
          keys_low(low_of(shared.stage(kSide), 16)),
          values_low{
              low_of(shared.stage(0) + kSide * C::kHalfPanels * C::kPanelBytes, C::kPanelBytes),
              low_of(shared.stage(1) + kSide * C::kHalfPanels * C::kPanelBytes, C::kPanelBytes)},
          probs_low(low_of(shared.stage(kOther) + C::kProbs, 16)) {}

    static __device__ __forceinline__ uint32_t low_of(uint32_t address, uint32_t leading_bytes) {
        return descriptor_low(LatentShared::operand(address), leading_bytes);
    }

    // The thread's row i (0, 1) of the block's 64.
    __device__ __forceinline__ int row_of(int i) const {
        return 16 * (thread_idx / 32) + lane_idx / 4 + 8 * i;
    }
    __device__ __forceinline__ float* maxima(int side) const {
        return reinterpret_cast<float*>(dynamic_shared() + C::kMaxima) + side * C::kRows;
    }
    __device__ __forceinline__ float* sums(int side) const {
        return reinterpret_cast<float*>(dynamic_shared() + C::kSums) + side * C::kRows;
    }

    // All consumers' warps, a row at a time: the block's queries, zeros where there are no rows.
    __device__ __forceinline__ void load_queries(const LatentPart& part) const {
        constexpr int kChunks = kKeyDim / 8;
        named_barrier_sync(kJoin, 256);  // the queries before are no longer read
        // A lane finds where a row of its warp is.
        const int mine =
            part.first_row + max(min(warp_index() + 8 * (lane_idx & 7), part.num_rows - 1), 0);
        const int64_t offset = part.batch_idx * args.q_batch_stride +
                               mine / args.num_heads * args.q_token_stride +
                               mine % args.num_heads * args.q_head_stride;
#pragma unroll 1
        for (int i = 0; i < C::kRows / 8; ++i) {
            const int row = warp_index() + 8 * i;
            const bool is_there = row < part.num_rows;
            const T* from = args.q + __shfl_sync(~0u, offset, i);
#pragma unroll
            for (int chunk = lane_idx; chunk < kChunks; chunk += 32) {
                cp_async_16(shared.base + C::kQueries + chunk / 8 * C::kPanelBytes + row * 128 +
                                ((chunk ^ row) & 7) * 16,
                            from + chunk * 8, is_there);
            }
        }
        cp_async_commit();
        cp_async_wait<0>();
        fence_proxy_async();
        named_barrier_sync(kJoin, 256);
    }

    // Waits for the panels of a half of a stage.
    __device__ __forceinline__ void wait_for(int stage, int half, int count) const {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            mbarrier_wait(shared.full(stage, LatentShared::panel_of(half, i)), parity);
        }
    }

    // Issues scores (+)= Q K^T of a panel of this side's tile, once it is there.
    __device__ __forceinline__ void issue_scores(int panel, bool is_first) {
        const uint32_t a = keep(queries_low), b = keep(keys_low);
        mbarrier_wait(shared.full(kSide, panel), parity);
        hold_registers(scores);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < C::kPanelColumns / 16; ++k) {
            const int offset = panel * C::kPanelBytes + k * 32;
            Wgmma<T>::ss(scores, descriptor(a, offset), descriptor(b, offset), !is_first || k != 0);
        }
        wgmma_commit();
    }

    // Issues output += P V of the other side's tile, P in shared memory.
    __device__ __forceinline__ void issue_others() {
        const uint32_t a = keep(probs_low), b = keep(values_low[kOther]);
        hold_registers(output);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::kTile / 16; ++i) {
            Wgmma<T>::template ss<0, 1>(output, descriptor(a, i * 32), descriptor(b, i * 16 * 128),
                                        1);
        }
        wgmma_commit();
    }

    // To all blocks of the cluster, a thread each.
    __device__ __forceinline__ void release(int stage) const {
        if (thread_idx < shared.num_blocks) {
            mbarrier_arrive_cluster(cluster_address(shared.empty(stage, kSide), thread_idx));
        }
    }

    // Zeros what the tile holds beyond the sequence: 0 times a NaN there is a NaN.
    __device__ __forceinline__ void clear_rows_from(int first) const {
        uint8_t* tile = dynamic_shared() + kSide * C::kStageBytes;
#pragma unroll 1
        for (int panel = 0; panel < 2 * C::kHalfPanels; ++panel) {
#pragma unroll 1
            for (int i = 8 * first + thread_idx; i < 8 * C::kTile; i += 128) {
                *reinterpret_cast<uint4*>(tile + panel * C::kPanelBytes + 16 * i) =
                    make_uint4(0, 0, 0, 0);
            }
        }
        fence_proxy_async();
        named_barrier_sync(kOddProbs + 1 + kSide, 128);
    }

    // Scales the scores of a tile, masks them, and finds the maxima of the thread's rows.
    __device__ __forceinline__ void weigh(const LatentPart& part, int token0, float scale_log2,
                                          float (&largest)[2]) {
#pragma unroll
        for (int i = 0; i < C::kTile / 2; ++i) {
            scores[i] *= scale_log2;
        }
        if (token0 + C::kTile > part.common_end(args)) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int end = part.end_of(args, row_of(i)) - token0 - 2 * (lane_idx & 3);
#pragma unroll
                for (int j = 0; j < C::kTile / 8; ++j) {
                    float(&low) = scores[4 * j + 2 * i], (&high) = scores[4 * j + 2 * i + 1];
                    low = 8 * j < end ? low : -INFINITY;
                    high = 8 * j + 1 < end ? high : -INFINITY;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            largest[i] = -INFINITY;
#pragma unroll
            for (int j = 0; j < C::kTile / 8; ++j) {
                largest[i] =
                    fmaxf(largest[i], fmaxf(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]));
            }
            largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], 1));
            largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], 2));
        }
    }

    // Scores become probabilities of the maxima given, and output += P V of this side's own tile is
    // issued: 16 tokens at a time, so that exponentials run under products.
    __device__ __forceinline__ void attend_own(const float (&largest)[2]) {
        float base[2], shrink[2], sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            base[i] = base_of(largest[i]);
            shrink[i] = exp2_approx(row_max[i] - base[i]);
            row_max[i] = largest[i];
        }
        scale_output(make_float2(shrink[0], shrink[1]));
        const uint32_t b = keep(values_low[kSide]);
        hold_registers(output);
#pragma unroll
        for (int k = 0; k < C::kTile / 16; ++k) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int j = 2 * k; j < 2 * k + 2; ++j) {
                    float(&low) = scores[4 * j + 2 * i], (&high) = scores[4 * j + 2 * i + 1];
                    low = exp2_approx(low - base[i]), high = exp2_approx(high - base[i]);
                    sum[i] += low + high;
                }
            }
            pack_probs(k, probs[k]);
            wgmma_fence();
            Wgmma<T>::template rs<1>(output, probs[k], descriptor(b, k * 16 * 128), 1);
        }
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            row_sum[i] = row_sum[i] * shrink[i] + sum[i];
        }
    }

    // Those of tokens 16 k .. 16 k + 15, a fragment of products.
    __device__ __forceinline__ void pack_probs(int k, uint32_t (&packed)[4]) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            packed[e] = pack2<T>(scores[8 * k + 2 * e], scores[8 * k + 2 * e + 1]);
        }
    }

    // All of them to the tile's rope panel, for the other side.
    __device__ __forceinline__ void share_probs(const uint32_t (&packed)[C::kTile / 16][4]) const {
        const int row = 16 * (thread_idx / 32) + (lane_idx & 15);
        const uint32_t line = shared.stage(kSide) + C::kProbs + row * 128;
#pragma unroll
        for (int i = 0; i < C::kTile / 16; ++i) {
            stmatrix_x4(line + (((2 * i + (lane_idx >> 4)) ^ (row & 7)) << 4), packed[i][0],
                        packed[i][1], packed[i][2], packed[i][3]);
        }
        fence_proxy_async();
        named_barrier_arrive(kSide == 0 ? kEvenProbs : kOddProbs, 256);
    }

    __device__ __forceinline__ void scale_output(float2 factors) {
        if (__any_sync(~0u, factors.x != 1.0f || factors.y != 1.0f)) {
#pragma unroll
            for (int j = 0; j < C::kHalfDim / 8; ++j) {
                output[4 * j] *= factors.x, output[4 * j + 1] *= factors.x;
                output[4 * j + 2] *= factors.y, output[4 * j + 3] *= factors.y;
            }
        }
    }

    __device__ __forceinline__ void write_maxima(const float (&largest)[2]) const {
        if ((lane_idx & 3) == 0) {
            maxima(kSide)[row_of(0)] = largest[0];
            maxima(kSide)[row_of(1)] = largest[1];
        }
        named_barrier_arrive(kSide == 0 ? kEvenMaxima : kOddMaxima, 256);
    }

    // Waits for the scores of this side's tile, the panels of its own half first; before that for
    // the product before, to release its stage: the scores wait longest for what is asked for then.
    __device__ __forceinline__ void multiply_keys(const LatentPart& part, int token0,
                                                  bool is_first) {
        const int rows = part.end_token - token0;
        if (!is_first) {
            wgmma_wait<0>();
            hold_registers(output);
            release(kOther);
        }
        if (rows > 0 && rows < C::kTile) {
            wait_for(kSide, kSide, C::kHalfPanels);
            wait_for(kSide, kOther, C::kHalfPanels + 1);
            clear_rows_from(rows);
        }
#pragma unroll
        for (int i = 0; i < C::kPanels; ++i) {
            issue_scores(i < C::kHalfPanels ? LatentShared::panel_of(kSide, i)
                                            : LatentShared::panel_of(kOther, i - C::kHalfPanels),
                         i == 0);
        }
        wgmma_wait<0>();
        hold_registers(scores);
    }

    __device__ __forceinline__ void attend_even(float (&largest)[2]) {
        largest[0] = fmaxf(largest[0], row_max[0]);
        largest[1] = fmaxf(largest[1], row_max[1]);
        write_maxima(largest);
        attend_own(largest);
        named_barrier_sync(kOddMaxima, 256);
        float factors[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float pair_max = maxima(1)[row_of(i)];
            factors[i] = exp2_approx(row_max[i] - base_of(pair_max));
            row_max[i] = pair_max;
            row_sum[i] *= factors[i];
#pragma unroll
            for (int j = 0; j < C::kTile / 8; ++j) {
                scores[4 * j + 2 * i] *= factors[i];
                scores[4 * j + 2 * i + 1] *= factors[i];
            }
        }
        uint32_t packed[C::kTile / 16][4];
#pragma unroll
        for (int k = 0; k < C::kTile / 16; ++k) {
            pack_probs(k, packed[k]);
        }
        share_probs(packed);
        wgmma_wait<0>();
        hold_registers(output);
        release(0);
        scale_output(make_float2(factors[0], factors[1]));
        wait_for(1, 0, C::kHalfPanels);
        named_barrier_sync(kOddProbs, 256);
        issue_others();
    }

    __device__ __forceinline__ void attend_odd(float (&largest)[2]) {
        named_barrier_sync(kEvenMaxima, 256);
        largest[0] = fmaxf(largest[0], maxima(0)[row_of(0)]);
        largest[1] = fmaxf(largest[1], maxima(0)[row_of(1)]);
        write_maxima(largest);
        attend_own(largest);
        share_probs(probs);
        wait_for(0, 1, C::kHalfPanels);
        named_barrier_sync(kEvenProbs, 256);
        issue_others();
        wgmma_wait<1>();
        release(1);
    }

    // A part, from its queries to its rows. Returns the next one's parity.
    __device__ __forceinline__ uint32_t attend(const LatentPart& part) {
        const float scale_log2 = args.softmax_scale * kLog2e;
        load_queries(part);
#pragma unroll
        for (int i = 0; i < C::kHalfDim / 2; ++i) {
            output[i] = 0.0f;
        }
        row_max[0] = row_max[1] = -INFINITY;
        row_sum[0] = row_sum[1] = 0.0f;
#pragma unroll 1
        for (int first = part.first_token; first < part.end_token; first += 2 * C::kTile) {
            const int token0 = first + kSide * C::kTile;
            multiply_keys(part, token0, first == part.first_token);
            float largest[2];
            weigh(part, token0, scale_log2, largest);
            if constexpr (kSide == 0) {
                attend_even(largest);
            } else {
                attend_odd(largest);
            }
            parity ^= 1;
        }
        wgmma_wait<0>();
        hold_registers(output);
        if (part.first_token < part.end_token) {
            release(kOther);
        }
        write(part);
        return parity;
    }

    // At the end of a part (latent_output.cuh).
    __device__ __forceinline__ void write(const LatentPart& part);
    __device__ __forceinline__ void write_out(const LatentPart& part) const;
};

}  // namespace kernel_hub::kv_cache::decode::sm90
