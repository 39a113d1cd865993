// flash_attention_sm90.cu: its tile shapes, parameters, shared memory, and which tile is which.
#pragma once

#include "kernel_hub/mma.cuh"
#include "kernel_hub/sm90.cuh"

namespace kernel_hub {

enum class Mask { kFull, kCausal, kWindow };

constexpr int kPanelColumns = 64;  // columns of a 128-byte row of shared memory
constexpr int kTileSlots = 4;
constexpr float kLog2E = 1.4426950408889634f;
// Probabilities stay below 2^kRescaleBits, which fp16 holds.
constexpr float kRescaleBits = 8.f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr uint32_t kAllLanes = 0xffffffffu;

template <typename T_, int kHeadDim_, int kConsumers_, int kBlockN_, Mask kMask_>
struct Config {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kConsumers = kConsumers_;
    static constexpr int kBlockM = 64 * kConsumers;
    static constexpr int kBlockN = kBlockN_;
    static constexpr Mask kMask = kMask_;
    static constexpr int kThreads = 128 * (1 + kConsumers);
    static constexpr int kPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns;
    static constexpr int kStages = 2;
    static constexpr int kQStages = 1;
    static constexpr int kQPanelBytes = 64 * 128;
    static constexpr int kQBytes = kPanels * kQPanelBytes;  // of one consumer
    static constexpr int kKVPanelBytes = kBlockN * 128;
    static constexpr int kKVBytes = kPanels * kKVPanelBytes;
    static constexpr int kSharedBytes =
        kConsumers * kQStages * kQBytes + 2 * kStages * kKVBytes + 1024;
    static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
    static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
    // What the block starts with: 65,536 registers over its threads, in units of 8.
    static constexpr int kStartRegisters = 65536 / kThreads / 8 * 8;
    static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                      (1 + kConsumers) * kStartRegisters,
                  "acquire_registers would wait for ever");
    static_assert(kSharedBytes <= 227 * 1024, "shared memory of an SM");
    static_assert(kBlockN % 16 == 0 && kHeadDim % 16 == 0, "products are 16 deep");
};

struct Parameters {
    void* out;   // (batch, seqlen_q, heads, head_dim) by strides
    float* lse;  // or null
    const CUtensorMap *q, *k, *v;
    const int* cu_seqlens_q;   // (batch + 1) or null
    const int* cu_seqlens_k;   // (batch + 1) or null
    const int* cache_seqlens;  // (batch) or null
    int* tile_counter;  // {next tile, blocks that are done}, zeros; null: tiles in fixed turn
    int64_t out_batch_stride, out_token_stride, out_head_stride, lse_batch_stride, lse_head_stride;
    int batch_size, num_heads, num_kv_heads, head_dim, seqlen_q, seqlen_k;
    int window_left, window_right;
    int heads_a_group;     // this many (batch, head) pairs run through their tiles together
    int has_foreign_rows;  // keys past a sequence's end belong to something else
    float softmax_scale;
};

// One tile, as the producer tells the consumers: 32 bytes of shared memory.
struct Tile {
    int row_begin;  // -1: there are no more
    int head, batch, q_begin;
    int seqlen_q, seqlen_k, block_begin, block_end;  // blocks of kBlockN keys

    __device__ __forceinline__ bool is_valid() const { return row_begin >= 0; }
    __device__ __forceinline__ bool is_empty() const { return block_end <= block_begin; }
    __device__ __forceinline__ int offset() const { return seqlen_k - seqlen_q; }
};

// What the roles share.
template <class C>
struct Shared {
    uint32_t q, k, v;  // addresses
    uint32_t barriers;
    Tile* tiles;
    uint32_t tiles_address;

    static constexpr int kQFull = 0;
    static constexpr int kQEmpty = kQFull + C::kQStages * C::kConsumers;
    static constexpr int kKFull = kQEmpty + C::kQStages * C::kConsumers;
    static constexpr int kKEmpty = kKFull + C::kStages;
    static constexpr int kVFull = kKEmpty + C::kStages;
    static constexpr int kVEmpty = kVFull + C::kStages;
    static constexpr int kTileFull = kVEmpty + C::kStages;
    static constexpr int kTileEmpty = kTileFull + kTileSlots;
    static constexpr int kCount = kTileEmpty + kTileSlots;

    __device__ __forceinline__ uint32_t barrier(int i) const { return barriers + 8 * i; }
    __device__ __forceinline__ uint32_t q_full(int stage, int consumer) const {
        return barrier(kQFull + stage * C::kConsumers + consumer);
    }
    __device__ __forceinline__ uint32_t q_empty(int stage, int consumer) const {
        return barrier(kQEmpty + stage * C::kConsumers + consumer);
    }
    __device__ __forceinline__ uint32_t q_tile(int stage, int consumer) const {
        return q + (stage * C::kConsumers + consumer) * C::kQBytes;
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
};

// A place in a ring of kCount stages, with the parity of the round it is in.
template <int kCount>
struct Place {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance() {
        if (kCount == 1 || ++stage == kCount) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Tile number `index` of the schedule; row_begin is beyond seqlen_q where the sequence is shorter
// than the longest. Causal: within a group of heads whose keys and values stay in the L2, the tiles
// with the most keys come first.
template <class C>
__device__ __forceinline__ Tile locate(const Parameters& p, int index) {
    const int num_rows = (p.seqlen_q + C::kBlockM - 1) / C::kBlockM;
    const int group = index / (p.heads_a_group * num_rows);
    const int first = group * p.heads_a_group;
    const int size = min(p.heads_a_group, p.batch_size * p.num_heads - first);
    const int rest = index - first * num_rows;
    int row, pair;
    if constexpr (C::kMask == Mask::kCausal) {
        row = num_rows - 1 - rest / size;
        pair = first + rest % size;
    } else {
        row = rest % num_rows;
        pair = first + rest / num_rows;
    }
    Tile tile;
    tile.row_begin = row * C::kBlockM;
    tile.batch = pair / p.num_heads;
    tile.head = pair - tile.batch * p.num_heads;
    tile.q_begin = p.cu_seqlens_q ? p.cu_seqlens_q[tile.batch] : 0;
    tile.seqlen_q = p.cu_seqlens_q ? p.cu_seqlens_q[tile.batch + 1] - tile.q_begin : p.seqlen_q;
    tile.seqlen_k =
        p.cu_seqlens_k ? p.cu_seqlens_k[tile.batch + 1] - p.cu_seqlens_k[tile.batch] : p.seqlen_k;
    if (p.cache_seqlens) {
        tile.seqlen_k = p.cache_seqlens[tile.batch];
    }
    // The keys that some row of the tile sees.
    int key_begin = 0, key_end = tile.seqlen_k;
    if (C::kMask != Mask::kFull && p.window_right >= 0) {
        const int row_end = min(tile.row_begin + C::kBlockM, tile.seqlen_q);
        key_end = min(key_end, row_end + tile.offset() + p.window_right);
    }
    if (C::kMask == Mask::kWindow && p.window_left >= 0) {
        key_begin = max(0, tile.row_begin + tile.offset() - p.window_left);
    }
    tile.block_begin = key_begin / C::kBlockN;
    tile.block_end = key_end > key_begin ? (key_end + C::kBlockN - 1) / C::kBlockN : 0;
    return tile;
}

}  // namespace kernel_hub
