// As append_kv.cu, of queries and keys that are normed first: in one launch
//
//   q', k' = rope(norm(q)), rope(norm(k)),  norm(h) = h / sqrt(mean(h^2) + eps) * (weight + offset)
//   cache[place of the token] = k', v
//
// over each head, in fp32, rounded once. Where a token goes, what is outside: append_kv.cu.
//
// Parallelisation: as there: threadIdx.x walks a head, threadIdx.y pairs of heads, threadIdx.z the
// tokens of a block. blockDim.x is a power of two of at most 32, so a head is in one warp, whose
// shuffles sum its squares; every thread makes every round, with nothing to read or write where
// there is no head for it. Shared memory, of vectors: both weights and each token's angles, as
// floats.
//   vec      a head in registers, read once: two vectors of 16 bytes a thread, in which every pair
//            of a rotation lies; head_dim a multiple of two vectors, rotary_dim of one (half-split:
//            of two)
//   scalar   any size, any alignment; a head that is normed is read twice. Without weights it is
//            also the append of heads that are not normed, where append_kv.cu has no vectors
// What calls differ by besides (the layout of a rotation, the types of its tables, the weights and
// the caches) are parameters: branches that whole launches take alike.
// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; Henry et al.,
// "Query-Key Normalization for Transformers", 2020; and those of append_kv.cu.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs sm80's, which converts by integers

#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/kv_place.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/reduce.cuh"
#include "kv_cache/append_rows.cuh"
#include "kv_cache/normed_heads.cuh"

namespace kernel_hub::kv_cache {

// Bytes or 16-bit or 32-bit elements of a cache: `at` counts elements.
struct CacheRows {
    void* data;
    int64_t page_stride, row_stride, head_stride;
};

template <typename T>
struct NormedArgs {
    Rows<T*> out_q, out_k;
    CacheRows k_cache, v_cache;
    Rows<const T*> q, k, v;
    const void* cos;  // (max_position, rotary_dim / 2), fp32 or T; null: rotary_dim is 0
    const void* sin;
    const float* k_scale;       // (num_kv_heads,), or null
    const float* v_scale;       // same
    const void* q_norm_weight;  // (head_dim,), fp32 or T; null: not normed
    const void* k_norm_weight;  // same
    Routing routing;
    int64_t table_stride;
    int num_tokens, seqlen, num_heads, num_kv_heads, head_dim, rotary_dim, max_position, q_threads;
    int num_rounds, is_interleaved, is_table32, is_weight32, is_e4m3;
    float eps, weight_offset;
};

// The weights of queries, then those of keys, as floats to shared memory. By all warps but the
// first, which waits for angles meanwhile.
template <typename T>
__device__ __forceinline__ void share_weights(const NormedArgs<T>& args, float* shared) {
    const int threads = blockDim.x * blockDim.y * blockDim.z;
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const int others = threads > kWarpSize ? kWarpSize : 0;
    if (thread < others) {
        return;
    }
    for (int i = thread - others; i < 2 * args.head_dim; i += threads - others) {
        const bool is_query = i < args.head_dim;
        const NormWeight<T, 1> weight = {is_query ? args.q_norm_weight : args.k_norm_weight,
                                         args.is_weight32, args.weight_offset, nullptr};
        shared[i] = weight.at(is_query ? i : i - args.head_dim);
    }
}

// Of vectors. NOTE: addresses move from round to round; made anew for each head they were half of
// what a head takes.
template <typename T>
__device__ __forceinline__ void append_normed_vecs(const NormedArgs<T>& args) {
    constexpr int kWidth = kVecElems<T>;
    using HeadAccess = Access<T, kWidth>;
    // The weights of queries, those of keys; the angles of each token's vectors.
    float* shared = reinterpret_cast<float*>(dynamic_shared());
    float* shared_angles =
        shared + 2 * args.head_dim + 2 * kWidth * (threadIdx.z * blockDim.x + threadIdx.x);
    const HeadsOfThread heads(args);
    const bool is_query = heads.is_query;
    const int first_at = threadIdx.x * kWidth;
    const Parts parts = parts_at<kWidth>(args, first_at);
    const int apart = parts.second - parts.first;
    const NormWeight<T, kWidth> weight = {is_query ? args.q_norm_weight : args.k_norm_weight,
                                          args.is_weight32, args.weight_offset,
                                          shared + (is_query ? 0 : args.head_dim)};
    const float head_size = static_cast<float>(args.head_dim);

    // What is read, and how far it moves a round.
    const int64_t a_stride = is_query ? args.q.head_stride : args.k.head_stride;
    const int64_t b_stride = is_query ? args.q.head_stride : args.v.head_stride;
    const T* a_from = (is_query ? args.q : args.k).at(heads.batch_idx, heads.index);
    const T* b_from =
        is_query ? a_from + heads.half_heads * a_stride : args.v.at(heads.batch_idx, heads.index);
    a_from += heads.first_unit * a_stride + parts.first;
    b_from += heads.first_unit * b_stride + parts.first;

    bool is_live = heads.token_idx < args.num_tokens && heads.first_unit < heads.num_units;
    bool is_known = true;
    int unit = heads.first_unit;
    const auto has_a = [&] { return is_live && unit < heads.num_units; };
    Head<T, kWidth> head_a, head_b;
    const auto load = [&] {
        head_a.bits[0] = head_a.bits[1] = head_b.bits[0] = head_b.bits[1] = make_uint4(0, 0, 0, 0);
        if (has_a() && parts.has_first) {
            head_a.bits[0] = HeadAccess::read(a_from);
            head_a.bits[1] = HeadAccess::read(a_from + apart);
            if (heads.has_b(args, unit)) {
                head_b.bits[0] = HeadAccess::read(b_from);
                head_b.bits[1] = HeadAccess::read(b_from + apart);
            }
        }
    };
    follow_launch_before();
    load();
    if (args.num_rounds > 1 && unit + heads.unit_step < heads.num_units) {
        // The next round's heads to the L2, which that round then finds there.
        const T* next = a_from + heads.unit_step * a_stride;
        prefetch_l2(next);
        prefetch_l2(next + apart);
        next = b_from + heads.unit_step * b_stride;
        prefetch_l2(next);
        prefetch_l2(next + apart);
    }
    // NOTE: after the heads' loads: these wait for one another, and would hold them up.
    const Place place = find_token(args, heads, is_live, is_known);
    if (is_live && threadIdx.y == 0) {
        Angles<T, kWidth> angles;
        angles.load(args, parts, first_at, place.position, is_known);
        angles.expand(args.is_table32, is_known);
        angles.put(shared_angles);
    }
    share_weights(args, shared);

    // Where it goes, in bytes.
    const bool is_bytes = !is_query && args.is_e4m3, goes = is_query || place.is_stored;
    const int64_t bytes = is_bytes ? 1 : sizeof(T);
    const int64_t a_out = is_query ? args.out_q.head_stride : args.k_cache.head_stride;
    const int64_t b_out = is_query ? args.out_q.head_stride : args.v_cache.head_stride;
    const auto row_of = [&](const CacheRows& rows) {
        return static_cast<char*>(rows.data) +
               (place.page * rows.page_stride + place.row * rows.row_stride) * bytes;
    };
    char *a_to, *b_to;
    if (is_query) {
        a_to = reinterpret_cast<char*>(args.out_q.at(heads.batch_idx, heads.index));
        b_to = a_to + heads.half_heads * a_out * bytes;
    } else {
        a_to = row_of(args.k_cache);
        b_to = row_of(args.v_cache);
    }
    a_to += (heads.first_unit * a_out + parts.first) * bytes;
    b_to += (heads.first_unit * b_out + parts.first) * bytes;

#pragma unroll 1
    for (int round = 0;;) {
        float sum_a = head_a.sum_of_squares(), sum_b = head_b.sum_of_squares();
        head_a.keep_packed();
        head_b.keep_packed();
        add_lanes(sum_a, sum_b);
        if (round == 0) {
            __syncthreads();
        }
        if (has_a() && parts.has_first) {
            float inverse = 1.0f, b_inverse = 1.0f;
            if (weight.values != nullptr) {
                inverse = rsqrtf(sum_a / head_size + args.eps);
                b_inverse = rsqrtf(sum_b / head_size + args.eps);
            }
            char* to = a_to;
            // NOTE: a loop, not twice the code: 60 % of the instructions, 20 registers fewer.
#pragma unroll 1
            for (int i = 0; i < 2; ++i) {
                const bool is_value = !is_query && i == 1;
                float values[2][kWidth];
                head_a.unpack(values);
                if (!is_value) {
                    head_a.finish(values, args, parts, inverse, weight, {}, shared_angles);
                }
                if (!is_query && i == 0 && args.out_k.data != nullptr) {
                    head_a.write(
                        args.out_k.at(heads.batch_idx, heads.index) + unit * args.out_k.head_stride,
                        parts);
                }
                if (goes && !is_bytes) {
                    HeadAccess::write_bits(reinterpret_cast<T*>(to), head_a.bits[0]);
                    HeadAccess::write_bits(reinterpret_cast<T*>(to) + apart, head_a.bits[1]);
                } else if (goes) {
                    const float* scale = is_value ? args.v_scale : args.k_scale;
                    const float inverse_scale =
                        scale == nullptr ? 1.0f : 1.0f / __ldg(scale + unit);
#pragma unroll
                    for (int part = 0; part < 2; ++part) {
#pragma unroll
                        for (int j = 0; j < kWidth; ++j) {
                            values[part][j] *= inverse_scale;
                        }
                        write_e4m3(reinterpret_cast<__nv_fp8_e4m3*>(to) + part * apart,
                                   values[part]);
                    }
                }
                if (!heads.has_b(args, unit)) {
                    break;
                }
                head_a = head_b;
                inverse = b_inverse;
                to = b_to;
            }
        }
        if (++round >= args.num_rounds) {
            break;
        }
        unit += heads.unit_step;
        a_from += heads.unit_step * a_stride;
        b_from += heads.unit_step * b_stride;
        a_to += heads.unit_step * a_out * bytes;
        b_to += heads.unit_step * b_out * bytes;
        load();
    }
    if (heads.token_idx < args.num_tokens && heads.first_unit < heads.num_units &&
        parts.has_first) {
        report_token(args, heads, place, is_live, is_known);
    }
}

// By the element.
template <typename T>
__device__ __forceinline__ void append_normed_scalar(const NormedArgs<T>& args) {
    const HeadsOfThread heads(args);
    const bool is_query = heads.is_query;
    const T* a_head = (is_query ? args.q : args.k).at(heads.batch_idx, heads.index);
    const T* b_head = is_query ? a_head + heads.half_heads * args.q.head_stride
                               : args.v.at(heads.batch_idx, heads.index);
    const int64_t a_stride = is_query ? args.q.head_stride : args.k.head_stride;
    const int64_t b_stride = is_query ? args.q.head_stride : args.v.head_stride;
    const NormWeight<T, 1> weight = {is_query ? args.q_norm_weight : args.k_norm_weight,
                                     args.is_weight32, args.weight_offset, nullptr};
    const float head_size = static_cast<float>(args.head_dim);
    const int first_at = threadIdx.x, span = (args.head_dim + 1) / 2;
    bool is_live = heads.token_idx < args.num_tokens && heads.first_unit < heads.num_units;
    bool is_known = true;
    Parts parts;
    Head<T, 1> head_a, head_b;
    int unit = heads.first_unit;
    const auto has_a = [&] { return is_live && unit < heads.num_units; };
    const auto has_b = [&] { return has_a() && heads.has_b(args, unit); };
    const auto load = [&] {
        head_a.load(a_head + unit * a_stride, parts, has_a());
        head_b.load(b_head + unit * b_stride, parts, has_b());
    };
    follow_launch_before();
    const Place place = find_token(args, heads, is_live, is_known);

    for (int round = 0; round < args.num_rounds; ++round, unit += heads.unit_step) {
        float sum_a = 0.0f, sum_b = 0.0f;
        // Nothing to sum where a head is not to be normed.
        const int end = weight.values == nullptr ? 0 : span;
        for (int at = first_at; at < end; at += blockDim.x) {
            parts = parts_at<1>(args, at);
            load();
            sum_a += head_a.sum_of_squares();
            sum_b += head_b.sum_of_squares();
        }
        add_lanes(sum_a, sum_b);
        if (!has_a()) {
            continue;
        }
        float a_inverse = 1.0f, b_inverse = 1.0f;
        if (weight.values != nullptr) {
            a_inverse = rsqrtf(sum_a / head_size + args.eps);
            b_inverse = rsqrtf(sum_b / head_size + args.eps);
        }
        const auto write = [&](const Angles<T, 1>& angles) {
            float inverse = a_inverse;
#pragma unroll 1
            for (int i = 0; i < 2; ++i) {
                const bool is_value = !is_query && i == 1;
                T* out = nullptr;
                void* cache = nullptr;
                int64_t at = 0;
                float inverse_scale = 1.0f;
                if (is_query) {
                    out = args.out_q.at(heads.batch_idx, heads.index) +
                          (unit + i * heads.half_heads) * args.out_q.head_stride;
                } else {
                    if (!is_value && args.out_k.data != nullptr) {
                        out = args.out_k.at(heads.batch_idx, heads.index) +
                              unit * args.out_k.head_stride;
                    }
                    if (place.is_stored) {
                        const CacheRows& rows = is_value ? args.v_cache : args.k_cache;
                        const float* scale = is_value ? args.v_scale : args.k_scale;
                        cache = rows.data;
                        at = place.page * rows.page_stride + place.row * rows.row_stride +
                             unit * rows.head_stride;
                        inverse_scale = scale == nullptr ? 1.0f : 1.0f / __ldg(scale + unit);
                    }
                }
                float values[2][1];
                head_a.unpack(values);
                // What is neither normed nor turned stays the bits it is, a nan's too.
                const bool stays = weight.values == nullptr && !parts.turns_first;
                if (!is_value && !stays) {
                    head_a.finish(values, args, parts, inverse, weight, angles, nullptr);
                }
                if (out != nullptr) {
                    head_a.write(out, parts);
                }
                if (cache != nullptr) {
                    head_a.store(cache, at, parts, args.is_e4m3, values, inverse_scale);
                }
                if (!has_b()) {
                    break;
                }
                head_a = head_b;
                inverse = b_inverse;
            }
        };
        for (int at = first_at; at < span; at += blockDim.x) {
            parts = parts_at<1>(args, at);
            load();
            Angles<T, 1> angles;
            angles.load(args, parts, at, place.position, is_known);
            angles.expand(args.is_table32, is_known);
            write(angles);
        }
    }
    if (heads.token_idx < args.num_tokens && heads.first_unit < heads.num_units &&
        first_at < span) {
        report_token(args, heads, place, is_live, is_known);
    }
}

#define EXPORT_APPEND_KV_NORMED(NAME, T, VARIANT, BODY)                                           \
    DESCRIBED(                                                                                    \
        append_kv_normed_##NAME##_##VARIANT, "x: tokens in steps of blockDim.z",                  \
        (.shared_bytes = 0),                                                                      \
        extern "C" __global__ void __launch_bounds__(288, 2) append_kv_normed_##NAME##_##VARIANT( \
            T* out_q, T* out_k, void* k_cache, void* v_cache, int* flag, const T* q, const T* k,  \
            const T* v, const void* cos, const void* sin, ROUTING_TABLES, const float* k_scale,   \
            const float* v_scale, const void* q_norm_weight, const void* k_norm_weight,           \
            APPEND_LAYOUT, int num_rounds, int is_interleaved, int is_table32, int is_weight32,   \
            int is_e4m3, float eps, float weight_offset) {                                        \
            BODY<T>({.out_q = {out_q, out_q_batch_stride, out_q_token_stride, out_q_head_stride}, \
                     .out_k = {out_k, out_k_batch_stride, out_k_token_stride, out_k_head_stride}, \
                     .k_cache = {k_cache, k_cache_page_stride, k_cache_row_stride,                \
                                 k_cache_head_stride},                                            \
                     .v_cache = {v_cache, v_cache_page_stride, v_cache_row_stride,                \
                                 v_cache_head_stride},                                            \
                     .q = {q, q_batch_stride, q_token_stride, q_head_stride},                     \
                     .k = {k, k_batch_stride, k_token_stride, k_head_stride},                     \
                     .v = {v, v_batch_stride, v_token_stride, v_head_stride},                     \
                     .cos = cos,                                                                  \
                     .sin = sin,                                                                  \
                     .k_scale = k_scale,                                                          \
                     .v_scale = v_scale,                                                          \
                     .q_norm_weight = q_norm_weight,                                              \
                     .k_norm_weight = k_norm_weight,                                              \
                     .routing = {ROUTING_ARGUMENTS(num_tokens)},                                  \
                     .table_stride = table_stride,                                                \
                     .num_tokens = num_tokens,                                                    \
                     .seqlen = seqlen,                                                            \
                     .num_heads = num_heads,                                                      \
                     .num_kv_heads = num_kv_heads,                                                \
                     .head_dim = head_dim,                                                        \
                     .rotary_dim = rotary_dim,                                                    \
                     .max_position = max_position,                                                \
                     .q_threads = q_threads,                                                      \
                     .num_rounds = num_rounds,                                                    \
                     .is_interleaved = is_interleaved,                                            \
                     .is_table32 = is_table32,                                                    \
                     .is_weight32 = is_weight32,                                                  \
                     .is_e4m3 = is_e4m3,                                                          \
                     .eps = eps,                                                                  \
                     .weight_offset = weight_offset});                                            \
        })

#define EXPORT_APPEND_KV_NORMED_VARIANTS(NAME, T)             \
    EXPORT_APPEND_KV_NORMED(NAME, T, vec, append_normed_vecs) \
    EXPORT_APPEND_KV_NORMED(NAME, T, scalar, append_normed_scalar)

// {op}_normed_{dtype}_{variant}
EXPORT_APPEND_KV_NORMED_VARIANTS(fp16, __half)
EXPORT_APPEND_KV_NORMED_VARIANTS(bf16, __nv_bfloat16)
EXPORT_APPEND_KV_NORMED_VARIANTS(fp32, float)

}  // namespace kernel_hub::kv_cache
