// Top-k routing of a mixture of experts: the k experts of each token, and what each counts.
//
//   score = softmax(logits) or sigmoid(logits);  choice = logits, or score + bias
//   groups (num_groups > 1): only the top_groups groups with the best choice in them stay, with a
//     bias those with the largest sum of their two best
//   experts = the k largest choices, the largest first;  weight = score, divided by the sum of the
//   k
//     where `renormalises`, times scale
// in fp32. Of equal ones the lowest index goes first. A NaN logit is the lowest of all, an infinite
// one the largest finite number; a NaN choice counts as -inf.
//
// Parallelisation: `lanes` lanes a token, a power of two, each with kPerLane neighbouring experts
// in registers, so that the lowest lane has the lowest index; 128 threads. A round for each expert:
// the largest of a lane, of all of them, and whose it is. Shared memory: k weights and experts a
// token.
//   each4     up to 128 experts, 4 a lane
//   each8     up to 256, 8 a lane
//   each16    up to 512, 16 a lane
// Groups take a warp a token. Rows that begin at 16 bytes are read so (is_vec).
// Source: Shazeer et al., "Outrageously Large Neural Networks", 2017; DeepSeek-AI, "DeepSeek-V2",
// 2024, 2.1.2, and "DeepSeek-V3 Technical Report", 2024, 2.1.2.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs the code of sm80

#include <float.h>
#include <limits.h>

#include "kernel_hub/element_type.cuh"
#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/reduce.cuh"
#include "kernel_hub/vec.cuh"

namespace kernel_hub::moe {

constexpr int kThreads = 128;
constexpr int kNone = INT_MIN;  // below every key

// In the order of the values, -0 as 0 and NaN as -inf.
__device__ __forceinline__ int key_of(float value) {
    const float known = value != value ? -INFINITY : value + 0.0f;
    const int bits = static_cast<int>(__float_as_uint(known));
    return bits ^ ((bits >> 31) & INT_MAX);
}

// The value whose key it is.
__device__ __forceinline__ float value_of(int key) {
    return __uint_as_float(static_cast<uint32_t>(key ^ ((key >> 31) & INT_MAX)));
}

// NaN is the lowest.
__device__ __forceinline__ float finite(float logit) {
    return fminf(fmaxf(logit, -FLT_MAX), FLT_MAX);
}

// Of the lanes of a token, in each of them.
__device__ __forceinline__ int token_max(int value, int lanes) {
    if (lanes == kWarpSize) {
        return __reduce_max_sync(kAllLanes, value);
    }
#pragma unroll 1
    for (int mask = lanes / 2; mask > 0; mask /= 2) {
        value = max(value, __shfl_xor_sync(kAllLanes, value, mask));
    }
    return value;
}

// The first lane of a token whose value it is, counted from the token's first.
__device__ __forceinline__ int first_lane(bool is_it, int lanes) {
    const unsigned votes = __ballot_sync(kAllLanes, is_it) >> (threadIdx.x & -lanes & 31);
    return __ffs(static_cast<int>(votes)) - 1;
}

// Takes the experts of all but the top_groups best groups out of `keys`. A warp a token.
template <int kPerLane>
__device__ __forceinline__ void limit_to_groups(int (&keys)[kPerLane],
                                                const float (&choices)[kPerLane], bool has_bias,
                                                int lane_idx, int num_experts, int num_groups,
                                                int top_groups) {
    const int size = num_experts / num_groups, first_expert = lane_idx * kPerLane;
    int own = kNone;  // of group lane_idx
#pragma unroll 1
    for (int group = 0; group < num_groups; ++group) {
        const int begin = group * size - first_expert, end = begin + size;
        float best = -INFINITY, second = -INFINITY;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const float value = i >= begin && i < end ? choices[i] : -INFINITY;
            second = fmaxf(second, fminf(best, value));
            best = fmaxf(best, value);
        }
#pragma unroll
        for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
            const float other = __shfl_xor_sync(kAllLanes, best, mask);
            const float other_second = __shfl_xor_sync(kAllLanes, second, mask);
            second = fmaxf(fminf(best, other), fmaxf(second, other_second));
            best = fmaxf(best, other);
        }
        const int key = key_of(has_bias && size > 1 ? best + second : best);
        own = lane_idx == group ? key : own;
    }
    unsigned kept = 0;
#pragma unroll 1
    for (int i = 0; i < top_groups; ++i) {
        const int group = first_lane(own == token_max(own, kWarpSize), kWarpSize);
        kept |= 1u << group;
        own = lane_idx == group ? kNone : own;
    }
    int group = first_expert / size, left = (group + 1) * size - first_expert;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        keys[i] = kept >> (group & 31) & 1 ? keys[i] : kNone;
        group = --left == 0 ? group + 1 : group;
        left = left == 0 ? size : left;
    }
}

template <typename T, int kPerLane>
__device__ __forceinline__ void read_logits(const T* row, int first, int num_experts, bool is_vec,
                                            float (&values)[kPerLane]) {
    constexpr int kElems = kVecElems<T>;
    constexpr int kWordElems = Word<T>::kElems;
    static_assert(kPerLane % kElems == 0 || kPerLane == 2 * kWordElems,
                  "a lane reads whole vectors, or 8 bytes");
    // NOTE: a question of the whole grid: lanes without experts go the way of the others.
    if (is_vec && num_experts % kPerLane == 0) {
        const bool has_experts = first < num_experts;
        if constexpr (kPerLane < kElems) {
            uint2 bits = {};
            if (has_experts) {
                bits = __ldg(reinterpret_cast<const uint2*>(row + first));
            }
            Word<T>::unpack(bits.x, values);
            Word<T>::unpack(bits.y, values + kWordElems);
        } else {
            uint4 bits[kPerLane / kElems] = {};
#pragma unroll
            for (int i = 0; i < kPerLane / kElems; ++i) {
                if (has_experts) {
                    bits[i] = ld_global(row + first + i * kElems);
                }
            }
#pragma unroll
            for (int i = 0; i < kPerLane / kElems; ++i) {
                float part[kElems];
                unpack<T>(bits[i], part);
#pragma unroll
                for (int j = 0; j < kElems; ++j) {
                    values[i * kElems + j] = part[j];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            values[i] = has_experts ? finite(values[i]) : -FLT_MAX;
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        values[i] = first + i < num_experts ? finite(to_float(row[first + i])) : -FLT_MAX;
    }
}

// Of the type they are of: what follows is the same for all, so the types share a kernel.
template <int kPerLane>
__device__ __forceinline__ void read_any(const void* logits, int element, int64_t at, int first,
                                         int num_experts, bool is_vec, float (&values)[kPerLane]) {
    if (element == kFp32) {
        read_logits<float, kPerLane>(static_cast<const float*>(logits) + at, first, num_experts,
                                     is_vec, values);
    } else if (element == kBf16) {
        read_logits<__nv_bfloat16, kPerLane>(static_cast<const __nv_bfloat16*>(logits) + at, first,
                                             num_experts, is_vec, values);
    } else {
        read_logits<__half, kPerLane>(static_cast<const __half*>(logits) + at, first, num_experts,
                                      is_vec, values);
    }
}

template <int kPerLane>
__device__ __forceinline__ void route(float* weights, int* chosen, const void* logits,
                                      const float* bias, int64_t logits_stride, int element,
                                      int num_tokens, int num_experts, int k, int lanes, int is_vec,
                                      int is_sigmoid, int renormalises, int num_groups,
                                      int top_groups, float scale) {
    const int lanes_log = __ffs(lanes) - 1;
    const int block_tokens = kThreads >> lanes_log;
    float* block_weights = reinterpret_cast<float*>(dynamic_shared());  // (block_tokens, k)
    int* block_chosen = reinterpret_cast<int*>(block_weights + block_tokens * k);

    const int lane_idx = threadIdx.x & (lanes - 1), token = threadIdx.x >> lanes_log;
    const int first_token = blockIdx.x * block_tokens;
    const int token_idx = min(first_token + token, num_tokens - 1);
    const int first_expert = lane_idx * kPerLane;
    const bool has_bias = bias != nullptr;

    follow_launch_before();
    float values[kPerLane];
    read_any<kPerLane>(logits, element, token_idx * logits_stride, first_expert, num_experts,
                       is_vec, values);
    // NOTE: where all scores are divided by their sum, the largest is wanted at the end alone: then
    // it is the first winner.
    const bool scores_all = has_bias || !renormalises;
    float largest = values[0], sum = 1.0f;
    if (!is_sigmoid && scores_all) {
#pragma unroll
        for (int i = 1; i < kPerLane; ++i) {
            largest = fmaxf(largest, values[i]);
        }
        largest = value_of(token_max(key_of(largest), lanes));
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            sum += first_expert + i < num_experts ? expf(values[i] - largest) : 0.0f;
        }
        sum = group_sum(sum, lanes);
    }
    const auto score_of = [&](float logit) {
        const float power = expf(is_sigmoid ? -logit : logit - largest);
        return __fdividef(is_sigmoid ? 1.0f : power, is_sigmoid ? 1.0f + power : sum);
    };

    int keys[kPerLane];
    float choices[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int expert = first_expert + i;
        choices[i] = values[i];
        if (has_bias) {
            const float choice =
                score_of(values[i]) + (expert < num_experts ? __ldg(bias + expert) : 0.0f);
            choices[i] = choice != choice ? -INFINITY : choice;  // min and max would pass it over
        }
        keys[i] = expert < num_experts ? key_of(choices[i]) : kNone;
    }
    if (num_groups > 1) {
        limit_to_groups<kPerLane>(keys, choices, has_bias, lane_idx, num_experts, num_groups,
                                  top_groups);
    }

    float own_logit = 0.0f;
#pragma unroll 1
    for (int j = 0; j < k; ++j) {
        int best[kPerLane];
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            best[i] = keys[i];
        }
#pragma unroll
        for (int half = kPerLane / 2; half > 0; half /= 2) {
#pragma unroll
            for (int i = 0; i < half; ++i) {
                best[i] = max(best[i], best[i + half]);
            }
        }
        const int winner = token_max(best[0], lanes);
        if (lane_idx == first_lane(best[0] == winner, lanes)) {
            int place = 0;
#pragma unroll
            for (int i = kPerLane - 1; i >= 0; --i) {
                place = keys[i] == winner ? i : place;
            }
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) {
                keys[i] = i == place ? kNone : keys[i];
            }
            block_chosen[token * k + j] = first_expert + place;
            block_weights[token * k + j] = value_of(winner);  // without a bias, the logit
        }
        own_logit = lane_idx == j ? value_of(winner) : own_logit;
        if (!scores_all && j == 0) {
            largest = value_of(winner);
        }
    }
    __syncwarp();

    // NOTE: with a bias the logits of the chosen are read again: which of a lane's registers had
    // one costs more.
    const auto score_at = [&](int expert, float logit) {
        if (has_bias) {
            logit = finite(load_element(logits, token_idx * logits_stride + expert, element));
        }
        return score_of(logit);
    };
    // NOTE: weights of nothing but zeros stay zeros.
    const auto factor_of = [&](float total) { return __fdividef(scale, total + 1e-20f); };
    const int64_t first = static_cast<int64_t>(first_token) * k;
    // A warp of a token has a weight a lane, and need not look for it in shared memory.
    if (lanes == kWarpSize && k <= kWarpSize) {
        const bool is_chosen = lane_idx < k;
        const int own_expert = is_chosen ? block_chosen[token * k + lane_idx] : 0;
        const float weight = is_chosen ? score_at(own_expert, own_logit) : 0.0f;
        const float factor =
            renormalises ? factor_of(group_sum(weight, k <= 8 ? 8 : kWarpSize)) : scale;
        if (is_chosen && first_token + token < num_tokens) {
            weights[first + token * k + lane_idx] = weight * factor;
            chosen[first + token * k + lane_idx] = own_expert;
        }
        return;
    }
    for (int j = lane_idx; j < k; j += lanes) {
        float& weight = block_weights[token * k + j];
        weight = score_at(block_chosen[token * k + j], weight);
    }
    __syncwarp();
    float factor = scale;
    if (renormalises) {
        float total = 0.0f;
#pragma unroll 4
        for (int j = 0; j < k; ++j) {
            total += block_weights[token * k + j];
        }
        factor = factor_of(total);
    }
    __syncwarp();
#pragma unroll 1
    for (int j = lane_idx; j < k; j += lanes) {
        block_weights[token * k + j] *= factor;
    }
    __syncthreads();
    const int count = min(block_tokens, num_tokens - first_token) * k;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kThreads) {
        weights[first + i] = block_weights[i];
        chosen[first + i] = block_chosen[i];
    }
}

#define EXPORT_MOE_ROUTE(PER_LANE)                                                                 \
    DESCRIBED(                                                                                     \
        moe_route_each##PER_LANE, "x: tokens in steps of 128 / lanes", (.threads = kThreads),      \
        extern "C" __global__ void __launch_bounds__(kThreads) moe_route_each##PER_LANE(           \
            float* weights, int* chosen, const void* logits, const float* bias,                    \
            int64_t logits_stride, int element, int num_tokens, int num_experts, int k, int lanes, \
            int is_vec, int is_sigmoid, int renormalises, int num_groups, int top_groups,          \
            float scale) {                                                                         \
            route<PER_LANE>(weights, chosen, logits, bias, logits_stride, element, num_tokens,     \
                            num_experts, k, lanes, is_vec, is_sigmoid, renormalises, num_groups,   \
                            top_groups, scale);                                                    \
        })

// {op}_each{experts a lane}
EXPORT_MOE_ROUTE(4)
EXPORT_MOE_ROUTE(8)
EXPORT_MOE_ROUTE(16)

}  // namespace kernel_hub::moe
