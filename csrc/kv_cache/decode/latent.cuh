// Decode steps over a cache of latents (multi-head latent attention): what both kernels know of
// their parameters, of the part of the work that a block does, and of where its results go.
#pragma once

#include "kernel_hub/bounds.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/vec.cuh"
#include "kv_cache/decode/work.cuh"

namespace kernel_hub::kv_cache::decode {

// A row of the cache: the latent, which is key and value, and the rotated part of the key.
constexpr int kLatentDim = 512, kRopeDim = 64, kKeyDim = kLatentDim + kRopeDim;

// Strides in elements.
template <typename T>
struct LatentArgs {
    T* out;                    // (batch_size, seqlen_q, num_heads, kLatentDim)
    float* lse;                // (batch_size, num_heads, seqlen_q), or null
    float* partial_out;        // (num_workers, block rows, kLatentDim)
    float* partial_lse;        // (num_workers, block rows), base 2
    int* flag;                 // what tables led outside (bounds.cuh), or null
    const T* q;                // (batch_size, seqlen_q, num_heads, kKeyDim)
    const int* cache_seqlens;  // (batch_size,)
    const int* block_table;    // (batch_size, max_pages), or null: one page a sequence
    int64_t out_batch_stride, out_token_stride, out_head_stride;
    int64_t q_batch_stride, q_token_stride, q_head_stride;
    int64_t block_table_stride;
    int batch_size, seqlen_q, num_heads, num_pages, page_size, max_tokens;
    int num_splits, parallel, num_workers;
    float softmax_scale;
    int* tickets;  // of the line's parts (sm90/latent_line.cuh), zeros; null: there is no line
};

// The same of a kernel's parameters.
#define LATENT_ARGUMENTS                                                                       \
    out, lse, partial_out, partial_lse, flag, q, cache_seqlens, block_table, out_batch_stride, \
        out_token_stride, out_head_stride, q_batch_stride, q_token_stride, q_head_stride,      \
        block_table_stride, batch_size, seqlen_q, num_heads, num_pages, page_size, max_tokens, \
        num_splits, parallel, num_workers, softmax_scale

// What the kernels for Hopper take.
#define LATENT_MAPPED_PARAMS(T)                                                                    \
    T *out, float *lse, float *partial_out, float *partial_lse, int *flag, int *tickets,           \
        const __grid_constant__ CUtensorMap kv_cache, const T *q, const int *cache_seqlens,        \
        const int *block_table, int64_t out_batch_stride, int64_t out_token_stride,                \
        int64_t out_head_stride, int64_t q_batch_stride, int64_t q_token_stride,                   \
        int64_t q_head_stride, int64_t block_table_stride, int batch_size, int seqlen_q,           \
        int num_heads, int num_pages, int page_size, int max_tokens, int num_splits, int parallel, \
        int num_workers, int box_rows, float softmax_scale

// What a sequence of a length has to do, in units of kUnit tokens.
template <int kUnit, typename T>
__device__ __forceinline__ Extent latent_extent(const LatentArgs<T>& args, int length) {
    Extent extent = {};
    extent.length = min(max(length, 0), kMostTokens);
    extent.is_outside = extent.length > args.max_tokens;
    extent.num_tokens = min(extent.length, args.max_tokens);
    extent.num_units = max((extent.num_tokens + kUnit - 1) / kUnit, 1);
    return extent;
}

// A block of rows (token num_heads + head) of a sequence over a run of its tokens.
struct LatentPart {
    int batch_idx;  // -1: there is nothing to do
    int first_row, num_rows;
    int slot;                    // of the first row, among the partials
    int first_token, end_token;  // of the cache
    int length;                  // that the sequence says
    bool is_whole, is_outside;
    int index, num_parts;        // on a line, of the item; else 0
    int first_place, item_rows;  // of the item

    // The slot of another part of the item. A place of a line has at most two parts of items: the
    // end of one, or its middle, and the beginning of one.
    __device__ __forceinline__ int slot_of(int other) const {
        const auto before = [this](int k) { return 2 * (first_place + k) + (k == 0); };
        return slot + (before(other) - before(index)) * item_rows;
    }

    // Keys of the part that a row of the block sees: those before this.
    template <typename Args>
    __device__ __forceinline__ int end_of(const Args& args, int row) const {
        const int token = min((first_row + row) / args.num_heads, args.seqlen_q - 1);
        return min(length - args.seqlen_q + token + 1, end_token);
    }
    // That every row sees.
    template <typename Args>
    __device__ __forceinline__ int common_end(const Args& args) const {
        return min(length - args.seqlen_q + 1, end_token);
    }
};

// What worker `index` does, in units of kUnit tokens and items of `item_rows` rows; the first of
// its rows.
template <int kUnit, typename Args>
__device__ __forceinline__ LatentPart find_part(const Args& args, int index, int item_rows) {
    const int rows = args.seqlen_q * args.num_heads;
    const Work work = {.cache_seqlens = args.cache_seqlens,
                       .batch_size = args.batch_size,
                       .seqlen_q = args.seqlen_q,
                       .num_new = 0,
                       .max_tokens = args.max_tokens,
                       .window_left = -1,
                       .unit = kUnit,
                       .items = (rows + item_rows - 1) / item_rows,
                       .num_splits = args.num_splits,
                       .parallel = args.parallel,
                       .fine_units = 1 << 30,
                       .num_sms = 1};
    const Place place = find_place<false>(work, index);
    LatentPart part = {};
    part.batch_idx = place.batch_idx;
    if (place.batch_idx < 0) {
        return part;
    }
    const Extent extent = work.extent_of(place.batch_idx);
    const int count = extent.num_units / place.num_splits;
    const int rest = extent.num_units % place.num_splits;
    const int first = place.split * count + min(place.split, rest);
    part.first_row = place.item * item_rows;
    part.num_rows = min(rows - part.first_row, item_rows);
    part.slot = index * item_rows;
    part.first_token = first * kUnit;
    part.end_token = min((first + count + (place.split < rest ? 1 : 0)) * kUnit, extent.num_tokens);
    part.length = extent.length;
    part.is_whole = place.num_splits == 1;
    part.is_outside = extent.is_outside;
    return part;
}

// Where a row of a block goes: to `out` where it is the item's, or to the partials.
template <typename T>
struct LatentRow {
    T* out;          // null: a partial
    float* partial;  // or the row is not there

    static __device__ __forceinline__ LatentRow of(const LatentArgs<T>& args,
                                                   const LatentPart& part, int row, bool is_whole) {
        if (row >= part.num_rows) {
            return {nullptr, nullptr};
        }
        const int token = (part.first_row + row) / args.num_heads;
        const int head = (part.first_row + row) % args.num_heads;
        if (!is_whole) {
            return {nullptr, args.partial_out + static_cast<int64_t>(part.slot + row) * kLatentDim};
        }
        return {args.out + part.batch_idx * args.out_batch_stride + token * args.out_token_stride +
                    head * args.out_head_stride,
                nullptr};
    }
    // Columns first, first + 1, first + 8, first + 9, ...: values(j) are two of them.
    template <int kPairs, typename Values>
    __device__ __forceinline__ void store(int first, Values&& values) const {
        if (out != nullptr) {
#pragma unroll
            for (int j = 0; j < kPairs; ++j) {
                const float2 both = values(j);
                *reinterpret_cast<uint32_t*>(out + first + 8 * j) = pack2<T>(both.x, both.y);
            }
        } else if (partial != nullptr) {
#pragma unroll
            for (int j = 0; j < kPairs; ++j) {
                *reinterpret_cast<float2*>(partial + first + 8 * j) = values(j);
            }
        }
    }
};

// log(sum exp) of a row, from a maximum and a sum in base 2; is_whole: of the item.
template <typename T>
__device__ __forceinline__ void write_lse(const LatentArgs<T>& args, const LatentPart& part,
                                          int row, float row_max, float row_sum, bool is_whole) {
    if (row >= part.num_rows) {
        return;
    }
    // A row without keys has a maximum of -inf.
    const float log2_sum = row_max + __logf(row_sum) * kLog2e;
    if (!is_whole) {
        args.partial_lse[part.slot + row] = log2_sum;
    } else if (args.lse != nullptr) {
        const int token = (part.first_row + row) / args.num_heads;
        const int head = (part.first_row + row) % args.num_heads;
        args.lse[(static_cast<int64_t>(part.batch_idx) * args.num_heads + head) * args.seqlen_q +
                 token] = log2_sum * kLn2;
    }
}

// What the exponent of 2 is counted from, for a maximum that may be -inf.
__device__ __forceinline__ float base_of(float row_max) {
    return row_max == -INFINITY ? 0.0f : row_max;
}

}  // namespace kernel_hub::kv_cache::decode
