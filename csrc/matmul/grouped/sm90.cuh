// Many products out = a b^T in one launch on Hopper: the body of grouped_linear_sm90.cu and
// batched_matmul_sm90.cu.
//
// Parallelisation: one warp of a block fetches tiles (the producer), kConsumers warpgroups multiply
// them, 64 rows each. Blocks are persistent and walk the tiles of all products; the producer alone
// looks for them and tells the consumers where each is, in a slot beside the ring. A consumer whose
// 64 rows are all another product's multiplies nothing. kPairs: a cluster of two blocks takes two
// neighbouring tiles and fetches what they share once; where the last round of tiles leaves half of
// the clusters idle, two clusters share k of one's tiles, and the second leaves its sums in global
// memory to the first. Shared memory: a ring of kStages x (tile of rows, tile of columns), 64
// elements of K each, rows of 128 bytes, swizzled; boxes for results on their way out; two
// transaction barriers and a record a stage.
#pragma once

#include "kernel_hub/cluster.cuh"
#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "kernel_hub/wgmma.cuh"
#include "matmul/grouped/sm90_boxes.cuh"
#include "matmul/grouped/sm90_loop.cuh"
#include "matmul/grouped/sm90_write.cuh"
#include "matmul/sm90/barriers.cuh"

namespace kernel_hub::matmul::grouped {

// `make_walk()` reads global memory. Policy: kClips (rows behind a product's last are outside the
// maps), kFinishes (bias and activation), side_a and side_b: the rows of a product's matrices,
// of_a, of_b and of_out: the two outer coordinates of these, target: where its results go.
// partials, arrivals: memory for tiles of which two blocks share k (or null: none are), arrivals of
// zeros, which they are again afterwards. `is_plain`: neither bias nor activation, and out takes 16
// bytes at once; without kClips also out of T.
template <typename T, typename C, typename Policy, typename MakeWalk>
__device__ __forceinline__ void grouped_sm90(const Policy& policy, const MakeWalk& make_walk,
                                             const CUtensorMap* out_map, const CUtensorMap* a_map,
                                             const CUtensorMap* b_map, float* partials,
                                             int* arrivals, int columns, int k, bool is_plain) {
    const uint32_t ring_base = keep(shared_address(dynamic_shared()));
    const uint32_t full = ring_base + C::kBarriersAt, empty = full + 8 * C::kStages;
    Record* records = reinterpret_cast<Record*>(dynamic_shared() + C::kRecordsAt);
    const uint32_t rank = C::kPairs ? cluster_rank() : 0;
    const int warp = warp_index(), warpgroup = warp / 4;
    const int num_steps = (k + kBlockK - 1) / kBlockK;

    if (threadIdx.x == 0) {
        tma_prefetch_map(a_map);
        tma_prefetch_map(b_map);
        if (is_plain) {
            tma_prefetch_map(out_map);
        }
        make_barriers<C::kStages>(full, empty, 1, C::kConsumers * C::kClusterSize);
    }
    await_barriers<C::kPairs>();
    wait_for_launch_before();

    if (warpgroup == (C::kIsLean ? C::kConsumers : 0)) {
        if constexpr (C::kTradesRegisters) {
            release_registers<C::kProducerRegisters>();
        }
        if (C::kIsLean || warp == 0) {
            auto walk = make_walk();
            produce_grouped<C>(walk, policy, a_map, b_map, ring_base, full, empty, records, rank,
                               num_steps, partials && num_steps >= 2);
            allow_next_launch();
        }
    } else {
        if constexpr (C::kTradesRegisters) {
            acquire_registers<C::kConsumerRegisters>();
        }
        const int consumer = warpgroup - (C::kIsLean ? 0 : 1), thread = threadIdx.x % 128;
        const uint32_t rows_at = descriptor_low(ring_base + consumer * 64 * kRowBytes, 16);
        const uint32_t columns_at = descriptor_low(ring_base + C::kTileBytesM, 16);
        const uint32_t boxes = ring_base + C::kBoxesAt + consumer * C::kBoxes * C::kOutBoxBytes;
        const int barrier = 1 + consumer;
        Ring<C::kStages> ring;
        for (;;) {
            mbarrier_wait(full + 8 * ring.stage, ring.parity);
            const Record record = records[ring.stage];
            if (record.row < 0) {
                break;
            }
            // The shuffle tells the compiler that the number is the warp's.
            const int steps = C::kShares ? __shfl_sync(~0u, record.num_steps, 0) : num_steps;
            const int row = record.row + (C::kSwaps ? 0 : 64 * consumer);
            const int column = record.column + (C::kSwaps ? 64 * consumer : 0);
            if (row >= record.end_row || column >= columns) {
                pass_grouped<C>(ring, full, empty, thread, steps, barrier);
                continue;
            }
            float acc[C::kSums];
            multiply_grouped<T, C>(acc, ring, rows_at, columns_at, full, empty, thread, steps);
            const Target<T> target = policy.target(record.matrix, record.end_row);
            if constexpr (C::kShares) {
                if (record.share != kAlone) {
                    const int place = record.place * C::kConsumers + consumer;
                    float* sums = partials + static_cast<int64_t>(place) * 64 * C::kBlockN;
                    if (record.share == kSecond) {
                        const Target<T> other{nullptr, sums,       nullptr,  C::kBlockN,
                                              64,      C::kBlockN, kIdentity};
                        write_finished<C, Policy::kFinishes>(other, nullptr, boxes, barrier, 0, 0,
                                                             acc);
                        announce(arrivals + place, thread, barrier);
                    } else {
                        wait_for(arrivals + place, thread, barrier);
                        write_finished<C, Policy::kFinishes>(target, sums, boxes, barrier, row,
                                                             column, acc);
                    }
                    continue;
                }
            }
            if constexpr (Policy::kClips) {
                const auto write = [&](auto* out) {
                    write_boxes<C>(policy, out, is_plain ? out_map : nullptr,
                                   policy.of_out(record.matrix), boxes, barrier, row,
                                   record.end_row, column, acc);
                };
                if (policy.first.out) {
                    write(policy.first.out);
                } else {
                    write(policy.first.out_fp32);
                }
            } else if (!is_plain) {
                write_finished<C, Policy::kFinishes>(target, nullptr, boxes, barrier, row, column,
                                                     acc);
            } else if constexpr (C::kSwaps) {
                write_swapped<C>(target, out_map, policy.of_out(record.matrix), boxes, barrier, row,
                                 column, acc);
            } else {
                write_rows<C>(target, out_map, policy.of_out(record.matrix), boxes, barrier, row,
                              column, acc);
            }
        }
        if (thread == 0) {
            tma_store_wait<0>();
        }
    }
    leave_together<C::kPairs>();
}

// The attributes of a kernel of it.
#define GROUPED_BOUNDS(...)                           \
    __cluster_dims__(__VA_ARGS__::kClusterSize, 1, 1) \
    __launch_bounds__(__VA_ARGS__::kThreads, __VA_ARGS__::kMinBlocks)

}  // namespace kernel_hub::matmul::grouped
