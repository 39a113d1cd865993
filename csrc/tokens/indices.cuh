// Indices of int32 or int64 that lie on the device, and the bits of a flag of tables that only this
// room reads.
#pragma once

#include "kernel_hub/bounds.cuh"

namespace kernel_hub::tokens {

// Beside those of kernel_hub/bounds.cuh, and numbered with them.
enum Outside : int {
    kIdsOutside = 1 << 10,  // ids
};

// Element `at` of a table of int32 or int64.
__device__ __forceinline__ int64_t load_index(const void* table, int64_t at, int bytes) {
    return bytes == 8 ? __ldg(static_cast<const long long*>(table) + at)
                      : __ldg(static_cast<const int*>(table) + at);
}

// Whether `index` is one of `count`.
__device__ __forceinline__ bool is_wide_index(int64_t index, int count) {
    return static_cast<uint64_t>(index) < static_cast<uint64_t>(count);
}

}  // namespace kernel_hub::tokens
