// The blocks of a cluster that share a row: what each says of its share, read by all of them, so
// that all know the same and go the same way. For sm_90a.
#pragma once

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/mma.cuh"
#include "sampling/bins.cuh"

namespace kernel_hub::sampling::sm90 {

constexpr int kMaxTeam = 16;
constexpr int kListed = 1024;
constexpr int kFewBins = 1024, kChunks = 32;  // of rows that are held
constexpr int kNumGroups = 8 * kNumWarps;     // of threads, of which the largest are compared
constexpr int kLeastPieces = 8 * kNumWarps;   // of a row, where it is weighed
constexpr int kPieces = kMaxTeam * kNumWarps;

// What a block says. Read as vectors.
struct alignas(16) Note {
    uint32_t least_binned, most_binned;
    float largest;
    int index;           // of the largest
    float bound, least;  // of candidates: what every block must keep to, and what any may
    int num;             // candidates of its own, perhaps more than there is room for
};
static_assert(sizeof(Note) % 16 == 0, "notes are read by vectors");

// Bins of equal steps below `top`, each around its middle, and what brings masses to sums.
struct FewBins {
    static constexpr int kShare = 13;             // what has the mass of the middle adds 2^kShare
    static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded
    float top, step, inverse, width, base;

    FewBins() = default;
    __device__ __forceinline__ FewBins(const Weigher& weigher, float highest, float range) {
        top = highest;
        step = range * (1.0f / (kFewBins - 1));
        inverse = __fdividef(1.0f, step);
        width = step * weigher.scale;
        base = (weigher.largest - top) * weigher.scale + (kShare - kMassBits);
    }

    __device__ __forceinline__ void add(uint32_t* bins, float z, float mass) const {
        constexpr float kWhole = 8388608.0f;  // 2^23: likewise
        const float rounded = fminf((top - z) * inverse, kFewBins - 1) + kRound;
        const float share = mass * exp2_approx(fmaf(rounded - kRound, width, base));
        atomicAdd(bins + (__float_as_uint(rounded) & (kFewBins - 1)),
                  __float_as_uint(share + kWhole) - __float_as_uint(kWhole));
    }
    __device__ __forceinline__ float mass(int bin, uint32_t sum) const {
        return static_cast<float>(sum) * exp2_approx(-fmaf(static_cast<float>(bin), width, base));
    }
    __device__ __forceinline__ float num_a_mass(int bin) const {
        return exp2_approx(fmaf(static_cast<float>(bin), width, base) - kShare);
    }
    // So many steps below the middle of a bin.
    __device__ __forceinline__ float edge(int bin, float steps) const {
        return top - (static_cast<float>(bin) + steps) * step;
    }
};

// Where the threshold of a row that is held is, nearly: above `from`, up to `to`.
struct Near {
    float from, to;
    float before;          // the mass above `to`
    int num;               // of values
    bool is_any, is_tail;  // is_tail: it has all that is further below
};

struct TeamShared {
    // Fours of a thread that are weighed side by side, and as many under way in other slots.
    static constexpr int kTurns = 2, kSlots = 4;
    alignas(16) uint4 under_way[kSlots * kTurns * kNumThreads];
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
    union {
        Bins bins;  // of the row
        struct {
            // Of a row that is held: what is in each bin, by turns; the masses of the block's share
            // of them, and of each of its chunks.
            alignas(16) uint32_t few_bins[2][kFewBins];
            alignas(16) float few_masses[kFewBins];
            alignas(16) float chunks[kChunks];
        };
    };
    alignas(16) float own_groups[kNumGroups];  // the largest of each, of this block's
    alignas(16) float groups[kNumGroups];      // and of all
    // Of rows that are held: keys of the largest, and of the least of what is a thread's largest,
    // inverted.
    alignas(8) uint32_t own_ends[2];
    Near near;
    FewBins few;
    uint64_t target;
    alignas(8) int num_own, num_listed;
    uint64_t seed, offset, bits;  // random
    // Of the row, from the first pass on: what registers would hold for long.
    float largest, floor, top_p, bound, top_bound;
    float scale, lowest;  // of the Weigher
    int top_k;            // 0: all
    bool is_greedy;
    SampleParams p;
    bool has_mask;  // that is heeded
    bool is_ahead;  // Fours::is_ahead
    // What each piece of the row has above the window's lower end, and what each warp of all blocks
    // has weighed in all.
    uint64_t own_pieces[kLeastPieces], own_totals[kNumWarps];
    uint64_t pieces[kPieces];
    Shared s;  // of the row: the same in every block, but for the sums of warps
    // Of rows that are held what each value weighs: there where a launch has room for it.
    alignas(16) float4 weighed[kSlots * kTurns * kNumThreads];

    __device__ __forceinline__ Weigher weigher() const {
        return {fminf(largest, FLT_MAX), scale, lowest};
    }

    // The row's random number, by a warp under what others do.
    __device__ __forceinline__ void find_bits() {
        if (threadIdx.x / 32 == kNumWarps - 1) {
            bits = random_bits(seed, offset);
        }
    }

    // A four of which some may become candidates.
    __device__ __forceinline__ void list(int index, const float (&z)[4]) {
        const int place = atomicAdd(&num_listed, 1);
        if (place < kListed) {
            listed[place] = make_float4(z[0], z[1], z[2], z[3]);
            firsts[place] = index;
        }
    }

    // Of values that this block alone has found.
    __device__ __forceinline__ bool add(float value, int index) {
        const int place = atomicAdd(&num_own, 1);
        if (place < kNumCandidates) {
            own[place] = make_uint2(__float_as_uint(value), static_cast<uint32_t>(index));
        }
        return place < kNumCandidates;
    }
};

__device__ __forceinline__ TeamShared& team_shared() {
    return *reinterpret_cast<TeamShared*>(dynamic_shared());
}

// The exponent of a power of two: a division by what is not known takes twenty instructions.
__device__ __forceinline__ int exponent_of(int power) {
    return 31 - __clz(power);
}

struct Team {
    TeamShared& shared;
    int rank, size;  // size: a power of two
    int shift;       // its exponent

    __device__ __forceinline__ explicit Team(TeamShared& its)
        : shared(its), rank(cluster_rank()), size(cluster_size()), shift(exponent_of(size)) {}

    // Of the row, where it is weighed.
    __device__ __forceinline__ int pieces() const { return max(kLeastPieces, kNumWarps << shift); }

    // Of which block a number below `num`, a power of two, is, if each has neighbours; which of
    // its.
    template <int kNum>
    __device__ __forceinline__ int rank_of(int i) const {
        return i >> (31 - __builtin_clz(kNum) - shift);
    }
    template <int kNum>
    __device__ __forceinline__ int place_of(int i) const {
        return i & ((kNum >> shift) - 1);
    }

    // Once, before all else: what the block has not said yet is read by none.
    __device__ __forceinline__ void begin() const {
        if (size > 1) {
            cluster_arrive_relaxed();
        }
    }

    // Before anything that is said is written anew, and before the block ends: waits until all have
    // read it.
    __device__ __forceinline__ void take_back() const {
        if (size > 1) {
            __syncwarp();
            cluster_wait();
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
        meet();
        if (thread_idx < size * kVecs) {
            const uint32_t at = shared_address(&shared.mine) + thread_idx % kVecs * 16;
            reinterpret_cast<float4*>(shared.notes)[thread_idx] =
                ld_shared_cluster(cluster_address(at, thread_idx / kVecs));
        }
        // Of each block's candidates some are read before it is known how many there are.
        const int some = kNumThreads >> shift, from = rank_of<kNumThreads>(thread_idx);
        const int place = place_of<kNumThreads>(thread_idx);
        uint2 found;
        if (!kIsFirst) {
            if (reads == kCandidates) {
                found = read_candidate(place, from);
            }
            read_masses();
        }
        if (kIsFirst && reads == kCounts) {
            sum_counts();
        }
        __syncthreads();
        if (!kIsFirst && reads == kCandidates) {
            int num = 0, before = place;
            bool are_some = true;
#pragma unroll 1
            for (int i = 0; i < size; ++i) {
                const int of_block = shared.notes[i].num;
                num += of_block > kNumCandidates ? kNumCandidates + 1 : of_block;
                before += i < from ? of_block : 0;
                are_some = are_some && of_block <= some;
            }
            if (are_some && num <= kNumCandidates) {
                if (place < shared.notes[from].num) {
                    s.values[before] = __uint_as_float(found.x);
                    s.indices[before] = static_cast<int>(found.y);
                }
            } else if (num <= kNumCandidates) {
#pragma unroll 1
                for (int i = thread_idx; i < num; i += kNumThreads) {
                    int from = 0, place = i;
                    while (place >= shared.notes[from].num) {
                        place -= shared.notes[from++].num;
                    }
                    found = read_candidate(place, from);
                    s.values[i] = __uint_as_float(found.x);
                    s.indices[i] = static_cast<int>(found.y);
                }
            }
            if (thread_idx == 0) {
                s.num_candidates = num;
            }
        }
        if (!kIsFirst && reads == kBins) {
            sum_bins();
        }
        __syncthreads();
        if (size > 1) {
            cluster_arrive_relaxed();
        }
    }

    // Reads the largest of all blocks' groups.
    __device__ __forceinline__ void exchange_groups() {
        const int i = threadIdx.x * 4;
        meet();
        if (i < kNumGroups) {
            *reinterpret_cast<float4*>(&shared.groups[i]) = ld_shared_cluster(
                cluster_address(shared_address(&shared.own_groups[place_of<kNumGroups>(i)]),
                                rank_of<kNumGroups>(i)));
        }
        __syncthreads();
        if (size > 1) {
            cluster_arrive_relaxed();
        }
    }

    // All blocks have written what is read next.
    __device__ __forceinline__ void meet() const {
        if (size > 1) {
            __syncwarp();
            cluster_arrive();
            cluster_wait();
        } else {
            __syncthreads();
        }
    }

    // Behind the last that is read.
    __device__ __forceinline__ void give_back() const {
        if (size > 1) {
            __syncwarp();
            cluster_arrive_relaxed();
        }
    }

    __device__ __forceinline__ uint2 read_candidate(int place, int from) const {
        const uint32_t at = shared_address(shared.own) + place * sizeof(uint2);
        return ld_shared_cluster_2(cluster_address(at, from));
    }

    __device__ __forceinline__ uint4 read_four(const void* own, int its_rank) const {
        const float4 v = ld_shared_cluster(cluster_address(shared_address(own), its_rank));
        return make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z),
                          __float_as_uint(v.w));
    }

  private:
    // Of which block's warp a piece is: pieces of a row go around the warps of the cluster. What
    // warps have weighed in all, of 32 of them together, is left in s.warp_masses.
    __device__ __forceinline__ void read_masses() {
        static_assert(2 * kPieces == kNumThreads && kMaxTeam / 2 <= kNumWarps);
        const int thread_idx = threadIdx.x, piece = thread_idx % kPieces;
        const int warps = kNumWarps << shift, warp = piece & (warps - 1);
        const bool is_total = thread_idx >= kPieces;
        if (piece / 32 * 32 >= (is_total ? warps : pieces())) {
            return;
        }
        uint2 words = make_uint2(0, 0);
        if (!(is_total && piece >= warps)) {
            const uint64_t* own =
                is_total
                    ? &shared.own_totals[warp % kNumWarps]
                    : &shared
                           .own_pieces[(piece >> shift) / kNumWarps * kNumWarps + warp % kNumWarps];
            words = ld_shared_cluster_2(cluster_address(shared_address(own), warp / kNumWarps));
        }
        uint64_t word = static_cast<uint64_t>(words.y) << 32 | words.x;
        if (is_total) {
            word = warp_sum(word);
            shared.s.warp_masses[piece / 32] = word;
        } else {
            shared.pieces[piece] = word;
        }
    }

    // Each block adds up a share of all bins, a lane for each block, and reads the other shares: to
    // read all of all blocks took five times as long.
    __device__ __forceinline__ void sum_counts() {
        static_assert(kNumBins == 4 * kNumThreads);
        const int thread_idx = threadIdx.x;
        uint32_t* sums = shared.bins.counts;
        const int own = ((rank * kNumThreads + thread_idx) >> shift) * 4;
        uint4 sum = read_four(&shared.own_bins.counts[own], thread_idx & (size - 1));
#pragma unroll 1
        for (int mask = 1; mask < size; mask *= 2) {
            sum.x += __shfl_xor_sync(kAllLanes, sum.x, mask);
            sum.y += __shfl_xor_sync(kAllLanes, sum.y, mask);
            sum.z += __shfl_xor_sync(kAllLanes, sum.z, mask);
            sum.w += __shfl_xor_sync(kAllLanes, sum.w, mask);
        }
        if ((thread_idx & (size - 1)) == 0) {
            *reinterpret_cast<uint4*>(sums + own) = sum;
        }
        if (size > 1) {
            meet();
            const int other = thread_idx * 4, its_rank = rank_of<kNumThreads>(thread_idx);
            if (its_rank != rank) {
                *reinterpret_cast<uint4*>(sums + other) = read_four(sums + other, its_rank);
            }
        }
    }

    __device__ __forceinline__ void sum_bins() {
        Bins& bins = shared.bins;
#pragma unroll 1
        for (int i = threadIdx.x * 4; i < kNumBins; i += kNumThreads * 4) {
            uint32_t counts[4] = {};
            uint64_t masses[4] = {};
#pragma unroll 1
            for (int rank = 0; rank < size; ++rank) {
                const uint4 count = read_four(&shared.own_bins.counts[i], rank);
                const uint4 low = read_four(&shared.own_bins.low[i], rank);
                const uint4 high = read_four(&shared.own_bins.high[i], rank);
                const auto add = [&](int j, uint32_t num, uint32_t word, uint32_t upper) {
                    counts[j] += num;
                    masses[j] += static_cast<uint64_t>(upper) << 32 | word;
                };
                add(0, count.x, low.x, high.x);
                add(1, count.y, low.y, high.y);
                add(2, count.z, low.z, high.z);
                add(3, count.w, low.w, high.w);
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
