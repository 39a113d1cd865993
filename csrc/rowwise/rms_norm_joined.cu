// RMS normalisation of rows with all that rms_norm.cu does without: a bias, fp32 weights beside
// 16-bit rows, a residual added afterwards, rows quantised.
//
//   s = x, or round(x + residual), which is also written to residual_out
//   out = s / sqrt(mean(s^2) + eps) * (weight + weight_offset) + bias
//   or residual + that, where adds_after is set and s = x; in fp32, rounded once
//   e4m3 and int8: out = round(that / out_scale), out_scale = max |that| of the row / 448 or 127
//
// Parallelisation, variants and shared memory: as layer_norm.cu, whose body it shares (norm.cuh).
// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

#include "rowwise/norm.cuh"

namespace kernel_hub::rowwise {

#define EXPORT_RMS_NORM(DTYPE, T, OUT) EXPORT_NORM_VARIANTS(rms_norm_joined_##DTYPE, T, OUT, false)

// {cubin}_{dtype}[_quantised]_{variant}
EXPORT_RMS_NORM(fp16, __half, __half)
EXPORT_RMS_NORM(fp16_quantised, __half, void)
EXPORT_RMS_NORM(bf16, __nv_bfloat16, __nv_bfloat16)
EXPORT_RMS_NORM(bf16_quantised, __nv_bfloat16, void)
EXPORT_RMS_NORM(fp32, float, float)
EXPORT_RMS_NORM(fp32_quantised, float, void)

}  // namespace kernel_hub::rowwise
