// flash_attention_sm90.cu: what a consumer holds, and how large its scores are, with a softcap.
#pragma once

#include <type_traits>

#include "attention/sm90/pieces.cuh"
#include "attention/sm90/plan.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/wgmma.cuh"

namespace kernel_hub::attention::sm90 {

// How large the scores of a warp are.
enum class Found { kAny, kSmall, kTiny };

// Exponents with softcap of scores up to `bound`, where a shorter polynomial is nearly as exact
// and, with a softcap that is not large, all exponents are so near to each other that no row's
// largest need be known: none is below `least`.
struct Tiny {
    float terms[3];
    float bound, least;

    // Of the softcap (relative error 5e-7); where that is smaller, more of it (2e-6).
    static constexpr float kTanh = 0.26f, kMoreTanh = 0.33f;
    static constexpr float kSmallTanh = 0.5f;  // problem.py: _SMALL_TANH
    // Of scale_log2: exponents are at most 2 kTanh times it, and kRescaleBits, above a row's shift.
    // fp16 does not hold that.
    static constexpr float kMostScale = 80.f, kMoreScale = 62.f;

    __device__ __forceinline__ float operator()(float score, float shift) const {
        const float square = score * score;
        const float factor = fmaf(fmaf(terms[2], square, terms[1]), square, terms[0]);
        return fmaf(score, factor, -shift);
    }
};

// A consumer's registers: its places in the rings, scores, probabilities and output of 64 rows.
template <class C>
struct Held {
    using T = typename C::T;
    const Parameters& p;
    const Shared<C>& shared;
    const int consumer, thread_idx, lane_idx;
    const int row;       // of the tile; the thread also holds row + 8
    const int token[2];  // split: those of its two rows
    const uint32_t q_low, k_low, v_low;
    Place<C::kQStages> q;
    Place<C::kStages> k, v;
    Place<kTileSlots> slot;
    float scores[C::kBlockN / 2];
    uint32_t probs[C::kBlockN / 16][4];
    float output[C::kHeadDimV / 2];
    float row_shift[2], row_sum[2], rescale[2];
    bool must_rescale;
    bool k_is_there = false, v_is_there = false;

    __device__ __forceinline__ Held(const Parameters& p_, const Shared<C>& shared_, int consumer_)
        : p(p_),
          shared(shared_),
          consumer(consumer_),
          thread_idx(threadIdx.x % 128),
          lane_idx(threadIdx.x % 32),
          row(64 * consumer_ + 16 * (thread_idx / 32) + lane_idx / 4),
          token{C::kSplit ? p_.packing.token_of(row) : 0,
                C::kSplit ? p_.packing.token_of(row + 8) : 8},
          q_low(__shfl_sync(kAllLanes, descriptor_low(shared_.q_tile(0, consumer_), 16), 0)),
          k_low(descriptor_low(shared_.k, 16)),
          v_low(descriptor_low(shared_.v, C::kKVPanelBytes)) {}

    // Whether the thread's row r is one of the tile's queries.
    __device__ __forceinline__ bool is_query(const Range& tile, int r) const {
        const int ahead = C::kSplit ? token[r] : 8 * r;
        return tile.diagonal + ahead < tile.seqlen_k && (!C::kSplit || ahead < p.packing.tokens);
    }

    // Whether this warp's scores of the tile's queries and the sequence's keys are small_score at
    // most. kMasked: not all of the block's keys may be the sequence's.
    // NOTE: what lies beyond a sequence must not choose the way to its result.
    template <bool kMasked>
    __device__ __forceinline__ bool are_small(const Range& tile, int block) const {
        const int end = tile.seqlen_k - block * C::kBlockN - 2 * (lane_idx % 4);
        bool are = true;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float even = 0.f, odd = 0.f;
#pragma unroll
            for (int j = 0; j < C::kBlockN / 8; ++j) {
                if (!kMasked || 8 * j < end) {
                    even = fmaxf(even, fabsf(scores[4 * j + 2 * r]));
                }
                if (!kMasked || 8 * j + 1 < end) {
                    odd = fmaxf(odd, fabsf(scores[4 * j + 2 * r + 1]));
                }
            }
            are &= !is_query(tile, r) || fmaxf(even, odd) <= p.small_score;
        }
        return __all_sync(kAllLanes, are);
    }

    // Sets scores of keys beyond the sequence's end to 0, where they are another's: what lies there
    // must not choose the way to a result.
    __device__ __forceinline__ void hide_foreign(const Range& tile, int block) {
        const int rest = tile.seqlen_k - block * C::kBlockN;
        if (!p.has_foreign_rows || rest >= C::kBlockN) {
            return;
        }
        const int end = rest - 2 * (lane_idx % 4);
#pragma unroll
        for (int i = 0; i < C::kBlockN / 2; ++i) {
            scores[i] = 8 * (i / 4) + i % 2 < end ? scores[i] : 0.f;
        }
    }

    // Bits 2 j + e of the thread's rows: whether they see the keys 8 j + e (and 2 (lane % 4) more)
    // of a block; those of all rows of the warp.
    struct Seen {
        uint32_t rows[2], any;
        bool is_blind[2];  // the row sees none of the block's keys, and few or none at all
        bool have_few;     // a row of the warp sees so few that its largest one must be exact
        static constexpr int kFew = 8;
    };

    // The first of a row's bits, of keys before `end`.
    static __device__ __forceinline__ uint32_t bits_before(int end) {
        const int count = max(0, 2 * (end >> 3) + min(end & 7, 2));
        return count < 32 ? (1u << count) - 1 : ~0u;
    }

    __device__ __forceinline__ Seen seen_by(const Range& tile, int block) const {
        const int column = block * C::kBlockN + 2 * (lane_idx % 4);
        Seen seen;
        bool has_few = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int diagonal = tile.diagonal + (C::kSplit ? token[r] : 8 * r);
            const int end = p.window_right >= 0 ? min(tile.seqlen_k, diagonal + p.window_right + 1)
                                                : tile.seqlen_k;
            const int begin = p.window_left >= 0 ? max(0, diagonal - p.window_left) : 0;
            seen.rows[r] = bits_before(end - column) & ~bits_before(begin - column);
            const int first = block * C::kBlockN;
            const bool sees_few = end - begin < Seen::kFew;
            seen.is_blind[r] = sees_few && max(begin, first) >= min(end, first + C::kBlockN);
            has_few |= begin < end && sees_few;
        }
        seen.any = __reduce_or_sync(kAllLanes, seen.rows[0] | seen.rows[1]);
        seen.have_few = __any_sync(kAllLanes, has_few);
        return seen;
    }

    // Whether this warp's scores of the tile's queries are within Tiny's bound. By bits, as
    // find_small.
    __device__ __forceinline__ bool are_tiny(const Range& tile, float bound) const {
        const unsigned most = __float_as_uint(bound);
        bool are = bound > 0.f && p.scale_log2 <= Tiny::kMostScale;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int above[2] = {0, 0};
            unsigned below[2] = {0, 0};
#pragma unroll
            for (int j = 0; j < C::kBlockN / 8; ++j) {
                const unsigned a = __float_as_uint(scores[4 * j + 2 * r]);
                const unsigned b = __float_as_uint(scores[4 * j + 2 * r + 1]);
                above[j % 2] = max(max(above[j % 2], static_cast<int>(a)), static_cast<int>(b));
                below[j % 2] = max(max(below[j % 2], a), b);
            }
            are &= !is_query(tile, r) || (max(above[0], above[1]) <= static_cast<int>(most) &&
                                          max(below[0], below[1]) <= (most ^ 0x80000000u));
        }
        return __all_sync(kAllLanes, are);
    }

    // The exponent of a small score with softcap, less `shift`.
    __device__ __forceinline__ float small_exponent(float score, float shift) const {
        const float square = score * score;
        float factor = p.tanh_terms[3];
#pragma unroll
        for (int i = 2; i >= 0; --i) {
            factor = fmaf(factor, square, p.tanh_terms[i]);
        }
        return fmaf(score, factor, -shift);
    }

    __device__ __forceinline__ Tiny tiny_scores() const {
        const bool are_more = p.scale_log2 <= Tiny::kMoreScale;
        const float tanh = are_more ? Tiny::kMoreTanh : Tiny::kTanh;
        return {{p.tanh_terms[0] * ((are_more ? 0.99999797f : 0.9999995f) / 0.99999946f),
                 p.tanh_terms[1] * ((are_more ? 0.33299576f : 0.3332001f) / 0.33326318f),
                 p.tanh_terms[2] * ((are_more ? 0.12494163f : 0.1280271f) / 0.13190297f)},
                p.small_score * (tanh / Tiny::kSmallTanh),
                -tanh * p.scale_log2};
    }

    // The largest score of the thread's row r.
    __device__ __forceinline__ float largest_of(int r) const {
        // Two chains: one alone would be bound by its latency.
        float even = scores[2 * r], odd = scores[2 * r + 1];
#pragma unroll
        for (int j = 1; j < C::kBlockN / 8; ++j) {
            even = max_nan(even, scores[4 * j + 2 * r]);
            odd = max_nan(odd, scores[4 * j + 2 * r + 1]);
        }
        float largest = max_nan(even, odd);
        largest = max_nan(largest, __shfl_xor_sync(kAllLanes, largest, 1));
        return max_nan(largest, __shfl_xor_sync(kAllLanes, largest, 2));
    }

    // How large this warp's scores of the tile's queries are; where they are small, `largest`
    // becomes those of the thread's rows. By bits: as signed numbers the largest score above 0 is
    // the largest, as unsigned ones the least below 0, and one instruction takes two more of them.
    __device__ __forceinline__ Found find_small(const Range& tile, float (&largest)[2]) const {
        int high[2];
        unsigned low[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int above[2] = {0, 0};
            unsigned below[2] = {0, 0};
#pragma unroll
            for (int j = 0; j < C::kBlockN / 8; ++j) {
                const unsigned a = __float_as_uint(scores[4 * j + 2 * r]);
                const unsigned b = __float_as_uint(scores[4 * j + 2 * r + 1]);
                int& most = above[j % 2];
                unsigned& least = below[j % 2];
                const int high_a = static_cast<int>(a), high_b = static_cast<int>(b);
                most = j < 2 ? max(high_a, high_b) : max(max(most, high_a), high_b);
                least = j < 2 ? max(a, b) : max(max(least, a), b);
            }
            high[r] = max(above[0], above[1]);
            low[r] = max(below[0], below[1]);
        }
        const auto are_within = [&](float bound) {
            const unsigned most = __float_as_uint(bound);
            bool are = true;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                are &= !is_query(tile, r) ||
                       (high[r] <= static_cast<int>(most) && low[r] <= (most ^ 0x80000000u));
            }
            return __all_sync(kAllLanes, are);
        };
        if constexpr (std::is_same_v<T, __nv_bfloat16>) {
            if (p.scale_log2 <= Tiny::kMostScale && are_within(tiny_scores().bound)) {
                return Found::kTiny;
            }
        }
        if (!are_within(p.small_score)) {
            return Found::kAny;
        }
        bool must_ask = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            high[r] = max(high[r], __shfl_xor_sync(kAllLanes, high[r], 1));
            high[r] = max(high[r], __shfl_xor_sync(kAllLanes, high[r], 2));
            largest[r] = __int_as_float(high[r]);
            // Of scores below 0 alone it is not the largest one; nothing asks for that one where
            // the shift is above 0.
            must_ask |= high[r] < 0 && row_shift[r] < 0.f;
        }
        if (__any_sync(kAllLanes, must_ask)) {
            largest[0] = largest_of(0);
            largest[1] = largest_of(1);
        }
        return Found::kSmall;
    }

    // The largest scores of the thread's rows, by bits as in find_small: where all are below 0, and
    // the shift too, they are asked for again.
    __device__ __forceinline__ void find_largest(float (&largest)[2]) const {
        bool must_ask = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int above[2] = {0, 0};
#pragma unroll
            for (int j = 0; j < C::kBlockN / 8; ++j) {
                const int a = __float_as_int(scores[4 * j + 2 * r]);
                const int b = __float_as_int(scores[4 * j + 2 * r + 1]);
                int& high = above[j % 2];
                high = j < 2 ? max(a, b) : max(max(high, a), b);
            }
            int high = max(above[0], above[1]);
            high = max(high, __shfl_xor_sync(kAllLanes, high, 1));
            high = max(high, __shfl_xor_sync(kAllLanes, high, 2));
            largest[r] = __int_as_float(high);
            must_ask |= high < 0 && row_shift[r] < 0.f;
        }
        if (__any_sync(kAllLanes, must_ask)) {
            largest[0] = largest_of(0);
            largest[1] = largest_of(1);
        }
    }

    // The largest exponents of the thread's rows among the keys that are seen.
    __device__ __forceinline__ void find_largest(const Tiny& tiny, const Seen& seen,
                                                 float (&largest)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float most = -tiny.bound;
#pragma unroll
            for (int j = 0; j < C::kBlockN / 8; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const bool is_seen = seen.rows[r] >> (2 * j + e) & 1;
                    most = is_seen ? fmaxf(most, scores[4 * j + 2 * r + e]) : most;
                }
            }
            most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
            most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
            largest[r] = tiny(most, 0.f);
        }
    }
};

}  // namespace kernel_hub::attention::sm90
