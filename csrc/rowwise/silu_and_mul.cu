// The gated activation of SwiGLU feed-forward layers.
//
//   out[i, j] = silu(x[i, j]) * x[i, size + j],  silu(g) = g / (1 + exp(-g)),
//   in fp32, rounded once
//
// Parallelisation: one access of `out` a thread; blocks of columns along gridDim.x, rows along
// gridDim.y (in steps of gridDim.y when there are more), along gridDim.z an outer dimension whose
// stride does not collapse with the rows'. No shared memory.
//   vec      16 bytes a thread: size a multiple of the vector, everything 16-byte aligned
//   flat     the same of contiguous rows, as many as gridDim.y: few parameters, no strides, no loop
//   scalar   one element a thread: any size, any alignment
// NOTE: two or four vectors a thread, and a grid as large as the card, were slower at every size
// (docs/notes/silu_and_mul.md).
// Source: Shazeer, "GLU Variants Improve Transformer", 2020.

#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/vec.cuh"

namespace kernel_hub::rowwise {

// 16-bit results need neither the slow exponential nor the slow division; their error is far below
// the rounding.
template <typename T>
__device__ __forceinline__ float silu(float gate) {
    return __fdividef(gate, 1.0f + __expf(-gate));
}
template <>
__device__ __forceinline__ float silu<float>(float gate) {
    return gate / (1.0f + expf(-gate));
}

// One access of `out`.
template <typename T, int kWidth>
__device__ __forceinline__ void gate_one(T* out, const T* gate_address, const T* up_address) {
    using RowAccess = Access<T, kWidth>;
    const typename RowAccess::Bits gate_bits = RowAccess::read(gate_address);
    const typename RowAccess::Bits up_bits = RowAccess::read(up_address);
    float gate[kWidth], up[kWidth];
    RowAccess::unpack(gate_bits, gate);
    RowAccess::unpack(up_bits, up);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        gate[j] = silu<T>(gate[j]) * up[j];
    }
    RowAccess::write(out, gate);
}

template <typename T, int kWidth>
__device__ __forceinline__ void silu_and_mul(
    T* out,      // (outer, num_rows, size)
    const T* x,  // (outer, num_rows, 2 * size): gate, then up
    int64_t out_stride, int64_t out_outer_stride, int64_t x_stride, int64_t x_outer_stride,
    int num_rows, int size) {
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * kWidth;
    if (column >= size) {
        return;
    }
    out += blockIdx.z * out_outer_stride + column;
    x += blockIdx.z * x_outer_stride + column;
    for (int64_t row_idx = blockIdx.y; row_idx < num_rows; row_idx += gridDim.y) {
        const T* gate = x + row_idx * x_stride;
        gate_one<T, kWidth>(out + row_idx * out_stride, gate, gate + size);
    }
}

// Both contiguous, a row a blockIdx.y.
template <typename T>
__device__ __forceinline__ void silu_and_mul_flat(T* out, const T* x, int size) {
    constexpr int kWidth = kVecElems<T>;
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * kWidth;
    if (column >= size) {
        return;
    }
    const int64_t first = static_cast<int64_t>(blockIdx.y) * size;
    const T* gate = x + (2 * first + column);
    gate_one<T, kWidth>(out + (first + column), gate, gate + size);
}

#define EXPORT_SILU_AND_MUL(DTYPE, T, VARIANT, WIDTH)                                              \
    DESCRIBED(                                                                                     \
        silu_and_mul_##DTYPE##_##VARIANT,                                                          \
        "x: columns in steps of blockDim.x accesses, y: rows, z: the outer dimension",             \
        (.shared_bytes = 0),                                                                       \
        extern "C" __global__ void __launch_bounds__(1024) silu_and_mul_##DTYPE##_##VARIANT(       \
            T* out, const T* x, int64_t out_stride, int64_t out_outer_stride, int64_t x_stride,    \
            int64_t x_outer_stride, int num_rows, int size) {                                      \
            silu_and_mul<T, WIDTH>(out, x, out_stride, out_outer_stride, x_stride, x_outer_stride, \
                                   num_rows, size);                                                \
        })

#define EXPORT_SILU_AND_MUL_VARIANTS(DTYPE, T)                                                  \
    DESCRIBED(                                                                                  \
        silu_and_mul_##DTYPE##_flat,                                                            \
        "x: columns in steps of blockDim.x accesses, y: exactly the rows", (.shared_bytes = 0), \
        extern "C" __global__ void __launch_bounds__(1024) silu_and_mul_##DTYPE##_flat(         \
            T* out, const T* x, int size) { silu_and_mul_flat<T>(out, x, size); })              \
    EXPORT_SILU_AND_MUL(DTYPE, T, vec, kVecElems<T>)                                            \
    EXPORT_SILU_AND_MUL(DTYPE, T, scalar, 1)

EXPORT_SILU_AND_MUL_VARIANTS(fp16, __half)
EXPORT_SILU_AND_MUL_VARIANTS(bf16, __nv_bfloat16)
EXPORT_SILU_AND_MUL_VARIANTS(fp32, float)

}  // namespace kernel_hub::rowwise
