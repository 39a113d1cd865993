// Products of 200 columns, a width that wgmma.cuh leaves out.
//   WgmmaOf<T, kColumns>::ss(d, a, b, accumulate)   as Wgmma<T>'s, of any width
#pragma once

#include "kernel_hub/wgmma.cuh"

namespace kernel_hub {

template <typename T, int kColumns>
struct WgmmaOf : Wgmma<T> {};

template <>
struct WgmmaOf<__half, 200> {
    KH_SS16("f16", 200, 100, 101, 102, 103, 104)
};

template <>
struct WgmmaOf<__nv_bfloat16, 200> {
    KH_SS16("bf16", 200, 100, 101, 102, 103, 104)
};

}  // namespace kernel_hub
