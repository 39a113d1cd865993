// What a launch of a kernel must know of it, told once: where it is compiled.
//
// DESCRIBED(NAME, GRID, (FACTS), DEFINITION) stands around the definition of the kernel NAME.
//   GRID    which blocks there are, in words
//   FACTS   what a LaunchFacts is made of: .threads = 128, .block_m = 64, or a function's result
// It is the definition alone, token by token. Where KERNEL_HUB_DESCRIBE is defined it is constants
// and no kernel: the builder compiles a source so once more, and writes what it reads there into
// the manifest (kernel_hub/compilers/launch_facts.py).
#pragma once

namespace kernel_hub {

// clang-format off
#define KERNEL_HUB_LAUNCH_FIELDS(FIELD)                                                          \
    FIELD(threads) FIELD(threads_y) FIELD(threads_z)    /* of a block, where they are fixed */   \
    FIELD(shared_bytes)                                 /* dynamic, the fewest */                \
    FIELD(blocks_per_sm)                                /* whose registers a multiprocessor has */ \
    FIELD(head_dim) FIELD(element_bytes)                /* of what a tile holds */               \
    FIELD(block_m) FIELD(block_n) FIELD(block_k)        /* a block's tile */                     \
    FIELD(warps) FIELD(consumers)                       /* who share it; consumers: warpgroups */ \
    FIELD(pieces) FIELD(piece_n)                        /* its columns, in one product each */   \
    FIELD(stages) FIELD(stages_dout) FIELD(slots)       /* of the ring in shared memory */       \
    FIELD(cluster_m) FIELD(cluster_n) FIELD(splits)     /* blocks of a cluster */                \
    FIELD(boxes) FIELD(box_rows)                        /* in which results leave */             \
    FIELD(swaps) FIELD(fast)                            /* 1 or 0 */
// clang-format on

// -1: not stated.
struct LaunchFacts {
#define KERNEL_HUB_FIELD(NAME) int NAME = -1;
    KERNEL_HUB_LAUNCH_FIELDS(KERNEL_HUB_FIELD)
#undef KERNEL_HUB_FIELD
};

#ifndef KERNEL_HUB_DESCRIBE

#define DESCRIBED(NAME, GRID, FACTS, ...) __VA_ARGS__

#else

#define KERNEL_HUB_FIELD(NAME) #NAME " "
extern "C" __device__ const char kernel_hub_launch_fields[] =
    KERNEL_HUB_LAUNCH_FIELDS(KERNEL_HUB_FIELD);
#undef KERNEL_HUB_FIELD

#define KERNEL_HUB_BRACED(...) {__VA_ARGS__}
#define DESCRIBED(NAME, GRID, FACTS, ...)                                       \
    extern "C" __device__ const ::kernel_hub::LaunchFacts NAME##_launch_facts = \
        KERNEL_HUB_BRACED FACTS;                                                \
    extern "C" __device__ const char NAME##_launch_grid[] = GRID;

#endif

}  // namespace kernel_hub
