// Norms of rows by the element: any length, any alignment.
#pragma once

#include "kernel_hub/follow_launch.cuh"
#include "rowwise/norm_values.cuh"

namespace kernel_hub::rowwise {

// A row's scale, which it writes; what values are multiplied by.
template <typename T>
__device__ __forceinline__ float scale_row(const NormParams<T, EightBits>& p, float largest,
                                           bool is_there) {
    const float most = p.is_int8 ? kLargest<int8_t> : kLargest<__nv_fp8_e4m3>;
    return rowwise::scale_row(most, p.out_scale, largest, is_there);
}

template <typename T, int kWidth>
__device__ __forceinline__ void write_scaled(const NormParams<T, EightBits>& p, int first,
                                             float factor, float (&values)[kWidth]) {
#pragma unroll
    for (float& value : values) {
        value *= factor;
    }
    if (p.is_int8) {
        write_row(reinterpret_cast<int8_t*>(p.out + first), values);
    } else {
        write_row(reinterpret_cast<__nv_fp8_e4m3*>(p.out + first), values);
    }
}

// Rows of any length and alignment by the element, a pass for each sum; what registers do not hold
// is found in L1 or L2 again.
template <typename T, typename Out, bool kCentred>
__device__ __forceinline__ void norm_elements(NormParams<T, Out> p) {
    constexpr bool kQuantised = sizeof(Out) == 1;
    __shared__ float slots[kCentred + 1 + kQuantised][kMaxWarps];
    const int64_t row_idx = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const bool is_there = row_idx < p.num_rows;
    const ElementRuns runs(is_there ? p.hidden_size : 0);
    const float size = static_cast<float>(p.hidden_size);
    const bool adds_before = p.residual != nullptr && !p.adds_after;
    p.select_row(blockIdx.y, row_idx);
    follow_launch_before();

    T row[kRun];
    float sum = 0.0f;
    runs.each([&](int at, int left) {
        load_run(row, p.x + at, left);
        if (adds_before) {
            T other[kRun];
            load_run(other, p.residual + at, left);
            each_of_run(left, [&](int j) {
                row[j] = from_float<T>(to_float(row[j]) + to_float(other[j]));
                p.residual_out[at + j * kWarpSize] = row[j];
            });
        }
#pragma unroll
        for (const T value : row) {
            sum += kCentred ? to_float(value) : to_float(value) * to_float(value);
        }
    });
    const T* found = adds_before ? p.residual_out : p.x;
    const auto read_again = [&](int at, int left) {
        if (!runs.is_held()) {
            load_run(row, found + at, left);
        }
    };
    RowShape shape{};
    sum = row_sum(sum, slots[0]);
    if constexpr (kCentred) {
        shape.mean = sum / size;
        sum = 0.0f;
        runs.each([&](int at, int left) {
            read_again(at, left);
            each_of_run(left, [&](int j) {
                const float distance = to_float(row[j]) - shape.mean;
                sum += distance * distance;
            });
        });
        sum = row_sum(sum, slots[1]);
    }
    shape.inverse = rsqrtf(sum / size + p.eps);
    shape.offset = shape.inverse * p.weight_offset;

    float normed[kRun];
    const auto norm_run = [&](int at, int left) {
        read_again(at, left);
        RunFactors<T> weight(p.is_weight32, 1.0f), bias(p.is_weight32, 0.0f);
        weight.load(p.weight, p.is_weight32, at, left);
        bias.load(p.bias, p.is_weight32, at, left);
#pragma unroll
        for (int j = 0; j < kRun; ++j) {
            normed[j] = normed_value(shape, to_float(row[j]), weight.at(p.is_weight32, j),
                                     bias.at(p.is_weight32, j));
        }
    };
    if constexpr (kQuantised) {
        float largest = 0.0f;
        runs.each([&](int at, int left) {
            norm_run(at, left);
            each_of_run(left, [&](int j) { largest = max_nan(largest, fabsf(normed[j])); });
        });
        const float factor = scale_row(p, row_max(largest, slots[kCentred + 1]), is_there);
        runs.each([&](int at, int left) {
            if (!runs.is_held()) {
                norm_run(at, left);
            }
            each_of_run(left, [&](int j) {
                float one[1] = {normed[j]};
                write_scaled(p, at + j * kWarpSize, factor, one);
            });
        });
    } else {
        runs.each([&](int at, int left) {
            T after[kRun];
            if (p.adds_after) {
                load_run(after, p.residual + at, left);
            }
            norm_run(at, left);
            each_of_run(left, [&](int j) {
                p.out[at + j * kWarpSize] =
                    from_float<T>(p.adds_after ? normed[j] + to_float(after[j]) : normed[j]);
            });
        });
    }
}

}  // namespace kernel_hub::rowwise
