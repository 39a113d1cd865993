// How tiles leave linear_sm90.cu: rounded with their epilogue, transposed, or added up over blocks.
#pragma once

#include <type_traits>

#include "kernel_hub/linear.cuh"
#include "kernel_hub/linear_sm90_tiles.cuh"
#include "kernel_hub/sm90.cuh"

namespace kernel_hub {

constexpr int kPlain = -1;  // an epilogue that only rounds

// Writes 64 rows of a tile, of which this warpgroup's part begins at (first_row, column): 64
// columns at a time through boxes in shared memory and the copy engine, what is left of 64 from
// registers. `epilogue` is aligned.
// NOTE: one group of 32 columns is finished and gone before the next: the accumulators of wgmma are
// one block of registers, and a second copy of them spills. And the code is straight for each
// activation: jumps over the others' code miss the instruction cache in every group.
template <typename C, int kActivation, typename T, typename Out>
__device__ __forceinline__ void write_aligned(const Epilogue<T, Out>& epilogue,
                                              const CUtensorMap* out_map, const uint32_t* tile_bias,
                                              uint32_t boxes, int barrier, int first_row,
                                              int column, const float (&acc)[C::kParts][C::kSums],
                                              int fragment) {
    const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    const int row = first_row + warp * 16 + lane / 4;
    constexpr bool kThroughBoxes = C::kBoxes > 0 && sizeof(Out) == 2;
    constexpr int kPasses = kThroughBoxes ? C::kBlockN / kBoxColumns : 0;
    constexpr int kBatch = kThroughBoxes ? 2 * C::kBoxes : 1;  // in groups
#pragma unroll
    for (int group = 0; group < C::kBlockN / 32; ++group) {
        if (group < 2 * kPasses && group % kBatch == 0) {
            // The boxes must have been read by the stores before.
            if (thread == 0) {
                tma_store_wait<0>();
            }
            named_barrier_sync(barrier, 128);
        }
        float values[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int at = 16 * group + i;
            values[i] = acc[fragment * C::kPieces + at / C::kSums][at % C::kSums];
        }
        if constexpr (kActivation != kPlain) {
            if (epilogue.bias) {
                epilogue.add_bias(tile_bias + 16 * group, values);
            }
            activate(values, kActivation);
            if (epilogue.adds_vectors()) {
                uint4 added[2];
                epilogue.load_residual(row, column + 32 * group, added);
                epilogue.add_residual(added, values);
            }
        }
        if constexpr (kThroughBoxes) {
            if (group < 2 * kPasses) {
                const uint32_t box = boxes + group % kBatch / 2 * kBoxBytes;
#pragma unroll
                for (int j = 0; j < 4; j += 2) {
                    const int chunk = group % 2 * 4 + j + lane / 16;
                    const int box_row = warp * 16 + lane % 16;
                    uint32_t words[4];
#pragma unroll
                    for (int w = 0; w < 4; ++w) {
                        words[w] = pack2<Out>(values[4 * j + 2 * w], values[4 * j + 2 * w + 1]);
                    }
                    stmatrix_x4(box + box_row * kRowBytes + (chunk ^ (lane % 8)) * 16, words[0],
                                words[1], words[2], words[3]);
                }
                if ((group + 1) % kBatch == 0 || group + 1 == 2 * kPasses) {
                    fence_proxy_async();
                    named_barrier_sync(barrier, 128);
                    if (thread == 0) {
                        const int first = group / kBatch * kBatch;
#pragma unroll
                        for (int from = first; from <= group; from += 2) {
                            tma_store_2d(out_map, boxes + (from - first) / 2 * kBoxBytes,
                                         column + 32 * from, first_row);
                        }
                        tma_store_commit();
                    }
                }
                continue;
            }
        }
        epilogue.put_32_aligned(row, column + 32 * group, values);
    }
}

// The same for any alignment, one element at a time.
template <typename C, typename T, typename Out>
__device__ __forceinline__ void write_unaligned(const Epilogue<T, Out>& epilogue,
                                                const uint32_t* tile_bias, int first_row,
                                                int column, const float (&acc)[C::kParts][C::kSums],
                                                int fragment) {
    const int row = first_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int group = 0; group < C::kBlockN / 32; ++group) {
        float values[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int at = 16 * group + i;
            values[i] = acc[fragment * C::kPieces + at / C::kSums][at % C::kSums];
        }
        if (epilogue.bias) {
            epilogue.add_bias(tile_bias + 16 * group, values);
        }
        activate(values, epilogue.activation);
        hold_registers(values);  // one copy of what follows, not one for each activation
        epilogue.put_32_scalar(row, column + 32 * group, values);
    }
}

template <typename C, typename T, typename Out>
__device__ __forceinline__ void write_fragment(const Epilogue<T, Out>& epilogue,
                                               const CUtensorMap* out_map,
                                               const uint32_t* tile_bias, uint32_t boxes,
                                               int barrier, int first_row, int column,
                                               const float (&acc)[C::kParts][C::kSums],
                                               int fragment) {
    const auto write = [&](auto activation) {
        write_aligned<C, decltype(activation)::value>(epilogue, out_map, tile_bias, boxes, barrier,
                                                      first_row, column, acc, fragment);
    };
    if (!epilogue.is_aligned) {
        write_unaligned<C>(epilogue, tile_bias, first_row, column, acc, fragment);
    } else if (epilogue.activation == kGelu) {
        write(std::integral_constant<int, kGelu>());
    } else if (epilogue.activation == kSilu) {
        write(std::integral_constant<int, kSilu>());
    } else if (epilogue.activation == kRelu) {
        write(std::integral_constant<int, kRelu>());
    } else if (epilogue.bias || epilogue.residual) {
        write(std::integral_constant<int, kIdentity>());
    } else {
        write(std::integral_constant<int, kPlain>());
    }
}

// Writes a transposed tile, of which this warpgroup's part begins at (first_row, column) of the
// product: through a box where it can.
template <typename C, typename T, typename Out>
__device__ __forceinline__ void write_swapped(const Epilogue<T, Out>& epilogue,
                                              const CUtensorMap* out_map, uint32_t box, int barrier,
                                              int first_row, int column, float (&acc)[C::kSums]) {
    const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    const int row = first_row + warp * 16 + lane / 4;
    if (epilogue.bias) {
        const float low = row < epilogue.n ? to_float(__ldg(epilogue.bias + row)) : 0.0f;
        const float high = row + 8 < epilogue.n ? to_float(__ldg(epilogue.bias + row + 8)) : 0.0f;
#pragma unroll
        for (int i = 0; i < C::kSums; ++i) {
            acc[i] += i / 2 % 2 ? high : low;
        }
    }
    activate(acc, epilogue.activation);
    if constexpr (C::kBoxes > 0 && sizeof(Out) == 2) {
        if (epilogue.is_aligned && !epilogue.residual) {
            if (thread == 0) {
                tma_store_wait<0>();
            }
            named_barrier_sync(barrier, 128);
#pragma unroll
            for (int j = 0; j < C::kSums / 4; j += 2) {
                uint32_t words[4];
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    words[w] = pack2<Out>(acc[4 * j + 2 * w], acc[4 * j + 2 * w + 1]);
                }
                const int box_row = 8 * (j + lane / 16) + lane % 8;
                const int chunk = 2 * warp + lane / 8 % 2;
                stmatrix_x4_trans(box + box_row * kRowBytes + (chunk ^ (lane % 8)) * 16, words[0],
                                  words[1], words[2], words[3]);
            }
            fence_proxy_async();
            named_barrier_sync(barrier, 128);
            if (thread == 0) {
                tma_store_2d(out_map, box, first_row, column);
                tma_store_commit();
            }
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < C::kSums; ++i) {
        epilogue.put(column + 8 * (i / 4) + 2 * (lane % 4) + i % 2, row + 8 * (i / 2 % 2), acc[i]);
    }
}

// Adds the sums of the blocks of a cluster, in order of their ranks, and writes the tile: each
// block every kSplits-th group of 8 columns.
template <typename C, typename T, typename Out>
__device__ __forceinline__ void merge_and_write(const Epilogue<T, Out>& epilogue, int row,
                                                int column, float (&acc)[C::kSums], uint32_t sums,
                                                uint32_t rank, int thread) {
    constexpr int kThreads = 128 * C::kConsumers;
    // The ring becomes the place of the sums: all must have read it.
    named_barrier_sync(2, kThreads);
#pragma unroll
    for (int i = 0; i < C::kSums / 4; ++i) {
        st_shared(sums + (i * kThreads + thread) * 16, acc[4 * i], acc[4 * i + 1], acc[4 * i + 2],
                  acc[4 * i + 3]);
    }
    cluster_arrive();
    cluster_wait();
    for (int i = rank / C::kSharers; i < C::kSums / 4; i += C::kSplits) {
        float total[4] = {};
#pragma unroll
        for (int split = 0; split < C::kSplits; ++split) {
            const float4 part = ld_shared_cluster(cluster_address(
                sums + (i * kThreads + thread) * 16, split * C::kSharers + rank % C::kSharers));
            total[0] += part.x, total[1] += part.y, total[2] += part.z, total[3] += part.w;
        }
        epilogue.template write_8<C::kSwaps>(row, column + 8 * i, total);
    }
    // No block may leave while its sums are read.
    cluster_arrive();
    cluster_wait();
}

}  // namespace kernel_hub
