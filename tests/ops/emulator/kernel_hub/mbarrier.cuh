// Stands in for csrc/include/kernel_hub/mbarrier.cuh: same names.
#pragma once

#include "hopper.h"
#include "kernel_hub/mma.cuh"

namespace kernel_hub {

inline void mbarrier_init(uint32_t barrier, int arrivals) {
    *emulator::mbarrier(barrier) = {static_cast<int16_t>(arrivals), static_cast<int16_t>(arrivals),
                                    0};
}

inline void fence_mbarrier_init() {}

inline void mbarrier_arrive(uint32_t barrier) {
    emulator::arrive(barrier);
}

inline void mbarrier_arrive_if(uint32_t barrier, bool condition) {
    if (condition) emulator::arrive(barrier);
}

inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    emulator::mbarrier(barrier)->bytes += 2 * static_cast<int>(bytes);
    emulator::arrive(barrier);
}

inline bool mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
    return emulator::has_completed(barrier, parity);
}

inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    emulator::wait_until([=] { return emulator::has_completed(barrier, parity); });
}

inline void mbarrier_wait_unless(bool is_done, uint32_t barrier, uint32_t parity) {
    if (!is_done) mbarrier_wait(barrier, parity);
}

inline void cp_async_4(uint32_t target, const void* source) {
    cp_async_4(target, source, true);
}

inline void cp_async_arrive(uint32_t barrier) {
    emulator::commit_copies();
    emulator::wait_for_copies(0);
    emulator::arrive(barrier);
}

}  // namespace kernel_hub
