// Decode steps of multi-head latent attention with absorbed weights (DeepSeek-V2 and V3):
//
//   s_j = softmax_scale (q[:512] . kv_j[:512] + q[512:] . kv_j[512:])
//   out = sum_j softmax(s)_j kv_j[:512],  lse = log sum_j exp(s_j)
//
// of 1 to 16 new tokens a sequence over a cache of rows of 576 (latent 512, rotated key 64) that
// all heads share, contiguous or paged, in fp16 or bf16. Token i of seqlen_q sees the keys up to
// its own: length - seqlen_q + i.
//
// Parallelisation: the rows (token num_heads + head) are the M side of m16n8k16, 16 a block. How
// caches are cut into parts, a part a block, and merged again: decode_attention.cu, whose second
// kernel merges these parts too. A tile is 32 tokens: each of four warps has 8 of them in the
// scores, then, the probabilities being shared, 128 of the 512 columns of the output.
//
// Shared memory: two tiles, the next being copied while one is used as keys and as values (16-byte
// chunks swizzled); the queries; probabilities, maxima and sums.
//
// Variants: dtype. Hopper: mla_decode_sm90.cu, but for pages that are not multiples of 8 tokens.
// Source: DeepSeek-AI, "DeepSeek-V2", 2024, 2.1 and appendix C.
// kernel_hub: not-for: sm89: it is sm80's code but for the order of instructions, and 8.9 runs that

#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/vec.cuh"
#include "kv_cache/decode/latent.cuh"
#include "kv_cache/decode/tiles.cuh"

namespace kernel_hub::kv_cache::decode {

struct LatentTiles {
    static constexpr int kRows = 16, kTile = 32, kWarps = 4, kThreads = 32 * kWarps;
    static constexpr int kChunks = kKeyDim / 8, kTileBytes = kTile * kKeyDim * 2;
    static constexpr int kQueries = 2 * kTileBytes, kProbs = kQueries + kRows * kKeyDim * 2;
    static constexpr int kMaxima = kProbs + kRows * kTile * 2, kSums = kMaxima + kWarps * kRows * 4;
    static constexpr int kSharedBytes = kSums + kWarps * kRows * 4;
    static constexpr int kColumns = kLatentDim / kWarps;  // of a warp's output
    static_assert(kTile == 8 * kWarps, "a warp has the 8 keys of one product");
    static_assert(kSharedBytes <= 99 << 10, "a block of sm_89 has 99 KiB of shared memory");
};

// Copies tiles of the cache to shared memory, pages being looked up a tile ahead: lane l of each
// warp knows where the l-th row of a tile lies.
template <typename T>
struct LatentLoader {
    const LatentArgs<T>& args;
    const LatentPart& part;
    const T* kv_cache;
    const int64_t page_stride, token_stride;
    const int lane_idx;
    int token, next_page;
    bool is_outside;  // some page so far

    __device__ __forceinline__ void look_up() {
        next_page = part.batch_idx;
        if (args.block_table != nullptr && token < part.end_token) {
            next_page = __ldg(args.block_table + part.batch_idx * args.block_table_stride +
                              token / args.page_size);
        }
    }

    // Starts the copies of the next tile. Rows that are not there become zeros.
    __device__ __forceinline__ void issue(uint32_t target) {
        using C = LatentTiles;
        const bool is_token = token < part.end_token;
        const bool is_there = is_token && is_index(next_page, args.num_pages);
        is_outside |= is_token && !is_there;
        const int in_page = args.block_table == nullptr ? token : token % args.page_size;
        const T* row =
            is_there ? kv_cache + next_page * page_stride + in_page * token_stride : nullptr;
        token += C::kTile;
        look_up();
#pragma unroll 3
        for (int i = 0; i < C::kTile * C::kChunks / C::kThreads; ++i) {
            const int job = i * C::kThreads + threadIdx.x;
            const int in_tile = job / C::kChunks, chunk = job % C::kChunks;
            const uint64_t source = __shfl_sync(~0u, reinterpret_cast<uint64_t>(row), in_tile);
            cp_async_16(target + swizzled<C::kChunks>(in_tile, chunk),
                        reinterpret_cast<const void*>(source + chunk * 16), source != 0);
        }
        cp_async_commit();
    }
};

// The block's queries, zeros where there are no rows.
template <typename T>
__device__ __forceinline__ void load_queries(const LatentArgs<T>& args, const LatentPart& part,
                                             uint32_t target) {
    using C = LatentTiles;
#pragma unroll 1
    for (int i = 0; i < C::kRows * C::kChunks / C::kThreads; ++i) {
        const int job = i * C::kThreads + threadIdx.x;
        const int row = job / C::kChunks, chunk = job % C::kChunks;
        const int token = (part.first_row + row) / args.num_heads;
        const int head = (part.first_row + row) % args.num_heads;
        const bool is_there = row < part.num_rows;
        const T* source = args.q + (is_there ? part.batch_idx * args.q_batch_stride +
                                                   token * args.q_token_stride +
                                                   head * args.q_head_stride + chunk * 8
                                             : 0);
        cp_async_16(target + swizzled<C::kChunks>(row, chunk), source, is_there);
    }
    cp_async_commit();
}

// Scores of the warp's 8 keys: rows lane / 4 and + 8, keys 2 (lane % 4) and the next.
template <typename T>
__device__ __forceinline__ void multiply_latents(uint32_t queries, uint32_t tile,
                                                 float (&scores)[4]) {
    using C = LatentTiles;
    const int lane_idx = threadIdx.x & 31, warp_idx = threadIdx.x >> 5;
    float odd[4] = {};
#pragma unroll 3
    for (int k = 0; k < kKeyDim / 32; ++k) {
        uint32_t keys[4], a[4];
        ldmatrix_x4(keys, tile + swizzled<C::kChunks>(8 * warp_idx + (lane_idx & 7),
                                                      4 * k + (lane_idx >> 3)));
        ldmatrix_x4(a, queries + swizzled<C::kChunks>(lane_idx & 15, 4 * k + (lane_idx >> 4)));
        mma_m16n8k16<T>(scores, a, keys[0], keys[1]);
        ldmatrix_x4(a, queries + swizzled<C::kChunks>(lane_idx & 15, 4 * k + 2 + (lane_idx >> 4)));
        mma_m16n8k16<T>(odd, a, keys[2], keys[3]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        scores[e] += odd[e];
    }
}

template <typename T>
__device__ __forceinline__ void mla_decode(const LatentArgs<T>& args, const T* kv_cache,
                                           int64_t page_stride, int64_t token_stride) {
    using C = LatentTiles;
    // NOTE: in this order: what may start next reads cache_seqlens before it waits.
    wait_for_launch_before();
    allow_next_launch();
    const LatentPart part = find_part<C::kTile>(args, blockIdx.x, C::kRows);
    if (part.batch_idx < 0) {
        return;
    }
    report_if(args.flag, part.is_outside && threadIdx.x == 0, kLengthsOutside);
    uint8_t* shared = dynamic_shared();
    const uint32_t tiles = shared_address(shared);
    float* maxima = reinterpret_cast<float*>(shared + C::kMaxima);
    float* sums = reinterpret_cast<float*>(shared + C::kSums);
    const int lane_idx = threadIdx.x & 31, warp_idx = threadIdx.x >> 5;
    const int num_tiles = (part.end_token - part.first_token + C::kTile - 1) / C::kTile;

    LatentLoader<T> loader = {
        args, part, kv_cache, page_stride, token_stride, lane_idx, part.first_token + lane_idx,
        0,    false};
    loader.look_up();
    load_queries(args, part, tiles + C::kQueries);
    loader.issue(tiles);

    float output[C::kColumns / 8][4] = {};
    float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};
    const float scale_log2 = args.softmax_scale * kLog2e;
    const int common_end = part.common_end(args);
#pragma unroll 1
    for (int i = 0; i < num_tiles; ++i) {
        const uint32_t tile = tiles + i % 2 * C::kTileBytes;
        cp_async_wait<0>();
        __syncthreads();
        loader.issue(tiles + (i + 1) % 2 * C::kTileBytes);

        float scores[4] = {};
        multiply_latents<T>(tiles + C::kQueries, tile, scores);
        const int token0 = part.first_token + i * C::kTile;
        const bool is_masked = token0 + C::kTile > common_end;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = (lane_idx >> 2) + 8 * h;
            const int key = token0 + 8 * warp_idx + 2 * (lane_idx & 3);
            float(&low) = scores[2 * h], (&high) = scores[2 * h + 1];
            low *= scale_log2, high *= scale_log2;
            if (is_masked) {
                const int end = part.end_of(args, row);
                low = key < end ? low : -INFINITY;
                high = key + 1 < end ? high : -INFINITY;
            }
            float largest = fmaxf(low, high);
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            if ((lane_idx & 3) == 0) {
                maxima[warp_idx * C::kRows + row] = largest;
            }
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = (lane_idx >> 2) + 8 * h;
            float largest = row_max[h];
#pragma unroll
            for (int w = 0; w < C::kWarps; ++w) {
                largest = fmaxf(largest, maxima[w * C::kRows + row]);
            }
            const float base = base_of(largest);
            const float shrink = exp2_approx(row_max[h] - base);
            row_max[h] = largest;
            const float low = exp2_approx(scores[2 * h] - base);
            const float high = exp2_approx(scores[2 * h + 1] - base);
            row_sum[h] = row_sum[h] * shrink + low + high;
            *reinterpret_cast<uint32_t*>(
                shared + C::kProbs + swizzled<C::kTile / 8>(row, warp_idx) + 4 * (lane_idx & 3)) =
                pack2<T>(low, high);
#pragma unroll
            for (int j = 0; j < C::kColumns / 8; ++j) {
                output[j][2 * h] *= shrink;
                output[j][2 * h + 1] *= shrink;
            }
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < C::kTile / 16; ++k) {
            uint32_t probs[4];
            ldmatrix_x4(probs, tiles + C::kProbs +
                                   swizzled<C::kTile / 8>(lane_idx & 15, 2 * k + (lane_idx >> 4)));
#pragma unroll
            for (int c = 0; c < C::kColumns / 8; c += 2) {
                uint32_t values[4];
                ldmatrix_x4_trans(values, tile + swizzled<C::kChunks>(16 * k + (lane_idx & 15),
                                                                      warp_idx * (C::kColumns / 8) +
                                                                          c + (lane_idx >> 4)));
                mma_m16n8k16<T>(output[c], probs, values[0], values[1]);
                mma_m16n8k16<T>(output[c + 1], probs, values[2], values[3]);
            }
        }
    }
    cp_async_wait<0>();
    report_if(args.flag, loader.is_outside, kPagesOutside);

#pragma unroll
    for (int h = 0; h < 2; ++h) {
        row_sum[h] += __shfl_xor_sync(~0u, row_sum[h], 1);
        row_sum[h] += __shfl_xor_sync(~0u, row_sum[h], 2);
        if ((lane_idx & 3) == 0) {
            sums[warp_idx * C::kRows + (lane_idx >> 2) + 8 * h] = row_sum[h];
        }
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = (lane_idx >> 2) + 8 * h;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < C::kWarps; ++w) {
            sum += sums[w * C::kRows + row];
        }
        const float factor = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
        const auto target = LatentRow<T>::of(args, part, row, part.is_whole);
        target.template store<C::kColumns / 8>(
            warp_idx * C::kColumns + 2 * (lane_idx & 3), [&](int j) {
                return make_float2(output[j][2 * h] * factor, output[j][2 * h + 1] * factor);
            });
        if (warp_idx == 0 && (lane_idx & 3) == 0) {
            write_lse(args, part, row, row_max[h], sum, part.is_whole);
        }
    }
}

#define EXPORT_MLA_DECODE(DTYPE, T)                                                               \
    DESCRIBED(                                                                                    \
        mla_decode_##DTYPE, "x: parts of (sequence, block_m rows) as num_splits cuts them",       \
        (.threads = LatentTiles::kThreads, .shared_bytes = LatentTiles::kSharedBytes,             \
         .blocks_per_sm = 1, .block_m = LatentTiles::kRows, .block_n = LatentTiles::kTile,        \
         .warps = LatentTiles::kWarps, .stages = 2),                                              \
        extern "C" __global__ void __launch_bounds__(128, 1) mla_decode_##DTYPE(                  \
            T* out, float* lse, float* partial_out, float* partial_lse, int* flag,                \
            const T* kv_cache, const T* q, const int* cache_seqlens, const int* block_table,      \
            int64_t kv_page_stride, int64_t kv_token_stride, int64_t out_batch_stride,            \
            int64_t out_token_stride, int64_t out_head_stride, int64_t q_batch_stride,            \
            int64_t q_token_stride, int64_t q_head_stride, int64_t block_table_stride,            \
            int batch_size, int seqlen_q, int num_heads, int num_pages, int page_size,            \
            int max_tokens, int num_splits, int parallel, int num_workers, float softmax_scale) { \
            const LatentArgs<T> args = {LATENT_ARGUMENTS};                                        \
            mla_decode(args, kv_cache, kv_page_stride, kv_token_stride);                          \
        })

// {op}_{dtype}
EXPORT_MLA_DECODE(fp16, __half)
EXPORT_MLA_DECODE(bf16, __nv_bfloat16)

}  // namespace kernel_hub::kv_cache::decode
