// The GELU.
//
//   erf    out = x / 2 * (1 + erf(x / sqrt(2))),  in fp32, rounded once
//   tanh   out = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
//   e4m3   out = round(that / out_scale), out_scale = max |that| of the row / 448
//
// Parallelisation and variants: those of gelu_and_mul.cu, of one part instead of two. `out` may be
// `x`: each element is read, then written, by one thread.
// Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs the code of sm80

#include "rowwise/activations.cuh"
#include "rowwise/gated.cuh"

#define GATE_NUMBERS , int is_tanh
#define GATE_OF(GATE) \
    GATE {            \
        is_tanh       \
    }

namespace kernel_hub::rowwise {

template <typename T>
struct Gelu {
    static constexpr int kParts = 1;
    static constexpr bool kHasPairs = false;
    static constexpr float kTrough = 0.171f;
    int is_tanh;

    template <int kWidth>
    __device__ __forceinline__ void operator()(const float (&x)[kWidth], const float (&)[kWidth],
                                               float (&found)[kWidth]) const {
        gelu<T>(x, is_tanh, 1.0f, found);
    }
    template <int kWidth>
    __device__ __forceinline__ void quotients(const float (&x)[kWidth], RowScale scale,
                                              float (&found)[kWidth]) const {
        gelu<T>(x, is_tanh, scale.largest * (1.0f / kLargest<__nv_fp8_e4m3>), found);
    }
};

EXPORT_GATED_OP(gelu, Gelu)
EXPORT_GATED_WIDE(1024, gelu, Gelu)

}  // namespace kernel_hub::rowwise
