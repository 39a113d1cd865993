// Stands in for csrc/include/kernel_hub/dependent_launch.cuh: the emulator runs one launch after
// another, but keeps what the one before writes from threads that have not waited for it.
#pragma once

namespace kernel_hub {

inline void allow_next_launch() {}

inline void wait_for_launch_before() {
    emulator::Fibre& fibre = emulator::fibres[emulator::current];
    for (emulator::Copy& copy : fibre.copies) {
        if (copy.source) {  // read before the wait: what was there before it
            memcpy(copy.target, copy.source, copy.bytes);
            copy.source = copy.target;
        }
    }
    fibre.has_waited = true;
    emulator::launch_before.show(true);
}

}  // namespace kernel_hub
