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
//   scalar    elements, any size, any alignment. Of few a thread has one, of k <= 4 or 8 rows;
//             else eight columns, a warp's 32 apart, of two rows, and a token's warps are whole
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
                                        int row_units, int) {
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

// By the element: kAhead rows at once, of kColumns columns, kLanes apart.
template <int kAhead, int kColumns, typename T>
__device__ __forceinline__ void combine_columns(T* out, const T* rows, const int* ids,
                                                const float* factors, const T* residual,
                                                int64_t rows_stride, int k, int num_rows, int left,
                                                uint32_t& furthest) {
    constexpr int kLanes = 32;
    // Calls use(e) for each column that the row has.
    const auto each = [&](const auto& use) {
#pragma unroll
        for (int e = 0; e < kColumns; ++e) {
            if (e * kLanes < left) {
                use(e);
            }
        }
    };
    const uint64_t columns = keep(reinterpret_cast<uint64_t>(rows));
    const uint64_t row_bytes = keep<uint64_t>(rows_stride * sizeof(T));
    float sums[kColumns] = {};
#pragma unroll 1
    for (int j = 0; j < k; j += kAhead) {
        uint32_t places[kAhead];
        float own_factors[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            places[i] = j + i < k ? __ldg(ids + j + i) : -1;
            own_factors[i] = j + i < k ? __ldg(factors + j + i) : 0.0f;
        }
        T values[kAhead][kColumns] = {};
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            furthest = max(furthest, places[i] + 1);
            if (places[i] < static_cast<uint32_t>(num_rows)) {
                const T* row = reinterpret_cast<const T*>(columns + places[i] * row_bytes);
                each([&](int e) { values[i][e] = row[e * kLanes]; });
            }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (places[i] < static_cast<uint32_t>(num_rows)) {
#pragma unroll
                for (int e = 0; e < kColumns; ++e) {
                    sums[e] += own_factors[i] * to_float(values[i][e]);
                }
            }
        }
    }
    if (residual != nullptr) {
        T values[kColumns] = {};
        each([&](int e) { values[e] = residual[e * kLanes]; });
#pragma unroll
        for (int e = 0; e < kColumns; ++e) {
            sums[e] += to_float(values[e]);
        }
    }
    each([&](int e) { out[e * kLanes] = from_float<T>(sums[e]); });
}

// row_units threads a token, row_size of them if each has one column, else whole warps.
template <typename T>
__device__ __forceinline__ void combine_elements(T* out, int* flag, const T* rows,
                                                 const int* row_id_map, const float* weights,
                                                 const T* residual, int64_t out_stride,
                                                 int64_t rows_stride, int64_t residual_stride,
                                                 int num_tokens, int group_tokens, int k,
                                                 int num_rows, int row_units, int row_size) {
    constexpr int kColumns = 8, kWarp = 32;
    const uint32_t unit = blockIdx.x * blockDim.x + threadIdx.x;
    const uint32_t of_group = unit / static_cast<uint32_t>(row_units);
    const int place = static_cast<int>(unit - of_group * row_units);
    const bool is_one = row_units == row_size;
    const int at = is_one ? place : place / kWarp * (kColumns * kWarp) + place % kWarp;
    const int64_t token_idx = static_cast<int64_t>(blockIdx.y) * group_tokens + of_group;
    follow_launch_before();
    if (of_group >= static_cast<uint32_t>(group_tokens) || token_idx >= num_tokens) {
        return;
    }
    out += token_idx * out_stride + at;
    if (residual != nullptr) {
        residual += token_idx * residual_stride + at;
    }
    const int* ids = keep(row_id_map + token_idx * k);
    const float* factors = keep(weights + token_idx * k);
    uint32_t furthest = 0;   // of the rows, -1 as 0
    if (is_one && k <= 4) {  // rows that there are not take time
        combine_columns<4, 1>(out, rows + at, ids, factors, residual, rows_stride, k, num_rows, 1,
                              furthest);
    } else if (is_one) {
        combine_columns<8, 1>(out, rows + at, ids, factors, residual, rows_stride, k, num_rows, 1,
                              furthest);
    } else {
        combine_columns<2, kColumns>(out, rows + at, ids, factors, residual, rows_stride, k,
                                     num_rows, row_size - at, furthest);
    }
    report_if(flag, furthest > static_cast<uint32_t>(num_rows), kRowsOutside);
}

// clang-format off: it would take pointers for products.
#define EXPORT_MOE_COMBINE_BY(NAME, T, BODY, ...)                                                 \
    DESCRIBED(                                                                                    \
        NAME, "x: vectors of a group of tokens in steps of blockDim.x; y: groups",                \
        (.shared_bytes = 0),                                                                      \
        extern "C" __global__ void __launch_bounds__(kMaxThreads, kMinBlocks) NAME(               \
            T* out, int* flag, const T* rows, const int* row_id_map, const float* weights,        \
            const T* residual, int64_t out_stride, int64_t rows_stride, int64_t residual_stride,  \
            int num_tokens, int group_tokens, int k, int num_rows, int row_units, int row_size) { \
            BODY<T __VA_OPT__(, ) __VA_ARGS__>(                                                   \
                out, flag, rows, row_id_map, weights, residual, out_stride, rows_stride,          \
                residual_stride, num_tokens, group_tokens, k, num_rows, row_units, row_size);     \
        })
// clang-format on

#define EXPORT_MOE_COMBINE(DTYPE, T, AHEAD) \
    EXPORT_MOE_COMBINE_BY(moe_combine_##DTYPE##_vec##AHEAD, T, combine, kVecElems<T>, AHEAD)

#define EXPORT_MOE_COMBINE_VARIANTS(DTYPE, T) \
    EXPORT_MOE_COMBINE(DTYPE, T, 2)           \
    EXPORT_MOE_COMBINE(DTYPE, T, 4)           \
    EXPORT_MOE_COMBINE(DTYPE, T, 6)           \
    EXPORT_MOE_COMBINE(DTYPE, T, 8)           \
    EXPORT_MOE_COMBINE_BY(moe_combine_##DTYPE##_scalar, T, combine_elements)

// {op}_{dtype}_{variant}
EXPORT_MOE_COMBINE_VARIANTS(fp16, __half)
EXPORT_MOE_COMBINE_VARIANTS(bf16, __nv_bfloat16)
EXPORT_MOE_COMBINE_VARIANTS(fp32, float)

}  // namespace kernel_hub::moe
