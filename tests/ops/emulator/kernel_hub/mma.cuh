// Stands in for csrc/include/kernel_hub/mma.cuh when a kernel is compiled for the CPU: same names.
// A copy arrives when it is waited for, not before.
#pragma once

#include <type_traits>

#include "emulator.h"

namespace kernel_hub {

inline uint8_t* dynamic_shared() {
    return reinterpret_cast<uint8_t*>(emulator::shared + emulator::block() * emulator::kSpan);
}

inline uint32_t shared_address(const void* pointer) {
    return static_cast<const char*>(pointer) - emulator::shared;
}

inline void cp_async_16(uint32_t target, const void* source, bool is_inside) {
    if (is_inside) emulator::check_aligned(source);
    emulator::start_copy(emulator::shared_place(target, 16), is_inside ? source : nullptr, 16);
}

inline void cp_async_4(uint32_t target, const void* source, bool is_inside) {
    emulator::start_copy(emulator::shared_place(target, 4), is_inside ? source : nullptr, 4);
}

inline uint64_t read_once_policy() {
    return 0;
}

inline void cp_async_16(uint32_t target, const void* source, bool is_inside, uint64_t) {
    cp_async_16(target, source, is_inside);
}

inline void cp_async_commit() {
    emulator::commit_copies();
}

template <int kPending>
inline void cp_async_wait() {
    emulator::wait_for_copies(kPending);
}

// `is_transposed`: a lane gets two rows of one column instead of two columns of one row.
inline void load_tiles(uint32_t (&tiles)[4], uint32_t address, bool is_transposed) {
    const uint16_t* mine = reinterpret_cast<const uint16_t*>(emulator::shared_place(address, 16));
    const emulator::Exchange<const uint16_t*> rows(emulator::kMatrix, mine);
    const int row = emulator::lane() / 4, pair = 2 * (emulator::lane() % 4);
    for (int i = 0; i < 4; ++i) {
        const uint32_t low =
            is_transposed ? rows.peer(8 * i + pair)[row] : rows.peer(8 * i + row)[pair];
        const uint32_t high =
            is_transposed ? rows.peer(8 * i + pair + 1)[row] : rows.peer(8 * i + row)[pair + 1];
        tiles[i] = low | high << 16;
    }
    // No lane may write shared memory before all have read.
    emulator::wait_at(emulator::kMatrix);
}

inline void ldmatrix_x4(uint32_t (&tiles)[4], uint32_t address) {
    load_tiles(tiles, address, false);
}

inline void ldmatrix_x4_trans(uint32_t (&tiles)[4], uint32_t address) {
    load_tiles(tiles, address, true);
}

template <typename T>
inline float half_of(uint32_t word, int which) {
    const uint16_t bits = which ? word >> 16 : word & 0xffff;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        return __uint_as_float(static_cast<uint32_t>(bits) << 16);
    } else if ((bits & 0x7c00) != 0x7c00) {  // what CUDA's header does, in a tenth of the time
        return __uint_as_float((bits & 0x8000u) << 16 | (bits & 0x7fffu) << 13) * 0x1p112f;
    } else {
        T value;
        memcpy(&value, &bits, 2);
        return __half2float(value);
    }
}

template <typename T>
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    struct Operands {
        uint32_t a[4], b[2];
    };
    const emulator::Exchange<Operands> all(emulator::kMma, {{a[0], a[1], a[2], a[3]}, {b0, b1}});
    const int row = emulator::lane() / 4, pair = 2 * (emulator::lane() % 4);
    for (int k = 0; k < 16; k += 2) {
        const int from = k % 8 / 2;  // which lane of a group of four holds columns (A), rows (B) k
        const uint32_t (&left)[4] = all.peer(4 * row + from).a;
        for (int j = 0; j < 2; ++j) {
            const uint32_t right = all.peer(4 * (pair + j) + from).b[k / 8];
            const float low = half_of<T>(right, 0), high = half_of<T>(right, 1);
            for (int i = 0; i < 2; ++i) {
                d[2 * i + j] += half_of<T>(left[i + k / 8 * 2], 0) * low;
                d[2 * i + j] += half_of<T>(left[i + k / 8 * 2], 1) * high;
            }
        }
    }
}

template <typename T>
inline uint32_t pack2(float low, float high) {
    const T values[2] = {T(low), T(high)};
    uint32_t word;
    memcpy(&word, values, 4);
    return word;
}

}  // namespace kernel_hub
