// mla_decode_sm90.cu: the parts of an item of a line, merged in the block that has its end.
#pragma once

#include "kernel_hub/math.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/ptx.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "kv_cache/decode/sm90/latent_shared.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

// Two parts of rows become one: theirs[i], their log2(sum exp), becomes what the other's values are
// to be multiplied by, own[i] what these are.
template <int kMine>
__device__ __forceinline__ void weigh_parts(float (&log2_sums)[kMine], float (&own)[kMine],
                                            float (&theirs)[kMine]) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
        const float largest = fmaxf(log2_sums[i], theirs[i]);
        own[i] = exp2_approx(log2_sums[i] - base_of(largest));
        theirs[i] = exp2_approx(theirs[i] - base_of(largest));
        const float sum = own[i] + theirs[i];
        const float factor = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
        own[i] *= factor, theirs[i] *= factor;
        log2_sums[i] = largest + __logf(sum) * kLog2e;
    }
}

// By the consumers' threads, the block's first, of which each has kCount values of kMine rows: a
// partial lies as they have it. at(e): value e, of their row row_of(e); block_row(i): its row of
// the block.
//
// The last part of a group waits for those before it and adds them to what it has, in order; then
// the last of as many groups. What is waited for is of a place before, and a block takes its places
// in order. Where each has one place, that block has begun earlier; where each has several, of even
// lengths, it may begin later, so two blocks must run at a time (test_mla_plan.py holds it).
template <int kRows, int kThreads, int kCount, int kMine, typename T>
struct LatentMerge {
    static constexpr int kFan = 4, kMostAtOnce = 6;  // parts of a group, and where they are all
    static constexpr int kAtOnce = kRows == 16 ? 16 : 4;  // vectors: a group
    static constexpr int kBuffers = 4;                    // of groups under way, if not kIsEarly
    static constexpr int kGroups = kCount / 4 / kAtOnce;  // of a partial
    static constexpr bool kIsEarly = kRows == 16;         // there are registers for the first ones
    const LatentArgs<T>& args;
    const int room = 0;  // in shared memory, for kBuffers groups of the block's vectors

    // Whether the thread's values and their log2(sum exp) are now those of the whole item; else
    // they lie among the partials.
    template <typename At, typename RowOf, typename BlockRow>
    __device__ __forceinline__ bool merge(const LatentPart& part, float (&log2_sums)[kMine],
                                          At&& at, RowOf&& row_of, BlockRow&& block_row,
                                          bool has_rows) const {
        const int fan = part.num_parts <= kMostAtOnce ? kMostAtOnce : kFan;
#pragma unroll 1
        for (int step = 1; step < part.num_parts; step *= fan) {
            const int group = part.index / (fan * step) * (fan * step);
            const int end = min(group + fan * step, part.num_parts) - 1;
            if (part.index != end) {
                float4* to = vectors(part.slot);
#pragma unroll
                for (int i = 0; i < kCount / 4; ++i) {
                    to[i * kThreads] =
                        make_float4(at(4 * i), at(4 * i + 1), at(4 * i + 2), at(4 * i + 3));
                }
#pragma unroll
                for (int i = 0; i < kMine; ++i) {
                    if (has_rows) {
                        args.partial_lse[part.slot + block_row(i)] = log2_sums[i];
                    }
                }
                named_barrier_sync(kJoin, kThreads);
                if (threadIdx.x == 0) {
                    st_release(args.tickets + part.slot / kRows, 1);
                }
                return false;
            }
            const int others = (end - group) / step;
            wait_for(part, group + step - 1, step, others);
            if constexpr (!kIsEarly) {
#pragma unroll
                for (int g = 0; g < kBuffers && others > 0; ++g) {
                    fetch(part.slot_of(group + step - 1), g, true);
                }
            }
#pragma unroll 1
            for (int k = 0; k < others; ++k) {
                const int slot = part.slot_of(group + step * (k + 1) - 1);
                float4 values[kAtOnce];
                if constexpr (kIsEarly) {
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i) {
                        values[i] = __ldcg(vectors(slot) + i * kThreads);
                    }
                }
                float own[kMine], theirs[kMine];
#pragma unroll
                for (int i = 0; i < kMine; ++i) {
                    theirs[i] = __ldcg(args.partial_lse + slot + block_row(i));
                }
                weigh_parts(log2_sums, own, theirs);
#pragma unroll
                for (int g = 0; g < kGroups; ++g) {
                    if constexpr (!kIsEarly) {
                        cp_async_wait<kBuffers - 1>();
#pragma unroll
                        for (int i = 0; i < kAtOnce; ++i) {
                            values[i] = *place_of(g % kBuffers, i);
                        }
                    }
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i) {
                        const float each[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const int number = 4 * (g * kAtOnce + i) + e, row = row_of(number);
                            float& value = at(number);
                            value = value * own[row] + each[e] * theirs[row];
                        }
                    }
                    if constexpr (!kIsEarly) {
                        const bool is_here = g + kBuffers < kGroups;
                        fetch(is_here ? slot : part.slot_of(group + step * (k + 2) - 1),
                              (g + kBuffers) % kGroups, is_here || k + 1 < others);
                    }
                }
            }
        }
        return true;
    }

    // Where a thread's vector i of a group lies in the meantime: a place of its own.
    __device__ __forceinline__ float4* place_of(int buffer, int i) const {
        return reinterpret_cast<float4*>(dynamic_shared() + room) +
               (buffer * kAtOnce + i) * kThreads + threadIdx.x;
    }
    // Starts to bring group g of a partial, if it is there, while those before are under way.
    __device__ __forceinline__ void fetch(int slot, int g, bool is_there) const {
        static_assert(kIsEarly || kGroups % kBuffers == 0, "groups take their buffers in turn");
        if (is_there) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                cp_async_16(shared_address(place_of(g % kBuffers, i)),
                            vectors(slot) + (g * kAtOnce + i) * kThreads, true);
            }
        }
        cp_async_commit();
    }
    __device__ __forceinline__ float4* vectors(int slot) const {
        return reinterpret_cast<float4*>(args.partial_out +
                                         static_cast<int64_t>(slot) * kLatentDim) +
               threadIdx.x;
    }
    // Waits for parts first, first + step, ...; leaves zeros for the next launch.
    __device__ __forceinline__ void wait_for(const LatentPart& part, int first, int step,
                                             int count) const {
        if (threadIdx.x < count) {
            int* ticket = args.tickets + part.slot_of(first + step * threadIdx.x) / kRows;
            while (ld_acquire(ticket) == 0) {
            }
            *ticket = 0;
        }
        named_barrier_sync(kJoin, kThreads);
    }
};

}  // namespace kernel_hub::kv_cache::decode::sm90
