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
//   scalar           any size, any alignment: one element an access, eight a thread at once, which
//                    are read once where registers hold them
// Weight and bias are T or fp32, asked at run time; they are read after the sums, from L1 or L2.
// `out` may be `x`, `residual_out` may be `residual`: each element is read, then written, by one
// thread. Shared memory: one float a warp and sum.
// Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs the code of sm80

#include "rowwise/norm.cuh"

namespace kernel_hub::rowwise {

EXPORT_NORMS(layer_norm, true)

}  // namespace kernel_hub::rowwise
