// Decode steps on Hopper as one launch: a cluster is an item (a sequence and a kv head), and its
// blocks exchange their parts through shared memory.
#pragma once

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/optional_reads.cuh"
#include "kernel_hub/sinks.cuh"
#include "kernel_hub/st_async.cuh"
#include "kernel_hub/vec.cuh"
#include "kv_cache/decode/tiles.cuh"
#include "kv_cache/decode/work.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

template <typename T_, int kHeadDim_>
struct ShortConfig {
    using T = T_;
    using Cache = T_;
    static constexpr int kHeadDim = kHeadDim_, kTile = 16, kMostWarps = 8;
    // Of each warp's ring: places of a tile's keys and values.
    static constexpr int kPairs = 2, kAhead = kPairs - 1;
    static constexpr int kRowTiles = 1, kRows = 16;
    static constexpr bool kQuantised = false;
    static constexpr int kRowBytes = kHeadDim * 2, kChunks = kRowBytes / 16;
    static constexpr int kTileBytes = kTile * kRowBytes, kPairBytes = 2 * kTileBytes;
    static constexpr int kVectors = kHeadDim / 4;
    static constexpr int kMergeStride = kHeadDim + 8;
    static constexpr int kMergeBytes = kRows * (kMergeStride + 2) * 4;  // of a warp
    // What is sent: vectors of four columns, and a row's maximum and sum with each.
    static constexpr int kSentBytes = 24;
    // Of four warps, without what is sent to them.
    static constexpr int kFewestBytes = 4 * kMergeBytes;
    static_assert(kMergeBytes >= kPairBytes, "the ring's first pairs lie within what is merged");
};

// a / b, both small.
__device__ __forceinline__ int small_quotient(int a, int b) {
    return static_cast<int>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
}

// Fills the ring of one warp, whose tiles are `stride` tokens apart and in one page each.
template <typename Config, typename Args>
struct ShortLoader {
    using T = typename Config::T;
    const Args& args;
    const T* keys;
    const T* values;
    const int* table;  // of the sequence
    int batch_idx, first_token, end_token, stride;
    int pages, next_pages;  // lane l: of tiles l, 32 + l, ...
    uint32_t ring;
    int lane_idx, pair_stride;
    bool is_outside;

    __device__ __forceinline__ int look_up(int tile, int end) const {
        const int token = first_token + (tile + lane_idx) * stride;
        return args.block_table == nullptr ? batch_idx
               : token < end               ? __ldg(table + token / args.page_size)
                                           : -1;
    }
    __device__ __forceinline__ void copy(const T* base, int64_t token_stride, int num_tokens,
                                         uint32_t target) const {
        constexpr int kChunks = Config::kChunks, kRowsAtOnce = 32 / kChunks;
        const int chunk = lane_idx % kChunks, first_row = lane_idx / kChunks;
        const T* source = base + first_row * token_stride + chunk * 8;
        const bool is_column = chunk * 8 < args.head_dim;
#pragma unroll
        for (int i = 0; i < Config::kTile; i += kRowsAtOnce) {
            cp_async_16(target + swizzled<kChunks>(i + first_row, chunk), source,
                        is_column && i + first_row < num_tokens, read_once_policy());
            source += kRowsAtOnce * token_stride;
        }
    }
    // Start the copies of a tile's keys and values, a group each; nothing where there is no tile.
    // Rows of a page that is not there become zeros.
    __device__ __forceinline__ void issue(int tile, int pair) {
        const int token = first_token + tile * stride;
        if ((tile & 31) == 0 && tile != 0) {
            pages = next_pages;
            next_pages = look_up(tile + 32, end_token);
        }
        const int page = __shfl_sync(~0u, pages, tile & 31);
        const int in_page = args.block_table == nullptr ? token : token % args.page_size;
        const bool is_there = is_index(page, args.num_pages);
        is_outside |= token < end_token && !is_there;
        const int num_tokens = is_there ? end_token - token : 0;
        const uint32_t target = ring + pair * pair_stride;
        if (token < end_token) {
            copy(keys + page * args.k_cache_page_stride + in_page * args.k_cache_token_stride,
                 args.k_cache_token_stride, num_tokens, target);
        }
        cp_async_commit();
        if (token < end_token) {
            copy(values + page * args.v_cache_page_stride + in_page * args.v_cache_token_stride,
                 args.v_cache_token_stride, num_tokens, target + Config::kTileBytes);
        }
        cp_async_commit();
    }
};

template <typename Config, typename Args>
__device__ __forceinline__ void attend_short(const Args& args) {
    using T = typename Config::T;
    constexpr int kTile = Config::kTile, kAhead = Config::kAhead;
    constexpr int kRows = Config::kRows, kVectors = Config::kVectors,
                  kSteps = Config::kHeadDim / 16;
    const int lane_idx = threadIdx.x & 31, warp_idx = threadIdx.x >> 5;
    const int blocks = cluster_size(), rank = cluster_rank();
    const int batch_idx = blockIdx.z, kv_head = blockIdx.y;
    const int group = small_quotient(args.num_heads, args.num_kv_heads);
    const int num_rows = args.seqlen_q * group;
    // Each block ends what some vectors of four columns hold, and gets all blocks' parts of them.
    const int num_vectors = num_rows * kVectors;
    const int share = small_quotient(num_vectors + blocks - 1, blocks);
    const int num_warps = blockDim.x / 32;
    const int first_token = (rank * num_warps + warp_idx) * kTile;
    const int stride = blocks * num_warps * kTile;
    const int num_pairs = args.max_tokens > stride ? Config::kPairs : 1;
    uint8_t* const area = dynamic_shared();  // the ring, or what the warps merge
    uint8_t* const received =
        area + num_warps * max(num_pairs * Config::kPairBytes, Config::kMergeBytes);
    const uint32_t vectors = shared_address(received);
    const uint32_t sums_of = vectors + blocks * share * 16;
    const uint32_t barrier = sums_of + blocks * share * 8;

    ShortLoader<Config, Args> loader = {args};
    loader.keys = args.k_cache + kv_head * args.k_cache_head_stride;
    loader.values = args.v_cache + kv_head * args.v_cache_head_stride;
    loader.table = args.block_table + batch_idx * args.block_table_stride;
    loader.batch_idx = batch_idx;
    loader.first_token = first_token;
    loader.stride = stride;
    loader.ring = shared_address(area) + warp_idx * Config::kPairBytes;
    loader.pair_stride = num_warps * Config::kPairBytes;
    loader.lane_idx = lane_idx;
    loader.is_outside = false;
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        const int mine = max(min(share, num_vectors - rank * share), 0);
        mbarrier_arrive_expect_tx(barrier, mine * blocks * Config::kSentBytes);
    }
    // That the blocks are there is asked when something is sent to them.
    cluster_arrive_relaxed();
    wait_for_launch_before();
    allow_next_launch();

    // The length, the first pages and the queries, side by side.
    const int given = *static_cast<const volatile int*>(args.cache_seqlens + batch_idx);
    loader.pages = loader.look_up(0, args.max_tokens);
    loader.next_pages = loader.look_up(32, args.max_tokens);
    uint32_t query_tiles[kSteps][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = (lane_idx >> 2) + 8 * h;
        const int token = small_quotient(row, group), head = kv_head * group + row - token * group;
        const T* const q = args.q + batch_idx * args.q_batch_stride + token * args.q_token_stride +
                           head * args.q_head_stride + 2 * (lane_idx & 3);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = 16 * k + 8 * half;
                query_tiles[k][2 * half + h] =
                    ld_global_if(row < num_rows && column < args.head_dim,
                                 reinterpret_cast<const uint32_t*>(q + column));
            }
        }
    }
    const int length = given < 0 ? 0 : min(given, kMostTokens);
    report_if(args.flag, length > args.max_tokens && threadIdx.x == 0, kLengthsOutside);
    const int end_token = min(length, args.max_tokens);
    loader.end_token = end_token;
    const int common_end = min(length - args.seqlen_q + 1, end_token);
    const float scale_log2 = args.softmax_scale * kLog2e;

    auto query = [&](int, int k, uint32_t (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i] = query_tiles[k][i];
        }
    };
    Accumulator<Config> sums;
    sums.clear();
    int pair = 0;
#pragma unroll 1
    for (int tile = -kAhead;; ++tile) {
        const int token0 = first_token + tile * stride;
        if (tile >= 0 && token0 >= end_token) {
            break;
        }
        __syncwarp();  // the other pair has been read
        loader.issue(tile + kAhead, tile < 0 ? 0 : pair ^ 1);
        if (tile < 0) {
            continue;
        }
        const uint32_t keys_at = loader.ring + pair * loader.pair_stride;
        const uint32_t values_at = keys_at + Config::kTileBytes;
        pair ^= 1;
        cp_async_wait<2 * kAhead + 1>();
        __syncwarp();
        float tile_scores[1][kTile / 8][4] = {};
        float (&scores)[kTile / 8][4] = tile_scores[0];
        multiply_keys<Config>(query, keys_at, lane_idx, tile_scores);

        if (token0 + kTile > common_end) {
            const int key0 = token0 + 2 * (lane_idx & 3);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = small_quotient((lane_idx >> 2) + 8 * i, group);
                const int end = min(common_end + min(token, args.seqlen_q - 1), end_token);
#pragma unroll
                for (int j = 0; j < kTile / 8; ++j) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& score = scores[j][2 * i + e];
                        score = key0 + 8 * j + e < end ? score : -INFINITY;
                    }
                }
            }
        }

        // One step of the running softmax.
        uint32_t probabilities[1][1][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float largest = sums.row_max[h];
#pragma unroll
            for (int j = 0; j < kTile / 8; ++j) {
                largest = fmaxf(largest, fmaxf(scores[j][2 * h], scores[j][2 * h + 1]));
            }
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            const float base = largest == -INFINITY ? 0.0f : largest * scale_log2;
            const float shrink = exp2_approx(sums.row_max[h] * scale_log2 - base);
            sums.row_max[h] = largest;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < kTile / 8; ++j) {
                const float low = exp2_approx(scores[j][2 * h] * scale_log2 - base);
                const float high = exp2_approx(scores[j][2 * h + 1] * scale_log2 - base);
                sum += low + high;
                probabilities[0][0][2 * j + h] = pack2<T>(low, high);
            }
            sums.row_sum[h] = sums.row_sum[h] * shrink + sum;
#pragma unroll
            for (int j = 0; j < Config::kHeadDim / 8; ++j) {
                sums.out[0][j][2 * h] *= shrink;
                sums.out[0][j][2 * h + 1] *= shrink;
            }
        }

        cp_async_wait<2 * kAhead>();
        __syncwarp();
        multiply_values<Config, T>(probabilities, values_at, lane_idx, sums);
    }
    cp_async_wait<0>();
    report_if(args.flag, loader.is_outside, kPagesOutside);
    __syncthreads();

    // The warps' rows, side by side.
    float* const merge = reinterpret_cast<float*>(area);
    float* const row_maxima = merge + num_warps * kRows * Config::kMergeStride;
    float* const row_sums = row_maxima + num_warps * kRows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float sum = sums.row_sum[i];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int row = 8 * i + (lane_idx >> 2);
        if (row < num_rows) {
            float* target = merge + (warp_idx * kRows + row) * Config::kMergeStride;
            if ((lane_idx & 3) == 0) {
                row_maxima[warp_idx * kRows + row] =
                    sums.row_max[i] == -INFINITY ? -INFINITY : sums.row_max[i] * scale_log2;
                row_sums[warp_idx * kRows + row] = sum;
            }
#pragma unroll
            for (int j = 0; j < Config::kHeadDim / 8; ++j) {
                const float (&out)[4] = sums.out[0][j];
                *reinterpret_cast<float2*>(target + 8 * j + 2 * (lane_idx & 3)) =
                    make_float2(out[2 * i], out[2 * i + 1]);
            }
        }
    }
    __syncthreads();
    cluster_wait();
#pragma unroll 1
    for (int i = threadIdx.x; i < num_vectors; i += blockDim.x) {
        const int row = i / kVectors, column = i % kVectors * 4;
        float largest = -INFINITY;
#pragma unroll 4
        for (int w = 0; w < num_warps; ++w) {
            largest = fmaxf(largest, row_maxima[w * kRows + row]);
        }
        const float base = largest == -INFINITY ? 0.0f : largest;
        float sum = 0.0f;
        float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int w = 0; w < num_warps; ++w) {
            const float weight = exp2_approx(row_maxima[w * kRows + row] - base);
            const float4 part = *reinterpret_cast<const float4*>(
                merge + (w * kRows + row) * Config::kMergeStride + column);
            sum += weight * row_sums[w * kRows + row];
            out.x += weight * part.x, out.y += weight * part.y;
            out.z += weight * part.z, out.w += weight * part.w;
        }
        const int owner = small_quotient(i, share);
        const int place = rank * share + i - owner * share;
        const uint32_t at = cluster_address(barrier, owner);
        st_async(cluster_address(vectors + place * 16, owner), out, at);
        st_async(cluster_address(sums_of + place * 8, owner), make_float2(largest, sum), at);
    }
    if (warp_idx * 32 >= share) {
        return;
    }
    mbarrier_wait(barrier, 0);
#pragma unroll 1
    for (int j = threadIdx.x; j < share; j += blockDim.x) {
        const int i = rank * share + j;
        const int row = i / kVectors, column = i % kVectors * 4;
        if (i >= num_vectors || column >= args.head_dim) {
            continue;
        }
        const float4* const parts = reinterpret_cast<const float4*>(received);
        const float2* const pairs = reinterpret_cast<const float2*>(received + blocks * share * 16);
        float largest = -INFINITY;
#pragma unroll 4
        for (int b = 0; b < blocks; ++b) {
            largest = fmaxf(largest, pairs[b * share + j].x);
        }
        const float base = largest == -INFINITY ? 0.0f : largest;
        float sum = 0.0f;
        float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int b = 0; b < blocks; ++b) {
            const float2 sent = pairs[b * share + j];
            const float4 part = parts[b * share + j];
            const float weight = exp2_approx(sent.x - base);
            sum += weight * sent.y;
            out.x += weight * part.x, out.y += weight * part.y;
            out.z += weight * part.z, out.w += weight * part.w;
        }
        const int token = small_quotient(row, group), head = kv_head * group + row - token * group;
        float shift = largest;
        const float factor = add_sink(find_sink(args, batch_idx, head), shift, sum);
        T* target = args.out + batch_idx * args.out_batch_stride + token * args.out_token_stride +
                    head * args.out_head_stride + column;
        *reinterpret_cast<uint2*>(target) = make_uint2(pack2<T>(out.x * factor, out.y * factor),
                                                       pack2<T>(out.z * factor, out.w * factor));
        if (args.lse != nullptr && column == 0) {
            args.lse[(static_cast<int64_t>(batch_idx) * args.num_heads + head) * args.seqlen_q +
                     token] = (shift + __logf(sum) * kLog2e) * kLn2;
        }
    }
}

}  // namespace kernel_hub::kv_cache::decode::sm90
