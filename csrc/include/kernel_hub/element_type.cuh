// Elements whose type a launch says in a number: kernels that one body for all types serves.
#pragma once

#include <stdint.h>

#include "kernel_hub/vec.cuh"

namespace kernel_hub {

// As `common.ELEMENT_TYPES` of kernel_hub/ops/core numbers them.
enum ElementType : int { kFp16, kBf16, kFp32 };

__device__ __forceinline__ float load_element(const void* data, int64_t at, int type) {
    return type == kFp32   ? static_cast<const float*>(data)[at]
           : type == kBf16 ? to_float(static_cast<const __nv_bfloat16*>(data)[at])
                           : to_float(static_cast<const __half*>(data)[at]);
}

}  // namespace kernel_hub
