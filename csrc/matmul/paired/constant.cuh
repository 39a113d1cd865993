// A number that is known when compiling, of one that is not.
#pragma once

#include <type_traits>

namespace kernel_hub::matmul::paired {

// Calls `use(constant)` for the constant that `number` is, from kFirst to kEnd - 1.
// NOTE: what `use` does not do is there once, in a loop, and not once a constant: straight code for
// all sums of a tile misses the instruction cache.
template <int kFirst, int kEnd, typename Use>
__device__ __forceinline__ void with_constant(int number, const Use& use) {
    if (kFirst + 1 == kEnd || number == kFirst) {
        use(std::integral_constant<int, kFirst>());
    } else if constexpr (kFirst + 1 < kEnd) {
        with_constant<kFirst + 1, kEnd>(number, use);
    }
}

}  // namespace kernel_hub::matmul::paired
