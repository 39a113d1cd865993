// The weighted sum of what the experts of each token made of it.
//
//   out[t] = sum over j of weights[t, j] * rows[row_id_map[t, j]]  (+ residual[t])
// in fp32, in the order of j, rounded once. A slot of row -1 counts nothing.
//
// Parallelisation: a thread a vector of a token, the vectors of all tokens one after the other, so
// that a block may hold the end of one token and the beginning of the next; blocks along gridDim.x.
// As many rows as the name says are read before they are added. No shared memory.
//   vec2 vec4 vec8    vectors of 16 bytes, all aligned
//   scalar    elements, any size, any alignment; four rows
// Into the residual is allowed: each element is read, then written, by one thread.
// Source: Shazeer et al., "Outrageously Large Neural Networks", 2017.

#include "kernel_hub/bounds.cuh"
#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/vec.cuh"

namespace kernel_hub::moe {

constexpr int kMaxThreads = 128;
constexpr int kMinBlocks = 8;  // a multiprocessor: 64 registers

template <typename T, int kWidth, int kAhead>
__device__ __forceinline__ void combine(T* out, int* flag, const T* rows, const int* row_id_map,
                                        const float* weights, const T* residual, int64_t out_stride,
                                        int64_t rows_stride, int64_t residual_stride,
                                        int num_tokens, int k, int num_rows, int row_units) {
    using RowAccess = Access<T, kWidth>;
    const int64_t unit = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    // Whole numbers of 64 bits take five times as long to divide.
    const int64_t token_idx = unit >> 32
                                  ? unit / row_units
                                  : static_cast<uint32_t>(unit) / static_cast<uint32_t>(row_units);
    const int at = static_cast<int>(unit - token_idx * row_units) * kWidth;
    follow_launch_before();
    if (token_idx >= num_tokens) {
        return;
    }
    const int* ids = row_id_map + token_idx * k;
    const float* factors = weights + token_idx * k;
    float sums[kWidth] = {};
    bool is_outside = false;
#pragma unroll 1
    for (int j = 0; j < k; j += kAhead) {
        int places[kAhead];
        float own_factors[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            places[i] = j + i < k ? __ldg(ids + j + i) : -1;
            own_factors[i] = j + i < k ? __ldg(factors + j + i) : 0.0f;
        }
        typename RowAccess::Bits bits[kAhead] = {};
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            is_outside = is_outside || (!is_index(places[i], num_rows) && places[i] != -1);
            if (is_index(places[i], num_rows)) {
                bits[i] = RowAccess::read(rows + places[i] * rows_stride + at);
            } else {
                own_factors[i] = 0.0f;  // of zeros; it may be NaN
            }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            float values[kWidth];
            RowAccess::unpack(bits[i], values);
#pragma unroll
            for (int e = 0; e < kWidth; ++e) {
                sums[e] += own_factors[i] * values[e];
            }
        }
    }
    if (residual != nullptr) {
        float values[kWidth];
        RowAccess::unpack(RowAccess::read(residual + token_idx * residual_stride + at), values);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
            sums[e] += values[e];
        }
    }
    RowAccess::write(out + token_idx * out_stride + at, sums);
    report_if(flag, is_outside, kRowsOutside);
}

#define EXPORT_MOE_COMBINE(DTYPE, T, VARIANT, WIDTH, AHEAD)                                      \
    DESCRIBED(                                                                                   \
        moe_combine_##DTYPE##_##VARIANT, "x: vectors of all tokens in steps of blockDim.x",      \
        (.shared_bytes = 0),                                                                     \
        extern "C" __global__ void                                                               \
        __launch_bounds__(kMaxThreads, kMinBlocks) moe_combine_##DTYPE##_##VARIANT(              \
            T* out, int* flag, const T* rows, const int* row_id_map, const float* weights,       \
            const T* residual, int64_t out_stride, int64_t rows_stride, int64_t residual_stride, \
            int num_tokens, int k, int num_rows, int row_units) {                                \
            combine<T, WIDTH, AHEAD>(out, flag, rows, row_id_map, weights, residual, out_stride, \
                                     rows_stride, residual_stride, num_tokens, k, num_rows,      \
                                     row_units);                                                 \
        })

#define EXPORT_MOE_COMBINE_VARIANTS(DTYPE, T)           \
    EXPORT_MOE_COMBINE(DTYPE, T, vec2, kVecElems<T>, 2) \
    EXPORT_MOE_COMBINE(DTYPE, T, vec4, kVecElems<T>, 4) \
    EXPORT_MOE_COMBINE(DTYPE, T, vec8, kVecElems<T>, 8) \
    EXPORT_MOE_COMBINE(DTYPE, T, scalar, 1, 4)

// {op}_{dtype}_{variant}
EXPORT_MOE_COMBINE_VARIANTS(fp16, __half)
EXPORT_MOE_COMBINE_VARIANTS(bf16, __nv_bfloat16)
EXPORT_MOE_COMBINE_VARIANTS(fp32, float)

}  // namespace kernel_hub::moe
