// The figures of a variant of linear_sm90.cu, its ring of tiles, and the order of its tiles.
#pragma once

#include <stdint.h>

#include "kernel_hub/launch_facts.cuh"

namespace kernel_hub::matmul::sm90 {

constexpr int kBlockK = 64;
constexpr int kRowBytes = 128;   // of kBlockK elements: the span of the swizzle
constexpr int kBoxColumns = 64;  // of a box on its way out; it has 64 rows
constexpr uint32_t kBoxBytes = 64 * kBoxColumns * 2;

// Which rows are the rows of the product, 64 of a tile for each consumer.
enum Sharing {
    kTogether,  // rows of a
    kSwapped,   // rows of b
};

// A consumer holds kPieces sums of 64 x kPieceN. kClusterM x kClusterN blocks of a cluster share
// what they fetch; kSplits times as many share k. kBoxes: places for results on their way out.
template <Sharing kSharing, int kConsumers_, int kPieces_, int kPieceN_, int kStages_,
          int kClusterM_, int kClusterN_, int kSplits_, int kBoxes_, int kMinBlocks_>
struct Config {
    static constexpr bool kSwaps = kSharing == kSwapped;
    static constexpr int kConsumers = kConsumers_, kPieces = kPieces_;
    static constexpr int kPieceN = kPieceN_, kSums = kPieceN / 2;
    static constexpr int kBlockM = 64 * kConsumers, kBlockN = kPieces * kPieceN;
    static constexpr int kStages = kStages_, kBoxes = kBoxes_;
    static constexpr int kClusterM = kClusterM_, kClusterN = kClusterN_, kSplits = kSplits_;
    static constexpr int kSharers = kClusterM * kClusterN, kClusterSize = kSharers * kSplits;
    static constexpr int kMinBlocks = kMinBlocks_;
    // Columns of a wide transposed tile that are written together.
    static constexpr int kGroupColumns = kBlockN % 32 == 0 ? 32 : kBlockN % 40 == 0 ? 40 : 16;
    // Columns of a tile that a block of its cluster fetches, whole groups of 8, as the swizzle is;
    // by how much the next one's begin behind them, and how many both of two blocks fetch.
    static constexpr int kShareN = (kBlockN / kClusterM + 7) / 8 * 8;
    static constexpr int kStepN = kClusterM == 2 ? kBlockN - kShareN : kShareN;
    static constexpr int kTwiceN = kShareN - kStepN;
    // Rows of out in a box on its way out, and of the residual in one on its way in; it has
    // kBoxColumns columns.
    static constexpr int kOutBoxRows = !kSwaps                               ? 64
                                       : kBoxes > 0 && kBlockN > 64 * kBoxes ? kGroupColumns
                                                                             : kBlockN;
    static constexpr int kThreads = 128 * (kConsumers + 1);
    static constexpr uint32_t kTileBytesM = kBlockM * kRowBytes, kTileBytesN = kBlockN * kRowBytes;
    static constexpr uint32_t kStageBytes = kTileBytesM + kTileBytesN;
    static constexpr uint32_t kBoxesAt = kStages * kStageBytes;
    static constexpr uint32_t kBarriersAt = kBoxesAt + kConsumers * kBoxes * kBoxBytes;
    static constexpr uint32_t kBiasAt = kBarriersAt + 16 * kStages;
    static constexpr bool kStagesBias = kSplits_ == 1 && !kSwaps;
    static constexpr uint32_t kSharedBytes =
        kBiasAt + (kStagesBias ? kConsumers * kBlockN * 2 : 0);   // bias: each consumer's
    static constexpr int kBiasWords = (kBlockN / 2 + 127) / 128;  // a thread
    // Whether what is added to a tile comes through the ring: a stage for each filling of the
    // boxes, of which a consumer then has kFillBytes.
    static constexpr uint32_t kFillBytes =
        kSwaps && kBlockN < 64 * kBoxes ? kBlockN * kRowBytes : kBoxes * kBoxBytes;
    static constexpr bool kFetchesResidual =
        kFillBytes <= kStageBytes && kSplits == 1 && kBoxes > 0;
    // The consumers that a stage has room for, all or one, and the fillings of a tile.
    static constexpr int kFillConsumers = kConsumers * kFillBytes <= kStageBytes ? kConsumers : 1;
    static constexpr int kWidth = kSwaps ? kOutBoxRows : kBoxColumns;  // of a box: its columns
    static constexpr int kTileBoxes = (kBlockN + kWidth - 1) / kWidth;
    static constexpr int kFillBoxes = kFetchesResidual ? kFillBytes / (kOutBoxRows * kRowBytes) : 1;
    static constexpr int kFills =
        (kTileBoxes + kFillBoxes - 1) / kFillBoxes * (kConsumers / kFillConsumers);
    // Registers a thread, where warpgroups trade them.
    static constexpr bool kTradesRegisters = kConsumers == 2 && kMinBlocks == 1;
    static constexpr int kProducerRegisters = kPieces * kSums > 96 ? 40 : 56;
    static constexpr int kConsumerRegisters = kPieces * kSums > 96 ? 232 : 224;

    static_assert(kSplits == 1 || kBoxes == 0, "split tiles are written from registers");
    static_assert((kSplits == 1 && !kSwaps) || kPieces == 1,
                  "swapped and split tiles are one sum a consumer");
    static_assert(kBoxes == 0 || kOutBoxRows <= 64 * kBoxes, "boxes have room for it");
    static_assert(!kSwaps || kBlockN % kOutBoxRows == 0, "a swapped tile is whole boxes");
    static_assert(kBlockN % 8 == 0 && kClusterM <= 2 && kBlockM / kClusterN % 8 == 0,
                  "a block's share of a tile is whole groups of 8 rows, as the swizzle is");
    static_assert(kSplits == 1 || kBlockM * kBlockN * 4u <= kStages * kStageBytes,
                  "the sums of a split tile take the place of the ring");
    static_assert(kBlockM / kClusterN <= 256 && kShareN <= 256, "a box has 256 rows");
};

// What a launch of a variant must know. Bodies without a bias in shared memory have no need of it.
template <typename C>
constexpr LaunchFacts facts_of(int shared_bytes = C::kSharedBytes, int block_k = kBlockK) {
    return {.threads = C::kThreads,
            .shared_bytes = shared_bytes,
            .blocks_per_sm = C::kMinBlocks,
            .block_m = C::kBlockM,
            .block_n = C::kBlockN,
            .block_k = block_k,
            .consumers = C::kConsumers,
            .pieces = C::kPieces,
            .piece_n = C::kPieceN,
            .stages = C::kStages,
            .cluster_m = C::kClusterM,
            .cluster_n = C::kClusterN,
            .splits = C::kSplits,
            .boxes = C::kBoxes,
            .box_rows = C::kOutBoxRows,
            .swaps = C::kSwaps};
}

// A ring position: the stage, and the parity of its turn.
template <int kStages>
struct Ring {
    uint32_t stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
    // The stage some steps ago.
    __device__ __forceinline__ uint32_t before(uint32_t steps) const {
        return stage >= steps ? stage - steps : stage + kStages - steps;
    }
    __device__ __forceinline__ void skip(int steps) {
        const uint32_t to = stage + steps;
        stage = to % kStages;
        parity ^= to / kStages & 1;
    }
};

// Tiles of a cluster, walked in groups of `group` rows of tiles, column by column in a group.
struct Raster {
    int rows, columns, group;
    __device__ __forceinline__ void place(int tile, int& row, int& column) const {
        const int of_group = group * columns;
        const int first = tile / of_group * group;
        const int here = min(group, rows - first);
        const int in_group = tile % of_group;
        row = first + in_group % here;
        column = in_group / here;
    }
};

}  // namespace kernel_hub::matmul::sm90
