// flash_attention_fp8_sm90.cu: tile shapes, parameters, shared memory, and which tile is which.
#pragma once

#include "attention/lengths.cuh"
#include "attention/sm90/warpgroups.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"

namespace kernel_hub::attention::fp8 {

using sm90::facts_of, sm90::Place;

// kAny: which of the two it is, the launch says.
enum class Mask { kFull, kCausal, kAny };
// Where K and V have scales of their own: each head, or each kScaleTokens tokens of it.
enum class Scales { kHeads, kBlocks };

constexpr int kScaleTokens = 128;
constexpr int kTileSlots = 4;
constexpr int kTransposers = 3;  // warps
// Probabilities are stored as 2^kProbBits of what they are: e4m3 ends at 448 and has its full
// precision down to 2^-6.
// NOTE: a row's largest one is then a power of two, which e4m3 holds exactly: where one key
// outweighs the others, so is the output. A row that is rescaled only where its maximum has grown
// by a factor of four is 1 to 2 % faster and loses that.
constexpr float kProbBits = 8.f;
// Masked scores are -inf times the scale, which must be a normal number; a scale of 0 would make
// them nan.
constexpr float kLeastScale = 1e-30f;

template <int kHeadDim_, int kConsumers_, int kBlockN_, Mask kMask_, Scales kScales_>
struct Config : sm90::Warpgroups<kConsumers_> {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kConsumers = kConsumers_;
    static constexpr int kBlockM = 64 * kConsumers;
    static constexpr int kBlockN = kBlockN_;
    static constexpr Mask kMask = kMask_;
    static constexpr Scales kScales = kScales_;
    static constexpr int kStages = 2;
    // Bytes, and e4m3 columns, of a row of shared memory, and their swizzle: 64 where 128 would
    // leave much of a row empty, which is written all the same.
    static constexpr int kPanelColumns = kHeadDim == 192 ? 64 : 128;
    static constexpr int kPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns;
    static constexpr int kQPanelBytes = 64 * kPanelColumns;
    static constexpr int kQBytes = kPanels * kQPanelBytes;  // of one consumer
    static constexpr int kKVPanelBytes = kBlockN * kPanelColumns;
    static constexpr int kKVBytes = kPanels * kKVPanelBytes;
    // V transposed: kHeadDim rows, panels of so many keys.
    static constexpr int kPanelKeys = kHeadDim > 128 && kBlockN % 128 == 32 ? 64 : 128;
    static constexpr int kVtPanelBytes = kHeadDim * kPanelKeys;
    static constexpr int kVtBytes = (kBlockN + kPanelKeys - 1) / kPanelKeys * kVtPanelBytes;
    static constexpr int kSharedBytes =
        kConsumers * kQBytes + kStages * (2 * kKVBytes + kVtBytes) + 1024;
    // Whether heads share tiles: of some widths it would cost registers, and hardly any heads of
    // them share keys.
    static constexpr bool kPacks = kHeadDim != 96 && kHeadDim != 160 && kHeadDim != 192 &&
                                   kHeadDim != 224 && kScales == Scales::kHeads;
    // Q as fragments for a tile's duration, or read again from shared memory by every product. With
    // more than 128 keys a block it is slower: a warp waits while a product takes its fragments.
    static constexpr bool kQInRegisters = kHeadDim == 128 && kConsumers == 2 && kBlockN == 128;
    static_assert(kSharedBytes <= 226 * 1024, "shared memory of an SM, less what is not dynamic");
    static_assert(kBlockN % 32 == 0 && kHeadDim % 32 == 0, "products are 32 deep");
    static_assert(kScales == Scales::kHeads || kScaleTokens % kBlockN == 0, "one scale a block");
};

// Scales may be null (1); strides of 0 where one holds for all.
struct Parameters {
    void* out;   // fp16 or bf16, (batch, seqlen_q, heads, head_dim) by strides
    float* lse;  // or null
    int* flag;   // what tables led outside (bounds.cuh), or null
    const CUtensorMap *q, *k, *v;
    const float *q_scale, *k_scale, *v_scale;  // (batch, heads, blocks) by strides
    const int* cu_seqlens_q;                   // (batch + 1) or null
    const int* cu_seqlens_k;                   // (batch + 1) or null
    const int* cache_seqlens;                  // (batch) or null
    int* tile_counter;                         // {next tile, blocks that are done}, zeros
    int64_t out_batch_stride, out_token_stride, out_head_stride, lse_batch_stride, lse_head_stride;
    int64_t q_scale_batch_stride, q_scale_head_stride, q_scale_block_stride;
    int64_t k_scale_batch_stride, k_scale_head_stride, k_scale_block_stride;
    int64_t v_scale_batch_stride, v_scale_head_stride, v_scale_block_stride;
    int batch_size, num_packs, head_dim;  // num_packs: of a sequence (see pack_heads)
    int seqlen_q, seqlen_k;  // with cu_seqlens: of the longest; they bound the blocks with scales
    int total_q, total_k;    // rows of q and k that cu_seqlens tell apart
    int heads_per_kv, heads_per_q_scale;  // query heads that share keys, that share a q_scale
    int packs_per_group;   // this many (batch, pack) pairs run through their tiles together
    int has_foreign_rows;  // keys past a sequence's end belong to something else
    int is_out_fp16;
    float softmax_scale;
    int keys_ahead;  // Mask::kAny: that a query sees behind its own place; causal: 0
    // Of a consumer's 64 rows: row = token pack_heads + head, of heads side by side of the
    // heads_alike that share keys and a q_scale, in packs_alike packs. The last one ends where
    // these do: heads that the one before it has too are written twice, with the same bits.
    // pack_reciprocal: ceil(2^16 / pack_heads).
    int pack_heads, pack_tokens, pack_reciprocal, heads_alike, packs_alike;
    int tiles_a_pack;  // of the longest sequence
};

// Parameters', where heads share tiles.
template <class C>
__device__ __forceinline__ int pack_heads(const Parameters& p) {
    return C::kPacks ? p.pack_heads : 1;
}
template <class C>
__device__ __forceinline__ int pack_tokens(const Parameters& p) {
    return C::kPacks ? p.pack_tokens : 64;
}
template <class C>
__device__ __forceinline__ int pack_reciprocal(const Parameters& p) {
    return C::kPacks ? p.pack_reciprocal : 1 << 16;
}
// The first head of a sequence's pack.
template <class C>
__device__ __forceinline__ int first_head(const Parameters& p, int pack) {
    if constexpr (!C::kPacks) {
        return pack;
    } else {
        const int alike = pack / p.packs_alike;
        const int rest = pack - alike * p.packs_alike;
        return alike * p.heads_alike + min(rest * p.pack_heads, p.heads_alike - p.pack_heads);
    }
}

// One tile, as the loader tells the others: 48 bytes of shared memory.
struct Tile {
    int row_begin;                                   // the first query; -1: there are no more
    int head, batch, q_begin;                        // head: the first of its pack
    int seqlen_q, seqlen_k, block_begin, block_end;  // blocks of kBlockN keys
    float score_scale[3];  // of each consumer's rows: from q k^T to powers of two, less k's blocks
    float value_scale;     // 1 with Scales::kBlocks

    __device__ __forceinline__ bool is_valid() const { return row_begin >= 0; }
    __device__ __forceinline__ bool is_empty() const { return block_end <= block_begin; }
    __device__ __forceinline__ int offset() const { return seqlen_k - seqlen_q; }
};

// Scales of one block of keys.
struct BlockScales {
    float k, v;
};

// What the roles share.
template <class C>
struct Shared {
    uint32_t q, k, v, vt;  // addresses
    uint32_t barriers;
    uint32_t tiles;         // Tile[kTileSlots]
    uint32_t block_scales;  // BlockScales[kStages], of K's stages

    static constexpr int kQFull = 0;
    static constexpr int kQEmpty = kQFull + C::kConsumers;
    static constexpr int kKFull = kQEmpty + C::kConsumers;
    static constexpr int kKEmpty = kKFull + C::kStages;
    static constexpr int kVFull = kKEmpty + C::kStages;
    static constexpr int kVEmpty = kVFull + C::kStages;
    static constexpr int kVtFull = kVEmpty + C::kStages;
    static constexpr int kVtEmpty = kVtFull + C::kStages;
    static constexpr int kTileFull = kVtEmpty + C::kStages;
    static constexpr int kTileEmpty = kTileFull + kTileSlots;
    static constexpr int kCount = kTileEmpty + kTileSlots;

    __device__ __forceinline__ uint32_t barrier(int i) const { return barriers + 8 * i; }
    __device__ __forceinline__ uint32_t q_full(int consumer) const {
        return barrier(kQFull + consumer);
    }
    __device__ __forceinline__ uint32_t q_empty(int consumer) const {
        return barrier(kQEmpty + consumer);
    }
    __device__ __forceinline__ uint32_t k_full(int stage) const { return barrier(kKFull + stage); }
    __device__ __forceinline__ uint32_t k_empty(int stage) const {
        return barrier(kKEmpty + stage);
    }
    __device__ __forceinline__ uint32_t v_full(int stage) const { return barrier(kVFull + stage); }
    __device__ __forceinline__ uint32_t v_empty(int stage) const {
        return barrier(kVEmpty + stage);
    }
    __device__ __forceinline__ uint32_t vt_full(int stage) const {
        return barrier(kVtFull + stage);
    }
    __device__ __forceinline__ uint32_t vt_empty(int stage) const {
        return barrier(kVtEmpty + stage);
    }
    __device__ __forceinline__ uint32_t tile_full(int slot) const {
        return barrier(kTileFull + slot);
    }
    __device__ __forceinline__ uint32_t tile_empty(int slot) const {
        return barrier(kTileEmpty + slot);
    }

    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < C::kConsumers; ++i) {
            mbarrier_init(q_full(i), 1);
            mbarrier_init(q_empty(i), C::kQInRegisters ? 4 : 1);
        }
        for (int i = 0; i < C::kStages; ++i) {
            mbarrier_init(k_full(i), 1);
            mbarrier_init(k_empty(i), C::kConsumers);
            mbarrier_init(v_full(i), 1);
            mbarrier_init(v_empty(i), kTransposers);
            mbarrier_init(vt_full(i), kTransposers);
            mbarrier_init(vt_empty(i), C::kConsumers);
        }
        for (int i = 0; i < kTileSlots; ++i) {
            mbarrier_init(tile_full(i), 1);
            mbarrier_init(tile_empty(i), 4 * C::kConsumers + kTransposers);
        }
        fence_mbarrier_init();
    }
};

__device__ __forceinline__ uint4 ld_shared_16(uint32_t address) {
    uint4 v;
    asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ void st_shared_16(uint32_t address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

// Says which tables of a sequence led outside.
__device__ __forceinline__ void report_lengths(const Parameters& p, int batch) {
    const RowRange queries = find_queries(p, batch), keys = find_keys(p, batch);
    const bool is_outside_q = queries.is_outside || queries.count > p.seqlen_q;
    const bool is_outside_k = keys.is_outside || keys.count > p.seqlen_k;
    const int table_k = p.cache_seqlens ? kLengthsOutside : kKeysOutside;
    report(p.flag, (is_outside_q ? kQueriesOutside : 0) | (is_outside_k ? table_k : 0));
}

// The last key that the first query of a tile's sequence sees, where all were there.
template <class C>
__device__ __forceinline__ int diagonal_of(const Parameters& p, const Tile& tile) {
    return tile.offset() + (C::kMask == Mask::kAny ? p.keys_ahead : 0);
}

// Tile number `index` of the schedule, without its scales; row_begin is beyond seqlen_q where the
// sequence is shorter than the longest. Causal: within a group of packs whose keys and values stay
// in the L2, the tiles with the most keys come first. Groups count from the last, so that a smaller
// one is the first: as the last it would be too few tiles for all multiprocessors.
template <class C>
__device__ __forceinline__ Tile locate(const Parameters& p, int index) {
    const int tokens = C::kConsumers * pack_tokens<C>(p);
    const int num_rows = p.tiles_a_pack;
    const int num_pairs = p.batch_size * p.num_packs;
    const int back = num_pairs * num_rows - 1 - index;
    const int first = back / (p.packs_per_group * num_rows) * p.packs_per_group;
    const int size = min(p.packs_per_group, num_pairs - first);
    const int rest = back - first * num_rows;
    int row, pair;
    if (C::kMask == Mask::kCausal || (C::kMask == Mask::kAny && p.keys_ahead == 0)) {
        row = rest / size;
        pair = num_pairs - 1 - first - rest % size;
    } else {
        row = num_rows - 1 - rest % num_rows;
        pair = num_pairs - 1 - first - rest / num_rows;
    }
    Tile tile;
    tile.row_begin = row * tokens;
    tile.batch = pair / p.num_packs;
    tile.head = first_head<C>(p, pair - tile.batch * p.num_packs);
    const RowRange queries = find_queries(p, tile.batch);
    tile.q_begin = queries.start;
    tile.seqlen_q = queries.count;
    tile.seqlen_k = find_keys(p, tile.batch).count;
    // The keys that some row of the tile sees.
    int key_end = tile.seqlen_k;
    if (C::kMask != Mask::kFull) {
        const int row_end = min(tile.row_begin + tokens, tile.seqlen_q);
        key_end = min(key_end, row_end + diagonal_of<C>(p, tile));
    }
    tile.block_begin = 0;
    tile.block_end = key_end > 0 ? (key_end + C::kBlockN - 1) / C::kBlockN : 0;
    return tile;
}

}  // namespace kernel_hub::attention::fp8
