// flash_attention_sm90.cu: what a consumer holds, and does to its scores: masks, softmax.
#pragma once

#include <type_traits>

#include "attention/sm90/pieces.cuh"
#include "attention/sm90/plan.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/wgmma.cuh"

namespace kernel_hub::attention::sm90 {

// What is known of the largest scores of rows: nothing, the scores, or that no exponent is below
// one.
enum class Given { kNothing, kLargest, kBound };
// How large the scores of a warp are.
enum class Found { kAny, kSmall, kTiny };

// Exponents with softcap of scores up to kBound of small_score, where a shorter polynomial is as
// exact (5e-7) and, with a softcap that is not large, all exponents are so near to each other that
// no row's largest need be known.
struct Tiny {
    float terms[3];
    float least;  // exponent

    static constexpr float kTanh = 0.26f;          // of the softcap
    static constexpr float kBound = kTanh / 0.5f;  // problem.py: _SMALL_TANH
    // Of scale_log2: exponents are at most 2 kTanh times it, and kRescaleBits, above a row's shift.
    // fp16 does not hold that.
    static constexpr float kMostScale = 80.f;

    __device__ __forceinline__ float operator()(float score, float shift) const {
        const float square = score * score;
        const float factor = fmaf(fmaf(terms[2], square, terms[1]), square, terms[0]);
        return fmaf(score, factor, -shift);
    }
};

// A consumer's registers: its places in the rings, scores, probabilities and output of 64 rows.
template <class C>
struct Scores {
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

    __device__ __forceinline__ Scores(const Parameters& p_, const Shared<C>& shared_, int consumer_)
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

    // With softcap, scores become tanh(score softmax_scale / softcap).
    // NOTE: tanh_approx is off by 5e-4, which a softcap of 50 multiplies.
    __device__ __forceinline__ void cap() {
        // 1 - 2 / (1 + exp(2 x)): absolute error 1e-7.
#pragma unroll
        for (int i = 0; i < C::kBlockN / 2; ++i) {
            scores[i] =
                fmaf(-2.f, reciprocal_approx(1.f + exp2_approx(scores[i] * p.cap_scale_log2)), 1.f);
        }
    }

    // Sets what the rows do not see to -inf.
    template <bool kRight, bool kLeft>
    __device__ __forceinline__ void mask(const Range& tile, int block) {
        const int column = block * C::kBlockN + 2 * (lane_idx % 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int diagonal = tile.diagonal + (C::kSplit ? token[r] : 8 * r);
            int end = tile.seqlen_k - column, begin = 0;
            if (kRight && (C::kMask == Mask::kCausal || p.window_right >= 0)) {
                end = min(end, diagonal + p.window_right + 1 - column);
            }
            if (kLeft && p.window_left >= 0) {
                begin = diagonal - p.window_left - column;
            }
#pragma unroll
            for (int j = 0; j < C::kBlockN / 8; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int i = 8 * j + e;
                    if (i >= end || (kLeft && i < begin)) {
                        scores[4 * j + 2 * r + e] = -INFINITY;
                    }
                }
            }
        }
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
            const int ahead = C::kSplit ? token[r] : 8 * r;
            const bool is_query =
                tile.diagonal + ahead < tile.seqlen_k && (!C::kSplit || ahead < p.packing.tokens);
            are &= !is_query || fmaxf(even, odd) <= p.small_score;
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
        return {{p.tanh_terms[0] * (0.9999995f / 0.99999946f),
                 p.tanh_terms[1] * (0.3332001f / 0.33326318f),
                 p.tanh_terms[2] * (0.1280271f / 0.13190297f)},
                -Tiny::kTanh * p.scale_log2};
    }

    // Scores of a block become probabilities. kTells: with softcap, small scores are told from
    // others. Blocks without masks are capped where kTells says so, masked ones ask for it.
    template <bool kFirst, bool kMasked, bool kTells = false>
    __device__ __forceinline__ void weigh(const Range& tile, int block) {
        float unit = p.scale_log2;  // of the scores' exponents
        if constexpr (kTells && !kMasked) {
            const auto small = [&](float score, float shift) {
                return small_exponent(score, shift);
            };
            if constexpr (C::kFindsSmall) {
                float largest[2];
                const Found found = find_small(tile, largest);
                if (found == Found::kTiny) {
                    const Tiny tiny = tiny_scores();
                    softmax<kFirst, Given::kBound>(tiny, &tiny.least);
                    return;
                }
                if (found == Found::kSmall) {
                    softmax<kFirst, Given::kLargest>(small, largest);
                    return;
                }
            } else if (are_small<false>(tile, block)) {
                softmax<kFirst>(small);
                return;
            }
            cap();
        } else if (kMasked && C::kMask == Mask::kWindow && p.cap_scale_log2 != 0.f) {
            if (kTells && are_small<true>(tile, block)) {
#pragma unroll
                for (int i = 0; i < C::kBlockN / 2; ++i) {
                    scores[i] = small_exponent(scores[i], 0.f);
                }
                unit = 1.f;
            } else {
                cap();
            }
        }
        if constexpr (kMasked && C::kMask == Mask::kFull) {
            if ((block + 1) * C::kBlockN > tile.seqlen_k) {
                mask<false, false>(tile, block);
            }
        } else if constexpr (kMasked) {
            mask<true, C::kMask == Mask::kWindow>(tile, block);
        }
        softmax<kFirst>([&](float score, float shift) { return fmaf(score, unit, -shift); });
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
                const bool is_query = tile.diagonal + 8 * r < tile.seqlen_k;
                are &= !is_query ||
                       (high[r] <= static_cast<int>(most) && low[r] <= (most ^ 0x80000000u));
            }
            return __all_sync(kAllLanes, are);
        };
        if constexpr (std::is_same_v<T, __nv_bfloat16>) {
            if (p.scale_log2 <= Tiny::kMostScale && are_within(Tiny::kBound * p.small_score)) {
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

    // scores become 2^(exponent(score, 0) - shift), where exponent(s, t) = exponent(s, 0) - t grows
    // with s; row_shift and row_sum follow. The shift is the row's largest exponent, or one up to
    // kRescaleBits below it, so that the output is rarely rescaled.
    // given: the rows' largest scores, or the bound of all exponents.
    template <bool kFirst, Given kGiven = Given::kNothing, typename F>
    __device__ __forceinline__ void softmax(F exponent, const float* given = nullptr) {
        // Rows of a first block may have few keys, all scores of which are below 0.
        constexpr bool kByBits = kGiven == Given::kNothing && C::kByBits && !kFirst;
        bool grew = false;
        float own[2];
        if constexpr (kByBits) {
            find_largest(own);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest;
            if constexpr (kGiven == Given::kBound) {
                largest = *given;
            } else if constexpr (kGiven == Given::kLargest || kByBits) {
                largest = exponent(kGiven == Given::kLargest ? given[r] : own[r], 0.f);
            } else {
                largest = exponent(largest_of(r), 0.f);
            }
            if constexpr (!kFirst) {
                largest = max_nan(largest, row_shift[r]);
                const bool keep = largest - row_shift[r] <= kRescaleBits;
                largest = keep ? row_shift[r] : largest;
                grew |= !keep;
            }
            // A row that has seen nothing yet: exp2(-inf - 0), not exp2(-inf + inf).
            const float shift = largest == -INFINITY ? 0.f : largest;
            if constexpr (!kFirst) {
                rescale[r] = exp2_approx(row_shift[r] - shift);
            }
            row_shift[r] = largest;
            float sum = 0.f;
#pragma unroll
            for (int j = 0; j < C::kBlockN / 8; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& score = scores[4 * j + 2 * r + e];
                    score = exp2_approx(exponent(score, shift));
                    sum += score;
                }
            }
            row_sum[r] = kFirst ? sum : fmaf(row_sum[r], rescale[r], sum);
        }
        must_rescale = kFirst ? false : __any_sync(kAllLanes, grew);
    }

    __device__ __forceinline__ void rescale_output() {
        if (!must_rescale) {
            return;
        }
#pragma unroll
        for (int i = 0; i < C::kHeadDimV / 2; ++i) {
            output[i] *= rescale[i / 2 % 2];
        }
    }

    __device__ __forceinline__ void pack_probs() {
#pragma unroll
        for (int i = 0; i < C::kBlockN / 16; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                probs[i][j] = pack2<T>(scores[8 * i + 2 * j], scores[8 * i + 2 * j + 1]);
            }
        }
    }
};

}  // namespace kernel_hub::attention::sm90
