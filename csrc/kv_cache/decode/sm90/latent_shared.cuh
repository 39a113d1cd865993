// mla_decode_sm90.cu: figures, shared memory, and the warps that load.
#pragma once

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "kv_cache/decode/sm90/latent_parts.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

struct LatentStages {
    static constexpr int kRows = 64, kTile = 64, kThreads = 384;
    static constexpr int kLoaders = 8, kFinder = 10;  // warps
    static constexpr int kPanelColumns = 64, kPanels = kKeyDim / kPanelColumns;
    static constexpr int kPanelBytes = kTile * kPanelColumns * 2;
    static constexpr int kStageBytes = kPanels * kPanelBytes;
    static constexpr int kHalfPanels = kLatentDim / kPanelColumns / 2;  // of a consumer's output
    static constexpr int kHalfDim = kLatentDim / 2;
    static constexpr int kProbs = 2 * kHalfPanels * kPanelBytes;  // in a stage, over its rope panel
    static constexpr int kQueries = 2 * kStageBytes, kMaxima = kQueries + kStageBytes;
    static constexpr int kSums = kMaxima + 2 * kRows * 4, kBarriers = kSums + 2 * kRows * 4;
    static constexpr int kFulls = 2 * kPanels, kEmpties = 2 * 2;
    static constexpr int kParts = kBarriers + 8 * (kFulls + kEmpties);
    static constexpr int kSharedBytes = kParts + LatentParts::kBytes;
    static constexpr float kSlack = 8.0f;  // of a row's base, as a power of 2
    static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
    static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 504,
                  "acquire_registers would wait for ever");
    static_assert(kSharedBytes <= 227 << 10, "a block of sm_90 has 227 KiB of shared memory");
};

// Named barriers, each of 256 threads of the consumers.
enum LatentBarrier : int { kJoin = 1, kScores, kEvenProbs, kOddProbs };

// A stage is filled panel by panel and released in two parts: the panels of each half of the
// output's columns. The rope panel, over which the stage's probabilities are written, is of the
// part that the other consumer reads last.
// The blocks (1 or 2) of other rows and the same tokens bring each other every other panel; they
// are a cluster, or part of one (latent_team.cuh).
struct LatentShared {
    uint32_t base;
    int num_blocks, rank;  // of the same tokens
    int first = 0;         // of them, in the cluster

    static __device__ __forceinline__ LatentShared here() {
        return {shared_address(dynamic_shared()), static_cast<int>(cluster_size()),
                static_cast<int>(cluster_rank())};
    }
    __device__ __forceinline__ uint32_t stage(int stage) const {
        return base + stage * LatentStages::kStageBytes;
    }
    // What a descriptor takes: an address without the block's rank, which stands above 24 bits and
    // would be part of the leading offset.
    static __device__ __forceinline__ uint32_t operand(uint32_t address) {
        return address & 0xffffff;
    }
    __device__ __forceinline__ uint32_t full(int stage, int panel) const {
        return base + LatentStages::kBarriers + 8 * (LatentStages::kPanels * stage + panel);
    }
    __device__ __forceinline__ uint32_t empty(int stage, int half) const {
        return base + LatentStages::kBarriers + 8 * (LatentStages::kFulls + 2 * stage + half);
    }
    // Panel i of a part.
    static __device__ __forceinline__ constexpr int panel_of(int half, int i) {
        return i == LatentStages::kHalfPanels ? LatentStages::kPanels - 1
                                              : half * LatentStages::kHalfPanels + i;
    }
};

// The warp that loads a stage: even tiles' or odd ones'.
template <typename T>
struct LatentProducer {
    using C = LatentStages;
    const LatentArgs<T>& args;
    const CUtensorMap* map;
    const int box_rows;
    const LatentShared shared;
    const int stage;
    uint32_t parity;
    bool is_first;  // part of the block

    // Brings every other tile of a part: lanes 0 .. 7 find the pages of its boxes, a tile ahead. A
    // box that is not there has page -1, for which the TMA writes zeros.
    __device__ __forceinline__ void load(const LatentPart& part) {
        const int lane_idx = threadIdx.x & 31;
        const int boxes = C::kTile / box_rows;
        const uint16_t everyone = ((1 << shared.num_blocks) - 1) << shared.first;
        const int* table = args.block_table == nullptr
                               ? nullptr
                               : args.block_table + part.batch_idx * args.block_table_stride;
        int token = part.first_token + stage * C::kTile + lane_idx * box_rows;
        bool is_box = lane_idx < boxes && token < part.end_token, is_outside = false;
        int page = part.batch_idx;
        if (is_box && table != nullptr) {
            page = __ldg(table + token / args.page_size);
        }
        if (stage == 1 && is_first && part.first_token + C::kTile < part.end_token) {
            // The even tile, whose scores are first, comes before the odd one is asked for. Of the
            // half that is released after the odd tile's scores: its phase cannot be missed.
            mbarrier_wait(shared.full(0, C::kHalfPanels), 0);
        }
        is_first = false;
#pragma unroll 1
        for (int first = part.first_token + stage * C::kTile; first < part.end_token;
             first += 2 * C::kTile) {
            const bool is_there = is_box && is_index(page, args.num_pages);
            is_outside |= is_box && !is_there;
            const int found = is_there ? page : -1;
            const int in_page = is_there && table != nullptr ? token % args.page_size : token;
            token += 2 * C::kTile;
            is_box = lane_idx < boxes && token < part.end_token;
            if (is_box && table != nullptr) {
                page = __ldg(table + token / args.page_size);
            }
            // In the order in which consumers release and await them.
#pragma unroll 1
            for (int i = 0; i < 2; ++i) {
                const int half = stage ^ i;
                mbarrier_wait(shared.empty(stage, half), parity ^ 1);
                const bool is_leader = elect_one();
#pragma unroll 1
                for (int p = 0; p < C::kHalfPanels + i; ++p) {
                    const int panel = LatentShared::panel_of(half, p);
                    const uint32_t full = shared.full(stage, panel);
                    uint32_t target = shared.stage(stage) + panel * C::kPanelBytes;
                    if (is_leader) {
                        mbarrier_arrive_expect_tx(full, C::kPanelBytes);
                    }
                    if ((panel & (shared.num_blocks - 1)) != shared.rank) {
                        continue;
                    }
#pragma unroll 1
                    for (int b = 0; b < boxes; ++b) {
                        const int box_page = __shfl_sync(~0u, found, b);
                        const int row = __shfl_sync(~0u, in_page, b);
                        if (is_leader) {
                            tma_load_4d_multicast(target, map, full, everyone,
                                                  panel * C::kPanelColumns, row, 0, box_page);
                        }
                        target += box_rows * 128;
                    }
                }
                __syncwarp();
            }
            // The tile comes before the next one is asked for: further ahead, tiles of all blocks
            // push each other out of the L2 before they are read.
            mbarrier_wait(shared.full(stage, C::kPanels - 1), parity);
            prefetch(is_box ? page : -1, table == nullptr ? token : token % args.page_size, boxes);
            parity ^= 1;
        }
        report_if(args.flag, is_outside, kPagesOutside);
    }

    // Brings the stage's next tile into the L2, whose latency is shorter: of it a lane knows a box.
    // A block by itself brings the panels that are loaded first: twice as many tiles are under way.
    __device__ __forceinline__ void prefetch(int page, int row, int boxes) const {
        const bool is_leader = elect_one(), is_alone = shared.num_blocks == 1;
        const int begin = is_alone ? stage * C::kHalfPanels : shared.rank;
        const int end = is_alone ? begin + C::kHalfPanels : C::kPanels;
#pragma unroll 1
        for (int b = 0; b < boxes; ++b) {
            const int box_page = __shfl_sync(~0u, page, b), box_row = __shfl_sync(~0u, row, b);
            if (is_leader && is_index(box_page, args.num_pages)) {
#pragma unroll 1
                for (int p = begin; p < end; p += shared.num_blocks) {
                    tma_prefetch_4d(map, p * C::kPanelColumns, box_row, 0, box_page);
                }
            }
            __syncwarp();
        }
    }
};

}  // namespace kernel_hub::kv_cache::decode::sm90
