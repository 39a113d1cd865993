// Gradients of attention on Hopper: dq, dk and dv from q, k, v, the forward's lse and the gradient
// of its out.
//
// With z = softmax_scale q k^T:
//   p = exp(z - lse)        delta = rowsum(dout * out)        dp = dout v^T
//   ds = p (dp - delta)
//   dv = p^T dout           dk = softmax_scale ds^T q         dq = softmax_scale ds k
// p and ds are rounded to the tensors' dtype as operands; all sums are fp32. dk and dv are summed
// over the query heads that share a key head. Query i of a sequence sees keys i + shift -
// window_left to i + shift + window_right, shift = seqlen_k - seqlen_q.
//
// Three kernels. Their workspace is laid out in blocks of kBlockM query rows (each sequence starts
// a new block): sums of dq [head][block][panel of 64 columns or what is left][16 rows][8 columns]
// [fragment], row values [head][row].
//   ..._delta    a block 16 rows of a head: delta, lse in units of log 2, zeros for the sums of dq;
//                of ragged keys one more block: the order of the sequences, the longest first, and
//                how many blocks of keys they have, so that works and grids have no gaps
//   (main)       a work is 128 keys, of wide heads 64: loops over the query heads of a group and
//                over the blocks of kBlockM queries that see the keys. Works at the end, which
//                would leave multiprocessors idle, are shared by several blocks: each makes a part
//                of dk and dv from its share of those rounds
//   ..._convert  a block 16 rows of a head: dq from the sums; or dk or dv from its parts
// Each waits for the launch before it: the main kernel once it has set up and asked for its first
// tiles, which are older than that launch. Under the main kernel's end the next one begins.
// A block takes one work after another, by a counter, and q and dout of the next one come while the
// last one ends: 3 us of the 7 that a work costs beside its rounds.
// The keys that most queries see come first, within groups of heads whose q, dout and dq stay in
// the L2; in turns causal groups are staggered (Works::find_alike). dk and dv have one order of
// summation. dq has one where there are turns: a block then adds its part of a block of queries
// after the blocks of lower keys.
//
// Turns. Nobody waits for ever, however few blocks run at a time: works are taken in the order of
// their indices by blocks that run, and one waits for works of lower indices alone, of which the
// lowest that has not ended waits for none. (Where a block has one work its index is the block's,
// and blocks begin in that order.) Nobody waits for long: all keys of a head begin at the last
// queries, heads of a group go through them together (not through a window), so that one that
// began later, or sees fewer queries, stays behind; and several pairs run a few blocks of keys at a
// time. Works are parted by heads, uneven ones too, or by queries, alike for all keys. dq may have
// several sums: block i of the keys adds to sum i % num_sums, of causal ones the first two as they
// come, and convert adds those up.
//
// Main kernel. Warpgroup 0: a warp loads by TMA; two warps add the consumers' parts of dq to their
// sums by the TMA's reductions; the fourth passes turns on, whose fences would hold those up.
// Warpgroups 1 and 2 own 64 keys each. They compute s^T = k q^T and dp^T = v dout^T, of which p^T
// and ds^T are, as they lie in registers, the left operands of dv and dk. v, or what of it there
// are registers for (kKeptColumns), stays there. ds also goes to shared memory, where both take
// from it their part of dq = ds k: half of the rows (128 queries) or a panel of columns (64). For
// query block i, and what the tensor cores do meanwhile:
//   issue dv(i); ds(i) from p(i), dp(i)                              dv(i)
//   issue dq(i - 1), dk(i); dq(i - 1) to shared memory               dk(i)
//   issue s(i + 1), dp(i + 1); p(i + 1) from s(i + 1)                dp(i + 1)
// dq lags behind, so that neither consumer waits for the other's ds.
//
// Wide heads (160 to 256): 64 keys of dk and dv in fp32 fill the registers of two warpgroups, so
// both work on the same keys. The first makes p, which it leaves in shared memory, and dv; the
// second takes p, makes ds and dk. dq = ds k is shared by panels of columns. k stays in registers
// of the first, v of the second, as above. For query block i:
//   1: issue dv(i), dq(i - 1), s(i + 1); p(i + 1) from s(i + 1)
//   2: ds(i) from p(i), dp(i); issue dk(i), dq(i), dp(i + 1)
//
// Shared memory: k, v [keys]; q, dout [2 stages, at 256 one of dout][kBlockM]; ds
// [2][kBlockM][keys] and, of wide heads, p [keys][kBlockM]; dq in fp32; lse and delta
// [stages][kBlockM]; mbarriers; two works. Panels of 64 columns (128 bytes) in the TMA's 128-byte
// swizzle; head_dim is filled up with zeros by the TMA. Tensor maps as those of
// flash_attention_sm90.cu, in boxes of kBlockM rows (q, dout) or the block's keys (k, v).
//
//   flash_attention_backward_sm90_{dtype}_hdim{N}_rows{kBlockM}   head_dim a multiple of 8 up to N
//   ..._{dtype}_hdim{N}_delta, ..._{dtype}_convert                the rows before and after
// Sources: Dao, "FlashAttention-2", 2023, algorithm 2; Shah et al., "FlashAttention-3", 2024.

#include "attention/backward/sm90/producer.cuh"
#include "attention/backward/sm90/roles.cuh"
#include "attention/backward/sm90/rows.cuh"
#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"

namespace kernel_hub::attention::backward::sm90 {

// The works of a block, as its first warp finds them, or the one it has. By whole warps.
template <class C, class Do>
__device__ __forceinline__ void each_work(const BackwardShared<C>& shared, bool has_one,
                                          Do&& work_on) {
#pragma unroll 1
    for (int nth = 0;; ++nth) {
        mbarrier_wait(shared.work_full(nth), nth / 2 % 2);
        const BackwardWork& work = shared.work(nth);
        if (work.num_iterations < 0) {
            break;
        }
        work_on(work);
        if (has_one) {
            break;
        }
        __syncwarp();
        mbarrier_arrive_if(shared.work_empty(nth), read_thread_idx() % 32 == 0);
    }
}

// What lies outside is no work: the first block looks at all sequences. A warp.
template <typename T>
__device__ __forceinline__ void report_sequences(const BackwardParameters<T>& p) {
    if (blockIdx.x > 0) {
        return;
    }
    const int batch_size = over(p.works.num_pairs, p.works.num_heads);
#pragma unroll 1
    for (int batch_idx = threadIdx.x % 32; batch_idx < batch_size; batch_idx += 32) {
        const Sequence queries(p.cu_seqlens_q, batch_idx, p.seqlen_q, p.total_q);
        const Sequence keys(p.cu_seqlens_k, batch_idx, p.seqlen_k, p.total_k);
        report(p.flag, (queries.is_outside ? kQueriesOutside : 0) |
                           keys_outside(keys, p.cache_seqlens, batch_idx));
    }
    __syncwarp();
}

template <class C>
__device__ __forceinline__ void attention_backward_sm90(
    const BackwardParameters<typename C::T>& p) {
    BackwardShared<C> shared;
    shared.base = (shared_address(dynamic_shared()) + 1023) / 1024 * 1024;
    if (threadIdx.x == 0) {
        tma_prefetch_map(p.q);
        tma_prefetch_map(p.k);
        tma_prefetch_map(p.v);
        tma_prefetch_map(p.dout);
        for (int i = 0; i < BackwardShared<C>::kCount; ++i) {
            mbarrier_init(shared.barrier(i), BackwardShared<C>::arrivals(i));
        }
        st_shared_release(shared.added(0), 0);
        st_shared_release(shared.added(1), 0);
        fence_mbarrier_init();
    }
    const bool is_all = p.works.count() <= static_cast<int>(gridDim.x);  // each block has one work
    const bool has_one = C::kFindsFirst && is_all;
    // The first work, where nothing must be waited for.
    const bool has_first =
        C::kFindsFirst && !p.cu_seqlens_k && (is_all || !p.workspace.sums.has_turns);
    if (has_first && threadIdx.x == 0) {
        const Place place = p.works.find_alike(BackwardWork::work_of<C>(p, blockIdx.x));
        shared.work(0).template begin<C>(p, true, blockIdx.x, place, 0, 0);
    }
    __syncthreads();

    const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        release_registers<C::kProducerRegisters>();
        const int warp_idx = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);
        if (warp_idx == 0) {
            BackwardProducer<C> producer{p, shared, static_cast<int>(threadIdx.x)};
            producer.run(has_first, has_one);
        } else if (warp_idx <= C::kConsumers) {
            wait_for_launch_before();  // which zeroes the sums
            int added = 0;
            each_work(shared, has_one, [&](const BackwardWork& work) {
                add_dq<C>(p, shared, work, warp_idx - 1, added);
            });
        } else {
            report_sequences(p);
            wait_for_launch_before();
            int added = 0;
            each_work(shared, has_one,
                      [&](const BackwardWork& work) { pass_turns<C>(p, shared, work, added); });
        }
    } else {
        acquire_registers<C::kConsumerRegisters>();
        if constexpr (C::kHasRoles) {
            RoleConsumer<C> consumer(p, shared);
            each_work(shared, has_one,
                      [&](const BackwardWork& work) { consumer.run(work, warpgroup == 1); });
        } else {
            BackwardConsumer<C> consumer(p, shared, warpgroup - 1);
            each_work(shared, has_one, [&](const BackwardWork& work) { consumer.run(work); });
        }
        // Not before: the next launch's blocks would be in the way of this one's.
        allow_next_launch();
    }
}

#define EXPORT_BACKWARD(NAME, T, HEAD_DIM, BLOCK_M)                                                \
    DESCRIBED(                                                                                     \
        flash_attention_backward_sm90_##NAME,                                                      \
        "x: blocks of block_n keys of every sequence and head of dk and dv",                       \
        (facts_of<BackwardConfig<T, HEAD_DIM, BLOCK_M>>()),                                        \
        extern "C" __global__ void __launch_bounds__(384, 1) flash_attention_backward_sm90_##NAME( \
            T* dk, T* dv, float* workspace, int* flag, const __grid_constant__ CUtensorMap q,      \
            const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v,          \
            const __grid_constant__ CUtensorMap dout, const int* cu_seqlens_q,                     \
            const int* cu_seqlens_k, const int* cache_seqlens, int64_t dk_batch_stride,            \
            int64_t dk_row_stride, int64_t dk_head_stride, int64_t dv_batch_stride,                \
            int64_t dv_row_stride, int64_t dv_head_stride, int64_t parts_at, int num_blocks,       \
            int num_pairs, int pairs_per_group, int first_size, int first_half, int num_kv_heads,  \
            int num_works, int first_parted, int num_parts, int64_t num_blocks_q, int seqlen_q,    \
            int seqlen_k, int total_q, int total_k, int group, int head_dim, int window_left,      \
            int window_right, int sums, float softmax_scale) {                                     \
            attention_backward_sm90<BackwardConfig<T, HEAD_DIM, BLOCK_M>>(                         \
                {.dk = {dk, dk_batch_stride, dk_row_stride, dk_head_stride},                       \
                 .dv = {dv, dv_batch_stride, dv_row_stride, dv_head_stride},                       \
                 .parts = reinterpret_cast<T*>(workspace + parts_at),                              \
                 .workspace = {workspace, num_kv_heads * group * num_blocks_q * BLOCK_M, HEAD_DIM, \
                               Sums(sums),                                                         \
                               RaggedKeys::count(cu_seqlens_k, num_pairs / num_kv_heads)},         \
                 .flag = flag,                                                                     \
                 .q = &q,                                                                          \
                 .k = &k,                                                                          \
                 .v = &v,                                                                          \
                 .dout = &dout,                                                                    \
                 .cu_seqlens_q = cu_seqlens_q,                                                     \
                 .cu_seqlens_k = cu_seqlens_k,                                                     \
                 .cache_seqlens = cache_seqlens,                                                   \
                 .num_blocks_q = num_blocks_q,                                                     \
                 .works = {num_blocks, num_pairs, pairs_per_group, first_size, first_half,         \
                           num_kv_heads, num_works, first_parted, num_parts},                      \
                 .seqlen_q = seqlen_q,                                                             \
                 .seqlen_k = seqlen_k,                                                             \
                 .total_q = total_q,                                                               \
                 .total_k = total_k,                                                               \
                 .group = group,                                                                   \
                 .head_dim = head_dim,                                                             \
                 .window_left = window_left,                                                       \
                 .window_right = window_right,                                                     \
                 .softmax_scale = softmax_scale});                                                 \
        })

#define EXPORT_DELTA(NAME, T, HEAD_DIM)                                                          \
    DESCRIBED(                                                                                   \
        flash_attention_backward_sm90_##NAME##_delta,                                            \
        "x: tiles of 16 query rows of every sequence, y: heads",                                 \
        (.threads = 128, .shared_bytes = 0, .block_m = 16),                                      \
        extern "C" __global__ void                                                               \
        __launch_bounds__(128) flash_attention_backward_sm90_##NAME##_delta(                     \
            float* workspace, const T* out, const T* dout, const float* lse,                     \
            const int* cu_seqlens_q, const int* cu_seqlens_k, int64_t out_batch_stride,          \
            int64_t out_row_stride, int64_t out_head_stride, int64_t dout_batch_stride,          \
            int64_t dout_row_stride, int64_t dout_head_stride, int64_t lse_batch_stride,         \
            int64_t lse_head_stride, int64_t num_blocks_q, int batch_size, int num_tiles,        \
            int seqlen_q, int total_q, int head_dim, int padded_head_dim, int block_m,           \
            int seqlen_k, int total_k, int block_n, int sums) {                                  \
            attention_delta_sm90<T, HEAD_DIM / kPanelColumns>(                                   \
                {workspace, gridDim.y * num_blocks_q * block_m, padded_head_dim, Sums(sums),     \
                 RaggedKeys::count(cu_seqlens_k, batch_size)},                                   \
                {out, out_batch_stride, out_row_stride, out_head_stride},                        \
                {dout, dout_batch_stride, dout_row_stride, dout_head_stride}, lse,               \
                lse_batch_stride, lse_head_stride,                                               \
                {cu_seqlens_q, num_blocks_q, batch_size, num_tiles, seqlen_q, total_q, head_dim, \
                 padded_head_dim, block_m},                                                      \
                {cu_seqlens_k, seqlen_k, total_k, block_n, batch_size, nullptr});                \
        })

#define EXPORT_CONVERT(NAME, T)                                                                   \
    DESCRIBED(                                                                                    \
        flash_attention_backward_sm90_##NAME##_convert,                                           \
        "x: tiles of 16 query rows of every sequence, y: heads",                                  \
        (.threads = 128, .shared_bytes = 0, .block_m = 16),                                       \
        extern "C" __global__ void                                                                \
        __launch_bounds__(128) flash_attention_backward_sm90_##NAME##_convert(                    \
            T* dq, float* workspace, const int* cu_seqlens_q, const int* cu_seqlens_k, T* dk,     \
            T* dv, int64_t dq_batch_stride, int64_t dq_row_stride, int64_t dq_head_stride,        \
            int64_t dk_batch_stride, int64_t dk_row_stride, int64_t dk_head_stride,               \
            int64_t dv_batch_stride, int64_t dv_row_stride, int64_t dv_head_stride,               \
            int64_t parts_at, int num_blocks, int num_pairs, int pairs_per_group, int first_size, \
            int first_half, int num_kv_heads, int num_works, int first_parted, int num_parts,     \
            int64_t num_blocks_q, int batch_size, int num_tiles, int seqlen_q, int total_q,       \
            int head_dim, int padded_head_dim, int block_m, int num_heads, int seqlen_k,          \
            int total_k, int block_n, int sums, float softmax_scale) {                            \
            attention_convert_sm90<T>(                                                            \
                {dq, dq_batch_stride, dq_row_stride, dq_head_stride}, workspace,                  \
                {cu_seqlens_q, num_blocks_q, batch_size, num_tiles, seqlen_q, total_q, head_dim,  \
                 padded_head_dim, block_m},                                                       \
                num_heads,                                                                        \
                {{dk, dk_batch_stride, dk_row_stride, dk_head_stride},                            \
                 {dv, dv_batch_stride, dv_row_stride, dv_head_stride},                            \
                 reinterpret_cast<const T*>(workspace + parts_at),                                \
                 {num_blocks, num_pairs, pairs_per_group, first_size, first_half, num_kv_heads,   \
                  num_works, first_parted, num_parts},                                            \
                 {cu_seqlens_k, seqlen_k, total_k, block_n, batch_size,                           \
                  reinterpret_cast<int*>(workspace +                                              \
                                         num_heads * num_blocks_q * block_m *                     \
                                             (Sums(sums).num_sums * padded_head_dim + 2)) +       \
                      1}},                                                                        \
                Sums(sums).num_sums, num_heads * num_blocks_q * block_m, softmax_scale);          \
        })

// head_dim, then kBlockM.
EXPORT_BACKWARD(bf16_hdim32_rows128, __nv_bfloat16, 32, 128)
EXPORT_BACKWARD(fp16_hdim32_rows128, __half, 32, 128)
EXPORT_BACKWARD(bf16_hdim64_rows128, __nv_bfloat16, 64, 128)
EXPORT_BACKWARD(fp16_hdim64_rows128, __half, 64, 128)
EXPORT_BACKWARD(bf16_hdim96_rows64, __nv_bfloat16, 96, 64)
EXPORT_BACKWARD(fp16_hdim96_rows64, __half, 96, 64)
EXPORT_BACKWARD(bf16_hdim112_rows64, __nv_bfloat16, 112, 64)
EXPORT_BACKWARD(fp16_hdim112_rows64, __half, 112, 64)
EXPORT_BACKWARD(bf16_hdim128_rows64, __nv_bfloat16, 128, 64)
EXPORT_BACKWARD(fp16_hdim128_rows64, __half, 128, 64)
EXPORT_BACKWARD(bf16_hdim160_rows64, __nv_bfloat16, 160, 64)
EXPORT_BACKWARD(fp16_hdim160_rows64, __half, 160, 64)
EXPORT_BACKWARD(bf16_hdim192_rows64, __nv_bfloat16, 192, 64)
EXPORT_BACKWARD(fp16_hdim192_rows64, __half, 192, 64)
EXPORT_BACKWARD(bf16_hdim224_rows64, __nv_bfloat16, 224, 64)
EXPORT_BACKWARD(fp16_hdim224_rows64, __half, 224, 64)
EXPORT_BACKWARD(bf16_hdim256_rows64, __nv_bfloat16, 256, 64)
EXPORT_BACKWARD(fp16_hdim256_rows64, __half, 256, 64)

// The widest head_dim.
EXPORT_DELTA(bf16_hdim64, __nv_bfloat16, 64)
EXPORT_DELTA(fp16_hdim64, __half, 64)
EXPORT_DELTA(bf16_hdim128, __nv_bfloat16, 128)
EXPORT_DELTA(fp16_hdim128, __half, 128)
EXPORT_DELTA(bf16_hdim192, __nv_bfloat16, 192)
EXPORT_DELTA(fp16_hdim192, __half, 192)
EXPORT_DELTA(bf16_hdim256, __nv_bfloat16, 256)
EXPORT_DELTA(fp16_hdim256, __half, 256)

EXPORT_CONVERT(bf16, __nv_bfloat16)
EXPORT_CONVERT(fp16, __half)

}  // namespace kernel_hub::attention::backward::sm90
