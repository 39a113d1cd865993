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
#include "kv_cache/decode/args.cuh"
#include "kv_cache/decode/sm90/short_ring.cuh"
#include "kv_cache/decode/tiles.cuh"
#include "kv_cache/decode/work.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

template <typename Config, typename Args>
__device__ __forceinline__ void attend_short(const Args& args) {
    using T = typename Config::T;
    constexpr int kTile = Config::kTile, kAhead = Config::kAhead;
    constexpr int kRows = Config::kRows, kRowTiles = Config::kRowTiles, kVectors = Config::kVectors,
                  kSteps = Config::kHeadDim / 16;
    const int lane_idx = threadIdx.x & 31, warp_idx = threadIdx.x >> 5;
    const int blocks = cluster_size(), rank = cluster_rank();
    const int group = small_quotient(args.num_heads, args.num_kv_heads);
    // Blocks of rows of a kv head side by side: the L2 holds what they read.
    const int row_blocks = small_quotient(gridDim.y, args.num_kv_heads);
    const int batch_idx = blockIdx.z, kv_head = small_quotient(blockIdx.y, row_blocks);
    const int first_row = (blockIdx.y - kv_head * row_blocks) * kRows;
    const int num_rows = min(args.seqlen_q * group - first_row, kRows);
    // Each block ends what some vectors of four columns hold, and gets all blocks' parts of them;
    // one alone has them.
    const int num_vectors = num_rows * kVectors;
    const int share = blocks == 1 ? 0 : small_quotient(num_vectors + blocks - 1, blocks);
    const int num_warps = blockDim.x / 32;
    const int first_token = (rank * num_warps + warp_idx) * kTile;
    const int stride = blocks * num_warps * kTile;
    const int num_pairs = args.max_tokens > stride ? Config::kPairs : 1;
    // Queries, and the ring or what the warps merge.
    const uint32_t queries = shared_address(dynamic_shared());
    uint8_t* const area = dynamic_shared() + Config::kQueryBytes;
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
    if constexpr (!Config::kLeads) {
        wait_for_launch_before();
        allow_next_launch();
    }

    // The length, the first pages and the queries, side by side.
    const int given = *static_cast<const volatile int*>(args.cache_seqlens + batch_idx);
    loader.pages = loader.look_up(0, args.max_tokens);
    loader.next_pages = loader.look_up(32, args.max_tokens);
    bool has_begun = false;
    if constexpr (Config::kLeads) {
        // Tiles without a token of this step are on their way when the launch before ends.
        const int end = min(max(given, 0) - args.seqlen_q, args.max_tokens);
        has_begun = first_token + (kAhead - 1) * stride + kTile <= end;
        if (has_begun) {
            loader.end_token = end;
#pragma unroll 1
            for (int tile = 0; tile < kAhead; ++tile) {
                loader.issue(tile, tile);
            }
        }
        wait_for_launch_before();
        allow_next_launch();
    }
    auto query_at = [&](int row, int column) {
        const int token = small_quotient(first_row + row, group);
        const int head = kv_head * group + first_row + row - token * group;
        return args.q + batch_idx * args.q_batch_stride + token * args.q_token_stride +
               head * args.q_head_stride + column;
    };
    uint32_t query_tiles[Config::kQueryInRegisters ? kSteps : 1][4];
    if constexpr (Config::kQueryInRegisters) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = (lane_idx >> 2) + 8 * h;
            const T* const q = query_at(row, 2 * (lane_idx & 3));
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
    } else {
#pragma unroll 1
        for (int i = threadIdx.x; i < kRows * Config::kQueryChunks; i += blockDim.x) {
            const int row = i / Config::kQueryChunks, chunk = i % Config::kQueryChunks;
            cp_async_16(queries + swizzled<Config::kQueryChunks>(row, chunk),
                        query_at(row, chunk * 8), row < num_rows && chunk * 8 < args.head_dim);
        }
        cp_async_commit();
    }
    const int length = given < 0 ? 0 : min(given, kMostTokens);
    report_if(args.flag, length > args.max_tokens && threadIdx.x == 0, kLengthsOutside);
    const int end_token = min(length, args.max_tokens);
    loader.end_token = end_token;
    const int common_end = min(length - args.seqlen_q + 1, end_token);
    const float scale_log2 = args.softmax_scale * kLog2e;

    auto query = [&](int r, int k, uint32_t (&a)[4]) {
        if constexpr (Config::kQueryInRegisters) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a[i] = query_tiles[k][i];
            }
        } else {
            load_query<Config>(queries, r, k, lane_idx, a);
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
        if (tile >= 0 || !has_begun) {
            loader.issue(tile + kAhead, tile < 0 ? 0 : pair ^ 1);
        }
        if (tile < 0) {
            if constexpr (!Config::kQueryInRegisters) {
                cp_async_wait<2 * kAhead>();
                __syncthreads();  // all warps come here once
            }
            continue;
        }
        const uint32_t keys_at = loader.ring + pair * loader.pair_stride;
        const uint32_t values_at = keys_at + Config::kTileBytes;
        pair ^= 1;
        cp_async_wait<2 * kAhead + 1>();
        __syncwarp();
        float scores[kRowTiles][kTile / 8][4] = {};
        multiply_keys<Config>(query, keys_at, lane_idx, scores);

        if (token0 + kTile > common_end) {
            const int key0 = token0 + 2 * (lane_idx & 3);
#pragma unroll
            for (int i = 0; i < 2 * kRowTiles; ++i) {
                const int token = small_quotient(first_row + (lane_idx >> 2) + 8 * i, group);
                const int end = min(common_end + min(token, args.seqlen_q - 1), end_token);
#pragma unroll
                for (int j = 0; j < kTile / 8; ++j) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& score = scores[i / 2][j][2 * (i % 2) + e];
                        score = key0 + 8 * j + e < end ? score : -INFINITY;
                    }
                }
            }
        }

        // One step of the running softmax.
        uint32_t probabilities[kRowTiles][1][4];
#pragma unroll
        for (int i = 0; i < 2 * kRowTiles; ++i) {
            const int r = i / 2, h = i % 2;
            float largest = sums.row_max[i];
#pragma unroll
            for (int j = 0; j < kTile / 8; ++j) {
                largest = fmaxf(largest, fmaxf(scores[r][j][2 * h], scores[r][j][2 * h + 1]));
            }
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            const float base = largest == -INFINITY ? 0.0f : largest * scale_log2;
            const float shrink = exp2_approx(sums.row_max[i] * scale_log2 - base);
            sums.row_max[i] = largest;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < kTile / 8; ++j) {
                const float low = exp2_approx(scores[r][j][2 * h] * scale_log2 - base);
                const float high = exp2_approx(scores[r][j][2 * h + 1] * scale_log2 - base);
                sum += low + high;
                probabilities[r][0][2 * j + h] = pack2<T>(low, high);
            }
            sums.row_sum[i] = sums.row_sum[i] * shrink + sum;
#pragma unroll
            for (int j = 0; j < Config::kHeadDim / 8; ++j) {
                sums.out[r][j][2 * h] *= shrink;
                sums.out[r][j][2 * h + 1] *= shrink;
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
    for (int i = 0; i < 2 * kRowTiles; ++i) {
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
                const float (&out)[4] = sums.out[i / 2][j];
                *reinterpret_cast<float2*>(target + 8 * j + 2 * (lane_idx & 3)) =
                    make_float2(out[2 * (i % 2)], out[2 * (i % 2) + 1]);
            }
        }
    }
    __syncthreads();
    // Ends what vector i of the rows holds.
    auto write = [&](int i, float largest, float sum, const float4& out) {
        const int row = i / kVectors, column = i % kVectors * 4;
        if (column >= args.head_dim) {
            return;
        }
        const int token = small_quotient(first_row + row, group);
        const int head = kv_head * group + first_row + row - token * group;
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
    };
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
        if (blocks == 1) {
            write(i, largest, sum, out);
            continue;
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
        if (i >= num_vectors) {
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
        write(i, largest, sum, out);
    }
}

template <typename C>
constexpr LaunchFacts short_facts() {
    return {.shared_bytes = C::kFewestBytes,
            .blocks_per_sm = 1,
            .head_dim = C::kHeadDim,
            .element_bytes = sizeof(typename C::T),
            .block_m = C::kRows,
            .block_n = C::kTile,
            .warps = C::kMostWarps,
            .stages = C::kPairs};
}

#define EXPORT_SHORT(NAME, T, HEAD_DIM, ROW_TILES, LEADS)                                      \
    DESCRIBED(                                                                                 \
        NAME, "x: blocks of a cluster, y: kv heads and their blocks of rows, z: sequences",    \
        (short_facts<ShortConfig<T, HEAD_DIM, ROW_TILES, LEADS>>()),                           \
        extern "C" __global__ void __launch_bounds__(256, 1) NAME(DECODE_PARAMS(T, const T)) { \
            const DecodeArgs<T, const T> args = {DECODE_ARGUMENTS};                            \
            attend_short<ShortConfig<T, HEAD_DIM, ROW_TILES, LEADS>>(args);                    \
        })

}  // namespace kernel_hub::kv_cache::decode::sm90
