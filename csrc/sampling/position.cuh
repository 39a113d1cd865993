// A position as verifying drafts reads it: a row of logits and rows of draft probabilities, in
// fours of neighbours.
#pragma once

// NOTE: before anything of sampling/ is included.
#define KERNEL_HUB_SAMPLING_THREADS 256

#include "sampling/candidates.cuh"

namespace kernel_hub::sampling {

constexpr int kPieces = 128;  // of a position
constexpr int kLane = 4;      // neighbours that a lane takes: a four
constexpr int kStep = 32 * kLane;

// The first element of a part of `width`, behind `origin` and at most `limit`.
__device__ __forceinline__ int part_begin(int origin, int part, int width, int limit) {
    return static_cast<int>(
        min(static_cast<int64_t>(limit), origin + static_cast<int64_t>(part) * width));
}

constexpr int kLineBytes = 128;
constexpr int kFetched = 64;  // lines of a warp that are fetched to the L2 ahead

// Has the L2 fetch the lines of elements begin .. end - 1, at most kLines of them, for a warp.
template <int kLines>
__device__ __forceinline__ void fetch_ahead(const void* from, int64_t begin, int end,
                                            int item_bytes) {
    const int a_line = kLineBytes / item_bytes;
#pragma unroll
    for (int i = 0; i < kLines; i += 32) {
        const int64_t at = begin + (threadIdx.x % 32 + i) * a_line;
        if (at < end) {
            prefetch_l2(static_cast<const char*>(from) + at * item_bytes);
        }
    }
}

// What a position has. kIsPlain: all rows are of whole, aligned fours.
template <bool kIsPlain>
struct Position {
    const void* logits;        // (size), of `dtype`
    const float* draft_probs;  // of child 0; null: each is certain of itself
    int64_t draft_probs_stride;
    int size, dtype;

    __device__ __forceinline__ int elements_a_piece() const {
        constexpr int kLines = kPieces * 64;  // of whole lines
        return (size + kLines - 1) / kLines * 64;
    }

    __device__ __forceinline__ float value(int i) const { return load_element(logits, i, dtype); }
    __device__ __forceinline__ float draft(int child, int i) const {
        return draft_probs[child * draft_probs_stride + i];
    }

    // The bits of fours at, at + kStep .. as far as they begin before `end`; -inf in place of
    // others.
    template <int kNum>
    __device__ __forceinline__ void load(int at, int end, uint4 (&bits)[kNum]) const {
        const uint32_t none = dtype == kFp32   ? 0xff800000u
                              : dtype == kFp16 ? 0xfc00fc00u
                                               : 0xff80ff80u;
        // One question of the type for all of them.
        if (dtype == kFp32) {
            const uint32_t* from = static_cast<const uint32_t*>(logits) + at;
#pragma unroll
            for (int i = 0; i < kNum; ++i) {
                const int left = end - at - i * kStep;
                bits[i] = make_uint4(none, none, none, none);
                if (kIsPlain) {
                    if (left > 0) {
                        bits[i] = ld_global(from + i * kStep);
                    }
                } else {
                    read_some(from + i * kStep, left, bits[i].x, bits[i].y, bits[i].z, bits[i].w);
                }
            }
        } else {
            const uint16_t* from = static_cast<const uint16_t*>(logits) + at;
#pragma unroll
            for (int i = 0; i < kNum; ++i) {
                const int left = end - at - i * kStep;
                bits[i] = make_uint4(none, none, 0, 0);
                if (kIsPlain) {
                    if (left > 0) {
                        const uint2 two = *reinterpret_cast<const uint2*>(from + i * kStep);
                        bits[i].x = two.x;
                        bits[i].y = two.y;
                    }
                } else {
                    uint32_t words[kLane] = {none, none, none, none};
                    read_some(from + i * kStep, left, words[0], words[1], words[2], words[3]);
                    bits[i].x = words[1] << 16 | (words[0] & 0xffffu);
                    bits[i].y = words[3] << 16 | (words[2] & 0xffffu);
                }
            }
        }
    }

    // Likewise, q of a draft; 0 in place of others.
    template <int kNum>
    __device__ __forceinline__ void load_drafts(int child, int at, int end,
                                                uint4 (&bits)[kNum]) const {
        const float* from = draft_probs + child * draft_probs_stride + at;
#pragma unroll
        for (int i = 0; i < kNum; ++i) {
            const int left = end - at - i * kStep;
            bits[i] = make_uint4(0, 0, 0, 0);
            if (kIsPlain) {
                if (left > 0) {
                    bits[i] = ld_global(from + i * kStep);
                }
            } else {
                read_some(reinterpret_cast<const uint32_t*>(from) + i * kStep, left, bits[i].x,
                          bits[i].y, bits[i].z, bits[i].w);
            }
        }
    }

    template <int kNum>
    __device__ __forceinline__ void unpack(const uint4 (&bits)[kNum],
                                           float (&z)[kNum * kLane]) const {
        if (dtype == kFp32) {
            unpack_floats(bits, z);
        } else if (dtype == kFp16) {
#pragma unroll
            for (int i = 0; i < kNum; ++i) {
                Word<__half>::unpack(bits[i].x, z + i * kLane);
                Word<__half>::unpack(bits[i].y, z + i * kLane + 2);
            }
        } else {
#pragma unroll
            for (int i = 0; i < kNum; ++i) {
                Word<__nv_bfloat16>::unpack(bits[i].x, z + i * kLane);
                Word<__nv_bfloat16>::unpack(bits[i].y, z + i * kLane + 2);
            }
        }
    }

    template <int kNum>
    static __device__ __forceinline__ void unpack_floats(const uint4 (&bits)[kNum],
                                                         float (&z)[kNum * kLane]) {
#pragma unroll
        for (int i = 0; i < kNum; ++i) {
            z[i * kLane] = __uint_as_float(bits[i].x);
            z[i * kLane + 1] = __uint_as_float(bits[i].y);
            z[i * kLane + 2] = __uint_as_float(bits[i].z);
            z[i * kLane + 3] = __uint_as_float(bits[i].w);
        }
    }

  private:
    // As many of four neighbours as there are.
    template <typename T>
    static __device__ __forceinline__ void read_some(const T* from, int left, uint32_t& a,
                                                     uint32_t& b, uint32_t& c, uint32_t& d) {
        a = left > 0 ? from[0] : a;
        b = left > 1 ? from[1] : b;
        c = left > 2 ? from[2] : c;
        d = left > 3 ? from[3] : d;
    }
};

}  // namespace kernel_hub::sampling
