// Programmatic dependent launch, one PTX instruction a function; nothing before sm_90, where a
// launch waits for the one before it anyway.
#pragma once

namespace kernel_hub {

// Lets the next launch of the stream begin, if it was launched programmatically, once every block
// has said so or ended. It sees nothing of this launch before its wait_for_launch_before().
__device__ __forceinline__ void allow_next_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the launches this one may overlap have ended and their writes can be seen.
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace kernel_hub
