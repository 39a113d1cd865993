// Stands in for csrc/attention/backward/sm90/instructions.cuh: same names. What nobody defines is a
// nan here.
#pragma once

#include <limits>

namespace kernel_hub::attention::backward::sm90 {

template <int kCount>
inline void leave_undefined(float (&values)[kCount]) {
    for (float& value : values) value = std::numeric_limits<float>::quiet_NaN();
}

}  // namespace kernel_hub::attention::backward::sm90
