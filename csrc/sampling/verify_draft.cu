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
// A block of 512 threads a position of a row: all positions at once, also those after the first
// that is not kept, which nobody can know. Each leaves one token, the draft where that is kept; the
// block that ends last of a row compares tokens and drafts from the first on.
// Probabilities are whole numbers (numbers.cuh): p by sample's masses, brought to 2^kFixBits in all
// where they meet q, so that sums and with them draws are the same in any order.
// Shared memory: 9 KB, of sample's candidates.
// Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023; Chen
// et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023.

#include "kernel_hub/launch_facts.cuh"
#include "sampling/verify.cuh"

namespace kernel_hub::sampling {

// p and q of a position as whole numbers of 2^-kFixBits.
struct Chances {
    const Row& row;
    const Weigher& weigher;
    const float* draft_probs;  // (size)
    double scale;

    __device__ __forceinline__ int64_t target(int i) const {
        const float z = row.value(i);
        const uint64_t mass = z > -kInfinity ? weigher.mass(z) : 0;
        return __double2ll_rn(__dmul_rn(static_cast<double>(mass), scale));
    }
    __device__ __forceinline__ int64_t draft(int i) const { return fixed_draft(draft_probs[i]); }
    __device__ __forceinline__ uint64_t rest(int i) const {
        const int64_t more = target(i) - draft(i);
        return more > 0 ? more : 0;
    }
};

// Draws from what p has more than q, by all threads; whether there is any.
__device__ __forceinline__ bool draw_rest(const Chances& chances, uint64_t bits, Shared& s) {
    const Row& row = chances.row;
    const int elements = elements_a_warp(row);
    const int begin = min(row.p.size, static_cast<int>(threadIdx.x / 32) * elements);
    const int end = min(row.p.size, begin + elements);
    uint64_t mass = 0;
#pragma unroll 4
    for (int i = begin + threadIdx.x % 32; i < end; i += 32) {
        mass += chances.rest(i);
    }
    const uint64_t total = block_sum(mass, s.mass_slots);
    if (total == 0) {
        return false;
    }
    block_sum(mass, s.warp_masses);
    find_drawn(
        row, total, bits, s, [&](int i) { return chances.rest(i); },
        [&](int i) { row.p.out[blockIdx.x] = i; });
    return true;
}

__device__ __forceinline__ void verify_draft_row(const SampleParams& p, int64_t* out_ids,
                                                 int* num_accepted, int* flag,
                                                 const int64_t* draft_ids, const float* draft_probs,
                                                 int64_t draft_ids_stride,
                                                 int64_t draft_probs_stride, int num_drafts) {
    __shared__ Shared s;
    const int positions = num_drafts + 1;
    const int row_idx = blockIdx.x / positions, position = blockIdx.x % positions;
    const int64_t* drafts = draft_ids + row_idx * draft_ids_stride;
    int own_drafts = 0;
#pragma unroll 1
    while (own_drafts < num_drafts &&
           static_cast<uint64_t>(drafts[own_drafts]) < static_cast<uint64_t>(p.size)) {
        ++own_drafts;
    }
    const bool is_outside =
        position == 0 && threadIdx.x == 0 && own_drafts < num_drafts && drafts[own_drafts] != -1;
    report(flag, is_outside ? kDraftsOutside : 0);

    if (position <= own_drafts) {
        const Row row(p);
        const uint64_t seed = p.seed ? p.seed[row_idx] : 0;
        const uint64_t offset = (p.offset ? p.offset[row_idx] : 0) + position;
        Weigher weigher;
        uint64_t total;
        if (weigh_position(row, row_idx, weigher, total, s)) {
            bool is_drawn = draft_probs == nullptr || position == own_drafts;
            if (!is_drawn) {
                const int id = static_cast<int>(drafts[position]);
                const float* probs =
                    draft_probs +
                    (static_cast<int64_t>(row_idx) * num_drafts + position) * draft_probs_stride;
                const Chances chances = {row, weigher, probs,
                                         __ddiv_rn(kFixOne, static_cast<double>(total))};
                const double chance =
                    __dmul_rn(static_cast<double>(random_bits(seed, offset, 1) >> 11), 0x1p-53);
                if (__dmul_rn(chance, static_cast<double>(chances.draft(id))) <
                    static_cast<double>(chances.target(id))) {
                    if (threadIdx.x == 0) {
                        p.out[blockIdx.x] = id;
                    }
                } else {
                    is_drawn = !draw_rest(chances, random_bits(seed, offset), s);
                }
            }
            if (is_drawn) {
                draw_in_row(row, weigher, -kInfinity, total, random_bits(seed, offset), s);
            }
        }
    }

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(p.state + row_idx, 1) == num_drafts) {
        p.state[row_idx] = 0;
        __threadfence();
        const int64_t* tokens = p.out + static_cast<int64_t>(row_idx) * positions;
        int64_t* out = out_ids + static_cast<int64_t>(row_idx) * positions;
        int num = 0;
#pragma unroll 1
        for (int i = 0; i < positions; ++i) {
            const int64_t token =
                i <= own_drafts ? __ldcg(reinterpret_cast<const long long*>(tokens + i)) : -1;
            out[i] = i <= num ? token : -1;
            num += i == num && i < own_drafts && token == drafts[i];
        }
        num_accepted[row_idx] = num;
    }
}

#define EXPORT_VERIFY_DRAFT(NAME)                                                          \
    DESCRIBED(                                                                             \
        NAME, "x: positions of rows", (.threads = kNumThreads, .shared_bytes = 0),         \
        extern "C" __global__ void __launch_bounds__(kNumThreads, 1) NAME(                 \
            int* state, int64_t* tokens, int64_t* out_ids, int* num_accepted, int* flag,   \
            const int64_t* draft_ids, const void* target_logits, const float* draft_probs, \
            const float* temperature, const int64_t* seed, const int64_t* offset,          \
            int64_t draft_ids_stride, int64_t logits_stride, int64_t draft_probs_stride,   \
            int num_drafts, int size, int dtype, int is_plain) {                           \
            const SampleParams p =                                                         \
                position_params(state, tokens, target_logits, temperature, seed, offset,   \
                                logits_stride, size, dtype, is_plain);                     \
            verify_draft_row(p, out_ids, num_accepted, flag, draft_ids, draft_probs,       \
                             draft_ids_stride, draft_probs_stride, num_drafts);            \
        })

EXPORT_VERIFY_DRAFT(verify_draft)

}  // namespace kernel_hub::sampling
