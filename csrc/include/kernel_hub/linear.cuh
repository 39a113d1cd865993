// What the bodies of linear share: the epilogue out = act(product + bias) + residual.
#pragma once

#include "kernel_hub/mma.cuh"
#include "kernel_hub/vec.cuh"

namespace kernel_hub {

// As kernel_hub/ops/linear.py numbers them.
enum Activation { kIdentity = 0, kGelu = 1, kSilu = 2, kRelu = 3 };

// x Phi(x), with the error function of Abramowitz and Stegun 7.1.26 (absolute error 1.5e-7).
__device__ __forceinline__ float gelu(float x) {
    constexpr float kLog2E = 1.44269504f;
    const float t = __fdividef(1.0f, 1.0f + 0.3275911f * 0.70710678f * fabsf(x));
    float tail = 1.061405429f;
    tail = tail * t - 1.453152027f;
    tail = tail * t + 1.421413741f;
    tail = tail * t - 0.284496736f;
    tail = tail * t + 0.254829592f;
    tail *= t * exp2_approx(-0.5f * kLog2E * x * x);
    // NOTE: the bound keeps inf * 0 out, and lets nan through `tail`.
    return fmaxf(x, 0.0f) - 0.5f * fminf(fabsf(x), 1e4f) * tail;
}

__device__ __forceinline__ float silu(float x) {
    constexpr float kLog2E = 1.44269504f;
    return __fdividef(x, 1.0f + exp2_approx(-kLog2E * x));
}

// One branch for many values: `activation` is the same for the whole grid.
template <int kCount>
__device__ __forceinline__ void activate(float (&values)[kCount], int activation) {
    if (activation == kGelu) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] = gelu(values[i]);
        }
    } else if (activation == kSilu) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] = silu(values[i]);
        }
    } else if (activation == kRelu) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] = values[i] < 0.0f ? 0.0f : values[i];  // nan stays nan
        }
    }
}

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

// Where results go and what is added to them: of T come a, b and the bias, of Out residual and out.
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

    // Writes one element of the product.
    __device__ __forceinline__ void write(int row, int column, float value) const {
        float values[1] = {value};
        if (bias && column < n) {
            values[0] += to_float(__ldg(bias + column));
        }
        activate(values, activation);
        put(row, column, values[0]);
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
        activate(values, activation);
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

    // Two rows of 8 columns, held as those of put_32. kSwaps: columns are rows of out.
    template <bool kSwaps>
    __device__ __forceinline__ void write_8(int row, int column, const float (&values)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = row + 8 * (i / 2), c = column + 2 * (threadIdx.x % 4) + i % 2;
            write(kSwaps ? c : r, kSwaps ? r : c, values[i]);
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

}  // namespace kernel_hub
