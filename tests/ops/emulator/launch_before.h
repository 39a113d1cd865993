// The launch before the one that runs, which may not have ended: what it writes is there for
// threads that have waited for it (kernel_hub/dependent_launch.cuh), and for no others.
#pragma once

#include <stdint.h>
#include <string.h>

namespace emulator {

struct LaunchBefore {
    void* at;
    const void *old, *written;
    size_t bytes;
    bool is_over = true;

    // What memory is to a thread that has waited, or has not.
    void show(bool to_be_over) {
        if (is_over != to_be_over) memcpy(at, to_be_over ? written : old, bytes);
        is_over = to_be_over;
    }
};

inline LaunchBefore launch_before;

}  // namespace emulator

// Ahead of each launch from now on another one writes these bytes at `at`, where `old` ones are.
extern "C" void emulator_launch_before(void* at, const void* old, const void* written,
                                       uint64_t bytes) {
    emulator::launch_before = {at, old, written, bytes};
}
