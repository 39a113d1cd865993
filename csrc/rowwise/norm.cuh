// Norms of rows with all that may be joined to them: another type of weight, a bias, a residual
// before or after, results quantised a row. Without the mean taken off it is the RMS norm.
#pragma once

#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/reduce.cuh"
#include "rowwise/norm_values.cuh"
#include "rowwise/row_vecs.cuh"

namespace kernel_hub::rowwise {

// What a row leaves once its shape is known. Where it is quantised it is normed once if registers
// hold the results until their largest is known, else twice.
template <typename T, typename Out, int kVecs, bool kIs32>
__device__ __forceinline__ void finish_vecs(const NormParams<T, Out>& p, RowVecs<T, kVecs>& row,
                                            RowShape shape, int num_vecs, bool is_there,
                                            float (&slots)[kMaxWarps]) {
    constexpr int kWidth = kVecElems<T>, kBatch = kVecs == 1 || kIs32 ? 1 : 2;
    constexpr bool kQuantised = sizeof(Out) == 1, kKeeps = kVecs * kWidth <= 16;
    float normed[kVecs][kWidth];
    float largest = 0.0f, factor = 1.0f;
#pragma unroll
    for (int round = !kQuantised; round < 2; ++round) {
#pragma unroll
        for (int first = 0; first < kVecs; first += kBatch) {
            const int first_idx = threadIdx.x + first * blockDim.x;
            const bool norms = round == !kQuantised || !kKeeps;
            Factors<T, kBatch, kIs32> factors;
            if (norms) {
                factors.load(p, first_idx, num_vecs);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int vec_idx = first_idx + i * blockDim.x;
                if (vec_idx < num_vecs) {
                    float (&s)[kWidth] = normed[first + i];
                    if (norms) {
                        unpack<T>(row.bits[first + i], s);
                        factors.norm(i, shape, s);
                    }
                    if (round == 0) {
                        largest = max_nan(largest, largest_of(s));
                        continue;
                    }
                    if (!kQuantised && p.adds_after) {
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
        if constexpr (kQuantised) {
            if (round == 0) {
                factor = scale_row<Out>(p.out_scale, row_max(largest, slots), is_there);
                if (!kKeeps) {
                    row.keep_packed();
                }
            }
        }
    }
}

// One row a blockDim.x, the row in registers.
template <typename T, typename Out, bool kCentred, int kVecs>
__device__ __forceinline__ void norm_vecs(NormParams<T, Out> p) {
    constexpr int kWidth = kVecElems<T>;
    __shared__ float slots[kCentred + 2][kMaxWarps];
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

    RowShape shape{};
    if constexpr (kCentred) {
        shape.mean = row_sum(row.sum(), slots[0]) / static_cast<float>(p.hidden_size);
        row.keep_packed();
    }
    const float sum = row_sum(row.sum_of_squares_from(shape.mean, num_vecs), slots[kCentred]);
    shape.inverse = rsqrtf(sum / static_cast<float>(p.hidden_size) + p.eps);
    shape.offset = shape.inverse * p.weight_offset;
    row.keep_packed();

    float (&last)[kMaxWarps] = slots[kCentred + 1];
    if constexpr (sizeof(T) != sizeof(float)) {
        if (p.is_weight32) {
            finish_vecs<T, Out, kVecs, true>(p, row, shape, num_vecs, is_there, last);
            return;
        }
    }
    finish_vecs<T, Out, kVecs, false>(p, row, shape, num_vecs, is_there, last);
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
    RowShape shape{};
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
    shape.offset = shape.inverse * p.weight_offset;

    float factor = 1.0f;
    if constexpr (kQuantised) {
        float largest = 0.0f;
#pragma unroll(kQuantised ? 1 : 2)
        for (int i = threadIdx.x * kWidth; i < row_size; i += step) {
            float s[kWidth];
            RowAccess::unpack(RowAccess::read(row + i), s);
            norm_values(p, shape, i, s);
            largest = max_nan(largest, largest_of(s));
        }
        factor = scale_row<Out>(p.out_scale, row_max(largest, slots[kCentred + 1]), is_there);
    }
#pragma unroll(kQuantised ? 1 : 2)
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
