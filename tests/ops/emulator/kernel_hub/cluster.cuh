// Stands in for csrc/include/kernel_hub/cluster.cuh: same names. An address of shared memory says
// whose it is, so that those of a cluster are those of its blocks.
#pragma once

#include "hopper.h"

namespace kernel_hub {

inline uint32_t cluster_rank() {
    return emulator::block();
}

inline uint32_t cluster_size() {
    return emulator::cluster_size;
}

inline uint32_t cluster_address(uint32_t address, uint32_t rank) {
    return address % emulator::kSpan + rank * emulator::kSpan;
}

inline void mbarrier_arrive_cluster(uint32_t barrier) {
    emulator::arrive(barrier);
}

inline void cluster_arrive() {
    emulator::cluster_barrier.arrive(emulator::block_threads * emulator::cluster_size);
}

inline void cluster_arrive_relaxed() {
    cluster_arrive();
}

inline void cluster_wait() {
    emulator::Hopper& mine = emulator::hopper[emulator::current];
    const uint32_t before = mine.cluster_waits++;
    emulator::wait_until([&] { return emulator::cluster_barrier.opened > before; });
}

inline float4 ld_shared_cluster(uint32_t address) {
    return *reinterpret_cast<const float4*>(emulator::shared_place(address, 16));
}

inline uint2 ld_shared_cluster_2(uint32_t address) {
    return *reinterpret_cast<const uint2*>(emulator::shared_place(address, 8));
}

}  // namespace kernel_hub
