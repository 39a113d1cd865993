// Many products out = a b^T in one launch on Hopper: figures of a variant, the producer that
// fetches tiles, the consumers that multiply them.
#pragma once

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "kernel_hub/wgmma.cuh"
#include "matmul/grouped/walk.cuh"
#include "matmul/sm90/tiles.cuh"

namespace kernel_hub::matmul::grouped {

using namespace sm90;  // the ring and the tiles of linear_sm90.cu

// A block's tile is kBlockM x kBlockN of the product; kConsumers warpgroups have 64 rows of it
// each. The rows of the product are rows of a, or of b where kSwaps. kPairs: clusters of two blocks
// take neighbouring tiles (ProductTiles) and each fetches half of what they share for both. kBoxes:
// places, of each consumer, for results on their way out. kIsLean: the producer is one warp behind
// the consumers and not a warpgroup before them, so that two blocks have registers for more sums.
template <bool kSwaps_, int kConsumers_, int kBlockN_, int kStages_, bool kPairs_, int kBoxes_,
          int kMinBlocks_, bool kIsLean_ = false>
struct GroupedConfig {
    static constexpr bool kSwaps = kSwaps_, kPairs = kPairs_, kIsLean = kIsLean_;
    static constexpr int kConsumers = kConsumers_, kStages = kStages_, kBoxes = kBoxes_;
    static constexpr int kBlockM = 64 * kConsumers, kBlockN = kBlockN_, kSums = kBlockN / 2;
    static constexpr int kClusterSize = kPairs ? 2 : 1, kMinBlocks = kMinBlocks_;
    static constexpr int kThreads = 128 * kConsumers + (kIsLean ? 32 : 128);
    // Rows of a block's tile: of a, of b.
    static constexpr int kTokens = kSwaps ? kBlockN : kBlockM;
    static constexpr int kWeights = kSwaps ? kBlockM : kBlockN;
    // Rows of a box on its way out; it holds rows of a and 64 rows of b.
    static constexpr int kBoxRows = kSwaps ? kBlockN : 64;
    static constexpr uint32_t kOutBoxBytes = kBoxRows * kRowBytes;
    static constexpr uint32_t kTileBytesM = kBlockM * kRowBytes, kTileBytesN = kBlockN * kRowBytes;
    static constexpr uint32_t kStageBytes = kTileBytesM + kTileBytesN;
    static constexpr uint32_t kBoxesAt = kStages * kStageBytes;
    static constexpr uint32_t kBarriersAt = kBoxesAt + kConsumers * kBoxes * kOutBoxBytes;
    static constexpr uint32_t kRecordsAt = kBarriersAt + 16 * kStages;  // 32 bytes each
    static constexpr uint32_t kSharedBytes = kRecordsAt + 32 * kStages;
    static constexpr bool kShares = kPairs;  // k, in the last round
    // Registers a thread, where warpgroups trade them.
    static constexpr bool kTradesRegisters = kConsumers == 2 && !kIsLean;
    static constexpr int kProducerRegisters = 72, kConsumerRegisters = 216;

    static_assert(!kTradesRegisters || kMinBlocks == 1, "two blocks have registers for one each");
    static_assert(!kSwaps || (kBlockN <= 64 && !kPairs), "a swapped tile leaves in one box");
    static_assert(kBoxes >= 2 || (!kSwaps && !kPairs), "two boxes hold 64 columns of sums as fp32");
    static_assert(kOutBoxBytes % 1024 == 0, "boxes begin where the swizzle does");
};

template <typename C>
constexpr LaunchFacts grouped_facts() {
    return {.threads = C::kThreads,
            .shared_bytes = C::kSharedBytes,
            .blocks_per_sm = C::kMinBlocks,
            .block_m = C::kBlockM,
            .block_n = C::kBlockN,
            .block_k = kBlockK,
            .consumers = C::kConsumers,
            .stages = C::kStages,
            .cluster_m = C::kClusterSize,
            .boxes = C::kBoxes,
            .box_rows = C::kBoxRows,
            .swaps = C::kSwaps};
}

// How two blocks share k of a tile: the second leaves its sums to the first.
enum Share { kAlone, kFirst, kSecond };

// What the producer tells the consumers of a tile, in the slot of the tile's first stage. A first
// row below zero says that there is no tile any more.
struct alignas(16) Record {
    int row, end_row;  // of a and out: the first of this block's tile, the first it does not have
    int column;        // of out: the first of this block's tile
    int matrix;        // of b
    int num_steps;     // of k, for this block
    int share;         // of k
    int place;         // of this block's tile among those that are shared
};

// The rows of a matrix as boxes of `height` bring them; what is behind the last is not fetched
// (NOTE at sm90::Operand). Where !kClips all rows are taken to be there.
template <bool kClips>
struct Side {
    const CUtensorMap* map;
    const CUtensorMap* tail;
    int rows;

    __device__ __forceinline__ uint32_t bytes(int first, int height) const {
        return kRowBytes * (kClips ? max(0, min(height, rows - first)) : height);
    }
    // Whether the box from `first` on has rows, and its map.
    __device__ __forceinline__ bool has(int first) const { return !kClips || first < rows; }
    __device__ __forceinline__ const CUtensorMap* box(int first, int height) const {
        return !kClips || first + height <= rows ? map : tail;
    }
    // NOTE: member by member: a choice of references puts both in local memory.
    __device__ __forceinline__ static Side either(bool is_x, const Side& x, const Side& y) {
        return {is_x ? x.map : y.map, is_x ? x.tail : y.tail, is_x ? x.rows : y.rows};
    }
};

// Fetches the tiles of this block. A whole warp. Policy: see matmul/grouped/sm90.cuh.
template <typename C, typename Walk, typename Policy>
__device__ __forceinline__ void produce_grouped(Walk& walk, const Policy& policy,
                                                const CUtensorMap* a_map, const CUtensorMap* b_map,
                                                uint32_t ring_base, uint32_t full, uint32_t empty,
                                                Record* records, uint32_t rank, int num_steps,
                                                bool may_share) {
    constexpr bool kClips = Policy::kClips;
    using OneSide = Side<kClips>;
    const OneSide of_rows = C::kSwaps ? policy.side_b(b_map) : policy.side_a(a_map);
    const OneSide of_columns = C::kSwaps ? policy.side_a(a_map) : policy.side_b(b_map);
    Ring<C::kStages> ring;
    const int num_clusters = gridDim.x / C::kClusterSize;
    // Where the last round would leave half of the clusters idle, two take a tile, half of k each.
    const int last_round = C::kShares ? walk.total() / num_clusters * num_clusters : 0;
    const bool shares = C::kShares && may_share && 2 * (walk.total() - last_round) <= num_clusters;
    for (int tile = blockIdx.x / C::kClusterSize;; tile += num_clusters) {
        Place place;
        const bool is_shared = shares && tile >= last_round;
        const int in_round = tile - last_round;
        const bool is_tile = walk.find(is_shared ? last_round + in_round / 2 : tile, place);
        if (threadIdx.x % 32 == 0) {
            mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
            if (!is_tile) {
                records[ring.stage].row = -1;
                mbarrier_arrive(full + 8 * ring.stage);
            }
        }
        if (!is_tile) {
            return;
        }
        __syncwarp();
        if (elect_one()) {
            const bool shares_columns = place.is_one_below;
            const int tile_row = place.tile_row + (shares_columns ? rank : 0);
            const int tile_column = place.tile_column + (shares_columns ? 0 : rank);
            // NOTE: the block of the higher number waits: blocks start in order, so that the one
            // waited for runs even where few are resident at once.
            const int share = is_shared ? kSecond - in_round % 2 : kAlone;
            const int first_step = share == kSecond ? num_steps / 2 : 0;
            const int end_step = share == kFirst ? num_steps / 2 : num_steps;
            const Record record{place.first_row + tile_row * C::kTokens,
                                place.end_row,
                                tile_column * C::kWeights,
                                place.matrix,
                                end_step - first_step,
                                share,
                                in_round / 2 * C::kClusterSize + static_cast<int>(rank)};
            records[ring.stage] = record;
            const int first_m = C::kSwaps ? record.column : record.row;
            const int first_n = C::kSwaps ? record.row : record.column;
            const int2 of_a = policy.of_a(place.matrix), of_b = policy.of_b(place.matrix);
            const int2 at_rows = C::kSwaps ? of_b : of_a, at_columns = C::kSwaps ? of_a : of_b;
            const uint32_t bytes =
                of_rows.bytes(first_m, C::kBlockM) + of_columns.bytes(first_n, C::kBlockN);
            for (int step = first_step; step < end_step; ++step) {
                mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
                const uint32_t barrier = full + 8 * ring.stage;
                mbarrier_arrive_expect_tx(barrier, bytes);
                const uint32_t rows = ring_base + ring.stage * C::kStageBytes;
                const uint32_t columns = rows + C::kTileBytesM;
                const int at = step * kBlockK;
                if constexpr (!C::kPairs) {
                    tma_load_4d(rows, of_rows.box(first_m, C::kBlockM), barrier, at, first_m,
                                at_rows.x, at_rows.y);
                    tma_load_4d(columns, of_columns.box(first_n, C::kBlockN), barrier, at, first_n,
                                at_columns.x, at_columns.y);
                } else {
                    // Boxes are half a tile: two of what is this block's own, one of what is not.
                    constexpr int kHalfM = C::kBlockM / 2, kHalfN = C::kBlockN / 2;
                    const uint32_t own = shares_columns ? rows : columns;
                    const int half = shares_columns ? kHalfM : kHalfN;
                    const uint32_t half_bytes = (shares_columns ? kHalfM : kHalfN) * kRowBytes;
                    const OneSide of_own = OneSide::either(shares_columns, of_rows, of_columns);
                    const int own_row = shares_columns ? first_m : first_n;
                    const int2 at_own = shares_columns ? at_rows : at_columns;
                    if (of_own.has(own_row)) {
                        tma_load_4d(own, of_own.box(own_row, half), barrier, at, own_row, at_own.x,
                                    at_own.y);
                    }
                    if (of_own.has(own_row + half)) {
                        tma_load_4d(own + half_bytes, of_own.box(own_row + half, half), barrier, at,
                                    own_row + (shares_columns ? kHalfM : kHalfN), at_own.x,
                                    at_own.y);
                    }
                    const int shift = rank * (shares_columns ? kHalfN : kHalfM);
                    const OneSide of_shared = OneSide::either(shares_columns, of_columns, of_rows);
                    const int shared_row = (shares_columns ? first_n : first_m) + shift;
                    const int2 at_shared = shares_columns ? at_columns : at_rows;
                    if (of_shared.has(shared_row)) {
                        tma_load_4d_multicast(
                            (shares_columns ? columns : rows) + shift * kRowBytes,
                            of_shared.box(shared_row, shares_columns ? kHalfN : kHalfM), barrier, 3,
                            at, shared_row, at_shared.x, at_shared.y);
                    }
                }
                ring.next();
            }
        }
        __syncwarp();
    }
}

// Says to every block that writes into this one that `stage` may be written anew.
template <typename C>
__device__ __forceinline__ void release_stage(uint32_t empty, uint32_t stage, int thread) {
    const uint32_t barrier = empty + 8 * stage;
    if constexpr (!C::kPairs) {
        if (thread == 0) {
            mbarrier_arrive(barrier);
        }
    } else if (thread < C::kClusterSize) {
        mbarrier_arrive_cluster(cluster_address(barrier, thread));
    }
}

// acc = the product of this consumer's rows over all steps of k. The first stage was waited for.
template <typename T, typename C>
__device__ __forceinline__ void multiply_grouped(float (&acc)[C::kSums], Ring<C::kStages>& ring,
                                                 uint32_t rows, uint32_t columns, uint32_t full,
                                                 uint32_t empty, int thread, int num_steps) {
    uint32_t previous = 0;
#pragma unroll 1
    for (int step = 0; step < num_steps; ++step) {
        mbarrier_wait(full + 8 * ring.stage, ring.parity);
        const uint32_t offset = ring.stage * (C::kStageBytes >> 4);
        hold_registers(acc);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBlockK / 16; ++i) {
            Wgmma<T>::template ss<0, 0>(acc, descriptor(rows + offset, 32 * i),
                                        descriptor(columns + offset, 32 * i), step != 0 || i != 0);
        }
        wgmma_commit();
        if (step != 0) {
            wgmma_wait<1>();
            release_stage<C>(empty, previous, thread);
        }
        previous = ring.stage;
        ring.next();
    }
    wgmma_wait<0>();
    hold_registers(acc);
    release_stage<C>(empty, previous, thread);
}

// The same for a consumer that has no row of the product: it only lets the ring go on.
template <typename C>
__device__ __forceinline__ void pass_grouped(Ring<C::kStages>& ring, uint32_t full, uint32_t empty,
                                             int thread, int num_steps, int barrier) {
#pragma unroll 1
    for (int step = 0; step < num_steps; ++step) {
        mbarrier_wait(full + 8 * ring.stage, ring.parity);
        // Products hold the warps together; here no warp may be left behind in an older phase.
        named_barrier_sync(barrier, 128);
        release_stage<C>(empty, ring.stage, thread);
        ring.next();
    }
}

}  // namespace kernel_hub::matmul::grouped
