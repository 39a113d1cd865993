// The gated activation of SwiGLU feed-forward layers.
//
//   out[i, j] = silu(x[i, j]) * x[i, size + j],  silu(g) = g / (1 + exp(-g)),  in fp32, rounded once
//
// Parallelisation: each thread takes kVecs 16-byte vectors of one row, blockDim.x apart, so a block covers
// blockDim.x * kVecs vectors; column blocks along gridDim.x, rows along gridDim.y (in steps of gridDim.y when there are
// more), an outer dimension whose stride does not collapse with the rows' along gridDim.z. No shared memory.
//   vec1 vec2 vec4   size a multiple of the vector, pointers and strides 16-byte aligned
//   scalar           any size, any alignment
// Source: Shazeer, "GLU Variants Improve Transformer", 2020.

#include "kernel_hub/vec.cuh"

namespace kernel_hub {

// 16-bit results need neither the slow exponential nor the slow division; their error is far below the rounding.
template <typename T>
__device__ __forceinline__ float silu(float gate) {
    return __fdividef(gate, 1.0f + __expf(-gate));
}
template <>
__device__ __forceinline__ float silu<float>(float gate) {
    return gate / (1.0f + expf(-gate));
}

template <typename T, int kVecs, int kWidth>
__device__ __forceinline__ void silu_and_mul(T* out,      // (outer, num_rows, size)
                                             const T* x,  // (outer, num_rows, 2 * size): gate, then up
                                             int64_t out_stride, int64_t out_outer_stride, int64_t x_stride,
                                             int64_t x_outer_stride, int num_rows, int size) {
    using RowAccess = Access<T, kWidth>;
    out += blockIdx.z * out_outer_stride;
    x += blockIdx.z * x_outer_stride;
    const int first = (blockIdx.x * blockDim.x * kVecs + threadIdx.x) * kWidth;
    const int step = blockDim.x * kWidth;

    for (int64_t row_idx = blockIdx.y; row_idx < num_rows; row_idx += gridDim.y) {
        const T* gate_row = x + row_idx * x_stride;
        const T* up_row = gate_row + size;
        T* out_row = out + row_idx * out_stride;

        // Issue every load before the first use.
        typename RowAccess::Bits gate[kVecs], up[kVecs];
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            const int j = first + i * step;
            if (j < size) {
                gate[i] = RowAccess::read(gate_row + j);
                up[i] = RowAccess::read(up_row + j);
            }
        }

#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            const int j = first + i * step;
            if (j < size) {
                float g[kWidth], u[kWidth];
                RowAccess::unpack(gate[i], g);
                RowAccess::unpack(up[i], u);
#pragma unroll
                for (int e = 0; e < kWidth; ++e) {
                    g[e] = silu<T>(g[e]) * u[e];
                }
                RowAccess::write(out_row + j, g);
            }
        }
    }
}

}  // namespace kernel_hub

#define EXPORT_SILU_AND_MUL(DTYPE, T, VARIANT, VECS, WIDTH)                                                        \
    extern "C" __global__ void __launch_bounds__(1024) silu_and_mul_##DTYPE##_##VARIANT(                           \
        T* out, const T* x, int64_t out_stride, int64_t out_outer_stride, int64_t x_stride,                        \
        int64_t x_outer_stride, int num_rows, int size) {                                                          \
        kernel_hub::silu_and_mul<T, VECS, WIDTH>(out, x, out_stride, out_outer_stride, x_stride, x_outer_stride,   \
                                                 num_rows, size);                                                  \
    }

#define EXPORT_SILU_AND_MUL_VARIANTS(DTYPE, T)                            \
    EXPORT_SILU_AND_MUL(DTYPE, T, vec1, 1, kernel_hub::kVecElems<T>)      \
    EXPORT_SILU_AND_MUL(DTYPE, T, vec2, 2, kernel_hub::kVecElems<T>)      \
    EXPORT_SILU_AND_MUL(DTYPE, T, vec4, 4, kernel_hub::kVecElems<T>)      \
    EXPORT_SILU_AND_MUL(DTYPE, T, scalar, 1, 1)

EXPORT_SILU_AND_MUL_VARIANTS(fp16, __half)
EXPORT_SILU_AND_MUL_VARIANTS(bf16, __nv_bfloat16)
EXPORT_SILU_AND_MUL_VARIANTS(fp32, float)
