// As append_kv.cu, to caches of bytes in two more ways:
//
//   int8, with a scale a head that is given:  cache = k' / k_scale[head]
//   int8 or e4m3, with a scale a token and a head that is found here:
//       k_scale_cache[place, head] = max |k'| / (127 or 448);  cache = k' / that, or 0 where it is
//       0 or subnormal: 1 / that may be an infinity, and 0 times that is a nan
//
// k' = rope(norm(k)), each part only where its arguments are given; of v neither. Rounded once,
// from fp32. Where a token goes, and what is outside: append_kv.cu.
//
// Parallelisation: threadIdx.x walks a head, threadIdx.y heads, those of queries, of keys, then of
// values, threadIdx.z the tokens of a block. blockDim.x is a power of two of at most 32, so a head
// is in one warp, whose shuffles sum its squares and find its largest magnitude; every thread makes
// every round, with nothing to read or write where there is no head for it. Shared memory, of
// vectors: both weights and each token's angles, as floats.
//   vec      a head in registers, read once
//   scalar   any size, any alignment; a head is read once for each thing that is asked of it
// A head with a nan or an infinity has a scale that is one, so that all of it reads as nan.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs the code of sm80
// Source: that of append_kv.cu; Yao et al., "ZeroQuant", 2022 (a scale a token).

#include <float.h>

#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/int8.cuh"
#include "kernel_hub/kv_place.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/ptx.cuh"
#include "kv_cache/append_rows.cuh"
#include "kv_cache/normed_heads.cuh"

namespace kernel_hub::kv_cache {

// The bytes of a cache, and its scales: of each head, or, where scale_cache is not null, written
// for each token.
struct ByteRows {
    uint8_t* data;
    const float* scale;
    float* scale_cache;
    int64_t page_stride, row_stride, head_stride;
    int64_t scale_page_stride, scale_row_stride, scale_head_stride;
};

template <typename T>
struct QuantisedArgs {
    Rows<T*> out_q, out_k;
    ByteRows k_cache, v_cache;
    Rows<const T*> q, k, v;
    const void* cos;  // (max_position, rotary_dim / 2), fp32 or T; null: rotary_dim is 0
    const void* sin;
    const void* q_norm_weight;  // (head_dim,), fp32 or T; null: not normed
    const void* k_norm_weight;  // same
    Routing routing;
    int64_t table_stride;
    int num_tokens, seqlen, num_heads, num_kv_heads, head_dim, rotary_dim, max_position;
    int num_rounds, is_interleaved, is_table32, is_weight32, is_e4m3;
    float eps, weight_offset;
};

// The weights of queries, then those of keys, as floats to shared memory.
template <typename T>
__device__ __forceinline__ void share_weights(const QuantisedArgs<T>& args, float* shared) {
    const int threads = blockDim.x * blockDim.y * blockDim.z;
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    for (int i = thread; i < 2 * args.head_dim; i += threads) {
        const bool is_query = i < args.head_dim;
        const NormWeight<T, 1> weight = {is_query ? args.q_norm_weight : args.k_norm_weight,
                                         args.is_weight32, args.weight_offset, nullptr};
        shared[i] = weight.at(is_query ? i : i - args.head_dim);
    }
}

template <int kWidth>
__device__ __forceinline__ void write_bytes(uint8_t* head, const Parts& parts, int is_e4m3,
                                            float inverse_scale, float (&values)[2][kWidth]) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        if (part == 0 ? parts.has_first : parts.has_second) {
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                values[part][j] *= inverse_scale;
            }
            uint8_t* target = head + (part == 0 ? parts.first : parts.second);
            if (is_e4m3) {
                write_e4m3(reinterpret_cast<__nv_fp8_e4m3*>(target), values[part]);
            } else {
                write_int8(reinterpret_cast<int8_t*>(target), values[part]);
            }
        }
    }
}

template <int kWidth>
__device__ __forceinline__ float largest_of(const Parts& parts, const float (&values)[2][kWidth]) {
    float largest = 0.0f;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        if (part == 0 ? parts.has_first : parts.has_second) {
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                largest = max_nan(largest, fabsf(values[part][j]));
            }
        }
    }
    return largest;
}

template <typename T, int kWidth>
__device__ __forceinline__ void append_quantised(const QuantisedArgs<T>& args) {
    // Vectors: the weights of queries, those of keys; the angles of each token's vectors.
    float* shared = reinterpret_cast<float*>(dynamic_shared());
    float* shared_angles =
        shared + 2 * args.head_dim + 2 * kWidth * (threadIdx.z * blockDim.x + threadIdx.x);
    const auto [token_idx, batch_idx, index] = TokenOfThread(args);
    const int num_units = args.num_heads + 2 * args.num_kv_heads;
    const int span = (args.head_dim + 1) / 2, first_at = threadIdx.x * kWidth;
    const float head_size = static_cast<float>(args.head_dim);

    follow_launch_before();
    bool is_live = token_idx < args.num_tokens;
    bool is_known = true;
    Place place;
    place.is_inside = place.is_stored = place.is_odd = false;
    place.page = place.row = 0;
    place.position = 0;
    if (is_live) {
        place = find_place(args.routing, token_idx, batch_idx, index, false);
        is_live = place.is_inside;
        if (args.cos != nullptr) {
            is_known = place.position >= 0 && place.position < args.max_position;
        }
    }
    Parts parts = parts_at<kWidth>(args, first_at);
    if constexpr (kWidth > 1) {
        if (is_live && threadIdx.y == 0) {
            Angles<T, kWidth> angles;
            angles.load(args, parts, first_at, place.position, is_known);
            angles.expand(args.is_table32, is_known);
            angles.put(shared_angles);
        }
        share_weights(args, shared);
        __syncthreads();
    }

#pragma unroll 1
    for (int round = 0; round < args.num_rounds; ++round) {
        const int unit = threadIdx.y + round * blockDim.y;
        const bool has_head = is_live && unit < num_units;
        const bool is_query = unit < args.num_heads;
        const bool is_value = unit >= args.num_heads + args.num_kv_heads;
        const int head_idx = is_query   ? unit
                             : is_value ? unit - args.num_heads - args.num_kv_heads
                                        : unit - args.num_heads;
        const T* source = nullptr;
        if (has_head && is_query) {
            source = args.q.at(batch_idx, index) + head_idx * args.q.head_stride;
        } else if (has_head) {
            source = is_value ? args.v.at(batch_idx, index) + head_idx * args.v.head_stride
                              : args.k.at(batch_idx, index) + head_idx * args.k.head_stride;
        }
        const NormWeight<T, kWidth> weight = {is_query   ? args.q_norm_weight
                                              : is_value ? nullptr
                                                         : args.k_norm_weight,
                                              args.is_weight32, args.weight_offset,
                                              shared + (is_query ? 0 : args.head_dim)};
        Head<T, kWidth> head;
        float inverse = 1.0f;
        // What becomes of the head's elements at `at`, in `values` and, rounded, in `head`.
        const auto finish = [&](int at, float (&values)[2][kWidth]) {
            Angles<T, kWidth> angles;
            if constexpr (kWidth == 1) {
                parts = parts_at<kWidth>(args, at);
                head.load(source, parts, has_head);
                if (has_head && !is_value) {
                    angles.load(args, parts, at, place.position, is_known);
                    angles.expand(args.is_table32, is_known);
                }
            }
            head.unpack(values);
            // What is neither normed nor turned stays the bits it is, a nan's too.
            if (has_head && !is_value && (weight.values != nullptr || parts.turns_first)) {
                head.finish(values, args, parts, inverse, weight, angles, shared_angles);
            }
        };

        float sum = 0.0f, values[2][kWidth];
        if constexpr (kWidth > 1) {
            head.load(source, parts, has_head);
            sum = head.sum_of_squares();
        } else {
            const int end = weight.values == nullptr ? 0 : span;
            for (int at = first_at; at < end; at += blockDim.x) {
                parts = parts_at<kWidth>(args, at);
                head.load(source, parts, has_head);
                sum += head.sum_of_squares();
            }
        }
        // Every lane of the warp, whatever it has.
#pragma unroll 1
        for (int lanes = blockDim.x / 2; lanes > 0; lanes /= 2) {
            sum += __shfl_xor_sync(~0u, sum, lanes);
        }
        if (weight.values != nullptr) {
            inverse = rsqrtf(sum / head_size + args.eps);
        }

        const ByteRows cache = is_value ? args.v_cache : args.k_cache;
        const bool is_stored = has_head && !is_query && place.is_stored;
        const bool finds_scale = is_stored && cache.scale_cache != nullptr;
        float largest = 0.0f;
        if constexpr (kWidth > 1) {
            finish(first_at, values);
            largest = largest_of(parts, values);
        } else {
            for (int at = first_at; finds_scale && at < span; at += blockDim.x) {
                finish(at, values);
                largest = max_nan(largest, largest_of(parts, values));
            }
        }
#pragma unroll 1
        for (int lanes = blockDim.x / 2; lanes > 0; lanes /= 2) {
            largest = max_nan(largest, __shfl_xor_sync(~0u, largest, lanes));
        }
        float inverse_scale = 1.0f;
        uint8_t* target = nullptr;
        if (is_stored) {
            target = cache.data + place.page * cache.page_stride + place.row * cache.row_stride +
                     head_idx * cache.head_stride;
            float scale = cache.scale == nullptr ? 1.0f : __ldg(cache.scale + head_idx);
            if (finds_scale) {
                scale = largest * (args.is_e4m3 ? 1.0f / 448.0f : 1.0f / 127.0f);
                if (threadIdx.x == 0) {
                    cache.scale_cache[place.page * cache.scale_page_stride +
                                      place.row * cache.scale_row_stride +
                                      head_idx * cache.scale_head_stride] = scale;
                }
            }
            inverse_scale = finds_scale && scale < FLT_MIN ? 0.0f : 1.0f / scale;
        }
        T* out = nullptr;
        if (has_head && is_query) {
            out = args.out_q.at(batch_idx, index) + head_idx * args.out_q.head_stride;
        } else if (has_head && !is_value && args.out_k.data != nullptr) {
            out = args.out_k.at(batch_idx, index) + head_idx * args.out_k.head_stride;
        }
        const auto write = [&] {
            if (out != nullptr) {
                head.write(out, parts);
            }
            if (target != nullptr) {
                write_bytes(target, parts, args.is_e4m3, inverse_scale, values);
            }
        };
        if constexpr (kWidth > 1) {
            write();
        } else {
            for (int at = first_at; has_head && at < span; at += blockDim.x) {
                finish(at, values);
                write();
            }
        }
    }
    // At the end, where no load waits for the tables.
    if (token_idx >= args.num_tokens || threadIdx.y > 0 || first_at >= span) {
        return;
    }
    const bool is_missing = is_live && args.num_kv_heads > 0 && !place.is_stored;
    const bool is_unknown = is_live && !is_known;
    if (place.is_odd || is_missing || is_unknown) {
        const int missing = is_missing ? find_missing(args.routing, token_idx, place.row) : 0;
        report(args.routing.flag, missing | (place.is_odd ? kTokensOutside : 0) |
                                      (is_unknown ? kPositionsOutside : 0));
    }
}

#define EXPORT_APPEND_KV_QUANTISED(NAME, T, VARIANT, WIDTH)                                       \
    DESCRIBED(                                                                                    \
        append_kv_quantised_##NAME##_##VARIANT, "x: tokens in steps of blockDim.z",               \
        (.shared_bytes = 0),                                                                      \
        extern "C" __global__ void                                                                \
        __launch_bounds__(256, 2) append_kv_quantised_##NAME##_##VARIANT(                         \
            T* out_q, T* out_k, void* k_cache, void* v_cache, int* flag, const T* q, const T* k,  \
            const T* v, const void* cos, const void* sin, ROUTING_TABLES, const float* k_scale,   \
            const float* v_scale, const void* q_norm_weight, const void* k_norm_weight,           \
            float* k_scale_cache, float* v_scale_cache, APPEND_LAYOUT, int num_rounds,            \
            int is_interleaved, int is_table32, int is_weight32, int is_e4m3,                     \
            int64_t k_scale_page_stride, int64_t k_scale_row_stride, int64_t k_scale_head_stride, \
            int64_t v_scale_page_stride, int64_t v_scale_row_stride, int64_t v_scale_head_stride, \
            float eps, float weight_offset) {                                                     \
            append_quantised<T, WIDTH>(                                                           \
                {.out_q = {out_q, out_q_batch_stride, out_q_token_stride, out_q_head_stride},     \
                 .out_k = {out_k, out_k_batch_stride, out_k_token_stride, out_k_head_stride},     \
                 .k_cache = {static_cast<uint8_t*>(k_cache), k_scale, k_scale_cache,              \
                             k_cache_page_stride, k_cache_row_stride, k_cache_head_stride,        \
                             k_scale_page_stride, k_scale_row_stride, k_scale_head_stride},       \
                 .v_cache = {static_cast<uint8_t*>(v_cache), v_scale, v_scale_cache,              \
                             v_cache_page_stride, v_cache_row_stride, v_cache_head_stride,        \
                             v_scale_page_stride, v_scale_row_stride, v_scale_head_stride},       \
                 .q = {q, q_batch_stride, q_token_stride, q_head_stride},                         \
                 .k = {k, k_batch_stride, k_token_stride, k_head_stride},                         \
                 .v = {v, v_batch_stride, v_token_stride, v_head_stride},                         \
                 .cos = cos,                                                                      \
                 .sin = sin,                                                                      \
                 .q_norm_weight = q_norm_weight,                                                  \
                 .k_norm_weight = k_norm_weight,                                                  \
                 .routing = {ROUTING_ARGUMENTS(num_tokens)},                                      \
                 .table_stride = table_stride,                                                    \
                 .num_tokens = num_tokens,                                                        \
                 .seqlen = seqlen,                                                                \
                 .num_heads = num_heads,                                                          \
                 .num_kv_heads = num_kv_heads,                                                    \
                 .head_dim = head_dim,                                                            \
                 .rotary_dim = rotary_dim,                                                        \
                 .max_position = max_position,                                                    \
                 .num_rounds = num_rounds,                                                        \
                 .is_interleaved = is_interleaved,                                                \
                 .is_table32 = is_table32,                                                        \
                 .is_weight32 = is_weight32,                                                      \
                 .is_e4m3 = is_e4m3,                                                              \
                 .eps = eps,                                                                      \
                 .weight_offset = weight_offset});                                                \
        })

#define EXPORT_APPEND_KV_QUANTISED_VARIANTS(NAME, T)       \
    EXPORT_APPEND_KV_QUANTISED(NAME, T, vec, kVecElems<T>) \
    EXPORT_APPEND_KV_QUANTISED(NAME, T, scalar, 1)

// {op}_quantised_{dtype}_{variant}
EXPORT_APPEND_KV_QUANTISED_VARIANTS(fp16, __half)
EXPORT_APPEND_KV_QUANTISED_VARIANTS(bf16, __nv_bfloat16)

}  // namespace kernel_hub::kv_cache
