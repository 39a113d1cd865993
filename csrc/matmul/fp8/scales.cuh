// The scales of e4m3 operands in linear_fp8_sm90.cu, how blocks of them are fetched, and the
// figures of a variant.
#pragma once

#include <stdint.h>

#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "matmul/sm90/schedule.cuh"
#include "matmul/sm90/tiles.cuh"

namespace kernel_hub::matmul::fp8 {

using namespace sm90;  // the ring and the tiles of linear_sm90.cu

constexpr int kScaleBlock = 128;  // elements of k, and rows of b, under one scale
constexpr int kPromoteSteps = 4;  // of 128 of k, after which sums leave the tensor cores

// The place where sums are added up.
enum Sums {
    kFast,       // in the tensor cores, which keep about 14 bits of them
    kPromoting,  // every kPromoteSteps in registers
    kBlocks,     // every step in registers, times scales of blocks
    kBoth,       // one of the last two, as the launch says
};

// Config of matmul/sm90/tiles.cuh.
template <Sums kSums_, Sharing kSharing, int kConsumers, int kPieces, int kPieceN, int kStages,
          int kClusterM, int kSplits, int kBoxes, int kMinBlocks>
struct ScaledConfig : Config<kSharing, kConsumers, kPieces, kPieceN, kStages, kClusterM, 1, kSplits,
                             kBoxes, kMinBlocks> {
    using Base = Config<kSharing, kConsumers, kPieces, kPieceN, kStages, kClusterM, 1, kSplits,
                        kBoxes, kMinBlocks>;
    static constexpr bool kPromotes = kSums_ != kFast;
    static constexpr bool kTakesBlocks = kSums_ == kBlocks || kSums_ == kBoth;
    static constexpr bool kTakesRows = kSums_ != kBlocks;
    static constexpr int kNumBoxes = Base::kBlockN / kBoxColumns;  // of a consumer's results
    // Whether the first two of them leave out of this consumer's rows in the ring, those of the
    // last two steps, so that they wait for no box; and whether those are all.
    static constexpr bool kBorrows =
        !Base::kSwaps && kBoxes > 0 && kStages > 2 && kNumBoxes >= (kPromotes ? 2 : 3);
    static constexpr bool kAllBorrowed = kBorrows && kNumBoxes == 2;
    // Behind the barriers: scale and bias of each column and scale of each row of a tile (of a
    // swapped one the scales of columns, for each consumer); scales of blocks, for each stage those
    // of kRowsOfA rows of a and one of b.
    static constexpr uint32_t kColumnsAt = Base::kBarriersAt + 16 * kStages;
    static constexpr int kColumnFloats = Base::kSwaps ? (kSplits == 1 ? kConsumers : 0) : 2;
    static constexpr uint32_t kRowsAt = kColumnsAt + kColumnFloats * Base::kBlockN * 4;
    static constexpr uint32_t kSlotsAt = kRowsAt + (Base::kSwaps ? 0 : Base::kBlockM * 4);
    static constexpr int kRowsOfA = Base::kSwaps ? Base::kBlockN : Base::kBlockM;
    static constexpr int kSlotFloats = kRowsOfA + 4;
    static constexpr uint32_t kSharedBytes = kSlotsAt + (kPromotes ? kStages * kSlotFloats * 4 : 0);

    static_assert(Base::kSwaps || Base::kFillConsumers == kConsumers,
                  "straight tiles take the residual of all consumers from one stage");
    static_assert(!kPromotes || kPieces == 1, "promoted sums are one block of registers");
    static_assert(kSplits == 1 || kPromotes, "split tiles are few rows, where promotion is free");
    static_assert(!kTakesBlocks || Base::kSwaps || kScaleBlock % Base::kBlockN == 0,
                  "the columns of a tile are under one scale of b");
    static_assert(Base::kSwaps || Base::kBlockN % kBoxColumns == 0, "results leave in boxes");
    // Scales of columns that a thread of a swapped tile holds.
    static constexpr int kColumnsAThread = (Base::kBlockN + 127) / 128;
    static_assert(!Base::kSwaps || kBoxes == 0 || Base::kOutBoxRows == Base::kBlockN,
                  "a swapped tile leaves in one box");
};

template <typename C>
constexpr LaunchFacts scaled_facts() {
    LaunchFacts facts = facts_of<C>(C::kSharedBytes, kScaleBlock);
    facts.fast = !C::kPromotes;
    return facts;
}

// The scales of one operand: one for each row (of stride 0: the same for all), or one for each
// block of k of each group of 2^shift rows.
struct Scales {
    const float* values;
    int64_t stride, k_stride;
    int num_rows, shift;
    bool is_blocked;

    // A whole sum is multiplied with it; 1 where no scale was given.
    __device__ __forceinline__ float of_row(int row) const {
        const bool is_one = is_blocked || !values;
        return is_one ? 1.0f : __ldg(values + min(row, num_rows - 1) * stride);
    }
    // The address of what a sum over one step of k is multiplied with. Only where is_blocked.
    __device__ __forceinline__ const float* of_block(int row, int step) const {
        return values + (min(row, num_rows - 1) >> shift) * stride + step * k_stride;
    }
};

// Fetches scales of blocks into the slots of the ring, for all tiles and steps of this block. One
// warp; each of its threads arrives at the barrier of a full stage.
template <typename C>
__device__ __forceinline__ void fetch_scales(const Scales& of_a, const Scales& of_b,
                                             const Raster& raster, Schedule schedule,
                                             uint32_t ring_base, uint32_t full, uint32_t empty,
                                             uint32_t rank, int base_step, bool has_residual) {
    const int lane = threadIdx.x % 32;
    Ring<C::kStages> ring;
    for (Segment segment; schedule.next(segment);) {
        int tile_m, tile_n;
        raster.place(segment.tile, tile_m, tile_n);
        const int row = (tile_m * C::kClusterM + rank % C::kClusterM) * C::kBlockM;
        const int column = tile_n * C::kBlockN;
        const int a_row = (C::kSwaps ? column : row) + lane;
        const int b_row = C::kSwaps ? row : column;
#pragma unroll 1
        for (int at = segment.first_step; at < segment.end_step; ++at) {
            const int step = base_step + at;
            mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
            const uint32_t slot =
                ring_base + C::kSlotsAt + 4 * (ring.stage * C::kSlotFloats + lane);
#pragma unroll
            for (int i = 0; i < C::kRowsOfA; i += 32) {
                if (i + lane < C::kRowsOfA) {
                    cp_async_4(slot + 4 * i, of_a.of_block(a_row + i, step));
                }
            }
            if (lane == 0) {
                cp_async_4(slot + 4 * C::kRowsOfA, of_b.of_block(b_row, step));
            }
            cp_async_arrive(full + 8 * ring.stage);
            ring.next();
        }
        // Stages of a residual have no scales.
        for (int i = 0; has_residual && !schedule.leaves(segment) && i < C::kFills; ++i) {
            mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
            mbarrier_arrive(full + 8 * ring.stage);
            ring.next();
        }
    }
}

}  // namespace kernel_hub::matmul::fp8
