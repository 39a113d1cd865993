// The weighted sum of what the experts of each token made of it.
//
//   out[t] = sum over j of weights[t, j] * rows[row_id_map[t, j]]  (+ residual[t])
// in fp32, in the order of j, rounded once. A slot of row -1 counts nothing.
//
// Parallelisation: a thread a vector of a token, the vectors of all tokens one after the other, so
// that a block may hold the end of one token and the beginning of the next; blocks along gridDim.x,
// and along gridDim.y groups of tokens that have fewer than 2^31 vectors each. As many rows as the
// name says are read before they are added. No shared memory.
//   vec2 vec4 vec6 vec8    vectors of 16 bytes, all aligned
//   scalar    elements, any size, any alignment; four rows
// Into the residual is allowed: each element is read, then written, by one thread.
// Source: Shazeer et al., "Outrageously Large Neural Networks", 2017.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs the code of sm80

#include "kernel_hub/bounds.cuh"
#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/vec.cuh"

namespace kernel_hub::moe {

constexpr int kMaxThreads = 128;
constexpr int kMinBlocks = 8;  // a multiprocessor: 64 registers

// NOTE: without this the compiler works an address out again for each row, behind its predicate.
template <typename V>
__device__ __forceinline__ V keep(V address) {
    asm volatile("" : "+l"(address));
    return address;
}

template <typename T, int kWidth, int kAhead>
__device__ __forceinline__ void combine(T* out, int* flag, const T* rows, const int* row_id_map,
                                        const float* weights, const T* residual, int64_t out_stride,
                                        int64_t rows_stride, int64_t residual_stride,
                                        int num_tokens, int group_tokens, int k, int num_rows,
                                        int row_units) {
    using RowAccess = Access<T, kWidth>;
    const uint32_t unit = blockIdx.x * blockDim.x + threadIdx.x;
    const uint32_t of_group = unit / static_cast<uint32_t>(row_units);
    const int at = static_cast<int>(unit - of_group * row_units) * kWidth;
    const int64_t token_idx = static_cast<int64_t>(blockIdx.y) * group_tokens + of_group;
    follow_launch_before();
    if (of_group >= static_cast<uint32_t>(group_tokens) || token_idx >= num_tokens) {
        return;
    }
    const int* ids = keep(row_id_map + token_idx * k);
    const float* factors = keep(weights + token_idx * k);
    const uint64_t columns = keep(reinterpret_cast<uint64_t>(rows + at));
    const uint64_t row_bytes = keep<uint64_t>(rows_stride * sizeof(T));
    float sums[kWidth] = {};
    uint32_t furthest = 0;  // of the rows, -1 as 0
#pragma unroll 1
    for (int j = 0; j < k; j += kAhead) {
        uint32_t places[kAhead];
        float own_factors[kAhead];
        if (j + kAhead <= k) {
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                places[i] = __ldg(ids + j + i);
            }
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                own_factors[i] = __ldg(factors + j + i);
            }
        } else {
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                places[i] = j + i < k ? __ldg(ids + j + i) : -1;
                own_factors[i] = j + i < k ? __ldg(factors + j + i) : 0.0f;
            }
        }
        typename RowAccess::Bits bits[kAhead] = {};
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            furthest = max(furthest, places[i] + 1);
            if (places[i] < static_cast<uint32_t>(num_rows)) {
                bits[i] =
                    RowAccess::read(reinterpret_cast<const T*>(columns + places[i] * row_bytes));
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
    report_if(flag, furthest > static_cast<uint32_t>(num_rows), kRowsOutside);
}

#define EXPORT_MOE_COMBINE(DTYPE, T, VARIANT, WIDTH, AHEAD)                                       \
    DESCRIBED(                                                                                    \
        moe_combine_##DTYPE##_##VARIANT,                                                          \
        "x: vectors of a group of tokens in steps of blockDim.x; y: groups", (.shared_bytes = 0), \
        extern "C" __global__ void                                                                \
        __launch_bounds__(kMaxThreads, kMinBlocks) moe_combine_##DTYPE##_##VARIANT(               \
            T* out, int* flag, const T* rows, const int* row_id_map, const float* weights,        \
            const T* residual, int64_t out_stride, int64_t rows_stride, int64_t residual_stride,  \
            int num_tokens, int group_tokens, int k, int num_rows, int row_units) {               \
            combine<T, WIDTH, AHEAD>(out, flag, rows, row_id_map, weights, residual, out_stride,  \
                                     rows_stride, residual_stride, num_tokens, group_tokens, k,   \
                                     num_rows, row_units);                                        \
        })

#define EXPORT_MOE_COMBINE_VARIANTS(DTYPE, T)           \
    EXPORT_MOE_COMBINE(DTYPE, T, vec2, kVecElems<T>, 2) \
    EXPORT_MOE_COMBINE(DTYPE, T, vec4, kVecElems<T>, 4) \
    EXPORT_MOE_COMBINE(DTYPE, T, vec6, kVecElems<T>, 6) \
    EXPORT_MOE_COMBINE(DTYPE, T, vec8, kVecElems<T>, 8) \
    EXPORT_MOE_COMBINE(DTYPE, T, scalar, 1, 4)

// {op}_{dtype}_{variant}
EXPORT_MOE_COMBINE_VARIANTS(fp16, __half)
EXPORT_MOE_COMBINE_VARIANTS(bf16, __nv_bfloat16)
EXPORT_MOE_COMBINE_VARIANTS(fp32, float)

}  // namespace kernel_hub::moe
