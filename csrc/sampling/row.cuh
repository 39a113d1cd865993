// A row of logits as it is drawn from: what is added and excluded, walked through in vectors; sums
// over a block.
#pragma once

#include "kernel_hub/element_type.cuh"
#include "kernel_hub/reduce.cuh"
#include "kernel_hub/vec.cuh"
#include "sampling/numbers.cuh"

namespace kernel_hub::sampling {

// Of a block; a source that has fewer says so before it includes anything.
#ifndef KERNEL_HUB_SAMPLING_THREADS
#define KERNEL_HUB_SAMPLING_THREADS 512
#endif
constexpr int kNumThreads = KERNEL_HUB_SAMPLING_THREADS;
constexpr int kNumWarps = kNumThreads / 32;
constexpr float kInfinity = __builtin_inff();

struct SampleParams {
    int* state;           // (batch) zeros, before and after; null where a row is one block's
    void* parts;          // (batch, gridDim.y) of Part
    int64_t* out;         // (batch)
    float* logprob;       // (batch), or null, as all below may be but logits
    int64_t* top_ids;     // (batch, most_top)
    float* top_logprobs;  // likewise
    const void* logits;   // (batch, size), of `dtype`
    const float *temperature, *top_p, *min_p;  // (batch)
    const int *top_k, *top_n;                  // (batch)
    const int64_t *seed, *offset;              // (batch)
    const float* bias;                         // (batch, size)
    const int* allowed;  // (batch, ceil(size / 32)), bit i % 32 of word i / 32
    const float *repetition, *presence, *frequency;  // (batch)
    const int* in_prompt;                            // as allowed
    const int* counts;                               // (batch, size)
    int64_t logits_stride, bias_stride, allowed_stride, in_prompt_stride, counts_stride;
    int size, dtype;
    int is_plain;  // see Row
    int most_top;
    float softcap;
    int row_idx;  // the block's, of batch
};

// Those of a kernel between `parts` and `row_idx`, and as they are handed on.
#define SAMPLE_PARAMS                                                                           \
    int64_t *out, float *logprob, int64_t *top_ids, float *top_logprobs, const void *logits,    \
        const float *temperature, const int *top_k, const int *top_n, const float *top_p,       \
        const float *min_p, const int64_t *seed, const int64_t *offset, const float *bias,      \
        const int *allowed, const float *repetition, const float *presence,                     \
        const float *frequency, const int *in_prompt, const int *counts, int64_t logits_stride, \
        int64_t bias_stride, int64_t allowed_stride, int64_t in_prompt_stride,                  \
        int64_t counts_stride, int size, int dtype, int is_plain, int most_top, float softcap
#define SAMPLE_ARGUMENTS                                                                          \
    out, logprob, top_ids, top_logprobs, logits, temperature, top_p, min_p, top_k, top_n, seed,   \
        offset, bias, allowed, repetition, presence, frequency, in_prompt, counts, logits_stride, \
        bias_stride, allowed_stride, in_prompt_stride, counts_stride, size, dtype, is_plain,      \
        most_top, softcap

__device__ __forceinline__ bool has_bit(const int* words, int i) {
    return words[i / 32] >> (i % 32) & 1;
}

constexpr int kAtOnce = 4;  // values

// Values of a row; excluded are -inf and nan. The type of logits is asked as it is met: one kernel
// a type would be as many times as large.
struct Row {
    const SampleParams& p;
    const char* logits;
    bool has_mask;
    bool is_plain;  // nothing changes its values, and it is of whole, aligned vectors

    __device__ __forceinline__ explicit Row(const SampleParams& params)
        : p(params),
          logits(static_cast<const char*>(params.logits) +
                 params.row_idx * params.logits_stride * element_bytes()),
          has_mask(params.allowed != nullptr),
          is_plain(params.is_plain) {}

    __device__ __forceinline__ int element_bytes() const { return p.dtype == kFp32 ? 4 : 2; }

    __device__ __forceinline__ float changed(float z, int i) const {
        if (p.softcap != 0.0f) {
            z = apply_softcap(z, p.softcap);
        }
        if (p.bias) {
            z = __fadd_rn(z, p.bias[p.row_idx * p.bias_stride + i]);
        }
        if (has_mask && !has_bit(p.allowed + p.row_idx * p.allowed_stride, i)) {
            return -kInfinity;
        }
        const int count = p.counts ? p.counts[p.row_idx * p.counts_stride + i] : 0;
        const bool is_old =
            count > 0 || (p.in_prompt && has_bit(p.in_prompt + p.row_idx * p.in_prompt_stride, i));
        if (is_old && p.repetition) {
            const float penalty = p.repetition[p.row_idx];
            z = z > 0.0f ? __fdiv_rn(z, penalty) : __fmul_rn(z, penalty);
        }
        if (count > 0 && p.frequency) {
            z = __fsub_rn(z, __fmul_rn(p.frequency[p.row_idx], static_cast<float>(count)));
        }
        if (count > 0 && p.presence) {
            z = __fsub_rn(z, p.presence[p.row_idx]);
        }
        return z;
    }

    __device__ __forceinline__ float loaded(int i) const {
        return load_element(logits, i, p.dtype);
    }

    __device__ __forceinline__ float value(int i) const {
        return is_plain ? loaded(i) : changed(loaded(i), i);
    }

    // Calls visit(index of the first, values) for what one of `num` threads takes of the elements
    // begin .. end - 1, both of whole vectors, in the order of their indices or, perhaps, backward.
    template <typename Visit>
    __device__ __forceinline__ void walk(int begin, int end, int thread_idx, int num,
                                         bool is_backward, const Visit& visit) const {
        if (is_plain) {
            const int a_vec = 16 / element_bytes();
            walk_vecs(begin + thread_idx * a_vec, end, num * a_vec,
                      is_backward ? begin + end - a_vec : 0, visit);
        } else {
            walk_elements(begin + thread_idx, end, num, visit);
        }
    }

  private:
    // mirror: 0, or the first element of the vector that is taken in place of that of element 0.
    template <typename Visit>
    __device__ __forceinline__ void walk_vecs(int first, int end, int step, int mirror,
                                              const Visit& visit) const {
        constexpr int kLoads = 4;
        const int halves = p.dtype == kFp32 ? 1 : 2;
        const int sign = mirror == 0 ? 1 : -1;
        uint4 bits[kLoads], ahead[kLoads];
        const auto load = [&](int at) {
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                if (at + i * step < end) {
                    ahead[i] =
                        ld_global(logits + static_cast<int64_t>(mirror + sign * (at + i * step)) *
                                               element_bytes());
                }
            }
        };
        load(first);
#pragma unroll 1
        for (int at = first; at < end; at += kLoads * step) {
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                bits[i] = ahead[i];
            }
            load(at + kLoads * step);
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                if (at + i * step < end) {
#pragma unroll 1
                    for (int half = 0; half < halves; ++half) {
                        float z[kAtOnce];
                        if (p.dtype == kFp32) {
                            unpack<float>(bits[i], z);
                        } else if (p.dtype == kFp16) {
                            Word<__half>::unpack(half == 0 ? bits[i].x : bits[i].z, z);
                            Word<__half>::unpack(half == 0 ? bits[i].y : bits[i].w, z + 2);
                        } else {
                            Word<__nv_bfloat16>::unpack(half == 0 ? bits[i].x : bits[i].z, z);
                            Word<__nv_bfloat16>::unpack(half == 0 ? bits[i].y : bits[i].w, z + 2);
                        }
                        visit(mirror + sign * (at + i * step) + half * kAtOnce, z);
                    }
                }
            }
        }
    }

    template <typename Visit>
    __device__ __forceinline__ void walk_elements(int first, int end, int step,
                                                  const Visit& visit) const {
        constexpr int kLoads = 4;
#pragma unroll 1
        for (int at = first; at < end; at += kLoads * step) {
            float x[kLoads];
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                if (at + i * step < end) {
                    x[i] = loaded(at + i * step);
                }
            }
            // NOTE: not unrolled, which would make the whole kernel half as large again.
#pragma unroll 1
            for (int i = 0; i < kLoads && at + i * step < end; ++i) {
                const float one = i == 0 ? x[0] : i == 1 ? x[1] : i == 2 ? x[2] : x[3];
                const float z[1] = {changed(one, at + i * step)};
                visit(at + i * step, z);
            }
        }
    }
};

template <int kLanes = 32, typename V, typename Op>
__device__ __forceinline__ V warp_reduce(V value, const Op& op) {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
        value = op(value, __shfl_xor_sync(kAllLanes, value, mask));
    }
    return value;
}

// The sum over a warp, by what it adds in one instruction.
__device__ __forceinline__ uint64_t warp_sum(uint64_t value) {
    constexpr int kBits = 27;  // of 32 lanes: 32
    constexpr uint32_t kPart = (1u << kBits) - 1;
    uint64_t sum = 0;
#pragma unroll
    for (int shift = 0; shift < 64; shift += kBits) {
        const uint32_t part = static_cast<uint32_t>(value >> shift) & kPart;
        sum += static_cast<uint64_t>(__reduce_add_sync(kAllLanes, part)) << shift;
    }
    return sum;
}

// `value` of all threads joined by `op`, in every thread; `slots` keeps those of the warps.
template <typename V, typename Op>
__device__ __forceinline__ V block_reduce(V value, V (&slots)[kNumWarps], const Op& op) {
    value = warp_reduce(value, op);
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        slots[threadIdx.x / 32] = value;
    }
    __syncthreads();
    return warp_reduce<kNumWarps>(slots[threadIdx.x % kNumWarps], op);
}

template <typename V>
__device__ __forceinline__ V block_sum(V value, V (&slots)[kNumWarps]) {
    return block_reduce(value, slots, [](V a, V b) { return a + b; });
}

// The sum of `value` of all threads before this one.
__device__ __forceinline__ uint64_t block_sum_before(uint64_t value, uint64_t (&slots)[kNumWarps]) {
    const int lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32;
    const uint64_t sum = warp_scan(value, lane_idx);
    __syncthreads();
    if (lane_idx == 31) {
        slots[warp_idx] = sum;
    }
    __syncthreads();
    const uint64_t of_warps = warp_reduce(lane_idx < warp_idx ? slots[lane_idx] : 0,
                                          [](uint64_t a, uint64_t b) { return a + b; });
    return of_warps + sum - value;
}

}  // namespace kernel_hub::sampling
