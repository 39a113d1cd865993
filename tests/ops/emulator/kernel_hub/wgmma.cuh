// Stands in for csrc/include/kernel_hub/wgmma.cuh: same names. A product runs when it is waited
// for.
#pragma once

#include <cuda_fp8.h>

#include "hopper.h"
#include "kernel_hub/mma.cuh"

namespace kernel_hub {

inline uint32_t descriptor_low(uint32_t address, uint32_t leading_bytes) {
    return address >> 4 | leading_bytes >> 4 << 20;
}

// NOTE: an address has 20 bits here and not 14, for those of a cluster.
inline uint64_t descriptor(uint32_t low, uint32_t offset_bytes) {
    return low + (offset_bytes >> 4);
}

inline void wgmma_fence() {}

inline void wgmma_commit() {
    emulator::Hopper& mine = emulator::hopper[emulator::current];
    mine.product_groups.push_back(mine.products);
}

template <int kPending>
inline void wgmma_wait() {
    emulator::finish_products(kPending);
}

template <int kCount>
inline void hold_registers(float (&values)[kCount]) {
    asm volatile("" : : "r"(&values[0]) : "memory");
}

inline uint32_t keep(uint32_t value) {
    return value;
}

template <typename T>
inline float float_of(const char* bits) {
    if constexpr (sizeof(T) == 1) {
        T value;
        memcpy(&value, bits, 1);
        return static_cast<float>(value);
    } else {
        uint16_t word;
        memcpy(&word, bits, 2);
        return half_of<T>(word, 0);
    }
}

// Element (row, k) of an operand in shared memory, rows of 128 bytes of K (kTrans: of MN),
// swizzled; 1024 bytes from one group of 8 rows (of K) to the next, `leading` from one 64 of MN to
// the next.
template <typename T, int kTrans>
inline float element(uint64_t from, int row, int k) {
    const uint32_t address = (from & 0xfffff) << 4, leading = (from >> 20 & 0xfff) << 4;
    const uint32_t offset =
        kTrans ? row % 64 * sizeof(T) + row / 64 * leading + k % 8 * 128 + k / 8 * 1024
               : row % 8 * 128 + row / 8 * 1024 + k * sizeof(T);
    return float_of<T>(emulator::shared_place(emulator::swizzled(address + offset), sizeof(T)));
}

// sums += a b; most of the time of tests without a GPU goes by here.
__attribute__((optimize("O3"))) inline void multiply(const float* a, const float* b, float* sums,
                                                     int rows, int n, int depth) {
    for (int i = 0; i < rows; ++i)
        for (int k = 0; k < depth; ++k)
            for (int j = 0; j < n; ++j) sums[i * n + j] += a[i * depth + k] * b[k * n + j];
}

template <typename T, int kTransA, int kTransB>
inline void run_product(emulator::Product& p) {
    constexpr int kK = 32 / sizeof(T), kWords = sizeof(T) == 1 ? 4 : 2;  // elements of a word
    static float a[64 * kK], b[kK * 256], sums[64 * 256];
    const int n = p.n;
    for (int k = 0; k < kK; ++k)
        for (int i = 0; i < n; ++i) b[k * n + i] = element<T, kTransB>(p.b, i, k);
    for (int i = 0; i < 64; ++i) {
        for (int k = 0; k < kK; ++k) {
            if (!p.a_in_registers) {
                a[i * kK + k] = element<T, kTransA>(p.a, i, k);
                continue;
            }
            const int half = k / (kK / 2), thread = i / 16 * 32 + i % 8 * 4 + k % (kK / 2) / kWords;
            const char* word =
                reinterpret_cast<const char*>(&p.a_words[thread][i % 16 / 8 + 2 * half]);
            a[i * kK + k] = float_of<T>(word + k % kWords * sizeof(T));
        }
    }
    const auto pair = [&](int i, int column) {
        return p.sums[i / 16 * 32 + i % 8 * 4 + column % 8 / 2] + column / 8 * 4 + i % 16 / 8 * 2;
    };
    memset(sums, 0, sizeof sums);
    for (int i = 0; i < 64 && p.accumulates; ++i)
        for (int j = 0; j < n; j += 2) memcpy(&sums[i * n + j], pair(i, j), 8);
    multiply(a, b, sums, 64, n, kK);
    for (int i = 0; i < 64; ++i)
        for (int j = 0; j < n; j += 2) memcpy(pair(i, j), &sums[i * n + j], 8);
}

template <typename T>
struct Wgmma {
    template <int kTransA = 0, int kTransB = 0, int kCount>
    static void ss(float (&d)[kCount], uint64_t a, uint64_t b, int accumulate) {
        emulator::begin_product(run_product<T, kTransA, kTransB>, 2 * kCount, d, nullptr, a, b,
                                accumulate);
    }
    template <int kTransB = 0, int kCount>
    static void rs(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, int accumulate) {
        emulator::begin_product(run_product<T, 0, kTransB>, 2 * kCount, d, a, 0, b, accumulate);
    }
};

}  // namespace kernel_hub
