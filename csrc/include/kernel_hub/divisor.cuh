// Quotients by a number that is a power of two mostly, without a division then.
#pragma once

namespace kernel_hub {

struct Divisor {
    int by, shift;  // shift < 0: no power of two

    static __device__ __forceinline__ Divisor of(int number) {
        return {number, __popc(number) == 1 ? __popc(number - 1) : -1};
    }
    // Of x >= 0.
    __device__ __forceinline__ int quotient(int x) const {
        return shift >= 0 ? x >> shift : x / by;
    }
    __device__ __forceinline__ int remainder(int x) const { return x - quotient(x) * by; }
};

}  // namespace kernel_hub
