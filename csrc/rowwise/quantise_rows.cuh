// Rows into e4m3, each by a scale of its own, of whatever a Source makes of what it reads.
//
// A Source has Bits<kWidth>, read<kWidth>(first) -> Bits, which loads what kWidth values from
// `first` on are made of, values(bits, values), which makes them, and kIsCheap: they are made again
// rather than kept as floats.
#pragma once

#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/reduce.cuh"
#include "kernel_hub/vec.cuh"
#include "rowwise/quantised.cuh"
#include "rowwise/row_elements.cuh"
#include "rowwise/row_vecs.cuh"

namespace kernel_hub::rowwise {

// The values of a row as they are.
template <typename T>
struct PlainRow {
    using Elem = T;
    static constexpr bool kIsCheap = true;
    template <int kWidth>
    using Bits = typename Access<T, kWidth>::Bits;

    const T* x;

    template <int kWidth>
    __device__ __forceinline__ Bits<kWidth> read(int first) const {
        return Access<T, kWidth>::read(x + first);
    }
    template <int kWidth>
    __device__ __forceinline__ void values(Bits<kWidth> bits, float (&found)[kWidth]) const {
        Access<T, kWidth>::unpack(bits, found);
    }
};

// Where this thread's row begins.
struct E4m3Row {
    __nv_fp8_e4m3* out;
    float* out_scale;
    bool is_there;  // the last block may have fewer rows than blockDim.y
    int size;
};

template <int kWidth>
__device__ __forceinline__ void write_scaled(__nv_fp8_e4m3* out, float factor,
                                             float (&values)[kWidth]) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        values[j] *= factor;
    }
    write_row(out, values);
}

// NOTE: without this the compiler makes them again behind the barrier.
template <int kWidth>
__device__ __forceinline__ void keep_floats(float (&values)[kWidth]) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        uint32_t bits = __float_as_uint(values[j]);
        asm volatile("" : "+r"(bits));
        values[j] = __uint_as_float(bits);
    }
}

// One row a blockDim.x, kVecs vectors a thread, its values in registers.
template <int kVecs, typename Source>
__device__ __forceinline__ void quantise_vecs(const Source& source, E4m3Row row) {
    constexpr int kWidth = kVecElems<typename Source::Elem>;
    using Bits = typename Source::template Bits<kWidth>;
    __shared__ float slots[kMaxWarps];
    const int num_vecs = row.is_there ? row.size / kWidth : 0;
    follow_launch_before();

    // Issue every load before the first use.
    Bits bits[kVecs];
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        const int vec_idx = threadIdx.x + i * blockDim.x;
        if (vec_idx < num_vecs) {
            bits[i] = source.template read<kWidth>(vec_idx * kWidth);
        }
    }
    float values[kVecs][kWidth];
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        if (threadIdx.x + i * blockDim.x < num_vecs) {
            source.template values<kWidth>(bits[i], values[i]);
            if constexpr (!Source::kIsCheap) {
                keep_floats(values[i]);
            }
            largest = max_nan(largest, largest_of(values[i]));
        }
    }
    // Rows of a vector a thread may be less than a warp.
    largest = kVecs > 1 ? whole_row_max(largest, slots) : row_max(largest, slots);
    const float factor = scale_row(kLargest<__nv_fp8_e4m3>, row.out_scale, largest, row.is_there);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        const int vec_idx = threadIdx.x + i * blockDim.x;
        if (vec_idx < num_vecs) {
            if constexpr (Source::kIsCheap) {
                keep_packed(bits[i]);
                source.template values<kWidth>(bits[i], values[i]);
            }
            write_scaled(row.out + vec_idx * kWidth, factor, values[i]);
        }
    }
}

// Rows of any length in accesses of kWidth elements: a pass for the largest, and one more, which
// finds the row in L1 or L2.
template <int kWidth, typename Source>
__device__ __forceinline__ void quantise_passes(const Source& source, E4m3Row row) {
    __shared__ float slots[kMaxWarps];
    const int size = row.is_there ? row.size : 0;
    const int step = blockDim.x * kWidth;
    follow_launch_before();
    float largest = 0.0f;
#pragma unroll 2
    for (int i = threadIdx.x * kWidth; i < size; i += step) {
        float values[kWidth];
        source.template values<kWidth>(source.template read<kWidth>(i), values);
        largest = max_nan(largest, largest_of(values));
    }
    const float factor =
        scale_row(kLargest<__nv_fp8_e4m3>, row.out_scale, row_max(largest, slots), row.is_there);
#pragma unroll 2
    for (int i = threadIdx.x * kWidth; i < size; i += step) {
        float values[kWidth];
        source.template values<kWidth>(source.template read<kWidth>(i), values);
        write_scaled(row.out + i, factor, values);
    }
}

// Rows of any length and alignment by the element: what one run of all threads holds is read once.
template <typename Source>
__device__ __forceinline__ void quantise_elements(const Source& source, E4m3Row row) {
    __shared__ float slots[kMaxWarps];
    const ElementRuns runs(row.is_there ? row.size : 0);
    follow_launch_before();
    float values[kRun][1];
    const auto make = [&](int at, int left) {
        typename Source::template Bits<1> bits[kRun] = {};
        each_of_run(left, [&](int j) { bits[j] = source.template read<1>(at + j * kWarpSize); });
#pragma unroll
        for (int j = 0; j < kRun; ++j) {
            source.template values<1>(bits[j], values[j]);
        }
    };
    float largest = 0.0f;
    runs.each([&](int at, int left) {
        make(at, left);
        each_of_run(left, [&](int j) { largest = max_nan(largest, fabsf(values[j][0])); });
    });
    const float factor =
        scale_row(kLargest<__nv_fp8_e4m3>, row.out_scale, row_max(largest, slots), row.is_there);
    runs.each([&](int at, int left) {
        if (!runs.is_held()) {
            make(at, left);
        }
        each_of_run(left,
                    [&](int j) { write_scaled(row.out + at + j * kWarpSize, factor, values[j]); });
    });
}

}  // namespace kernel_hub::rowwise
