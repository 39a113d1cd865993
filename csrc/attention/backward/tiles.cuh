// How the main kernel of attention backward cuts its five products: tiles, warps, a thread's
// scores.
#pragma once

#include "attention/backward/problem.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/math.cuh"

namespace kernel_hub::attention::backward {

// Tile sizes and how the warps share the five products.
template <int kMaxScores, int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps_, int kWarpsN_,
          int kWarpsDkv_, int kWarpsDq_, int kStagesQ_, int kStagesDout_>
struct Tiles {
    static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_;
    static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps_;
    static constexpr int kWarpsN = kWarpsN_;  // along the keys of s and dp, the rest along queries
    static constexpr int kWarpsDkv = kWarpsDkv_;  // along the keys of dk and dv, ... columns
    static constexpr int kWarpsDq = kWarpsDq_;    // along the queries of dq, ... columns
    static constexpr int kStagesQ = kStagesQ_, kStagesDout = kStagesDout_;
    static constexpr bool kInRegisters = kWarpsN == kWarps;  // p^T and ds^T, for dv and dk

    using Rows = SharedRows<kHeadDim>;
    using Scores = SharedRows<kBlockM>;
    static constexpr int kKBytes = kBlockN * Rows::kPitch, kQBytes = kBlockM * Rows::kPitch;
    static constexpr int kScoresBytes = kBlockN * Scores::kPitch;
    static constexpr int kK = 0, kV = kKBytes, kQ = kV + kKBytes;
    static constexpr int kDout = kQ + kStagesQ * kQBytes, kDs = kDout + kStagesDout * kQBytes;
    // Half of the warps work on the scores of one block of queries while the others add up the
    // block before it.
    static constexpr bool kStaggered = kStagesQ == 3;
    static constexpr int kBuffers = kStaggered ? 2 : 1;  // of ds and p
    static constexpr int kP = kDs + kBuffers * kScoresBytes;
    static constexpr int kRowValues = kInRegisters ? kP : kP + kBuffers * kScoresBytes;
    static constexpr int kWork = kRowValues + 16 * kBlockM;
    static constexpr int kSharedBytes = kWork + 64;  // of which Work is a part

    static constexpr int kKeys16 = kBlockN / kWarpsN / 16;
    static constexpr int kQueries = kBlockM / (kWarps / kWarpsN);  // a warp's, of s
    // Queries at once: those that give kMaxScores scores and dp in a thread's registers.
    static constexpr int kChunk = kQueries < kMaxScores / kKeys16 ? kQueries : kMaxScores / kKeys16;
    static constexpr int kDkvRows16 = kBlockN / kWarpsDkv / 16;
    static constexpr int kDkvWarpsCols = kWarps / kWarpsDkv;
    static constexpr int kDkvCols16 = kHeadDim / kDkvWarpsCols / 16;
    static constexpr int kDqRows16 = kBlockM / kWarpsDq / 16;
    static constexpr int kDqWarpsCols = kWarps / kWarpsDq;
    static constexpr int kDqCols16 = kHeadDim / kDqWarpsCols / 16;

    static_assert(kKeys16 * 16 * kWarpsN == kBlockN && kDkvRows16 * 16 * kWarpsDkv == kBlockN &&
                      kDqRows16 * 16 * kWarpsDq == kBlockM && kQueries % kChunk == 0 &&
                      kChunk % 16 == 0 && kDkvCols16 * 16 * kDkvWarpsCols == kHeadDim &&
                      kDqCols16 * 16 * kDqWarpsCols == kHeadDim,
                  "warps share the tiles evenly, 16 rows and columns at a time");
    static_assert(!kInRegisters || kWarpsDkv == kWarps,
                  "p^T and ds^T in registers are those of the warp's own keys");
    static_assert(kBlockM <= 2 * kThreads, "a thread copies four row values at most");
};

template <typename Tiles>
constexpr LaunchFacts facts_of() {
    return {.threads = Tiles::kThreads,
            .shared_bytes = Tiles::kSharedBytes,
            .blocks_per_sm = 1,
            .head_dim = Tiles::kHeadDim,
            .block_m = Tiles::kBlockM,
            .block_n = Tiles::kBlockN,
            .warps = Tiles::kWarps,
            .stages = Tiles::kStagesQ,
            .stages_dout = Tiles::kStagesDout};
}

// What a thread reads of the tiles.
template <typename Tiles>
struct Thread {
    using Rows = typename Tiles::Rows;
    using Scores = typename Tiles::Scores;
    int lane_idx, warp_idx;
    // A lane's row and chunk in a 16 x 16 operand: a left one as it is stored or a right one from
    // transposed storage, and the other two.
    int row_a, chunk_a, row_b, chunk_b;
    int warp_key, warp_query;  // of the warp's first score
    int dkv_key, dkv_col16;
    int dq_row16, dq_col16;

    __device__ __forceinline__ explicit Thread(int thread_idx)
        : lane_idx(thread_idx % 32),
          warp_idx(thread_idx / 32),
          row_a(lane_idx % 16),
          chunk_a(lane_idx / 16),
          row_b(lane_idx % 8 + lane_idx / 16 * 8),
          chunk_b(lane_idx / 8 % 2),
          warp_key(warp_idx % Tiles::kWarpsN * (Tiles::kBlockN / Tiles::kWarpsN)),
          warp_query(warp_idx / Tiles::kWarpsN * Tiles::kQueries),
          dkv_key(warp_idx % Tiles::kWarpsDkv * (Tiles::kBlockN / Tiles::kWarpsDkv)),
          dkv_col16(warp_idx / Tiles::kWarpsDkv),
          dq_row16(warp_idx % Tiles::kWarpsDq),
          dq_col16(warp_idx / Tiles::kWarpsDq) {}

    // Addresses relative to the start of shared memory.
    __device__ __forceinline__ uint32_t k_left() const {
        return Tiles::kK + Rows::offset(warp_key + row_a, chunk_a);
    }
    __device__ __forceinline__ uint32_t q_right() const {
        return Tiles::kQ + Rows::offset(warp_query + row_b, chunk_b);
    }
    __device__ __forceinline__ uint32_t q_columns() const {
        return Tiles::kQ + Rows::offset(row_a, 2 * dkv_col16 + chunk_a);
    }
    __device__ __forceinline__ uint32_t k_columns() const {
        return Tiles::kK + Rows::offset(row_a, 2 * dq_col16 + chunk_a);
    }
    __device__ __forceinline__ uint32_t ds_left() const {
        return Tiles::kDs + Scores::offset(dkv_key + row_a, chunk_a);
    }
    __device__ __forceinline__ uint32_t ds_turned() const {
        return Tiles::kDs + Scores::offset(row_b, 2 * dq_row16 + chunk_b);
    }
    __device__ __forceinline__ uint32_t ds_mine() const {
        return Tiles::kDs + Scores::offset(warp_key + lane_idx / 4, warp_query / 8) +
               lane_idx % 4 * 4;
    }
};

// Calls apply(i, j, e, key, query) for each of a thread's scores; key and query count from those of
// its first one.
template <typename Tiles, typename Apply>
__device__ __forceinline__ void for_each_score(Apply apply) {
#pragma unroll
    for (int j = 0; j < Tiles::kChunk / 8; ++j) {
#pragma unroll
        for (int i = 0; i < Tiles::kKeys16; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                apply(i, j, e, i * 16 + e / 2 * 8, j * 8 + e % 2);
            }
        }
    }
}

// Rounds p and ds to operands, 16 keys times 16 queries each, and stores them for those products
// that take them from shared memory; `ds_mine`: of the thread's first ds.
template <typename T, typename Tiles>
__device__ __forceinline__ void pack_scores(
    const float (&scores)[Tiles::kKeys16][Tiles::kChunk / 8][4],
    const float (&dp)[Tiles::kKeys16][Tiles::kChunk / 8][4], uint32_t ds_mine, int chunk,
    uint32_t (&p_tiles)[Tiles::kKeys16][Tiles::kChunk / 16][4],
    uint32_t (&ds_tiles)[Tiles::kKeys16][Tiles::kChunk / 16][4]) {
    using Scores = typename Tiles::Scores;
#pragma unroll
    for (int j = 0; j < Tiles::kChunk / 8; ++j) {
#pragma unroll
        for (int i = 0; i < Tiles::kKeys16; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* p_pair = scores[i][j] + 2 * half;
                const float* ds_pair = dp[i][j] + 2 * half;
                const uint32_t p_word = pack2<T>(p_pair[0], p_pair[1]);
                const uint32_t ds_word = pack2<T>(ds_pair[0], ds_pair[1]);
                p_tiles[i][j / 2][j % 2 * 2 + half] = p_word;
                ds_tiles[i][j / 2][j % 2 * 2 + half] = ds_word;
                const uint32_t place =
                    Scores::advance(ds_mine, chunk / 8 + j) + (i * 16 + half * 8) * Scores::kPitch;
                store_shared(place, ds_word);
                if constexpr (!Tiles::kInRegisters) {
                    store_shared(place + Tiles::kP - Tiles::kDs, p_word);
                }
            }
        }
    }
}

// softcap tanh(score / softcap) in units of log2; `slant` is its slope.
__device__ __forceinline__ float cap_score(float score, float softcap, float& slant) {
    // tanh(x) = 1 - 2 / (1 + exp(2 x))
    const float power = exp2_approx(2.0f * score / softcap);
    const float capped = 1.0f - __fdividef(2.0f, 1.0f + power);
    slant = 1.0f - capped * capped;
    return softcap * kLog2e * capped;
}

// Hides the scores of keys that a query does not see; the first one is of key `key0`.
template <typename Tiles>
__device__ __forceinline__ void hide_scores(float (&scores)[Tiles::kKeys16][Tiles::kChunk / 8][4],
                                            Window window, int key0, int relative0) {
    for_each_score<Tiles>([&](int i, int j, int e, int key, int query) {
        if (key0 + key >= window.num_keys || !window.sees(relative0 + key - query)) {
            scores[i][j][e] = -INFINITY;
        }
    });
}

}  // namespace kernel_hub::attention::backward
