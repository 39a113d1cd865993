// Attention forward of fp32 on mma.sync, in three products of tf32, on every GPU since sm_80.
//
// What flash_attention.cu computes, with all of its options at run time: strided dense, varlen or
// paged; causal, window, softcap, ALiBi, sinks; head_dim a multiple of 8 up to 128.
//
// Parallelisation: a block owns 64 queries of one head, a warp 16 of them, and walks its keys 32 at
// a time, from the last to the first. Products are those of three_products.cuh; sums stay in the
// tensor cores for 16 columns of a score and for 32 keys. inf among queries, keys and values gives
// nan. Shared memory: 64 rows of Q, one tile of K and one of V, 512 bytes a row, 16-byte chunks
// swizzled; V(n) arrives during Q K(n), K(n-1) during the softmax and P V(n). Of pages each lane
// looks up one key's, a tile ahead.
// Sources: as flash_attention.cu; Ootomo and Yokota, "Recovering single precision accuracy from
// Tensor Cores", 2022.
// kernel_hub: not-for: sm89: it is sm80's code but for the order of instructions, and 8.9 runs that

#include "attention/forward/fp32.cuh"
#include "attention/forward/write.cuh"

namespace kernel_hub::attention::forward {

constexpr int kFp32TileBytes = kFp32BlockN * kFp32RowBytes;

constexpr LaunchFacts facts_of_fp32(int blocks_per_sm) {
    return {.threads = 32 * kFp32Warps,
            .shared_bytes = kFp32BlockM * kFp32RowBytes + 2 * kFp32TileBytes,
            .blocks_per_sm = blocks_per_sm,
            .head_dim = kFp32HeadDim,
            .element_bytes = 4,
            .block_m = kFp32BlockM,
            .block_n = kFp32BlockN,
            .warps = kFp32Warps,
            .stages = 1};
}

__device__ __forceinline__ void flash_attention_fp32(const AttentionParams<float>& params) {
    const int lane_idx = threadIdx.x % 32, warp_idx = warp_uniform(threadIdx.x / 32);
    const Tile tile = find_tile(params, kFp32BlockM);

    // Find the sequence, and leave where it has no such rows.
    Rows queries, keys;
    find_sequence(params, tile.batch_idx, queries, keys);
    if (tile.first_row >= queries.seqlen) {
        return;
    }
    const int seqlen_q = warp_uniform(queries.seqlen), seqlen_k = warp_uniform(keys.seqlen);
    const Sight sight{seqlen_k, seqlen_k - seqlen_q, params.window_left, params.window_right};
    if (params.block_table) {
        keys.batch = keys.start = 0;
    }
    const int last_row = min(seqlen_q, tile.first_row + kFp32BlockM) - 1;
    const int block_end = (sight.end_key(last_row) + kFp32BlockN - 1) / kFp32BlockN;
    const int block_begin = sight.first_key(tile.first_row) / kFp32BlockN;
    const int first_row = tile.first_row + warp_idx * 16;

    uint8_t* q_tile = dynamic_shared();
    const uint32_t k_tile = shared_address(q_tile) + kFp32BlockM * kFp32RowBytes;
    const uint32_t v_tile = k_tile + kFp32TileBytes;
    const uint8_t* values = q_tile + kFp32BlockM * kFp32RowBytes + kFp32TileBytes;

    // Start the copies of Q and of the last K.
    const int64_t q_row = static_cast<int64_t>(queries.start) + tile.first_row;
    const float* q = params.q + queries.batch * params.q_strides.batch +
                     q_row * params.q_strides.token + tile.head_idx * params.q_strides.head;
#pragma unroll 1
    for (int row = warp_idx; row < kFp32BlockM; row += kFp32Warps) {
        const bool is_there = tile.first_row + row < seqlen_q;
        copy_chunk(shared_address(q_tile), row,
                   is_there ? q + row * params.q_strides.token : nullptr, params.head_dim,
                   params.is_aligned);
    }
    KeyRowsFp32 rows{
        params,
        params.k + keys.batch * params.k_strides.batch + tile.kv_head_idx * params.k_strides.head,
        params.v + keys.batch * params.v_strides.batch + tile.kv_head_idx * params.v_strides.head,
        tile.batch_idx * params.block_table_stride,
        seqlen_k,
        warp_uniform(keys.start)};
    int n = block_end - 1;
    if (n >= block_begin) {
        rows.look_up(n);
        rows.find(n);
        rows.look_up(n - 1);
        rows.load(k_tile, rows.k_row, params.head_dim);
    }
    cp_async_commit();

    const bool is_general =
        params.softcap_log2 != 0.0f || params.alibi_slopes || !(params.softmax_scale_log2 > 0.0f);
    const float scale = is_general ? 1.0f : params.softmax_scale_log2;
    float slope = 0.0f;
    if (params.alibi_slopes) {
        slope = kLog2e *
                params.alibi_slopes[tile.batch_idx * params.alibi_batch_stride + tile.head_idx];
    }

    float acc[1][kFp32HeadDim / 8][4];  // O, not yet divided by the sum
    RowValues<1> row_max = {{-INFINITY, -INFINITY}}, row_sum = {{0.0f, 0.0f}};
    clear(acc);
#pragma unroll 1
    for (; n >= block_begin; --n) {
        cp_async_wait<0>();
        __syncthreads();
        rows.load(v_tile, rows.v_row, params.head_dim_v);
        cp_async_commit();
        rows.find(n - 1);
        rows.look_up(n - 2);

        // Whether any of this warp's rows sees any of these keys.
        const int end_row = min(seqlen_q, first_row + 16) - 1;
        const bool is_seen = first_row < seqlen_q && n * kFp32BlockN < sight.end_key(end_row) &&
                             (n + 1) * kFp32BlockN > sight.first_key(first_row);
        Fp32Scores s;
        if (is_seen) {
            multiply_keys_fp32(shared_address(q_tile) + warp_idx * 16 * kFp32RowBytes, k_tile,
                               params.head_dim, s);
        }
        cp_async_wait<0>();
        __syncthreads();
        if (n > block_begin) {
            rows.load(k_tile, rows.k_row, params.head_dim);
        }
        cp_async_commit();
        if (!is_seen) {
            continue;
        }

        // Softcap, ALiBi, and the mask where not all rows see all keys.
        const int first_col = n * kFp32BlockN + 2 * (lane_idx & 3);
        const int lane_row = first_row + (lane_idx >> 2);
        if (is_general) {
            bias_scores(s, params.softmax_scale_log2, params.softcap_log2, slope,
                        lane_row + sight.diagonal - first_col);
        }
        if ((n + 1) * kFp32BlockN > sight.end_key(first_row)) {
            hide_scores<true>(s,
                              [&](int row) { return sight.end_key(lane_row + row) - first_col; });
        }
        if (n * kFp32BlockN < sight.first_key(end_row)) {
            hide_scores<false>(
                s, [&](int row) { return sight.first_key(lane_row + row) - first_col; });
        }

        // Move the running maximum where it was outgrown, and make weights of the scores.
        RowValues<1> block_max, shift;
        if (__any_sync(~0u, find_max(s, scale, row_max, block_max))) {
            rescale_sums(block_max, scale, row_max, row_sum, acc);
        }
        find_shifts(row_max, scale, shift);
#pragma unroll
        for (int j = 0; j < kFp32BlockN / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                s[0][j][e] = exp2_approx(fmaf(s[0][j][e], scale, -shift[0][e / 2]));
                row_sum[0][e / 2] += s[0][j][e];
            }
        }
        multiply_values_fp32(s, values, params.head_dim_v, acc);
    }
    cp_async_wait<0>();  // of Q, where there were no keys

    // Divide by the sum and write, two columns a lane.
    const float sink = find_sink(params, tile.batch_idx, tile.head_idx);
    const int64_t out_row = static_cast<int64_t>(queries.start) + first_row;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = quad_sum(row_sum[0][r]), shift = row_max[0][r] * scale;
        const float inverse = add_sink(sink, shift, sum);
        const int row = r * 8 + (lane_idx >> 2);
        const bool is_row = first_row + row < seqlen_q;
        if (params.lse && is_row && (lane_idx & 3) == 0) {
            params.lse[queries.batch * params.lse_batch_stride +
                       tile.head_idx * params.lse_head_stride + out_row + row] =
                shift * kLn2 + __logf(sum);
        }
        float* out = params.out + queries.batch * params.out_strides.batch +
                     (out_row + row) * params.out_strides.token +
                     tile.head_idx * params.out_strides.head;
#pragma unroll
        for (int j = 0; j < kFp32HeadDim / 8; ++j) {
            const int col = 8 * j + 2 * (lane_idx & 3);
            if (is_row && col < params.head_dim_v) {
                const float low = acc[0][j][2 * r] * inverse, high = acc[0][j][2 * r + 1] * inverse;
                if (params.is_aligned) {
                    *reinterpret_cast<float2*>(out + col) = make_float2(low, high);
                } else {
                    out[col] = low;
                    out[col + 1] = high;
                }
            }
        }
    }
}

#define EXPORT_FLASH_ATTENTION_FP32(NAME, MIN_BLOCKS)                                    \
    DESCRIBED(                                                                           \
        NAME, "x: blocks of block_m queries of every head", (facts_of_fp32(MIN_BLOCKS)), \
        extern "C" __global__ void __launch_bounds__(kFp32Warps * 32, MIN_BLOCKS) NAME(  \
            FORWARD_PARAMS(float)) { flash_attention_fp32({FORWARD_ARGUMENTS}); })

EXPORT_FLASH_ATTENTION_FP32(flash_attention_fp32_hdim128, 2)

}  // namespace kernel_hub::attention::forward
