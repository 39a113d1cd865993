// Which keys the rows of a decode step see: all of the cache before the new tokens, and of those
// the ones whose bits are set. What a token sees is its sequence: by that its place is counted.
#pragma once

#include <stdint.h>

namespace kernel_hub::kv_cache::decode {

// The new tokens of a sequence, as its rows see them.
struct NewTokens {
    int first;  // where the first lies, or where the cache ends: all see the keys before it
    int end;    // behind the last that is in the cache
    // Of a row's bits, those of tokens that are in the cache.
    __device__ __forceinline__ uint32_t inside(uint32_t bits) const {
        return bits & ((1u << (end - first)) - 1);
    }
    // Behind the last key of a row: its own, if it sees that.
    __device__ __forceinline__ int end_of(uint32_t bits) const {
        return min(first + max(__popc(bits), 1), end);
    }
    // A bit for each of 32 keys from `token0` on; bits: of the row.
    __device__ __forceinline__ uint32_t seen_from(uint32_t bits, int token0) const {
        const int at = first - token0;
        bits = inside(bits);
        if (at <= 0) {
            return at > -32 ? bits >> -at : 0;
        }
        return at >= 32 ? ~0u : bits << at | ((1u << at) - 1);
    }
    // How far behind a new key, the n-th, a row of such bits is: so many of its own lie between.
    __device__ __forceinline__ int distance_to(int n, uint32_t bits) const {
        return __popc(inside(bits) >> min(n + 1, 31));
    }
};

}  // namespace kernel_hub::kv_cache::decode
