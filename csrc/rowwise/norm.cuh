// Norms of rows with all that may be joined to them: another type of weight, a bias, a residual
// before or after, results quantised a row. Without the mean taken off it is the RMS norm.
#pragma once

#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/reduce.cuh"
#include "rowwise/norm_weighted.cuh"
#include "rowwise/row_sums.cuh"
#include "rowwise/row_vecs.cuh"

namespace kernel_hub::rowwise {

// Weight and bias of T of a row's first vectors.
template <typename T>
using FirstFactors = Factors<T, 1, false>;

// Norms a row in registers and gives what each vector becomes to use(i, vec_idx, values). Where a
// thread has one vector, first_factors are there.
template <bool kIs32, bool kCentred, typename T, typename Out, int kVecs, typename Use>
__device__ __forceinline__ void norm_each(const NormParams<T, Out>& p, const RowVecs<T, kVecs>& row,
                                          const FirstFactors<T>& first_factors, RowShape shape,
                                          int num_vecs, const Use& use) {
    constexpr int kBatch = kVecs == 1 || kIs32 ? 1 : 2;
    constexpr bool kShifts = kCentred && kVecs == 4 && sizeof(T) == 2;
    if constexpr (kShifts) {
        shape.shift = -shape.mean * shape.inverse;
    } else {
        shape.offset = shape.inverse * p.weight_offset;
    }
#pragma unroll
    for (int first = 0; first < kVecs; first += kBatch) {
        const int first_idx = threadIdx.x + first * blockDim.x;
        Factors<T, kBatch, kIs32> factors;
        if constexpr (kVecs == 1 && !kIs32) {
            factors = first_factors;
        } else if constexpr (kShifts && !kIs32) {
            factors.load_or_zeros(p, first_idx, num_vecs);
        } else {
            factors.load(p, first_idx, num_vecs);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int vec_idx = first_idx + i * blockDim.x;
            if (vec_idx < num_vecs) {
                float s[kVecElems<T>];
                unpack<T>(row.bits[first + i], s);
                if constexpr (kShifts) {
                    factors.norm_shifted(i, shape, p.weight_offset, s);
                } else {
                    factors.norm(i, shape, s);
                }
                use(first + i, vec_idx, s);
            }
        }
    }
}

template <bool kCentred, typename T, typename Out, int kVecs, typename Use>
__device__ __forceinline__ void norm_each(const NormParams<T, Out>& p, const RowVecs<T, kVecs>& row,
                                          const FirstFactors<T>& first_factors, RowShape shape,
                                          int num_vecs, const Use& use) {
    if constexpr (sizeof(T) != sizeof(float)) {
        if (p.is_weight32) {
            norm_each<true, kCentred>(p, row, first_factors, shape, num_vecs, use);
            return;
        }
    }
    norm_each<false, kCentred>(p, row, first_factors, shape, num_vecs, use);
}

// What a row leaves once its shape is known.
template <bool kCentred, typename T, int kVecs>
__device__ __forceinline__ void finish_vecs(const NormParams<T, T>& p, RowVecs<T, kVecs>& row,
                                            const FirstFactors<T>& first, RowShape shape,
                                            int num_vecs, float (&)[kMaxWarps]) {
    constexpr int kWidth = kVecElems<T>;
    const auto write = [&](int, int vec_idx, float (&s)[kWidth]) {
        if (p.adds_after) {
            float after[kWidth];
            unpack<T>(ld_global(p.residual + vec_idx * kWidth), after);
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                s[j] += after[j];
            }
        }
        write_row(p.out + vec_idx * kWidth, s);
    };
    norm_each<kCentred>(p, row, first, shape, num_vecs, write);
}

// Quantised: results stay in registers until their largest is known, where the row was.
template <bool kCentred, typename T, int kVecs>
__device__ __forceinline__ void finish_vecs(NormParams<T, EightBits> p, RowVecs<T, kVecs>& row,
                                            const FirstFactors<T>& first, RowShape shape,
                                            int num_vecs, float (&slots)[kMaxWarps]) {
    constexpr int kWidth = kVecElems<T>;
    float largest = 0.0f;
    float normed[kVecs][kWidth];
    const auto keep = [&](int i, int, float (&s)[kWidth]) {
        largest = max_nan(largest, largest_of(s));
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            normed[i][j] = s[j];
        }
    };
    norm_each<kCentred>(p, row, first, shape, num_vecs, keep);
    // Rows of four vectors a thread are whole warps.
    largest = kVecs == 4 ? whole_row_max(largest, slots) : row_max(largest, slots);
    const float factor = scale_row(p, largest, num_vecs > 0);
    keep_address(p.out);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        const int vec_idx = threadIdx.x + i * blockDim.x;
        if (vec_idx < num_vecs) {
            write_scaled(p, vec_idx * kWidth, factor, normed[i]);
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
    const float size = static_cast<float>(p.hidden_size);
    const bool adds = p.residual != nullptr;
    p.select_row(blockIdx.y, row_idx);
    follow_launch_before();

    // Issue every load before the first use; add and write the residual stream.
    if constexpr (kVecs == 4) {
        keep_address(p.x);
    }
    RowVecs<T, kVecs> row;
    row.load(p.x, num_vecs);
    FirstFactors<T> first;
    if constexpr (kVecs == 1) {
        if (sizeof(T) == sizeof(float) || !p.is_weight32) {
            first.load(p, threadIdx.x, num_vecs);
        }
    }
    if constexpr (std::is_same_v<T, Out>) {
        // NOTE: asked for, not read: that is 16 registers more.
        if (p.adds_after) {
#pragma unroll
            for (int i = 0; i < kVecs; ++i) {
                const int vec_idx = threadIdx.x + i * blockDim.x;
                if (vec_idx < num_vecs) {
                    prefetch_l2(p.residual + vec_idx * kWidth);
                }
            }
        }
    }
    if (adds && !p.adds_after) {
        RowVecs<T, kVecs> residual;
        residual.load(p.residual, num_vecs);
        row.add(residual);
        row.store(p.residual_out, num_vecs);
    }

    if constexpr (!std::is_same_v<T, Out> && !kCentred && kVecs >= kLeastVecs) {
        __shared__ SquaresAndLargest both[kMaxWarps];
        if (is_weighted_alone(p)) {
            quantise_weighted(p, row, first, num_vecs, both);
            return;
        }
    }
    RowShape shape{};
    float sum;  // of squares, of distances from the mean
    if constexpr (kCentred && kVecs == 4 && sizeof(T) == 2) {
        __shared__ TwoSums both[kMaxWarps];
        const TwoSums found = row_sums<kCentred>(row, both);
        sum = found.squares;
        if constexpr (kCentred) {
            shape.mean = found.values / size;
            sum -= found.values * shape.mean;
            // NOTE: of rows that are far from 0 nothing of it would be right; the others lose two
            // bits. A block takes one way, for the sake of the barrier.
            const bool is_far = !(sum >= 0.25f * found.squares);
            if (is_far || (blockDim.x > kWarpSize && blockDim.y > 1)) {
                row.keep_packed();
                sum = row_sum(row.sum_of_squares_from(shape.mean, num_vecs), slots[1]);
            }
        }
    } else {
        if constexpr (kCentred) {
            shape.mean = row_sum(row.sum(), slots[0]) / size;
            row.keep_packed();
        }
        sum = row_sum(row.sum_of_squares_from(shape.mean, num_vecs), slots[kCentred]);
    }
    constexpr bool kIsQuick = kCentred && kVecs == 4 && sizeof(T) == 2;
    shape.inverse = rsqrtf((kIsQuick ? __fdividef(sum, size) : sum / size) + p.eps);
    row.keep_packed();

    finish_vecs<kCentred>(p, row, first, shape, num_vecs, slots[kCentred + 1]);
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
    follow_launch_before();

    float sum = 0.0f;
#pragma unroll 1
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
#pragma unroll 1
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
#pragma unroll 1
        for (int i = threadIdx.x * kWidth; i < row_size; i += step) {
            float s[kWidth];
            RowAccess::unpack(RowAccess::read(row + i), s);
            norm_vec(p, shape, i / kWidth, s);
            largest = max_nan(largest, largest_of(s));
        }
        factor = scale_row(p, row_max(largest, slots[kCentred + 1]), is_there);
    }
#pragma unroll 1
    for (int i = threadIdx.x * kWidth; i < row_size; i += step) {
        float s[kWidth];
        RowAccess::unpack(RowAccess::read(row + i), s);
        norm_vec(p, shape, i / kWidth, s);
        if constexpr (kQuantised) {
            write_scaled(p, i, factor, s);
            continue;
        }
        if (adds && p.adds_after) {
            float after[kWidth];
            RowAccess::unpack(RowAccess::read(p.residual + i), after);
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                s[j] += after[j];
            }
        }
        write_row(p.out + i, s);
    }
}

// 64 registers a thread: any blockDim up to 1,024.
#define EXPORT_NORM(NAME, T, OUT, CENTRED, BODY, ...)                                              \
    DESCRIBED(                                                                                     \
        NAME, "x: rows in steps of blockDim.y, y: the outer dimension; blockDim.x threads a row",  \
        (.shared_bytes = 0),                                                                       \
        extern "C" __global__ void __launch_bounds__(1024) NAME(                                   \
            OUT* out, float* out_scale, T* residual_out, const T* x, const T* residual,            \
            const void* weight, const void* bias, int64_t out_stride, int64_t out_outer_stride,    \
            int64_t scale_stride, int64_t scale_outer_stride, int64_t residual_out_stride,         \
            int64_t residual_out_outer_stride, int64_t x_stride, int64_t x_outer_stride,           \
            int64_t residual_stride, int64_t residual_outer_stride, int num_rows, int hidden_size, \
            int is_weight32, int adds_after, int is_int8, float eps, float weight_offset) {        \
            using Out = std::conditional_t<std::is_void_v<OUT>, EightBits, OUT>;                   \
            BODY<T, Out, CENTRED __VA_OPT__(, ) __VA_ARGS__>({static_cast<Out*>(out),              \
                                                              out_scale,                           \
                                                              residual_out,                        \
                                                              x,                                   \
                                                              residual,                            \
                                                              weight,                              \
                                                              bias,                                \
                                                              out_stride,                          \
                                                              out_outer_stride,                    \
                                                              scale_stride,                        \
                                                              scale_outer_stride,                  \
                                                              residual_out_stride,                 \
                                                              residual_out_outer_stride,           \
                                                              x_stride,                            \
                                                              x_outer_stride,                      \
                                                              residual_stride,                     \
                                                              residual_outer_stride,               \
                                                              num_rows,                            \
                                                              hidden_size,                         \
                                                              is_weight32,                         \
                                                              adds_after,                          \
                                                              is_int8,                             \
                                                              eps,                                 \
                                                              weight_offset});                     \
        })

// OUT void: one byte a value, e4m3 or int8 as is_int8 says.
#define EXPORT_NORM_VARIANTS(NAME, T, OUT, CENTRED)                      \
    EXPORT_NORM(NAME##_vec1, T, OUT, CENTRED, norm_vecs, 1)              \
    EXPORT_NORM(NAME##_vec2, T, OUT, CENTRED, norm_vecs, 2)              \
    EXPORT_NORM(NAME##_vec4, T, OUT, CENTRED, norm_vecs, 4)              \
    EXPORT_NORM(NAME##_loop, T, OUT, CENTRED, norm_passes, kVecElems<T>) \
    EXPORT_NORM(NAME##_scalar, T, OUT, CENTRED, norm_elements)

// {NAME}_{dtype}[_quantised]_{variant}
#define EXPORT_NORMS(NAME, CENTRED)                                           \
    EXPORT_NORM_VARIANTS(NAME##_fp16, __half, __half, CENTRED)                \
    EXPORT_NORM_VARIANTS(NAME##_fp16_quantised, __half, void, CENTRED)        \
    EXPORT_NORM_VARIANTS(NAME##_bf16, __nv_bfloat16, __nv_bfloat16, CENTRED)  \
    EXPORT_NORM_VARIANTS(NAME##_bf16_quantised, __nv_bfloat16, void, CENTRED) \
    EXPORT_NORM_VARIANTS(NAME##_fp32, float, float, CENTRED)                  \
    EXPORT_NORM_VARIANTS(NAME##_fp32_quantised, float, void, CENTRED)

}  // namespace kernel_hub::rowwise
