// The clamped gate of gpt-oss' experts.
//
//   gate = min(gate, limit),  up = min(max(up, -limit), limit)
//   out = (up + 1) * gate / (1 + exp(-alpha * gate)),  in fp32, rounded once
//   interleaved   gate = x[i, 2 j],  up = x[i, 2 j + 1];  halves   x[i, j] and x[i, size + j]
//   e4m3          out = round(that / out_scale), out_scale = max |that| of the row / 448
//
// Parallelisation and variants: those of gelu_and_mul.cu.
// Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025.

#include "rowwise/activations.cuh"
#include "rowwise/gated.cuh"

#define GATE_NUMBERS , float alpha, float limit
#define GATE_OF(GATE) \
    GATE {            \
        alpha, limit  \
    }

namespace kernel_hub::rowwise {

template <typename T, bool kInterleaved>
struct ClampedGate {
    static constexpr int kParts = 2;
    static constexpr bool kIsInterleaved = kInterleaved;
    float alpha, limit;

    // NOTE: comparisons, not fminf, so that nan stays nan.
    __device__ __forceinline__ float operator()(float gate, float up) const {
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up;
        up = up < -limit ? -limit : up;
        return (up + 1.0f) * times_logistic<T>(gate, alpha * gate);
    }
};
template <typename T>
using HalvesGate = ClampedGate<T, false>;
template <typename T>
using InterleavedGate = ClampedGate<T, true>;

#define EXPORT_SWIGLUOAI(DTYPE, T)                                                        \
    EXPORT_GATED_VARIANTS(swigluoai_and_mul_##DTYPE##_halves, T, HalvesGate<T>)           \
    EXPORT_GATED_VARIANTS(swigluoai_and_mul_##DTYPE##_interleaved, T, InterleavedGate<T>) \
    EXPORT_GATED_E4M3_VARIANTS(swigluoai_and_mul_##DTYPE##_halves_e4m3, T, HalvesGate<T>) \
    EXPORT_GATED_E4M3_VARIANTS(swigluoai_and_mul_##DTYPE##_interleaved_e4m3, T, InterleavedGate<T>)

// {op}_{dtype}_{halves or interleaved}[_e4m3]_{variant}
EXPORT_SWIGLUOAI(fp16, __half)
EXPORT_SWIGLUOAI(bf16, __nv_bfloat16)
EXPORT_SWIGLUOAI(fp32, float)

}  // namespace kernel_hub::rowwise
