// The squared ReLU.
//
//   out = max(x, 0)^2,  in fp32, rounded once
//   e4m3: out = round(that / out_scale), out_scale = max |that| of the row / 448
//
// Parallelisation and variants: those of gelu_and_mul.cu, of one part instead of two. `out` may be
// `x`: each element is read, then written, by one thread.
// Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs the code of sm80

#include "rowwise/gated.cuh"

#define GATE_NUMBERS
#define GATE_OF(GATE) \
    GATE {}

namespace kernel_hub::rowwise {

template <typename T>
struct ReluSquared {
    static constexpr int kParts = 1;
    static constexpr bool kHasPairs = false;
    static constexpr float kTrough = 0.0f;
    // NOTE: a comparison, not fmaxf, so that nan stays nan.
    __device__ __forceinline__ float of(float x, float) const {
        x = x < 0.0f ? 0.0f : x;
        return x * x;
    }
};

template <typename T>
using Gate = EachGate<ReluSquared<T>>;

EXPORT_GATED_OP(relu_squared, Gate)
EXPORT_GATED_WIDE(1024, relu_squared, Gate)

}  // namespace kernel_hub::rowwise
