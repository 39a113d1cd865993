// Layer normalisation of rows, with what models put before and after it.
//
//   s = x, or round(x + residual), which is also written to residual_out
//   out = (s - mean(s)) / sqrt(mean((s - mean(s))^2) + eps) * (weight + weight_offset) + bias
//   or residual + that, where adds_after is set and s = x; in fp32, rounded once
//   e4m3 and int8: out = round(that / out_scale), out_scale = max |that| of the row / 448 or 127
//
// Parallelisation: blockDim.x threads a row, blockDim.y rows a block; rows along gridDim.x, along
// gridDim.y an outer dimension whose stride does not collapse with theirs.
//   vec1 vec2 vec4   a row in registers, that many 16-byte vectors a thread: hidden_size at most
//                    blockDim.x * vectors of them, everything 16-byte aligned
//   loop             rows of any length, a pass for each sum; everything 16-byte aligned
//   scalar           any size, any alignment: the same, one element an access
// Weight and bias are T or fp32, asked at run time; they are read after the sums, from L1 or L2.
// `out` may be `x`, `residual_out` may be `residual`: each element is read, then written, by one
// thread. Shared memory: one float a warp and sum.
// Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.

#include "kernel_hub/launch_facts.cuh"
#include "rowwise/norm.cuh"

namespace kernel_hub::rowwise {

// 64 registers a thread: any blockDim up to 1,024.
#define EXPORT_LAYER_NORM(DTYPE, T, OUT, VARIANT, BODY, SIZE)                                      \
    DESCRIBED(                                                                                     \
        layer_norm_##DTYPE##_##VARIANT,                                                            \
        "x: rows in steps of blockDim.y, y: the outer dimension; blockDim.x threads a row",        \
        (.shared_bytes = 0),                                                                       \
        extern "C" __global__ void __launch_bounds__(1024) layer_norm_##DTYPE##_##VARIANT(         \
            OUT* out, float* out_scale, T* residual_out, const T* x, const T* residual,            \
            const void* weight, const void* bias, int64_t out_stride, int64_t out_outer_stride,    \
            int64_t scale_stride, int64_t scale_outer_stride, int64_t residual_out_stride,         \
            int64_t residual_out_outer_stride, int64_t x_stride, int64_t x_outer_stride,           \
            int64_t residual_stride, int64_t residual_outer_stride, int num_rows, int hidden_size, \
            int is_weight32, int adds_after, float eps, float weight_offset) {                     \
            BODY<T, OUT, true, SIZE>({out,                                                         \
                                      out_scale,                                                   \
                                      residual_out,                                                \
                                      x,                                                           \
                                      residual,                                                    \
                                      weight,                                                      \
                                      bias,                                                        \
                                      out_stride,                                                  \
                                      out_outer_stride,                                            \
                                      scale_stride,                                                \
                                      scale_outer_stride,                                          \
                                      residual_out_stride,                                         \
                                      residual_out_outer_stride,                                   \
                                      x_stride,                                                    \
                                      x_outer_stride,                                              \
                                      residual_stride,                                             \
                                      residual_outer_stride,                                       \
                                      num_rows,                                                    \
                                      hidden_size,                                                 \
                                      is_weight32,                                                 \
                                      adds_after,                                                  \
                                      eps,                                                         \
                                      weight_offset});                                             \
        })

#define EXPORT_LAYER_NORM_VARIANTS(DTYPE, T, OUT)                     \
    EXPORT_LAYER_NORM(DTYPE, T, OUT, vec1, norm_vecs, 1)              \
    EXPORT_LAYER_NORM(DTYPE, T, OUT, vec2, norm_vecs, 2)              \
    EXPORT_LAYER_NORM(DTYPE, T, OUT, vec4, norm_vecs, 4)              \
    EXPORT_LAYER_NORM(DTYPE, T, OUT, loop, norm_passes, kVecElems<T>) \
    EXPORT_LAYER_NORM(DTYPE, T, OUT, scalar, norm_passes, 1)

// {op}_{dtype}[_e4m3 or _int8]_{variant}
EXPORT_LAYER_NORM_VARIANTS(fp16, __half, __half)
EXPORT_LAYER_NORM_VARIANTS(fp16_e4m3, __half, __nv_fp8_e4m3)
EXPORT_LAYER_NORM_VARIANTS(fp16_int8, __half, int8_t)
EXPORT_LAYER_NORM_VARIANTS(bf16, __nv_bfloat16, __nv_bfloat16)
EXPORT_LAYER_NORM_VARIANTS(bf16_e4m3, __nv_bfloat16, __nv_fp8_e4m3)
EXPORT_LAYER_NORM_VARIANTS(bf16_int8, __nv_bfloat16, int8_t)
EXPORT_LAYER_NORM_VARIANTS(fp32, float, float)
EXPORT_LAYER_NORM_VARIANTS(fp32_e4m3, float, __nv_fp8_e4m3)
EXPORT_LAYER_NORM_VARIANTS(fp32_int8, float, int8_t)

}  // namespace kernel_hub::rowwise
