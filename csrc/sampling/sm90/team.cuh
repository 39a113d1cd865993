// The blocks of a cluster that share a row: what each says of its share, read by all of them, so
// that all know the same and go the same way. For sm_90a.
#pragma once

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/mma.cuh"
#include "sampling/candidates.cuh"

namespace kernel_hub::sampling::sm90 {

constexpr int kMaxTeam = 8;
constexpr int kListed = 1024;

// What a block says. 64 bytes, read as four vectors.
struct alignas(16) Note {
    uint64_t masses[kNumPivots];
    uint32_t counts[kNumPivots];
    float first, second;  // as Shared's
    float largest;
    int index;           // of the largest
    float bound, least;  // of candidates: what every block must keep to, and what any may
    int num;             // candidates of its own, perhaps more than there is room for
};
static_assert(sizeof(Note) % 16 == 0, "notes are read by vectors");

struct TeamShared {
    Note mine;
    Note notes[kMaxTeam];
    alignas(16) uint2 own[kNumCandidates];  // values and indices, of this block's share
    alignas(16) float4 listed[kListed];     // fours of which some may become one
    int firsts[kListed];                    // their first elements
    int num_own, num_listed;
    uint64_t bits;  // random
    uint64_t pieces[kMaxTeam * kNumWarps];
    Shared s;  // of the row: the same in every block, but for the sums of warps
};

struct Team {
    TeamShared& shared;
    int rank, size;
    bool is_read = false;  // what this block said last, perhaps still

    __device__ __forceinline__ explicit Team(TeamShared& its)
        : shared(its), rank(cluster_rank()), size(cluster_size()) {}

    // Before anything that is said is written anew, and before the block ends.
    __device__ __forceinline__ void take_back() {
        if (is_read) {
            __syncwarp();
            cluster_wait();
            is_read = false;
        }
        __syncthreads();
    }

    // Reads the notes of all, and with `gathers` their candidates, which become s.values and
    // s.indices; too many where one block has too many.
    __device__ __forceinline__ void exchange(bool gathers) {
        constexpr int kVecs = sizeof(Note) / 16;
        const int thread_idx = threadIdx.x;
        Shared& s = shared.s;
        if (size > 1) {
            __syncwarp();
            cluster_arrive();
            cluster_wait();
        } else {
            __syncthreads();
        }
        if (thread_idx < size * kVecs) {
            const uint32_t at = shared_address(&shared.mine) + thread_idx % kVecs * 16;
            reinterpret_cast<float4*>(shared.notes)[thread_idx] =
                ld_shared_cluster(cluster_address(at, thread_idx / kVecs));
        }
        __syncthreads();
        if (gathers) {
            int num = 0;
            for (int i = 0; i < size; ++i) {
                const int of_block = shared.notes[i].num;
                num += of_block > kNumCandidates ? kNumCandidates + 1 : of_block;
            }
            if (num <= kNumCandidates) {
#pragma unroll 1
                for (int i = thread_idx; i < num; i += kNumThreads) {
                    int from = 0, place = i;
                    while (place >= shared.notes[from].num) {
                        place -= shared.notes[from++].num;
                    }
                    const uint32_t at = shared_address(shared.own) + place * sizeof(uint2);
                    const uint2 found = ld_shared_cluster_2(cluster_address(at, from));
                    s.values[i] = __uint_as_float(found.x);
                    s.indices[i] = static_cast<int>(found.y);
                }
            }
            if (thread_idx == 0) {
                s.num_candidates = num;
            }
        }
        __syncthreads();
        if (size > 1) {
            cluster_arrive_relaxed();
            is_read = true;
        }
    }

    // Of values that this block alone has found.
    __device__ __forceinline__ bool add(float value, int index) {
        const int place = atomicAdd(&shared.num_own, 1);
        if (place < kNumCandidates) {
            shared.own[place] = make_uint2(__float_as_uint(value), static_cast<uint32_t>(index));
        }
        return place < kNumCandidates;
    }
};

}  // namespace kernel_hub::sampling::sm90
