// The gated activation of GEGLU feed-forward layers.
//
//   out[i, j] = gelu(x[i, j]) * x[i, size + j],  in fp32, rounded once
//   erf    gelu(g) = g / 2 * (1 + erf(g / sqrt(2)))
//   tanh   gelu(g) = g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g^3)))
//   e4m3   out = round(that / out_scale), out_scale = max |that| of the row / 448
//
// Parallelisation and the variants flat, vec and scalar: those of silu_and_mul.cu. Into e4m3:
// blockDim.x threads a row, blockDim.y rows a block along gridDim.x, an outer dimension along
// gridDim.y.
//   vec1 vec2 vec4   a row in registers, that many 16-byte vectors a thread; vec8 of 16 bits
//   loop             rows of any length, read twice; everything 16-byte aligned
//   scalar           any size, any alignment: the same, one element an access
// Shared memory: one float a warp, for the largest of a row.
// Source: Shazeer, "GLU Variants Improve Transformer", 2020; Hendrycks and Gimpel, "Gaussian Error
// Linear Units", 2016.
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
struct GeluGate {
    static constexpr int kParts = 2;
    static constexpr bool kHasPairs = false;
    int is_tanh;

    template <int kWidth>
    __device__ __forceinline__ void operator()(const float (&gate)[kWidth],
                                               const float (&up)[kWidth],
                                               float (&found)[kWidth]) const {
        gelu<T>(gate, is_tanh, 1.0f, found);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            found[j] *= up[j];
        }
    }
};

EXPORT_GATED_OP(gelu_and_mul, GeluGate)
EXPORT_GATED_WIDE(512, gelu_and_mul, GeluGate)

}  // namespace kernel_hub::rowwise
