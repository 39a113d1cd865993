// Runs a kernel's own source on the CPU, for tests without a GPU: block after block, each CUDA
// thread a fibre that runs until its next barrier or shuffle. Finds wrong indices, misaligned
// vectors and barriers some threads miss; shows nothing about speed, and not what only parallel
// threads do (races).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>
#include <vector_types.h>

#include <vector>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __shared__
#define __shared__ static
#ifndef __forceinline__
#define __forceinline__ inline
#endif

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;

namespace emulator {

constexpr int kMaxThreads = 1024;
constexpr size_t kStackBytes = 64 << 10;

enum Error { kNone = 0, kMisaligned = 1, kDivergentBarrier = 2 };

struct Fibre {
    ucontext_t context;
    bool done;
    int parity;
};

inline ucontext_t scheduler;
inline std::vector<Fibre> fibres(kMaxThreads);
inline std::vector<char> stacks(kMaxThreads* kStackBytes);
inline float exchanged[2][kMaxThreads];
inline int current, error;
inline void (*body)();

inline void check_aligned(const void* address) {
    if (reinterpret_cast<uintptr_t>(address) % 16) error = kMisaligned;
}

inline void yield() {
    swapcontext(&fibres[current].context, &scheduler);
}

inline float shuffle_xor(float value, int mask) {
    const int me = current;
    const int parity = fibres[me].parity ^= 1;
    exchanged[parity][me] = value;
    yield();
    return exchanged[parity][(me & ~31) | ((me ^ mask) & 31)];
}

inline void run_fibre() {
    body();
    fibres[current].done = true;
    yield();
}

inline void run_block() {
    const int threads = blockDim.x * blockDim.y * blockDim.z;
    for (int i = 0; i < threads; ++i) {
        Fibre& fibre = fibres[i];
        getcontext(&fibre.context);
        fibre.context.uc_stack.ss_sp = &stacks[i * kStackBytes];
        fibre.context.uc_stack.ss_size = kStackBytes;
        fibre.context.uc_link = &scheduler;
        fibre.done = false;
        makecontext(&fibre.context, run_fibre, 0);
    }
    for (int left = threads; left == threads;) {
        left = 0;
        for (current = 0; current < threads; ++current) {
            threadIdx.x = current % blockDim.x;
            threadIdx.y = current / blockDim.x % blockDim.y;
            threadIdx.z = current / (blockDim.x * blockDim.y);
            swapcontext(&scheduler, &fibres[current].context);
            left += !fibres[current].done;
        }
        if (left != 0 && left != threads) error = kDivergentBarrier;
    }
}

// The arguments of a kernel in two lists: the calling conventions of x86-64 and AArch64 count
// integers and floats apart, and give every integer 8 bytes on the stack, so one call fits every
// kernel of at most 40 integers and 2 floats.
inline int64_t integers[40];
inline float floats[2];
inline void* kernel;

template <int... kIndices>
inline void call_kernel(std::integer_sequence<int, kIndices...>) {
    using Integer = int64_t;
    using Kernel = void (*)(decltype((void)kIndices, Integer())..., float, float);
    reinterpret_cast<Kernel>(kernel)(integers[kIndices]..., floats[0], floats[1]);
}

}  // namespace emulator

extern "C" int emulator_launch(void* kernel, const unsigned* grid, const unsigned* block,
                               const int64_t* integers, int num_integers, const float* floats) {
    emulator::kernel = kernel;
    memcpy(emulator::integers, integers, num_integers * sizeof(int64_t));
    memcpy(emulator::floats, floats, sizeof(emulator::floats));
    emulator::error = emulator::kNone;
    emulator::body = [] { emulator::call_kernel(std::make_integer_sequence<int, 40>()); };
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x) emulator::run_block();
    return emulator::error;
}

inline void __syncthreads() {
    emulator::yield();
}
inline float __shfl_xor_sync(unsigned, float value, int mask) {
    return emulator::shuffle_xor(value, mask);
}
template <typename T>
inline T __ldg(const T* address) {
    if (sizeof(T) == 16) emulator::check_aligned(address);
    return *address;
}
inline float __uint_as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline float __int_as_float(int bits) {
    return __uint_as_float(static_cast<uint32_t>(bits));
}
inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline float __expf(float x) {
    return expf(x);
}
inline float __fdividef(float a, float b) {
    return a / b;
}
inline float rsqrtf(float x) {
    return 1.0f / sqrtf(x);
}
