// Gradients of attention: dq, dk and dv from q, k, v, the forward's lse and the gradient of its
// out.
//
// With z = softmax_scale q k^T, and s = z, or softcap tanh(z / softcap), less slope |distance|:
//   p = exp(s - lse)        delta = rowsum(dout * out)        dp = dout v^T
//   ds = p (dp - delta), times 1 - tanh^2 where capped
//   dv = p^T dout           dk = softmax_scale ds^T q         dq = softmax_scale ds k
// p and ds are rounded to the tensors' dtype as operands; all sums are fp32. dk and dv are summed
// over the query heads that share a key head. Query i of a sequence sees keys i + shift -
// window_left to i + shift + window_right, shift = seqlen_k - seqlen_q.
//
// Three kernels. Their workspace is laid out in tiles of 16 query rows (each sequence starts a new
// tile): row values [head][tile][16], sums of dq [head][tile][8 columns][fragment].
//   ..._delta    a block a tile and head: delta, lse in units of log 2, zeros for the sums of dq
//   (main)       a block kBlockN keys: loops over `heads_per_block` query heads (the whole group,
//   or
//                one, where dk and dv are then those of one query head and summed afterwards) and
//                over the blocks of kBlockM queries that see the keys; dk and dv stay in registers,
//                dq goes to its sums by reductions in memory
//   ..._convert  a block a tile and head: dq from the sums
// dk and dv have one order of summation. dq has one where `turns` is given: a block then adds its
// part of a query block after the blocks of higher keys, which are scheduled before it.
//
// Main kernel: s^T = k q^T and dp^T = v dout^T, kWarpsN of the warps along the keys. Where that is
// all of them, p^T and ds^T are, as they lie in a warp's registers, its left operands of dv and dk;
// else they pass through shared memory. ds^T does in any case, for dq.
// Shared memory: k, v [kBlockN][kHeadDim]; q, dout [stages][kBlockM][kHeadDim]; ds^T and, where
// needed, p^T [kBlockN][kBlockM]; lse and delta [2][kBlockM]; Work. 16-byte chunks are swizzled by
// row. With three stages the warps are staggered: half of them do the scores of one block of
// queries while the others add up the block before it, with one barrier a round.
//   plain     head_dim a multiple of 8 up to kHeadDim (zeros beyond it), all 16-byte aligned
//   general   also softcap, ALiBi, softmax_scale <= 0, any alignment
// Suffix 163k, 99k: tiles for GPUs with so much shared memory a block; without it 227 KiB.
// Sources: Dao, "FlashAttention-2", 2023, algorithm 2; Press et al., "Train Short, Test Long",
// 2022.
// kernel_hub: not-for: sm89: it is sm80's code but for the order of instructions, and 8.9 runs that

#include "attention/backward/problem.cuh"
#include "attention/backward/rows.cuh"
#include "attention/backward/sums.cuh"
#include "attention/backward/tiles.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/math.cuh"

namespace kernel_hub::attention::backward {

template <typename T, typename Tiles, bool kGeneral>
__device__ __forceinline__ void attention_backward(
    const Heads<T>& dk, const Heads<T>& dv, float* dq_sums, int* turns, int* flag,
    const Heads<const T>& q, const Heads<const T>& k, const Heads<const T>& v,
    const Heads<const T>& dout, const float* lse, const float* delta, const float* alibi_slopes,
    const int* cu_seqlens_q, const int* cu_seqlens_k, const int* cache_seqlens,
    int64_t alibi_batch_stride, int64_t num_tiles, int num_blocks, int seqlen_q, int seqlen_k,
    int total_q, int total_k, int group, int heads_per_block, int head_dim, int window_left,
    int window_right, bool is_aligned, float softmax_scale, float softcap) {
    constexpr int kBlockM = Tiles::kBlockM, kBlockN = Tiles::kBlockN, kHeadDim = Tiles::kHeadDim;
    using Rows = typename Tiles::Rows;
    using Scores = typename Tiles::Scores;
    const uint32_t shared = shared_address(dynamic_shared());
    const int first_head = blockIdx.y * heads_per_block, kv_head = first_head / group;
    // NOTE: kept in shared memory, and what follows from the thread's index worked out anew in each
    // round, because the sums leave no registers for them.
    Work& work = *reinterpret_cast<Work*>(shared_pointer(shared + Tiles::kWork));
    int num_iterations;
    {
        Work mine;
        if (!find_work(mine, flag, kBlockM, kBlockN, turns != nullptr, num_blocks, cu_seqlens_q,
                       cu_seqlens_k, cache_seqlens, seqlen_q, seqlen_k, total_q, total_k,
                       window_left, window_right)) {
            return;
        }
        num_iterations =
            mine.window.num_keys > 0 ? heads_per_block * max(0, mine.end_m - mine.first_m) : 0;
        if (threadIdx.x == 0) {
            work = mine;
        }
        __syncthreads();
    }

    using Copy = RowCopy<T, kHeadDim, Tiles::kThreads, kGeneral>;

    // Start copying the q, or dout, of one block of queries, and its row values.
    const auto load_rows = [&](int row_slot, int head_idx, int m, const Heads<const T>& from,
                               const float* values, int tile_at, int values_at) {
        const int thread_idx = read_thread_idx();
        const Copy copy(thread_idx, head_dim, is_aligned);
        const int first_query = m * kBlockM;
        const T* source = from.at(work.batch_idx, work.first_row + first_query, head_idx);
        copy.template load<kBlockM>(shared + tile_at, source, from.row_stride,
                                    work.seqlen_q - first_query);
        const int i = 4 * thread_idx;
        if (i < kBlockM) {
            const int64_t tile = head_idx * num_tiles + work.first_tile;
            const float* rows = values + tile * kTileRows + first_query + i;
            const bool is_inside = first_query + i < ceil_div(work.seqlen_q, kTileRows) * kTileRows;
            cp_async_16(shared + values_at + 4 * (row_slot * kBlockM + i), rows, is_inside);
        }
    };
    const auto load_q = [&](int row_slot, int stage, int head_idx, int m) {
        load_rows(row_slot, head_idx, m, q, lse, Tiles::kQ + stage * Tiles::kQBytes,
                  Tiles::kRowValues);
    };
    const auto load_dout = [&](int row_slot, int stage, int head_idx, int m) {
        load_rows(row_slot, head_idx, m, dout, delta, Tiles::kDout + stage * Tiles::kQBytes,
                  Tiles::kRowValues + 8 * kBlockM);
    };

    // Row values and, where there are two stages, tiles are at (iterations left) % 2.
    if (num_iterations > 0) {
        const Copy copy(threadIdx.x, head_dim, is_aligned);
        copy.template load<kBlockN>(shared + Tiles::kK,
                                    k.at(work.batch_idx, work.first_key_row, kv_head), k.row_stride,
                                    work.window.num_keys);
        copy.template load<kBlockN>(shared + Tiles::kV,
                                    v.at(work.batch_idx, work.first_key_row, kv_head), v.row_stride,
                                    work.window.num_keys);
        load_q(num_iterations % 2, Tiles::kStagesQ == 2 ? num_iterations % 2 : 0, first_head,
               work.first_m);
        load_dout(num_iterations % 2, Tiles::kStagesDout == 2 ? num_iterations % 2 : 0, first_head,
                  work.first_m);
    }
    cp_async_commit();

    float dk_sums[Tiles::kDkvRows16][2 * Tiles::kDkvCols16][4];
    float dv_sums[Tiles::kDkvRows16][2 * Tiles::kDkvCols16][4];
    clear(dk_sums);
    clear(dv_sums);
    const float scale_log2 = softmax_scale * kLog2e;

    // p and ds of one block of queries; with it dv and dk where they stay in registers.
    const auto score = [&](int head_idx, int first_query, int row_slot, uint32_t q_stage,
                           uint32_t dout_stage, uint32_t buffer) {
        const Thread<Tiles> me(read_thread_idx());
        const Window window = work.window;
        const bool is_masked = window.num_keys < kBlockN ||
                               !window.sees(kBlockN - 1 - first_query) ||
                               !window.sees(-first_query - kBlockM + 1);
        const int home = kGeneral ? work.home : 0;
        float slope = 0.0f;
        if (kGeneral && alibi_slopes) {
            slope = alibi_slopes[work.batch_idx * alibi_batch_stride + head_idx] * kLog2e;
        }
#pragma unroll
        for (int chunk = 0; chunk < Tiles::kQueries; chunk += Tiles::kChunk) {
            // The key in the block and, less the query, `relative` (see Work) of the first score.
            const int key0 = me.warp_key + me.lane_idx / 4;
            const int relative0 = key0 - first_query - me.warp_query - chunk - me.lane_idx % 4 * 2;
            const float* row_values =
                reinterpret_cast<const float*>(shared_pointer(shared + Tiles::kRowValues)) +
                row_slot * kBlockM + me.warp_query + chunk + me.lane_idx % 4 * 2;
            const uint32_t q_right = shared + me.q_right() + chunk * Rows::kPitch;

            float scores[Tiles::kKeys16][Tiles::kChunk / 8][4];
            clear(scores);
            multiply<T, kHeadDim / 16>(scores, AlongColumns<Rows>{shared + me.k_left()},
                                       AlongColumns<Rows>{q_right + q_stage});
            if constexpr (!kGeneral) {
                if (is_masked) {
                    // NOTE: a copy: read in the loop, masked blocks took 4-12 % longer.
                    hide_scores<Tiles>(scores, Window(work.window), key0, relative0);
                }
                for_each_score<Tiles>([&](int i, int j, int e, int, int query) {
                    const float row_lse = row_values[query];
                    scores[i][j][e] = exp2_approx(fmaf(scores[i][j][e], scale_log2, -row_lse));
                });
            }

            float dp[Tiles::kKeys16][Tiles::kChunk / 8][4];
            clear(dp);
            multiply<T, kHeadDim / 16>(dp, AlongColumns<Rows>{shared + me.k_left() + Tiles::kV},
                                       AlongColumns<Rows>{q_right + dout_stage});
            // From here on `scores` are p and `dp` are ds.
            for_each_score<Tiles>([&](int i, int j, int e, int key, int query) {
                float& p = scores[i][j][e];
                float& ds = dp[i][j][e];
                float slant = 1.0f;
                if constexpr (kGeneral) {
                    float score = p * scale_log2;
                    if (softcap > 0.0f) {
                        score = cap_score(score, softcap, slant);
                    }
                    const int relative = relative0 + key - query;
                    score -= slope * fabsf(static_cast<float>(relative + home));
                    const bool is_seen = key0 + key < window.num_keys && window.sees(relative);
                    p = is_seen ? exp2_approx(score - row_values[query]) : 0.0f;
                }
                ds = p * (ds - row_values[2 * kBlockM + query]);
                if constexpr (kGeneral) {
                    ds *= slant;
                }
            });

            // As left operands of dv and dk: 16 keys times 16 queries.
            uint32_t p_tiles[Tiles::kKeys16][Tiles::kChunk / 16][4];
            uint32_t ds_tiles[Tiles::kKeys16][Tiles::kChunk / 16][4];
            pack_scores<T, Tiles>(scores, dp, shared + me.ds_mine() + buffer, chunk, p_tiles,
                                  ds_tiles);
            if constexpr (Tiles::kInRegisters) {
                const uint32_t q_columns = shared + me.q_columns() + chunk * Rows::kPitch;
                multiply<T, Tiles::kChunk / 16>(dv_sums,
                                                Held<Tiles::kKeys16, Tiles::kChunk / 16>{p_tiles},
                                                AlongRows<Rows, 1>{q_columns + dout_stage});
                multiply<T, Tiles::kChunk / 16>(dk_sums,
                                                Held<Tiles::kKeys16, Tiles::kChunk / 16>{ds_tiles},
                                                AlongRows<Rows, 1>{q_columns + q_stage});
            }
        }
    };

    // Adds them up to dv, dk and dq.
    const auto add_up = [&](int head_idx, int first_query, uint32_t q_stage, uint32_t dout_stage,
                            uint32_t buffer, auto after_dv, auto after_dk) {
        const Thread<Tiles> me(read_thread_idx());
        if constexpr (!Tiles::kInRegisters) {
            const uint32_t ds_left = shared + me.ds_left() + buffer;
            const uint32_t q_columns = shared + me.q_columns();
            multiply<T, kBlockM / 16>(
                dv_sums, AlongColumns<Scores>{ds_left + Tiles::kP - Tiles::kDs},
                AlongRows<Rows, Tiles::kDkvWarpsCols>{q_columns + dout_stage});
            after_dv();
            multiply<T, kBlockM / 16>(dk_sums, AlongColumns<Scores>{ds_left},
                                      AlongRows<Rows, Tiles::kDkvWarpsCols>{q_columns + q_stage});
        }
        after_dk();
        float dq[Tiles::kDqRows16][2 * Tiles::kDqCols16][4];
        clear(dq);
        multiply<T, kBlockN / 16>(
            dq, AlongRows<Scores, Tiles::kWarpsDq>{shared + me.ds_turned() + buffer},
            AlongRows<Rows, Tiles::kDqWarpsCols>{shared + me.k_columns()});

        const int64_t first_tile = head_idx * num_tiles + work.first_tile + first_query / kTileRows;
        add_to_sums<Tiles>(dq, dq_sums, turns, first_tile, first_query, work, me);
    };

    constexpr int kDoutAt = Tiles::kDout - Tiles::kQ;
    int next_head = first_head, next_m = work.first_m;
    if constexpr (Tiles::kStaggered) {
        const bool is_late = threadIdx.x / 32 >= Tiles::kWarps / 2;
        int head_idx = 0, first_query = 0, stage = 0;
#pragma unroll 1
        for (int left = num_iterations; left >= 0; --left) {
            const int last_head = head_idx, last_query = first_query;
            head_idx = next_head;
            first_query = next_m * kBlockM;
            work.advance(next_head, next_m);
            cp_async_wait<0>();
            __syncthreads();
            if (left > 1) {
                const int next_stage = stage == 2 ? 0 : stage + 1;
                load_q((left - 1) % 2, next_stage, next_head, next_m);
                load_dout((left - 1) % 2, next_stage, next_head, next_m);
            }
            cp_async_commit();
#pragma unroll 1
            for (int part = 0; part < 2; ++part) {
                if ((part == 1) == is_late) {
                    if (left > 0) {
                        score(head_idx, first_query, left % 2, stage * Tiles::kQBytes,
                              kDoutAt + stage * Tiles::kQBytes, left % 2 * Tiles::kScoresBytes);
                    }
                } else if (left < num_iterations) {
                    const int last_stage = stage == 0 ? 2 : stage - 1;
                    add_up(
                        last_head, last_query, last_stage * Tiles::kQBytes,
                        kDoutAt + last_stage * Tiles::kQBytes, (left + 1) % 2 * Tiles::kScoresBytes,
                        [] {}, [] {});
                }
            }
            stage = stage == 2 ? 0 : stage + 1;
        }
    } else {
#pragma unroll 1
        for (int left = num_iterations; left > 0; --left) {
            const int head_idx = next_head, first_query = next_m * kBlockM;
            work.advance(next_head, next_m);
            const int q_stage = Tiles::kStagesQ == 2 ? left % 2 : 0;
            const int dout_stage = Tiles::kStagesDout == 2 ? left % 2 : 0;
            const auto load_next = [&](bool also_q, bool also_dout) {
                const int slot = (left - 1) % 2;
                if (left > 1 && also_q) {
                    load_q(slot, Tiles::kStagesQ == 2 ? slot : 0, next_head, next_m);
                }
                if (left > 1 && also_dout) {
                    load_dout(slot, Tiles::kStagesDout == 2 ? slot : 0, next_head, next_m);
                }
                cp_async_commit();
            };
            cp_async_wait<0>();
            __syncthreads();
            load_next(Tiles::kStagesQ == 2, Tiles::kStagesDout == 2);
            score(head_idx, first_query, left % 2, q_stage * Tiles::kQBytes,
                  kDoutAt + dout_stage * Tiles::kQBytes, 0);
            __syncthreads();
            // A tile with one stage is refilled once all warps are through with it.
            add_up(
                head_idx, first_query, q_stage * Tiles::kQBytes,
                kDoutAt + dout_stage * Tiles::kQBytes, 0,
                [&] {
                    if constexpr (Tiles::kStagesDout == 1 && Tiles::kStagesQ == 2) {
                        __syncthreads();
                        load_next(false, true);
                    }
                },
                [&] {
                    if constexpr (Tiles::kStagesQ == 1 ||
                                  (Tiles::kStagesDout == 1 && Tiles::kInRegisters)) {
                        if constexpr (!Tiles::kInRegisters) {
                            __syncthreads();
                        }
                        load_next(Tiles::kStagesQ == 1, Tiles::kStagesDout == 1);
                    }
                });
        }
    }

    // Write dk and dv through the shared memory of k and v.
    const Thread<Tiles> me(threadIdx.x);
    cp_async_wait<0>();
    __syncthreads();
    store_sums<T>(dk_sums, dv_sums, softmax_scale, shared, me);
    __syncthreads();
    const Copy copy(threadIdx.x, head_dim, is_aligned);
    copy.template store<kBlockN>(dk.at(work.batch_idx, work.first_key_row, blockIdx.y),
                                 shared + Tiles::kK, dk.row_stride, work.num_key_rows);
    copy.template store<kBlockN>(dv.at(work.batch_idx, work.first_key_row, blockIdx.y),
                                 shared + Tiles::kV, dv.row_stride, work.num_key_rows);
}

#define EXPORT_BACKWARD(NAME, T, GENERAL, MIN_BLOCKS, THREADS, ...)                               \
    DESCRIBED(                                                                                    \
        flash_attention_backward_##NAME,                                                          \
        "x: blocks of block_n keys of every sequence, y: heads of dk and dv",                     \
        (facts_of<Tiles<(GENERAL) ? 32 : 64, __VA_ARGS__>>()),                                    \
        extern "C" __global__ void                                                                \
        __launch_bounds__(THREADS, MIN_BLOCKS) flash_attention_backward_##NAME(                   \
            T* dk, T* dv, float* dq_sums, int* turns, int* flag, const T* q, const T* k,          \
            const T* v, const T* dout, const float* lse_log2, const float* delta,                 \
            const float* alibi_slopes, const int* cu_seqlens_q, const int* cu_seqlens_k,          \
            const int* cache_seqlens, int64_t dk_batch_stride, int64_t dk_row_stride,             \
            int64_t dk_head_stride, int64_t dv_batch_stride, int64_t dv_row_stride,               \
            int64_t dv_head_stride, int64_t q_batch_stride, int64_t q_row_stride,                 \
            int64_t q_head_stride, int64_t k_batch_stride, int64_t k_row_stride,                  \
            int64_t k_head_stride, int64_t v_batch_stride, int64_t v_row_stride,                  \
            int64_t v_head_stride, int64_t dout_batch_stride, int64_t dout_row_stride,            \
            int64_t dout_head_stride, int64_t alibi_batch_stride, int64_t num_tiles,              \
            int num_blocks, int seqlen_q, int seqlen_k, int total_q, int total_k, int group,      \
            int heads_per_block, int head_dim, int window_left, int window_right, int is_aligned, \
            float softmax_scale, float softcap) {                                                 \
            attention_backward<T, Tiles<(GENERAL) ? 32 : 64, __VA_ARGS__>, GENERAL>(              \
                {dk, dk_batch_stride, dk_row_stride, dk_head_stride},                             \
                {dv, dv_batch_stride, dv_row_stride, dv_head_stride}, dq_sums, turns, flag,       \
                {q, q_batch_stride, q_row_stride, q_head_stride},                                 \
                {k, k_batch_stride, k_row_stride, k_head_stride},                                 \
                {v, v_batch_stride, v_row_stride, v_head_stride},                                 \
                {dout, dout_batch_stride, dout_row_stride, dout_head_stride}, lse_log2, delta,    \
                alibi_slopes, cu_seqlens_q, cu_seqlens_k, cache_seqlens, alibi_batch_stride,      \
                num_tiles, num_blocks, seqlen_q, seqlen_k, total_q, total_k, group,               \
                heads_per_block, head_dim, window_left, window_right, is_aligned, softmax_scale,  \
                softcap);                                                                         \
        })

// NAME, threads, then the numbers of Tiles.
#define EXPORT_VARIANTS(NAME, THREADS, ...)                                              \
    EXPORT_BACKWARD(bf16_##NAME, __nv_bfloat16, false, 1, THREADS, __VA_ARGS__)          \
    EXPORT_BACKWARD(bf16_##NAME##_general, __nv_bfloat16, true, 1, THREADS, __VA_ARGS__) \
    EXPORT_BACKWARD(fp16_##NAME, __half, false, 1, THREADS, __VA_ARGS__)                 \
    EXPORT_BACKWARD(fp16_##NAME##_general, __half, true, 1, THREADS, __VA_ARGS__)

EXPORT_ROWS(bf16, __nv_bfloat16)
EXPORT_ROWS(fp16, __half)
EXPORT_VARIANTS(hdim32, 128, 32, 64, 128, 4, 4, 4, 2, 2, 2)
EXPORT_VARIANTS(hdim64, 128, 64, 64, 128, 4, 4, 4, 2, 2, 2)
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
EXPORT_VARIANTS(hdim96, 256, 96, 64, 128, 8, 4, 4, 4, 3, 3)
EXPORT_VARIANTS(hdim128, 256, 128, 64, 128, 8, 4, 4, 2, 3, 3)
EXPORT_VARIANTS(hdim160, 256, 160, 64, 64, 8, 2, 4, 4, 3, 3)
EXPORT_VARIANTS(hdim192, 256, 192, 64, 64, 8, 2, 2, 2, 3, 3)
EXPORT_VARIANTS(hdim256, 256, 256, 64, 64, 8, 2, 2, 2, 2, 2)
#endif
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 890
EXPORT_VARIANTS(hdim96_163k, 256, 96, 64, 128, 8, 4, 4, 4, 2, 2)
EXPORT_VARIANTS(hdim128_163k, 256, 128, 64, 128, 8, 4, 4, 2, 2, 2)
EXPORT_VARIANTS(hdim160_163k, 256, 160, 64, 64, 8, 2, 4, 4, 2, 2)
EXPORT_VARIANTS(hdim192_163k, 256, 192, 64, 64, 8, 2, 2, 2, 2, 2)
EXPORT_VARIANTS(hdim256_163k, 256, 256, 64, 64, 8, 2, 2, 2, 1, 1)
#endif
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 900
EXPORT_VARIANTS(hdim96_99k, 128, 96, 64, 64, 4, 4, 4, 2, 2, 2)
EXPORT_VARIANTS(hdim128_99k, 128, 128, 64, 64, 4, 4, 4, 2, 2, 1)
EXPORT_VARIANTS(hdim160_99k, 256, 160, 64, 64, 8, 2, 4, 4, 1, 1)
EXPORT_VARIANTS(hdim192_99k, 256, 192, 32, 64, 8, 4, 2, 2, 2, 1)
EXPORT_VARIANTS(hdim256_99k, 128, 256, 32, 32, 4, 2, 2, 2, 2, 1)
#endif

}  // namespace kernel_hub::attention::backward
