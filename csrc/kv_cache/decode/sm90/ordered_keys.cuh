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
#include "kv_cache/decode/tiles.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

// What attention/sm90 does with 128 keys at once, it does here too: its blocks and its threshold.
constexpr int kBlockKeys = 128;
constexpr float kRescaleBits = 8.f;

template <typename T_, int kHeadDim_, int kBlocks_>
struct OrderedConfig {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_, kTile = 16, kRowTiles = 1, kRows = 8;
    static constexpr bool kQuantised = false;
    static constexpr int kWarps = 8, kThreads = 32 * kWarps;
    static constexpr int kBlocks = kBlocks_;             // of a cluster
    static constexpr int kColumns = kHeadDim / kBlocks;  // of the output, of a block
    static constexpr int kValueChunks = kColumns / 8, kValueRowBytes = 2 * kColumns;
    static constexpr int kSumming = kColumns / 8;       // warps that add values, the last ones
    static constexpr int kLoaders = kWarps - kSumming;  // those that load values
    static constexpr int kChunks = kHeadDim / 8;
    static constexpr int kTiles = kBlockKeys / kTile, kAhead = 4;  // tiles of a warp's ring
    static constexpr int kTileBytes = kTile * kHeadDim * 2;
    static constexpr int kRingBytes = kWarps * kAhead * kTileBytes;
    // Of a block of keys: a lane's probabilities, four vectors, then its sum and its row's factor.
    static constexpr int kProbBytes = 32 * 16 * kTiles / 2, kSentBytes = kProbBytes + 32 * 8;
    static constexpr int kRound = kBlocks * kWarps;  // blocks of keys in flight
    static constexpr int kAreaBytes =
        kRingBytes > kRound* kSentBytes ? kRingBytes : kRound * kSentBytes;
    static constexpr int kValueSlots = kColumns == 16 ? 18 : 11;
    static constexpr int kValueBytes = kBlockKeys * kValueRowBytes;
    static constexpr int kMaxBytes = kRound * kRows * 4;
    static constexpr int kBarriers = 1 + kWarps + 2 * kValueSlots;
    static constexpr int kSharedBytes =
        kAreaBytes + kValueSlots * kValueBytes + 2 * kMaxBytes + 8 * kBarriers + 2 * 4 * kRows;
    static_assert(kValueChunks == 2 || kValueChunks == 4, "what value_place spreads over banks");
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
    const uint32_t area, values, maxima, barriers;
    int length, num_blocks;
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
          values(area + C::kAreaBytes),
          maxima(values + C::kValueSlots * C::kValueBytes),
          barriers(maxima + 2 * C::kMaxBytes) {}

    __device__ __forceinline__ uint32_t maxima_there() const { return barriers; }
    __device__ __forceinline__ uint32_t probs_there(int warp) const {
        return barriers + 8 * (1 + warp);
    }
    __device__ __forceinline__ uint32_t value_full(int slot) const {
        return barriers + 8 * (1 + C::kWarps + slot);
    }
    __device__ __forceinline__ uint32_t value_empty(int slot) const {
        return value_full(C::kValueSlots + slot);
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

    // Starts the copies of 16 keys into this warp's ring, zeros where there are none.
    __device__ __forceinline__ void load_keys(int block, int tile, int64_t places,
                                              uint32_t target) const {
        constexpr int kRowsAtOnce = 32 / C::kChunks;
        const int64_t place = __shfl_sync(kAllLanes, places, tile);
        const int chunk = lane_idx % C::kChunks, first_row = lane_idx / C::kChunks;
        const int count = place >= 0 ? length - block * kBlockKeys - 16 * tile - first_row : 0;
        const T* source = args.k_cache + kv_head * args.k_cache_head_stride + place +
                          first_row * args.k_cache_token_stride + 8 * chunk;
#pragma unroll
        for (int i = 0; i < C::kTile; i += kRowsAtOnce) {
            cp_async_16(target + swizzled<C::kChunks>(i + first_row, chunk), source, i < count,
                        read_once_policy());
            source += kRowsAtOnce * args.k_cache_token_stride;
        }
        cp_async_commit();
    }

    // Where eight columns of a key's values lie in a slot: eight keys' on different banks.
    static __device__ __forceinline__ uint32_t value_place(int key, int chunk) {
        const int mask = C::kValueChunks == 2 ? key >> 2 & 1 : key >> 1 & 3;
        return C::kValueRowBytes * key + 16 * (chunk ^ mask);
    }

    // Starts the copies of this block's columns of 128 values, the `at`-th from the end.
    __device__ __forceinline__ void load_values(int at) {
        const int slot = at % C::kValueSlots, block = num_blocks - 1 - at;
        const int64_t places = place_of(block, look_up(block, length), args.v_cache_page_stride,
                                        args.v_cache_token_stride);
        constexpr int kRowsAtOnce = 32 / C::kValueChunks;
        const int chunk = lane_idx % C::kValueChunks, row = lane_idx / C::kValueChunks;
        const int count = length - block * kBlockKeys - row;
        const T* const base = args.v_cache + kv_head * args.v_cache_head_stride +
                              row * args.v_cache_token_stride + C::kColumns * rank + 8 * chunk;
        uint32_t target = values + slot * C::kValueBytes + value_place(row, chunk);
#pragma unroll 1
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
    // row.
    __device__ __forceinline__ void score(int block, int64_t places, int depth,
                                          const uint32_t (&queries)[C::kHeadDim / 16][4],
                                          float (&scores)[2 * C::kTiles][2]) {
        const uint32_t ring = area + warp_idx * depth * C::kTileBytes;
        const auto query = [&](int, int k, uint32_t (&a)[4]) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a[i] = queries[k][i];
            }
        };
#pragma unroll
        for (int tile = 0; tile < C::kTiles; ++tile) {
            constexpr int kLast = C::kTiles - 1;
            if (tile <= kLast - 3) {
                cp_async_wait<3>();
            } else if (tile == kLast - 2) {
                cp_async_wait<2>();
            } else if (tile == kLast - 1) {
                cp_async_wait<1>();
            } else {
                cp_async_wait<0>();
            }
            __syncwarp();
            float found[1][2][4] = {};
            multiply_keys<C>(query, ring + (tile & (depth - 1)) * C::kTileBytes, lane_idx, found);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                scores[2 * tile + j][0] = found[0][j][0];
                scores[2 * tile + j][1] = found[0][j][1];
            }
            if (tile + C::kAhead <= kLast && depth == C::kAhead) {
                __syncwarp();
                load_keys(block, tile + C::kAhead, places,
                          ring + (tile & (depth - 1)) * C::kTileBytes);
            }
        }
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
                                                uint32_t target) const {
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
            st_async(cluster_address(target + 16 * half, to), four,
                     cluster_address(maxima_there(), to));
        }
    }

    // One step of the running maximum, as Scores::softmax has it; what becomes of earlier sums.
    __device__ __forceinline__ float move_shift(float score, bool is_first, float& shift) {
        float largest = fmaf(score, args.scale_log2, -0.f);
        if (!is_first) {
            largest = max_nan(largest, row_shift);
            largest = largest - row_shift <= kRescaleBits ? row_shift : largest;
        }
        shift = largest == -INFINITY ? 0.f : largest;
        const float rescale = is_first ? 1.f : exp2_approx(row_shift - shift);
        row_shift = largest;
        return rescale;
    }

    // Scores become probabilities, which every block of the cluster is sent, with their sum.
    __device__ __forceinline__ void send_probs(const float (&scores)[2 * C::kTiles][2], float shift,
                                               float rescale, uint32_t target) const {
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
            const uint32_t barrier = cluster_address(probs_there(warp_idx), to);
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
