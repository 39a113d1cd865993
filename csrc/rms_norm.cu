// RMS normalisation of rows, with an optional fused residual add.
//
//   residual_out = round(x + residual)                                     (the `residual` variants; x itself otherwise)
//   out = s / sqrt(mean(s^2) + eps) * (weight + weight_offset)             with s = residual_out, all in fp32
//
// The norm is of the *rounded* sum, so that the fused op equals the two unfused ones (vLLM and Liger do the same;
// FlashInfer norms the fp32 sum). The product with the weight is not rounded before the end.
//
// Parallelisation: blockDim.x threads a row, blockDim.y rows a block; rows along gridDim.x, an outer dimension whose
// stride does not collapse with the rows' along gridDim.y. Variants, all for any number of rows:
//   vec1 vec2 vec4       a row held in registers, that many 16-byte vectors a thread: hidden_size a multiple of the
//                        vector, at most blockDim.x * vectors of them, pointers and strides 16-byte aligned
//   vec*_persistent      the same, the grid is as large as the card and each block loads its next row before it
//                        reduces the present one: one barrier a row, slots alternate
//   loop                 longer rows: two passes, the second finds the row in L2; same alignment
//   scalar               any size, any alignment: two passes, one element an access
// `out` may be `x`, `residual_out` may be `residual`: each element is read and written by one thread, in this order.
// Shared memory: one float a warp, twice.
// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

#include "kernel_hub/reduce.cuh"
#include "kernel_hub/vec.cuh"

namespace kernel_hub {

template <typename T>
struct RmsNormParams {
    T* out;                 // (outer, num_rows, hidden_size)
    T* residual_out;        // same shape, or null
    const T* x;             // same shape
    const T* residual;      // same shape, or null
    const T* weight;        // (hidden_size,)
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

// One row's share of a thread: kVecs vectors, blockDim.x apart, zero beyond the row.
template <typename T, int kVecs>
struct RowVecs {
    uint4 bits[kVecs];

    __device__ __forceinline__ void load(const T* row, int num_vecs) {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            const int vec_idx = threadIdx.x + i * blockDim.x;
            bits[i] = make_uint4(0, 0, 0, 0);
            if (vec_idx < num_vecs) {
                bits[i] = load_stream(row + vec_idx * kVecElems<T>);
            }
        }
    }

    __device__ __forceinline__ void load_weight(const T* weight, int num_vecs) {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            const int vec_idx = threadIdx.x + i * blockDim.x;
            if (vec_idx < num_vecs) {
                bits[i] = load_shared_by_blocks(weight + vec_idx * kVecElems<T>);
            }
        }
    }

    __device__ __forceinline__ void store(T* row, int num_vecs) const {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            const int vec_idx = threadIdx.x + i * blockDim.x;
            if (vec_idx < num_vecs) {
                store_stream(row + vec_idx * kVecElems<T>, bits[i]);
            }
        }
    }

    // Adds `other`, rounding each element to T as torch's own add does.
    __device__ __forceinline__ void add(const RowVecs& other) {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            float a[kVecElems<T>], b[kVecElems<T>];
            unpack<T>(bits[i], a);
            unpack<T>(other.bits[i], b);
#pragma unroll
            for (int j = 0; j < kVecElems<T>; ++j) {
                a[j] += b[j];
            }
            bits[i] = pack<T>(a);
        }
    }

    __device__ __forceinline__ float sum_of_squares() const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            float a[kVecElems<T>];
            unpack<T>(bits[i], a);
#pragma unroll
            for (int j = 0; j < kVecElems<T>; ++j) {
                sum += a[j] * a[j];
            }
        }
        return sum;
    }

    // NOTE: without this the compiler keeps the row as floats across the barrier: 8 registers a 16-bit vector, not 4.
    __device__ __forceinline__ void keep_packed() {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            asm volatile("" : "+r"(bits[i].x), "+r"(bits[i].y), "+r"(bits[i].z), "+r"(bits[i].w));
        }
    }

    // Vector by vector: with the weights loaded only now, few registers are live.
    __device__ __forceinline__ void store_late(T* row, const T* weight_row, int num_vecs, float inverse_rms,
                                               float weight_offset) const {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            const int vec_idx = threadIdx.x + i * blockDim.x;
            if (vec_idx < num_vecs) {
                float a[kVecElems<T>], w[kVecElems<T>];
                unpack<T>(load_shared_by_blocks(weight_row + vec_idx * kVecElems<T>), w);
                unpack<T>(bits[i], a);
#pragma unroll
                for (int j = 0; j < kVecElems<T>; ++j) {
                    a[j] = a[j] * inverse_rms * (w[j] + weight_offset);
                }
                store_stream(row + vec_idx * kVecElems<T>, pack<T>(a));
            }
        }
    }

    __device__ __forceinline__ void scale(float inverse_rms, const RowVecs& weight, float weight_offset) {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            float a[kVecElems<T>], w[kVecElems<T>];
            unpack<T>(bits[i], a);
            unpack<T>(weight.bits[i], w);
#pragma unroll
            for (int j = 0; j < kVecElems<T>; ++j) {
                a[j] = a[j] * inverse_rms * (w[j] + weight_offset);
            }
            bits[i] = pack<T>(a);
        }
    }
};

__device__ __forceinline__ float inverse_rms_of(float sum_of_squares, int hidden_size, float eps) {
    return rsqrtf(sum_of_squares / static_cast<float>(hidden_size) + eps);
}

// One row a blockDim.x, the row in registers.
template <typename T, bool kResidual, int kVecs, bool kLate = false>
__device__ __forceinline__ void rms_norm_once(RmsNormParams<T> p) {
    __shared__ float slots[kMaxWarps];
    p.select_outer(blockIdx.y);
    const int64_t row_idx = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const int num_vecs = row_idx < p.num_rows ? p.hidden_size / kVecElems<T> : 0;

    // Issue every load before the first use.
    RowVecs<T, kVecs> row, residual, weight;
    row.load(p.x + row_idx * p.x_stride, num_vecs);
    if (kResidual) {
        residual.load(p.residual + row_idx * p.residual_stride, num_vecs);
    }
    if (!kLate) {
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
    if (kLate) {
        row.store_late(p.out + row_idx * p.out_stride, p.weight, num_vecs, inverse_rms_of(sum, p.hidden_size, p.eps),
                       p.weight_offset);
        return;
    }
    row.scale(inverse_rms_of(sum, p.hidden_size, p.eps), weight, p.weight_offset);
    row.store(p.out + row_idx * p.out_stride, num_vecs);
}

template <typename T, bool kResidual, int kVecs>
__device__ __forceinline__ void rms_norm_late(RmsNormParams<T> p) {
    rms_norm_once<T, kResidual, kVecs, true>(p);
}

// The same with a grid as large as the card: the next row's loads are in flight during this row's reduction.
template <typename T, bool kResidual, int kVecs>
__device__ __forceinline__ void rms_norm_persistent(RmsNormParams<T> p) {
    __shared__ float slots[2][kMaxWarps];
    p.select_outer(blockIdx.y);
    const int num_vecs = p.hidden_size / kVecElems<T>;
    const int64_t row_step = static_cast<int64_t>(gridDim.x) * blockDim.y;
    int64_t first_row = static_cast<int64_t>(blockIdx.x) * blockDim.y;
    int phase = 0;

    RowVecs<T, kVecs> next, next_residual, weight;
    weight.load_weight(p.weight, num_vecs);
    int next_vecs = first_row + threadIdx.y < p.num_rows ? num_vecs : 0;
    next.load(p.x + (first_row + threadIdx.y) * p.x_stride, next_vecs);
    if (kResidual) {
        next_residual.load(p.residual + (first_row + threadIdx.y) * p.residual_stride, next_vecs);
    }

    for (; first_row < p.num_rows; first_row += row_step) {
        const int64_t row_idx = first_row + threadIdx.y;
        const int row_vecs = next_vecs;
        RowVecs<T, kVecs> row = next;
        if (kResidual) {
            row.add(next_residual);
        }

        // Start on the next row.
        const int64_t next_idx = row_idx + row_step;
        next_vecs = next_idx < p.num_rows ? num_vecs : 0;
        next.load(p.x + next_idx * p.x_stride, next_vecs);
        if (kResidual) {
            next_residual.load(p.residual + next_idx * p.residual_stride, next_vecs);
            row.store(p.residual_out + row_idx * p.residual_out_stride, row_vecs);
        }

        const float sum = row_sum(row.sum_of_squares(), slots[phase]);
        phase ^= 1;
        row.keep_packed();
        row.scale(inverse_rms_of(sum, p.hidden_size, p.eps), weight, p.weight_offset);
        row.store(p.out + row_idx * p.out_stride, row_vecs);
    }
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

    float sum = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x * kWidth; i < row_size; i += step) {
        float a[kWidth];
        RowAccess::unpack(RowAccess::read_cached(x + i), a);
        if (kResidual) {
            float b[kWidth];
            RowAccess::unpack(RowAccess::read(residual + i), b);
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                a[j] = to_float(from_float<T>(a[j] + b[j]));
            }
            RowAccess::write_cached(residual_out + i, a);
        }
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            sum += a[j] * a[j];
        }
    }
    const float inverse_rms = inverse_rms_of(row_sum(sum, slots), p.hidden_size, p.eps);

    const T* normed = kResidual ? residual_out : x;
#pragma unroll 4
    for (int i = threadIdx.x * kWidth; i < row_size; i += step) {
        float a[kWidth], w[kWidth];
        RowAccess::unpack(RowAccess::read_cached(normed + i), a);
        RowAccess::unpack(RowAccess::read_shared_by_blocks(p.weight + i), w);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            a[j] = a[j] * inverse_rms * (w[j] + p.weight_offset);
        }
        RowAccess::write(out + i, a);
    }
}

}  // namespace kernel_hub

// 64 registers a thread: any blockDim up to 1,024.
#define EXPORT_RMS_NORM(DTYPE, T, VARIANT, BODY, SIZE, ...)                                                             \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__) rms_norm_##DTYPE##_##VARIANT(                                   \
        T* out, const T* x, const T* weight, int64_t out_stride, int64_t out_outer_stride, int64_t x_stride,           \
        int64_t x_outer_stride, int num_rows, int hidden_size, float eps, float weight_offset) {                       \
        kernel_hub::BODY<T, false, SIZE>({out, nullptr, x, nullptr, weight, out_stride, out_outer_stride, 0, 0,        \
                                          x_stride, x_outer_stride, 0, 0, num_rows, hidden_size, eps, weight_offset}); \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__) rms_norm_##DTYPE##_residual_##VARIANT(                          \
        T* out, T* residual_out, const T* x, const T* residual, const T* weight, int64_t out_stride,                   \
        int64_t out_outer_stride, int64_t residual_out_stride, int64_t residual_out_outer_stride, int64_t x_stride,    \
        int64_t x_outer_stride, int64_t residual_stride, int64_t residual_outer_stride, int num_rows, int hidden_size, \
        float eps, float weight_offset) {                                                                              \
        kernel_hub::BODY<T, true, SIZE>({out, residual_out, x, residual, weight, out_stride, out_outer_stride,         \
                                         residual_out_stride, residual_out_outer_stride, x_stride, x_outer_stride,     \
                                         residual_stride, residual_outer_stride, num_rows, hidden_size, eps,           \
                                         weight_offset});                                                              \
    }

#define EXPORT_RMS_NORM_VARIANTS(DTYPE, T)                                        \
    EXPORT_RMS_NORM(DTYPE, T, vec1, rms_norm_once, 1, 1024)                             \
    EXPORT_RMS_NORM(DTYPE, T, vec2, rms_norm_once, 2, 1024)                             \
    EXPORT_RMS_NORM(DTYPE, T, vec4, rms_norm_once, 4, 1024)                             \
    EXPORT_RMS_NORM(DTYPE, T, vec4late5, rms_norm_late, 4, 256, 5)                             \
    EXPORT_RMS_NORM(DTYPE, T, vec4late6, rms_norm_late, 4, 256, 6)                             \
    EXPORT_RMS_NORM(DTYPE, T, vec8late8, rms_norm_late, 8, 128, 8)                             \
    EXPORT_RMS_NORM(DTYPE, T, vec8late4, rms_norm_late, 8, 256, 4)                             \
    EXPORT_RMS_NORM(DTYPE, T, loop, rms_norm_two_pass, kernel_hub::kVecElems<T>, 1024)  \
    EXPORT_RMS_NORM(DTYPE, T, scalar, rms_norm_two_pass, 1, 1024)

EXPORT_RMS_NORM_VARIANTS(fp16, __half)
EXPORT_RMS_NORM_VARIANTS(bf16, __nv_bfloat16)
EXPORT_RMS_NORM_VARIANTS(fp32, float)
