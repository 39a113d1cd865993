// Softmax of rows or its logarithm, of scaled and masked values, and the gradients.
//
//   s = x * scale, + mask where that is numbers, or -inf where that is truth and false
//   out = exp(s - m) / sum, or s - m - log(sum);  m = max(s), sum = sum(exp(s - m)), in fp32
//   dx = scale * out * (dout - sum(dout * out)), or scale * (dout - exp(out) * sum(dout)),
//   of which there is none where out is -inf
//
// Parallelisation: blockDim.x threads a row, blockDim.y rows a block; rows along gridDim.x, along
// gridDim.y and gridDim.z outer dimensions whose strides do not collapse with theirs.
//   vec      a row in registers, up to kVecs 16-byte vectors a thread: one pass over memory;
//            everything 16-byte aligned. From compute capability 9.0 on a cluster of blocks_a_row
//            blocks may share a row: each reads a part, then all exchange what they found
//   edges    the same of rows in 16 bits of any alignment: vectors are those of 16 aligned bytes,
//            of which the first and the last are read and written one by one
//   loop     rows of any length: a pass for maximum and sum, one for results; everything 16-byte
//            aligned. One of 16 bits is kept in dynamic shared memory where the launch has some,
//            then as much as it takes; others are read twice. Of gradients a cluster may share one
//   scalar   any size, any alignment: the same, one element an access
// `out` may be `x`, `dx` may be `dout` or `out`: each element is read, then written, by one thread.
// Shared memory: three floats a warp; where a cluster may share a row it is dynamic, with 16 bytes
// more that its blocks read. Source: Milakov and Gimelshein, "Online normalizer calculation for
// softmax", 2018.

#include "kernel_hub/launch_facts.cuh"
#include "rowwise/softmax/forward.cuh"
#include "rowwise/softmax/gradient.cuh"

namespace kernel_hub::rowwise::softmax {

#define SOFTMAX_GRID                                                                          \
    "x: rows in steps of blockDim.y, times blocks_a_row; y, z: outer dimensions; blockDim.x " \
    "threads a row, or of each of its blocks"

// 64 registers a thread: any blockDim up to 1,024.
#define EXPORT_SOFTMAX(NAME, T, BODY, SIZE, SHARED)                                              \
    DESCRIBED(                                                                                   \
        NAME, SOFTMAX_GRID, (.shared_bytes = SHARED),                                            \
        extern "C" __global__ void __launch_bounds__(1024) NAME(                                 \
            T* out, const T* x, const void* mask, int64_t out_stride, int64_t out_middle_stride, \
            int64_t out_outer_stride, int64_t x_stride, int64_t x_middle_stride,                 \
            int64_t x_outer_stride, int64_t mask_stride, int64_t mask_middle_stride,             \
            int64_t mask_outer_stride, int num_rows, int size, int blocks_a_row, int is_added,   \
            int is_log, float scale) {                                                           \
            BODY<SIZE, T>({out,                                                                  \
                           x,                                                                    \
                           mask,                                                                 \
                           {out_stride, out_middle_stride, out_outer_stride},                    \
                           {x_stride, x_middle_stride, x_outer_stride},                          \
                           {mask_stride, mask_middle_stride, mask_outer_stride},                 \
                           num_rows,                                                             \
                           size,                                                                 \
                           blocks_a_row,                                                         \
                           is_added,                                                             \
                           is_log,                                                               \
                           scale});                                                              \
        })

#define EXPORT_GRADIENT(NAME, T, BODY, SIZE, SHARED)                                         \
    DESCRIBED(                                                                               \
        NAME, SOFTMAX_GRID, (.shared_bytes = SHARED),                                        \
        extern "C" __global__ void __launch_bounds__(1024) NAME(                             \
            T* dx, const T* dout, const T* out, int64_t dx_stride, int64_t dx_middle_stride, \
            int64_t dx_outer_stride, int64_t dout_stride, int64_t dout_middle_stride,        \
            int64_t dout_outer_stride, int64_t out_stride, int64_t out_middle_stride,        \
            int64_t out_outer_stride, int num_rows, int size, int blocks_a_row, int is_log,  \
            float scale) {                                                                   \
            BODY<SIZE, T>({dx,                                                               \
                           dout,                                                             \
                           out,                                                              \
                           {dx_stride, dx_middle_stride, dx_outer_stride},                   \
                           {dout_stride, dout_middle_stride, dout_outer_stride},             \
                           {out_stride, out_middle_stride, out_outer_stride},                \
                           num_rows,                                                         \
                           size,                                                             \
                           blocks_a_row,                                                     \
                           is_log,                                                           \
                           scale});                                                          \
        })

#define EXPORT_SOFTMAX_VARIANTS(DTYPE, T, GRADIENT_VECS)                               \
    EXPORT_SOFTMAX(softmax_##DTYPE##_vec, T, softmax_vecs, 4, sizeof(SharedFound))     \
    EXPORT_SOFTMAX(softmax_##DTYPE##_loop, T, softmax_passes, kVecElems<T>, 0)         \
    EXPORT_SOFTMAX(softmax_##DTYPE##_scalar, T, softmax_passes, 1, 0)                  \
    EXPORT_GRADIENT(softmax_backward_##DTYPE##_vec, T, gradient_vecs, GRADIENT_VECS,   \
                    sizeof(SharedFound))                                               \
    EXPORT_GRADIENT(softmax_backward_##DTYPE##_loop, T, gradient_passes, kVecElems<T>, \
                    sizeof(SharedFound))                                               \
    EXPORT_GRADIENT(softmax_backward_##DTYPE##_scalar, T, gradient_passes, 1, sizeof(SharedFound))

EXPORT_SOFTMAX_VARIANTS(fp16, __half, 2)
EXPORT_SOFTMAX_VARIANTS(bf16, __nv_bfloat16, 2)
EXPORT_SOFTMAX_VARIANTS(fp32, float, 4)
EXPORT_SOFTMAX(softmax_fp16_edges, __half, softmax_edges, 1, sizeof(SharedFound))
EXPORT_SOFTMAX(softmax_bf16_edges, __nv_bfloat16, softmax_edges, 1, sizeof(SharedFound))

}  // namespace kernel_hub::rowwise::softmax
