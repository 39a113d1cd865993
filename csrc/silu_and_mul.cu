// The gated activation of SwiGLU feed-forward layers.
//
//   out[i, j] = silu(x[i, j]) * x[i, size + j],  silu(g) = g / (1 + exp(-g)),
//   in fp32, rounded once
//
// Parallelisation: one access of `out` a thread; blocks of columns along gridDim.x, rows along
// gridDim.y (in steps of gridDim.y when there are more), along gridDim.z an outer dimension whose
// stride does not collapse with the rows'. No shared memory.
//   vec      16 bytes a thread: size a multiple of the vector, everything 16-byte aligned
//   scalar   one element a thread: any size, any alignment
// NOTE: two or four vectors a thread, and a grid as large as the card, were slower at every size
// (docs/notes/silu_and_mul.md).
// Source: Shazeer, "GLU Variants Improve Transformer", 2020.

#include "kernel_hub/vec.cuh"

namespace kernel_hub {

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

template <typename T, int kWidth>
__device__ __forceinline__ void silu_and_mul(
    T* out,      // (outer, num_rows, size)
    const T* x,  // (outer, num_rows, 2 * size): gate, then up
    int64_t out_stride, int64_t out_outer_stride, int64_t x_stride, int64_t x_outer_stride,
    int num_rows, int size) {
    using RowAccess = Access<T, kWidth>;
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * kWidth;
    if (column >= size) {
        return;
    }
    out += blockIdx.z * out_outer_stride + column;
    x += blockIdx.z * x_outer_stride + column;

    for (int64_t row_idx = blockIdx.y; row_idx < num_rows; row_idx += gridDim.y) {
        const typename RowAccess::Bits gate_bits = RowAccess::read(x + row_idx * x_stride);
        const typename RowAccess::Bits up_bits = RowAccess::read(x + row_idx * x_stride + size);
        float gate[kWidth], up[kWidth];
        RowAccess::unpack(gate_bits, gate);
        RowAccess::unpack(up_bits, up);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            gate[j] = silu<T>(gate[j]) * up[j];
        }
        RowAccess::write(out + row_idx * out_stride, gate);
    }
}

}  // namespace kernel_hub

#define EXPORT_SILU_AND_MUL(DTYPE, T, VARIANT, WIDTH)                                       \
    extern "C" __global__ void __launch_bounds__(1024) silu_and_mul_##DTYPE##_##VARIANT(    \
        T* out, const T* x, int64_t out_stride, int64_t out_outer_stride, int64_t x_stride, \
        int64_t x_outer_stride, int num_rows, int size) {                                   \
        kernel_hub::silu_and_mul<T, WIDTH>(out, x, out_stride, out_outer_stride, x_stride,  \
                                           x_outer_stride, num_rows, size);                 \
    }

EXPORT_SILU_AND_MUL(fp16, __half, vec, kernel_hub::kVecElems<__half>)
EXPORT_SILU_AND_MUL(bf16, __nv_bfloat16, vec, kernel_hub::kVecElems<__nv_bfloat16>)
EXPORT_SILU_AND_MUL(fp32, float, vec, kernel_hub::kVecElems<float>)
EXPORT_SILU_AND_MUL(fp16, __half, scalar, 1)
EXPORT_SILU_AND_MUL(bf16, __nv_bfloat16, scalar, 1)
EXPORT_SILU_AND_MUL(fp32, float, scalar, 1)
