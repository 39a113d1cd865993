// decode_ordered_sm90.cu: shapes, parameters, and what a block of a cluster does with keys: copies,
// scores, the running maximum, probabilities.
#pragma once

#include "kernel_hub/bounds.cuh"
#include "kernel_hub/cluster.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/st_async.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "kv_cache/decode/tiles.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

// What attention/sm90 does with 128 keys at once, it does here too: its blocks and its threshold.
constexpr int kBlockKeys = 128;
constexpr float kRescaleBits = 8.f;

template <typename T_, int kHeadDim_, int kBlocks_>
struct OrderedConfig {
    using T = T_;
    // kTile: keys of a unit, which a warp multiplies at once.
    static constexpr int kHeadDim = kHeadDim_, kTile = 32, kRowTiles = 1, kRows = 8;
    static constexpr bool kQuantised = false;
    static constexpr int kBlocks = kBlocks_;             // of a cluster
    static constexpr int kColumns = kHeadDim / kBlocks;  // of the output, of a block
    static constexpr int kValueChunks = kColumns / 8, kValueRowBytes = 2 * kColumns;
    // Warps that make scores, in teams that have a round each in turn; that load values; that add
    // them.
    static constexpr int kTeam = 16 / kBlocks, kTeams = kBlocks == 8 ? 2 : 1;
    static constexpr int kScoring = kTeams * kTeam, kLoading = 4, kSumming = kColumns / 8;
    static constexpr int kWarps = kScoring + kLoading + kSumming, kThreads = 32 * kWarps;
    static constexpr int kChunks = kHeadDim / 8;
    static constexpr int kTiles = kBlockKeys / 16;  // of 16 keys, which lie on one page
    static constexpr int kUnits = kBlockKeys / kTile, kUnitBytes = kTile * kHeadDim * 2;
    static constexpr int kAhead = 8 / kScoring;  // units of a warp's ring
    static constexpr int kRingBytes = kScoring * kAhead * kUnitBytes;
    // Of a block of keys: a lane's probabilities, four vectors, then its sum and its row's factor.
    static constexpr int kProbBytes = 32 * 16 * kTiles / 2, kSentBytes = kProbBytes + 32 * 8;
    static constexpr int kRound = kBlocks * kTeam;  // blocks of keys that a team scores at once
    static constexpr int kHalfBytes = kRound * kSentBytes;  // a round's probabilities
    static constexpr int kValueSlots = kColumns == 16 ? 20 : 10;
    static constexpr int kValueBytes = kBlockKeys * kValueRowBytes;
    // NOTE: largest scores are sent over those of kMaxima rounds before, which all teams have read
    // by then: who sends has waited for the round three before, so that its senders have finished
    // the last one of theirs.
    static constexpr int kMaxBytes = kRound * kRows * 4, kMaxima = 8;
    static constexpr int kBarriers = kMaxima + 3 + 2 * kTeam + 2 * kValueSlots;
    static constexpr int kSharedBytes = kRingBytes + 2 * kHalfBytes + kValueSlots * kValueBytes +
                                        kMaxima * kMaxBytes + 8 * kBarriers + 4 * kRows;
    static_assert(kValueChunks == 2 || kValueChunks == 4, "what value_place spreads over banks");
    static_assert(kAhead == 2 && kUnits == 4, "two warps share a block of keys");
    static_assert((kRound & (kRound - 1)) == 0, "a power of two");
    static_assert(kSharedBytes <= 227 * 1024, "shared memory of a multiprocessor");
};

template <typename T>
struct OrderedArgs {
    T* out;                    // (batch_size, num_heads, head_dim)
    float* lse;                // (batch_size, num_heads), or null
    int* flag;                 // what tables led outside (bounds.cuh), or null
    const T* q;                // (batch_size, num_heads, head_dim)
    const T* k_cache;          // (num_pages or batch_size, page_size, num_kv_heads, head_dim)
    const T* v_cache;          // same
    const int* cache_seqlens;  // (batch_size,)
    const int* block_table;    // (batch_size, max_pages), or null: one page a sequence
    int64_t out_batch_stride, out_head_stride, q_batch_stride, q_head_stride;
    int64_t k_cache_page_stride, k_cache_token_stride, k_cache_head_stride;
    int64_t v_cache_page_stride, v_cache_token_stride, v_cache_head_stride, block_table_stride;
    int num_heads, num_kv_heads, num_pages, page_size, max_tokens;
    float scale_log2;
};

// The block of one cluster: item (sequence and kv head), its ring, and its places in shared memory.
template <typename C>
struct Ordered {
    using T = typename C::T;
    using Args = OrderedArgs<T>;
    const Args& args;
    const int lane_idx, warp_idx, rank, batch_idx, kv_head, group;
    const uint32_t area, probs, values, maxima, barriers;
    int given, length, num_blocks;
    float row_shift = -INFINITY;  // of row lane / 4, before the round
    bool is_outside = false;

    __device__ __forceinline__ Ordered(const Args& args_)
        : args(args_),
          lane_idx(threadIdx.x % 32),
          warp_idx(threadIdx.x / 32),
          rank(cluster_rank()),
          batch_idx(blockIdx.z),
          kv_head(blockIdx.y),
          group(args_.num_heads / args_.num_kv_heads),
          area(shared_address(dynamic_shared())),
          probs(area + C::kRingBytes),
          values(probs + 2 * C::kHalfBytes),
          maxima(values + C::kValueSlots * C::kValueBytes),
          barriers(maxima + C::kMaxima * C::kMaxBytes) {}

    __device__ __forceinline__ void read_length() {
        given = *static_cast<const volatile int*>(args.cache_seqlens + batch_idx);
        length = max(0, min(given, args.max_tokens));
        num_blocks = (length + kBlockKeys - 1) / kBlockKeys;
    }

    // Rounds have two halves of the probabilities' places in turn.
    __device__ __forceinline__ uint32_t maxima_there(int round) const {
        return barriers + 8 * (round % C::kMaxima);
    }
    __device__ __forceinline__ uint32_t probs_free(int half) const {
        return barriers + 8 * (C::kMaxima + half);
    }
    __device__ __forceinline__ uint32_t shift_there() const {
        return barriers + 8 * (C::kMaxima + 2);
    }
    __device__ __forceinline__ uint32_t probs_there(int half, int warp) const {
        return barriers + 8 * (C::kMaxima + 3 + half * C::kTeam + warp);
    }
    __device__ __forceinline__ uint32_t value_full(int slot) const {
        return barriers + 8 * (C::kMaxima + 3 + 2 * C::kTeam + slot);
    }
    __device__ __forceinline__ uint32_t value_empty(int slot) const {
        return value_full(C::kValueSlots + slot);
    }
    __device__ __forceinline__ float* row_shifts() const {
        return reinterpret_cast<float*>(dynamic_shared() + C::kSharedBytes - 4 * C::kRows);
    }
    // Blocks of a round, whose first one from the end is `first`; none behind the last round.
    __device__ __forceinline__ int count_from(int first) const {
        return max(0, min(num_blocks - first, C::kRound));
    }

    // Lane l < 8: the page of the keys from 16 l on in a block; -1 where it ends before them.
    __device__ __forceinline__ int look_up(int block, int end) const {
        const int key = block * kBlockKeys + 16 * lane_idx;
        return lane_idx >= C::kTiles || key >= end ? -1
               : args.block_table == nullptr
                   ? batch_idx
                   : __ldg(args.block_table + batch_idx * args.block_table_stride +
                           key / args.page_size);
    }

    // Lane l < 8: where in a cache of these strides those keys are; -1 where there are none.
    __device__ __forceinline__ int64_t place_of(int block, int page, int64_t page_stride,
                                                int64_t token_stride) {
        const int key = block * kBlockKeys + 16 * lane_idx;
        const bool is_key = lane_idx < C::kTiles && key < length;
        const bool is_there = is_key && is_index(page, args.num_pages);
        is_outside |= is_key && !is_there;
        const int in_page = args.block_table == nullptr ? key : key % args.page_size;
        return is_there ? page * page_stride + in_page * token_stride : -1;
    }

    // Starts the copies of a unit of keys into this warp's ring, zeros where there are none.
    __device__ __forceinline__ void load_keys(int block, int unit, int64_t places,
                                              uint32_t target) const {
        constexpr int kRowsAtOnce = 32 / C::kChunks;
        const int chunk = lane_idx % C::kChunks, first_row = lane_idx / C::kChunks;
#pragma unroll 1
        for (int half = 0; half < C::kTile / 16; ++half) {
            const int tile = C::kTile / 16 * unit + half;
            const int64_t place = __shfl_sync(kAllLanes, places, tile);
            const int count = place >= 0 ? length - block * kBlockKeys - 16 * tile - first_row : 0;
            const T* source = args.k_cache + kv_head * args.k_cache_head_stride + place +
                              first_row * args.k_cache_token_stride + 8 * chunk;
#pragma unroll 4
            for (int i = 0; i < 16; i += kRowsAtOnce) {
                cp_async_16(target + swizzled<C::kChunks>(i + first_row, chunk), source, i < count,
                            read_once_policy());
                source += kRowsAtOnce * args.k_cache_token_stride;
            }
            target += C::kUnitBytes / 2;
        }
    }

    // Where eight columns of a key's values lie in a slot: eight keys' on different banks.
    static __device__ __forceinline__ uint32_t value_place(int key, int chunk) {
        const int mask = C::kValueChunks == 2 ? key >> 2 & 1 : key >> 1 & 3;
        return C::kValueRowBytes * key + 16 * (chunk ^ mask);
    }

    // Starts the copies of this block's columns of 128 values, the `at`-th from the end, whose
    // pages were looked up, into a slot.
    __device__ __forceinline__ void load_values(int at, int pages, int slot) {
        const int block = num_blocks - 1 - at;
        const int64_t places =
            place_of(block, pages, args.v_cache_page_stride, args.v_cache_token_stride);
        constexpr int kRowsAtOnce = 32 / C::kValueChunks;
        const int chunk = lane_idx % C::kValueChunks, row = lane_idx / C::kValueChunks;
        const int count = length - block * kBlockKeys - row;
        const T* const base = args.v_cache + kv_head * args.v_cache_head_stride +
                              row * args.v_cache_token_stride + C::kColumns * rank + 8 * chunk;
        uint32_t target = values + slot * C::kValueBytes + value_place(row, chunk);
#pragma unroll 4
        for (int tile = 0; tile < C::kTiles; ++tile) {
            const int64_t place = __shfl_sync(kAllLanes, places, tile);
#pragma unroll
            for (int i = 0; i < 16; i += kRowsAtOnce) {
                cp_async_16(target, base + place + i * args.v_cache_token_stride,
                            place >= 0 && 16 * tile + i < count);
                target += kRowsAtOnce * C::kValueRowBytes;
            }
        }
        cp_async_arrive(value_full(slot));
    }

    // This warp's scores of a block of keys, columns 8 j + 2 (lane % 4) and the next one of its
    // row. What is scored makes room for what is behind it: `next`, where that block has places.
    // Of a block that two warps share each has half of the units, in the first ones' places.
    __device__ __forceinline__ void score(int block, int64_t places, int next, int64_t next_places,
                                          bool is_shared,
                                          const uint32_t (&queries)[C::kHeadDim / 16][4],
                                          float (&scores)[2 * C::kTiles][2]) {
        const uint32_t ring = area + warp_idx * C::kAhead * C::kUnitBytes;
        const auto query = [&](int, int k, uint32_t (&a)[4]) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a[i] = queries[k][i];
            }
        };
#pragma unroll
        for (int unit = 0; unit < C::kUnits; ++unit) {
            if (unit == C::kAhead && is_shared) {
                return;
            }
            cp_async_wait<C::kAhead - 1>();
            __syncwarp();
            const uint32_t slot = ring + unit % C::kAhead * C::kUnitBytes;
            float found[1][C::kTile / 8][4] = {};
            multiply_keys<C>(query, slot, lane_idx, found);
#pragma unroll
            for (int j = 0; j < C::kTile / 8; ++j) {
                scores[C::kTile / 8 * unit + j][0] = found[0][j][0];
                scores[C::kTile / 8 * unit + j][1] = found[0][j][1];
            }
            __syncwarp();
            const int ahead = unit + C::kAhead;
            if (ahead < C::kUnits && !is_shared) {
                load_keys(block, ahead, places, slot);
            } else if (next >= 0) {
                load_keys(next, ahead - C::kUnits, next_places, slot);
            }
            cp_async_commit();
        }
    }

    // A warp's scores of its half of a block, which is the second one, where the other warp finds
    // them: the ring of who made them.
    __device__ __forceinline__ void pass_scores(const float (&scores)[2 * C::kTiles][2]) const {
        uint8_t* const target =
            dynamic_shared() + warp_idx * C::kAhead * C::kUnitBytes + 8 * lane_idx;
#pragma unroll
        for (int j = 0; j < C::kTiles; ++j) {
            *reinterpret_cast<float2*>(target + 256 * j) = make_float2(scores[j][0], scores[j][1]);
        }
        named_barrier_arrive(1 + warp_idx - C::kScoring / 2, 64);
    }
    __device__ __forceinline__ void take_scores(float (&scores)[2 * C::kTiles][2]) const {
        named_barrier_sync(1 + warp_idx, 64);
        const uint8_t* const source = dynamic_shared() + 8 * lane_idx +
                                      (warp_idx + C::kScoring / 2) * C::kAhead * C::kUnitBytes;
#pragma unroll
        for (int j = 0; j < C::kTiles; ++j) {
            const float2 two = *reinterpret_cast<const float2*>(source + 256 * j);
            scores[C::kTiles + j][0] = two.x;
            scores[C::kTiles + j][1] = two.y;
        }
    }

    // No scores where there are no keys.
    __device__ __forceinline__ void mask(int block, float (&scores)[2 * C::kTiles][2]) const {
        const int end = length - block * kBlockKeys - 2 * (lane_idx % 4);
        if (end < kBlockKeys) {
#pragma unroll
            for (int j = 0; j < 2 * C::kTiles; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    scores[j][e] = 8 * j + e < end ? scores[j][e] : -INFINITY;
                }
            }
        }
    }

    // Sends every block of the cluster the rows' largest scores.
    __device__ __forceinline__ void send_maxima(const float (&scores)[2 * C::kTiles][2],
                                                uint32_t target, uint32_t barrier) const {
        float largest = max_nan(scores[0][0], scores[0][1]);
#pragma unroll
        for (int j = 1; j < 2 * C::kTiles; ++j) {
            largest = max_nan(largest, max_nan(scores[j][0], scores[j][1]));
        }
        largest = max_nan(largest, __shfl_xor_sync(kAllLanes, largest, 1));
        largest = max_nan(largest, __shfl_xor_sync(kAllLanes, largest, 2));
        const int half = lane_idx % 2, to = lane_idx / 2;
        float4 four;
        four.x = __shfl_sync(kAllLanes, largest, 16 * half);
        four.y = __shfl_sync(kAllLanes, largest, 16 * half + 4);
        four.z = __shfl_sync(kAllLanes, largest, 16 * half + 8);
        four.w = __shfl_sync(kAllLanes, largest, 16 * half + 12);
        if (to < C::kBlocks) {
            st_async(cluster_address(target + 16 * half, to), four, cluster_address(barrier, to));
        }
    }

    // One step of the running maximum, as Scores::softmax has it; the first one is from -inf.
    __device__ __forceinline__ void move_shift(float score) {
        const float largest = max_nan(fmaf(score, args.scale_log2, -0.f), row_shift);
        row_shift = largest - row_shift <= kRescaleBits ? row_shift : largest;
    }

    __device__ __forceinline__ void wait_for_maxima(int round) const {
        mbarrier_wait(maxima_there(round), round / C::kMaxima & 1);
    }

    // The steps of a round's blocks, from the `from`-th one from its end to the `to`-th.
    __device__ __forceinline__ void move_shifts(int round, int from, int to) {
        const float* largest = maxima_of(round, from);
#pragma unroll 4
        for (int at = from; at < to; ++at) {
            move_shift(*largest);
            largest -= C::kRows;
        }
    }
    // The step of a round's `at`-th block from its end: what is taken from its scores; what becomes
    // of earlier sums.
    __device__ __forceinline__ float own_shift(int round, int at, float& shift) {
        const float before = row_shift;
        move_shift(*maxima_of(round, at));
        shift = row_shift == -INFINITY ? 0.f : row_shift;
        return round + at == 0 ? 1.f : exp2_approx(before - shift);
    }
    // Where a row's largest score of a round's `at`-th block from its end is.
    __device__ __forceinline__ const float* maxima_of(int round, int at) const {
        return reinterpret_cast<const float*>(dynamic_shared() + (maxima - area) +
                                              round % C::kMaxima * C::kMaxBytes) +
               (count_from(round * C::kRound) - 1 - at) * C::kRows + lane_idx / 4;
    }

    // Scores become probabilities, which every block of the cluster is sent, with their sum.
    __device__ __forceinline__ void send_probs(const float (&scores)[2 * C::kTiles][2], float shift,
                                               float rescale, uint32_t target,
                                               uint32_t there) const {
        float sum = 0.f;
        float words[C::kTiles][2];
#pragma unroll
        for (int i = 0; i < C::kTiles; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float p[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    p[e] = exp2_approx(fmaf(scores[2 * i + j][e], args.scale_log2, -shift));
                    sum += p[e];
                }
                words[i][j] = __uint_as_float(pack2<T>(p[0], p[1]));
            }
        }
        if (lane_idx / 4 >= group) {
            return;
        }
#pragma unroll 1
        for (int i = 0; i < C::kBlocks; ++i) {
            const int to = (rank + i) % C::kBlocks;
            const uint32_t barrier = cluster_address(there, to);
            const uint32_t place = cluster_address(target + 16 * lane_idx, to);
#pragma unroll
            for (int j = 0; j < C::kTiles; j += 2) {
                st_async(place + 256 * j,
                         make_float4(words[j][0], words[j][1], words[j + 1][0], words[j + 1][1]),
                         barrier);
            }
            st_async(cluster_address(target + C::kProbBytes + 8 * lane_idx, to),
                     make_float2(sum, rescale), barrier);
        }
    }
};

}  // namespace kernel_hub::kv_cache::decode::sm90
