// Runs a kernel's own source on the CPU, for tests without a GPU: block after block, warp after
// warp up to the block's next barrier, each CUDA thread a fibre that runs until its next barrier or
// warp collective. Finds wrong indices, misaligned vectors, copies used before they were waited
// for, barriers that some threads miss, shared memory that is read before it is written (it starts
// as nan) or written past its end, and accesses to memory that is nobody's (of tensors in an arena,
// arena.py, everything around them); shows nothing about speed, and few races.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>
#include <vector_types.h>

#include <utility>
#include <vector>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __shared__
#define __shared__ static
#ifndef __forceinline__
#define __forceinline__ inline
#endif

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;

namespace emulator {

constexpr int kMaxThreads = 1024;
constexpr int kWarp = 32;
constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kSharedBytes = 256 << 10;
constexpr size_t kCanaryBytes = 4096;  // watched, behind the shared memory asked for
constexpr size_t kPayloadBytes = 64;
constexpr int kMaxIntegers = 64, kMaxFloats = 8;

enum Error { kNone = 0, kMisaligned = 1, kDivergentBarrier = 2, kSharedBounds = 3, kOutside = 4 };
// Where a thread stands: at the block's barrier, at its end, or at a warp collective of some kind.
enum Stop { kBlockBarrier, kDone, kSyncWarp, kShuffle, kVote, kLdmatrix, kMma };

struct Copy {
    char* target;
    const void* source;  // null: zeros
    int bytes;
};

struct Fibre {
    ucontext_t start;
    jmp_buf resume;
    bool is_started;
    Stop stop;
    int parity;
    std::vector<Copy> copies;    // started, not arrived
    std::vector<size_t> groups;  // how many of them each open group holds
    size_t ungrouped;
    alignas(16) char payload[2][kPayloadBytes];
};

inline ucontext_t scheduler_context;
inline jmp_buf scheduler;
inline std::vector<Fibre> fibres(kMaxThreads);
inline std::vector<char> stacks(kMaxThreads* kStackBytes);
alignas(1024) inline char shared[kSharedBytes + kCanaryBytes];
inline size_t shared_bytes;
inline int current, error;
inline void (*body)();
inline jmp_buf launch;
inline void* volatile fault_address;  // of the access that ended the last launch

// An access to memory that is not there ends the launch.
inline void on_fault(int, siginfo_t* info, void*) {
    fault_address = info->si_addr;
    _longjmp(launch, 1);
}

class FaultHandler {
  public:
    FaultHandler() {
        struct sigaction action = {};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_NODEFER;
        sigaction(SIGSEGV, &action, &before_[0]);
        sigaction(SIGBUS, &action, &before_[1]);
    }
    ~FaultHandler() {
        sigaction(SIGSEGV, &before_[0], nullptr);
        sigaction(SIGBUS, &before_[1], nullptr);
    }

  private:
    struct sigaction before_[2];
};

inline void check_aligned(const void* address) {
    if (reinterpret_cast<uintptr_t>(address) % 16) error = kMisaligned;
}

// A place in dynamic shared memory by its address, aligned and inside.
inline char* shared_place(uint32_t address, size_t bytes) {
    if (address % bytes) error = kMisaligned;
    if (address + bytes > shared_bytes) {
        error = kSharedBounds;
        return shared + kSharedBytes + kCanaryBytes - bytes;
    }
    return shared + address;
}

// Gives way until every thread of the warp (kBlockBarrier: of the block) stands at the same stop.
inline void wait_at(Stop stop) {
    Fibre& fibre = fibres[current];
    fibre.stop = stop;
    if (_setjmp(fibre.resume) == 0) _longjmp(scheduler, 1);
}

// Puts up `mine` for the other lanes of the warp; peer(lane) reads theirs afterwards.
template <typename T>
struct Exchange {
    static_assert(sizeof(T) <= kPayloadBytes, "a lane puts up at most kPayloadBytes");
    int first, parity;
    Exchange(Stop stop, const T& mine) {
        const int me = current;
        first = me & ~(kWarp - 1);
        parity = fibres[me].parity ^= 1;
        memcpy(fibres[me].payload[parity], &mine, sizeof(T));
        wait_at(stop);
    }
    const T& peer(int lane) const {
        return *reinterpret_cast<const T*>(fibres[first + (lane & (kWarp - 1))].payload[parity]);
    }
};

inline int lane() {
    return current & (kWarp - 1);
}

template <typename T>
inline T shuffle(T value, int from) {
    return Exchange<T>(kShuffle, value).peer(from);
}

inline unsigned ballot(bool vote) {
    const Exchange<bool> votes(kVote, vote);
    unsigned bits = 0;
    for (int i = 0; i < kWarp; ++i) bits |= votes.peer(i) ? 1u << i : 0u;
    return bits;
}

inline void start_copy(char* target, const void* source, int bytes) {
    fibres[current].copies.push_back({target, source, bytes});
    ++fibres[current].ungrouped;
}

inline void commit_copies() {
    Fibre& fibre = fibres[current];
    fibre.groups.push_back(fibre.ungrouped);
    fibre.ungrouped = 0;
}

inline void wait_for_copies(size_t pending) {
    Fibre& fibre = fibres[current];
    while (fibre.groups.size() > pending) {
        const size_t count = fibre.groups.front();
        for (size_t i = 0; i < count; ++i) {
            const Copy& copy = fibre.copies[i];
            if (copy.source)
                memcpy(copy.target, copy.source, copy.bytes);
            else
                memset(copy.target, 0, copy.bytes);
        }
        fibre.copies.erase(fibre.copies.begin(), fibre.copies.begin() + count);
        fibre.groups.erase(fibre.groups.begin());
    }
}

inline void run_fibre() {
    body();
    wait_at(kDone);
}

inline void step(int thread) {
    current = thread;
    threadIdx.x = thread % blockDim.x;
    threadIdx.y = thread / blockDim.x % blockDim.y;
    threadIdx.z = thread / (blockDim.x * blockDim.y);
    Fibre& fibre = fibres[thread];
    if (_setjmp(scheduler)) return;
    if (fibre.is_started) _longjmp(fibre.resume, 1);
    fibre.is_started = true;
    setcontext(&fibre.start);
}

// Runs a warp to the block's barrier or to its end; returns where it stands.
inline Stop run_warp(int first, int last) {
    for (;;) {
        for (int i = first; i < last; ++i) step(i);
        const Stop stop = fibres[first].stop;
        for (int i = first; i < last; ++i) {
            if (fibres[i].stop != stop) {
                error = kDivergentBarrier;
                return kDone;
            }
        }
        if (stop == kBlockBarrier || stop == kDone) return stop;
    }
}

inline void run_block() {
    const int threads = blockDim.x * blockDim.y * blockDim.z;
    memset(shared, 0xff, shared_bytes + kCanaryBytes);
    for (int i = 0; i < threads; ++i) {
        Fibre& fibre = fibres[i];
        getcontext(&fibre.start);
        fibre.start.uc_stack.ss_sp = &stacks[i * kStackBytes];
        fibre.start.uc_stack.ss_size = kStackBytes;
        fibre.start.uc_link = &scheduler_context;
        fibre.is_started = false;
        fibre.copies.clear();
        fibre.groups.clear();
        fibre.ungrouped = 0;
        makecontext(&fibre.start, run_fibre, 0);
    }
    for (Stop stop = kBlockBarrier; stop == kBlockBarrier && error != kDivergentBarrier;) {
        for (int first = 0; first < threads; first += kWarp) {
            const Stop at = run_warp(first, first + kWarp < threads ? first + kWarp : threads);
            if (first != 0 && at != stop) error = kDivergentBarrier;
            stop = at;
        }
    }
    for (size_t i = shared_bytes; i < shared_bytes + kCanaryBytes; ++i)
        if (shared[i] != static_cast<char>(0xff)) error = kSharedBounds;
}

// The arguments of a kernel in two lists: the calling conventions of x86-64 and AArch64 count
// integers and floats apart, and give every integer 8 bytes on the stack, so one call fits every
// kernel of at most kMaxIntegers integers and kMaxFloats floats.
inline int64_t integers[kMaxIntegers];
inline float floats[kMaxFloats];
inline void* kernel;

template <int... kIntegers, int... kFloats>
inline void call_kernel(std::integer_sequence<int, kIntegers...>,
                        std::integer_sequence<int, kFloats...>) {
    using Integer = int64_t;
    using Float = float;
    using Kernel =
        void (*)(decltype((void)kIntegers, Integer())..., decltype((void)kFloats, Float())...);
    reinterpret_cast<Kernel>(kernel)(integers[kIntegers]..., floats[kFloats]...);
}

}  // namespace emulator

extern "C" int emulator_launch(void* kernel, const unsigned* grid, const unsigned* block,
                               unsigned shared_bytes, const int64_t* integers, int num_integers,
                               const float* floats, int num_floats) {
    emulator::kernel = kernel;
    emulator::shared_bytes = shared_bytes;
    memcpy(emulator::integers, integers, num_integers * sizeof(int64_t));
    memcpy(emulator::floats, floats, num_floats * sizeof(float));
    emulator::error = emulator::kNone;
    emulator::body = [] {
        emulator::call_kernel(std::make_integer_sequence<int, emulator::kMaxIntegers>(),
                              std::make_integer_sequence<int, emulator::kMaxFloats>());
    };
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    const emulator::FaultHandler handler;
    if (_setjmp(emulator::launch)) return emulator::kOutside;
    for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x) emulator::run_block();
    return emulator::error;
}

extern "C" uint64_t emulator_fault_address() {
    return reinterpret_cast<uint64_t>(emulator::fault_address);
}

inline void __syncthreads() {
    emulator::wait_at(emulator::kBlockBarrier);
}
inline void __syncwarp(unsigned = ~0u) {
    emulator::wait_at(emulator::kSyncWarp);
}
template <typename T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulator::shuffle(value, emulator::lane() ^ mask);
}
template <typename T>
inline T __shfl_sync(unsigned, T value, int lane) {
    return emulator::shuffle(value, lane);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
    return emulator::ballot(vote);
}
inline bool __any_sync(unsigned, bool vote) {
    return emulator::ballot(vote) != 0;
}
inline bool __all_sync(unsigned, bool vote) {
    return emulator::ballot(vote) == ~0u;
}
inline int __ffs(int bits) {
    return __builtin_ffs(bits);
}
template <typename T>
inline T atomicAdd(T* address, T value) {
    const T before = *address;
    *address = before + value;
    return before;
}
inline int atomicOr(int* address, int value) {
    const int before = *address;
    *address = before | value;
    return before;
}
inline void __threadfence() {}
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
inline float __logf(float x) {
    return logf(x);
}
inline float __fdividef(float a, float b) {
    return a / b;
}
inline float __saturatef(float x) {
    return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;  // nan becomes 0
}
inline float rsqrtf(float x) {
    return 1.0f / sqrtf(x);
}
template <typename T>
inline T min(T a, T b) {
    return b < a ? b : a;
}
template <typename T>
inline T max(T a, T b) {
    return a < b ? b : a;
}
