// Attention forward in registers: scores, which of them a row sees, and the running softmax.
#pragma once

#include "attention/forward/tiles.cuh"
#include "kernel_hub/math.cuh"

namespace kernel_hub::attention::forward {

constexpr float kRescaleBits = 8.0f;  // how far a maximum may be outgrown before it moves

// What a row sees of a sequence's keys: [first_key(row), end_key(row)), both rising with the row.
struct Sight {
    int seqlen_k, diagonal;  // query i stands at key i + diagonal
    int window_left, window_right;

    __device__ __forceinline__ int first_key(int row) const {
        return window_left < 0 ? 0 : max(0, row + diagonal - window_left);
    }
    __device__ __forceinline__ int end_key(int row) const {
        return window_right < 0 ? seqlen_k : min(seqlen_k, row + diagonal + window_right + 1);
    }
};

// Scores of a warp: 16-row tiles, 8-key tiles, and the mma fragment, element e of which is in row
// lane / 4 + 8 * (e / 2) and column 2 * (lane % 4) + e % 2.
template <int kRowTiles, int kKeyTiles>
using Scores = float[kRowTiles][kKeyTiles][4];

template <int kRows, int kCols>
__device__ __forceinline__ void clear(float (&a)[kRows][kCols][4]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
            a[i][j][0] = a[i][j][1] = a[i][j][2] = a[i][j][3] = 0.0f;
        }
    }
}

// Calls visit(score, step) for each; step: from its column to its row, less those of the lane's
// first.
template <int kRowTiles, int kKeyTiles, typename Visit>
__device__ __forceinline__ void for_each_score(Scores<kRowTiles, kKeyTiles>& s,
                                               const Visit& visit) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                visit(s[i][j][e], i * 16 + e / 2 * 8 - (j * 8 + e % 2));
            }
        }
    }
}

// Scales, and applies softcap and ALiBi, all in units of log2. `distance`: from the key of this
// lane's first column to the place of its first row.
template <int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void bias_scores(Scores<kRowTiles, kKeyTiles>& s, float scale, float cap,
                                            float slope, int distance) {
    const float factor = cap == 0.0f ? scale : scale / cap;
    for_each_score(s, [&](float& score, int) { score *= factor; });
    if (cap != 0.0f) {
        for_each_score(s, [&](float& score, int) { score = cap * tanh_exact(score); });
    }
    if (slope != 0.0f) {
        for_each_score(s, [&](float& score, int step) {
            score -= slope * fabsf(static_cast<float>(distance + step));
        });
    }
}

// Hides the columns that a row does not see: from `end(row)` on (kAtEnd), or before it.
template <bool kAtEnd, int kRowTiles, int kKeyTiles, typename Bound>
__device__ __forceinline__ void hide_scores(Scores<kRowTiles, kKeyTiles>& s, Bound bound) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int limit = bound(i * 16 + r * 8);
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int col = j * 8 + e;
                    const bool is_seen = kAtEnd ? col < limit : col >= limit;
                    s[i][j][2 * r + e] = is_seen ? s[i][j][2 * r + e] : -INFINITY;
                }
            }
        }
    }
}

// One value for each of a lane's rows: r is e / 2 of the fragment.
template <int kRowTiles>
using RowValues = float[kRowTiles][2];

// The maximum of each row so far, this block's scores included. Says whether a row of this lane
// has outgrown its running maximum by more than 2^kRescaleBits.
template <int kRowTiles, int kKeyTiles>
__device__ __forceinline__ bool find_max(const Scores<kRowTiles, kKeyTiles>& s, float scale,
                                         const RowValues<kRowTiles>& row_max,
                                         RowValues<kRowTiles>& block_max) {
    bool is_outgrown = false;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest = row_max[i][r];
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
                largest = fmaxf(largest, fmaxf(s[i][j][2 * r], s[i][j][2 * r + 1]));
            }
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            block_max[i][r] = largest;
            is_outgrown |= (largest - row_max[i][r]) * scale > kRescaleBits;
        }
    }
    return is_outgrown;
}

// Moves the running maxima, and the sums with them.
template <int kRowTiles, int kColTiles>
__device__ __forceinline__ void rescale_sums(const RowValues<kRowTiles>& block_max, float scale,
                                             RowValues<kRowTiles>& row_max,
                                             RowValues<kRowTiles>& row_sum,
                                             float (&acc)[kRowTiles][kColTiles][4]) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float largest = block_max[i][r];
            const float shift = largest == -INFINITY ? 0.0f : largest * scale;
            const float rescale = exp2_approx(row_max[i][r] * scale - shift);
            row_max[i][r] = largest;
            row_sum[i][r] *= rescale;
#pragma unroll
            for (int j = 0; j < kColTiles; ++j) {
                acc[i][j][2 * r] *= rescale;
                acc[i][j][2 * r + 1] *= rescale;
            }
        }
    }
}

// What is subtracted from the scaled scores of each row.
template <int kRowTiles>
__device__ __forceinline__ void find_shifts(const RowValues<kRowTiles>& row_max, float scale,
                                            RowValues<kRowTiles>& shift) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            shift[i][r] = row_max[i][r] == -INFINITY ? 0.0f : row_max[i][r] * scale;
        }
    }
}

// The weights of keys 16 kk to 16 kk + 15, exp2(s * scale - shift), as an A operand; and adds them
// to the sums of this lane's columns.
template <typename T, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void weigh(const Scores<kRowTiles, kKeyTiles>& s, int kk, float scale,
                                      const RowValues<kRowTiles>& shift,
                                      RowValues<kRowTiles>& row_sum, uint32_t (&p)[kRowTiles][4]) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float (&pair)[4] = s[i][2 * kk + e / 2];
            const int r = e % 2;
            const float low = exp2_approx(fmaf(pair[2 * r], scale, -shift[i][r]));
            const float high = exp2_approx(fmaf(pair[2 * r + 1], scale, -shift[i][r]));
            row_sum[i][r] += low + high;
            p[i][e] = pack2<T>(low, high);
        }
    }
}

}  // namespace kernel_hub::attention::forward
