// Quantised rows of an RMS norm that nothing is added to: the norm is a factor of the whole row, so
// what a scale leaves of them are the weighted values. Their largest is found together with the sum
// of squares, by one exchange of warps.
#pragma once

#include "rowwise/norm_elements.cuh"
#include "rowwise/row_vecs.cuh"

namespace kernel_hub::rowwise {

// NOTE: below 9.0 rows of a vector a thread would spill, for the sake of 32 registers.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr int kLeastVecs = 1;
#else
constexpr int kLeastVecs = 2;
#endif

// The same of the whole grid.
template <typename T>
__device__ __forceinline__ bool is_weighted_alone(const NormParams<T, EightBits>& p) {
    return p.bias == nullptr && p.weight != nullptr &&
           (sizeof(T) == sizeof(float) || !p.is_weight32);
}

struct SquaresAndLargest {
    float squares, largest;
};

// first: of a thread that has one vector.
template <typename T, int kVecs>
__device__ __forceinline__ void quantise_weighted(NormParams<T, EightBits> p,
                                                  const RowVecs<T, kVecs>& row,
                                                  const Factors<T, 1, false>& first, int num_vecs,
                                                  SquaresAndLargest (&slots)[kMaxWarps]) {
    constexpr int kWidth = kVecElems<T>, kBatch = kVecs == 1 ? 1 : 2;
    const auto join = [](SquaresAndLargest found, int width) {
        return SquaresAndLargest{group_sum(found.squares, width), group_max(found.largest, width)};
    };
    float weighted[kVecs][kWidth];
    SquaresAndLargest found = {0.0f, 0.0f};
#pragma unroll
    for (int begin = 0; begin < kVecs; begin += kBatch) {
        uint4 weights[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int vec_idx = threadIdx.x + (begin + i) * blockDim.x;
            weights[i] = kVecs == 1 ? first.weight[0][0] : make_uint4(0, 0, 0, 0);
            if (kVecs > 1 && vec_idx < num_vecs) {
                weights[i] = load_shared_by_blocks(static_cast<const uint4*>(p.weight) + vec_idx);
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            float (&s)[kWidth] = weighted[begin + i];
            float w[kWidth], squares = 0.0f;
            unpack<T>(row.bits[begin + i], s);
            unpack<T>(weights[i], w);
            if (p.weight_offset != 0.0f) {
#pragma unroll
                for (float& weight : w) {
                    weight += p.weight_offset;
                }
            }
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                squares += s[j] * s[j];
                s[j] *= w[j];
            }
            found.squares += squares;
            found.largest = max_nan(found.largest, largest_of(s));
        }
    }
    // Rows of four vectors a thread are whole warps.
    found = join(found, kVecs == 4 ? kWarpSize : blockDim.x);
    if (blockDim.x > kWarpSize) {
        found = join_warps(found, {0.0f, 0.0f}, slots, join);
    }
    const float inverse =
        rsqrtf(__fdividef(found.squares, static_cast<float>(p.hidden_size)) + p.eps);
    const float most = p.is_int8 ? kLargest<int8_t> : kLargest<__nv_fp8_e4m3>;
    const float largest = max_nan(inverse * found.largest, kLeastLargest);
    if (threadIdx.x == 0 && num_vecs > 0) {
        *p.out_scale = largest / most;
    }
    const float factor = inverse * __fdividef(most, largest);
    keep_address(p.out);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        const int vec_idx = threadIdx.x + i * blockDim.x;
        if (vec_idx < num_vecs) {
            write_scaled(p, vec_idx * kWidth, factor, weighted[i]);
        }
    }
}

}  // namespace kernel_hub::rowwise
