// Decode over caches of fp32: figures, queries in parts, the ring of a warp, products of tiles.
#pragma once

#include "kernel_hub/three_products.cuh"
#include "kv_cache/decode/rows.cuh"
#include "kv_cache/decode/tiles.cuh"

namespace kernel_hub::kv_cache::decode {

// As DecodeConfig, with tiles of 8 tokens: one 8x8 operand wide.
struct Fp32Config {
    using T = float;
    using Cache = float;
    static constexpr int kHeadDim = 128, kTile = 8, kSlots = 5, kRowTiles = 1;
    static constexpr bool kQuantised = false, kGeneral = true;
    static constexpr int kWarps = 4, kThreads = 32 * kWarps, kUnit = kWarps * kTile, kRows = 16;
    static constexpr int kRowBytes = kHeadDim * 4, kChunks = kRowBytes / 16;
    static constexpr int kSlotBytes = kTile * kRowBytes;
    static constexpr int kAreaBytes = kWarps * kSlots * kSlotBytes;
    static constexpr int kMergeStride = kHeadDim + 8;
    static constexpr int kPartBytes = kRows * kRowBytes;  // of the queries: high, then low
    static constexpr int kSharedBytes = kAreaBytes + 2 * kPartBytes;
    static_assert(kWarps * kRows * (kMergeStride + 2) * 4 <= kAreaBytes, "the warps merge there");
    static_assert(kChunks == 32, "a lane copies one chunk of a row");
    static_assert(kSharedBytes <= 99 << 10, "a block of sm_89 has 99 KiB of shared memory");
};

// Write the queries of the segment to shared memory in parts, and its new tokens to the cache.
template <typename Config, typename Args>
__device__ __forceinline__ void prepare_rows_fp32(const Args& args, const Segment& segment,
                                                  const Extent& extent, uint8_t* queries) {
    const int group = args.num_heads / args.num_kv_heads;
    const int first_row = segment.row_block * Config::kRows;
    const int num_rows = min(args.rows() - first_row, Config::kRows);
    const int first_position = extent.length - args.seqlen_q;
    int first_new = 0, num_new = 0;
    if (args.k != nullptr) {
        const int begin = segment.first_unit * Config::kUnit;
        const int end = min(begin + segment.num_units * Config::kUnit, extent.num_tokens);
        first_new = max(begin - first_position, 0);
        num_new = max(end - first_position - first_new, 0);
    }
    // A thread has one column; rows of queries, then of new keys and values in turn.
    static_assert(Config::kThreads == Config::kHeadDim, "a thread has one column");
    const int column = threadIdx.x;
    const bool is_inside = column < args.head_dim;
#pragma unroll 1
    for (int job = 0; job < num_rows + 2 * num_new; ++job) {
        const bool is_query = job < num_rows;
        const bool is_value = !is_query && (job - num_rows) % 2 != 0;
        const int row = is_query ? first_row + job : (job - num_rows) / 2;
        const int token = is_query ? row / group : first_new + row;
        const int head = is_query ? segment.kv_head * group + row % group : segment.kv_head;
        const int place = first_position + token;
        const int position = first_position + args.depth_of(segment.batch_idx, token);
        float value = 0.0f;
        if (is_inside) {
            const NewRow<float> from =
                find_row<float>(args, segment, is_query, is_value, token, head);
            value = read_rotated_element(from.data, from.bias, from.rotation, position, column);
        }
        if (is_query) {
            Parts<1> parts;
            parts.split({__float_as_uint(value)});
            uint8_t* place = queries + swizzled<Config::kChunks>(job, column / 4) + column % 4 * 4;
            *reinterpret_cast<uint32_t*>(place) = parts.high[0];
            *reinterpret_cast<uint32_t*>(place + Config::kPartBytes) = parts.low[0];
            continue;
        }
        int page = segment.batch_idx, in_page = place;
        if (args.block_table != nullptr) {
            page = __ldg(args.block_table + segment.batch_idx * args.block_table_stride +
                         place / args.page_size);
            in_page = place % args.page_size;
        }
        // No page, no place: the row is dropped (the attention says so in the flag).
        if (is_inside && is_index(page, args.num_pages)) {
            row_of_cache(args, is_value, page, in_page, head)[column] = value;
        }
    }
}

// Columns that are multiplied at once: of the three products of each 8, one waits for another.
// Columns from head_dim on are zeros in the slots and among the queries.
constexpr int kColumnsAtOnce = 32;

// scores = queries x keys of a slot.
template <typename Config>
__device__ __forceinline__ void multiply_keys_fp32(uint32_t queries, uint32_t slot, int head_dim,
                                                   int lane_idx, float (&scores)[4]) {
    constexpr int kSteps = kColumnsAtOnce / 8;
#pragma unroll
    for (int k = 0; k < Config::kHeadDim / 8; k += kSteps) {
        if (8 * k >= head_dim) {
            continue;
        }
        Parts<2 * kSteps> keys;
        uint32_t words[2 * kSteps];
        uint32_t high[kSteps][4], low[kSteps][4];
#pragma unroll
        for (int i = 0; i < kSteps; i += 2) {
            uint32_t four[4];
            ldmatrix_x4(four, slot + swizzled<Config::kChunks>(lane_idx & 7,
                                                               2 * (k + i) + (lane_idx >> 3)));
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                words[2 * i + e] = four[e];
            }
        }
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const uint32_t place =
                queries + swizzled<Config::kChunks>(lane_idx & 15, 2 * (k + i) + (lane_idx >> 4));
            ldmatrix_x4(high[i], place);
            ldmatrix_x4(low[i], place + Config::kPartBytes);
        }
        keys.split(words);
        float sums[kSteps][4];
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            mma_tf32_first(sums[i], low[i], keys.high[2 * i], keys.high[2 * i + 1]);
        }
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            mma_tf32(sums[i], high[i], keys.low[2 * i], keys.low[2 * i + 1]);
        }
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            mma_tf32(sums[i], high[i], keys.high[2 * i], keys.high[2 * i + 1]);
        }
#pragma unroll
        for (int i = 0; i < kSteps; i += 2) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                scores[e] += sums[i][e] + sums[i + 1][e];
            }
        }
    }
}

// out = out * shrink + probabilities x values of a slot. The tokens of a tile are taken in the
// order in which a lane has their scores: columns t and t + 4 of A are tokens 2 t and 2 t + 1.
template <typename Config>
__device__ __forceinline__ void multiply_values_fp32(const Parts<4>& weights,
                                                     const float (&shrink)[2], const uint8_t* slot,
                                                     int head_dim, int lane_idx,
                                                     Accumulator<Config>& sums) {
    constexpr int kSteps = kColumnsAtOnce / 8;
    const int token = 2 * (lane_idx & 3), column = lane_idx >> 2;
    const Parts<4> rows[1] = {weights};
#pragma unroll
    for (int j = 0; j < Config::kHeadDim / 8; j += kSteps) {
        if (8 * j >= head_dim) {
            continue;
        }
        uint32_t words[2 * kSteps];
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const int chunk = 2 * (j + i) + column / 4, inside = column % 4 * 4;
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                words[2 * i + t] = *reinterpret_cast<const uint32_t*>(
                    slot + swizzled<Config::kChunks>(token + t, chunk) + inside);
            }
        }
        Parts<2 * kSteps> values;
        values.split(words);
        float products[1][kSteps][4];
        multiply_parts(products, rows, values);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& out = sums.out[0][j + i][e];
                out = fmaf(out, shrink[e / 2], products[0][i][e]);
            }
        }
    }
}

// Fills the ring of one warp, keys and values in turn, a tile ahead of the page table. Lanes 0 .. 7
// know where the rows of keys lie, lanes 8 .. 15 those of values.
template <typename Config, typename Args>
struct TileLoaderFp32 {
    const Args& args;
    const float* head;
    int batch_idx;
    int token, end_token;  // of this lane's row in the next tile; where the segment ends
    int next_page;
    const float* row;  // this lane's; null: no such row
    uint32_t ring;
    int slot, lane_idx;
    bool is_outside;  // some page so far

    // Look up the page of the tile that starts at this lane's token.
    __device__ __forceinline__ void look_up() {
        next_page = batch_idx;
        if (args.block_table != nullptr && token < end_token) {
            next_page = __ldg(args.block_table + batch_idx * args.block_table_stride +
                              token / args.page_size);
        }
    }

    // Go on to the next tile, whose pages have been looked up. Rows of pages that are not there
    // become zeros.
    __device__ __forceinline__ void advance() {
        const bool is_key = lane_idx < Config::kTile;
        const int64_t page_stride = is_key ? args.k_cache_page_stride : args.v_cache_page_stride;
        const int64_t token_stride = is_key ? args.k_cache_token_stride : args.v_cache_token_stride;
        const int in_page = args.block_table == nullptr ? token : token % args.page_size;
        const bool is_there = is_index(next_page, args.num_pages);
        is_outside |= token < end_token && !is_there;
        row = token < end_token && is_there
                  ? head + next_page * page_stride + in_page * token_stride
                  : nullptr;
        token += Config::kUnit;
        look_up();
    }

    // Start the copies of this tile's keys (or values) into the next slot.
    template <bool kValues>
    __device__ __forceinline__ void issue() {
        const bool has_chunk = lane_idx * 4 < args.head_dim;
        const uint32_t target = ring + slot * Config::kSlotBytes;
#pragma unroll
        for (int i = 0; i < Config::kTile; ++i) {
            const uint64_t source = __shfl_sync(~0u, reinterpret_cast<uint64_t>(row),
                                                i + (kValues ? Config::kTile : 0));
            cp_async_16(target + swizzled<Config::kChunks>(i, lane_idx),
                        reinterpret_cast<const void*>(source + lane_idx * 16),
                        source != 0 && has_chunk, read_once_policy());
        }
        cp_async_commit();
        slot = slot + 1 == Config::kSlots ? 0 : slot + 1;
    }
};

}  // namespace kernel_hub::kv_cache::decode
