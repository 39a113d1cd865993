// Rows into e4m3, each by a scale of its own, of whatever a Source makes of what it reads.
//
// A Source has Bits<kWidth>, read<kWidth>(first) -> Bits, which loads what kWidth values from
// `first` on are made of, values(bits, values), which makes them, and kGrows: the largest magnitude
// of a row is what its largest number (kOfMagnitudes: magnitude) becomes, unless that is less than
// trough(). Then it has that, number_bits(bits), value_of(number) and quotients(bits, scale,
// values).
#pragma once

#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/reduce.cuh"
#include "kernel_hub/vec.cuh"
#include "rowwise/quantised.cuh"
#include "rowwise/row_elements.cuh"
#include "rowwise/row_vecs.cuh"

namespace kernel_hub::rowwise {

struct RowScale {
    float largest;  // magnitude of the row
    float factor;   // which makes it the largest that is written
};

template <int kWidth>
__device__ __forceinline__ void times(float (&values)[kWidth], float factor) {
#pragma unroll
    for (float& value : values) {
        value *= factor;
    }
}

// The largest number of vectors and of 0, or magnitude; nan where one is.
template <typename T, bool kOfMagnitudes>
struct LargestOfVecs {
    uint32_t pairs = 0;

    __device__ __forceinline__ void add(uint4 bits) {
        add(bits.x, bits.y);
        add(bits.z, bits.w);
    }
    __device__ __forceinline__ float value() const {
        float values[2];
        Word<T>::unpack(pairs, values);
        return max_nan(values[0], values[Word<T>::kElems - 1]);
    }

  private:
    __device__ __forceinline__ void add(uint32_t a, uint32_t b) {
        if constexpr (kOfMagnitudes) {
            a &= kMagnitudes;
            b &= kMagnitudes;
        }
        pairs = max_of_pairs<T>(pairs, max_of_pairs<T>(a, b));
    }
    static constexpr uint32_t kMagnitudes = sizeof(T) == 2 ? 0x7fff7fff : 0x7fffffff;
};

// The values of a row as they are.
template <typename T>
struct PlainRow {
    using Elem = T;
    static constexpr bool kGrows = true, kOfMagnitudes = true;
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
    static constexpr __device__ float trough() { return 0.0f; }
    __device__ __forceinline__ uint4 number_bits(Bits<kVecElems<T>> bits) const { return bits; }
    __device__ __forceinline__ float value_of(float number) const { return number; }
    template <int kWidth>
    __device__ __forceinline__ void quotients(Bits<kWidth> bits, RowScale scale,
                                              float (&found)[kWidth]) const {
        values<kWidth>(bits, found);
        times(found, scale.factor);
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
    times(values, factor);
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

// One row a blockDim.x, kVecs vectors a thread, which stay as they were read until they are
// rounded.
template <int kVecs, typename Source>
__device__ __forceinline__ void quantise_grown(const Source& source, E4m3Row row) {
    using T = typename Source::Elem;
    constexpr int kWidth = kVecElems<T>;
    __shared__ float slots[2][kMaxWarps];
    const int num_vecs = row.is_there ? row.size / kWidth : 0;
    follow_launch_before();

    typename Source::template Bits<kWidth> bits[kVecs];
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        const int vec_idx = threadIdx.x + i * blockDim.x;
        bits[i] = {};
        if (vec_idx < num_vecs) {
            bits[i] = source.template read<kWidth>(vec_idx * kWidth);
        }
    }
    LargestOfVecs<T, Source::kOfMagnitudes> found;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        found.add(source.number_bits(bits[i]));
    }
    // Rows of a vector a thread may be less than a warp.
    float largest =
        kVecs > 1 ? whole_row_max(found.value(), slots[0]) : row_max(found.value(), slots[0]);
    largest = fabsf(source.value_of(largest));
    if constexpr (Source::trough() > 0.0f) {
        // The warps of a barrier take one way. NOTE: read again, not made of `bits`, which would be
        // all of the code twice.
        const bool is_low = !(largest >= Source::trough());
        if (__any_sync(0xffffffffu, is_low) || (blockDim.x > kWarpSize && blockDim.y > 1)) {
            largest = 0.0f;
#pragma unroll 1
            for (int vec_idx = threadIdx.x; vec_idx < num_vecs; vec_idx += blockDim.x) {
                float values[kWidth];
                source.template values<kWidth>(source.template read<kWidth>(vec_idx * kWidth),
                                               values);
                largest = max_nan(largest, largest_of(values));
            }
            largest = row_max(largest, slots[1]);
        }
    }
    const RowScale scale = {
        max_nan(largest, kLeastLargest),
        scale_row(kLargest<__nv_fp8_e4m3>, row.out_scale, largest, row.is_there)};
    keep_address(row.out);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        const int vec_idx = threadIdx.x + i * blockDim.x;
        if (vec_idx < num_vecs) {
            float values[kWidth];
            source.template quotients<kWidth>(bits[i], scale, values);
            write_row(row.out + vec_idx * kWidth, values);
        }
    }
}

// As quantise_grown, the values themselves in registers.
template <int kVecs, typename Source>
__device__ __forceinline__ void quantise_kept(const Source& source, E4m3Row row) {
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
            keep_floats(values[i]);
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
            write_scaled(row.out + vec_idx * kWidth, factor, values[i]);
        }
    }
}

template <int kVecs, typename Source>
__device__ __forceinline__ void quantise_vecs(const Source& source, E4m3Row row) {
    if constexpr (Source::kGrows) {
        quantise_grown<kVecs>(source, row);
    } else {
        quantise_kept<kVecs>(source, row);
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
