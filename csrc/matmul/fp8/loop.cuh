// The products of linear_fp8_sm90.cu whose sums leave the tensor cores every few steps of k.
#pragma once

#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/wgmma.cuh"
#include "matmul/fp8/scales.cuh"
#include "matmul/sm90/loop.cuh"

namespace kernel_hub::matmul::fp8 {

// The factors of a thread's sums of one step: of its two rows, times that of the tile's columns.
template <typename C, bool kSwaps = C::kSwaps>
struct StepFactors {
    float factors[2] = {1.0f, 1.0f};

    // row: this thread's first in the block's tile.
    __device__ __forceinline__ void load(const float* slot, int row) {
        const float of_columns = slot[C::kRowsOfA];
        factors[0] = slot[row] * of_columns;
        factors[1] = slot[row + 8] * of_columns;
    }
    __device__ __forceinline__ void add(float (&acc)[C::kSums],
                                        const float (&part)[C::kSums]) const {
#pragma unroll
        for (int i = 0; i < C::kSums; ++i) {
            acc[i] = fmaf(part[i], factors[i / 2 % 2], acc[i]);
        }
    }
};

// Swapped: all rows of the product are under one scale of b, each column has its own.
template <typename C>
struct StepFactors<C, true> {
    float factors[C::kSums / 2];

    __device__ __forceinline__ StepFactors() {
#pragma unroll
        for (float& factor : factors) {
            factor = 1.0f;
        }
    }
    __device__ __forceinline__ void load(const float* slot, int) {
        const float of_rows = slot[C::kRowsOfA];
#pragma unroll
        for (int i = 0; i < C::kSums / 2; i += 2) {
            const float2 pair =
                *reinterpret_cast<const float2*>(slot + 4 * i + 2 * (threadIdx.x % 4));
            factors[i] = pair.x * of_rows;
            factors[i + 1] = pair.y * of_rows;
        }
    }
    __device__ __forceinline__ void add(float (&acc)[C::kSums],
                                        const float (&part)[C::kSums]) const {
#pragma unroll
        for (int i = 0; i < C::kSums; ++i) {
            acc[i] = fmaf(part[i], factors[i / 4 * 2 + i % 2], acc[i]);
        }
    }
};

// Lets go of the stages of the last two steps, out of which results were stored, once the copy
// engine has read them. `ring` is at the first step of the next tile.
template <typename C>
__device__ __forceinline__ void release_all_borrowed(const Ring<C::kStages>& ring, uint32_t empty,
                                                     uint32_t rank, int thread) {
    if (thread < 32) {
        if (thread == 0) {
            tma_store_wait<C::kAllBorrowed ? 0 : 1>();
        }
        __syncwarp();
    }
    release<C>(empty, ring.before(2), rank, thread);
    release<C>(empty, ring.before(1), rank, thread);
}

// Starts the product of a stage that has arrived.
template <typename C>
__device__ __forceinline__ void start_product(float (&part)[C::kSums], uint32_t stage,
                                              uint32_t rows, uint32_t columns, int accumulates) {
    const uint32_t offset = stage * (C::kStageBytes >> 4);
    hold_registers(part);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kRowBytes / 32; ++i) {
        Wgmma<__nv_fp8_e4m3>::ss(part, descriptor(rows + offset, 32 * i),
                                 descriptor(columns + offset, 32 * i), i != 0 || accumulates);
    }
    wgmma_commit();
}

// acc = the product of this consumer's rows over `num_steps` steps of k. Its sums leave the tensor
// cores and are added to those in registers after every kPromoteSteps of them, or after each where
// there are scales of blocks, times their factors.
// slots: of the ring, where scales of blocks are fetched to, or null. row: this thread's first in
// the block's tile. borrows: the stages of the last two steps are kept for results, until
// release_all_borrowed, here in the next tile; has_borrowed: those of the last tile are.
template <typename C>
__device__ __forceinline__ void multiply_promoting(float (&acc)[C::kSums], Ring<C::kStages>& ring,
                                                   uint32_t rows, uint32_t columns, uint32_t full,
                                                   uint32_t empty, uint32_t rank, int thread,
                                                   const float* slots, int row, int num_steps,
                                                   bool borrows, bool has_borrowed) {
#pragma unroll
    for (int i = 0; i < C::kSums; ++i) {
        acc[i] = 0.0f;
    }
    // Lets go of a stage, which `left` steps follow.
    const auto let_go = [&](uint32_t stage, int left) {
        if (!C::kBorrows || !borrows || left >= 2) {
            release<C>(empty, stage, rank, thread);
        }
    };
    const auto let_go_of_borrowed = [&] {
        if (C::kBorrows && has_borrowed) {
            release_all_borrowed<C>(ring, empty, rank, thread);
            has_borrowed = false;
        }
    };
    int left = num_steps;
    if (C::kTakesBlocks && (!C::kTakesRows || slots)) {
        StepFactors<C> factors;
#pragma unroll 1
        for (; left > 0; ring.next()) {
            float part[C::kSums];
            mbarrier_wait(full + 8 * ring.stage, ring.parity);
            // NOTE: before the product: its end says that all warps have begun it, and so have read
            // these.
            factors.load(slots + ring.stage * C::kSlotFloats, row);
            start_product<C>(part, ring.stage, rows, columns, 0);
            let_go_of_borrowed();
            wgmma_wait<0>();
            hold_registers(part);
            let_go(ring.stage, --left);
            factors.add(acc, part);
        }
    }
    if constexpr (C::kTakesRows) {
#pragma unroll 1
        while (left > 0) {
            float part[C::kSums];
            uint32_t stage = 0;
            const int until = max(left - kPromoteSteps, 0);
            int accumulates = 0;
#pragma unroll 1
            do {
                mbarrier_wait(full + 8 * ring.stage, ring.parity);
                start_product<C>(part, ring.stage, rows, columns, accumulates);
                if (accumulates) {
                    wgmma_wait<1>();
                    let_go(stage, left);
                } else {
                    let_go_of_borrowed();
                }
                accumulates = 1;
                stage = ring.stage;
                ring.next();
                --left;
            } while (left > until);
            wgmma_wait<0>();
            hold_registers(part);
            let_go(stage, left);
#pragma unroll
            for (int i = 0; i < C::kSums; ++i) {
                acc[i] += part[i];
            }
        }
    }
}

}  // namespace kernel_hub::matmul::fp8
