// Keys and values of caches of bytes, e4m3 or int8, as 16 bits, side by side: what attention of
// many queries reads.
//
//   k_out[b, i] = k[page of token i of sequence b] * scale of its head, or of the token and head,
// rounded to T; so v_out for the tokens i that a query of the sequence may see: those of its length
// and, with a window, no more than kMargin before the first. Other rows of k_out and v_out are not
// written. Pages that are not there are zeros, and reported. With cu_seqlens_k rows stay where they
// are.
//
// Parallelisation: 256 threads, a thread kAhead units of 16 bytes at a time; gridDim.x steps of
// tokens_per_block tokens of the longest sequence, gridDim.y sequences, gridDim.z k and v. Blocks
// behind a sequence's length end at once. No shared memory. A byte is read once and two are
// written, which the attention behind finds in the L2 where they fit; pairs of lanes exchange
// halves, so that one store fills the 32 bytes that memory takes at once.
//   flash_attention_byte_caches_{dtype}   head_dim a multiple of 16, rows aligned to 16 bytes
// Source: Micikevicius et al., "FP8 formats for deep learning", 2022 (e4m3).
// kernel_hub: not-for: sm89: memory bounds it, and 8.9 runs sm80's, whose conversion is of integers

#include "attention/lengths.cuh"
#include "kernel_hub/divisor.cuh"
#include "kernel_hub/e4m3.cuh"
#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/int8.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/mma.cuh"

namespace kernel_hub::attention {

constexpr int kWidenThreads = 256;
constexpr int kAhead = 4;     // reads before the writes
constexpr int kUnit = 16;     // bytes of a cache
constexpr int kMargin = 256;  // keys of a tile: what is masked is multiplied by 0, and is no NaN

// Keys, or values.
template <typename T>
struct Side {
    T* out;                // (rows, num_kv_heads, head_dim)
    const uint8_t* cache;  // (pages or batch_size, tokens, num_kv_heads, head_dim)
    const float* scale;    // (pages or batch_size, tokens, num_kv_heads), or null
    int64_t page_stride, token_stride, head_stride;
    int64_t scale_page_stride, scale_token_stride, scale_head_stride;  // 0 where they are one's
    int head_dim;
};

struct CacheTables {
    int* flag;
    const int *cu_seqlens_q, *cu_seqlens_k, *cache_seqlens, *block_table;
    int64_t block_table_stride;
    int batch_size, seqlen_q, seqlen_k, total_q, total_k, num_kv_heads, page_size, num_pages;
    int window_left, tokens_per_block, is_int8;
};

// Where a token is; page < 0: on a page that is not there.
struct TokenPlace {
    int page, row;
};

__device__ __forceinline__ TokenPlace find_token(const CacheTables& p, const Divisor& pages,
                                                 int batch, int row) {
    if (p.cu_seqlens_k) {
        return {0, row};
    }
    if (!p.block_table) {
        return {batch, row};
    }
    const int page = __ldg(p.block_table + batch * p.block_table_stride + pages.quotient(row));
    if (!is_index(page, p.num_pages)) {
        report(p.flag, kPagesOutside);
        return {-1, 0};
    }
    return {page, pages.remainder(row)};
}

template <typename T>
__device__ __forceinline__ uint32_t widen_pair(uint32_t bytes, int is_int8, float scale) {
    const uint32_t halves = is_int8 ? int8x2_to_half2<0, 1>(bytes) : e4m3x2_to_half2(bytes);
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&halves));
    return pack2<T>(pair.x * scale, pair.y * scale);
}

template <typename T>
__device__ __forceinline__ void widen(const CacheTables& p, const Side<T>& side, int batch) {
    const RowRange queries = find_queries(p, batch), keys = find_keys(p, batch);
    if (queries.count == 0) {
        return;
    }
    int begin = blockIdx.x * p.tokens_per_block;
    const int end = min(keys.count, begin + p.tokens_per_block);
    if (p.window_left >= 0) {
        begin = max(begin, keys.count - queries.count - p.window_left - kMargin);
    }
    const int chunks = side.head_dim / kUnit, units_per_token = p.num_kv_heads * chunks;
    const int units = (end - begin) * units_per_token;
    const Divisor by_token = Divisor::of(units_per_token), by_head = Divisor::of(chunks);
    const Divisor by_page = Divisor::of(p.page_size);
    const int64_t first_row = p.cu_seqlens_k ? 0 : static_cast<int64_t>(batch) * p.seqlen_k;
#pragma unroll 1
    for (int before = 0; before < units; before += kAhead * kWidenThreads) {
        const int first = before + threadIdx.x;
        uint4 bytes[kAhead];
        float scales[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int unit = first + i * kWidenThreads;
            bytes[i] = make_uint4(0, 0, 0, 0);
            scales[i] = 1.0f;
            if (unit < units) {
                const int token = by_token.quotient(unit), in_token = by_token.remainder(unit);
                const int head = by_head.quotient(in_token), chunk = by_head.remainder(in_token);
                const TokenPlace at = find_token(p, by_page, batch, keys.start + begin + token);
                if (at.page >= 0) {
                    const uint8_t* source = side.cache + at.page * side.page_stride +
                                            at.row * side.token_stride + head * side.head_stride +
                                            chunk * kUnit;
                    bytes[i] = __ldg(reinterpret_cast<const uint4*>(source));
                    if (side.scale) {
                        scales[i] =
                            __ldg(side.scale + at.page * side.scale_page_stride +
                                  at.row * side.scale_token_stride + head * side.scale_head_stride);
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const uint32_t words[4] = {bytes[i].x, bytes[i].y, bytes[i].z, bytes[i].w};
            // A unit's halves, then a half of each unit of a pair of lanes.
            uint32_t halves[2][4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                halves[e / 2][e % 2 * 2] = widen_pair<T>(words[e] & 0xffff, p.is_int8, scales[i]);
                halves[e / 2][e % 2 * 2 + 1] = widen_pair<T>(words[e] >> 16, p.is_int8, scales[i]);
            }
            const int odd = threadIdx.x & 1;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const uint32_t got = __shfl_xor_sync(~0u, odd ? halves[0][e] : halves[1][e], 1);
                halves[0][e] = odd ? got : halves[0][e];
                halves[1][e] = odd ? halves[1][e] : got;
            }
            const int64_t row = first_row + keys.start + begin;
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const int unit = first - odd + i * kWidenThreads + which;
                if (unit < units) {
                    T* const out =
                        side.out + (row * units_per_token + unit) * static_cast<int64_t>(kUnit);
                    const uint32_t (&half)[4] = halves[which];
                    reinterpret_cast<uint4*>(out)[odd] =
                        make_uint4(half[0], half[1], half[2], half[3]);
                }
            }
        }
    }
}

#define EXPORT_BYTE_CACHES(DTYPE, T)                                                               \
    DESCRIBED(                                                                                     \
        flash_attention_byte_caches_##DTYPE,                                                       \
        "x: steps of tokens_per_block keys, y: sequences, z: k and v", (.threads = kWidenThreads), \
        extern "C" __global__ void                                                                 \
        __launch_bounds__(kWidenThreads) flash_attention_byte_caches_##DTYPE(                      \
            T* k_out, T* v_out, int* flag, const void* k, const void* v, const float* k_scale,     \
            const float* v_scale, const int* cu_seqlens_q, const int* cu_seqlens_k,                \
            const int* cache_seqlens, const int* block_table, int64_t k_page_stride,               \
            int64_t k_token_stride, int64_t k_head_stride, int64_t v_page_stride,                  \
            int64_t v_token_stride, int64_t v_head_stride, int64_t k_scale_page_stride,            \
            int64_t k_scale_token_stride, int64_t k_scale_head_stride,                             \
            int64_t v_scale_page_stride, int64_t v_scale_token_stride,                             \
            int64_t v_scale_head_stride, int64_t block_table_stride, int batch_size, int seqlen_q, \
            int seqlen_k, int total_q, int total_k, int num_kv_heads, int page_size,               \
            int num_pages, int head_dim, int head_dim_v, int window_left, int tokens_per_block,    \
            int is_int8) {                                                                         \
            const CacheTables tables{flag,         cu_seqlens_q,                                   \
                                     cu_seqlens_k, cache_seqlens,                                  \
                                     block_table,  block_table_stride,                             \
                                     batch_size,   seqlen_q,                                       \
                                     seqlen_k,     total_q,                                        \
                                     total_k,      num_kv_heads,                                   \
                                     page_size,    num_pages,                                      \
                                     window_left,  tokens_per_block,                               \
                                     is_int8};                                                     \
            const bool is_v = blockIdx.z == 1;                                                     \
            const Side<T> side{                                                                    \
                .out = is_v ? v_out : k_out,                                                       \
                .cache = static_cast<const uint8_t*>(is_v ? v : k),                                \
                .scale = is_v ? v_scale : k_scale,                                                 \
                .page_stride = is_v ? v_page_stride : k_page_stride,                               \
                .token_stride = is_v ? v_token_stride : k_token_stride,                            \
                .head_stride = is_v ? v_head_stride : k_head_stride,                               \
                .scale_page_stride = is_v ? v_scale_page_stride : k_scale_page_stride,             \
                .scale_token_stride = is_v ? v_scale_token_stride : k_scale_token_stride,          \
                .scale_head_stride = is_v ? v_scale_head_stride : k_scale_head_stride,             \
                .head_dim = is_v ? head_dim_v : head_dim};                                         \
            follow_launch_before();                                                                \
            for (int batch = blockIdx.y; batch < batch_size; batch += gridDim.y) {                 \
                widen(tables, side, batch);                                                        \
            }                                                                                      \
        })

// {op}_byte_caches_{dtype}
EXPORT_BYTE_CACHES(fp16, __half)
EXPORT_BYTE_CACHES(bf16, __nv_bfloat16)

}  // namespace kernel_hub::attention
