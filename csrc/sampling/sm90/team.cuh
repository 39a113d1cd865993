// The blocks of a cluster that share a row: what each says of its share, read by all of them, so
// that all know the same and go the same way. For sm_90a.
#pragma once

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/mma.cuh"
#include "sampling/bins.cuh"

namespace kernel_hub::sampling::sm90 {

constexpr int kMaxTeam = 8;
constexpr int kListed = 1024;

// What a block says. Read as vectors.
struct alignas(16) Note {
    uint64_t total, above;  // as Shared's
    uint32_t least_binned, most_binned;
    float largest;
    int index;              // of the largest
    float bound, least;     // of candidates: what every block must keep to, and what any may
    float least_of_thread;  // of what is the largest of a thread
    int num;                // candidates of its own, perhaps more than there is room for
};
static_assert(sizeof(Note) % 16 == 0, "notes are read by vectors");

struct TeamShared {
    Note mine;
    Note notes[kMaxTeam];
    alignas(16) uint2 own[kNumCandidates];  // values and indices, of this block's share
    union {
        struct {
            alignas(16) float4 listed[kListed];  // fours of which some may become one
            int firsts[kListed];                 // their first elements
        };
        Bins own_bins;  // of this block's share
    };
    Bins bins;  // of the row
    int num_own, num_listed;
    uint64_t bits;  // random
    // Of the row, from the first pass on: what registers would hold for long.
    float largest, top_p, bound, top_bound;
    int top_k;
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

    // What of all blocks is read beside their notes.
    enum Reads { kNotes, kCandidates, kCounts, kBins };

    // Reads the notes of all; their candidates, which become s.values and s.indices, too many where
    // one block has too many; or the sums of their bins. kIsFirst: no candidates, and counts alone.
    template <bool kIsFirst>
    __device__ __forceinline__ void exchange(Reads reads) {
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
        if (!kIsFirst && reads == kCandidates) {
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
        if (reads == kCounts || reads == kBins) {
            sum_bins(!kIsFirst);
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

  private:
    __device__ __forceinline__ void sum_bins(bool has_masses) {
        Bins& bins = shared.bins;
#pragma unroll 1
        for (int i = threadIdx.x * 4; i < kNumBins; i += kNumThreads * 4) {
            uint32_t counts[4] = {};
            uint64_t masses[4] = {};
#pragma unroll 1
            for (int rank = 0; rank < size; ++rank) {
                const auto read = [&](const uint32_t (&of_bins)[kNumBins], uint32_t (&words)[4]) {
                    const float4 v =
                        ld_shared_cluster(cluster_address(shared_address(&of_bins[i]), rank));
                    words[0] = __float_as_uint(v.x);
                    words[1] = __float_as_uint(v.y);
                    words[2] = __float_as_uint(v.z);
                    words[3] = __float_as_uint(v.w);
                };
                uint32_t count[4], low[4] = {}, high[4] = {};
                read(shared.own_bins.counts, count);
                if (has_masses) {
                    read(shared.own_bins.low, low);
                    read(shared.own_bins.high, high);
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    counts[j] += count[j];
                    masses[j] += static_cast<uint64_t>(high[j]) << 32 | low[j];
                }
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                bins.counts[i + j] = counts[j];
                bins.low[i + j] = static_cast<uint32_t>(masses[j]);
                bins.high[i + j] = static_cast<uint32_t>(masses[j] >> 32);
            }
        }
    }
};

}  // namespace kernel_hub::sampling::sm90
