// Append of new keys and values to a KV cache, normed and rotated on the way, and of queries
// likewise, in one launch:
//
//   q', k' = rope(norm(q)), rope(norm(k)),  norm(h) = h / sqrt(mean(h^2) + eps) * (weight + offset)
//   cache[place of the token] = k', v
//
// over each head, in fp32, rounded once; heads without weights are not normed, without tables not
// rotated. The token at index i of sequence b has the index n = cache_seqlens[b] + i in its
// sequence, and the position positions[token], or n when positions is null. It goes to
//   slot_mapping:  page = slot / page_size, row = slot % page_size of slot_mapping[token]
//   block_table:   page = block_table[b, n / page_size], row = n % page_size
//   neither:       page = b, row = n (a contiguous cache: a page is a sequence)
// A slot, page or row outside the cache is skipped. An e4m3 cache holds value / scale of the head,
// saturated. A position outside the table gives nan.
//
// Parallelisation and memory:
//   vec      append_vecs.cuh: head_dim of at most 512, it and rotary_dim multiples of 8, strides of
//            4, addresses of 16 bytes
//   scalar   any size, any alignment. threadIdx.x walks a head, threadIdx.y pairs of heads, two
//            query heads or the key and the value of one head (the first q_threads take the
//            queries), threadIdx.z the tokens of a block; blockDim.x is a power of two of at most
//            32, so a head is in one warp, whose shuffles sum its squares. A head that is normed is
//            read twice.
// What calls differ by besides (the types of tables and of weights; of scalars also the layout of a
// rotation and the cache's type) are parameters: branches that whole launches take alike.
// Queries in place are allowed: each element is read, then written, by one thread.
// Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021; Zhang
// and Sennrich, "Root Mean Square Layer Normalization", 2019; Henry et al., "Query-Key
// Normalization for Transformers", 2020; Kwon et al., "Efficient Memory Management for Large
// Language Model Serving with PagedAttention", 2023.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs sm80's, which converts by integers

#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/kv_place.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kv_cache/append_rows.cuh"
#include "kv_cache/append_vecs.cuh"
#include "kv_cache/normed_heads.cuh"

namespace kernel_hub::kv_cache {

// By the element.
template <typename T>
__device__ __forceinline__ void append_scalar(const AppendArgs<T>& args) {
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
    TokenPlace place(args, heads, is_live, is_known);
    if (is_live && !is_query) {
        place.find_row(args.routing);
    }

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
        report_token(args, place, is_live, is_known, !is_query);
    }
}

#define EXPORT_APPEND_KV(NAME, T, BODY, BOUNDS)                                                  \
    DESCRIBED(                                                                                   \
        append_kv_##NAME, "x: tokens in steps of blockDim.z", (.shared_bytes = 0),               \
        extern "C" __global__ void __launch_bounds__ BOUNDS append_kv_##NAME(                    \
            T* out_q, T* out_k, void* k_cache, void* v_cache, int* flag, const T* q, const T* k, \
            const T* v, const void* cos, const void* sin, ROUTING_TABLES, const float* k_scale,  \
            const float* v_scale, const void* q_norm_weight, const void* k_norm_weight,          \
            APPEND_LAYOUT, int num_rounds, int is_interleaved, int is_table32, int is_weight32,  \
            int is_e4m3, float eps, float weight_offset) {                                       \
            BODY({.out_q = {out_q, out_q_batch_stride, out_q_token_stride, out_q_head_stride},   \
                  .out_k = {out_k, out_k_batch_stride, out_k_token_stride, out_k_head_stride},   \
                  .k_cache = {k_cache, k_cache_page_stride, k_cache_row_stride,                  \
                              k_cache_head_stride},                                              \
                  .v_cache = {v_cache, v_cache_page_stride, v_cache_row_stride,                  \
                              v_cache_head_stride},                                              \
                  .q = {q, q_batch_stride, q_token_stride, q_head_stride},                       \
                  .k = {k, k_batch_stride, k_token_stride, k_head_stride},                       \
                  .v = {v, v_batch_stride, v_token_stride, v_head_stride},                       \
                  .cos = cos,                                                                    \
                  .sin = sin,                                                                    \
                  .k_scale = k_scale,                                                            \
                  .v_scale = v_scale,                                                            \
                  .q_norm_weight = q_norm_weight,                                                \
                  .k_norm_weight = k_norm_weight,                                                \
                  .routing = {ROUTING_ARGUMENTS(num_tokens)},                                    \
                  .table_stride = table_stride,                                                  \
                  .num_tokens = num_tokens,                                                      \
                  .seqlen = seqlen,                                                              \
                  .num_heads = num_heads,                                                        \
                  .num_kv_heads = num_kv_heads,                                                  \
                  .head_dim = head_dim,                                                          \
                  .rotary_dim = rotary_dim,                                                      \
                  .max_position = max_position,                                                  \
                  .q_threads = q_threads,                                                        \
                  .num_rounds = num_rounds,                                                      \
                  .is_interleaved = is_interleaved,                                              \
                  .is_table32 = is_table32,                                                      \
                  .is_weight32 = is_weight32,                                                    \
                  .is_e4m3 = is_e4m3,                                                            \
                  .eps = eps,                                                                    \
                  .weight_offset = weight_offset});                                              \
        })

// NOTE: vectors in blocks of at most 96 threads: eight a multiprocessor leave each thread 80
// registers, of fp32 six 112, with no spill.
#define EXPORT_APPEND_KV_VECS(NAME, T, IS_INTERLEAVED, BLOCKS)                      \
    EXPORT_APPEND_KV(NAME##_vec, T, (append_vecs<T, IS_INTERLEAVED, false>),        \
                     (kMostThreads, BLOCKS))                                        \
    EXPORT_APPEND_KV(NAME##_to_e4m3_vec, T, (append_vecs<T, IS_INTERLEAVED, true>), \
                     (kMostThreads, BLOCKS))
#define EXPORT_APPEND_KV_VARIANTS(NAME, T, BLOCKS)             \
    EXPORT_APPEND_KV_VECS(NAME##_half, T, false, BLOCKS)       \
    EXPORT_APPEND_KV_VECS(NAME##_interleaved, T, true, BLOCKS) \
    EXPORT_APPEND_KV(NAME##_scalar, T, append_scalar<T>, (288, 2))

// {op}_{dtype}_{layout}[_to_e4m3]_vec: to_e4m3 = a quantised cache; {op}_{dtype}_scalar
EXPORT_APPEND_KV_VARIANTS(fp16, __half, 8)
EXPORT_APPEND_KV_VARIANTS(bf16, __nv_bfloat16, 8)
EXPORT_APPEND_KV_VARIANTS(fp32, float, 6)

}  // namespace kernel_hub::kv_cache
