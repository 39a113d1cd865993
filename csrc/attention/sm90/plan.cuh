// flash_attention_sm90.cu: its tile shapes, parameters and shared memory.
#pragma once

#include <type_traits>

#include "attention/lengths.cuh"
#include "attention/sm90/warpgroups.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/shared_reads.cuh"
#include "kernel_hub/sinks.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"

namespace kernel_hub::attention::sm90 {

enum class Mask { kFull, kCausal, kWindow };
// Of windows: which know softcap, and nothing else. Both are a third more code, and where three
// warpgroups have 128 keys a block (64 columns, bf16) no registers are left to tell tiny scores.
enum class Softcap { kMaybe, kNever, kAlways };

constexpr int kPanelColumns = 64;  // columns of a 128-byte row of shared memory
constexpr int kTileSlots = 4;
// Probabilities stay below 2^kRescaleBits, which fp16 holds.
constexpr float kRescaleBits = 8.f;

// kSplit: tiles of the heads of a group side by side, and pieces of tiles (flash_attention_split).
// kHeadDim: columns of Q and K; kHeadDimV: of V and the output.
template <typename T_, int kHeadDim_, int kConsumers_, int kBlockN_, Mask kMask_,
          bool kSplit_ = false, int kHeadDimV_ = kHeadDim_, Softcap kSoftcap_ = Softcap::kMaybe>
struct Config : Warpgroups<kConsumers_> {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr int kConsumers = kConsumers_;
    static constexpr int kBlockM = 64 * kConsumers;
    static constexpr int kBlockN = kBlockN_;
    static constexpr Mask kMask = kMask_;
    static constexpr bool kSplit = kSplit_;
    static constexpr bool kHasParts = kMask != Mask::kWindow;  // whose estimates are coarse
    static constexpr int kPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns;
    static constexpr int kVPanels = (kHeadDimV + kPanelColumns - 1) / kPanelColumns;
    static constexpr int kStages = 2;
    // Split: the next tile's queries come under the products of this one, where there is room.
    static constexpr int kQStages = kSplit && kConsumers <= 2 && kHeadDim <= 128 ? 2 : 1;
    static constexpr bool kHasCap = kMask == Mask::kWindow && kSoftcap_ != Softcap::kNever;
    static constexpr bool kHasPlain = kSoftcap_ != Softcap::kAlways;
    // Whether full attention is a window that is open on both sides: it has no body of its own.
    static constexpr bool kIsFullToo =
        !kSplit && kMask == Mask::kWindow && (kHeadDim == 96 || kHeadDim == 112);
    // Whether the largest score of a row is found by bits: where the tensor cores are bound least.
    static constexpr bool kByBits = kHeadDim <= 96 && (kMask != Mask::kWindow || !kHasCap) &&
                                    (kHeadDim > 64 || kMask == Mask::kCausal || kConsumers == 2);
    // Whether a warpgroup leaves out a tile's first block where it sees nothing of it; with blocks
    // wider than that it sees something of each.
    static constexpr bool kTrims =
        !kSplit && kMask == Mask::kCausal && (kConsumers > 2) == (kBlockN >= 128);
    // Whether registers are left to find small scores by bits.
    static constexpr bool kFindsSmall =
        !kSplit && (kConsumers == 2 || (kBlockN <= 96 && kHeadDim <= 64));
    // Whether scores that are tiny are told from others in masked blocks, and in shares: of bf16.
    static constexpr bool kFindsTiny = std::is_same_v<T, __nv_bfloat16> && kHeadDim != 192 &&
                                       (!kSplit || kHeadDim == 128 || kConsumers == 1);
    static constexpr int kQPanelBytes = 64 * 128;
    static constexpr int kQBytes = kPanels * kQPanelBytes;  // of one consumer
    // Split: the rows of all consumers lie together, as one copy brings them.
    static constexpr int kQPanelStride = kSplit ? kConsumers * kQPanelBytes : kQPanelBytes;
    static constexpr int kKVPanelBytes = kBlockN * 128;
    static constexpr int kKBytes = kPanels * kKVPanelBytes;
    static constexpr int kVBytes = kVPanels * kKVPanelBytes;
    static constexpr int kSharedBytes =
        kConsumers * kQStages * kQBytes + kStages * (kKBytes + kVBytes) + 1024;
    static_assert(kSharedBytes <= 227 * 1024, "shared memory of an SM");
    static_assert(kBlockN % 16 == 0 && kHeadDim % 16 == 0, "products are 16 deep");
    static_assert(kHeadDimV % 16 == 0, "the output is written 32 columns at a time");
    static_assert(kVPanels <= kPanels, "the loader counts the panels of K");
    static_assert(!kTrims || 64 * (kConsumers - 1) <= kBlockN, "at most one block is left out");
};

// Split only: the merge, of pieces of any size over blocks of any number of keys.
template <typename T_>
struct MergeConfig {
    using T = T_;
    static constexpr int kBlockN = 0;  // Packing::reciprocal_n
    // NOTE: the window's code is right for the others: without a left bound it is the same.
    static constexpr Mask kMask = Mask::kWindow;
    static constexpr bool kHasParts = true;
};

// Of what is not negative: a third less instructions than a signed one.
__device__ __forceinline__ int quotient(int value, int by) {
    return static_cast<int>(static_cast<unsigned>(value) / static_cast<unsigned>(by));
}

// Split only: how heads and tokens share the rows of a tile, and where pieces of tiles go.
struct Packing {
    int heads;         // row = token heads + head; divides the group, or there is one kv head
    int tokens;        // of a tile
    int reciprocal;    // ceil(2^16 / heads)
    int least_blocks;  // blocks of keys of a share, at least
    // Blocks of keys of a part, at most (line.cuh); 1: shares. Where it is not positive, lengths on
    // the device decide: parts, if they are no more than -longest steps longer than shares, and no
    // more of them than half of what those have above least_blocks; a step is one, and one more
    // for each kStep of a share, or kCoarseStep with Line::kTried steps more than that. More than
    // 1, but for kAsTheyCome, is a share at most where lengths are on the device, and the sequences
    // are sorted.
    int longest;
    float* partials;  // of each block, kSlots pieces
    int* line;        // where each sequence begins in the line, its end, `longest` as found
    // Whole tiles of sequences of one length: so many (sequence, kv head) pairs run through their
    // tiles together, the last ones of all of them first; 1: pair by pair; 0: the same, and blocks
    // draw what they take next.
    int together = 1;
    // The merge's: ceil(2^32 / (keys of a block / 16)), exact for blocks of up to 256.
    uint32_t reciprocal_n = 0;

    static constexpr int kSlots = 3;
    static constexpr int kAsTheyCome = 1 << 29;
    static constexpr int kStep = 64, kCoarseStep = 16;
    __device__ __forceinline__ int token_of(int row) const { return row * reciprocal >> 16; }
    // Tiles of the same tokens.
    __device__ __forceinline__ int packs(int group) const {
        return quotient(group + heads - 1, heads);
    }
};

struct Parameters {
    void* out;   // (batch, seqlen_q, heads, head_dim_v) by strides
    float* lse;  // or null
    int* flag;   // what tables led outside (bounds.cuh), or null
    const CUtensorMap *q, *k, *v;
    const int* cu_seqlens_q;   // (batch + 1) or null
    const int* cu_seqlens_k;   // (batch + 1) or null
    const int* cache_seqlens;  // (batch) or null
    const int* block_table;    // (batch, pages of a sequence) or null: K and V are pages
    const void* sinks;         // (num_heads), or null
    int* tile_counter;         // {next tile, blocks that are done}, zeros
    int64_t out_batch_stride, out_token_stride, out_head_stride, lse_batch_stride, lse_head_stride;
    int64_t block_table_stride;
    int batch_size, num_heads, num_kv_heads;
    int head_dim_v;          // columns of out: the tensor maps know those of q, k and v
    int seqlen_q, seqlen_k;  // with cu_seqlens: of the longest; seqlen_k bounds cache_seqlens
    int total_q, total_k;    // rows of q and k that cu_seqlens tell apart
    int num_pages;
    int page_size, box_rows;  // keys of a page; those that one copy brings, which divide it
    int window_left, window_right;
    // This many (batch, head) pairs run through their tiles together; negative, all of them: tiles
    // are no more than two a block, and dealt.
    int heads_per_group;
    int has_foreign_rows;  // keys past a sequence's end belong to something else
    int sink_type;         // ElementType
    // scale_log2: scores are multiplied by it before exp2; with softcap it is softcap, without it
    // softmax_scale. cap_scale_log2: 2 softmax_scale / softcap, or 0 without softcap. Both are
    // times log2(e).
    float scale_log2, cap_scale_log2;
    // scale_log2 tanh(cap_scale_log2 score / (2 log2(e))) for |score| <= small_score: a polynomial
    // of odd powers, from the first on.
    float small_score;
    float tanh_terms[4];
    Packing packing;
};

// The same as parameters of a kernel, and as they are handed on: what those of whole tiles and of
// shares have in common.
// clang-format off: it would give each of them a line.
#define ATTENTION_INPUTS                                                                           \
    const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,                  \
    const __grid_constant__ CUtensorMap v, const int* cu_seqlens_q, const int* cu_seqlens_k,       \
    const int* cache_seqlens, const int* block_table, const void* sinks
#define ATTENTION_SHAPE                                                                            \
    int64_t out_batch_stride, int64_t out_token_stride, int64_t out_head_stride,                   \
    int64_t lse_batch_stride, int64_t lse_head_stride, int64_t block_table_stride, int batch_size, \
    int num_heads, int num_kv_heads, int head_dim_v, int seqlen_q, int seqlen_k, int total_q,      \
    int total_k
#define ATTENTION_SCORES                                                                           \
    int has_foreign_rows, int sink_type, float scale_log2, float cap_scale_log2,                   \
    float small_score, float tanh_1, float tanh_3, float tanh_5, float tanh_7
#define ATTENTION_INPUT_ARGUMENTS                                                                  \
    .out = out, .lse = lse, .flag = flag, .q = &q, .k = &k, .v = &v, .cu_seqlens_q = cu_seqlens_q, \
    .cu_seqlens_k = cu_seqlens_k, .cache_seqlens = cache_seqlens, .block_table = block_table,      \
    .sinks = sinks
#define ATTENTION_SHAPE_ARGUMENTS                                                                  \
    .out_batch_stride = out_batch_stride, .out_token_stride = out_token_stride,                    \
    .out_head_stride = out_head_stride, .lse_batch_stride = lse_batch_stride,                      \
    .lse_head_stride = lse_head_stride, .block_table_stride = block_table_stride,                  \
    .batch_size = batch_size, .num_heads = num_heads, .num_kv_heads = num_kv_heads,                \
    .head_dim_v = head_dim_v, .seqlen_q = seqlen_q, .seqlen_k = seqlen_k, .total_q = total_q,      \
    .total_k = total_k, .num_pages = num_pages, .page_size = page_size, .box_rows = box_rows,      \
    .window_left = window_left, .window_right = window_right
#define ATTENTION_SCORE_ARGUMENTS                                                                  \
    .has_foreign_rows = has_foreign_rows, .sink_type = sink_type, .scale_log2 = scale_log2,        \
    .cap_scale_log2 = cap_scale_log2, .small_score = small_score,                                  \
    .tanh_terms = {tanh_1, tanh_3, tanh_5, tanh_7}
// clang-format on

// One tile, as the producer tells the consumers: 32 bytes of shared memory.
struct Tile {
    int row_begin;  // -1: there are no more
    int head, batch, q_begin;
    int seqlen_q, seqlen_k, block_begin, block_end;  // blocks of kBlockN keys

    __device__ __forceinline__ bool is_valid() const { return row_begin >= 0; }
    __device__ __forceinline__ bool is_empty() const { return block_end <= block_begin; }
    __device__ __forceinline__ int offset() const { return seqlen_k - seqlen_q; }
};

// The sequences with keys and queries, the longest first, where their lengths are on the device.
// Those of a group are alike in keys and tiles, and run through these together.
struct Order {
    static constexpr int kMost = 256;      // with more of them they stay in the order they have
    static constexpr int kMostAlike = 16;  // of a group
    // How many tiles there are up to here; but for a group's last sequence, up to the group.
    alignas(16) int end[kMost];
    unsigned char batch[kMost];
    int count;  // of all tiles; in the order they have: of those before the sequence at hand
};

// Split only: the work of a launch is a line of units, kBlockN keys of a tile each (line.cuh).
struct Line {
    static constexpr int kMost = 256;  // sequences whose lengths are on the device
    static constexpr int kTried = 8;   // lengths of parts, at most
    // Of each sequence's units, then their number; one alone: the units of each.
    alignas(16) int begin[kMost + 1];
    unsigned char batch[kMost];  // the sequences in their order
    int longest;                 // Packing's, found
    int sums[kTried + 1];        // while it is
};

// How many of so many values, 16-byte aligned and filled up with -1, are more than the own-th, or
// as much and before it.
__device__ __forceinline__ int rank_among(const int* values, int count, int own, int value) {
    int rank = 0;
    // Four at a time: each read waits for the one before it.
#pragma unroll 1
    for (int first = 0; first < count; first += 4) {
        const int4 four = *reinterpret_cast<const int4*>(values + first);
        const int others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            rank += others[i] > value || (others[i] == value && first + i < own);
        }
    }
    return rank;
}

// `value`, with its origin hidden: quotients by it are computed where they are used, not prepared
// before the loop and then held in registers, of which the loading warp has none to spare.
__device__ __forceinline__ int fresh(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

// What the roles share.
template <class C>
struct Shared {
    uint32_t q, k, v;  // addresses
    uint32_t barriers;
    Tile* tiles;
    uint32_t tiles_address;
    Order* order;
    const Line* line;

    static constexpr int kQFull = 0;
    static constexpr int kQEmpty = kQFull + C::kQStages * C::kConsumers;
    static constexpr int kKFull = kQEmpty + C::kQStages * C::kConsumers;
    static constexpr int kKEmpty = kKFull + C::kStages;
    static constexpr int kVFull = kKEmpty + C::kStages;
    static constexpr int kVEmpty = kVFull + C::kStages;
    static constexpr int kTileFull = kVEmpty + C::kStages;
    static constexpr int kTileEmpty = kTileFull + kTileSlots;
    static constexpr int kAsked = kTileEmpty + kTileSlots;  // split
    static constexpr int kCount = kAsked + C::kSplit;

    __device__ __forceinline__ Tile read_tile(int slot) const {
        const int4 a = ld_shared_volatile(tiles_address + slot * sizeof(Tile));
        const int4 b = ld_shared_volatile(tiles_address + slot * sizeof(Tile) + 16);
        return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    }
    __device__ __forceinline__ int read_head(int slot) const {
        return ld_shared_volatile(tiles_address + slot * sizeof(Tile)).y;
    }
    __device__ __forceinline__ uint32_t barrier(int i) const { return barriers + 8 * i; }
    __device__ __forceinline__ uint32_t q_full(int stage, int consumer) const {
        return barrier(kQFull + stage * C::kConsumers + consumer);
    }
    __device__ __forceinline__ uint32_t q_empty(int stage, int consumer) const {
        return barrier(kQEmpty + stage * C::kConsumers + consumer);
    }
    __device__ __forceinline__ uint32_t q_tile(int stage, int consumer) const {
        return C::kSplit ? q + consumer * C::kQPanelBytes
                         : q + (stage * C::kConsumers + consumer) * C::kQBytes;
    }
    __device__ __forceinline__ uint32_t k_full(int stage) const { return barrier(kKFull + stage); }
    __device__ __forceinline__ uint32_t k_empty(int stage) const {
        return barrier(kKEmpty + stage);
    }
    __device__ __forceinline__ uint32_t v_full(int stage) const { return barrier(kVFull + stage); }
    __device__ __forceinline__ uint32_t v_empty(int stage) const {
        return barrier(kVEmpty + stage);
    }
    __device__ __forceinline__ uint32_t tile_full(int slot) const {
        return barrier(kTileFull + slot);
    }
    __device__ __forceinline__ uint32_t tile_empty(int slot) const {
        return barrier(kTileEmpty + slot);
    }
    __device__ __forceinline__ uint32_t asked() const { return barrier(kAsked); }
};

}  // namespace kernel_hub::attention::sm90
