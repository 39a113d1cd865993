// mla_decode_sm90.cu: a consumer's warpgroup.
#pragma once

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/wgmma.cuh"
#include "kv_cache/decode/sm90/latent_shared.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

// Side 0 has the even tiles' scores and columns 0 .. 255 of the output, side 1 the odd ones' and
// the rest. The tensor cores take, pair after pair: scores of the even tile, of the odd one; the
// even tile's product by side 0, by side 1; the odd one's by side 1, by side 0. So either side's
// exponentials run under the other's products: those of the even tile under the odd one's scores,
// those of the odd tile under the even one's products.
//
// Both sides count exponents from the same number of a row, its base: a maximum that was found, by
// at most kSlack less than the largest score so far.
// kTeam: a part's rows are left for the other blocks of a cluster (latent_team.cuh).
template <typename T, int kSide, bool kTeam = false>
struct LatentConsumer {
    using C = LatentStages;
    static constexpr int kOther = 1 - kSide;
    const LatentArgs<T>& args;
    const LatentShared shared;
    const int thread_idx, lane_idx;  // of the warpgroup
    uint32_t parities;               // of the pair's stages, a bit each
    const uint32_t queries_low, keys_low, values_low[2], probs_low;

    float output[C::kHalfDim / 2], scores[C::kTile / 2];
    uint32_t probs[C::kTile / 16][4];
    float row_max[2], row_sum[2];

    __device__ __forceinline__ LatentConsumer(const LatentArgs<T>& args_, LatentShared shared_,
                                              uint32_t parities_)
        : args(args_),
          shared(shared_),
          thread_idx(threadIdx.x & 127),
          lane_idx(threadIdx.x & 31),
          parities(parities_),
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
            mbarrier_wait(shared.full(stage, LatentShared::panel_of(half, i)),
                          parities >> stage & 1);
        }
    }

    // Issues scores (+)= Q K^T of a panel of this side's tile, once it is there.
    __device__ __forceinline__ void issue_scores(int panel, bool is_first) {
        const uint32_t a = keep(queries_low), b = keep(keys_low);
        mbarrier_wait(shared.full(kSide, panel), parities >> kSide & 1);
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

    // To all blocks of the same tokens, a thread each.
    __device__ __forceinline__ void release(int stage) const {
        if (thread_idx < shared.num_blocks) {
            mbarrier_arrive_cluster(
                cluster_address(shared.empty(stage, kSide), shared.first + thread_idx));
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

    // Masks the scores of a tile, and finds the maxima of the thread's rows, scaled. Scores are
    // scaled where they are exponentiated, if the scale leaves the largest the largest.
    __device__ __forceinline__ void weigh(const LatentPart& part, int token0, float& scale_log2,
                                          float (&largest)[2]) {
        if (!(scale_log2 > 0.0f)) {
#pragma unroll
            for (int i = 0; i < C::kTile / 2; ++i) {
                scores[i] *= scale_log2;
            }
            scale_log2 = 1.0f;
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
            largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], 2)) * scale_log2;
        }
    }

    // The probabilities to the tile's rope panel, for the other side.
    __device__ __forceinline__ void share_probs() const {
        const int row = 16 * (thread_idx / 32) + (lane_idx & 15);
        const uint32_t line = shared.stage(kSide) + C::kProbs + row * 128;
#pragma unroll
        for (int i = 0; i < C::kTile / 16; ++i) {
            stmatrix_x4(line + (((2 * i + (lane_idx >> 4)) ^ (row & 7)) << 4), probs[i][0],
                        probs[i][1], probs[i][2], probs[i][3]);
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

    // Issues the scores of this side's tile, the panels of its own half first, and waits for them.
    // The product before ends under the first panel and releases its stage: the even tile's second
    // half was asked for two products ago. Odd scores come after even ones, or the tensor cores
    // would take both in turn, and neither side's exponentials would have products to run under.
    __device__ __forceinline__ void multiply_keys(const LatentPart& part, int token0,
                                                  bool is_first) {
        const int rows = part.end_token - token0;
        if (kSide == 1 && !is_first) {
            end_product(1);
        }
        if (rows > 0 && rows < C::kTile) {
            wait_for(kSide, kSide, C::kHalfPanels);
            wait_for(kSide, kOther, C::kHalfPanels + 1);
            clear_rows_from(rows);
        }
        if constexpr (kSide == 1) {
            named_barrier_sync(kScores, 256);
        }
#pragma unroll
        for (int i = 0; i < C::kPanels; ++i) {
            issue_scores(i < C::kHalfPanels ? LatentShared::panel_of(kSide, i)
                                            : LatentShared::panel_of(kOther, i - C::kHalfPanels),
                         i == 0);
            if (kSide == 0 && i == 0 && !is_first) {
                end_product<1>(1);
            }
        }
        if constexpr (kSide == 0) {
            named_barrier_arrive(kScores, 256);
        }
        wgmma_wait<0>();
        hold_registers(scores);
    }

    // Waits for the product under way, but not for the kBehind groups after it; it was the last to
    // read this side's half of a stage.
    template <int kBehind = 0>
    __device__ __forceinline__ void end_product(int stage) {
        wgmma_wait<kBehind>();
        hold_registers(output);
        release(stage);
    }

    // The base that a tile's largest scores ask for. It moves for what is much larger alone, so
    // that the output seldom has to be scaled: probabilities are up to 2^kSlack.
    __device__ __forceinline__ void find_base(float (&largest)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            largest[i] = largest[i] > row_max[i] + C::kSlack ? largest[i] : row_max[i];
        }
    }

    // Sums and output come to be of the other side's base.
    __device__ __forceinline__ void take_base() {
        float factors[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float found = maxima(kOther)[row_of(i)];
            factors[i] = exp2_approx(row_max[i] - base_of(found));
            row_max[i] = found;
            row_sum[i] *= factors[i];
        }
        scale_output(make_float2(factors[0], factors[1]));
    }

    // Scores become probabilities, of which the other side is told at once; issues output += P V of
    // the own tile.
    __device__ __forceinline__ void attend_own(const LatentPart& part, int token0,
                                               float scale_log2) {
        float largest[2];
        weigh(part, token0, scale_log2, largest);
        find_base(largest);
        if ((lane_idx & 3) == 0) {
            maxima(kSide)[row_of(0)] = largest[0];
            maxima(kSide)[row_of(1)] = largest[1];
        }
        float shrink[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float base = base_of(largest[i]);
            shrink[i] = exp2_approx(row_max[i] - base);
            row_max[i] = largest[i];
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < C::kTile / 8; ++j) {
                float(&low) = scores[4 * j + 2 * i], (&high) = scores[4 * j + 2 * i + 1];
                low = exp2_approx(fmaf(low, scale_log2, -base));
                high = exp2_approx(fmaf(high, scale_log2, -base));
                sum += low + high;
            }
            row_sum[i] = row_sum[i] * shrink[i] + sum;
        }
#pragma unroll
        for (int k = 0; k < C::kTile / 16; ++k) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                probs[k][e] = pack2<T>(scores[8 * k + 2 * e], scores[8 * k + 2 * e + 1]);
            }
        }
        share_probs();
        if constexpr (kSide == 1) {
            end_product(0);
        }
        scale_output(make_float2(shrink[0], shrink[1]));
        const uint32_t b = keep(values_low[kSide]);
        hold_registers(output);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < C::kTile / 16; ++k) {
            Wgmma<T>::template rs<1>(output, probs[k], descriptor(b, k * 16 * 128), 1);
        }
        wgmma_commit();
    }

    // Issues output += P V of the other side's tile, once its probabilities are there; the tile
    // was, before that side had scores.
    __device__ __forceinline__ void attend_other() {
        named_barrier_sync(kSide == 0 ? kOddProbs : kEvenProbs, 256);
        take_base();
        issue_others();
    }

    // An even tile without an odd one.
    __device__ __forceinline__ void attend_last(const LatentPart& part, int token0,
                                                float scale_log2) {
        if constexpr (kSide == 0) {
            multiply_keys(part, token0, true);
            attend_own(part, token0, scale_log2);
        } else {
            named_barrier_sync(kScores, 256);
            attend_other();
        }
        end_product(0);
        parities ^= 1;
    }

    // A part, from its queries to its rows; the last pair's odd tile may not be there. Returns the
    // next one's parities.
    __device__ __forceinline__ uint32_t attend(const LatentPart& part) {
        const float scale_log2 = args.softmax_scale * kLog2e;
        load_queries(part);
#pragma unroll
        for (int i = 0; i < C::kHalfDim / 2; ++i) {
            output[i] = 0.0f;
        }
        row_max[0] = row_max[1] = -INFINITY;
        row_sum[0] = row_sum[1] = 0.0f;
        int first = part.first_token;
#pragma unroll 1
        for (; first + C::kTile < part.end_token; first += 2 * C::kTile) {
            multiply_keys(part, first + kSide * C::kTile, first == part.first_token);
            if constexpr (kSide == 0) {
                attend_own(part, first, scale_log2);
                end_product(0);
                attend_other();
            } else {
                attend_other();
                attend_own(part, first + C::kTile, scale_log2);
            }
            parities ^= 3;
        }
        wgmma_wait<0>();
        hold_registers(output);
        if (first != part.first_token) {
            release(1);
        }
        if (first < part.end_token) {
            attend_last(part, first, scale_log2);
        }
        write(part);
        return parities;
    }

    // At the end of a part (latent_output.cuh).
    __device__ __forceinline__ void write(const LatentPart& part);
    __device__ __forceinline__ void write_out(const LatentPart& part) const;
    __device__ __forceinline__ void share(const float (&log2_sums)[2]) const;
    __device__ __forceinline__ void write_partial(const LatentPart& part) const;
};

}  // namespace kernel_hub::kv_cache::decode::sm90
