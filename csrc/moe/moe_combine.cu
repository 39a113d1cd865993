// The weighted sum of what the experts of each token made of it.
//
//   out[t] = sum over j of weights[t, j] * rows[row_id_map[t, j]]  (+ residual[t])
// in fp32, in the order of j, rounded once. A slot of row -1 counts nothing.
//
// Parallelisation: a thread one or more vectors of a token: threadIdx.x along a row with blocks of
// it along gridDim.y, threadIdx.y the tokens of a block, blocks of these along gridDim.x. Eight
// vectors are read before they are added. No shared memory.
//   vec2 vec4 vec8    of so many rows at a time, each 16 bytes of 4, 2 or 1 columns; all aligned
//   scalar    any size, any alignment
// Into the residual is allowed: each element is read, then written, by one thread.
// Source: Shazeer et al., "Outrageously Large Neural Networks", 2017.

#include "kernel_hub/bounds.cuh"
#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/vec.cuh"

namespace kernel_hub::moe {

constexpr int kMaxThreads = 256;

template <typename T, int kWidth, int kAhead, int kColumns>
__device__ __forceinline__ void combine(T* out, int* flag, const T* rows, const int* row_id_map,
                                        const float* weights, const T* residual, int64_t out_stride,
                                        int64_t rows_stride, int64_t residual_stride,
                                        int num_tokens, int k, int num_rows, int hidden_size) {
    using RowAccess = Access<T, kWidth>;
    const int token_idx = blockIdx.x * blockDim.y + threadIdx.y;
    const int first_at = (blockIdx.y * blockDim.x * kColumns + threadIdx.x) * kWidth;
    const int step = blockDim.x * kWidth;
    follow_launch_before();
    if (token_idx >= num_tokens || first_at >= hidden_size) {
        return;
    }
    const int64_t first = static_cast<int64_t>(token_idx) * k;
    float sums[kColumns][kWidth] = {};
    bool is_outside = false;
    for (int j = 0; j < k; j += kAhead) {
        int places[kAhead];
        float factors[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            places[i] = j + i < k ? __ldg(row_id_map + first + j + i) : -1;
            factors[i] = j + i < k ? __ldg(weights + first + j + i) : 0.0f;
        }
        typename RowAccess::Bits bits[kAhead][kColumns];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            is_outside = is_outside || (!is_index(places[i], num_rows) && places[i] != -1);
            places[i] = is_index(places[i], num_rows) ? places[i] : -1;
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                if (places[i] >= 0 && first_at + c * step < hidden_size) {
                    bits[i][c] =
                        RowAccess::read(rows + places[i] * rows_stride + first_at + c * step);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                if (places[i] >= 0 && first_at + c * step < hidden_size) {
                    float values[kWidth];
                    RowAccess::unpack(bits[i][c], values);
#pragma unroll
                    for (int e = 0; e < kWidth; ++e) {
                        sums[c][e] += factors[i] * values[e];
                    }
                }
            }
        }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
        const int at = first_at + c * step;
        if (at >= hidden_size) {
            break;
        }
        if (residual != nullptr) {
            float values[kWidth];
            RowAccess::unpack(RowAccess::read(residual + token_idx * residual_stride + at), values);
#pragma unroll
            for (int e = 0; e < kWidth; ++e) {
                sums[c][e] += values[e];
            }
        }
        RowAccess::write(out + token_idx * out_stride + at, sums[c]);
    }
    report_if(flag, is_outside, kRowsOutside);
}

#define EXPORT_MOE_COMBINE(DTYPE, T, VARIANT, WIDTH, AHEAD, COLUMNS)                               \
    DESCRIBED(                                                                                     \
        moe_combine_##DTYPE##_##VARIANT,                                                           \
        "x: tokens in steps of blockDim.y, y: columns in steps of blockDim.x vectors of a thread", \
        (.shared_bytes = 0),                                                                       \
        extern "C" __global__ void __launch_bounds__(kMaxThreads) moe_combine_##DTYPE##_##VARIANT( \
            T* out, int* flag, const T* rows, const int* row_id_map, const float* weights,         \
            const T* residual, int64_t out_stride, int64_t rows_stride, int64_t residual_stride,   \
            int num_tokens, int k, int num_rows, int hidden_size) {                                \
            combine<T, WIDTH, AHEAD, COLUMNS>(out, flag, rows, row_id_map, weights, residual,      \
                                              out_stride, rows_stride, residual_stride,            \
                                              num_tokens, k, num_rows, hidden_size);               \
        })

#define EXPORT_MOE_COMBINE_VARIANTS(DTYPE, T)              \
    EXPORT_MOE_COMBINE(DTYPE, T, vec2, kVecElems<T>, 2, 4) \
    EXPORT_MOE_COMBINE(DTYPE, T, vec4, kVecElems<T>, 4, 2) \
    EXPORT_MOE_COMBINE(DTYPE, T, vec8, kVecElems<T>, 8, 1) \
    EXPORT_MOE_COMBINE(DTYPE, T, scalar, 1, 4, 1)

// {op}_{dtype}_{variant}
EXPORT_MOE_COMBINE_VARIANTS(fp16, __half)
EXPORT_MOE_COMBINE_VARIANTS(bf16, __nv_bfloat16)
EXPORT_MOE_COMBINE_VARIANTS(fp32, float)

}  // namespace kernel_hub::moe
