// Append of new keys and values to a KV cache, with the rotary embedding of the keys (and of the
// queries) on the way, in one launch.
//
// The token at index i of sequence b has the index n = cache_seqlens[b] + i in its sequence, and
// the position positions[token], or n when positions is null. Its key and value go to
//   slot_mapping:  page = slot / page_size, row = slot % page_size of slot_mapping[token]
//   block_table:   page = block_table[b, n / page_size], row = n % page_size
//   neither:       page = b, row = n (a contiguous cache: a page is a sequence)
// A slot, page or row outside the cache is skipped. Rotation as in rope.cu, in fp32, rounded once;
// an e4m3 cache holds value / scale of the head, saturated. A position outside the table gives nan.
//
// Parallelisation: threadIdx.x walks a head; threadIdx.y pairs of heads, two query heads or the key
// and the value of one head (the first q_threads take the queries); threadIdx.z the tokens of a
// block; blocks of tokens along gridDim.x. A thread works out where its token goes, and reads its
// cosines and sines, once for all its pairs. No shared memory. Vectors only: 16 bytes (half-split:
// of each of two parts) of both heads at a time, head_dim and rotary_dim multiples of the vector
// (half-split: of two), blockDim.x as many as there are, everything aligned to a vector. Other
// sizes and alignments are append_kv_normed.cu's, without weights.
// Queries in place are allowed: each element is read, then written, by one thread.
// Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021; Kwon et
// al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs sm80's, which converts by integers

#include <type_traits>

#include "kernel_hub/e4m3.cuh"
#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/kv_place.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/vec.cuh"
#include "kv_cache/append_rows.cuh"

namespace kernel_hub::kv_cache {

enum class Rotation { kNone, kHalf, kInterleaved };

// kCount neighbouring entries of a table of cosines or sines, as they are in memory: 16-bit ones
// take half the registers of floats.
template <typename Table, int kCount>
struct Entries {
    static constexpr int kWords = kCount * static_cast<int>(sizeof(Table)) / 4;
    uint32_t words[kWords];

    __device__ __forceinline__ void load(const Table* entries) {
        static_assert(kWords % 4 == 0 || kWords == 2, "entries are read 16 or 8 bytes at a time");
        if constexpr (kWords == 2) {
            const uint2 bits = __ldg(reinterpret_cast<const uint2*>(entries));
            words[0] = bits.x, words[1] = bits.y;
        } else {
#pragma unroll
            for (int i = 0; i < kWords; i += 4) {
                const uint4 bits = load_shared_by_blocks(reinterpret_cast<const char*>(entries) +
                                                         i * sizeof(uint32_t));
                words[i] = bits.x, words[i + 1] = bits.y;
                words[i + 2] = bits.z, words[i + 3] = bits.w;
            }
        }
    }
    __device__ __forceinline__ void fill_with_nan() {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            words[i] = 0x7fffffff;  // whatever the type
        }
    }
    __device__ __forceinline__ void unpack(float (&values)[kCount]) const {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            Word<Table>::unpack(words[i], values + i * Word<Table>::kElems);
        }
    }
};

// Turns the pairs of a head: across two parts, or side by side in one.
template <typename Table, int kPairs, int kParts, int kWidth>
__device__ __forceinline__ void rotate(float (&values)[kParts][kWidth],
                                       const Entries<Table, kPairs>& cos,
                                       const Entries<Table, kPairs>& sin) {
    float c[kPairs], s[kPairs];
    cos.unpack(c);
    sin.unpack(s);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
        float& a = kParts == 2 ? values[0][j] : values[0][2 * j];
        float& b = kParts == 2 ? values[kParts - 1][j] : values[0][2 * j + 1];
        turn(a, b, c[j], s[j]);
    }
}

// Rotates a head's parts if it is to be, and writes them to `out` and to `cache` unless those are
// null: to a cache of the tensors' own type as the bits are, to one of e4m3 quantised.
template <typename T, typename Cache, typename Table, int kPairs, int kParts, int kWidth>
__device__ __forceinline__ void finish_head(typename Access<T, kWidth>::Bits (&bits)[kParts],
                                            bool is_rotated, const Entries<Table, kPairs>& c,
                                            const Entries<Table, kPairs>& s, T* out, Cache* cache,
                                            float inverse_scale, int first, int second) {
    using HeadAccess = Access<T, kWidth>;
    constexpr bool kIsQuantised = !std::is_same<T, Cache>::value;
    float values[kParts][kWidth];
    if (kIsQuantised || is_rotated) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            HeadAccess::unpack(bits[part], values[part]);
        }
    }
    if (is_rotated) {
        rotate(values, c, s);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            bits[part] = pack<T>(values[part]);
        }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        const int at = part == 0 ? first : second;
        if (out != nullptr) {
            HeadAccess::write_bits(out + at, bits[part]);
        }
        if (cache != nullptr) {
            if constexpr (kIsQuantised) {
#pragma unroll
                for (int j = 0; j < kWidth; ++j) {
                    values[part][j] *= inverse_scale;
                }
                write_e4m3(cache + at, values[part]);
            } else {
                HeadAccess::write_bits(cache + at, bits[part]);
            }
        }
    }
}

template <typename T, typename Cache, typename Table, Rotation kRotation, int kWidth>
__device__ __forceinline__ void append_kv(Rows<T*> out_q, Rows<T*> out_k, Rows<Cache*> k_cache,
                                          Rows<Cache*> v_cache, Rows<const T*> q, Rows<const T*> k,
                                          Rows<const T*> v, const Table* cos, const Table* sin,
                                          const float* k_scale, const float* v_scale,
                                          const Routing& routing, int64_t table_stride,
                                          int num_tokens, int seqlen, int num_heads,
                                          int num_kv_heads, int head_dim, int rotary_dim,
                                          int max_position, int q_threads) {
    using HeadAccess = Access<T, kWidth>;
    constexpr bool kIsQuantised = !std::is_same<T, Cache>::value;
    // Two parts: kWidth pairs, one element of each in either part. One part: the pairs lie side by
    // side in an access, or there are none.
    constexpr bool kIsPaired = kRotation == Rotation::kInterleaved;
    constexpr int kParts = kRotation == Rotation::kHalf ? 2 : 1;
    constexpr int kPairs = kIsPaired ? kWidth / 2 : kWidth;

    const int token_idx = blockIdx.x * blockDim.z + threadIdx.z;
    follow_launch_before();
    if (token_idx >= num_tokens) {
        return;
    }
    const int batch_idx = static_cast<uint32_t>(token_idx) / static_cast<uint32_t>(seqlen);
    const int index = token_idx - batch_idx * seqlen;

    // The heads of this thread: a and b are query heads `half_heads` apart, or a key and a value.
    const bool is_query = static_cast<int>(threadIdx.y) < q_threads;
    const int half_heads = (num_heads + 1) / 2;
    const int num_units = is_query ? half_heads : num_kv_heads;
    const int first_unit = threadIdx.y - (is_query ? 0 : q_threads);
    const int unit_step = is_query ? q_threads : blockDim.y - q_threads;
    const T* a_head = is_query ? q.at(batch_idx, index) : k.at(batch_idx, index);
    const T* b_head = is_query ? a_head + half_heads * q.head_stride : v.at(batch_idx, index);
    const int64_t a_stride = is_query ? q.head_stride : k.head_stride;
    const int64_t b_stride = is_query ? q.head_stride : v.head_stride;

    const int half = rotary_dim / 2;
    const int span = kParts == 2 ? (head_dim + 1) / 2 : head_dim;
    // One round: blockDim.x covers the head.
    const int step = 1 << 30;
    bool is_placed = false, is_stored = false, is_odd = false, is_known = true;
    int64_t position = 0;
    int row = 0;
    T* out = nullptr;
    Cache* k_row = nullptr;
    Cache* v_row = nullptr;
    for (int at = threadIdx.x * kWidth; at < span; at += step) {
        // The elements of the parts: pairs while there are any, neighbours behind them.
        const bool is_rotary =
            kRotation != Rotation::kNone && at < (kParts == 2 ? half : rotary_dim);
        int first = at, second = at;
        if constexpr (kParts == 2) {
            const int behind = rotary_dim + 2 * (at - half);
            first = is_rotary ? at : behind;
            second = is_rotary ? half + at : behind + kWidth;
        }
        Entries<Table, kPairs> c, s;

        for (int unit = first_unit; unit < num_units; unit += unit_step) {
            const bool has_b = !is_query || unit + half_heads < num_heads;
            const T* a = a_head + unit * a_stride;
            const T* b = b_head + unit * b_stride;
            typename HeadAccess::Bits bits_a[kParts], bits_b[kParts];
            bits_a[0] = HeadAccess::read(a + first);
            if constexpr (kParts == 2) {
                bits_a[kParts - 1] = HeadAccess::read(a + second);
            }
            if (has_b) {
                bits_b[0] = HeadAccess::read(b + first);
                if constexpr (kParts == 2) {
                    bits_b[kParts - 1] = HeadAccess::read(b + second);
                }
            }

            // NOTE: after the heads' loads: these wait for one another, and would hold them up.
            if (!is_placed) {
                is_placed = true;
                const Place place = find_place(routing, token_idx, batch_idx, index, is_query);
                is_stored = place.is_stored;
                is_odd = place.is_odd;
                position = place.position;
                row = place.row;
                if (!place.is_inside) {
                    report(routing.flag, is_odd ? kTokensOutside : 0);
                    return;
                }
                if (is_query) {
                    out = out_q.at(batch_idx, index);
                } else {
                    out = out_k.data == nullptr ? nullptr : out_k.at(batch_idx, index);
                    k_row = k_cache.at(place.page, place.row);
                    v_row = v_cache.at(place.page, place.row);
                }
            }
            if constexpr (kRotation != Rotation::kNone) {
                if (unit == first_unit && is_rotary) {
                    // A position outside the table must not read past it; it shows as nan.
                    is_known = position >= 0 && position < max_position;
                    const int64_t entry =
                        (is_known ? position * table_stride : 0) + (kIsPaired ? at / 2 : at);
                    c.load(cos + entry);
                    s.load(sin + entry);
                    if (!is_known) {
                        c.fill_with_nan();
                        s.fill_with_nan();
                    }
                }
            }

            float k_inverse = 1.0f, v_inverse = 1.0f;
            if constexpr (kIsQuantised) {
                if (is_stored && k_scale != nullptr) {
                    k_inverse = 1.0f / __ldg(k_scale + unit);
                }
                if (is_stored && v_scale != nullptr) {
                    v_inverse = 1.0f / __ldg(v_scale + unit);
                }
            }
            T* a_out = nullptr;
            T* b_out = nullptr;
            if (out != nullptr) {
                a_out = out + unit * (is_query ? out_q.head_stride : out_k.head_stride);
                b_out = is_query ? a_out + half_heads * out_q.head_stride : nullptr;
            }
            finish_head<T, Cache, Table, kPairs, kParts, kWidth>(
                bits_a, is_rotary, c, s, a_out,
                is_stored ? k_row + unit * k_cache.head_stride : nullptr, k_inverse, first, second);
            if (has_b) {
                finish_head<T, Cache, Table, kPairs, kParts, kWidth>(
                    bits_b, is_rotary && is_query, c, s, b_out,
                    is_stored ? v_row + unit * v_cache.head_stride : nullptr, v_inverse, first,
                    second);
            }
        }
    }
    // At the end, where no load waits for the tables.
    const bool is_missing = is_placed && !is_query && !is_stored;
    if (is_odd || is_missing || !is_known) {
        const int missing = is_missing ? find_missing(routing, token_idx, row) : 0;
        report(routing.flag,
               missing | (is_odd ? kTokensOutside : 0) | (is_known ? 0 : kPositionsOutside));
    }
}

// NOTE: blocks are of at most 256 threads. Two of 320 leave each thread 96 registers, with no
// spill: of the blocks of 96 that many tokens take, seven fit a multiprocessor, with 124 registers
// five.
#define EXPORT_APPEND_KV(NAME, T, CACHE, TABLE, ROTATION)                                          \
    DESCRIBED(                                                                                     \
        append_kv_##NAME##_vec, "x: tokens in steps of blockDim.z", (.shared_bytes = 0),           \
        extern "C" __global__ void __launch_bounds__(320, 2) append_kv_##NAME##_vec(               \
            T* out_q, T* out_k, CACHE* k_cache, CACHE* v_cache, int* flag, const T* q, const T* k, \
            const T* v, const TABLE* cos, const TABLE* sin, ROUTING_TABLES, const float* k_scale,  \
            const float* v_scale, APPEND_LAYOUT) {                                                 \
            append_kv<T, CACHE, TABLE, Rotation::ROTATION, kVecElems<T>>(                          \
                {out_q, out_q_batch_stride, out_q_token_stride, out_q_head_stride},                \
                {out_k, out_k_batch_stride, out_k_token_stride, out_k_head_stride},                \
                {k_cache, k_cache_page_stride, k_cache_row_stride, k_cache_head_stride},           \
                {v_cache, v_cache_page_stride, v_cache_row_stride, v_cache_head_stride},           \
                {q, q_batch_stride, q_token_stride, q_head_stride},                                \
                {k, k_batch_stride, k_token_stride, k_head_stride},                                \
                {v, v_batch_stride, v_token_stride, v_head_stride}, cos, sin, k_scale, v_scale,    \
                {ROUTING_ARGUMENTS(num_tokens)}, table_stride, num_tokens, seqlen, num_heads,      \
                num_kv_heads, head_dim, rotary_dim, max_position, q_threads);                      \
        })

#define EXPORT_APPEND_KV_CACHES(NAME, T, TABLE, ROTATION) \
    EXPORT_APPEND_KV(NAME, T, T, TABLE, ROTATION)         \
    EXPORT_APPEND_KV(NAME##_to_e4m3, T, __nv_fp8_e4m3, TABLE, ROTATION)

// {op}_{dtype}[_table32]_{layout}[_to_e4m3]_vec: table32 = fp32 cosines and sines with 16-bit
// tensors; to_e4m3 = a quantised cache.
EXPORT_APPEND_KV_CACHES(fp16_plain, __half, __half, kNone)
EXPORT_APPEND_KV_CACHES(fp16_half, __half, __half, kHalf)
EXPORT_APPEND_KV_CACHES(fp16_interleaved, __half, __half, kInterleaved)
EXPORT_APPEND_KV_CACHES(fp16_table32_half, __half, float, kHalf)
EXPORT_APPEND_KV_CACHES(fp16_table32_interleaved, __half, float, kInterleaved)
EXPORT_APPEND_KV_CACHES(bf16_plain, __nv_bfloat16, __nv_bfloat16, kNone)
EXPORT_APPEND_KV_CACHES(bf16_half, __nv_bfloat16, __nv_bfloat16, kHalf)
EXPORT_APPEND_KV_CACHES(bf16_interleaved, __nv_bfloat16, __nv_bfloat16, kInterleaved)
EXPORT_APPEND_KV_CACHES(bf16_table32_half, __nv_bfloat16, float, kHalf)
EXPORT_APPEND_KV_CACHES(bf16_table32_interleaved, __nv_bfloat16, float, kInterleaved)
EXPORT_APPEND_KV_CACHES(fp32_plain, float, float, kNone)
EXPORT_APPEND_KV_CACHES(fp32_half, float, float, kHalf)
EXPORT_APPEND_KV_CACHES(fp32_interleaved, float, float, kInterleaved)

}  // namespace kernel_hub::kv_cache
