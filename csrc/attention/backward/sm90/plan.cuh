// flash_attention_backward_sm90.cu: its tile shapes, parameters, shared memory, and which block
// works on what.
#pragma once

#include "attention/backward/problem.cuh"
#include "attention/backward/sm90/works.cuh"
#include "attention/sm90/warpgroups.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"

namespace kernel_hub::attention::backward::sm90 {

using attention::sm90::facts_of;

constexpr int kPanelBytes = 128;  // of a row of shared memory: 64 columns
constexpr int kPanelColumns = 64;

template <typename T_, int kHeadDim_, int kBlockM_>
struct BackwardConfig {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_;
    // Wide heads leave a consumer the registers for one sum of 64 keys: both work on the same keys,
    // one for dv and the other for dk.
    static constexpr bool kHasRoles = kHeadDim > 128;
    static constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers);
    static constexpr int kBlockN = kHasRoles ? 64 : 128;
    static constexpr int kStages = 2, kDoutStages = kHeadDim > 192 ? 1 : 2;
    static constexpr int kPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns;
    static constexpr int kKPanel = kBlockN * kPanelBytes, kQPanel = kBlockM * kPanelBytes;
    static constexpr int kKBytes = kPanels * kKPanel, kQBytes = kPanels * kQPanel;
    static constexpr int kDsBytes = kBlockN / 64 * kQPanel;  // a panel is 64 keys
    static constexpr int kProbBytes = kHasRoles ? 64 * 2 * kBlockM : 0;
    static constexpr int kRowBytes = 4 * kBlockM;  // of lse, or delta
    // The consumers share dq by its rows, 64 each, or by its panels of columns: in so many parts,
    // of which the first consumer makes kFirstParts, one after another.
    static constexpr bool kSplitsRows = kBlockM == 128;
    static constexpr int kDqParts = kSplitsRows ? kConsumers : kPanels;
    static constexpr int kFirstParts = kHasRoles ? 2 : 1;
    // Whether consumers have turns of their own: where one makes two parts and the other one, what
    // they pass on apart costs more than it gives (d 160: 1.16 of the time without turns for 1.19).
    static constexpr bool kHasOwnTurns = kDqParts % 2 == 0;
    // The columns of the last panel. Where it is narrow, it is the last consumer's last part, or
    // of three panels with roles, the first one's second.
    static constexpr int kLastColumns = kHeadDim - (kPanels - 1) * kPanelColumns;
    static constexpr bool kIsLastNarrow = !kSplitsRows && kLastColumns < kPanelColumns;
    // Whether there are registers for p in fp32 until ds is made.
    static constexpr bool kKeepsProbs = kBlockM == 64 && !kHasRoles;
    // So many columns of 64 rows of v, with roles also of k in the first consumer, stay in
    // registers: what they have room for.
    static constexpr int kKeptColumns = kHeadDim == 64 || kHeadDim == 256    ? 0
                                        : kHeadDim <= 112 || kHeadDim == 160 ? kHeadDim
                                        : kHeadDim == 192                    ? 128
                                                                             : 64;
    // Whether a block's first work is found by a thread that has all registers yet: -1.2 us at 96,
    // but other bodies' loops are slower for it, +1 us or 2 %.
    static constexpr bool kFindsFirst = kHeadDim > 64 && kHeadDim != 128;
    // Whether what follows from a thread's index is worked out anew for each work: there are no
    // registers to keep it.
    static constexpr bool kReadsThread = kHeadDim > 64 && !kHasRoles;
    // Whether the next scores are under way while dq is left: there, +1 %; at 96, -2 to -6 %.
    static constexpr bool kScoresFirst = kHeadDim <= 64;
    static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

    // The panel of columns, or 64 rows, that a part of dq is: the parts of the first consumer, then
    // those of the last.
    static constexpr __host__ __device__ int panel_of(int part) {
        return !(kHasRoles && kIsLastNarrow && kDqParts == 3) || part == 0 ? part : kDqParts - part;
    }
    static constexpr __host__ __device__ int part_bytes(int panel) {
        return kIsLastNarrow && panel == kPanels - 1 ? 4 * kBlockM * kLastColumns : kDqBytes;
    }

    static constexpr int kK = 0, kV = kKBytes, kQ = kV + kKBytes;
    static constexpr int kDout = kQ + kStages * kQBytes, kDs = kDout + kDoutStages * kQBytes;
    static constexpr int kDqRegisters = kHeadDim < kPanelColumns ? kHeadDim / 2 : 32;
    static constexpr int kDqBytes = 128 * 4 * kDqRegisters;  // of a consumer, fp32
    static constexpr int kProbs = kDs + 2 * kDsBytes, kDq = kProbs + kProbBytes;
    static constexpr int kLse = kDq + kConsumers * kDqBytes, kDelta = kLse + kStages * kRowBytes;
    static constexpr int kBarriers = kDelta + kDoutStages * kRowBytes, kWorks = kBarriers + 192;
    static constexpr int kWorkBytes = 128;
    static constexpr int kPlaces = kWorks + 2 * kWorkBytes;
    static constexpr int kAdded = kPlaces + 4 * kStages;
    static constexpr int kSharedBytes = kAdded + 4 * kConsumers + 1024;  // room to align them

    static_assert(kBlockM == 64 || (kSplitsRows && kHeadDim <= 64),
                  "a part of dq is 64 rows of one panel");
    static_assert(!kIsLastNarrow || !kHasRoles || kLastColumns == 32, "half a panel");
    static_assert(kFirstParts >= kDqParts - kFirstParts && kDqParts > kFirstParts,
                  "both consumers make parts of dq, the first as many as the second or more");
    static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 504,
                  "acquire_registers would wait for ever");
    static_assert(kSharedBytes <= 227 * 1024, "shared memory of an SM");
};

template <typename T>
struct BackwardParameters {
    Heads<T> dk, dv;
    T* parts;  // of dk: [parted work][part][key][column], then of dv
    Workspace workspace;
    int* flag;  // what tables led outside (bounds.cuh), or null
    const CUtensorMap *q, *k, *v, *dout;
    const int *cu_seqlens_q, *cu_seqlens_k, *cache_seqlens;
    int64_t num_blocks_q;  // of a head, in the workspace
    Works works;
    int seqlen_q, seqlen_k;  // with cu_seqlens: of the longest
    int total_q, total_k;    // rows of q and k that cu_seqlens tell apart
    int group, head_dim, window_left, window_right;
    float softmax_scale;
};

template <typename T>
__device__ __forceinline__ RaggedKeys keys_of(const BackwardParameters<T>& p, int block_n) {
    return {p.cu_seqlens_k,
            p.seqlen_k,
            p.total_k,
            block_n,
            over(p.works.num_pairs, p.works.num_heads),
            p.workspace.order};
}

struct BackwardWork;

// The barriers, and where things lie.
template <class C>
struct BackwardShared {
    uint32_t base;

    // Named barriers: dq of a consumer is there.
    static constexpr int kDqBarrier = 2, kDqThreads = 128 + 32;

    __device__ __forceinline__ uint32_t barrier(int i) const { return base + C::kBarriers + 8 * i; }
    __device__ __forceinline__ uint32_t k_full() const { return barrier(0); }
    __device__ __forceinline__ uint32_t v_full() const { return barrier(1); }
    // Foreign rows have come, and are still to be cleared.
    __device__ __forceinline__ uint32_t foreign() const { return barrier(2); }
    __device__ __forceinline__ uint32_t q_full(int stage) const { return barrier(3 + stage); }
    __device__ __forceinline__ uint32_t q_empty(int stage) const {
        return barrier(3 + C::kStages + stage);
    }
    __device__ __forceinline__ uint32_t dout_full(int stage) const {
        return barrier(3 + 2 * C::kStages + stage);
    }
    __device__ __forceinline__ uint32_t dout_empty(int stage) const {
        return barrier(3 + 3 * C::kStages + stage);
    }
    // ds of both consumers is there; has been read by both.
    __device__ __forceinline__ uint32_t ds_full(int buffer) const {
        return barrier(3 + 4 * C::kStages + buffer);
    }
    __device__ __forceinline__ uint32_t ds_empty(int buffer) const {
        return barrier(5 + 4 * C::kStages + buffer);
    }
    // dq of a consumer has been taken.
    __device__ __forceinline__ uint32_t dq_empty(int consumer) const {
        return barrier(7 + 4 * C::kStages + consumer);
    }
    // With roles: p of a block is there; has been read.
    __device__ __forceinline__ uint32_t probs_full() const { return barrier(9 + 4 * C::kStages); }
    __device__ __forceinline__ uint32_t probs_empty() const { return barrier(10 + 4 * C::kStages); }
    // k and v have been read.
    __device__ __forceinline__ uint32_t kv_empty() const { return barrier(11 + 4 * C::kStages); }
    // What the block does next is known; has been done.
    __device__ __forceinline__ uint32_t work_full(int nth) const {
        return barrier(12 + 4 * C::kStages + nth % 2);
    }
    __device__ __forceinline__ uint32_t work_empty(int nth) const {
        return barrier(14 + 4 * C::kStages + nth % 2);
    }
    static constexpr int kCount = 16 + 4 * C::kStages;

    __device__ __forceinline__ BackwardWork& work(int nth) const;

    // In turns: to how many blocks of queries a consumer's parts have been added.
    __device__ __forceinline__ uint32_t added(int consumer) const {
        return base + C::kAdded + 4 * consumer;
    }
    // Which block of queries is in a stage of q.
    __device__ __forceinline__ int& place(int stage) const {
        return *reinterpret_cast<int*>(shared_pointer(base + C::kPlaces + 4 * stage));
    }

    // How many arrivals complete a phase: for ds and what is emptied, one per warp of the
    // consumers; with roles, for ds and p one per warp of the consumer that makes or reads it.
    static __device__ __forceinline__ int arrivals(int i) {
        const bool is_ds_full = i == 3 + 4 * C::kStages || i == 4 + 4 * C::kStages;
        const bool is_of_probs = i == 9 + 4 * C::kStages || i == 10 + 4 * C::kStages;
        if (C::kHasRoles && (is_ds_full || is_of_probs)) {
            return 4;
        }
        if (i >= 14 + 4 * C::kStages) {
            return 5 * C::kConsumers + 1;  // with the warps that add up dq and pass turns on
        }
        const bool is_q_empty = i >= 3 + C::kStages && i < 3 + 2 * C::kStages;
        const bool is_empty_or_ds = i >= 3 + 3 * C::kStages && i < 7 + 4 * C::kStages;
        const bool is_kv_empty = i == 11 + 4 * C::kStages;
        return is_q_empty || is_empty_or_ds || is_kv_empty ? 4 * C::kConsumers : 1;
    }
};

// The first of a sequence's blocks of block_m queries in the workspace, where each sequence starts
// a new block.
__device__ __forceinline__ int first_block_of(const int* cu_seqlens_q, int first_row, int batch_idx,
                                              int longest_q, int block_m) {
    return cu_seqlens_q ? first_row / block_m + batch_idx
                        : batch_idx * ceil_div(longest_q, block_m);
}

// What a block works on; kept in shared memory, because the sums leave no registers for it.
struct BackwardWork : Work {
    int head_idx;    // of dk and dv
    int begin_head;  // of q, and the block of its queries, where the work begins
    int begin_m;
    int first_head, end_head;  // in turns, of q
    int key_block;
    // From a block of queries to the next one of its head, and where the next head begins; step 0:
    // the next head comes next.
    int step, stop_m, restart_m;
    int part;            // of which parts of dk and dv this makes; -1: all
    int first_block;     // of queries: the sequence's first one in a head's part of the workspace
    int64_t sum_block;   // and in the sum that these keys add to
    int num_iterations;  // blocks of queries, over all heads; -1: there is no more work
    int plain_begin, num_plain;  // the blocks of queries that see all of the keys
    // Of the count over all that the block works on, where it goes on; and whether it is an odd one
    // of those with a query.
    int first_iteration, last_iteration, keys_parity;

    __device__ __forceinline__ bool is_masked(int m) const {
        return static_cast<unsigned>(m - plain_begin) >= static_cast<unsigned>(num_plain);
    }

    // From one block of queries to the next.
    __device__ __forceinline__ void advance(int& q_head, int& m) const {
        if (step == 0) {
            const bool is_last = q_head + 1 == end_head;
            q_head = is_last ? first_head : q_head + 1;
            m -= is_last ? 1 : 0;
        } else {
            const bool is_last = m + step == stop_m;
            q_head += is_last ? 1 : 0;
            m = is_last ? restart_m : m + step;
        }
    }
    // How many blocks of lower keys block m of the queries sees.
    template <class C>
    __device__ __forceinline__ int earlier(int m) const {
        return min(key_block, -floor_div(m * C::kBlockM - window.start, C::kBlockN));
    }

    // Which work `index` is, or is a part of.
    template <class C>
    static __device__ __forceinline__ int work_of(const BackwardParameters<typename C::T>& p,
                                                  int index) {
        const int first = p.works.first_parted;
        return min(index, first + over(max(index - first, 0), p.works.num_parts));
    }

    // What a block does as its next work. One thread.
    template <class C>
    __device__ __forceinline__ void begin(const BackwardParameters<typename C::T>& p, bool is_there,
                                          int index, const Place& place, int at_iteration,
                                          int num_before) {
        num_iterations = -1;
        if (is_there) {
            find<C>(p, index, place);
        }
        first_iteration = at_iteration;
        last_iteration = at_iteration + num_iterations - 1;
        keys_parity = num_before % 2;
    }

    template <class C>
    __device__ __forceinline__ void find(const BackwardParameters<typename C::T>& p, int index,
                                         const Place& place) {
        part = index - p.works.first_parted;
        const int parted = over(max(part, 0), p.works.num_parts);
        batch_idx = place.batch_idx;
        head_idx = place.head_idx;
        key_block = place.key_block;
        const Sequence queries(p.cu_seqlens_q, batch_idx, p.seqlen_q, p.total_q);
        const Sequence keys(p.cu_seqlens_k, batch_idx, p.seqlen_k, p.total_k);
        const int first_key = key_block * C::kBlockN;
        first_row = queries.first_row;
        first_block = first_block_of(p.cu_seqlens_q, first_row, batch_idx, p.seqlen_q, C::kBlockM);
        seqlen_q = queries.seqlen;
        first_key_row = keys.first_row + first_key;
        num_key_rows = keys.seqlen - first_key;
        const int seqlen_k = count_keys(p.cache_seqlens, batch_idx, keys.seqlen);
        window.num_keys = seqlen_k - first_key;
        // Bounds that are finite: no more than the lengths.
        const int left = p.window_left < 0 ? seqlen_k : min(p.window_left, seqlen_k);
        const int right = p.window_right < 0 ? seqlen_q : min(p.window_right, seqlen_q);
        home = first_key - (seqlen_k - seqlen_q);
        window.start = home + left;
        window.span = left + right;
        first_m = max(0, floor_div(home - right, C::kBlockM));
        end_m = min(ceil_div(seqlen_q, C::kBlockM),
                    floor_div(window.start + min(C::kBlockN, window.num_keys) - 1, C::kBlockM) + 1);
        find_rounds<C>(p, max(part, 0) - parted * p.works.num_parts);
        // Blocks m with 0 <= key - query + start <= span for all of their keys and queries.
        plain_begin =
            floor_div(window.start - window.span + C::kBlockN + C::kBlockM - 2, C::kBlockM);
        num_plain = max(0, floor_div(window.start + 1, C::kBlockM) - plain_begin);
        if (window.num_keys < C::kBlockN) {
            num_plain = 0;
        }
    }

    // Which rounds of the work are this block's, and where it begins.
    template <class C>
    __device__ __forceinline__ void find_rounds(const BackwardParameters<typename C::T>& p,
                                                int nth_part) {
        const int num_sums = p.workspace.sums.num_sums;
        const int sum = key_block - over(key_block, num_sums) * num_sums;
        sum_block = static_cast<int64_t>(sum) * p.works.num_heads * p.group * p.num_blocks_q;
        sum_block += first_block;
        first_head = head_idx * p.group;
        if (p.workspace.sums.has_turns) {
            end_head = first_head + p.group;
            if (part >= 0) {
                // By heads, some of which may be one more; where there are more parts, also by
                // queries, the same ones for all keys.
                const int by_heads = min(p.works.num_parts, p.group);
                const int by_queries = over(p.works.num_parts, by_heads);
                const int most = over(ceil_div(seqlen_q, C::kBlockM) + by_queries - 1, by_queries);
                const int nth_heads = over(nth_part, by_queries);
                const int first = (nth_part - nth_heads * by_queries) * most;
                end_head = first_head + over((nth_heads + 1) * p.group, by_heads);
                first_head += over(nth_heads * p.group, by_heads);
                first_m = max(first_m, first);
                end_m = min(end_m, first + most);
            }
            const int num_heads = end_head - first_head;
            num_iterations = window.num_keys > 0 ? num_heads * max(0, end_m - first_m) : 0;
            begin_head = first_head;
            begin_m = end_m - 1;  // all keys' blocks: each waits for those begun before it alone
            // All heads go through the queries together: blocks of fewer queries would come to a
            // head before those whose turn is before theirs. Through a window all keys see as many,
            // and what neighbours read lies less far apart head by head.
            step = p.window_left < 0 || 2 * p.window_left > p.seqlen_q ? 0 : -1;
            stop_m = first_m - 1;
            restart_m = begin_m;
            return;
        }
        step = 1;
        stop_m = end_m;
        restart_m = first_m;
        const int num_m = max(1, end_m - first_m);
        num_iterations = window.num_keys > 0 ? p.group * max(0, end_m - first_m) : 0;
        int begin = 0;
        if (part >= 0) {
            const int most = over(num_iterations + p.works.num_parts - 1, p.works.num_parts);
            begin = nth_part * most;
            num_iterations = max(0, min(most, num_iterations - begin));
        }
        const int of_begin = over(begin, num_m);
        begin_head = first_head + of_begin;
        begin_m = first_m + begin - of_begin * num_m;
    }
};
static_assert(sizeof(BackwardWork) <= 128, "its room in shared memory");

template <class C>
__device__ __forceinline__ BackwardWork& BackwardShared<C>::work(int nth) const {
    return *reinterpret_cast<BackwardWork*>(
        shared_pointer(base + C::kWorks + nth % 2 * C::kWorkBytes));
}

}  // namespace kernel_hub::attention::backward::sm90
