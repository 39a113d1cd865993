// What the bodies of linear share: the epilogue out = act(product + bias) + residual.
#pragma once

#include "kernel_hub/mma.cuh"
#include "kernel_hub/ptx.cuh"
#include "kernel_hub/vec.cuh"
#include "matmul/activation.cuh"

namespace kernel_hub::matmul {

// A 4x4 transpose over four neighbouring lanes: lane q gives words[j] and gets word q of lane j.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int q) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t got = __shfl_xor_sync(~0u, q & 1 ? words[i] : words[i + 1], 1);
        words[i] = q & 1 ? got : words[i];
        words[i + 1] = q & 1 ? words[i + 1] : got;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t got = __shfl_xor_sync(~0u, q & 2 ? words[i] : words[i + 2], 2);
        words[i] = q & 2 ? got : words[i];
        words[i + 2] = q & 2 ? words[i + 2] : got;
    }
}

template <int kGroup, typename At>
__device__ __forceinline__ void copy_group(float (&values)[16], const At& at) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        values[i] = at(16 * kGroup + i);
    }
}

// values = at(16 group), at(16 group + 1), ..., where `at` reads registers by constant indices.
// NOTE: a jump and 16 moves. What is done with the values can then be in a loop: straight code for
// each group is several times larger, and misses the instruction cache.
template <int kGroups, typename At>
__device__ __forceinline__ void pick(float (&values)[16], int group, const At& at) {
    static_assert(kGroups <= 10, "cases are missing");
#define KH_PICK(GROUP)                     \
    case GROUP:                            \
        if constexpr (GROUP < kGroups) {   \
            copy_group<GROUP>(values, at); \
        }                                  \
        break;
    switch (group) {
        KH_PICK(0)
        KH_PICK(1)
        KH_PICK(2)
        KH_PICK(3)
        KH_PICK(4)
        KH_PICK(5)
        KH_PICK(6)
        KH_PICK(7)
        KH_PICK(8)
        KH_PICK(9)
    }
#undef KH_PICK
}

// Where results go and what is added to them. a, b and the bias are of T, residual and out of Out.
template <typename T, typename Out>
struct Epilogue {
    Out* out;             // (m, n)
    const T* bias;        // (n,) or null
    const Out* residual;  // (m, n) or null
    int64_t out_stride, residual_stride;
    int m, n, activation;
    bool is_aligned;  // n, strides and addresses allow accesses of 16 bytes

    __device__ __forceinline__ Epilogue(Out* out, const T* bias, const Out* residual,
                                        int64_t out_stride, int64_t residual_stride, int m, int n,
                                        int activation)
        : out(out),
          bias(bias),
          residual(residual),
          out_stride(out_stride),
          residual_stride(residual_stride),
          m(m),
          n(n),
          activation(activation) {
        const uint64_t addresses = reinterpret_cast<uint64_t>(out) |
                                   reinterpret_cast<uint64_t>(bias) |
                                   reinterpret_cast<uint64_t>(residual);
        is_aligned = ((n | out_stride | residual_stride) % 8 | addresses % 16) == 0;
    }

    // Writes one element, complete but for the residual.
    __device__ __forceinline__ void put(int64_t row, int column, float value) const {
        if (row < m && column < n) {
            const float more = residual ? to_float(residual[row * residual_stride + column]) : 0.0f;
            out[row * out_stride + column] = from_float<Out>(value + more);
        }
    }

    // Writes one element.
    __device__ __forceinline__ void put_complete(int64_t row, int column, float value) const {
        if (row < m && column < n) {
            out[row * out_stride + column] = from_float<Out>(value);
        }
    }

    // Whether results are aligned products, rounded.
    __device__ __forceinline__ bool is_plain() const {
        return is_aligned && !bias && !residual && activation == kIdentity;
    }

    // Whether the residual is read 16 bytes at a time, and added before put_32.
    __device__ __forceinline__ bool adds_vectors() const {
        return sizeof(Out) == 2 && residual && is_aligned;
    }

    // Two rows of 32 columns as tensor cores leave them: lane l of a warp holds, of columns
    // 8 j + 2 (l % 4) and the next one, values[4 j], [4 j + 1] of `row` and [4 j + 2], [4 j + 3] of
    // row + 8. `column` is the first of the 32. All lanes of a warp call this, then put_32.
    __device__ __forceinline__ void finish_32(int row, int column, float (&values)[16]) const {
        uint4 added[2];
        if (adds_vectors()) {
            load_residual(row, column, added);
        }
        if (bias) {
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                words[j] = bias_pair(column + 8 * j + 2 * (threadIdx.x % 4));
            }
            add_pairs(words, values);
        }
        activate<Out>(values, activation);
        if (adds_vectors()) {
            add_residual(added, values);
        }
    }

    // Words of two elements of the bias, 256 columns apart, from `column` on.
    template <int kWords>
    __device__ __forceinline__ void load_bias(int column, uint32_t (&words)[kWords]) const {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            words[i] = bias_pair(column + 256 * i);
        }
    }

    // Adds the bias of 32 columns to values held as those of finish_32.
    __device__ __forceinline__ void add_bias(const uint32_t* pairs, float (&values)[16]) const {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            words[j] = pairs[4 * j + threadIdx.x % 4];
        }
        add_pairs(words, values);
    }

    // 8 columns of each of two rows; a lane's are not those it adds.
    __device__ __forceinline__ void load_residual(int row, int column, uint4 (&added)[2]) const {
        const int at = column + threadIdx.x % 4 * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int64_t from = row + 8 * half;
            added[half] = make_uint4(0, 0, 0, 0);
            if (from < m && at < n) {
                added[half] = ld_global(residual + from * residual_stride + at);
            }
        }
    }

    // Adds them, after a transpose over each four lanes.
    __device__ __forceinline__ void add_residual(const uint4 (&added)[2],
                                                 float (&values)[16]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t words[4] = {added[half].x, added[half].y, added[half].z, added[half].w};
            transpose_quad(words, threadIdx.x % 4);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float pair[2] = {};
                if constexpr (sizeof(Out) == 2) {
                    Word<Out>::unpack(words[j], pair);
                }
                values[4 * j + 2 * half] += pair[0];
                values[4 * j + 2 * half + 1] += pair[1];
            }
        }
    }

    // Adds what finish_32 left out, and writes.
    __device__ __forceinline__ void put_32(int row, int column, float (&values)[16]) const {
        if (is_aligned) {
            put_32_aligned(row, column, values);
        } else {
            put_32_scalar(row, column, values);
        }
    }

    __device__ __forceinline__ void put_32_aligned(int row, int column, float (&values)[16]) const {
        if constexpr (sizeof(Out) == 4) {
            put_32_floats(row, column, values);
        } else {
            put_32_vectors(row, column, values);
        }
    }

    __device__ __forceinline__ void put_32_scalar(int row, int column, float (&values)[16]) const {
        const int first = column + threadIdx.x % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int64_t at = row + 8 * half;
            if (at < m) {
                Out* to = out + at * out_stride + first;
                const Out* from = residual + at * residual_stride + first;
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int offset = i / 2 * 8 + i % 2;
                    if (first + offset < n) {
                        float value = values[i / 2 * 4 + 2 * half + i % 2];
                        if (residual) {
                            value += to_float(from[offset]);
                        }
                        to[offset] = from_float<Out>(value);
                    }
                }
            }
        }
    }

  private:
    __device__ __forceinline__ uint32_t bias_pair(int column) const {
        if (is_aligned) {
            return column < n ? __ldg(reinterpret_cast<const uint32_t*>(bias + column)) : 0;
        }
        const uint16_t* elements = reinterpret_cast<const uint16_t*>(bias) + column;
        const uint32_t low = column < n ? __ldg(elements) : 0;
        const uint32_t high = column + 1 < n ? __ldg(elements + 1) : 0;
        return low | high << 16;
    }

    __device__ __forceinline__ void add_pairs(const uint32_t (&words)[4],
                                              float (&values)[16]) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float pair[2];
            Word<T>::unpack(words[j], pair);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                values[4 * j + i] += pair[i % 2];
            }
        }
    }

    __device__ __forceinline__ void put_32_floats(int row, int column, float (&values)[16]) const {
#pragma unroll
        for (int i = 0; i < 16; i += 2) {
            const int64_t to = row + 8 * (i / 2 % 2);
            const int at = column + 8 * (i / 4) + 2 * (threadIdx.x % 4);
            if (to < m && at < n) {
                float2 pair = make_float2(values[i], values[i + 1]);
                if (residual) {
                    const float2 more =
                        *reinterpret_cast<const float2*>(residual + to * residual_stride + at);
                    pair.x += more.x;
                    pair.y += more.y;
                }
                *reinterpret_cast<float2*>(out + to * out_stride + at) = pair;
            }
        }
    }

    // A transpose over each four lanes, then 16 bytes a lane.
    __device__ __forceinline__ void put_32_vectors(int row, int column, float (&values)[16]) const {
        const int q = threadIdx.x % 4;
        const int at = column + 8 * q;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int64_t to = row + 8 * half;
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                words[j] = pack2<Out>(values[4 * j + 2 * half], values[4 * j + 2 * half + 1]);
            }
            transpose_quad(words, q);
            if (to < m && at < n) {
                st_global(out + to * out_stride + at,
                          make_uint4(words[0], words[1], words[2], words[3]));
            }
        }
    }
};

}  // namespace kernel_hub::matmul
