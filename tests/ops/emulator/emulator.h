// Runs a kernel's own source on the CPU, for tests without a GPU: cluster after cluster, warp after
// warp, each CUDA thread a fibre that runs until its next barrier, warp collective or wait for
// something that another brings about. Finds wrong indices, misaligned vectors, copies used before
// they were waited for, barriers that some threads miss, shared memory that is read before it is
// written (it starts as nan) or written past its end, waits that nothing ends, and accesses to
// memory that is nobody's (of tensors in an arena, arena.py, everything around them); approximate
// instructions are as wrong as they may be (intrinsics.h); shows nothing about speed, few races.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector_types.h>

#include <utility>
#include <vector>

#include "launch_before.h"

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __cluster_dims__
#define __cluster_dims__(...)
#undef __shared__
#define __shared__ static
#ifndef __forceinline__
#define __forceinline__ inline
#endif
#undef __noinline__
#define __noinline__

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;

namespace emulator {

constexpr int kMaxThreads = 8192;  // of a cluster
constexpr int kMaxCluster = 16;
constexpr int kWarp = 32;
constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kSharedBytes = 256 << 10;
constexpr size_t kCanaryBytes = 4096;  // watched, behind the shared memory asked for
constexpr size_t kSpan = kSharedBytes + kCanaryBytes;  // from one block of a cluster to the next
constexpr int kPatience = 3000;                        // rounds of waits in which nothing happens
constexpr size_t kPayloadBytes = 64;
constexpr int kMaxIntegers = 80, kMaxFloats = 8;

enum Error {
    kNone = 0,
    kMisaligned = 1,
    kDivergentBarrier = 2,
    kSharedBounds = 3,
    kOutside = 4,
    kStuck = 5,
    kAsynchronous = 6,
};
// Where a thread stands: nowhere, at a wait that it looks at again, at the block's barrier, at its
// end, or at a warp collective of some kind.
enum Stop { kReady, kPoll, kBlockBarrier, kDone, kSyncWarp, kShuffle, kVote, kMatrix, kMma };

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
    bool has_waited;  // for the launch before
    alignas(16) char payload[2][kPayloadBytes];
};

inline ucontext_t scheduler_context;
inline jmp_buf scheduler;
inline std::vector<Fibre> fibres(kMaxThreads);
inline char* const stacks =
    static_cast<char*>(mmap(nullptr, kMaxThreads* kStackBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
alignas(1024) inline char shared[kMaxCluster * kSpan];
inline size_t shared_bytes;
inline int current, error;
inline int block_threads, cluster_size = 1;
inline unsigned cluster_first;  // blockIdx.x of its first block
inline bool has_moved;          // something happened that a wait may have waited for
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

template <int kBytes = 16>
inline void check_aligned(const void* address) {
    if (reinterpret_cast<uintptr_t>(address) % kBytes) error = kMisaligned;
}

// The block that runs, in its cluster.
inline int block() {
    return current / block_threads;
}

// A place in shared memory by its address, aligned and, in the dynamic part, inside.
inline char* shared_place(uint32_t address, size_t bytes, size_t alignment) {
    if (address % alignment) error = kMisaligned;
    // What is not dynamic are variables, as far from it as they happen to lie.
    if (address >= kMaxCluster * kSpan) return shared + static_cast<int32_t>(address);
    const uint32_t offset = address % kSpan;
    if (offset + bytes > shared_bytes || address / kSpan >= static_cast<uint32_t>(cluster_size)) {
        error = kSharedBounds;
        return shared + kSpan - kCanaryBytes;
    }
    return shared + address;
}

inline char* shared_place(uint32_t address, size_t bytes) {
    return shared_place(address, bytes, bytes);
}

// Gives way until every thread of the warp (kBlockBarrier: of the block) stands at the same stop.
inline void wait_at(Stop stop) {
    Fibre& fibre = fibres[current];
    fibre.stop = stop;
    if (_setjmp(fibre.resume) == 0) _longjmp(scheduler, 1);
}

// Gives way until `is_true()`.
template <typename Condition>
inline void wait_until(const Condition& is_true) {
    while (!is_true()) wait_at(kPoll);
    has_moved = true;
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
    const int in_block = thread % block_threads;
    threadIdx.x = in_block % blockDim.x;
    threadIdx.y = in_block / blockDim.x % blockDim.y;
    threadIdx.z = in_block / (blockDim.x * blockDim.y);
    blockIdx.x = cluster_first + thread / block_threads;
    Fibre& fibre = fibres[thread];
    launch_before.show(fibre.has_waited);
    if (_setjmp(scheduler)) return;
    if (fibre.is_started) _longjmp(fibre.resume, 1);
    fibre.is_started = true;
    setcontext(&fibre.start);
}

// Whether all of the threads stand at `stop`.
inline bool are_at(Stop stop, int first, int last) {
    for (int i = first; i < last; ++i) {
        if (fibres[i].stop != stop) return false;
    }
    return true;
}

inline void release(int first, int last) {
    for (int i = first; i < last; ++i) fibres[i].stop = kReady;
    has_moved = true;
}

// Runs a warp until each of its threads waits for another warp, or for lanes that do.
inline void run_warp(int first, int last) {
    for (bool is_released = true; is_released && error != kDivergentBarrier;) {
        bool is_waiting = false;
        for (int i = first; i < last; ++i) {
            if (fibres[i].stop == kReady || fibres[i].stop == kPoll) step(i);
            is_waiting |= fibres[i].stop == kPoll;
        }
        const Stop stop = fibres[first].stop;
        is_released = stop >= kSyncWarp && are_at(stop, first, last);
        if (is_released) {
            release(first, last);
        } else if (!is_waiting && !are_at(stop, first, last)) {
            error = kDivergentBarrier;
        }
    }
}

// Whether the block has ended. Its barrier opens where all threads stand at it.
inline bool run_warps(int first, int last) {
    for (int i = first; i < last && error != kDivergentBarrier; i += kWarp)
        run_warp(i, i + kWarp < last ? i + kWarp : last);
    if (are_at(kBlockBarrier, first, last)) release(first, last);
    return are_at(kDone, first, last);
}

inline void start_fibre(Fibre& fibre, char* stack) {
    getcontext(&fibre.start);
    fibre.start.uc_stack.ss_sp = stack;
    fibre.start.uc_stack.ss_size = kStackBytes;
    fibre.start.uc_link = &scheduler_context;
    fibre.is_started = false;
    fibre.stop = kReady;
    fibre.copies.clear();
    fibre.groups.clear();
    fibre.ungrouped = 0;
    fibre.has_waited = false;
    makecontext(&fibre.start, run_fibre, 0);
}

inline void (*start_cluster)() = [] {};  // of what hopper.h keeps
inline void (*end_cluster)() = [] {};

inline void run_cluster() {
    const int threads = block_threads * cluster_size;
    for (int i = 0; i < cluster_size; ++i)
        memset(shared + i * kSpan, 0xff, shared_bytes + kCanaryBytes);
    for (int i = 0; i < threads; ++i) start_fibre(fibres[i], stacks + i * kStackBytes);
    start_cluster();
    bool is_done = false;
    for (int idle = 0; !is_done && error != kDivergentBarrier && error != kStuck;) {
        has_moved = false;
        is_done = true;
        for (int first = 0; first < threads; first += block_threads)
            is_done &= run_warps(first, first + block_threads);
        idle = has_moved ? 0 : idle + 1;
        if (idle > kPatience) error = kStuck;
        // At a barrier that the others' end keeps closed.
        bool is_closed = !is_done && !has_moved;
        for (int i = 0; i < threads; ++i) is_closed &= fibres[i].stop != kPoll;
        if (is_closed) error = kDivergentBarrier;
    }
    if (!error) end_cluster();
    for (int i = 0; i < cluster_size; ++i)
        for (size_t j = shared_bytes; j < shared_bytes + kCanaryBytes; ++j)
            if (shared[i * kSpan + j] != static_cast<char>(0xff)) error = kSharedBounds;
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
                               unsigned cluster, unsigned shared_bytes, const int64_t* integers,
                               int num_integers, const float* floats, int num_floats) {
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
    emulator::block_threads = block[0] * block[1] * block[2];
    emulator::cluster_size = cluster;
    const emulator::FaultHandler handler;
    if (_setjmp(emulator::launch)) return emulator::kOutside;
    for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
            for (unsigned x = 0; x < grid[0]; x += cluster) {
                emulator::cluster_first = x;
                emulator::run_cluster();
            }
    emulator::launch_before.show(true);
    return emulator::error;
}

extern "C" uint64_t emulator_fault_address() {
    return reinterpret_cast<uint64_t>(emulator::fault_address);
}

#include "intrinsics.h"
