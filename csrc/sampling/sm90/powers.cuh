// What four neighbours weigh, side by side.
#pragma once

#include "sampling/candidates.cuh"
#include "sampling/sm90/fours.cuh"

namespace kernel_hub::sampling::sm90 {

// mass_of_clamped of each, bit for bit.
// NOTE: a step of all before the next: one power after another is a chain of 300 cycles. What is
// added up under a branch lets ptxas put two of them in a row, which four warps a scheduler hide.
__device__ __forceinline__ void masses_of(const float (&depth)[kFour], uint64_t (&masses)[kFour]) {
    constexpr int kScaled = 31;
    constexpr float kOne = 1u << kScaled, kRound = 12582912.0f;
    constexpr float kFactors[] = {0.00015461447765119374f * kOne,
                                  0.0013390866806730628f * kOne,
                                  0.009618056938052177f * kOne,
                                  0.055503569543361664f * kOne,
                                  0.24022650718688965f * kOne,
                                  0.6931471824645996f * kOne,
                                  kOne};
    float part[kFour], y[kFour];
    uint32_t shift[kFour], bits[kFour];
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
        y[j] = __fadd_rn(depth[j], kRound);
    }
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
        part[j] = __fsub_rn(y[j], kRound);
        shift[j] = 32 - kMassBits + kScaled + 0x4B400000u - __float_as_uint(y[j]);
    }
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
        part[j] = __fsub_rn(depth[j], part[j]);
        y[j] = kFactors[0];
    }
#pragma unroll
    for (int step = 1; step < 7; ++step) {
#pragma unroll
        for (int j = 0; j < kFour; ++j) {
            y[j] = fmaf(y[j], part[j], kFactors[step]);
        }
    }
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
        bits[j] = static_cast<uint32_t>(y[j]);
    }
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
        masses[j] = static_cast<uint64_t>(bits[j]) << 32 >> shift[j];
    }
}

// What they weigh in a row whose largest is finite.
__device__ __forceinline__ void weigh_four(const Weigher& weigher, const float (&z)[kFour],
                                           uint64_t (&masses)[kFour]) {
    float depth[kFour];
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
        depth[j] = fmaxf(__fsub_rn(z[j], weigher.largest), weigher.lowest);
    }
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
        depth[j] = __fmul_rn(depth[j], weigher.scale);
    }
    masses_of(depth, masses);
}

}  // namespace kernel_hub::sampling::sm90
