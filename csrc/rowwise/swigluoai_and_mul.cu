// The clamped gate of gpt-oss' experts.
//
//   gate = min(gate, limit),  up = min(max(up, -limit), limit)
//   out = (up + 1) * gate / (1 + exp(-alpha * gate)),  in fp32, rounded once
//   interleaved   gate = x[i, 2 j],  up = x[i, 2 j + 1];  halves   x[i, j] and x[i, size + j]
//   e4m3          out = round(that / out_scale), out_scale = max |that| of the row / 448
//
// Parallelisation and variants: those of gelu_and_mul.cu.
// Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs the code of sm80

#include "rowwise/activations.cuh"
#include "rowwise/gated.cuh"

#define GATE_NUMBERS , float alpha, float limit, int is_interleaved
#define GATE_OF(GATE)                    \
    GATE {                               \
        {                                \
            alpha, limit, is_interleaved \
        }                                \
    }

namespace kernel_hub::rowwise {

template <typename T>
struct ClampedGate {
    static constexpr int kParts = 2;
    static constexpr bool kHasPairs = true;
    float alpha, limit;
    int is_interleaved;

    // NOTE: comparisons, not fminf, so that nan stays nan.
    __device__ __forceinline__ float of(float gate, float up) const {
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up;
        up = up < -limit ? -limit : up;
        return (up + 1.0f) * times_logistic<T>(gate, alpha * gate);
    }
};
template <typename T>
using Gate = EachGate<ClampedGate<T>>;

EXPORT_GATED_OP(swigluoai_and_mul, Gate)

}  // namespace kernel_hub::rowwise
