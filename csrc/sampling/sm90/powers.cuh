// What four neighbours weigh, side by side.
#pragma once

#include "sampling/candidates.cuh"
#include "sampling/sm90/fours.cuh"

namespace kernel_hub::sampling::sm90 {

// A sum of numbers that are each rounded down, as mass_of_clamped is, below 2^52 together.
// From 2^52 on doubles are the whole numbers: what is added and rounded toward zero is so, exactly,
// in any order. One instruction of a pipe that does nothing else; of 64-bit integers it is five.
struct WholeSum {
    static constexpr double kNothing = 0x1p52;
    double sum = kNothing;

    __device__ __forceinline__ void add(double value) { sum = __dadd_rz(sum, value); }
    __device__ __forceinline__ uint64_t value() const {
        return static_cast<uint64_t>(__double_as_longlong(sum)) -
               static_cast<uint64_t>(__double_as_longlong(kNothing));
    }
};

// 2^kMassBits times the probability of each to that of the largest, of a row whose largest is
// finite: rounded down it is the mass, bit for bit.
// NOTE: a step of all before the next: one power after another is a chain of 80 cycles each, which
// four warps a scheduler do not hide. ptxas makes chains of it all the same, but for a loop, in
// which it does not see the next step.
template <int kNum>
__device__ __forceinline__ void weigh_each(const Weigher& weigher, const float (&z)[kNum],
                                           float (&y)[kNum]) {
    constexpr float kOne = static_cast<float>(uint64_t{1} << kMassBits), kRound = 12582912.0f;
    constexpr float kFactors[] = {0.00015461447765119374f * kOne,
                                  0.0013390866806730628f * kOne,
                                  0.009618056938052177f * kOne,
                                  0.055503569543361664f * kOne,
                                  0.24022650718688965f * kOne,
                                  0.6931471824645996f * kOne,
                                  kOne};
    float part[kNum];
    uint32_t whole[kNum];  // in its low bits
#pragma unroll
    for (int j = 0; j < kNum; ++j) {
        part[j] = fmaxf(__fsub_rn(z[j], weigher.largest), weigher.lowest);
    }
#pragma unroll
    for (int j = 0; j < kNum; ++j) {
        part[j] = __fmul_rn(part[j], weigher.scale);
    }
#pragma unroll
    for (int j = 0; j < kNum; ++j) {
        const float rounded = __fadd_rn(part[j], kRound);
        whole[j] = __float_as_uint(rounded);
        part[j] = __fsub_rn(part[j], __fsub_rn(rounded, kRound));
        y[j] = fmaf(kFactors[0], part[j], kFactors[1]);
        y[j] = fmaf(y[j], part[j], kFactors[2]);
    }
    float even = kFactors[3], odd = kFactors[4];
#pragma unroll 1
    for (int step = 3; step < 7; step += 2) {
#pragma unroll
        for (int j = 0; j < kNum; ++j) {
            y[j] = fmaf(y[j], part[j], even);
        }
#pragma unroll
        for (int j = 0; j < kNum; ++j) {
            y[j] = fmaf(y[j], part[j], odd);
        }
        even = kFactors[5];
        odd = kFactors[6];
    }
    // Times 2^whole, by the exponent.
#pragma unroll
    for (int j = 0; j < kNum; ++j) {
        y[j] = __uint_as_float(whole[j] * (1u << 23) + __float_as_uint(y[j]));
    }
}

}  // namespace kernel_hub::sampling::sm90
