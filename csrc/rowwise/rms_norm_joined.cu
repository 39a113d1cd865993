// RMS normalisation of rows with all that rms_norm.cu does without: a bias, fp32 weights beside
// 16-bit rows, a residual added afterwards, rows quantised.
//
//   s = x, or round(x + residual), which is also written to residual_out
//   out = s / sqrt(mean(s^2) + eps) * (weight + weight_offset) + bias
//   or residual + that, where adds_after is set and s = x; in fp32, rounded once
//   e4m3 and int8: out = round(that / out_scale), out_scale = max |that| of the row / 448 or 127
//
// Parallelisation, variants and shared memory: as layer_norm.cu, whose body it shares (norm.cuh);
// quantised rows that nothing is added to meet once (norm_weighted.cuh).
// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs the code of sm80

#include "rowwise/norm.cuh"

namespace kernel_hub::rowwise {

EXPORT_NORMS(rms_norm_joined, false)

}  // namespace kernel_hub::rowwise
