// What joins a gate to what it multiplies, for results of 16 bits: silu alone, or any by numbers.
#pragma once

#include "kernel_hub/wgmma.cuh"
#include "matmul/activation.cuh"

namespace kernel_hub::matmul::paired {

// As kernel_hub/ops/matmul/swiglu_linear.py numbers them.
enum GateKind { kSiluGate = 0, kGeluGate = 1, kGeluTanhGate = 2, kSwigluoaiGate = 3 };

template <typename T>
struct SiluGate {
    __device__ __forceinline__ float operator()(float gate, float up) const {
        return silu_16<T>(gate) * up;
    }
};

// g / (1 + exp(-g p(min(g^2, bound)))) * (u + shift) with g = min(gate, limit), u = up between
// -limit and limit: gelu by p minimax for |g| <= 5 (absolute error 1.4e-5), by tanh, gpt-oss'
// clamped gate.
// NOTE: one formula, not a branch for each, so that its code is there once; held, or the compiler
// would make a loop for each again. The bounds keep inf * 0 out and p above 0.
struct NumberedGate {
    float numbers[8];  // 0 to 4: coefficients of -log2(e) p; bound, limit, shift

    __device__ __forceinline__ NumberedGate(int kind, float alpha, float limit) {
        const bool is_clamped = kind == kSwigluoaiGate, is_tanh = kind == kGeluTanhGate;
        const bool is_gelu = kind == kGeluGate;
        numbers[0] = -kLog2e * (is_clamped ? alpha : is_tanh ? 1.59576912161f : 1.59533922f);
        numbers[1] = -kLog2e * (is_clamped ? 0.0f : is_tanh ? 0.0713548162726f : 7.34986891e-2f);
        numbers[2] = is_gelu ? kLog2e * 5.02969312e-4f : 0.0f;
        numbers[3] = is_gelu ? kLog2e * 2.39087450e-5f : 0.0f;
        numbers[4] = is_gelu ? -kLog2e * 6.93365690e-7f : 0.0f;
        numbers[5] = is_tanh ? 100.0f : 25.0f;
        numbers[6] = is_clamped ? limit : __int_as_float(0x7f800000);
        numbers[7] = is_clamped ? 1.0f : 0.0f;
        hold_registers(numbers);
    }

    __device__ __forceinline__ float operator()(float gate, float up) const {
        const auto& [c0, c1, c2, c3, c4, bound, limit, shift] = numbers;
        gate = -max_nan(-gate, -limit);
        up = max_nan(-max_nan(-up, -limit), -limit) + shift;
        const float square = fminf(gate * gate, bound);  // nan is in `gate` too
        const float slope = (((c4 * square + c3) * square + c2) * square + c1) * square + c0;
        return gate * reciprocal_approx(1.0f + exp2_approx(gate * slope)) * up;
    }
};

}  // namespace kernel_hub::matmul::paired
