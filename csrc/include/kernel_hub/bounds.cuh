// Tables that lie on the device may say anything. What they say is held against what is there
// before it becomes an address: what is outside counts as masked, or is not written, and the kernel
// says so in its flag. Portable to sm_80.
#pragma once

#include "kernel_hub/ptx.cuh"

namespace kernel_hub {

// Bits of a flag, by the table that led outside. kernel_hub/ops/core/bounds.py names them in this
// order.
enum Outside : int {
    kPagesOutside = 1 << 0,      // block_table
    kLengthsOutside = 1 << 1,    // cache_seqlens
    kQueriesOutside = 1 << 2,    // cu_seqlens_q
    kKeysOutside = 1 << 3,       // cu_seqlens_k
    kTokensOutside = 1 << 4,     // cu_seqlens
    kSlotsOutside = 1 << 5,      // slot_mapping
    kPositionsOutside = 1 << 6,  // positions
    kOffsetsOutside = 1 << 7,    // offsets
    kExpertsOutside = 1 << 8,    // experts
    kRowsOutside = 1 << 9,       // row_id_map
};

// Leaves bits of Outside in the flag (null: nowhere) if there are any. Without a branch.
__device__ __forceinline__ void report(int* flag, int outside) {
    red_or_if(outside != 0 && flag != nullptr, flag, outside);
}

// Leaves `what` there if something is outside.
__device__ __forceinline__ void report_if(int* flag, bool is_outside, Outside what) {
    red_or_if(is_outside && flag != nullptr, flag, what);
}

// Whether `index` is one of `count`.
__device__ __forceinline__ bool is_index(int index, int count) {
    return static_cast<uint32_t>(index) < static_cast<uint32_t>(count);
}

// Rows start .. start + count - 1.
struct RowRange {
    int start, count;
    bool is_outside;  // the bounds were not what they should be
};

// The rows of sequence `index`, bounds[index] to bounds[index + 1]. Bounds that fall, or lie
// outside the `total` rows there are, are those of no rows.
__device__ __forceinline__ RowRange find_rows(const int* bounds, int index, int total) {
    const uint32_t start = bounds[index], end = bounds[index + 1];
    const bool is_right = start <= end && end <= static_cast<uint32_t>(total);
    return {static_cast<int>(start), is_right ? static_cast<int>(end - start) : 0, !is_right};
}

}  // namespace kernel_hub
