// Sum of a tensor over the GPUs of a host, each of which a process has, by memory that they write
// at each other.
//
//   out = x of rank 0 + x of rank 1 + ..., in fp32, rounded once: the same bits on every rank
//
// Each rank has an inbox: 3 x world x capacity places of 16 bytes, none of which has come at first
// (awaited.cuh). A launch writes its x into the inboxes of all others and adds what comes into its
// own. Launches take the three thirds of the inboxes in turn, and clear that of the launch before,
// all of whose words have come and been read: nobody writes it again before this launch has ended,
// since whoever is two launches behind it waits for the one between.
//
// Parallelisation: 16-byte vectors, 256 threads a block, at most kMostBlocks, so that all of them
// are on the GPU at once: strips of vectors go to them in turn. `turns` has of each block the third
// and the number of strips of its last launch: all ranks launch as many blocks, in the same order.
// `out` may be `x`. Two -0 in the same four bytes are added as +0. Shared memory: none. A rank that
// never comes is waited for for ever.

#include "kernel_hub/awaited.cuh"
#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/vec.cuh"

namespace kernel_hub::rowwise {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 512;

template <typename T>
__device__ __forceinline__ void sum_ranks(T* out, const T* x, const int64_t* inboxes, int* turns,
                                          int num_vecs, int capacity, int rank, int world) {
    constexpr int kElems = kVecElems<T>, kStride = kMostBlocks * kThreads;
    const int first = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
    const int64_t own = inboxes[rank];
    const auto own_bits = [&](int vec_idx) {
        return sent_bits(ld_global(x + static_cast<int64_t>(vec_idx) * kElems));
    };

    follow_launch_before();
    const int before = turns[blockIdx.x], third = before % 3 < 2 ? before % 3 + 1 : 0;
    const auto place = [&](int64_t inbox, int third, int from, int vec_idx) {
        const int64_t slot = static_cast<int64_t>(third * world + from) * capacity + vec_idx;
        return reinterpret_cast<void*>(inbox + slot * 16);
    };
    for (int vec_idx = first; vec_idx < num_vecs; vec_idx += kStride) {
        const uint4 bits = own_bits(vec_idx);
        for (int i = 1; i < world; ++i) {
            const int to = rank + i < world ? rank + i : rank + i - world;
            st_sent(place(inboxes[to], third, rank, vec_idx), bits);
        }
    }

    // The launch before may have had more vectors of this block.
    for (int strip = 0, vec_idx = first; strip < before / 3; ++strip, vec_idx += kStride) {
        for (int from = 0; vec_idx < capacity && from < world; ++from) {
            st_sent(place(own, before % 3, from, vec_idx),
                    make_uint4(kNotCome, kNotCome, kNotCome, kNotCome));
        }
    }

    // Add in the order of the ranks.
    int strips = 0;
    for (int vec_idx = first; vec_idx - static_cast<int>(threadIdx.x) < num_vecs;
         vec_idx += kStride, ++strips) {
        if (vec_idx >= num_vecs) {
            continue;
        }
        const uint4 bits = own_bits(vec_idx);
        float sum[kElems] = {};
        for (int from = 0; from < world; ++from) {
            float values[kElems];
            unpack<T>(from == rank ? bits : await_sent(place(own, third, from, vec_idx)), values);
#pragma unroll
            for (int i = 0; i < kElems; ++i) {
                sum[i] = from == 0 ? values[i] : sum[i] + values[i];
            }
        }
        st_global(out + static_cast<int64_t>(vec_idx) * kElems, pack<T>(sum));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        turns[blockIdx.x] = 3 * strips + third;
    }
}

#define EXPORT_SUM_RANKS(DTYPE, T)                                                              \
    DESCRIBED(                                                                                  \
        sum_ranks_##DTYPE, "x: vectors of 16 bytes in steps of blockDim.x",                     \
        (.threads = kThreads, .shared_bytes = 0),                                               \
        extern "C" __global__ void __launch_bounds__(kThreads) sum_ranks_##DTYPE(               \
            T* out, const T* x, const int64_t* inboxes, int* turns, int num_vecs, int capacity, \
            int rank,                                                                           \
            int world) { sum_ranks<T>(out, x, inboxes, turns, num_vecs, capacity, rank, world); })

EXPORT_SUM_RANKS(fp16, __half)
EXPORT_SUM_RANKS(bf16, __nv_bfloat16)

}  // namespace kernel_hub::rowwise
