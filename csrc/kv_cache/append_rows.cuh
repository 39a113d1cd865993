// Rows of heads as an append reads and writes them.
#pragma once

#include <stdint.h>

namespace kernel_hub::kv_cache {

// Rows of q, k or v: (batch, seqlen, heads, head_dim); of a cache: (pages, page_size, heads,
// head_dim). Strides in elements.
template <typename Pointer>
struct Rows {
    Pointer data;
    int64_t outer_stride, row_stride, head_stride;

    __device__ __forceinline__ Pointer at(int64_t outer, int64_t row) const {
        return data + outer * outer_stride + row * row_stride;
    }
};

}  // namespace kernel_hub::kv_cache
