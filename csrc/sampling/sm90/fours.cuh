// A row of logits in fours of neighbours, aligned or not, each with what changes it under way.
#pragma once

#include "sampling/row.cuh"

namespace kernel_hub::sampling::sm90 {

constexpr int kFour = 4;
// Of SampleParams::is_plain here: what is of whole, aligned fours in every row.
constexpr int kAlignedLogits = 1, kAlignedChanges = 2;

// What changes a four; words of masks shifted to its first.
struct Changes {
    float4 bias;
    int4 counts;
    int allowed, in_prompt;
};

// A row of whole, aligned fours that nothing changes. kIsFp32: of such, else of 16 bits.
struct PlainRow {
    const char* logits;
    int size, dtype;

    template <bool kIsFp32>
    __device__ __forceinline__ uint4 load(int i) const {
        const char* at = logits + static_cast<int64_t>(i) * (kIsFp32 ? 4 : 2);
        if constexpr (kIsFp32) {
            return ld_global(at);
        } else {
            const uint2 bits = *reinterpret_cast<const uint2*>(at);
            return make_uint4(bits.x, bits.y, 0, 0);
        }
    }

    template <bool kIsFp32>
    __device__ __forceinline__ void unpack(uint4 bits, float (&z)[kFour]) const {
        if constexpr (kIsFp32) {
            kernel_hub::unpack<float>(bits, z);
        } else if (dtype == kFp16) {
            Word<__half>::unpack(bits.x, z);
            Word<__half>::unpack(bits.y, z + 2);
        } else {
            Word<__nv_bfloat16>::unpack(bits.x, z);
            Word<__nv_bfloat16>::unpack(bits.y, z + 2);
        }
    }
};

__device__ __forceinline__ PlainRow plain_row(const SampleParams& p) {
    return {Row(p).logits, p.size, p.dtype};
}

struct Fours {
    const SampleParams& p;
    Row& row;
    bool is_changed;
    bool is_ahead;                // walk_ahead may be called
    bool has_counts, has_prompt;  // penalties that change nothing are not read for
    float repetition, presence, frequency;

    __device__ __forceinline__ explicit Fours(Row& of_row) : p(of_row.p), row(of_row) {
        const auto given = [&](const float* each, float none) {
            return each ? each[p.row_idx] : none;
        };
        repetition = given(p.repetition, 1.0f);
        presence = given(p.presence, 0.0f);
        frequency = given(p.frequency, 0.0f);
        const bool is_repetition = repetition != 1.0f;
        has_counts = p.counts && (is_repetition || presence != 0.0f || frequency != 0.0f);
        has_prompt = p.in_prompt && is_repetition;
        is_changed = p.softcap != 0.0f || p.bias || p.allowed || has_counts || has_prompt;
        is_ahead = !is_changed && (p.is_plain & kAlignedLogits);
        row.is_plain = !is_changed;
    }

    __device__ __forceinline__ PlainRow row_as_it_is() const {
        return {row.logits, p.size, p.dtype};
    }

    // The bits of elements i .. i + 3.
    __device__ __forceinline__ uint4 load_aligned(int i) const {
        const char* at = row.logits + static_cast<int64_t>(i) * row.element_bytes();
        if (p.dtype == kFp32) {
            return ld_global(at);
        }
        const uint2 bits = *reinterpret_cast<const uint2*>(at);
        return make_uint4(bits.x, bits.y, 0, 0);
    }

    // The same of any row; past the end: -inf.
    __device__ __forceinline__ uint4 load(int i) const {
        if (p.is_plain & kAlignedLogits) {
            return load_aligned(i);
        }
        uint32_t bits[kFour];
#pragma unroll
        for (int j = 0; j < kFour; ++j) {
            if (p.dtype == kFp32) {
                const float* z = reinterpret_cast<const float*>(row.logits) + i;
                bits[j] = i + j < p.size ? __float_as_uint(z[j]) : 0xff800000u;
            } else {
                const uint16_t* z = reinterpret_cast<const uint16_t*>(row.logits) + i;
                bits[j] = i + j < p.size ? z[j] : p.dtype == kFp16 ? 0xfc00u : 0xff80u;
            }
        }
        return p.dtype == kFp32
                   ? make_uint4(bits[0], bits[1], bits[2], bits[3])
                   : make_uint4(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, 0, 0);
    }

    __device__ __forceinline__ void unpack(uint4 bits, float (&z)[kFour]) const {
        const PlainRow plain = row_as_it_is();
        if (p.dtype == kFp32) {
            plain.unpack<true>(bits, z);
        } else {
            plain.unpack<false>(bits, z);
        }
    }

    __device__ __forceinline__ Changes load_changes(int i) const {
        Changes changes;
        if (p.bias) {
            changes.bias = load_four<float4>(p.bias + p.row_idx * p.bias_stride, i);
        }
        if (has_counts) {
            changes.counts = load_four<int4>(p.counts + p.row_idx * p.counts_stride, i);
        }
        if (row.has_mask) {
            changes.allowed = p.allowed[p.row_idx * p.allowed_stride + i / 32] >> (i % 32);
        }
        if (has_prompt) {
            changes.in_prompt = p.in_prompt[p.row_idx * p.in_prompt_stride + i / 32] >> (i % 32);
        }
        return changes;
    }

    // The steps of Row::changed, of elements i .. i + 3.
    __device__ __forceinline__ void apply(const Changes& changes, int i, float (&z)[kFour]) const {
        const float bias[kFour] = {changes.bias.x, changes.bias.y, changes.bias.z, changes.bias.w};
        const int counts[kFour] = {changes.counts.x, changes.counts.y, changes.counts.z,
                                   changes.counts.w};
#pragma unroll
        for (int j = 0; j < kFour; ++j) {
            if (p.softcap != 0.0f) {
                z[j] = apply_softcap(z[j], p.softcap);
            }
            if (p.bias) {
                z[j] = __fadd_rn(z[j], bias[j]);
            }
            const int count = has_counts ? counts[j] : 0;
            if (count > 0 || (has_prompt && changes.in_prompt >> j & 1)) {
                if (repetition != 1.0f) {
                    z[j] = z[j] > 0.0f ? __fdiv_rn(z[j], repetition) : __fmul_rn(z[j], repetition);
                }
                if (count > 0) {
                    z[j] = __fsub_rn(z[j], __fmul_rn(frequency, static_cast<float>(count)));
                    z[j] = __fsub_rn(z[j], presence);
                }
            }
            // NOTE: a softcap has made something of the -inf past the end.
            if ((row.has_mask && !(changes.allowed >> j & 1)) || i + j >= p.size) {
                z[j] = -kInfinity;
            }
        }
    }

    // Elements i .. i + 3, as they are drawn from; -inf from `end` on.
    __device__ __forceinline__ void read(int i, int end, float (&z)[kFour]) const {
#pragma unroll
        for (int j = 0; j < kFour; ++j) {
            z[j] = -kInfinity;
        }
        if (i < end) {
            unpack(load(i), z);
            if (is_changed) {
                apply(load_changes(i), i, z);
            }
        }
    }

    // Calls visit(index, values) of the fours first, first + step .. below `end`, in this order,
    // with kUnderWay of a thread under way. The lanes of a warp have neighbours: they go together,
    // which the compiler does not see to where visits part.
    template <typename Visit>
    __device__ __forceinline__ void walk(int first, int end, int step, const Visit& visit) const {
        constexpr int kUnderWay = 3;
        const int before = threadIdx.x % 32 * kFour;  // what lanes before have of a step
        uint4 ahead[kUnderWay];
        Changes changes;
        // What is before the first only has others loaded.
#pragma unroll 1
        for (int at = first - kUnderWay * step; at - before < end; at += step) {
            float z[kFour];
            unpack(ahead[0], z);
#pragma unroll
            for (int i = 1; i < kUnderWay; ++i) {
                ahead[i - 1] = ahead[i];
            }
            if (at + kUnderWay * step < end) {
                ahead[kUnderWay - 1] = load(at + kUnderWay * step);
            }
            if (is_changed) {
                if (at >= first) {
                    apply(changes, at, z);
                }
                if (at + step >= first && at + step < end) {
                    changes = load_changes(at + step);
                }
            }
            if (at >= first && at < end) {
                visit(at, z);
            }
            __syncwarp();
        }
    }

    // The same of rows that nothing changes and that are aligned, with more under way; calls
    // before(at) of each kLoads of them. kIsFp32: of such, else of 16 bits.
    // NOTE: asked of each load, the type makes two with one target, of which the second waits for
    // the first: greedy rows of 16 bits took 2.2 times as long.
    template <int kLoads, bool kIsFp32, typename Visit, typename Before>
    __device__ __forceinline__ void walk_ahead(int first, int end, int step, const Visit& visit,
                                               const Before& before) const {
        const PlainRow plain = row_as_it_is();
        uint4 bits[kLoads], ahead[kLoads];
        const auto load_ahead = [&](int at) {
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                if (at + i * step < end) {
                    ahead[i] = plain.load<kIsFp32>(at + i * step);
                }
            }
        };
        load_ahead(first);
#pragma unroll 1
        for (int at = first; at < end; at += kLoads * step) {
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                bits[i] = ahead[i];
            }
            before(at);
            load_ahead(at + kLoads * step);
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                if (at + i * step < end) {
                    float z[kFour];
                    plain.unpack<kIsFp32>(bits[i], z);
                    visit(at + i * step, z);
                }
            }
        }
    }

  private:
    template <typename V, typename T>
    __device__ __forceinline__ V load_four(const T* row_start, int i) const {
        if (p.is_plain & kAlignedChanges) {
            return *reinterpret_cast<const V*>(row_start + i);
        }
        const auto one = [&](int j) { return i + j < p.size ? row_start[i + j] : T(0); };
        return {one(0), one(1), one(2), one(3)};
    }
};

// One of a four, by a number that is not known before it runs.
template <typename V>
__device__ __forceinline__ V pick(const V (&z)[kFour], int j) {
    return j == 0 ? z[0] : j == 1 ? z[1] : j == 2 ? z[2] : z[3];
}

}  // namespace kernel_hub::sampling::sm90
