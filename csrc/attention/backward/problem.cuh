// What the kernels of attention backward are asked for, and which part of it a block works on.
#pragma once

#include "attention/backward/shared_rows.cuh"
#include "kernel_hub/bounds.cuh"

namespace kernel_hub::attention::backward {

constexpr int kTileRows = 16;
constexpr int kFragment = 128;  // sums in a 16 x 8 fragment

// How a lane's four sums lie in a fragment: side by side where one instruction adds all four.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kAddsByFour = true;
#else
constexpr bool kAddsByFour = false;
#endif

__device__ __forceinline__ int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}

__device__ __forceinline__ int floor_div(int a, int b) {
    return a >= 0 ? a / b : -ceil_div(-a, b);
}

// One tensor of (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with batch_stride 0.
template <typename T>
struct Heads {
    T* data;
    int64_t batch_stride, row_stride, head_stride;

    __device__ __forceinline__ T* at(int batch_idx, int64_t row_idx, int head_idx) const {
        return data + batch_idx * batch_stride + row_idx * row_stride + head_idx * head_stride;
    }
};

// One sequence's rows of a tensor, and its queries' tiles in the workspace.
struct Sequence {
    int first_row;  // 0 where each batch has its own stride
    int first_tile;
    int seqlen;
    bool is_outside;  // the bounds were not what they should be, or further apart than said

    // `longest`: of all sequences, for which grids and workspaces are made: no more rows count.
    __device__ __forceinline__ Sequence(const int* cu_seqlens, int batch_idx, int longest,
                                        int total) {
        if (cu_seqlens) {
            const RowRange rows = find_rows(cu_seqlens, batch_idx, total);
            first_row = rows.start;
            seqlen = min(rows.count, longest);
            first_tile = first_row / kTileRows + batch_idx;
            is_outside = rows.is_outside || rows.count > longest;
        } else {
            first_row = 0;
            seqlen = longest;
            first_tile = batch_idx * ceil_div(longest, kTileRows);
            is_outside = false;
        }
    }
};

// The number of a sequence's keys; cache_seqlens, if not null, says it.
__device__ __forceinline__ int count_keys(const int* cache_seqlens, int batch_idx, int seqlen) {
    return cache_seqlens ? max(0, min(cache_seqlens[batch_idx], seqlen)) : seqlen;
}

// The bits of Outside for the tables of keys.
__device__ __forceinline__ int keys_outside(const Sequence& keys, const int* cache_seqlens,
                                            int batch_idx) {
    const bool is_outside = cache_seqlens && !is_index(cache_seqlens[batch_idx], keys.seqlen + 1);
    return (keys.is_outside ? kKeysOutside : 0) | (is_outside ? kLengthsOutside : 0);
}

// Which keys of a block the queries see: num_keys in all, and of them span + 1 in a row each. With
// relative = key - query, counted from the block's first key and the sequence's first query,
// relative + start is 0 for the first of them.
struct Window {
    int num_keys, start, span;

    __device__ __forceinline__ bool sees(int relative) const {
        return static_cast<unsigned>(relative + start) <= static_cast<unsigned>(span);
    }
};

// What one block works on.
struct Work {
    int batch_idx;
    int first_row, first_tile, seqlen_q;  // of the queries
    int first_key_row, num_key_rows;      // of k, v, dk and dv
    int first_m, end_m;                   // the blocks of queries that see these keys
    int home;                             // relative + home is 0 for the key at the query's place
    Window window;

    // From one block of queries to the next, of the same head or of the next one.
    __device__ __forceinline__ void advance(int& head_idx, int& m) const {
        const bool is_last_of_head = m + 1 == end_m;
        head_idx += is_last_of_head ? 1 : 0;
        m = is_last_of_head ? first_m : m + 1;
    }
};

// Finds what this block works on; false: nothing.
__device__ __forceinline__ bool find_work(Work& work, int* flag, int block_m, int block_n,
                                          bool has_turns, int num_blocks, const int* cu_seqlens_q,
                                          const int* cu_seqlens_k, const int* cache_seqlens,
                                          int seqlen_q, int seqlen_k, int total_q, int total_k,
                                          int window_left, int window_right) {
    work.batch_idx = blockIdx.x / num_blocks;
    const Sequence queries(cu_seqlens_q, work.batch_idx, seqlen_q, total_q);
    const Sequence keys(cu_seqlens_k, work.batch_idx, seqlen_k, total_k);
    report(flag, threadIdx.x == 0 ? keys_outside(keys, cache_seqlens, work.batch_idx) : 0);
    // The last keys of a sequence come first where there are turns: causal blocks then wait least.
    const int nth = blockIdx.x % num_blocks;
    const int first_key = (has_turns ? num_blocks - 1 - nth : nth) * block_n;
    if (first_key >= keys.seqlen) {
        return false;
    }
    work.first_row = queries.first_row;
    work.first_tile = queries.first_tile;
    work.seqlen_q = queries.seqlen;
    work.first_key_row = keys.first_row + first_key;
    work.num_key_rows = keys.seqlen - first_key;
    const int num_keys = count_keys(cache_seqlens, work.batch_idx, keys.seqlen);
    work.window.num_keys = num_keys - first_key;
    // Bounds that are finite: no more than the lengths.
    const int left = window_left < 0 ? num_keys : min(window_left, num_keys);
    const int right = window_right < 0 ? queries.seqlen : min(window_right, queries.seqlen);
    work.home = first_key - (num_keys - queries.seqlen);
    work.window.start = work.home + left;
    work.window.span = left + right;
    work.first_m = max(0, floor_div(work.home - right, block_m));
    work.end_m =
        min(ceil_div(queries.seqlen, block_m),
            floor_div(work.window.start + min(block_n, work.window.num_keys) - 1, block_m) + 1);
    return true;
}

}  // namespace kernel_hub::attention::backward
