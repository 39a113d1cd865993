// Bodies of a producer's warpgroup and some of consumers: their threads, registers and rings.
#pragma once

#include <stdint.h>

#include "kernel_hub/launch_facts.cuh"

namespace kernel_hub::attention::sm90 {

template <int kConsumers>
struct Warpgroups {
    static constexpr int kThreads = 128 * (1 + kConsumers);
    static constexpr int kBlocks = kConsumers == 1 ? 2 : 1;  // of a multiprocessor
    static constexpr int kProducerRegisters = kConsumers <= 2 ? 40 : 32;
    static constexpr int kConsumerRegisters = kConsumers == 1 ? 216 : kConsumers == 2 ? 232 : 160;
    // The registers a thread starts with: 65,536 registers over all threads, in units of 8.
    static constexpr int kStartRegisters = 65536 / (kBlocks * kThreads) / 8 * 8;
    static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                      (1 + kConsumers) * kStartRegisters,
                  "acquire_registers would wait for ever");
};

template <typename C>
constexpr LaunchFacts facts_of(int blocks_per_sm = 1) {
    return {.threads = C::kThreads,
            .shared_bytes = C::kSharedBytes,
            .blocks_per_sm = blocks_per_sm,
            .head_dim = C::kHeadDim,
            .block_m = C::kBlockM,
            .block_n = C::kBlockN,
            .consumers = C::kConsumers,
            .stages = C::kStages};
}

// A place in a ring of kCount stages, with the parity of the round it is in.
template <int kCount>
struct Place {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance() {
        if (kCount == 1 || ++stage == kCount) {
            stage = 0;
            parity ^= 1;
        }
    }

    // Moves on by 0 or 1, without a branch.
    __device__ __forceinline__ void advance_by(int count) {
        stage += count;
        parity ^= stage / kCount;
        stage %= kCount;
    }
};

}  // namespace kernel_hub::attention::sm90
