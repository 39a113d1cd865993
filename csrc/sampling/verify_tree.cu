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
// A cluster of 1 to 8 blocks of 256 threads a node of a row (verify.cuh; one before compute
// capability 9.0), the root's first: all at once, also those that no path reaches. Each leaves one
// number, a child (its complement) or a token; the block that ends last of a row goes down from the
// root. p and q are whole numbers of 2^-kFixBits (numbers.cuh), so that sums and with them draws
// are the same in any order; what is left of p is found anew for each element from the children
// tried before, which costs no memory. Variants: whole, aligned fours of logits and draft_probs;
// _scalar any size and alignment. Shared memory: 4 KB. Source: Miao et al., "SpecInfer:
// Accelerating Large Language Model Serving with Tree-based Speculative Inference and
// Verification", 2024, algorithm 2.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs the code of sm80

#include "kernel_hub/launch_facts.cuh"
#include "sampling/verify.cuh"

namespace kernel_hub::sampling {

// Beside those of kernel_hub/bounds.cuh, and numbered with them.
enum TreeOutside : int {
    kParentsOutside = 1 << 13,  // parents
};

constexpr int kMostDrafts = 128;
static_assert(kMostDrafts <= kNumThreads && kMostDrafts % 32 == 0, "a thread looks at each draft");

struct TreeShared {
    VerifyShared<kMostDrafts> verifying;
    int64_t found[kMostDrafts + 1];       // what the nodes of a row have left
    unsigned children[kMostDrafts / 32];  // of the block's node: a bit a draft
};

// The row of drafts, as far as a tree is made of them.
struct Tree {
    const int64_t* drafts;
    const int* parents;
    int num_drafts, size;

    // The parent of a draft that is one of the tree; -2 of others.
    __device__ __forceinline__ int parent(int draft, int& outside) const {
        const int64_t id = drafts[draft];
        const int parent = parents[draft];
        const bool is_token = static_cast<uint64_t>(id) < static_cast<uint64_t>(size);
        const bool is_before = parent >= -1 && parent < draft;
        outside = is_token ? (is_before ? 0 : kParentsOutside) : (id == -1 ? 0 : kDraftsOutside);
        return is_token && is_before ? parent : -2;
    }
};

// Goes down from the root by what the nodes have left; how many drafts are kept. By one warp.
__device__ __forceinline__ int go_down(int64_t* out, int* nodes, const int64_t* found,
                                       const Tree& tree) {
    constexpr int kEach = kMostDrafts / 32;
    const int lane_idx = threadIdx.x % 32;
    int64_t ids[kEach];
    int parents[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int draft = i * 32 + lane_idx;
        int outside;
        ids[i] = draft < tree.num_drafts ? tree.drafts[draft] : -1;
        parents[i] = draft < tree.num_drafts ? tree.parent(draft, outside) : -2;
    }
    int at = -1, num = 0;
    int64_t token;
#pragma unroll 1
    while (true) {
        token = found[at + 1];
        int child = kMostDrafts;
        if (token < 0) {
            child = static_cast<int>(~token);
        } else {
#pragma unroll
            for (int i = kEach - 1; i >= 0; --i) {
                const unsigned here = __ballot_sync(kAllLanes, parents[i] == at && ids[i] == token);
                child = here != 0 ? i * 32 + __ffs(here) - 1 : child;
            }
        }
        if (child == kMostDrafts) {
            break;
        }
        if (lane_idx == 0) {
            out[num] = tree.drafts[child];
            nodes[num] = child;
        }
        at = child;
        ++num;
    }
#pragma unroll 1
    for (int i = num + lane_idx; i <= tree.num_drafts; i += 32) {
        out[i] = i == num ? token : -1;
        if (i < tree.num_drafts) {
            nodes[i] = -1;
        }
    }
    return num;
}

template <bool kIsPlain>
__device__ __forceinline__ void verify_tree_row(
    int* state, int64_t* tokens, int64_t* out_ids, int* num_accepted, int* path, int* flag,
    const int64_t* draft_ids, const int* parents, const void* target_logits,
    const float* draft_probs, const float* temperature, const int64_t* seed, const int64_t* offset,
    int64_t draft_ids_stride, int64_t parents_stride, int64_t logits_stride,
    int64_t draft_probs_stride, int num_drafts, int size, int dtype) {
    follow_launch_before();
    auto& s = *reinterpret_cast<TreeShared*>(dynamic_shared());
    Team team(s.verifying.words);
    const int place = blockIdx.x / team.size, positions = num_drafts + 1;
    const int row_idx = place / positions, position = place % positions;
    const Position<kIsPlain> x = {
        static_cast<const char*>(target_logits) + place * logits_stride * (dtype == kFp32 ? 4 : 2),
        draft_probs == nullptr
            ? nullptr
            : draft_probs + static_cast<int64_t>(row_idx) * num_drafts * draft_probs_stride,
        draft_probs_stride, size, dtype};
    fetch_share(x, team);
    const int node = position - 1, own = threadIdx.x;
    const Tree tree = {draft_ids + row_idx * draft_ids_stride, parents + row_idx * parents_stride,
                       num_drafts, size};
    int own_parent = -2, outside = 0;
    if (own < num_drafts) {
        own_parent = tree.parent(own, outside);
    }
    report(flag, position == 0 && team.rank == 0 ? outside : 0);
    const unsigned are_children = __ballot_sync(kAllLanes, own_parent == node);
    if (own % 32 == 0 && own < kMostDrafts) {
        s.children[own / 32] = are_children;
    }
    __syncthreads();

    bool leaves_token = team.rank == 0;
    if (node < 0 || tree.parent(node, outside) > -2) {
        if (own_parent == node && x.draft_probs != nullptr) {
            prefetch_l2(x.draft_probs + own * draft_probs_stride + tree.drafts[own]);
        }
        leaves_token = verify(
            x, temperature ? temperature[row_idx] : 1.0f, seed ? seed[row_idx] : 0,
            (offset ? offset[row_idx] : 0) + position, tokens + place, team, s.verifying,
            [&](int child) {
                unsigned more = ~0u << ((child + 1) % 32);
#pragma unroll 1
                for (int word = (child + 1) / 32; word < kMostDrafts / 32; ++word) {
                    more &= s.children[word];
                    if (more != 0) {
                        return word * 32 + __ffs(more) - 1;
                    }
                    more = ~0u;
                }
                return -1;
            },
            [&](int child) { return static_cast<int>(tree.drafts[child]); },
            [](int child) { return ~static_cast<int64_t>(child); });
    } else {
        team.arrive_last();
    }
    if (leaves_token) {
        __syncthreads();
        if (own < 32 && is_last_of_row(state + row_idx, positions)) {
            const int64_t at = static_cast<int64_t>(row_idx) * positions;
            for (int i = own; i < positions; i += 32) {
                s.found[i] = read_token(tokens + at + i);
            }
            __syncwarp();
            const int num = go_down(out_ids + at, path + at - row_idx, s.found, tree);
            if (own == 0) {
                num_accepted[row_idx] = num;
            }
        }
    }
    team.wait_last();
}

#define EXPORT_VERIFY_TREE(NAME, IS_PLAIN)                                                         \
    DESCRIBED(                                                                                     \
        NAME, "x: blocks of clusters, one a node of a row, the root's first, of 1, 2, 4 or 8",     \
        (.threads = kNumThreads, .shared_bytes = sizeof(TreeShared)),                              \
        extern "C" __global__ void __launch_bounds__(kNumThreads, kBlocksAnSm) NAME(               \
            int* state, int64_t* tokens, int64_t* out_ids, int* num_accepted, int* path,           \
            int* flag, const int64_t* draft_ids, const int* parents, const void* target_logits,    \
            const float* draft_probs, const float* temperature, const int64_t* seed,               \
            const int64_t* offset, int64_t draft_ids_stride, int64_t parents_stride,               \
            int64_t logits_stride, int64_t draft_probs_stride, int num_drafts, int size,           \
            int dtype) {                                                                           \
            verify_tree_row<IS_PLAIN>(state, tokens, out_ids, num_accepted, path, flag, draft_ids, \
                                      parents, target_logits, draft_probs, temperature, seed,      \
                                      offset, draft_ids_stride, parents_stride, logits_stride,     \
                                      draft_probs_stride, num_drafts, size, dtype);                \
        })

EXPORT_VERIFY_TREE(verify_tree, true)
EXPORT_VERIFY_TREE(verify_tree_scalar, false)

}  // namespace kernel_hub::sampling
