// decode_attention_sm90.cu and its twin: the figures of a kernel, and the ring of a warp.
#pragma once

#include "kernel_hub/bounds.cuh"
#include "kernel_hub/mma.cuh"
#include "kv_cache/decode/tiles.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

template <typename T_, int kHeadDim_, int kRowTiles_, bool kLeads_>
struct ShortConfig {
    using T = T_;
    using Cache = T_;
    static constexpr int kHeadDim = kHeadDim_, kTile = 16, kMostWarps = 8;
    // Of each warp's ring: places of a tile's keys and values.
    static constexpr int kPairs = 2, kAhead = kPairs - 1;
    static constexpr int kRowTiles = kRowTiles_, kRows = 16 * kRowTiles;
    // Larger sums leave queries no registers.
    static constexpr bool kQueryInRegisters = kRowTiles == 1 && kHeadDim <= 128;
    // No launch ahead still writes lengths, tables, or of caches more than the last seqlen_q
    // tokens.
    static constexpr bool kLeads = kLeads_;
    static constexpr int kQueryChunks = kHeadDim / 8;
    static constexpr int kQueryBytes = kQueryInRegisters ? 0 : kRows * kHeadDim * 2;
    static constexpr bool kQuantised = false;
    static constexpr int kRowBytes = kHeadDim * 2, kChunks = kRowBytes / 16;
    static constexpr int kTileBytes = kTile * kRowBytes, kPairBytes = 2 * kTileBytes;
    static constexpr int kVectors = kHeadDim / 4;
    static constexpr int kMergeStride = kHeadDim + 8;
    static constexpr int kMergeBytes = kRows * (kMergeStride + 2) * 4;  // of a warp
    // What is sent: vectors of four columns, and a row's maximum and sum with each.
    static constexpr int kSentBytes = 24;
    // Of four warps, without what is sent to them.
    static constexpr int kFewestBytes = kQueryBytes + 4 * kMergeBytes;
    static_assert(kMergeBytes >= kPairBytes, "the ring's first pairs lie within what is merged");
};

// a / b, both small.
__device__ __forceinline__ int small_quotient(int a, int b) {
    return static_cast<int>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
}

// Fills the ring of one warp, whose tiles are `stride` tokens apart and in one page each.
template <typename Config, typename Args>
struct ShortLoader {
    using T = typename Config::T;
    const Args& args;
    const T* keys;
    const T* values;
    const int* table;  // of the sequence
    int batch_idx, first_token, end_token, stride;
    int pages, next_pages;  // lane l: of tiles l, 32 + l, ...
    uint32_t ring;
    int lane_idx, pair_stride;
    bool is_outside;

    __device__ __forceinline__ int look_up(int tile, int end) const {
        const int token = first_token + (tile + lane_idx) * stride;
        return args.block_table == nullptr ? batch_idx
               : token < end               ? __ldg(table + token / args.page_size)
                                           : -1;
    }
    __device__ __forceinline__ void copy(const T* base, int64_t token_stride, int num_tokens,
                                         uint32_t target) const {
        // Lanes go on where those before end: in a row, where they have no whole ones.
        constexpr int kChunks = Config::kChunks;
        const T* whole = base + lane_idx / kChunks * token_stride;
#pragma unroll
        for (int i = 0; i < Config::kTile * kChunks / 32; ++i) {
            const int flat = 32 * i + lane_idx, row = flat / kChunks, chunk = flat % kChunks;
            const T* const source = 32 % kChunks == 0 ? whole : base + row * token_stride;
            // Rows of whole lines have kernels of their own; asked for whole, they come sooner.
            constexpr bool kIsWhole = Config::kQueryInRegisters && Config::kRowBytes == 256;
            copy_of_row<kIsWhole ? 128 : Config::kRowBytes>(
                target + swizzled<kChunks>(row, chunk), source + chunk * 8,
                chunk * 8 < args.head_dim && row < num_tokens);
            whole += 32 / kChunks * token_stride;
        }
    }
    // Start the copies of a tile's keys and values, a group each; nothing where there is no tile.
    // Rows of a page that is not there become zeros.
    __device__ __forceinline__ void issue(int tile, int pair) {
        const int token = first_token + tile * stride;
        if ((tile & 31) == 0 && tile != 0) {
            pages = next_pages;
            next_pages = look_up(tile + 32, end_token);
        }
        const int page = __shfl_sync(~0u, pages, tile & 31);
        const int in_page = args.block_table == nullptr ? token : token % args.page_size;
        const bool is_there = is_index(page, args.num_pages);
        is_outside |= token < end_token && !is_there;
        const int num_tokens = is_there ? end_token - token : 0;
        const uint32_t target = ring + pair * pair_stride;
        if (token < end_token) {
            copy(keys + page * args.k_cache_page_stride + in_page * args.k_cache_token_stride,
                 args.k_cache_token_stride, num_tokens, target);
        }
        cp_async_commit();
        if (token < end_token) {
            copy(values + page * args.v_cache_page_stride + in_page * args.v_cache_token_stride,
                 args.v_cache_token_stride, num_tokens, target + Config::kTileBytes);
        }
        cp_async_commit();
    }
};

}  // namespace kernel_hub::kv_cache::decode::sm90
