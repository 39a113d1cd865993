// flash_attention_sm90.cu: what a consumer does to its scores: softcap, masks, softmax.
#pragma once

#include "attention/sm90/held.cuh"
#include "kernel_hub/math.cuh"

namespace kernel_hub::attention::sm90 {

// What is known of the largest scores of rows: nothing, the scores, or that no exponent is below
// one.
enum class Given { kNothing, kLargest, kBound };

// Scores and probabilities of 64 rows.
template <class C>
struct Scores : Held<C> {
    using T = typename C::T;
    using Base = Held<C>;
    using Base::lane_idx;
    using Base::must_rescale;
    using Base::output;
    using Base::p;
    using Base::probs;
    using Base::rescale;
    using Base::row_shift;
    using Base::row_sum;
    using Base::scores;
    using Base::token;
    using typename Base::Seen;

    __device__ __forceinline__ Scores(const Parameters& p_, const Shared<C>& shared_, int consumer_)
        : Base(p_, shared_, consumer_) {}

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

    // Scores of a block become probabilities. kTells: with softcap, small scores are told from
    // others. Blocks without masks are capped where kTells says so, masked ones ask for it.
    template <bool kFirst, bool kMasked, bool kTells = false>
    __device__ __forceinline__ void weigh(const Range& tile, int block) {
        float unit = p.scale_log2;  // of the scores' exponents
        if constexpr (kTells && !kMasked) {
            const auto small = [&](float score, float shift) {
                return this->small_exponent(score, shift);
            };
            if constexpr (C::kFindsSmall) {
                float largest[2];
                const Found found = this->find_small(tile, largest);
                if (found == Found::kTiny) {
                    const Tiny tiny = this->tiny_scores();
                    softmax<kFirst, Given::kBound>(tiny, &tiny.least);
                    return;
                }
                if (found == Found::kSmall) {
                    softmax<kFirst, Given::kLargest>(small, largest);
                    return;
                }
            } else if constexpr (C::kFindsTiny) {
                const Tiny tiny = this->tiny_scores();
                if (this->are_tiny(tile, tiny.bound)) {
                    softmax<kFirst, Given::kBound>(tiny, &tiny.least);
                    return;
                }
            } else if (this->template are_small<false>(tile, block)) {
                softmax<kFirst>(small);
                return;
            }
            cap();
        } else if (kMasked && C::kHasCap && p.cap_scale_log2 != 0.f) {
            if constexpr (kTells && C::kFindsTiny) {
                this->hide_foreign(tile, block);
                const Tiny tiny = this->tiny_scores();
                if (this->are_tiny(tile, tiny.bound)) {
                    softmax_seen<kFirst>(tiny, this->seen_by(tile, block));
                    return;
                }
                cap();
            } else if (kTells && this->template are_small<true>(tile, block)) {
#pragma unroll
                for (int i = 0; i < C::kBlockN / 2; ++i) {
                    scores[i] = this->small_exponent(scores[i], 0.f);
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
            if (!C::kIsFullToo || p.window_left >= 0 || p.window_right >= 0) {
                mask<true, C::kMask == Mask::kWindow>(tile, block);
            } else if ((block + 1) * C::kBlockN > tile.seqlen_k) {
                mask<false, false>(tile, block);
            }
        }
        softmax<kFirst>([&](float score, float shift) { return fmaf(score, unit, -shift); });
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
            this->find_largest(own);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest;
            if constexpr (kGiven == Given::kBound) {
                largest = *given;
            } else if constexpr (kGiven == Given::kLargest || kByBits) {
                largest = exponent(kGiven == Given::kLargest ? given[r] : own[r], 0.f);
            } else {
                largest = exponent(this->largest_of(r), 0.f);
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

    // The same of tiny scores, of the keys that are seen.
    template <bool kFirst>
    __device__ __forceinline__ void softmax_seen(const Tiny& tiny, const Seen& seen) {
        bool grew = false;
        float shift[2] = {tiny.least, tiny.least}, sum[2];
        if (seen.have_few) {
            this->find_largest(tiny, seen, shift);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool is_new = kFirst || row_shift[r] == -INFINITY;
            if constexpr (!kFirst) {
                const float largest = max_nan(shift[r], row_shift[r]);
                const bool keep = largest - row_shift[r] <= kRescaleBits;
                shift[r] = keep ? row_shift[r] : largest;
                grew |= !keep;
                rescale[r] = exp2_approx(row_shift[r] - shift[r]);
            }
            row_shift[r] = seen.is_blind[r] && is_new ? -INFINITY : shift[r];
            sum[r] = 0.f;
        }
#pragma unroll
        for (int first = 0; first < C::kBlockN / 2; first += 16) {
            if ((seen.any >> (first / 2) & 0xff) == 0) {
#pragma unroll
                for (int i = first; i < min(first + 16, C::kBlockN / 2); ++i) {
                    scores[i] = 0.f;
                }
            } else {
#pragma unroll
                for (int i = first; i < min(first + 16, C::kBlockN / 2); ++i) {
                    const int r = i / 2 % 2, bit = i / 4 * 2 + i % 2;
                    const float weight = exp2_approx(tiny(scores[i], shift[r]));
                    scores[i] = seen.rows[r] >> bit & 1 ? weight : 0.f;
                    sum[r] += scores[i];
                }
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            row_sum[r] = kFirst ? sum[r] : fmaf(row_sum[r], rescale[r], sum[r]);
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
