// Stands in for csrc/include/kernel_hub/warpgroup.cuh: same names.
#pragma once

#include "hopper.h"

namespace kernel_hub {

inline bool elect_one() {
    return emulator::lane() == 0;
}

inline void named_barrier_arrive(int barrier, int threads) {
    emulator::named_barriers[emulator::block()][barrier].arrive(threads);
}

inline void named_barrier_sync(int barrier, int threads) {
    emulator::Barrier& here = emulator::named_barriers[emulator::block()][barrier];
    const uint32_t before = here.opened;
    here.arrive(threads);
    emulator::wait_until([&] { return here.opened != before; });
}

inline int warp_index() {
    return __shfl_sync(~0u, threadIdx.x / 32, 0);
}

template <int kRegisters>
inline void release_registers() {}

template <int kRegisters>
inline void acquire_registers() {}

// `is_transposed`: a lane's two values are two rows of one column.
inline void store_tiles(uint32_t address, const uint32_t (&tiles)[4], bool is_transposed) {
    uint16_t* mine = reinterpret_cast<uint16_t*>(emulator::shared_place(address, 16));
    const emulator::Exchange<uint16_t*> rows(emulator::kMatrix, mine);
    const int row = emulator::lane() / 4, pair = 2 * (emulator::lane() % 4);
    for (int i = 0; i < 4; ++i) {
        const uint16_t low = tiles[i], high = tiles[i] >> 16;
        (is_transposed ? rows.peer(8 * i + pair)[row] : rows.peer(8 * i + row)[pair]) = low;
        (is_transposed ? rows.peer(8 * i + pair + 1)[row] : rows.peer(8 * i + row)[pair + 1]) =
            high;
    }
    emulator::wait_at(emulator::kMatrix);
}

inline void stmatrix_x4(uint32_t address, uint32_t tile0, uint32_t tile1, uint32_t tile2,
                        uint32_t tile3) {
    store_tiles(address, {tile0, tile1, tile2, tile3}, false);
}

inline void stmatrix_x4_trans(uint32_t address, uint32_t tile0, uint32_t tile1, uint32_t tile2,
                              uint32_t tile3) {
    store_tiles(address, {tile0, tile1, tile2, tile3}, true);
}

inline uint32_t movmatrix_trans(uint32_t tile) {
    const emulator::Exchange<uint32_t> all(emulator::kMatrix, tile);
    const int row = emulator::lane() / 4, pair = 2 * (emulator::lane() % 4);
    const auto at = [&](int r, int c) { return all.peer(4 * r + c / 2) >> 16 * (c % 2) & 0xffff; };
    return at(pair, row) | at(pair + 1, row) << 16;
}

inline void st_shared(uint32_t address, float x, float y, float z, float w) {
    float* to = reinterpret_cast<float*>(emulator::shared_place(address, 16));
    to[0] = x, to[1] = y, to[2] = z, to[3] = w;
}

}  // namespace kernel_hub
