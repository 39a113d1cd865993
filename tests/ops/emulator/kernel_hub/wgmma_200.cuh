// The emulator's products are of any width.
#pragma once

#include "kernel_hub/wgmma.cuh"

namespace kernel_hub {

template <typename T, int kColumns>
using WgmmaOf = Wgmma<T>;

}  // namespace kernel_hub
