// Stands in for csrc/include/kernel_hub/tf32.cuh: same names.
#pragma once

#include "emulator.h"

namespace kernel_hub {

inline float as_tf32(uint32_t word) {
    return __uint_as_float(word & 0xffffe000u);
}

inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    struct Operands {
        uint32_t a[4], b[2];
    };
    const emulator::Exchange<Operands> all(emulator::kMma, {{a[0], a[1], a[2], a[3]}, {b0, b1}});
    const int row = emulator::lane() / 4, pair = 2 * (emulator::lane() % 4);
    for (int k = 0; k < 8; ++k)
        for (int i = 0; i < 2; ++i) {
            const float left = as_tf32(all.peer(4 * row + k % 4).a[i + k / 4 * 2]);
            for (int j = 0; j < 2; ++j)
                d[2 * i + j] += left * as_tf32(all.peer(4 * (pair + j) + k % 4).b[k / 4]);
        }
}

inline void mma_tf32_first(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    d[0] = d[1] = d[2] = d[3] = 0.0f;
    mma_tf32(d, a, b0, b1);
}

inline void cp_async_part(uint32_t target, const void* source, int source_bytes) {
    char* place = emulator::shared_place(target, 16);
    if (source_bytes) {
        emulator::check_aligned(source);
        emulator::start_copy(place, source, source_bytes);
    }
    if (source_bytes < 16) emulator::start_copy(place + source_bytes, nullptr, 16 - source_bytes);
}

}  // namespace kernel_hub
