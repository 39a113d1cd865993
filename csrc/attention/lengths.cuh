// Where a sequence's queries and keys lie, for kernels whose parameters P name cu_seqlens_q,
// cu_seqlens_k, cache_seqlens, seqlen_q, seqlen_k, total_q and total_k.
#pragma once

#include "kernel_hub/bounds.cuh"

namespace kernel_hub::attention {

template <class P>
__device__ __forceinline__ RowRange find_queries(const P& p, int batch) {
    if (!p.cu_seqlens_q) {
        return {0, p.seqlen_q, false};
    }
    return find_rows(p.cu_seqlens_q, batch, p.total_q);
}

template <class P>
__device__ __forceinline__ RowRange find_keys(const P& p, int batch) {
    if (p.cache_seqlens) {
        const int length = p.cache_seqlens[batch];
        return {0, max(0, min(length, p.seqlen_k)), !is_index(length, p.seqlen_k + 1)};
    }
    if (!p.cu_seqlens_k) {
        return {0, p.seqlen_k, false};
    }
    return find_rows(p.cu_seqlens_k, batch, p.total_k);
}

}  // namespace kernel_hub::attention
