// Tiles of seven units of 64 rows of b and all rows of a (up to 208) for two blocks: the consumers
// of matmul/paired/sm90.cuh. Where tiles of whole units are between three and four for each
// multiprocessor, as 448 of 64 rows are, that is three and a half of each.
#pragma once

#include "kernel_hub/wgmma.cuh"
#include "matmul/sm90/loop.cuh"
#include "matmul/sm90/tiles.cuh"

namespace kernel_hub::matmul::paired {

using namespace sm90;  // the ring and the tiles of linear_sm90.cu

// The blocks of a cluster share what they fetch of a, and both fetch and multiply the unit in the
// middle, as both consumers of a block do its third: about half of the columns each, as wide as
// wgmma has them. Columns that are computed twice are the same bits.
template <int kStages_>
struct SevenConfig : Config<kSwapped, 2, 1, 208, kStages_, 2, 1, 1, 0, 1> {
    static constexpr bool kIsSeven = true;
    static constexpr int kBlockM = 224, kFetchedRows = 256;
    static constexpr int kThirdN = 112, kMiddleN = 64, kMiddleStep = kThirdN - kMiddleN;
    static constexpr uint32_t kTileBytesM = kFetchedRows * kRowBytes;
    static constexpr uint32_t kStageBytes = kTileBytesM + SevenConfig::kTileBytesN;
    static constexpr uint32_t kBarriersAt = kStages_ * kStageBytes;
    static constexpr uint32_t kBiasAt = kBarriersAt + 16 * kStages_;  // the end: there is none
    static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

    // The first row that a block fetches.
    __device__ static __forceinline__ int first_of(int tile, uint32_t rank) {
        return 448 * tile + 192 * static_cast<int>(rank);
    }
};

// The sums of a consumer's own unit, and of its parts of the third and of the one in the middle.
// rows, columns: of each, as descriptors say them.
template <typename T, typename C>
__device__ __forceinline__ void multiply_three(
    float (&whole)[C::kSums], float (&third)[C::kThirdN / 2], float (&middle)[C::kMiddleN / 2],
    Ring<C::kStages>& ring, const uint32_t (&rows)[3], const uint32_t (&columns)[3], uint32_t full,
    uint32_t empty, uint32_t rank, int thread, int num_steps) {
    const auto hold = [&] {
        hold_registers(whole);
        hold_registers(third);
        hold_registers(middle);
    };
#pragma unroll 1
    for (int step = 0; step < num_steps; ++step) {
        mbarrier_wait(full + 8 * ring.stage, ring.parity);
        const uint32_t offset = ring.stage * (C::kStageBytes >> 4);
        hold();
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBlockK / 16; ++i) {
            const auto add = [&](auto& sums, int of) {
                Wgmma<T>::ss(sums, descriptor(rows[of] + offset, 32 * i),
                             descriptor(columns[of] + offset, 32 * i), step != 0 || i != 0);
            };
            add(whole, 0);
            add(third, 1);
            add(middle, 2);
        }
        wgmma_commit();
        if (step != 0) {
            wgmma_wait<1>();
            release<C>(empty, ring.before(1), rank, thread);
        }
        ring.next();
    }
    wgmma_wait<0>();
    hold();
    release<C>(empty, ring.before(1), rank, thread);
}

template <typename T, typename C, typename Ending>
__device__ __forceinline__ void consume_seven(const Ending& ending, const Raster& raster,
                                              uint32_t ring_base, uint32_t full, uint32_t empty,
                                              uint32_t rank, int num_steps) {
    const int consumer = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, block = rank;
    // The middle lies behind the first block's own units, and ahead of the second's.
    const int units[] = {64 * (block + consumer), 64 * (block + 2), 192 * (1 - block)};
    constexpr int kHalf = C::kBlockN - C::kThirdN;
    const int begins[] = {0, kHalf * consumer, kHalf * block + C::kMiddleStep * consumer};
    constexpr int kRow = kRowBytes >> 4;
    const uint32_t first_row = descriptor_low(ring_base, 16);
    const uint32_t first_column = descriptor_low(ring_base + C::kTileBytesM, 16);
    uint32_t rows[3], columns[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        rows[i] = keep(first_row + kRow * units[i]);
        columns[i] = keep(first_column + kRow * begins[i]);
    }
    Ring<C::kStages> ring;
    for (int tile = blockIdx.x / C::kClusterSize; tile < raster.rows * raster.columns;
         tile += gridDim.x / C::kClusterSize) {
        float whole[C::kSums], third[C::kThirdN / 2], middle[C::kMiddleN / 2];
        multiply_three<T, C>(whole, third, middle, ring, rows, columns, full, empty, rank, thread,
                             num_steps);
        int tile_m, tile_n;
        raster.place(tile, tile_m, tile_n);
        const int row = C::first_of(tile_m, rank) + thread / 32 * 16;
        const int column = tile_n * C::kBlockN;
        const auto write = [&](const auto& sums, int of) {
            // As descriptors have them: there is no register for another form.
            const int unit = (rows[of] - first_row) / kRow;
            const int begin = (columns[of] - first_column) / kRow;
            ending.template write_swapped<sizeof(sums) / sizeof(float)>(column + begin,
                                                                        (row + unit) / 16, sums);
        };
        write(middle, 2);
        write(third, 1);
        write(whole, 0);
    }
}

}  // namespace kernel_hub::matmul::paired
