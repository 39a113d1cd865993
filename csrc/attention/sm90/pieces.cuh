// flash_attention_sm90.cu: what a consumer keeps of a tile, and a piece of a tile in memory.
#pragma once

#include <stdint.h>

namespace kernel_hub::attention::sm90 {

// What a consumer keeps of a tile: the rest it reads again where it needs it.
struct Range {
    // Of the thread's first row, or split of the tile's first token: the key that stands under the
    // query; none: kOver.
    int diagonal;
    int seqlen_k, block_begin, block_end;

    static constexpr int kOver = -2147483647;
    __device__ __forceinline__ bool is_valid() const { return diagonal != kOver; }
};

// A piece of a tile in memory (split): sums as the threads hold them, 16 rows after 16 rows, four
// of a lane together; then of each row the shift of its exponents and the sum of its probabilities.
struct Pieces {
    float* begin;
    int rows, width;  // of a piece, and of the sums of a row

    __device__ __forceinline__ float* piece(int slot) const {
        return begin + static_cast<int64_t>(slot) * (rows * (width + 2));
    }
    __device__ __forceinline__ float4* sums(int slot, int strip, int lane_idx) const {
        return reinterpret_cast<float4*>(piece(slot)) + strip * 4 * width + lane_idx;
    }
    __device__ __forceinline__ float2* states(int slot) const {
        return reinterpret_cast<float2*>(piece(slot) + rows * width);
    }
};

}  // namespace kernel_hub::attention::sm90
