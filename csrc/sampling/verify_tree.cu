// A tree of drafts of a speculating model, verified: which path of it is kept, and the token after.
//
//   p_v = softmax(target_logits[v + 1] / temperature) behind draft v, v = -1: behind none
//   the children c of v in order: c is kept where u_c q_c(id_c) < p_v(id_c), q_c = draft_probs[c];
//   else p_v = max(p_v - q_c, 0), brought to the sum 1, and the next is tried
//   behind the last, where none is kept: a token from what is left of p_v
// Without draft_probs (each draft is certain of itself): x_v is drawn from p_v as sample draws it,
// by seed and offset + v + 1, and the first child that is x_v is kept. Where temperature is not
// above 0, x_v is the largest.
//
// A block of 512 threads a node of a row, the root's first: all at once, also those that no path
// reaches. Each leaves one number, a child (its complement) or a token; the block that ends last
// of a row goes down from the root. p and q are whole numbers of 2^-kFixBits (numbers.cuh), so
// that sums and with them draws are the same in any order; what is left of p is found anew for each
// element from the children tried before, which costs no memory. Shared memory: 11 KB.
// Source: Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based
// Speculative Inference and Verification", 2024, algorithm 2.

#include "kernel_hub/launch_facts.cuh"
#include "sampling/verify.cuh"

namespace kernel_hub::sampling {

// Beside those of kernel_hub/bounds.cuh, and numbered with them.
enum TreeOutside : int {
    kParentsOutside = 1 << 13,  // parents
};

constexpr int kMostDrafts = 128;

// The children of a node that were tried, and what brings what they left to the sum 1.
struct Tried {
    int child[kMostDrafts];
    double scale[kMostDrafts + 1];
};

// What is left of p after some children, as whole numbers.
struct Remainder {
    const Row& row;
    const Weigher& weigher;
    const Tried& tried;
    const float* draft_probs;  // of the row's first draft
    int64_t draft_probs_stride;

    __device__ __forceinline__ int64_t draft(int child, int i) const {
        return fixed_draft(draft_probs[child * draft_probs_stride + i]);
    }
    // Behind `num` children: before it is brought to the sum 1.
    __device__ __forceinline__ int64_t left(int i, int num) const {
        const float z = row.value(i);
        const uint64_t mass = z > -kInfinity ? weigher.mass(z) : 0;
        int64_t part = static_cast<int64_t>(mass);
#pragma unroll 1
        for (int n = 0; n < num; ++n) {
            part = max(scaled(part, n) - draft(tried.child[n], i), static_cast<int64_t>(0));
        }
        return part;
    }
    __device__ __forceinline__ int64_t scaled(int64_t part, int num) const {
        return __double2ll_rn(__dmul_rn(static_cast<double>(part), tried.scale[num]));
    }
};

// The first of the threads, in order, that has `is_one`; kMostDrafts where none does. By all.
__device__ __forceinline__ int first_with(bool is_one, Shared& s) {
    __syncthreads();
    const int own = is_one ? static_cast<int>(threadIdx.x) : kMostDrafts;
    return block_reduce(own, s.int_slots, [](int a, int b) { return min(a, b); });
}

// Sums up what is left behind `num` children, by all threads, and notes what scales it.
__device__ __forceinline__ uint64_t sum_left(const Remainder& remainder, int num, Tried& tried,
                                             Shared& s) {
    const Row& row = remainder.row;
    const int elements = elements_a_warp(row);
    const int begin = min(row.p.size, static_cast<int>(threadIdx.x / 32) * elements);
    const int end = min(row.p.size, begin + elements);
    uint64_t mass = 0;
#pragma unroll 1
    for (int i = begin + threadIdx.x % 32; i < end; i += 32) {
        mass += static_cast<uint64_t>(remainder.left(i, num));
    }
    const uint64_t total = block_sum(mass, s.mass_slots);
    block_sum(mass, s.warp_masses);
    if (threadIdx.x == 0 && total > 0) {
        tried.scale[num] = __ddiv_rn(kFixOne, static_cast<double>(total));
    }
    __syncthreads();
    return total;
}

__device__ __forceinline__ void verify_node(const SampleParams& p, const int64_t* drafts,
                                            const float* draft_probs, int64_t draft_probs_stride,
                                            int row_idx, int position, bool is_child, Tried& tried,
                                            Shared& s) {
    const Row row(p);
    const uint64_t seed = p.seed ? p.seed[row_idx] : 0;
    const uint64_t offset = (p.offset ? p.offset[row_idx] : 0) + position;
    Weigher weigher;
    uint64_t total;
    if (!weigh_position(row, row_idx, weigher, total, s)) {
        return;
    }
    const Remainder remainder = {row, weigher, tried, draft_probs, draft_probs_stride};
    if (threadIdx.x == 0) {
        tried.scale[0] = __ddiv_rn(kFixOne, static_cast<double>(total));
    }
    int num = 0, child = -1;
    bool is_exhausted = draft_probs == nullptr;
#pragma unroll 1
    while (!is_exhausted) {
        child = first_with(is_child && static_cast<int>(threadIdx.x) > child, s);
        if (child == kMostDrafts) {
            break;
        }
        const int id = static_cast<int>(drafts[child]);
        const double chance =
            __dmul_rn(static_cast<double>(random_bits(seed, offset, 1 + num) >> 11), 0x1p-53);
        if (__dmul_rn(chance, static_cast<double>(remainder.draft(child, id))) <
            static_cast<double>(remainder.scaled(remainder.left(id, num), num))) {
            if (threadIdx.x == 0) {
                p.out[blockIdx.x] = ~static_cast<int64_t>(child);
            }
            return;
        }
        if (threadIdx.x == 0) {
            tried.child[num] = child;
        }
        __syncthreads();
        ++num;
        do {
            total = sum_left(remainder, num, tried, s);
            is_exhausted = is_exhausted || total == 0;
            // Where nothing is left, by rounding alone, of p itself.
            num = is_exhausted ? 0 : num;
        } while (total == 0);
    }
    find_drawn(
        row, total, random_bits(seed, offset), s,
        [&](int i) { return static_cast<uint64_t>(remainder.left(i, num)); },
        [&](int i) { p.out[blockIdx.x] = i; });
}

__device__ __forceinline__ void verify_tree_row(const SampleParams& p, int64_t* out_ids,
                                                int* num_accepted, int* path, int* flag,
                                                const int64_t* draft_ids, const int* parents,
                                                const float* draft_probs, int64_t draft_ids_stride,
                                                int64_t parents_stride, int64_t draft_probs_stride,
                                                int num_drafts) {
    __shared__ Shared s;
    __shared__ Tried tried;
    __shared__ bool is_last;
    const int positions = num_drafts + 1;
    const int row_idx = blockIdx.x / positions, position = blockIdx.x % positions;
    const int node = position - 1, own = threadIdx.x;
    const int64_t* drafts = draft_ids + row_idx * draft_ids_stride;
    const int* row_parents = parents + row_idx * parents_stride;
    // This thread's draft, if it is one of the tree.
    int64_t own_id = -1;
    int own_parent = -2;
    int outside = 0;
    if (own < num_drafts) {
        own_id = drafts[own];
        const int parent = row_parents[own];
        const bool is_token = static_cast<uint64_t>(own_id) < static_cast<uint64_t>(p.size);
        const bool is_before = parent >= -1 && parent < own;
        outside =
            is_token ? (is_before ? 0 : kParentsOutside) : (own_id == -1 ? 0 : kDraftsOutside);
        own_parent = is_token && is_before ? parent : -2;
    }
    report(flag, position == 0 ? outside : 0);

    const bool is_node = first_with(own == node && own_parent > -2, s) < kMostDrafts;
    if (node < 0 || is_node) {
        const float* probs =
            draft_probs == nullptr
                ? nullptr
                : draft_probs + static_cast<int64_t>(row_idx) * num_drafts * draft_probs_stride;
        verify_node(p, drafts, probs, draft_probs_stride, row_idx, position, own_parent == node,
                    tried, s);
    }

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(p.state + row_idx, 1) == num_drafts;
    }
    __syncthreads();
    if (!is_last) {
        return;
    }
    __threadfence();
    const int64_t* found = p.out + static_cast<int64_t>(row_idx) * positions;
    int64_t* out = out_ids + static_cast<int64_t>(row_idx) * positions;
    int* nodes = path + static_cast<int64_t>(row_idx) * num_drafts;
    int at = -1, num = 0;
    int64_t token = -1;
#pragma unroll 1
    while (true) {
        token = __ldcg(reinterpret_cast<const long long*>(found + at + 1));
        const int child = token < 0 ? static_cast<int>(~token)
                                    : first_with(own_parent == at && own_id == token, s);
        if (child == kMostDrafts) {
            break;
        }
        if (own == child) {
            out[num] = own_id;
            nodes[num] = child;
        }
        at = child;
        ++num;
    }
#pragma unroll 1
    for (int i = num + own; i < positions; i += kNumThreads) {
        out[i] = i == num ? token : -1;
        if (i < num_drafts) {
            nodes[i] = -1;
        }
    }
    if (own == 0) {
        p.state[row_idx] = 0;
        num_accepted[row_idx] = num;
    }
}

#define EXPORT_VERIFY_TREE(NAME)                                                                   \
    DESCRIBED(                                                                                     \
        NAME, "x: nodes of rows, the root's first", (.threads = kNumThreads, .shared_bytes = 0),   \
        extern "C" __global__ void __launch_bounds__(kNumThreads, 1) NAME(                         \
            int* state, int64_t* tokens, int64_t* out_ids, int* num_accepted, int* path,           \
            int* flag, const int64_t* draft_ids, const int* parents, const void* target_logits,    \
            const float* draft_probs, const float* temperature, const int64_t* seed,               \
            const int64_t* offset, int64_t draft_ids_stride, int64_t parents_stride,               \
            int64_t logits_stride, int64_t draft_probs_stride, int num_drafts, int size,           \
            int dtype, int is_plain) {                                                             \
            const SampleParams p =                                                                 \
                position_params(state, tokens, target_logits, temperature, seed, offset,           \
                                logits_stride, size, dtype, is_plain);                             \
            verify_tree_row(p, out_ids, num_accepted, path, flag, draft_ids, parents, draft_probs, \
                            draft_ids_stride, parents_stride, draft_probs_stride, num_drafts);     \
        })

EXPORT_VERIFY_TREE(verify_tree)

}  // namespace kernel_hub::sampling
