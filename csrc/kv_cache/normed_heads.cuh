// A head that is normed and rotated in the registers of the threads that share it: two parts of
// kWidth neighbours a thread, in which every pair of the rotation lies.
#pragma once

#include "kernel_hub/e4m3.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/shared_reads.cuh"
#include "kernel_hub/vec.cuh"
#include "kv_cache/append_rows.cuh"

namespace kernel_hub::kv_cache {

// kCount neighbours of a parameter, T or fp32.
template <typename T, int kCount>
struct Parameters {
    float values[kCount];

    // As they are in memory, those of 16 bits in the first half, until `expand`: so that what is
    // done between the two does not wait for them.
    __device__ __forceinline__ void load(const void* from, int64_t first, int is_fp32) {
        if constexpr (kCount == 1) {
            values[0] = sizeof(T) == 2 && !is_fp32
                            ? to_float(__ldg(static_cast<const T*>(from) + first))
                            : __ldg(static_cast<const float*>(from) + first);
        } else {
            if constexpr (sizeof(T) == 2) {
                if (!is_fp32) {
                    load_words<kCount / 2>(static_cast<const T*>(from) + first);
                    return;
                }
            }
            load_words<kCount>(static_cast<const float*>(from) + first);
        }
    }
    __device__ __forceinline__ void expand(int is_fp32) {
        if constexpr (kCount > 1 && sizeof(T) == 2) {
            if (!is_fp32) {
#pragma unroll
                for (int i = kCount / 2 - 1; i >= 0; --i) {
                    Word<T>::unpack(__float_as_uint(values[i]), values + 2 * i);
                }
            }
        }
    }
    __device__ __forceinline__ void fill(float value) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] = value;
        }
    }

  private:
    template <int kWords>
    __device__ __forceinline__ void load_words(const void* address) {
        static_assert(kWords == 2 || kWords % 4 == 0, "read 8 or 16 bytes at a time");
        if constexpr (kWords == 2) {
            const float2 words = __ldg(static_cast<const float2*>(address));
            values[0] = words.x, values[1] = words.y;
        } else {
#pragma unroll
            for (int i = 0; i < kWords; i += 4) {
                const float4 words = __ldg(static_cast<const float4*>(address) + i / 4);
                values[i] = words.x, values[i + 1] = words.y;
                values[i + 2] = words.z, values[i + 3] = words.w;
            }
        }
    }
};

// Which elements of a head the two parts of a thread are, and which of them turn.
struct Parts {
    int first, second;
    bool has_first, has_second, turns_first, turns_second;
};

template <int kWidth, typename Args>
__device__ __forceinline__ Parts parts_at(const Args& args, int at) {
    const int half = args.rotary_dim / 2, span = (args.head_dim + 1) / 2;
    Parts parts;
    parts.has_first = at < span;
    if (kWidth > 1 && args.is_interleaved) {
        // Both halves of the head: pairs lie side by side in either.
        parts.first = at, parts.second = span + at;
        parts.turns_first = parts.has_first && at < args.rotary_dim;
        parts.turns_second = parts.has_first && parts.second < args.rotary_dim;
    } else {
        // The two sides of pairs while there are any, neighbours behind them.
        const int behind = args.rotary_dim + 2 * (at - half);
        const bool turns = parts.has_first && at < half;
        parts.first = !turns ? behind : args.is_interleaved ? 2 * at : at;
        parts.second = !turns ? behind + kWidth : args.is_interleaved ? 2 * at + 1 : half + at;
        parts.turns_first = parts.turns_second = turns;
    }
    parts.has_second = parts.has_first && (kWidth > 1 || parts.second < args.head_dim);
    return parts;
}

// Four floats. NOTE: volatile: otherwise what all rounds read is kept in 32 registers.
__device__ __forceinline__ void read_shared(const float* shared, float (&values)[4]) {
    const int4 bits = ld_shared_volatile(shared_address(shared));
    values[0] = __int_as_float(bits.x), values[1] = __int_as_float(bits.y);
    values[2] = __int_as_float(bits.z), values[3] = __int_as_float(bits.w);
}

// What a head of one kind is multiplied by.
template <typename T, int kWidth>
struct NormWeight {
    const void* values;  // (head_dim,), T or fp32; null: 1, whatever the offset
    int is_fp32;
    float offset;
    float* shared;  // all of them, for vectors

    __device__ __forceinline__ float at(int column) const {
        Parameters<T, 1> found;
        found.values[0] = 1.0f - offset;
        if (values != nullptr) {
            found.load(values, column, is_fp32);
        }
        return found.values[0] + offset;
    }
    __device__ __forceinline__ void read(int first, bool exists, float (&factors)[kWidth]) const {
        if constexpr (kWidth == 1) {
            factors[0] = exists ? at(first) : 1.0f;
        } else {
#pragma unroll
            for (int j = 0; j < kWidth; j += 4) {
                float found[4];
                read_shared(shared + first + j, found);
                factors[j] = found[0], factors[j + 1] = found[1];
                factors[j + 2] = found[2], factors[j + 3] = found[3];
            }
        }
    }
};

// The cosines and sines of a thread's pairs. Of vectors one thread puts them in shared memory, for
// all heads of its token: 16 registers fewer from one round to the next.
template <typename T, int kWidth>
struct Angles {
    static constexpr int kRuns = kWidth > 1 ? 2 : 1, kRun = kWidth / kRuns;
    Parameters<T, kRun> cos[kRuns], sin[kRuns];

    template <typename Args>
    __device__ __forceinline__ void load(const Args& args, const Parts& parts, int at,
                                         int64_t position, bool is_known) {
        const int64_t row = is_known ? position * args.table_stride : 0;
        // Half-split: a run of entries in two pieces; interleaved: a piece for each part.
        const bool is_apart = kWidth > 1 && args.is_interleaved;
        const int64_t places[2] = {row + (is_apart ? parts.first / 2 : at),
                                   row + (is_apart ? parts.second / 2 : at + kRun)};
#pragma unroll
        for (int i = 0; i < kRuns; ++i) {
            if (i == 0 ? parts.turns_first : parts.turns_second) {
                cos[i].load(args.cos, places[i], args.is_table32);
                sin[i].load(args.sin, places[i], args.is_table32);
            }
        }
    }
    __device__ __forceinline__ void expand(int is_fp32, bool is_known) {
#pragma unroll
        for (int i = 0; i < kRuns; ++i) {
            cos[i].expand(is_fp32);
            sin[i].expand(is_fp32);
            if (!is_known) {
                cos[i].fill(__uint_as_float(0x7fffffff));
                sin[i].fill(__uint_as_float(0x7fffffff));
            }
        }
    }
    // shared: 2 * kWidth floats of this thread's.
    __device__ __forceinline__ void put(float* shared) const {
#pragma unroll
        for (int i = 0; i < kRuns; ++i) {
#pragma unroll
            for (int j = 0; j < kRun; ++j) {
                shared[i * kRun + j] = cos[i].values[j];
                shared[kWidth + i * kRun + j] = sin[i].values[j];
            }
        }
    }
};

// Turns a pair, the whole of a thread's two parts.
template <typename T, typename Args>
__device__ __forceinline__ void rotate(float (&values)[2][1], const Args&, const Parts& parts,
                                       const Angles<T, 1>& angles, const float*) {
    if (parts.turns_first) {
        turn(values[0][0], values[1][0], angles.cos[0].values[0], angles.sin[0].values[0]);
    }
}

// Turns the pairs of two vectors. shared: what `put` put there.
template <typename T, int kWidth, typename Args>
__device__ __forceinline__ void rotate(float (&values)[2][kWidth], const Args& args,
                                       const Parts& parts, const Angles<T, kWidth>&,
                                       const float* shared) {
    if (!parts.turns_first) {  // the second does not turn alone
        return;
    }
#pragma unroll
    for (int i = 0; i < kWidth; i += 4) {
        float cos[4], sin[4];
        read_shared(shared + i, cos);
        read_shared(shared + kWidth + i, sin);
        if (!args.is_interleaved) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                turn(values[0][i + j], values[1][i + j], cos[j], sin[j]);
            }
            continue;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int part = 2 * (i + j) / kWidth, at = 2 * (i + j) % kWidth;
            if (part == 0 || parts.turns_second) {
                turn(values[part][at], values[part][at + 1], cos[j], sin[j]);
            }
        }
    }
}

// A thread's elements of a head, as they are in memory.
template <typename T, int kWidth>
struct Head {
    using HeadAccess = Access<T, kWidth>;
    typename HeadAccess::Bits bits[2];

    __device__ __forceinline__ void load(const T* head, const Parts& parts, bool exists) {
        if constexpr (kWidth == 1) {
            bits[0] = bits[1] = from_float<T>(0.0f);
        } else {
            bits[0] = bits[1] = make_uint4(0, 0, 0, 0);
        }
        if (exists && parts.has_first) {
            bits[0] = HeadAccess::read(head + parts.first);
        }
        if (exists && parts.has_second) {
            bits[1] = HeadAccess::read(head + parts.second);
        }
    }
    // NOTE: without this the compiler keeps a head as floats from the sum of its squares on: 16
    // registers, not 8.
    __device__ __forceinline__ void keep_packed() {
        if constexpr (kWidth > 1) {
#pragma unroll
            for (uint4& part : bits) {
                asm volatile("" : "+r"(part.x), "+r"(part.y), "+r"(part.z), "+r"(part.w));
            }
        }
    }
    __device__ __forceinline__ void unpack(float (&values)[2][kWidth]) const {
        HeadAccess::unpack(bits[0], values[0]);
        HeadAccess::unpack(bits[1], values[1]);
    }
    __device__ __forceinline__ float sum_of_squares() const {
        float values[2][kWidth], sum = 0.0f;
        unpack(values);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                sum = fmaf(values[part][j], values[part][j], sum);
            }
        }
        return sum;
    }
    // Norms by the inverse of the root mean square, and turns, what was unpacked.
    template <typename Args>
    __device__ __forceinline__ void finish(float (&values)[2][kWidth], const Args& args,
                                           const Parts& parts, float inverse,
                                           const NormWeight<T, kWidth>& weight,
                                           const Angles<T, kWidth>& angles,
                                           const float* shared_angles) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            float factors[kWidth];
            weight.read(part == 0 ? parts.first : parts.second,
                        part == 0 ? parts.has_first : parts.has_second, factors);
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                values[part][j] *= inverse * factors[j];
            }
        }
        rotate<T>(values, args, parts, angles, shared_angles);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            if constexpr (kWidth == 1) {
                bits[part] = from_float<T>(values[part][0]);
            } else {
                bits[part] = pack<T>(values[part]);
            }
        }
    }
    __device__ __forceinline__ void write(T* head, const Parts& parts) const {
        if (parts.has_first) {
            HeadAccess::write_bits(head + parts.first, bits[0]);
        }
        if (parts.has_second) {
            HeadAccess::write_bits(head + parts.second, bits[1]);
        }
    }
    // To a cache, `at` elements from its first: as the bits are, or of e4m3 `values`.
    __device__ __forceinline__ void store(void* cache, int64_t at, const Parts& parts, int is_e4m3,
                                          float (&values)[2][kWidth], float inverse_scale) const {
        if (!is_e4m3) {
            write(static_cast<T*>(cache) + at, parts);
            return;
        }
        __nv_fp8_e4m3* head = static_cast<__nv_fp8_e4m3*>(cache) + at;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            if (part == 0 ? parts.has_first : parts.has_second) {
#pragma unroll
                for (int j = 0; j < kWidth; ++j) {
                    values[part][j] *= inverse_scale;
                }
                write_e4m3(head + (part == 0 ? parts.first : parts.second), values[part]);
            }
        }
    }
};

// Sums of two heads over the threads that share them; every lane of the warp calls this.
__device__ __forceinline__ void add_lanes(float& sum_a, float& sum_b) {
#pragma unroll 1
    for (int lanes = blockDim.x / 2; lanes > 0; lanes /= 2) {
        sum_a += __shfl_xor_sync(~0u, sum_a, lanes);
        sum_b += __shfl_xor_sync(~0u, sum_b, lanes);
    }
}

}  // namespace kernel_hub::kv_cache
