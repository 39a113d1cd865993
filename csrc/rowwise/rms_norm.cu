// RMS normalisation of rows, with an optional fused residual add.
//
//   s = x, or round(x + residual), which is also written to residual_out
//   out = s / sqrt(mean(s^2) + eps) * (weight + weight_offset), in fp32, rounded once
//
// The norm is of the *rounded* sum, so that the fused op equals the two unfused ones (vLLM and
// Liger do the same; FlashInfer norms the fp32 sum).
//
// Parallelisation: blockDim.x threads a row, blockDim.y rows a block; rows along gridDim.x, along
// gridDim.y an outer dimension whose stride does not collapse with theirs.
//   vec1 vec2 vec4   a row in registers, that many 16-byte vectors a thread: hidden_size at most
//                    blockDim.x * vectors of them, everything 16-byte aligned
//   flat_vec1 ...    the same of contiguous rows: few parameters, no strides, one outer index
//   early_vec1 ...   the same where no launch ahead writes the weight: it is read, and the launch
//                    behind may begin, before the launch ahead has ended
//   loop             rows of any length in two passes, the second finds the row in L1 or L2;
//                    everything 16-byte aligned
//   scalar           any size, any alignment: two passes, one element an access; what registers
//                    hold of a row is read once
// `out` may be `x`, `residual_out` may be `residual`: each element is read, then written, by one
// thread. Shared memory: one float a warp.
// NOTE: a persistent grid that prefetches the next row was slower at every size
// (docs/notes/rms_norm.md).
// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs the code of sm80

#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/ptx.cuh"
#include "kernel_hub/reduce.cuh"
#include "kernel_hub/vec.cuh"
#include "rowwise/row_elements.cuh"
#include "rowwise/row_vecs.cuh"

namespace kernel_hub::rowwise {

template <typename T>
struct RmsNormParams {
    T* out;             // (outer, num_rows, hidden_size)
    T* residual_out;    // same shape, or null
    const T* x;         // same shape
    const T* residual;  // same shape, or null
    const T* weight;    // (hidden_size,)
    int64_t out_stride, out_outer_stride;
    int64_t residual_out_stride, residual_out_outer_stride;
    int64_t x_stride, x_outer_stride;
    int64_t residual_stride, residual_outer_stride;
    int num_rows;
    int hidden_size;
    float eps;
    float weight_offset;

    // Moves every pointer to row 0 of outer index `outer_idx`.
    __device__ __forceinline__ void select_outer(int64_t outer_idx) {
        out += outer_idx * out_outer_stride;
        residual_out += outer_idx * residual_out_outer_stride;
        x += outer_idx * x_outer_stride;
        residual += outer_idx * residual_outer_stride;
    }
};

// kFast: a division of two units in the last place, without the code of the exact one.
// NOTE: four vectors of fp16 spill with it, so only the variants of few rows take it.
template <bool kFast>
__device__ __forceinline__ float inverse_rms_of(float sum_of_squares, int hidden_size, float eps) {
    const float size = static_cast<float>(hidden_size);
    return rsqrtf((kFast ? __fdividef(sum_of_squares, size) : sum_of_squares / size) + eps);
}

// One row a blockDim.x, the row in registers.
template <typename T, bool kResidual, int kVecs, bool kEarly = false>
__device__ __forceinline__ void rms_norm_vecs(RmsNormParams<T> p) {
    __shared__ float slots[kMaxWarps];
    p.select_outer(blockIdx.y);
    const int64_t row_idx = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const int num_vecs = row_idx < p.num_rows ? p.hidden_size / kVecElems<T> : 0;

    // Issue every load before the first use.
    RowVecs<T, kVecs> row, residual, weight;
    if (kEarly) {
        allow_next_launch();
        weight.load_weight(p.weight, num_vecs);
        wait_for_launch_before();
    } else {
        follow_launch_before();
    }
    row.load(p.x + row_idx * p.x_stride, num_vecs);
    if (kResidual) {
        residual.load(p.residual + row_idx * p.residual_stride, num_vecs);
    }
    if (!kEarly) {
        weight.load_weight(p.weight, num_vecs);
    }

    // Add and write the residual stream.
    if (kResidual) {
        row.add(residual);
        row.store(p.residual_out + row_idx * p.residual_out_stride, num_vecs);
    }

    // Reduce, scale, write.
    const float sum = row_sum(row.sum_of_squares(), slots);
    row.keep_packed();
    row.scale(inverse_rms_of<(kVecs <= 2)>(sum, p.hidden_size, p.eps), weight, p.weight_offset);
    row.store(p.out + row_idx * p.out_stride, num_vecs);
}

template <typename T, bool kResidual, int kVecs>
__device__ __forceinline__ void rms_norm_early(RmsNormParams<T> p) {
    rms_norm_vecs<T, kResidual, kVecs, true>(p);
}

// Rows of any length in accesses of kWidth elements: sum in a first pass, scale in a second.
template <typename T, bool kResidual, int kWidth>
__device__ __forceinline__ void rms_norm_two_pass(RmsNormParams<T> p) {
    using RowAccess = Access<T, kWidth>;
    __shared__ float slots[kMaxWarps];
    p.select_outer(blockIdx.y);
    const int64_t row_idx = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const int row_size = row_idx < p.num_rows ? p.hidden_size : 0;
    const T* x = p.x + row_idx * p.x_stride;
    const T* residual = p.residual + row_idx * p.residual_stride;
    T* residual_out = p.residual_out + row_idx * p.residual_out_stride;
    T* out = p.out + row_idx * p.out_stride;
    const int step = blockDim.x * kWidth;

    follow_launch_before();
    float sum = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x * kWidth; i < row_size; i += step) {
        float a[kWidth];
        RowAccess::unpack(RowAccess::read(x + i), a);
        if (kResidual) {
            float b[kWidth];
            RowAccess::unpack(RowAccess::read(residual + i), b);
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                a[j] = to_float(from_float<T>(a[j] + b[j]));
            }
            RowAccess::write(residual_out + i, a);
        }
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            sum += a[j] * a[j];
        }
    }
    const float inverse_rms = inverse_rms_of<false>(row_sum(sum, slots), p.hidden_size, p.eps);

    const T* normed = kResidual ? residual_out : x;
#pragma unroll 4
    for (int i = threadIdx.x * kWidth; i < row_size; i += step) {
        float a[kWidth], w[kWidth];
        RowAccess::unpack(RowAccess::read(normed + i), a);
        RowAccess::unpack(RowAccess::read_shared_by_blocks(p.weight + i), w);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            a[j] = a[j] * inverse_rms * (w[j] + p.weight_offset);
        }
        RowAccess::write(out + i, a);
    }
}

// The same by the element: an access is one.
template <typename T, bool kResidual, int>
__device__ __forceinline__ void rms_norm_elements(RmsNormParams<T> p) {
    __shared__ float slots[kMaxWarps];
    p.select_outer(blockIdx.y);
    const int64_t row_idx = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const ElementRuns runs(row_idx < p.num_rows ? p.hidden_size : 0);
    const T* x = p.x + row_idx * p.x_stride;
    const T* residual = p.residual + row_idx * p.residual_stride;
    T* residual_out = p.residual_out + row_idx * p.residual_out_stride;
    T* out = p.out + row_idx * p.out_stride;

    follow_launch_before();
    T row[kRun], weight[kRun];
    float inverse_rms = 0.0f;
    // NOTE: passes are turns of one loop, so that a row that is held has its weight asked for with
    // it by the same code.
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
        const T* from = kResidual && pass == 1 ? residual_out : x;
        float sum = 0.0f;
        runs.each([&](int at, int left) {
            T other[kRun];
            if (pass == 0 || !runs.is_held()) {
                load_run(row, from + at, left);
                if (kResidual && pass == 0) {
                    load_run(other, residual + at, left);
                }
                load_run(weight, p.weight + at, left);
            }
            if (pass == 1) {
                each_of_run(left, [&](int j) {
                    out[at + j * kWarpSize] = from_float<T>(
                        to_float(row[j]) * inverse_rms * (to_float(weight[j]) + p.weight_offset));
                });
                return;
            }
            if constexpr (kResidual) {
                each_of_run(left, [&](int j) {
                    row[j] = from_float<T>(to_float(row[j]) + to_float(other[j]));
                    residual_out[at + j * kWarpSize] = row[j];
                });
            }
#pragma unroll
            for (const T value : row) {
                sum += to_float(value) * to_float(value);
            }
        });
        if (pass == 0) {
            inverse_rms = inverse_rms_of<false>(row_sum(sum, slots), p.hidden_size, p.eps);
        }
    }
}

// 64 registers a thread: any blockDim up to 1,024.
#define EXPORT_RMS_NORM(NAME, T, BODY, HAS_RESIDUAL, SIZE, PARAMS, ...)                           \
    DESCRIBED(                                                                                    \
        NAME, "x: rows in steps of blockDim.y, y: the outer dimension; blockDim.x threads a row", \
        (.shared_bytes = 0), extern "C" __global__ void __launch_bounds__(1024) NAME PARAMS {     \
            BODY<T, HAS_RESIDUAL, SIZE>({__VA_ARGS__, .num_rows = num_rows,                       \
                                         .hidden_size = hidden_size, .eps = eps,                  \
                                         .weight_offset = weight_offset});                        \
        })

// clang-format off: it would take pointers for products.
#define EXPORT_RMS_NORM_STRIDED(DTYPE, T, VARIANT, BODY, SIZE)                                     \
    EXPORT_RMS_NORM(rms_norm_##DTYPE##_##VARIANT, T, BODY, false, SIZE,                            \
        (T* out, const T* x, const T* weight, int64_t out_stride, int64_t out_outer_stride,        \
         int64_t x_stride, int64_t x_outer_stride, int num_rows, int hidden_size, float eps,       \
         float weight_offset),                                                                     \
        .out = out, .x = x, .weight = weight, .out_stride = out_stride,                            \
        .out_outer_stride = out_outer_stride, .x_stride = x_stride,                                \
        .x_outer_stride = x_outer_stride)                                                          \
    EXPORT_RMS_NORM(rms_norm_##DTYPE##_residual_##VARIANT, T, BODY, true, SIZE,                    \
        (T* out, T* residual_out, const T* x, const T* residual, const T* weight,                  \
         int64_t out_stride, int64_t out_outer_stride, int64_t residual_out_stride,                \
         int64_t residual_out_outer_stride, int64_t x_stride, int64_t x_outer_stride,              \
         int64_t residual_stride, int64_t residual_outer_stride, int num_rows, int hidden_size,    \
         float eps, float weight_offset),                                                          \
        .out = out, .residual_out = residual_out, .x = x, .residual = residual, .weight = weight,  \
        .out_stride = out_stride, .out_outer_stride = out_outer_stride,                            \
        .residual_out_stride = residual_out_stride,                                                \
        .residual_out_outer_stride = residual_out_outer_stride, .x_stride = x_stride,              \
        .x_outer_stride = x_outer_stride, .residual_stride = residual_stride,                      \
        .residual_outer_stride = residual_outer_stride)

// The same where every tensor is contiguous.
#define EXPORT_RMS_NORM_PLAIN(DTYPE, T, VARIANT, BODY, VECS)                                       \
    EXPORT_RMS_NORM(rms_norm_##DTYPE##_##VARIANT, T, BODY, false, VECS,                            \
        (T* out, const T* x, const T* weight, int num_rows, int hidden_size, float eps,            \
         float weight_offset),                                                                     \
        .out = out, .x = x, .weight = weight, .out_stride = hidden_size, .x_stride = hidden_size)

#define EXPORT_RMS_NORM_FLAT(DTYPE, T, VARIANT, VECS)                                              \
    EXPORT_RMS_NORM_PLAIN(DTYPE, T, flat_##VARIANT, rms_norm_vecs, VECS)                           \
    EXPORT_RMS_NORM(rms_norm_##DTYPE##_residual_flat_##VARIANT, T, rms_norm_vecs, true, VECS,      \
        (T* out, T* residual_out, const T* x, const T* residual, const T* weight, int num_rows,    \
         int hidden_size, float eps, float weight_offset),                                         \
        .out = out, .residual_out = residual_out, .x = x, .residual = residual, .weight = weight,  \
        .out_stride = hidden_size, .residual_out_stride = hidden_size, .x_stride = hidden_size,    \
        .residual_stride = hidden_size)
// clang-format on

#define EXPORT_RMS_NORM_VARIANTS(DTYPE, T)                                   \
    EXPORT_RMS_NORM_STRIDED(DTYPE, T, vec1, rms_norm_vecs, 1)                \
    EXPORT_RMS_NORM_STRIDED(DTYPE, T, vec2, rms_norm_vecs, 2)                \
    EXPORT_RMS_NORM_STRIDED(DTYPE, T, vec4, rms_norm_vecs, 4)                \
    EXPORT_RMS_NORM_FLAT(DTYPE, T, vec1, 1)                                  \
    EXPORT_RMS_NORM_FLAT(DTYPE, T, vec2, 2)                                  \
    EXPORT_RMS_NORM_FLAT(DTYPE, T, vec4, 4)                                  \
    EXPORT_RMS_NORM_STRIDED(DTYPE, T, loop, rms_norm_two_pass, kVecElems<T>) \
    EXPORT_RMS_NORM_STRIDED(DTYPE, T, scalar, rms_norm_elements, 1)

#define EXPORT_RMS_NORM_EARLY(DTYPE, T)                            \
    EXPORT_RMS_NORM_PLAIN(DTYPE, T, early_vec1, rms_norm_early, 1) \
    EXPORT_RMS_NORM_PLAIN(DTYPE, T, early_vec2, rms_norm_early, 2)

EXPORT_RMS_NORM_VARIANTS(fp16, __half)
EXPORT_RMS_NORM_VARIANTS(bf16, __nv_bfloat16)
EXPORT_RMS_NORM_VARIANTS(fp32, float)
EXPORT_RMS_NORM_EARLY(fp16, __half)
EXPORT_RMS_NORM_EARLY(bf16, __nv_bfloat16)

}  // namespace kernel_hub::rowwise
