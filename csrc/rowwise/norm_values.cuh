// What becomes of the values of a row once its norm is known: weight and bias.
#pragma once

#include <limits.h>

#include "kernel_hub/vec.cuh"
#include "rowwise/quantised.cuh"
#include "rowwise/row_elements.cuh"

namespace kernel_hub::rowwise {

template <typename T, typename Out>
struct NormParams {
    Out* out;            // (outer, num_rows, hidden_size), T or EightBits
    float* out_scale;    // (outer, num_rows), where Out is EightBits
    T* residual_out;     // like out, or null
    const T* x;          // same shape
    const T* residual;   // same shape, or null
    const void* weight;  // (hidden_size,), T or fp32, or null
    const void* bias;    // the same
    int64_t out_stride, out_outer_stride;
    int64_t scale_stride, scale_outer_stride;
    int64_t residual_out_stride, residual_out_outer_stride;
    int64_t x_stride, x_outer_stride;
    int64_t residual_stride, residual_outer_stride;
    int num_rows;
    int hidden_size;
    int is_weight32;  // weight and bias are fp32
    int adds_after;   // out = residual + norm(x)
    int is_int8;      // what EightBits are, else e4m3
    float eps;
    float weight_offset;

    // NOTE: what is null is not null afterwards.
    __device__ __forceinline__ void select_row(int64_t outer_idx, int64_t row_idx) {
        out += outer_idx * out_outer_stride + row_idx * out_stride;
        out_scale += outer_idx * scale_outer_stride + row_idx * scale_stride;
        residual_out += outer_idx * residual_out_outer_stride + row_idx * residual_out_stride;
        x += outer_idx * x_outer_stride + row_idx * x_stride;
        residual += outer_idx * residual_outer_stride + row_idx * residual_stride;
    }
};

// What a row is moved and multiplied by.
struct RowShape {
    float mean, inverse;  // (s - mean) * inverse
    float offset;         // of the weight, times inverse
    float shift;          // -mean * inverse
};

__device__ __forceinline__ float normed_value(RowShape shape, float s, float weight, float bias) {
    return (s - shape.mean) * (weight * shape.inverse + shape.offset) + bias;
}

// Weight and bias of kVecs vectors, blockDim.x apart, asked for at once: kIs32, as fp32.
template <typename T, int kVecs, bool kIs32>
struct Factors {
    static constexpr int kParts = kIs32 ? sizeof(float) / sizeof(T) : 1, kWidth = kVecElems<T>;
    using Stored = std::conditional_t<kIs32, float, T>;
    uint4 weight[kVecs][kParts], bias[kVecs][kParts];

    template <typename Out>
    __device__ __forceinline__ void load(const NormParams<T, Out>& p, int vec_idx, int num_vecs) {
        load_all(p.weight, vec_idx, num_vecs, 1.0f, weight);
        load_all(p.bias, vec_idx, num_vecs, 0.0f, bias);
    }
    // The same, zeros beyond the row: fewer instructions, more registers.
    template <typename Out>
    __device__ __forceinline__ void load_or_zeros(const NormParams<T, Out>& p, int vec_idx,
                                                  int num_vecs) {
        load_there_or_all(p.weight, vec_idx, num_vecs, 1.0f, weight);
        load_there_or_all(p.bias, vec_idx, num_vecs, 0.0f, bias);
    }

    // Normed, in place: what is in the i-th of the vectors.
    __device__ __forceinline__ void norm(int i, RowShape shape, float (&s)[kWidth]) const {
        constexpr int kPart = kWidth / kParts;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            float w[kPart], b[kPart];
            unpack<Stored>(weight[i][part], w);
            unpack<Stored>(bias[i][part], b);
#pragma unroll
            for (int j = 0; j < kPart; ++j) {
                float& value = s[part * kPart + j];
                value = (value - shape.mean) * (w[j] * shape.inverse + shape.offset) + b[j];
            }
        }
    }

    // The same in fewer instructions, of a row of 16 bits.
    __device__ __forceinline__ void norm_shifted(int i, RowShape shape, float weight_offset,
                                                 float (&s)[kWidth]) const {
        constexpr int kPart = kWidth / kParts;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            float w[kPart], b[kPart];
            unpack<Stored>(weight[i][part], w);
            unpack<Stored>(bias[i][part], b);
            if (weight_offset != 0.0f) {
#pragma unroll
                for (float& factor : w) {
                    factor += weight_offset;
                }
            }
#pragma unroll
            for (int j = 0; j < kPart; ++j) {
                float& value = s[part * kPart + j];
                value = fmaf(fmaf(value, shape.inverse, shape.shift), w[j], b[j]);
            }
        }
    }

  private:
    static __device__ __forceinline__ void load_all(const void* values, int vec_idx, int num_vecs,
                                                    float none, uint4 (&found)[kVecs][kParts]) {
        float nothing[kWidth / kParts];
#pragma unroll
        for (float& value : nothing) {
            value = none;
        }
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                found[i][part] = pack<Stored>(nothing);
            }
        }
        if (values == nullptr) {
            return;
        }
        load_there<false>(values, vec_idx, num_vecs, found);
    }

    // Beyond the row 0, where there are values; else `none` everywhere.
    static __device__ __forceinline__ void load_there_or_all(const void* values, int vec_idx,
                                                             int num_vecs, float none,
                                                             uint4 (&found)[kVecs][kParts]) {
        if (values == nullptr) {
            load_all(nullptr, vec_idx, num_vecs, none, found);
        } else {
            load_there(values, vec_idx, num_vecs, found);
        }
    }

    // What is not there stays as it is, or is 0.
    template <bool kZeros = true>
    static __device__ __forceinline__ void load_there(const void* values, int vec_idx, int num_vecs,
                                                      uint4 (&found)[kVecs][kParts]) {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            const int first = (vec_idx + i * blockDim.x) * kParts;
            if constexpr (kZeros) {
#pragma unroll
                for (uint4& part : found[i]) {
                    part = make_uint4(0, 0, 0, 0);
                }
            }
            if (vec_idx + i * static_cast<int>(blockDim.x) < num_vecs) {
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
                    found[i][part] =
                        load_shared_by_blocks(static_cast<const uint4*>(values) + first + part);
                }
            }
        }
    }
};

// Weight or bias of a run, T or fp32, as the bits that were read: nothing waits for them before
// they are asked for by `at`. What is not there is `none`.
template <typename T>
struct RunFactors {
    uint32_t bits[kRun];

    __device__ __forceinline__ RunFactors(int is_fp32, float none) {
        const bool is_wide = sizeof(T) == sizeof(float) || is_fp32;
        float pair[2] = {none, 0.0f};
        const uint32_t bits_of_none = is_wide ? __float_as_uint(none) : Word<T>::pack(pair);
#pragma unroll
        for (uint32_t& found : bits) {
            found = bits_of_none;
        }
    }
    __device__ __forceinline__ void load(const void* values, int is_fp32, int at, int left) {
        if (values == nullptr) {
            return;
        }
        if (sizeof(T) == sizeof(float) || is_fp32) {
            each_of_run(left, [&](int j) {
                bits[j] = __ldg(static_cast<const uint32_t*>(values) + at + j * kWarpSize);
            });
        } else {
            each_of_run(left, [&](int j) {
                bits[j] = __ldg(static_cast<const uint16_t*>(values) + at + j * kWarpSize);
            });
        }
    }
    __device__ __forceinline__ float at(int is_fp32, int j) const {
        if constexpr (std::is_same_v<T, __nv_bfloat16>) {
            return __uint_as_float(bits[j] << (is_fp32 ? 0 : 16));
        }
        float values[2];
        Word<T>::unpack(bits[j], values);
        return is_fp32 ? __uint_as_float(bits[j]) : values[0];
    }
};

// Normed, in place: a vector, by weight and bias of a type asked for once.
template <typename T, typename Out>
__device__ __forceinline__ void norm_vec(const NormParams<T, Out>& p, RowShape shape, int vec_idx,
                                         float (&s)[kVecElems<T>]) {
    if constexpr (sizeof(T) != sizeof(float)) {
        if (p.is_weight32) {
            Factors<T, 1, true> factors;
            factors.load(p, vec_idx, INT_MAX);
            factors.norm(0, shape, s);
            return;
        }
    }
    Factors<T, 1, false> factors;
    factors.load(p, vec_idx, INT_MAX);
    factors.norm(0, shape, s);
}

}  // namespace kernel_hub::rowwise
