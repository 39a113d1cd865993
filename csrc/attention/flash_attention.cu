// Attention forward on mma.sync: sm80, sm89, and the portable body on sm90.
//
// For each query row i of a sequence with seqlen_q queries and seqlen_k keys, and each head:
//   s[j]   = softcap(softmax_scale * q_i . k_j) - slope * |i + seqlen_k - seqlen_q - j|
//   out_i  = sum_j softmax(s)[j] v_j          lse_i = ln sum_j exp(s[j])
// over the keys j with  -window_left <= j - (i + seqlen_k - seqlen_q) <= window_right  (a negative
// window is no bound; causal is window_right = 0). A row without keys gives 0 and lse = -inf. With
// sinks, exp(sink of the head) is in both sums of exponentials.
//
// Parallelisation: a block owns kBlockM queries of one head and walks its keys kBlockN at a time,
// from the last to the first (the masked ones come first); a warp owns kRowTiles x 16 of the rows.
// Every fragment of K and V that a warp reads from shared memory feeds kRowTiles matrix products.
// A sequence whose cu_seqlens fall or lie outside has no rows; pages that are not there are zeros.
// gridDim.x counts tiles: groups of `heads_per_group` (batch, head) pairs, in a group the row
// blocks from the last to the first (the longest first, where causal), in a row block the heads.
//
// Shared memory: Q (kBlockM x kHeadDim), then kStages of K and kStages of V (kBlockN x kHeadDim
// each), 16-byte chunks swizzled within a row so that ldmatrix meets no bank twice; 32 bytes a
// warp; with pages four tables of where kBlockN keys lie, fetched kStages + 1 blocks ahead. With
// one stage, V(n) arrives during Q K(n), and K(n-1) during the softmax and P V(n); with two, K(n-1)
// and V(n-1) arrive during all of block n.
//
// Softmax: exp2 with the scale folded into one multiply-add, 16 keys at a time between the products
// P V of the 16 before. The running maximum, and with it O, moves only when some row of the warp
// outgrew it by more than 2^kRescaleBits: weights stay below that, and fp16 holds them.
//
//   flash_attention_{dtype}_hdim{N}           strided dense or varlen; causal, window
//   flash_attention_{dtype}_hdim{N}_72k ...   the same in so much shared memory, for smaller SMs
//   flash_attention_{dtype}_hdim{N}_paged     the same, K and V in pages and strided alike
//   flash_attention_{dtype}_hdim{N}_general   softcap, ALiBi, any scale and alignment, paged or not
// head_dim and head_dim_v: any multiples of 8 up to kHeadDim; the rest is zeros in shared memory.
// Sources: Dao, "FlashAttention-2", 2023 (the loop); Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018; Press et al., "Train Short, Test Long", 2021 (ALiBi).
// kernel_hub: not-for: sm89: it is sm80's code but for the order of instructions, and 8.9 runs that

#include "attention/forward/loads.cuh"
#include "attention/forward/problem.cuh"
#include "attention/forward/softmax.cuh"
#include "attention/forward/write.cuh"

namespace kernel_hub::attention::forward {

template <typename T, int kHeadDim, int kBlockM, int kBlockN, int kNumWarps, int kStages,
          bool kHoldQ, Variant kVariant>
__device__ __forceinline__ void flash_attention(const AttentionParams<T>& params) {
    constexpr int kNumThreads = kNumWarps * 32;
    constexpr int kRowTiles = kBlockM / (16 * kNumWarps);
    constexpr int kRowBytes = kHeadDim * 2;
    constexpr int kTileBytes = kBlockN * kRowBytes;
    constexpr bool kGeneral = kVariant == Variant::kGeneral;
    constexpr bool kHasPlaces = kVariant != Variant::kPlain;
    static_assert(kBlockM == kRowTiles * 16 * kNumWarps, "every warp owns whole 16-row tiles");
    static_assert(kHeadDim % 32 == 0, "the output is written 32 columns at a time");
    static_assert(kBlockN % 16 == 0 && kBlockN <= kNumThreads, "one thread looks up one key");
    static_assert(kStages == 1 || kStages == 2, "K and V have one buffer each or two");

    const int lane_idx = threadIdx.x % 32;
    const int warp_idx = warp_uniform(threadIdx.x / 32);
    const Tile tile = find_tile(params, kBlockM);

    // Find the sequence, and leave where it has no such rows.
    Rows queries, keys;
    find_sequence(params, tile.batch_idx, queries, keys);
    if (tile.first_row >= queries.seqlen) {
        return;
    }
    queries.start = warp_uniform(queries.start);
    keys.start = warp_uniform(keys.start);
    const int seqlen_q = warp_uniform(queries.seqlen);
    const int seqlen_k = warp_uniform(keys.seqlen);
    const Sight sight{seqlen_k, seqlen_k - seqlen_q, params.window_left, params.window_right};
    const bool is_paged = kVariant == Variant::kPaged || (kGeneral && params.block_table);
    if (is_paged) {
        keys.batch = keys.start = 0;
    }

    const int last_row = min(seqlen_q, tile.first_row + kBlockM) - 1;
    const int block_end = (sight.end_key(last_row) + kBlockN - 1) / kBlockN;
    const int block_begin = sight.first_key(tile.first_row) / kBlockN;
    const int warp_first_row = tile.first_row + warp_idx * kRowTiles * 16;

    uint8_t* q_tile = dynamic_shared();
    uint8_t* k_tiles = q_tile + kBlockM * kRowBytes;
    uint8_t* v_tiles = k_tiles + kStages * kTileBytes;
    WarpPlace* warp_places = reinterpret_cast<WarpPlace*>(v_tiles + kStages * kTileBytes);
    KeyPlace* key_places = reinterpret_cast<KeyPlace*>(warp_places + kNumWarps);

    // The first row and chunk this thread loads; where keys are evenly spaced, `k` and `v` walk
    // along with the block to load next.
    using Shape = LoadShape<kHeadDim, kNumThreads>;
    int n = block_end - 1;
    const int thread_row = Shape::first_row();
    const int num_cols = params.head_dim - Shape::first_chunk() * 8;
    const int64_t thread_key =
        kHasPlaces ? 0 : static_cast<int64_t>(keys.start) + n * kBlockN + thread_row;
    const T* q = params.q + queries.batch * params.q_strides.batch +
                 (static_cast<int64_t>(queries.start) + tile.first_row + thread_row) *
                     params.q_strides.token +
                 tile.head_idx * params.q_strides.head + Shape::first_chunk() * 8;
    const T* k = params.k + keys.batch * params.k_strides.batch +
                 thread_key * params.k_strides.token + tile.kv_head_idx * params.k_strides.head +
                 Shape::first_chunk() * 8;
    const T* v = params.v + keys.batch * params.v_strides.batch +
                 thread_key * params.v_strides.token + tile.kv_head_idx * params.v_strides.head +
                 Shape::first_chunk() * 8;

    WarpPlace& warp_place = warp_places[warp_idx];
    if (lane_idx == 0) {
        const int64_t row = static_cast<int64_t>(queries.start) + warp_first_row;
        warp_place.out_offset = queries.batch * params.out_strides.batch +
                                row * params.out_strides.token +
                                tile.head_idx * params.out_strides.head;
        warp_place.lse_offset =
            queries.batch * params.lse_batch_stride + tile.head_idx * params.lse_head_stride + row;
        warp_place.table_offset = tile.batch_idx * params.block_table_stride;
        warp_place.num_rows = seqlen_q - warp_first_row;
        warp_place.sink = find_sink(params, tile.batch_idx, tile.head_idx);
    }
    __syncwarp();

    KeyLoader<T, kHeadDim, kBlockN, kNumThreads, kStages, kVariant> loader{
        params, k_tiles,    v_tiles,  warp_places, key_places, v,
        k,      keys.start, seqlen_k, block_begin, num_cols,   is_paged};

    // Start the copies of Q and of the last K (two stages: and V).
    load_tile<T, kHeadDim, kBlockM, kNumThreads, kGeneral>(
        q_tile, seqlen_q - tile.first_row - thread_row, num_cols, params.is_aligned, [&](int) {
            const T* here = q;
            q += Shape::kRowStep * params.q_strides.token;
            return RowPlace<T>{here, true};
        });
    if (n >= block_begin) {
        if constexpr (kHasPlaces) {
#pragma unroll
            for (int i = 0; i <= kStages; ++i) {
                loader.look_up(n - i);
            }
            cp_async_commit();
            cp_async_wait<0>();
            loader.reckon(n);
            if constexpr (kStages == 2) {
                loader.reckon(n - 1);
            }
            __syncthreads();
        }
        loader.load_k(n);
        if constexpr (kStages == 2) {
            loader.load_v(n);
        }
    }
    cp_async_commit();

    // Where this lane reads for ldmatrix; see operand_at.
    const uint32_t q_lane = shared_address(q_tile) + warp_idx * kRowTiles * 16 * kRowBytes +
                            swizzled<kHeadDim>(lane_idx & 15, lane_idx >> 4);
    const uint32_t k_lane =
        shared_address(k_tiles) +
        swizzled<kHeadDim>((lane_idx & 7) + ((lane_idx >> 4) << 3), (lane_idx >> 3) & 1);
    const uint32_t v_lane =
        shared_address(v_tiles) + swizzled<kHeadDim>(lane_idx & 15, lane_idx >> 4);

    const float scale = kGeneral ? 1.0f : params.softmax_scale_log2;
    float slope = 0.0f;
    if (kGeneral && params.alibi_slopes) {
        slope = kLog2e *
                params.alibi_slopes[tile.batch_idx * params.alibi_batch_stride + tile.head_idx];
    }

    float acc[kRowTiles][kHeadDim / 8][4];  // O, not yet divided by the sum
    RowValues<kRowTiles> row_max, row_sum;
    clear(acc);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
        row_max[i][0] = row_max[i][1] = -INFINITY;
        row_sum[i][0] = row_sum[i][1] = 0.0f;
    }
    uint32_t q_held[kHoldQ ? kRowTiles : 1][kHoldQ ? kHeadDim / 16 : 1][4];

#pragma unroll 1
    for (bool is_first = true; n >= block_begin; --n, is_first = false) {
        cp_async_wait<0>();
        __syncthreads();
        if constexpr (kHasPlaces) {
            loader.reckon(n - kStages);
            loader.look_up(n - kStages - 1);
        }
        if constexpr (kStages == 1) {
            loader.load_v(n);
        } else if (n > block_begin) {
            loader.load_k(n - 1);
            loader.load_v(n - 1);
        }
        cp_async_commit();
        if (kHoldQ && is_first) {
#pragma unroll
            for (int i = 0; i < (kHoldQ ? kRowTiles : 0); ++i) {
#pragma unroll
                for (int kk = 0; kk < kHeadDim / 16; ++kk) {
                    ldmatrix_x4(q_held[i][kk], operand_at<kHeadDim>(q_lane, i * 16, kk * 2));
                }
            }
        }

        // Whether any of this warp's rows sees any of these keys.
        const int first_seen_row = recomputed(warp_first_row);
        const bool is_seen =
            first_seen_row < seqlen_q &&
            n * kBlockN < sight.end_key(min(seqlen_q, first_seen_row + kRowTiles * 16) - 1) &&
            (n + 1) * kBlockN > sight.first_key(first_seen_row);
        const uint32_t stage_offset = kStages == 1 ? 0 : (n % kStages) * kTileBytes;

        // S = Q K^T.
        Scores<kRowTiles, kBlockN / 8> s;
        if (is_seen) {
            const uint32_t k_stage = k_lane + stage_offset;
            clear(s);
#pragma unroll
            for (int kk = 0; kk < kHeadDim / 16; ++kk) {
                uint32_t q_loaded[kRowTiles][4];
                if constexpr (!kHoldQ) {
#pragma unroll
                    for (int i = 0; i < kRowTiles; ++i) {
                        ldmatrix_x4(q_loaded[i], operand_at<kHeadDim>(q_lane, i * 16, kk * 2));
                    }
                }
#pragma unroll
                for (int j = 0; j < kBlockN / 16; ++j) {
                    uint32_t b[4];
                    ldmatrix_x4(b, operand_at<kHeadDim>(k_stage, j * 16, kk * 2));
#pragma unroll
                    for (int i = 0; i < kRowTiles; ++i) {
                        const uint32_t (&a)[4] =
                            kHoldQ ? q_held[kHoldQ ? i : 0][kHoldQ ? kk : 0] : q_loaded[i];
                        mma_m16n8k16<T>(s[i][2 * j], a, b[0], b[1]);
                        mma_m16n8k16<T>(s[i][2 * j + 1], a, b[2], b[3]);
                    }
                }
            }
        }

        if constexpr (kStages == 1) {
            cp_async_wait<0>();
            __syncthreads();
            if (n > block_begin) {
                loader.load_k(n - 1);
            }
            cp_async_commit();
        }
        if (!is_seen) {
            continue;
        }

        // Softcap, ALiBi, and the mask where not all rows see all keys.
        const int lane = recomputed(lane_idx);
        const int first_row = recomputed(warp_first_row);
        const int first_col = n * kBlockN + 2 * (lane & 3);
        const int lane_row = first_row + (lane >> 2);
        if constexpr (kGeneral) {
            bias_scores(s, params.softmax_scale_log2, params.softcap_log2, slope,
                        lane_row + sight.diagonal - first_col);
        }
        if ((n + 1) * kBlockN > sight.end_key(first_row)) {
            hide_scores<true>(s,
                              [&](int row) { return sight.end_key(lane_row + row) - first_col; });
        }
        if (n * kBlockN < sight.first_key(min(seqlen_q, first_row + kRowTiles * 16) - 1)) {
            hide_scores<false>(
                s, [&](int row) { return sight.first_key(lane_row + row) - first_col; });
        }

        // Move the running maximum where it was outgrown, and find what it takes from the scores.
        RowValues<kRowTiles> block_max;
        if (__any_sync(~0u, find_max(s, scale, row_max, block_max))) {
            rescale_sums(block_max, scale, row_max, row_sum, acc);
        }
        RowValues<kRowTiles> shift;
        find_shifts(row_max, scale, shift);

        // O += P V, 16 keys at a time; P = exp2(S - max) is rounded to T, as it is an A operand.
        const uint32_t v_stage = v_lane + stage_offset;
#pragma unroll
        for (int kk = 0; kk < kBlockN / 16; ++kk) {
            uint32_t p[kRowTiles][4];
            weigh<T>(s, kk, scale, shift, row_sum, p);
#pragma unroll
            for (int j = 0; j < kHeadDim / 16; ++j) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, operand_at<kHeadDim>(v_stage, kk * 16, j * 2));
#pragma unroll
                for (int i = 0; i < kRowTiles; ++i) {
                    mma_m16n8k16<T>(acc[i][2 * j], p[i], b[0], b[1]);
                    mma_m16n8k16<T>(acc[i][2 * j + 1], p[i], b[2], b[3]);
                }
            }
        }
    }

    cp_async_wait<0>();  // of Q, where there were no keys

    // Divide by the sum and write, 16 bytes a lane.
    const WarpPlace place = warp_places[recomputed(threadIdx.x) / 32];
    T* out = params.out + place.out_offset;
    float* lse = params.lse + place.lse_offset;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum = quad_sum(row_sum[i][r]), shift = row_max[i][r] * scale;
            const float inverse = add_sink(place.sink, shift, sum);
            const int row = i * 16 + r * 8 + (lane_idx >> 2);
            const bool is_row = row < place.num_rows;
            if (params.lse && is_row && (lane_idx & 3) == 0) {
                lse[row] = shift * kLn2 + __logf(sum);
            }
            T* out_row = out + row * params.out_strides.token;
#pragma unroll
            for (int j = 0; j < kHeadDim / 32; ++j) {
                uint32_t words[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    words[e] = pack2<T>(acc[i][j * 4 + e][2 * r] * inverse,
                                        acc[i][j * 4 + e][2 * r + 1] * inverse);
                }
                transpose_by_steps(words, lane_idx);
                write_columns<kGeneral>(params, out_row, j * 32 + (lane_idx & 3) * 8, is_row,
                                        words);
            }
        }
    }
}

#define EXPORT_FLASH_ATTENTION(DTYPE, T, NAME, HEAD_DIM, BLOCK_M, BLOCK_N, WARPS, STAGES, HOLD_Q, \
                               MIN_BLOCKS, VARIANT)                                               \
    DESCRIBED(                                                                                    \
        flash_attention_##DTYPE##_##NAME, "x: blocks of block_m queries of every head",           \
        (facts_of(HEAD_DIM, BLOCK_M, BLOCK_N, WARPS, STAGES, MIN_BLOCKS, Variant::VARIANT)),      \
        extern "C" __global__ void                                                                \
        __launch_bounds__(WARPS * 32,                                                             \
                          MIN_BLOCKS) flash_attention_##DTYPE##_##NAME(FORWARD_PARAMS(T)) {       \
            flash_attention<T, HEAD_DIM, BLOCK_M, BLOCK_N, WARPS, STAGES, HOLD_Q,                 \
                            Variant::VARIANT>({FORWARD_ARGUMENTS});                               \
        })

// NAME, HEAD_DIM, BLOCK_M, BLOCK_N, WARPS, STAGES, HOLD_Q (in registers), MIN_BLOCKS per SM.
#define EXPORT_FLASH_ATTENTION_VARIANTS(DTYPE, T)                                            \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim32, 32, 128, 64, 4, 2, false, 3, kPlain)            \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim64, 64, 128, 64, 4, 2, true, 2, kPlain)             \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim96, 96, 128, 64, 4, 2, false, 2, kPlain)            \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim96_48k, 96, 128, 64, 4, 1, false, 2, kPlain)        \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim128, 128, 128, 64, 4, 2, false, 2, kPlain)          \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim128_64k, 128, 128, 64, 4, 1, false, 2, kPlain)      \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim128_48k, 128, 128, 32, 4, 1, false, 2, kPlain)      \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim160, 160, 128, 32, 4, 2, false, 2, kPlain)          \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim192, 192, 128, 64, 8, 2, true, 1, kPlain)           \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim192_72k, 192, 64, 64, 4, 1, true, 2, kPlain)        \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim256, 256, 64, 64, 4, 1, false, 2, kPlain)           \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim64_paged, 64, 128, 64, 4, 2, false, 2, kPaged)      \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim96_paged, 96, 128, 48, 4, 2, false, 2, kPaged)      \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim128_paged, 128, 128, 48, 4, 2, false, 2, kPaged)    \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim192_paged, 192, 64, 64, 4, 1, false, 2, kPaged)     \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim256_paged, 256, 64, 64, 4, 1, false, 2, kPaged)     \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim32_general, 32, 64, 64, 4, 1, false, 2, kGeneral)   \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim64_general, 64, 64, 64, 4, 1, false, 2, kGeneral)   \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim96_general, 96, 64, 64, 4, 1, false, 2, kGeneral)   \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim128_general, 128, 64, 64, 4, 1, false, 2, kGeneral) \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim160_general, 160, 64, 64, 4, 1, false, 2, kGeneral) \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim192_general, 192, 64, 64, 4, 1, false, 2, kGeneral) \
    EXPORT_FLASH_ATTENTION(DTYPE, T, hdim256_general, 256, 64, 64, 4, 1, false, 1, kGeneral)
EXPORT_FLASH_ATTENTION_VARIANTS(fp16, __half)
EXPORT_FLASH_ATTENTION_VARIANTS(bf16, __nv_bfloat16)

}  // namespace kernel_hub::attention::forward
