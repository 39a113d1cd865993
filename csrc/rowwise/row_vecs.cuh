// A row held in the registers of the threads that share it.
#pragma once

#include <type_traits>

#include "kernel_hub/vec.cuh"

namespace kernel_hub::rowwise {

// NOTE: without this the compiler keeps a row as floats across the barrier: 8 registers a 16-bit
// vector, not 4.
__device__ __forceinline__ void keep_packed(uint4& bits) {
    asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w));
}

// NOTE: without this each access makes its address anew of a row's number and strides. It stays
// known for one of global memory.
template <typename T>
__device__ __forceinline__ void keep_address(T*& address) {
#ifdef __CUDA_ARCH__
    size_t global = __cvta_generic_to_global(address);
    asm volatile("" : "+l"(global));
    address = static_cast<T*>(__cvta_global_to_generic(global));
#endif
}

// Of two words the larger numbers; nan where one is.
template <typename T>
__device__ __forceinline__ uint32_t max_of_pairs(uint32_t a, uint32_t b) {
    if constexpr (sizeof(T) == sizeof(float)) {
        return __float_as_uint(max_nan(__uint_as_float(a), __uint_as_float(b)));
    } else {
        using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
        const Pair larger = __hmax2_nan(*reinterpret_cast<Pair*>(&a), *reinterpret_cast<Pair*>(&b));
        return *reinterpret_cast<const uint32_t*>(&larger);
    }
}

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
                bits[i] = ld_global(row + vec_idx * kVecElems<T>);
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
                st_global(row + vec_idx * kVecElems<T>, bits[i]);
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

    // The sum of what `of` makes of each element.
    template <typename Of>
    __device__ __forceinline__ float sum_of(const Of& of) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            float a[kVecElems<T>];
            unpack<T>(bits[i], a);
#pragma unroll
            for (int j = 0; j < kVecElems<T>; ++j) {
                sum += of(a[j]);
            }
        }
        return sum;
    }
    __device__ __forceinline__ float sum() const {
        return sum_of([](float a) { return a; });
    }
    __device__ __forceinline__ float sum_of_squares() const {
        return sum_of([](float a) { return a * a; });
    }

    // Of distances from `mean`, which zeros beyond the row have too.
    __device__ __forceinline__ float sum_of_squares_from(float mean, int num_vecs) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            float a[kVecElems<T>];
            unpack<T>(bits[i], a);
            if (threadIdx.x + i * blockDim.x < num_vecs) {
#pragma unroll
                for (int j = 0; j < kVecElems<T>; ++j) {
                    sum += (a[j] - mean) * (a[j] - mean);
                }
            }
        }
        return sum;
    }

    __device__ __forceinline__ void keep_packed() {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            rowwise::keep_packed(bits[i]);
        }
    }

    __device__ __forceinline__ void scale(float inverse_rms, const RowVecs& weight,
                                          float weight_offset) {
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

}  // namespace kernel_hub::rowwise
