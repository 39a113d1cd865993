// flash_attention_sm90.cu, flash_attention_split_sm90.cu: a block, from its barriers to its roles.
#pragma once

#include <type_traits>

#include "attention/sm90/consumer.cuh"
#include "attention/sm90/empty_tiles.cuh"
#include "attention/sm90/producer.cuh"
#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/mbarrier.cuh"
#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"

namespace kernel_hub::attention::sm90 {

template <class C>
__device__ __forceinline__ void flash_attention_sm90(const Parameters& p) {
    __shared__ __align__(8) uint64_t barriers[Shared<C>::kCount];
    __shared__ __align__(16) Tile tiles[kTileSlots];
    __shared__ std::conditional_t<C::kSplit, Line, Order> order;
    Shared<C> shared;
    shared.q = (shared_address(dynamic_shared()) + 1023) / 1024 * 1024;
    shared.k = shared.q + C::kQStages * C::kConsumers * C::kQBytes;
    shared.v = shared.k + C::kStages * C::kKBytes;
    shared.barriers = shared_address(barriers);
    shared.tiles = tiles;
    shared.tiles_address = shared_address(tiles);
    if constexpr (C::kSplit) {
        shared.line = &order;
    } else {
        shared.order = &order;
    }

    if (threadIdx.x == 0) {
        tma_prefetch_map(p.q);
        tma_prefetch_map(p.k);
        tma_prefetch_map(p.v);
        for (int i = 0; i < C::kQStages * C::kConsumers; ++i) {
            mbarrier_init(shared.barrier(Shared<C>::kQFull + i), 1);
            mbarrier_init(shared.barrier(Shared<C>::kQEmpty + i), 1);
        }
        for (int i = 0; i < C::kStages; ++i) {
            mbarrier_init(shared.k_full(i), 1);
            mbarrier_init(shared.k_empty(i), C::kConsumers);
            mbarrier_init(shared.v_full(i), 1);
            mbarrier_init(shared.v_empty(i), C::kConsumers);
        }
        for (int i = 0; i < kTileSlots; ++i) {
            mbarrier_init(shared.tile_full(i), 1);
            mbarrier_init(shared.tile_empty(i), 4 * C::kConsumers + 2);
        }
        if constexpr (C::kSplit) {
            mbarrier_init(shared.asked(), 1);
        }
        fence_mbarrier_init();
    }
    wait_for_launch_before();
    if constexpr (C::kSplit) {
        make_line<C>(p, order);
    } else if (has_order(p)) {
        make_order<C>(p, order);
    } else if (threadIdx.x == 0) {
        order.count = 0;
    }
    __syncthreads();

    const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        release_registers<C::kProducerRegisters>();
        const int warp_idx = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);
        if (warp_idx < 2) {
            Loader<C> loader(p, shared, warp_idx == 1);
            if constexpr (C::kSplit) {
                loader.run_share();
            } else {
                loader.run();
            }
        } else if constexpr (C::kSplit) {
            if (warp_idx == 2) {
                deal_share<C>(p, shared);
            } else {
                __threadfence();      // the merge reads the line before it waits
                allow_next_launch();  // the merge, which writes what sees no keys
                if constexpr (C::kHasParts) {
                    if (is_alone(p)) {
                        write_empty_tiles<C>(p);
                    }
                }
            }
        } else {
            allow_next_launch();  // all blocks of this one run at a time
            if (C::kMask != Mask::kFull || p.has_foreign_rows || p.cu_seqlens_q) {
                write_empty_tiles<C>(p);
            }
        }
    } else {
        acquire_registers<C::kConsumerRegisters>();
        Consumer<C> consumer(p, shared, warpgroup - 1);
        consumer.run();
    }
}

}  // namespace kernel_hub::attention::sm90
