// Softmax of rows or its logarithm, of scaled and masked values, and the gradients.
//
//   s = x * scale, + mask where that is numbers, or -inf where that is truth and false
//   out = exp(s - m) / sum, or s - m - log(sum);  m = max(s), sum = sum(exp(s - m)), in fp32
//   dx = scale * out * (dout - sum(dout * out)), or scale * (dout - exp(out) * sum(dout)),
//   of which there is none where out is -inf
//
// Parallelisation: blockDim.x threads a row, blockDim.y rows a block; rows along gridDim.x, along
// gridDim.y and gridDim.z outer dimensions whose strides do not collapse with theirs.
//   vec      a row in registers, up to kVecs 16-byte vectors a thread: one pass over memory. Of
//            the forward everything is 16-byte aligned. From compute capability 9.0 on a cluster of
//            blocks_a_row blocks may share a row: each reads a part, then all exchange what they
//            found
//   edges    the forward of rows of any alignment, in registers: an element an access,
//            up to 20 of a thread. Clusters as above
//   warps    the same of rows of up to 640 columns: blockDim.x is 32
//   loop     rows of any length and alignment, of such vectors: a pass for maximum and sum, one for
//            results. A row is kept in dynamic shared memory where the launch has some beside what
//            sums take, and then as much as it needs; others are read twice. Clusters as above.
//            Of kept ones in 16 bits without a mask (kept.cuh) the maximum has a pass of its own
// Gradients have vectors of `out`; of what lies otherwise elements are read one by one.
// `out` may be `x`, `dx` may be `dout` or `out`: each element is read, then written, by one thread.
// Shared memory, dynamic: three floats a warp, 16 bytes that a cluster's blocks read, rows that are
// kept. Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs the code of sm80

#include "kernel_hub/launch_facts.cuh"
#include "rowwise/softmax/forward.cuh"
#include "rowwise/softmax/gradient.cuh"

namespace kernel_hub::rowwise::softmax {

#define SOFTMAX_GRID                                                                          \
    "x: rows in steps of blockDim.y, times blocks_a_row; y, z: outer dimensions; blockDim.x " \
    "threads a row, or of each of its blocks"

// 64 registers a thread: any blockDim up to 1,024. Of `loop` 48, so that blocks that keep rows have
// 1,280 threads a multiprocessor.
#define IN_REGISTERS 1024
#define IN_PASSES 640, 2

#define EXPORT_SOFTMAX(NAME, T, BOUNDS, ...)                                                     \
    DESCRIBED(                                                                                   \
        NAME, SOFTMAX_GRID, (.shared_bytes = sizeof(SharedFound)),                               \
        extern "C" __global__ void __launch_bounds__(BOUNDS) NAME(                               \
            T* out, const T* x, const void* mask, int64_t out_stride, int64_t out_middle_stride, \
            int64_t out_outer_stride, int64_t x_stride, int64_t x_middle_stride,                 \
            int64_t x_outer_stride, int64_t mask_stride, int64_t mask_middle_stride,             \
            int64_t mask_outer_stride, int num_rows, int size, int blocks_a_row, int is_added,   \
            int is_log, float scale) {                                                           \
            __VA_ARGS__(SoftmaxParams<T>{out,                                                    \
                                         x,                                                      \
                                         mask,                                                   \
                                         {out_stride, out_middle_stride, out_outer_stride},      \
                                         {x_stride, x_middle_stride, x_outer_stride},            \
                                         {mask_stride, mask_middle_stride, mask_outer_stride},   \
                                         num_rows,                                               \
                                         size,                                                   \
                                         blocks_a_row,                                           \
                                         is_added,                                               \
                                         is_log,                                                 \
                                         scale});                                                \
        })

#define EXPORT_GRADIENT(NAME, T, BOUNDS, ...)                                                   \
    DESCRIBED(                                                                                  \
        NAME, SOFTMAX_GRID, (.shared_bytes = sizeof(SharedFound)),                              \
        extern "C" __global__ void __launch_bounds__(BOUNDS) NAME(                              \
            T* dx, const T* dout, const T* out, int64_t dx_stride, int64_t dx_middle_stride,    \
            int64_t dx_outer_stride, int64_t dout_stride, int64_t dout_middle_stride,           \
            int64_t dout_outer_stride, int64_t out_stride, int64_t out_middle_stride,           \
            int64_t out_outer_stride, int num_rows, int size, int blocks_a_row, int is_log,     \
            float scale) {                                                                      \
            __VA_ARGS__(GradientParams<T>{dx,                                                   \
                                          dout,                                                 \
                                          out,                                                  \
                                          {dx_stride, dx_middle_stride, dx_outer_stride},       \
                                          {dout_stride, dout_middle_stride, dout_outer_stride}, \
                                          {out_stride, out_middle_stride, out_outer_stride},    \
                                          num_rows,                                             \
                                          size,                                                 \
                                          blocks_a_row,                                         \
                                          is_log,                                               \
                                          scale});                                              \
        })

#define EXPORT_SOFTMAX_VARIANTS(DTYPE, T, HELD)                                           \
    EXPORT_SOFTMAX(softmax_##DTYPE##_vec, T, IN_REGISTERS, softmax_once<4, 0>)            \
    EXPORT_SOFTMAX(softmax_##DTYPE##_loop, T, IN_PASSES, softmax_passes)                  \
    EXPORT_GRADIENT(softmax_backward_##DTYPE##_vec, T, IN_REGISTERS, gradient_once<HELD>) \
    EXPORT_GRADIENT(softmax_backward_##DTYPE##_loop, T, IN_PASSES, gradient_passes)

// Vectors of a thread, and whether the gradient's `vec` takes any alignment.
#define NARROW 2, true
#define WIDE 4, false

EXPORT_SOFTMAX_VARIANTS(fp16, __half, NARROW)
EXPORT_SOFTMAX_VARIANTS(bf16, __nv_bfloat16, NARROW)
EXPORT_SOFTMAX_VARIANTS(fp32, float, WIDE)
EXPORT_SOFTMAX(softmax_fp16_edges, __half, IN_REGISTERS, softmax_once<0, 0>)
EXPORT_SOFTMAX(softmax_bf16_edges, __nv_bfloat16, IN_REGISTERS, softmax_once<0, 0>)
EXPORT_SOFTMAX(softmax_fp32_edges, float, IN_REGISTERS, softmax_once<0, 0>)
EXPORT_SOFTMAX(softmax_fp32_warps, float, IN_REGISTERS, softmax_once<0, kWarpSize>)
EXPORT_SOFTMAX(softmax_fp16_warps, __half, IN_REGISTERS, softmax_once<0, kWarpSize>)
EXPORT_SOFTMAX(softmax_bf16_warps, __nv_bfloat16, IN_REGISTERS, softmax_once<0, kWarpSize>)

}  // namespace kernel_hub::rowwise::softmax
