// Arithmetic of draws that gives the same bits wherever it runs: powers of 2, probabilities as
// whole numbers, floats in the order of their bits, Philox. Every operation is rounded as IEEE says
// and none is contracted: ops/sampling/cpu.py computes the same with torch.
// Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
#pragma once

#include <float.h>

#include "kernel_hub/math.cuh"

namespace kernel_hub::sampling {

constexpr int kMassBits = 40;  // the mass of the most probable is 2^kMassBits

// 2^part of a number below 2^22, by 2^kScaled: part in [-0.5, 0.5], relative error 1e-7; `whole` is
// the rest.
struct Power {
    float of_part;
    int whole;
};

template <int kScaled = 0>
__device__ __forceinline__ Power split_power(float x) {
    constexpr float kOne = 1u << kScaled;
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded
    const float rounded = __fadd_rn(x, kRound);
    const float part = __fsub_rn(x, __fsub_rn(rounded, kRound));
    float y = 0.00015461447765119374f * kOne;
    y = fmaf(y, part, 0.0013390866806730628f * kOne);
    y = fmaf(y, part, 0.009618056938052177f * kOne);
    y = fmaf(y, part, 0.055503569543361664f * kOne);
    y = fmaf(y, part, 0.24022650718688965f * kOne);
    y = fmaf(y, part, 0.6931471824645996f * kOne);
    return {fmaf(y, part, kOne), static_cast<int>(__float_as_uint(rounded) - 0x4B400000u)};
}

// 2^x as a whole number of 2^-kMassBits, rounded down; x is at most 0 and at least kLeastPower, of
// which it is 0.
constexpr float kLeastPower = -40.25f;
static_assert(kLeastPower < -kMassBits);
__device__ __forceinline__ uint64_t mass_of_clamped(float x) {
    constexpr int kScaled = 31;  // the power of a part is below 2
    const Power power = split_power<kScaled>(x);
    return static_cast<uint64_t>(static_cast<uint32_t>(power.of_part)) << 32 >>
           (32 - kMassBits + kScaled - power.whole);
}
__device__ __forceinline__ uint64_t mass_of_power(float x) {
    return mass_of_clamped(fmaxf(x, kLeastPower));
}

// cap * tanh(x / cap); absolute error cap * 1e-7.
__device__ __forceinline__ float apply_softcap(float x, float cap) {
    const float ratio = __fdiv_rn(x, cap);
    const Power power = split_power(fmaxf(__fmul_rn(fabsf(ratio), -2.0f * kLog2e), -120.0f));
    const float e = __uint_as_float(__float_as_uint(power.of_part) +
                                    (static_cast<uint32_t>(power.whole) << 23));
    const float y = __fmul_rn(cap, __fdiv_rn(__fsub_rn(1.0f, e), __fadd_rn(1.0f, e)));
    // nan is above nothing and below nothing.
    return ratio > 0.0f ? y : ratio < 0.0f ? -y : ratio;
}

// Whole numbers in the order of the floats, and back. Of -0 there is none.
__device__ __forceinline__ uint32_t key_of(float x) {
    const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_key(uint32_t key) {
    key -= key == 0x7fffffffu;  // where -0 would be
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// 64 random bits of (seed, offset), others for each use: the first two words of Philox-4x32-10.
__device__ __forceinline__ uint64_t random_bits(uint64_t seed, uint64_t offset, uint32_t use = 0) {
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    uint32_t c[4] = {static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32), use, 0};
#pragma unroll 1
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c[0];
        const uint64_t b = static_cast<uint64_t>(0xCD9E8D57u) * c[2];
        c[0] = static_cast<uint32_t>(b >> 32) ^ c[1] ^ key[0];
        c[1] = static_cast<uint32_t>(b);
        c[2] = static_cast<uint32_t>(a >> 32) ^ c[3] ^ key[1];
        c[3] = static_cast<uint32_t>(a);
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return static_cast<uint64_t>(c[1]) << 32 | c[0];
}

}  // namespace kernel_hub::sampling
