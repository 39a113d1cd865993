// The squared ReLU.
//
//   out = max(x, 0)^2,  in fp32, rounded once
//   e4m3: out = round(that / out_scale), out_scale = max |that| of the row / 448
//
// Parallelisation and variants: those of gelu_and_mul.cu, of one part instead of two. `out` may be
// `x`: each element is read, then written, by one thread.
// Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021.

#include "rowwise/gated.cuh"

#define GATE_NUMBERS
#define GATE_OF(GATE) \
    GATE {}

namespace kernel_hub::rowwise {

struct ReluSquared {
    static constexpr int kParts = 1;
    static constexpr bool kIsInterleaved = false;
    // NOTE: a comparison, not fmaxf, so that nan stays nan.
    __device__ __forceinline__ float operator()(float x, float) const {
        x = x < 0.0f ? 0.0f : x;
        return x * x;
    }
};

#define EXPORT_RELU_SQUARED(DTYPE, T)                           \
    EXPORT_GATED_VARIANTS(relu_squared_##DTYPE, T, ReluSquared) \
    EXPORT_GATED_E4M3_VARIANTS(relu_squared_##DTYPE##_e4m3, T, ReluSquared)

// {op}_{dtype}[_e4m3]_{variant}
EXPORT_RELU_SQUARED(fp16, __half)
EXPORT_RELU_SQUARED(bf16, __nv_bfloat16)
EXPORT_RELU_SQUARED(fp32, float)

}  // namespace kernel_hub::rowwise
