// The turn of a kernel that overlaps the launch before it with nothing but its own set-up.
#pragma once

#include "kernel_hub/dependent_launch.cuh"

namespace kernel_hub {

// Before the first access of global memory, by every thread.
__device__ __forceinline__ void follow_launch_before() {
    wait_for_launch_before();
    allow_next_launch();  // not before: its blocks would be in the way of the launch ahead
}

}  // namespace kernel_hub
