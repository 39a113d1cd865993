// Where a new token goes in a KV cache: by slots, by a table of pages, or behind what a contiguous
// cache holds. Portable to sm_80.
#pragma once

#include "kernel_hub/bounds.cuh"

namespace kernel_hub {

// What says where tokens go. No table: max_pages is -1; no positions, no slots: 0 bytes.
struct Routing {
    const void* positions;     // (num_tokens,) int32 or int64
    const int* cache_seqlens;  // (batch_size,)
    const void* slot_mapping;  // (num_tokens,) int32 or int64
    const int* block_table;    // (batch_size, max_pages)
    const int* cu_seqlens;     // (batch_size + 1,)
    int64_t block_table_stride;
    int batch_size, num_tokens, num_pages, page_size, max_pages, positions_bytes, slot_bytes;
    int* flag;  // what tables led outside (bounds.cuh), or null
};

// The tables as parameters of a kernel, and all of it as it is handed on.
// clang-format off: it would give each of them a line.
#define ROUTING_TABLES                                                                             \
    const void* positions, const int* cache_seqlens, const void* slot_mapping,                     \
    const int* block_table, const int* cu_seqlens
#define ROUTING_ARGUMENTS(NUM_TOKENS)                                                              \
    .positions = positions, .cache_seqlens = cache_seqlens, .slot_mapping = slot_mapping,          \
    .block_table = block_table, .cu_seqlens = cu_seqlens,                                          \
    .block_table_stride = block_table_stride, .batch_size = batch_size, .num_tokens = NUM_TOKENS,  \
    .num_pages = num_pages, .page_size = page_size, .max_pages = max_pages,                        \
    .positions_bytes = positions_bytes, .slot_bytes = slot_bytes, .flag = flag
// clang-format on

// Where one token is in its sequence and, of keys and values, where it goes.
struct Place {
    int64_t position;
    int page, row;   // row is -1 where the length has no page
    bool is_inside;  // of a sequence, whose length is not below 0
    bool is_stored;
    bool is_odd;  // cu_seqlens led outside
};

__device__ __forceinline__ int64_t read_index(const void* indices, int64_t i, int num_bytes) {
    return num_bytes == 8 ? __ldg(static_cast<const long long*>(indices) + i)
                          : __ldg(static_cast<const int*>(indices) + i);
}

// The last sequence that starts at or before the token.
__device__ __forceinline__ int find_sequence(const int* cu_seqlens, int batch_size, int token_idx) {
    int low = 0, high = batch_size;
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (__ldg(cu_seqlens + middle) <= token_idx) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

__device__ __forceinline__ Place find_place(const Routing& to, int token_idx, int batch_idx,
                                            int index, bool is_query) {
    Place place;
    place.is_inside = true;
    place.is_stored = place.is_odd = false;
    place.page = place.row = 0;
    if (to.cu_seqlens != nullptr) {
        batch_idx = find_sequence(to.cu_seqlens, to.batch_size, token_idx);
        const int start = __ldg(to.cu_seqlens + batch_idx);
        const int end = __ldg(to.cu_seqlens + batch_idx + 1);
        index = token_idx - start;
        place.is_inside = token_idx >= start && token_idx < end;
        place.is_odd = start < 0 || end > to.num_tokens;
    }
    int64_t in_sequence = index;
    if (to.cache_seqlens != nullptr) {
        const int length = __ldg(to.cache_seqlens + batch_idx);
        in_sequence += length;
        place.is_inside = place.is_inside && length >= 0;
    }
    place.position = in_sequence;
    if (to.positions_bytes != 0) {
        place.position = read_index(to.positions, token_idx, to.positions_bytes);
    }
    if (is_query) {
        return place;
    }

    const uint32_t page_size = to.page_size;
    if (to.slot_bytes != 0) {
        const int64_t slot = read_index(to.slot_mapping, token_idx, to.slot_bytes);
        place.page = static_cast<uint32_t>(slot) / page_size;
        place.row = static_cast<uint32_t>(slot) % page_size;
        place.is_stored = slot >= 0 && slot < static_cast<int64_t>(to.num_pages) * to.page_size;
    } else if (to.max_pages >= 0) {
        const uint32_t page_idx = static_cast<uint32_t>(in_sequence) / page_size;
        place.row = static_cast<uint32_t>(in_sequence) % page_size;
        place.is_stored =
            in_sequence >= 0 && in_sequence < static_cast<int64_t>(to.max_pages) * to.page_size;
        place.page = -1;
        if (!place.is_stored) {
            place.row = -1;
        } else {
            place.page = __ldg(to.block_table + batch_idx * to.block_table_stride + page_idx);
        }
        place.is_stored = is_index(place.page, to.num_pages);
    } else {
        place.page = batch_idx;
        place.row = static_cast<int>(in_sequence);
        place.is_stored = in_sequence >= 0 && in_sequence < to.page_size;
    }
    return place;
}

// Which table gave a key or value no place, as bits of Outside; row: its Place's. A function of its
// own because hardly any token needs it: a short launch pays more for code to fetch than for work.
__device__ __forceinline__ int find_missing(const Routing& to, int token_idx, int row) {
    if (to.slot_bytes != 0) {
        return read_index(to.slot_mapping, token_idx, to.slot_bytes) == -1 ? 0 : kSlotsOutside;
    }
    if (to.max_pages >= 0) {
        return row < 0 ? kLengthsOutside : kPagesOutside;
    }
    return to.page_size > 0 ? kLengthsOutside : 0;
}

}  // namespace kernel_hub
