// Fours of heads, and their sums of squares over lanes, for append_vecs.cuh.
#pragma once

#include "kernel_hub/access_8.cuh"
#include "kernel_hub/reduce.cuh"
#include "kernel_hub/vec.cuh"
#include "kv_cache/append_rows.cuh"

namespace kernel_hub::kv_cache {

constexpr int kSlots = 4;         // heads of a lane at a time
constexpr int kMostThreads = 96;  // of a block

// Four neighbours as they are in memory.
template <typename T>
struct Four {
    uint32_t words[sizeof(T)];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (uint32_t& word : words) {
            word = 0;
        }
    }
    __device__ __forceinline__ void read(const T* address) {
        if constexpr (sizeof(T) == 4) {
            const uint4 bits = ld_global(address);
            words[0] = bits.x, words[1] = bits.y, words[2] = bits.z, words[3] = bits.w;
        } else {
            const uint2 bits = ld_global_8(address);
            words[0] = bits.x, words[1] = bits.y;
        }
    }
    __device__ __forceinline__ void write(void* address) const {
        if constexpr (sizeof(T) == 4) {
            st_global(address, make_uint4(words[0], words[1], words[2], words[3]));
        } else {
            st_global_8(address, make_uint2(words[0], words[1]));
        }
    }
    // NOTE: otherwise the compiler keeps them as floats from the first `unpack` on.
    __device__ __forceinline__ void keep() {
#pragma unroll
        for (uint32_t& word : words) {
            asm volatile("" : "+r"(word));
        }
    }
    __device__ __forceinline__ void unpack(float (&values)[4]) const {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) {
            Word<T>::unpack(words[i], values + i * Word<T>::kElems);
        }
    }
    __device__ __forceinline__ void pack(const float (&values)[4]) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) {
            words[i] = Word<T>::pack(values + i * Word<T>::kElems);
        }
    }
};

// Where the two fours of a lane are in a head: the first, and the second behind it.
template <bool kIsInterleaved>
struct Fours {
    int first, apart;
    bool exist, turn;

    template <typename Args>
    __device__ __forceinline__ Fours(const Args& args, int at) {
        const int half = args.rotary_dim / 2;
        exist = 2 * at < args.head_dim;
        turn = exist && at < half;
        if (at >= half) {
            first = half + at, apart = args.head_dim / 2 - half;
        } else if (kIsInterleaved) {
            first = 2 * at, apart = 4;
        } else {
            first = at, apart = half;
        }
    }
};

// What a lane's elements are multiplied by, and what the other ones of their pairs, before the two
// are added: products of weights and angles.
template <bool kIsInterleaved>
struct Factors {
    float same[2][4], other[2][4];

    // weights: of the elements; where these turn not `same` alone is meant.
    __device__ __forceinline__ void turn(const float (&cos)[4], const float (&sin)[4]) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const Pair at(pair);
            const float a = same[at.a_part][at.a], b = same[at.b_part][at.b];
            same[at.a_part][at.a] = a * cos[pair];
            same[at.b_part][at.b] = b * cos[pair];
            other[at.a_part][at.a] = b * -sin[pair];
            other[at.b_part][at.b] = a * sin[pair];
        }
    }
    __device__ __forceinline__ void apply(float (&values)[2][4]) const {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const Pair at(pair);
            const float a = values[at.a_part][at.a], b = values[at.b_part][at.b];
            values[at.a_part][at.a] =
                fmaf(a, same[at.a_part][at.a], __fmul_rn(b, other[at.a_part][at.a]));
            values[at.b_part][at.b] =
                fmaf(b, same[at.b_part][at.b], __fmul_rn(a, other[at.b_part][at.b]));
        }
    }

  private:
    struct Pair {
        int a_part, a, b_part, b;

        __device__ __forceinline__ explicit Pair(int pair) {
            a_part = kIsInterleaved ? pair / 2 : 0, a = kIsInterleaved ? 2 * pair % 4 : pair;
            b_part = kIsInterleaved ? a_part : 1, b = kIsInterleaved ? a + 1 : pair;
        }
    };
};

// The squares of four neighbours' elements, added for each slot (of the first two alone unless
// has_upper); a lane is left with the sum of slot lane % 4.
template <typename T>
__device__ __forceinline__ float square_neighbours(Four<T> (&bits)[kSlots][2], bool has_upper) {
    float sums[kSlots] = {};
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
        if (slot < 2 || has_upper) {
            float values[2][4];
            bits[slot][0].unpack(values[0]);
            bits[slot][1].unpack(values[1]);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sums[slot] = fmaf(values[i / 4][i % 4], values[i / 4][i % 4], sums[slot]);
            }
            bits[slot][0].keep();
            bits[slot][1].keep();
        }
    }
    const bool is_upper = threadIdx.x & 2, is_odd = threadIdx.x & 1;
    float low = is_upper ? sums[2] : sums[0], high = is_upper ? sums[3] : sums[1];
    low += __shfl_xor_sync(~0u, is_upper ? sums[0] : sums[2], 2);
    high += __shfl_xor_sync(~0u, is_upper ? sums[1] : sums[3], 2);
    return (is_odd ? high : low) + __shfl_xor_sync(~0u, is_odd ? low : high, 1);
}

// Sums of all four neighbours of a head, of which a lane has its slot's.
struct HeadSums {
    uint32_t steps;  // over the lanes of a head in one warp; more than there are: by shared memory

    __device__ __forceinline__ HeadSums() {
        const uint32_t lanes = blockDim.x;
        steps = (lanes > 4) + (lanes > 8) + (lanes > 16);
        if ((lanes & (lanes - 1)) != 0 || lanes > kWarpSize) {
            steps = 4;
        }
        // NOTE: kept, or it is found anew between one shuffle and the next.
        asm volatile("" : "+r"(steps));
    }
    __device__ __forceinline__ float add(float sum) const {
        if (steps > 3) {
            __shared__ float sums[kMostThreads];
            const int lanes = blockDim.x;
            const int first = lanes * (threadIdx.y + blockDim.y * threadIdx.z);
            sums[first + threadIdx.x] = sum;
            __syncthreads();
            sum = 0.0f;
#pragma unroll 1
            for (int i = threadIdx.x % kSlots; i < lanes; i += 3 * kSlots) {
                float found[3];
#pragma unroll
                for (int j = 0; j < 3; ++j) {
                    found[j] = i + j * kSlots < lanes ? sums[first + i + j * kSlots] : 0.0f;
                }
                sum += found[0], sum += found[1], sum += found[2];
            }
        } else if (steps > 0) {
            sum += __shfl_xor_sync(~0u, sum, 4);
            if (steps > 1) {
                sum += __shfl_xor_sync(~0u, sum, 8);
                if (steps > 2) {
                    sum += __shfl_xor_sync(~0u, sum, 16);
                }
            }
        }
        return sum;
    }
    // Before more are added.
    __device__ __forceinline__ void wait() const {
        if (steps > 3) {
            __syncthreads();
        }
    }
};

// What the lane of a slot has, of the four neighbours.
__device__ __forceinline__ float of_slot(float value, int slot) {
    return __shfl_sync(~0u, value, slot, kSlots);
}

}  // namespace kernel_hub::kv_cache
