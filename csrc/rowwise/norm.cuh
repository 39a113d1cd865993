// Norms of rows with all that may be joined to them: another type of weight, a bias, a residual
// before or after, results quantised a row. Without the mean taken off it is the RMS norm.
#pragma once

#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/reduce.cuh"
#include "kernel_hub/vec.cuh"
#include "rowwise/quantised.cuh"
#include "rowwise/row_vecs.cuh"

namespace kernel_hub::rowwise {

template <typename T, typename Out>
struct NormParams {
    Out* out;            // (outer, num_rows, hidden_size)
    float* out_scale;    // (outer, num_rows), where Out is 8 bits
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

// What a row is multiplied and moved by.
struct RowShape {
    float mean, inverse;  // (s - mean) * inverse
};

// kWidth values from `first` on, of T or fp32; `none` where there are no values.
template <typename T, int kWidth>
__device__ __forceinline__ void load_parameter(const void* values, int is_fp32, int first,
                                               float none, float (&found)[kWidth]) {
    if (values == nullptr) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            found[j] = none;
        }
    } else if (is_fp32 && sizeof(T) != sizeof(float)) {
        const float* address = static_cast<const float*>(values) + first;
        if constexpr (kWidth == 1) {
            found[0] = __ldg(address);
        } else {
#pragma unroll
            for (int j = 0; j < kWidth; j += 4) {
                float part[4];
                unpack<float>(load_shared_by_blocks(address + j), part);
                found[j] = part[0], found[j + 1] = part[1];
                found[j + 2] = part[2], found[j + 3] = part[3];
            }
        }
    } else {
        using RowAccess = Access<T, kWidth>;
        RowAccess::unpack(RowAccess::read_shared_by_blocks(static_cast<const T*>(values) + first),
                          found);
    }
}

// Normed, in place: weight and bias of the columns from `first` on.
template <typename T, typename Out, int kWidth>
__device__ __forceinline__ void norm_values(const NormParams<T, Out>& p, RowShape shape, int first,
                                            float (&s)[kWidth]) {
    float weight[kWidth], bias[kWidth];
    load_parameter<T>(p.weight, p.is_weight32, first, 1.0f, weight);
    load_parameter<T>(p.bias, p.is_weight32, first, 0.0f, bias);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        s[j] = (s[j] - shape.mean) * shape.inverse * (weight[j] + p.weight_offset) + bias[j];
    }
}

// One row a blockDim.x, the row in registers.
template <typename T, typename Out, bool kCentred, int kVecs>
__device__ __forceinline__ void norm_vecs(NormParams<T, Out> p) {
    constexpr int kWidth = kVecElems<T>;
    constexpr bool kQuantised = sizeof(Out) == 1;
    __shared__ float slots[kCentred + 1 + kQuantised][kMaxWarps];
    const int64_t row_idx = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const bool is_there = row_idx < p.num_rows;
    const int num_vecs = is_there ? p.hidden_size / kWidth : 0;
    const bool adds = p.residual != nullptr;
    p.select_row(blockIdx.y, row_idx);

    // Issue every load before the first use; add and write the residual stream.
    RowVecs<T, kVecs> row;
    row.load(p.x, num_vecs);
    if (adds && !p.adds_after) {
        RowVecs<T, kVecs> residual;
        residual.load(p.residual, num_vecs);
        row.add(residual);
        row.store(p.residual_out, num_vecs);
    }

    RowShape shape{0.0f, 0.0f};
    if constexpr (kCentred) {
        shape.mean = row_sum(row.sum(), slots[0]) / static_cast<float>(p.hidden_size);
        row.keep_packed();
    }
    const float sum = row_sum(row.sum_of_squares_from(shape.mean, num_vecs), slots[kCentred]);
    shape.inverse = rsqrtf(sum / static_cast<float>(p.hidden_size) + p.eps);
    row.keep_packed();

    float factor = 1.0f;
    if constexpr (kQuantised) {
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            const int vec_idx = threadIdx.x + i * blockDim.x;
            if (vec_idx < num_vecs) {
                float s[kWidth];
                unpack<T>(row.bits[i], s);
                norm_values(p, shape, vec_idx * kWidth, s);
                largest = max_nan(largest, largest_of(s));
            }
        }
        factor = scale_row<Out>(p.out_scale, row_max(largest, slots[kCentred + 1]), is_there);
        row.keep_packed();
    }
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        const int vec_idx = threadIdx.x + i * blockDim.x;
        if (vec_idx < num_vecs) {
            float s[kWidth];
            unpack<T>(row.bits[i], s);
            norm_values(p, shape, vec_idx * kWidth, s);
            if (!kQuantised && adds && p.adds_after) {
                float after[kWidth];
                unpack<T>(ld_global(p.residual + vec_idx * kWidth), after);
#pragma unroll
                for (int j = 0; j < kWidth; ++j) {
                    s[j] += after[j];
                }
            }
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                s[j] *= kQuantised ? factor : 1.0f;
            }
            write_row(p.out + vec_idx * kWidth, s);
        }
    }
}

// Rows of any length in accesses of kWidth elements, a pass for each sum: the first adds the
// residual and writes it, the others find the row in L1 or L2.
template <typename T, typename Out, bool kCentred, int kWidth>
__device__ __forceinline__ void norm_passes(NormParams<T, Out> p) {
    using RowAccess = Access<T, kWidth>;
    constexpr bool kQuantised = sizeof(Out) == 1;
    __shared__ float slots[kCentred + 1 + kQuantised][kMaxWarps];
    const int64_t row_idx = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const bool is_there = row_idx < p.num_rows;
    const int row_size = is_there ? p.hidden_size : 0;
    const float size = static_cast<float>(p.hidden_size);
    const int step = blockDim.x * kWidth;
    const bool adds = p.residual != nullptr;
    const bool adds_before = adds && !p.adds_after;
    p.select_row(blockIdx.y, row_idx);

    float sum = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x * kWidth; i < row_size; i += step) {
        float s[kWidth];
        RowAccess::unpack(RowAccess::read(p.x + i), s);
        if (adds_before) {
            float b[kWidth];
            RowAccess::unpack(RowAccess::read(p.residual + i), b);
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                s[j] = to_float(from_float<T>(s[j] + b[j]));
            }
            RowAccess::write(p.residual_out + i, s);
        }
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            sum += kCentred ? s[j] : s[j] * s[j];
        }
    }
    RowShape shape{0.0f, 0.0f};
    const T* row = adds_before ? p.residual_out : p.x;
    sum = row_sum(sum, slots[0]);
    if constexpr (kCentred) {
        shape.mean = sum / size;
        sum = 0.0f;
#pragma unroll 4
        for (int i = threadIdx.x * kWidth; i < row_size; i += step) {
            float s[kWidth];
            RowAccess::unpack(RowAccess::read(row + i), s);
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                sum += (s[j] - shape.mean) * (s[j] - shape.mean);
            }
        }
        sum = row_sum(sum, slots[1]);
    }
    shape.inverse = rsqrtf(sum / size + p.eps);

    float factor = 1.0f;
    if constexpr (kQuantised) {
        float largest = 0.0f;
        for (int i = threadIdx.x * kWidth; i < row_size; i += step) {
            float s[kWidth];
            RowAccess::unpack(RowAccess::read(row + i), s);
            norm_values(p, shape, i, s);
            largest = max_nan(largest, largest_of(s));
        }
        factor = scale_row<Out>(p.out_scale, row_max(largest, slots[kCentred + 1]), is_there);
    }
    for (int i = threadIdx.x * kWidth; i < row_size; i += step) {
        float s[kWidth];
        RowAccess::unpack(RowAccess::read(row + i), s);
        norm_values(p, shape, i, s);
        if (!kQuantised && adds && p.adds_after) {
            float after[kWidth];
            RowAccess::unpack(RowAccess::read(p.residual + i), after);
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                s[j] += after[j];
            }
        }
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            s[j] *= kQuantised ? factor : 1.0f;
        }
        write_row(p.out + i, s);
    }
}

// 64 registers a thread: any blockDim up to 1,024.
#define EXPORT_NORM(NAME, T, OUT, CENTRED, BODY, SIZE)                                             \
    DESCRIBED(                                                                                     \
        NAME, "x: rows in steps of blockDim.y, y: the outer dimension; blockDim.x threads a row",  \
        (.shared_bytes = 0),                                                                       \
        extern "C" __global__ void __launch_bounds__(1024) NAME(                                   \
            OUT* out, float* out_scale, T* residual_out, const T* x, const T* residual,            \
            const void* weight, const void* bias, int64_t out_stride, int64_t out_outer_stride,    \
            int64_t scale_stride, int64_t scale_outer_stride, int64_t residual_out_stride,         \
            int64_t residual_out_outer_stride, int64_t x_stride, int64_t x_outer_stride,           \
            int64_t residual_stride, int64_t residual_outer_stride, int num_rows, int hidden_size, \
            int is_weight32, int adds_after, float eps, float weight_offset) {                     \
            BODY<T, OUT, CENTRED, SIZE>({out,                                                      \
                                         out_scale,                                                \
                                         residual_out,                                             \
                                         x,                                                        \
                                         residual,                                                 \
                                         weight,                                                   \
                                         bias,                                                     \
                                         out_stride,                                               \
                                         out_outer_stride,                                         \
                                         scale_stride,                                             \
                                         scale_outer_stride,                                       \
                                         residual_out_stride,                                      \
                                         residual_out_outer_stride,                                \
                                         x_stride,                                                 \
                                         x_outer_stride,                                           \
                                         residual_stride,                                          \
                                         residual_outer_stride,                                    \
                                         num_rows,                                                 \
                                         hidden_size,                                              \
                                         is_weight32,                                              \
                                         adds_after,                                               \
                                         eps,                                                      \
                                         weight_offset});                                          \
        })

#define EXPORT_NORM_VARIANTS(NAME, T, OUT, CENTRED)                      \
    EXPORT_NORM(NAME##_vec1, T, OUT, CENTRED, norm_vecs, 1)              \
    EXPORT_NORM(NAME##_vec2, T, OUT, CENTRED, norm_vecs, 2)              \
    EXPORT_NORM(NAME##_vec4, T, OUT, CENTRED, norm_vecs, 4)              \
    EXPORT_NORM(NAME##_loop, T, OUT, CENTRED, norm_passes, kVecElems<T>) \
    EXPORT_NORM(NAME##_scalar, T, OUT, CENTRED, norm_passes, 1)

}  // namespace kernel_hub::rowwise
