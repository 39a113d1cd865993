// Drafts of a speculating model, verified: how many of a chain are kept, and the token after them.
//
//   p_j = softmax(target_logits[j] / temperature),  q_j = draft_probs[j]
//   draft d_j, up to the first that is no token, is kept where all before it are and u_j q_j(d_j) <
//   p_j(d_j) the token after what is kept is drawn from max(p_j - q_j, 0), or where no draft is
//   left from p_j
// Without draft_probs (each draft is certain of itself): x_j is drawn from p_j as sample draws it,
// by seed and offset + j, and d_j is kept where it is x_j. Where temperature is not above 0, x_j is
// the largest.
//
// A cluster of 1 to 16 blocks of 256 threads a position of a row (verify.cuh; one before compute
// capability 9.0): all positions at once, also those after the first that is not kept, which
// nobody can know. Each leaves one token, the draft where that is kept; the block that ends last of
// a row compares tokens and drafts from the first on.
// Probabilities are whole numbers (numbers.cuh): p by sample's masses, brought to 2^kFixBits in all
// where they meet q, so that sums and with them draws are the same in any order.
// Variants: whole, aligned fours of logits and draft_probs; _scalar any size and alignment.
// Shared memory: 1.1 KB, of words that blocks read of each other.
// Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023; Chen
// et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs the code of sm80

#include "kernel_hub/launch_facts.cuh"
#include "sampling/verify.cuh"

namespace kernel_hub::sampling {

// How many drafts of a row come before one that is no token. By whole warps.
__device__ __forceinline__ int count_drafts(const int64_t* drafts, int num_drafts, int size) {
    const int lane_idx = threadIdx.x % 32;
#pragma unroll 1
    for (int first = 0; first < num_drafts; first += 32) {
        const int i = first + lane_idx;
        const bool is_end =
            i >= num_drafts || static_cast<uint64_t>(drafts[i]) >= static_cast<uint64_t>(size);
        const unsigned ends = __ballot_sync(kAllLanes, is_end);
        if (ends != 0) {
            return first + __ffs(ends) - 1;
        }
    }
    return num_drafts;
}

// Writes the row from what its positions have left; how many drafts are kept. By one warp.
__device__ __forceinline__ int keep_drafts(int64_t* out, const int64_t* tokens,
                                           const int64_t* drafts, int own_drafts, int positions) {
    const int lane_idx = threadIdx.x % 32;
    int num = 0;
    bool goes_on = true;
#pragma unroll 1
    for (int first = 0; first < positions; first += 32) {
        const int i = first + lane_idx;
        const int64_t token = i <= own_drafts ? read_token(tokens + i) : -1;
        const bool is_kept = goes_on && i < own_drafts && token == drafts[i];
        const unsigned ends = ~__ballot_sync(kAllLanes, is_kept);
        const int kept = ends == 0 ? 32 : __ffs(ends) - 1;
        if (i < positions) {
            out[i] = goes_on && i <= first + kept ? token : -1;
        }
        num += kept;
        goes_on = goes_on && kept == 32;
    }
    return num;
}

template <bool kIsPlain>
__device__ __forceinline__ void verify_draft_row(
    int* state, int64_t* tokens, int64_t* out_ids, int* num_accepted, int* flag,
    const int64_t* draft_ids, const void* target_logits, const float* draft_probs,
    const float* temperature, const int64_t* seed, const int64_t* offset, int64_t draft_ids_stride,
    int64_t logits_stride, int64_t draft_probs_stride, int num_drafts, int size, int dtype) {
    follow_launch_before();
    auto& s = *reinterpret_cast<VerifyShared<1>*>(dynamic_shared());
    Team team(s.words);
    const int place = blockIdx.x / team.size, positions = num_drafts + 1;
    const int row_idx = place / positions, position = place % positions;
    const Position<kIsPlain> x = {
        static_cast<const char*>(target_logits) + place * logits_stride * (dtype == kFp32 ? 4 : 2),
        draft_probs == nullptr
            ? nullptr
            : draft_probs + static_cast<int64_t>(place - row_idx) * draft_probs_stride,
        0, size, dtype};
    fetch_share(x, team);
    const int64_t* drafts = draft_ids + row_idx * draft_ids_stride;
    const int own_drafts = count_drafts(drafts, num_drafts, size);
    const bool is_outside = position == 0 && team.rank == 0 && threadIdx.x == 0 &&
                            own_drafts < num_drafts && drafts[own_drafts] != -1;
    report(flag, is_outside ? kDraftsOutside : 0);

    bool leaves_token = team.rank == 0;
    if (position <= own_drafts) {
        const bool has_draft = position < own_drafts;
        const int id = has_draft ? static_cast<int>(drafts[position]) : 0;
        if (has_draft && x.draft_probs != nullptr) {
            prefetch_l2(x.draft_probs + id);
        }
        leaves_token = verify(
            x, temperature ? temperature[row_idx] : 1.0f, seed ? seed[row_idx] : 0,
            (offset ? offset[row_idx] : 0) + position, tokens + place, team, s,
            [&](int child) { return has_draft && child < 0 ? 0 : -1; }, [&](int) { return id; },
            [&](int) { return id; });
    } else {
        team.arrive_last();
    }
    if (leaves_token) {
        __syncthreads();
        if (threadIdx.x < 32 && is_last_of_row(state + row_idx, positions)) {
            const int64_t at = static_cast<int64_t>(row_idx) * positions;
            // NOTE: counted anew: a register less all along.
            const int num = keep_drafts(out_ids + at, tokens + at, drafts,
                                        count_drafts(drafts, num_drafts, size), positions);
            if (threadIdx.x == 0) {
                num_accepted[row_idx] = num;
            }
        }
    }
    team.wait_last();
}

#define EXPORT_VERIFY_DRAFT(NAME, IS_PLAIN)                                                   \
    DESCRIBED(                                                                                \
        NAME, "x: blocks of clusters, one a position of a row, of 1, 2, 4 or 8",              \
        (.threads = kNumThreads, .shared_bytes = sizeof(VerifyShared<1>)),                    \
        extern "C" __global__ void __launch_bounds__(kNumThreads, kBlocksAnSm) NAME(          \
            int* state, int64_t* tokens, int64_t* out_ids, int* num_accepted, int* flag,      \
            const int64_t* draft_ids, const void* target_logits, const float* draft_probs,    \
            const float* temperature, const int64_t* seed, const int64_t* offset,             \
            int64_t draft_ids_stride, int64_t logits_stride, int64_t draft_probs_stride,      \
            int num_drafts, int size, int dtype) {                                            \
            verify_draft_row<IS_PLAIN>(state, tokens, out_ids, num_accepted, flag, draft_ids, \
                                       target_logits, draft_probs, temperature, seed, offset, \
                                       draft_ids_stride, logits_stride, draft_probs_stride,   \
                                       num_drafts, size, dtype);                              \
        })

EXPORT_VERIFY_DRAFT(verify_draft, true)
EXPORT_VERIFY_DRAFT(verify_draft_scalar, false)

}  // namespace kernel_hub::sampling
