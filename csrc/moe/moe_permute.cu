// Rows of tokens sorted by their experts, in the order of tokens within an expert.
//
//   offsets[e] = how many slots have an expert below e
//   row_id_map[t, j] = offsets[e] + how many slots before (t, j) have e = experts[t, j]
//   out[row_id_map[t, j]] = x[t]
// A slot whose expert is not one of num_experts goes nowhere (-1). Same inputs, same bits: what is
// added by atomics are whole numbers.
//
// Parallelisation: 256 threads, block_tokens neighbouring tokens a block along gridDim.x, their
// columns along gridDim.y. A block finds out by itself where its slots go: how many of each expert
// are before its own (`before`) and in all, by counting every slot or, where `counts` is given, by
// adding up what the launch of *_count counted in chunks; then its first warp ranks its slots, 32
// at a time. Nothing waits for another block. threadIdx.x walks a row, threadIdx.y the tokens.
// Shared memory: before and all (num_experts each), where each slot of the block goes.
//   vec       16 bytes at a time
//   word, half_word    4 or 2 bytes, any alignment
//   count     one chunk a block
// Of many bytes two more launches, so that what moves rows has nothing else to do:
//   place     row_id_map and offsets, one chunk a block, a part of it a warp
//   rows_vec  threadIdx.y tokens a block, by row_id_map
// Source: Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", 2022.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs the code of sm80

#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/mma.cuh"
#include "moe/moe_slots.cuh"

namespace kernel_hub::moe {

constexpr int kAhead = 4;       // reads of a row before its writes
constexpr int kPlacers = 1024;  // threads of the launch that places slots, of which so many
constexpr int kWarps = 8;       // warps rank what all have counted,
constexpr int kLaneSlots = 8;   // so many a lane: a chunk is at most 2,048

__device__ __forceinline__ uint4 read_unit(const uint4* address) {
    return ld_global(address);
}
template <typename Unit>
__device__ __forceinline__ Unit read_unit(const Unit* address) {
    return *address;
}
__device__ __forceinline__ void write_unit(uint4* address, uint4 bits) {
    st_global(address, bits);
}
template <typename Unit>
__device__ __forceinline__ void write_unit(Unit* address, Unit bits) {
    *address = bits;
}

// One chunk of slots: each warp has a part of it, and counts that before it ranks it.
__device__ __forceinline__ void place_slots(int* offsets, int* row_id_map, int* flag,
                                            const int* experts, const int* counts, int num_slots,
                                            int num_experts, int chunk_slots) {
    int* before = reinterpret_cast<int*>(dynamic_shared());  // (num_experts)
    int* all = before + num_experts;                         // (num_experts)
    int* starts = all + num_experts;                         // (kWarps, num_experts)
    const int thread_idx = threadIdx.x;
    const int warp_idx = thread_idx / kWarpSize, lane_idx = thread_idx % kWarpSize;
    const int begin = blockIdx.x * chunk_slots, end = min(begin + chunk_slots, num_slots);
    const int each = (chunk_slots + kWarps * kWarpSize - 1) / (kWarps * kWarpSize) * kWarpSize;
    const int first = min(begin + min(warp_idx, kWarps) * each, end);
    const int own_slots = min(first + each, end) - first;
#pragma unroll 1
    for (int i = thread_idx; i < (2 + kWarps) * num_experts; i += kPlacers) {
        before[i] = 0;
    }
    __syncthreads();
    follow_launch_before();
    int mine[kLaneSlots];
#pragma unroll
    for (int i = 0; i < kLaneSlots; ++i) {
        const int slot = i * kWarpSize + lane_idx;
        mine[i] = warp_idx < kWarps && slot < own_slots ? __ldg(experts + first + slot) : -1;
    }
    if (counts == nullptr) {
        count_slots<kPlacers>(before, all, experts, 0, begin, num_slots, num_experts, thread_idx);
    } else {
        add_counts<kPlacers>(before, all, counts, blockIdx.x, gridDim.x, num_experts, thread_idx);
    }
    int* own = starts + warp_idx * num_experts;  // of the first kWarps, which rank
#pragma unroll
    for (const int expert : mine) {
        if (is_index(expert, num_experts)) {
            atomicAdd(own + expert, 1);
        }
    }
    __syncthreads();
    find_starts(before, all, counts == nullptr, blockIdx.x == 0 ? offsets : nullptr, num_experts,
                thread_idx);
#pragma unroll 1
    for (int expert = thread_idx; expert < num_experts; expert += kPlacers) {
        int start = before[expert];
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
            const int count = starts[warp * num_experts + expert];
            starts[warp * num_experts + expert] = start;
            start += count;
        }
    }
    __syncthreads();
    const auto write = [&](int slot, int place) { row_id_map[first + slot] = place; };
    bool is_outside = false;
#pragma unroll
    for (int i = 0; i < kLaneSlots; ++i) {
        if (i * kWarpSize < own_slots) {
            is_outside |= rank_32(own, mine[i], i * kWarpSize + lane_idx, own_slots, num_experts,
                                  lane_idx, write);
        }
    }
    report_if(flag, is_outside, kExpertsOutside);
}

// A row a threadIdx.y, by where its copies go.
// NOTE: what a row begins with is read before the launch that places has ended: that one has waited
// for all before it, so `x` is there.
template <typename Unit>
__device__ __forceinline__ void move_rows(Unit* out, const Unit* x, const int* row_id_map,
                                          int64_t out_stride, int64_t x_stride, int num_tokens,
                                          int k, int num_units) {
    const int token = blockIdx.x * blockDim.y + threadIdx.y;
    const bool is_there = token < num_tokens;
    const Unit* row = x + token * x_stride;
    const int* own = row_id_map + static_cast<int64_t>(token) * k;
    Unit bits[kAhead];
    const auto read = [&](int at) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (is_there && at + i * blockDim.x < num_units) {
                bits[i] = read_unit(row + at + i * blockDim.x);
            }
        }
    };
    int at = threadIdx.x;
    read(at);
    follow_launch_before();
    if (!is_there) {
        return;
    }
#pragma unroll 1
    while (true) {
#pragma unroll 1
        for (int first = 0; first < k; first += kAtOnce) {
            int places[kAtOnce];
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                places[j] = first + j < k ? __ldg(own + first + j) : -1;
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                if (places[j] < 0) {
                    continue;
                }
                Unit* to = out + places[j] * out_stride + at;
#pragma unroll
                for (int i = 0; i < kAhead; ++i) {
                    if (at + i * blockDim.x < num_units) {
                        write_unit(to + i * blockDim.x, bits[i]);
                    }
                }
            }
        }
        at += kAhead * blockDim.x;
        if (at >= num_units) {
            return;
        }
        read(at);
    }
}

template <typename Unit>
__device__ __forceinline__ void permute(Unit* out, int* offsets, int* row_id_map, int* flag,
                                        const Unit* x, const int* experts, const int* counts,
                                        int64_t out_stride, int64_t x_stride, int num_tokens, int k,
                                        int num_experts, int num_units, int block_tokens,
                                        int chunk_slots) {
    int* before = reinterpret_cast<int*>(dynamic_shared());  // (num_experts), then the next rows
    int* all = before + num_experts;                         // (num_experts)
    int* places = all + num_experts;                         // (block_tokens, k)
    const int thread_idx = threadIdx.y * blockDim.x + threadIdx.x;
    const int num_slots = num_tokens * k;
    const int first_token = blockIdx.x * block_tokens;
    const int tokens = min(block_tokens, num_tokens - first_token);
    const int first_slot = first_token * k, own_slots = tokens * k;

#pragma unroll 1
    for (int i = thread_idx; i < 2 * num_experts; i += kThreads) {
        before[i] = 0;
    }
    __syncthreads();
    follow_launch_before();
    if (counts == nullptr) {
        count_slots<kThreads>(before, before, experts, 0, first_slot, first_slot, num_experts,
                              thread_idx);
        count_slots<kThreads>(all, all, experts, first_slot, num_slots, num_slots, num_experts,
                              thread_idx);
    } else {
        const int own = first_slot / chunk_slots;
        const int num_chunks = (num_slots + chunk_slots - 1) / chunk_slots;
        add_counts<kThreads>(before, all, counts, own, num_chunks, num_experts, thread_idx);
        count_slots<kThreads>(before, before, experts, own * chunk_slots, first_slot, first_slot,
                              num_experts, thread_idx);
    }
    __syncthreads();
    const bool is_first = blockIdx.x == 0 && blockIdx.y == 0;
    find_starts(before, all, counts == nullptr, is_first ? offsets : nullptr, num_experts,
                thread_idx);

    if (thread_idx < kWarpSize) {
        const bool is_outside = rank_slots(before, experts + first_slot, own_slots, num_experts,
                                           thread_idx, [&](int slot, int place) {
                                               places[slot] = place;
                                               if (blockIdx.y == 0) {
                                                   row_id_map[first_slot + slot] = place;
                                               }
                                           });
        report_if(flag, is_outside, kExpertsOutside);
    }
    __syncthreads();

    const int step = gridDim.y * blockDim.x;
#pragma unroll 1
    for (int token = threadIdx.y; token < tokens; token += blockDim.y) {
        const Unit* row = x + (first_token + token) * x_stride;
        const int* own = places + token * k;
#pragma unroll 1
        for (int at = blockIdx.y * blockDim.x + threadIdx.x; at < num_units; at += kAhead * step) {
            Unit bits[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                if (at + i * step < num_units) {
                    bits[i] = read_unit(row + at + i * step);
                }
            }
#pragma unroll 1
            for (int j = 0; j < k; ++j) {
                const int place = own[j];
                if (place < 0) {
                    continue;
                }
                Unit* to = out + place * out_stride + at;
#pragma unroll
                for (int i = 0; i < kAhead; ++i) {
                    if (at + i * step < num_units) {
                        write_unit(to + i * step, bits[i]);
                    }
                }
            }
        }
    }
}

#define EXPORT_MOE_PERMUTE(VARIANT, UNIT)                                                     \
    DESCRIBED(                                                                                \
        moe_permute_##VARIANT, "x: tokens in steps of block_tokens, y: columns", (),          \
        extern "C" __global__ void __launch_bounds__(kThreads) moe_permute_##VARIANT(         \
            void* out, int* offsets, int* row_id_map, int* flag, const void* x,               \
            const int* experts, const int* counts, int64_t out_stride, int64_t x_stride,      \
            int num_tokens, int k, int num_experts, int num_units, int block_tokens,          \
            int chunk_slots) {                                                                \
            permute<UNIT>(static_cast<UNIT*>(out), offsets, row_id_map, flag,                 \
                          static_cast<const UNIT*>(x), experts, counts, out_stride, x_stride, \
                          num_tokens, k, num_experts, num_units, block_tokens, chunk_slots);  \
        })

DESCRIBED(
    moe_permute_count, "x: chunks of chunk_slots", (.threads = kThreads),
    extern "C" __global__ void
    __launch_bounds__(kThreads) moe_permute_count(int* counts, const int* experts, int num_slots,
                                                  int num_experts, int chunk_slots) {
        int* found = reinterpret_cast<int*>(dynamic_shared());  // (num_experts)
        for (int i = threadIdx.x; i < num_experts; i += kThreads) {
            found[i] = 0;
        }
        __syncthreads();
        follow_launch_before();
        const int begin = blockIdx.x * chunk_slots;
        const int end = min(begin + chunk_slots, num_slots);
        count_slots<kThreads>(found, found, experts, begin, end, end, num_experts, threadIdx.x);
        __syncthreads();
        int* own = counts + static_cast<int64_t>(blockIdx.x) * num_experts;
        for (int i = threadIdx.x; i < num_experts; i += kThreads) {
            own[i] = found[i];
        }
    })

DESCRIBED(
    moe_permute_place, "x: chunks of chunk_slots", (.threads = kPlacers),
    extern "C" __global__ void
    __launch_bounds__(kPlacers) moe_permute_place(int* offsets, int* row_id_map, int* flag,
                                                  const int* experts, const int* counts,
                                                  int num_slots, int num_experts, int chunk_slots) {
        place_slots(offsets, row_id_map, flag, experts, counts, num_slots, num_experts,
                    chunk_slots);
    })

DESCRIBED(
    moe_permute_rows_vec, "x: tokens, threadIdx.y of them a block", (),
    extern "C" __global__ void
    __launch_bounds__(kThreads) moe_permute_rows_vec(void* out, const void* x,
                                                     const int* row_id_map, int64_t out_stride,
                                                     int64_t x_stride, int num_tokens, int k,
                                                     int num_units) {
        move_rows(static_cast<uint4*>(out), static_cast<const uint4*>(x), row_id_map, out_stride,
                  x_stride, num_tokens, k, num_units);
    })

// {op}_{unit}
EXPORT_MOE_PERMUTE(vec, uint4)
EXPORT_MOE_PERMUTE(word, uint32_t)
EXPORT_MOE_PERMUTE(half_word, uint16_t)

}  // namespace kernel_hub::moe
