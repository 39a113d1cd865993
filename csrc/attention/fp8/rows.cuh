// flash_attention_fp8_sm90.cu: what a consumer holds, and does to its rows: masks, softmax, output.
#pragma once

#include "attention/fp8/plan.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/wgmma.cuh"

namespace kernel_hub::attention::fp8 {
// Four floats rounded to e4m3, the first in the lowest byte.
__device__ __forceinline__ uint32_t pack_e4m3x4(float a, float b, float c, float d) {
    uint32_t word;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(word)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return word;
}

// From -126 to 127.
__device__ __forceinline__ float power_of_two(int exponent) {
    return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// A consumer's registers: its places in the rings, scores, probabilities and output of 64 rows.
template <class C>
struct Rows {
    const Parameters& p;
    const Shared<C>& shared;
    const int consumer, thread_idx, lane_idx;
    const int row;  // of the consumer's 64; the thread also holds row + 8
    const uint32_t q_low, k_low, vt_low;
    uint32_t q_parity = 0;
    Place<C::kStages> k, vt;
    Place<kTileSlots> slot;
    float score_scale;  // of the tile, to powers of two
    float scale_log2;   // of the block
    // Scales::kBlocks only. largest_value: V's largest scale so far. value_unit: the unit of the
    // output, which is this block's scale times a power of two, at least half of largest_value.
    // value_bits: that power.
    float largest_value, value_unit;
    int value_bits;
    float scores[C::kBlockN / 2];
    uint32_t probs[C::kBlockN / 32][4];
    uint32_t queries[C::kQInRegisters ? C::kHeadDim / 32 : 1][4];
    float output[C::kHeadDim / 2];
    float row_shift[2], row_sum[2], rescale[2];
    bool must_rescale[2];
    bool k_is_there = false, vt_is_there = false;

    __device__ __forceinline__ Rows(const Parameters& p_, const Shared<C>& shared_, int consumer_)
        : p(p_),
          shared(shared_),
          consumer(consumer_),
          thread_idx(threadIdx.x % 128),
          lane_idx(threadIdx.x % 32),
          row(16 * (thread_idx / 32) + lane_idx / 4),
          q_low(__shfl_sync(kAllLanes, descriptor_low(shared_.q + consumer_ * C::kQBytes, 16), 0)),
          k_low(descriptor_low(shared_.k, 16)),
          vt_low(descriptor_low(shared_.vt, 16)) {}

    // Reads the rows of Q, each warp its 16, and gives their place back.
    __device__ __forceinline__ void read_queries() {
        static_assert(C::kPanels == 1 && C::kPanelColumns == 128, "fragments of one panel");
        const uint32_t address = shared.q + consumer * C::kQBytes + thread_idx / 32 * 2048 +
                                 lane_idx % 16 * 128 + lane_idx % 8 * 16;
#pragma unroll
        for (int i = 0; i < C::kHeadDim / 32; ++i) {
            ldmatrix_x4(queries[i], address ^ (32 * i + lane_idx / 16 * 16));
        }
        __syncwarp();
        mbarrier_arrive_if(shared.q_empty(consumer), lane_idx == 0);
        q_parity ^= 1;
    }

    // The query of the thread's row r, and its head.
    __device__ __forceinline__ int token_of(const Tile& tile, int r) const {
        return tile.row_begin + consumer * pack_tokens<C>(p) +
               ((row + 8 * r) * pack_reciprocal<C>(p) >> 16);
    }
    __device__ __forceinline__ int head_of(const Tile& tile, int r, int token) const {
        const int first = tile.row_begin + consumer * pack_tokens<C>(p);
        return tile.head + row + 8 * r - (token - first) * pack_heads<C>(p);
    }
    // Whether there is such a query: rows that heads do not fill up hold none.
    __device__ __forceinline__ bool is_query(const Tile& tile, int token) const {
        return token < min(tile.seqlen_q, tile.row_begin + (consumer + 1) * pack_tokens<C>(p));
    }

    // Sets what the rows do not see to -inf.
    template <bool kDiagonal>
    __device__ __forceinline__ void mask(const Tile& tile, int block) {
        const int column = block * C::kBlockN + 2 * (lane_idx % 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int end = tile.seqlen_k - column;
            if (kDiagonal) {
                end = min(end, token_of(tile, r) + diagonal_of<C>(p, tile) + 1 - column);
            }
#pragma unroll
            for (int j = 0; j < C::kBlockN / 8; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (8 * j + e >= end) {
                        scores[4 * j + 2 * r + e] = -INFINITY;
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void mask_first(const Tile& tile, int block) {
        if constexpr (C::kMask != Mask::kFull) {
            mask<true>(tile, block);
        } else if ((block + 1) * C::kBlockN > tile.seqlen_k) {
            mask<false>(tile, block);
        }
    }

    // The scales of the block whose K is there.
    // NOTE: a barrier of the warpgroup must follow before its K is released: one thread does that
    // for all, and the loader then writes the next block's.
    __device__ __forceinline__ BlockScales read_block_scales() const {
        BlockScales scales = {1.f, 1.f};
        if constexpr (C::kScales == Scales::kBlocks) {
            asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];"
                         : "=f"(scales.k), "=f"(scales.v)
                         : "r"(shared.block_scales + 8 * k.stage)
                         : "memory");
        }
        return scales;
    }

    // Returns what the output must be multiplied by.
    template <bool kFirst>
    __device__ __forceinline__ float take_scales(const BlockScales& scales) {
        if constexpr (C::kScales == Scales::kHeads) {
            scale_log2 = score_scale;
            return 1.f;
        } else {
            scale_log2 = max_nan(score_scale * scales.k, kLeastScale);
            const float value = max_nan(scales.v, kLeastScale);
            const float before = kFirst ? value : value_unit;
            largest_value = kFirst ? value : max_nan(value, largest_value);
            const float ratio = max_nan(__fdividef(largest_value, value), 1.f);
            value_bits = static_cast<int>(__float_as_uint(ratio) >> 23) - 127;
            // Nothing of probabilities times 2^-30 is left in e4m3, whatever the unit.
            value_unit = value_bits > 30 ? largest_value : value * power_of_two(value_bits);
            value_bits = min(value_bits, 30);
            // A quotient of equals may be off 1, which would rescale for nothing.
            return before == value_unit ? 1.f : __fdividef(before, value_unit);
        }
    }

    // The larger one of two values, in all lanes of a row.
    template <typename T, typename F>
    __device__ __forceinline__ static T largest_in_quad(T value, F larger) {
        value = larger(value, __shfl_xor_sync(kAllLanes, value, 1));
        return larger(value, __shfl_xor_sync(kAllLanes, value, 2));
    }

    // The largest scores of the thread's rows.
    __device__ __forceinline__ void compare(float (&largest)[2]) const {
        // Four chains: fewer would be bound by their latency.
        float largest_of[4] = {scores[0], scores[1], scores[2], scores[3]};
#pragma unroll
        for (int j = 1; j < C::kBlockN / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                largest_of[i] = max_nan(largest_of[i], scores[4 * j + i]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            largest[r] = largest_in_quad(max_nan(largest_of[2 * r], largest_of[2 * r + 1]),
                                         [](float a, float b) { return max_nan(a, b); });
        }
    }

    // The same, by bits: as signed numbers the largest score above 0 is the largest, and one
    // instruction takes two more of them. Where all of a row are below 0, and its shift too, they
    // are compared; of a first block, which may have few keys, always.
    template <bool kFirst>
    __device__ __forceinline__ void find_largest(float (&largest)[2]) const {
        bool must_compare = kFirst;
#pragma unroll
        for (int r = 0; r < 2 && !kFirst; ++r) {
            int above[2] = {0, 0};
#pragma unroll
            for (int j = 0; j < C::kBlockN / 8; ++j) {
                const int a = __float_as_int(scores[4 * j + 2 * r]);
                const int b = __float_as_int(scores[4 * j + 2 * r + 1]);
                int& high = above[j % 2];
                high = j < 2 ? max(a, b) : max(max(high, a), b);
            }
            const int high =
                largest_in_quad(max(above[0], above[1]), [](int a, int b) { return max(a, b); });
            largest[r] = __int_as_float(high);
            must_compare |= high < 0 && row_shift[r] < 0.f;
        }
        if (kFirst || __any_sync(kAllLanes, must_compare)) {
            compare(largest);
        }
    }

    // scores become 2^(scale_log2 score - shift + kProbBits - value_bits); row_shift and row_sum
    // follow. The shift is the row's largest exponent.
    template <bool kFirst>
    __device__ __forceinline__ void softmax(float output_factor) {
        constexpr bool kBlocks = C::kScales == Scales::kBlocks;
        const float bits = kBlocks ? kProbBits - value_bits : kProbBits;
        const float weight = kBlocks ? power_of_two(value_bits) : 1.f;
        float largest_of[2];
        find_largest<kFirst>(largest_of);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest = largest_of[r] * scale_log2;
            if constexpr (!kFirst) {
                largest = max_nan(largest, row_shift[r]);
                const bool grew = kBlocks && output_factor != 1.f;
                must_rescale[r] = __any_sync(kAllLanes, grew || largest != row_shift[r]);
            }
            // A row that has seen nothing yet: exp2(-inf - 0), not exp2(-inf + inf).
            const float shift = largest == -INFINITY ? 0.f : largest;
            if constexpr (!kFirst) {
                rescale[r] = exp2_approx(row_shift[r] - shift);
            }
            row_shift[r] = largest;
            const float offset = bits - shift;
            float sum = 0.f;
#pragma unroll
            for (int j = 0; j < C::kBlockN / 8; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& score = scores[4 * j + 2 * r + e];
                    score = exp2_approx(fmaf(score, scale_log2, offset));
                    sum += score;
                }
            }
            sum *= weight;
            row_sum[r] = kFirst ? sum : fmaf(row_sum[r], rescale[r], sum);
            if constexpr (!kFirst && kBlocks) {
                rescale[r] *= output_factor;
            }
        }
    }

    __device__ __forceinline__ void rescale_output() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (must_rescale[r]) {
#pragma unroll
                for (int i = 0; i < C::kHeadDim / 4; ++i) {
                    output[4 * (i / 2) + 2 * r + i % 2] *= rescale[r];
                }
            }
        }
    }

    // Keys in the order of the accumulators, which is that of V's (Transposer).
    __device__ __forceinline__ void pack_probs() {
#pragma unroll
        for (int i = 0; i < C::kBlockN / 32; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* s = scores + 16 * i + 8 * (j / 2) + 2 * (j % 2);
                probs[i][j] = pack_e4m3x4(s[0], s[1], s[4], s[5]);
            }
        }
    }

    __device__ __forceinline__ Tile read_tile(int place) const {
        const uint32_t address = shared.tiles + place * sizeof(Tile);
        const uint4 a = ld_shared_16(address), b = ld_shared_16(address + 16);
        Tile tile;
        tile.row_begin = a.x, tile.head = a.y, tile.batch = a.z, tile.q_begin = a.w;
        tile.seqlen_q = b.x, tile.seqlen_k = b.y, tile.block_begin = b.z, tile.block_end = b.w;
        return tile;
    }

    __device__ __forceinline__ float read_float(int place, int word) const {
        float value;
        asm volatile("ld.volatile.shared.f32 %0, [%1];"
                     : "=f"(value)
                     : "r"(shared.tiles + place * static_cast<int>(sizeof(Tile)) + 4 * word)
                     : "memory");
        return value;
    }
    __device__ __forceinline__ void read_score_scale(int place) {
        score_scale = read_float(place, 8 + consumer);
        if constexpr (C::kScales == Scales::kHeads) {
            score_scale = max_nan(score_scale, kLeastScale);
        }
    }
    __device__ __forceinline__ float read_value_scale(int place) const {
        return C::kScales == Scales::kHeads ? read_float(place, 11) : value_unit;
    }

    __device__ __forceinline__ void release_tile(int place) {
        __syncwarp();
        mbarrier_arrive_if(shared.tile_empty(place), lane_idx == 0);
    }

    // The rows' sums are complete: writes lse; `factor` becomes what the output must be multiplied
    // by.
    __device__ __forceinline__ void finish_rows(int place, float (&factor)[2]) {
        const Tile tile = read_tile(place);
        const float value_scale = read_value_scale(place);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum = row_sum[r];
            sum += __shfl_xor_sync(kAllLanes, sum, 1);
            sum += __shfl_xor_sync(kAllLanes, sum, 2);
            factor[r] = sum == 0.f ? 0.f : __fdividef(value_scale, sum);
            const int token = token_of(tile, r), head = head_of(tile, r, token);
            if (p.lse && is_query(tile, token) && lane_idx % 4 == 0) {
                p.lse[tile.batch * p.lse_batch_stride + head * p.lse_head_stride + tile.q_begin +
                      token] =
                    sum == 0.f ? -INFINITY : (row_shift[r] - kProbBits) * kLn2 + __logf(sum);
            }
        }
    }

    __device__ __forceinline__ uint32_t pack_out(float low, float high) const {
        return p.is_out_fp16 ? pack2<__half>(low, high) : pack2<__nv_bfloat16>(low, high);
    }

    // Writes the tile's output. A thread holds columns 16 m + 4 (lane_idx % 4) to + 3 of each m
    // (Transposer); two neighbours exchange halves, so that each has eight columns of every other
    // m.
    __device__ __forceinline__ void store(int place, const float (&factor)[2]) {
        const Tile tile = read_tile(place);  // again: it would take registers until here
        release_tile(place);
        const bool odd = lane_idx & 1;
        const int first_column = 16 * odd + 4 * (lane_idx & 2);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int token = token_of(tile, r), head = head_of(tile, r, token);
            const bool is_inside = is_query(tile, token);
            uint16_t* out = static_cast<uint16_t*>(p.out) + tile.batch * p.out_batch_stride +
                            (tile.q_begin + token) * p.out_token_stride + head * p.out_head_stride;
#pragma unroll
            for (int i = 0; i < C::kHeadDim / 32; ++i) {
                uint32_t words[2][2];
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    const float* o = output + 16 * i + 8 * m + 2 * r;
                    words[m][0] = pack_out(o[0] * factor[r], o[4] * factor[r]);
                    words[m][1] = pack_out(o[1] * factor[r], o[5] * factor[r]);
                }
                uint32_t got[2];
#pragma unroll
                for (int w = 0; w < 2; ++w) {
                    got[w] = __shfl_xor_sync(kAllLanes, odd ? words[0][w] : words[1][w], 1);
                }
                if (is_inside && 32 * i + first_column < p.head_dim) {
                    *reinterpret_cast<uint4*>(out + 32 * i + first_column) =
                        odd ? make_uint4(got[0], got[1], words[1][0], words[1][1])
                            : make_uint4(words[0][0], words[0][1], got[0], got[1]);
                }
            }
        }
    }
};

}  // namespace kernel_hub::attention::fp8
