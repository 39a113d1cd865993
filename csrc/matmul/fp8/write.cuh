// How tiles leave linear_fp8_sm90.cu: times their scales, with their epilogue, rounded.
#pragma once

#include "kernel_hub/tma.cuh"
#include "kernel_hub/warpgroup.cuh"
#include "kernel_hub/wgmma.cuh"
#include "matmul/epilogue.cuh"
#include "matmul/fp8/scales.cuh"
#include "matmul/sm90/write.cuh"

namespace kernel_hub::matmul::fp8 {

// The epilogue of matmul/epilogue.cuh behind scales; bias and residual are of the dtype of out.
template <typename Out>
struct ScaledEpilogue : Epilogue<Out, Out> {
    Scales a_scales, b_scales;

    __device__ __forceinline__ ScaledEpilogue(const Epilogue<Out, Out>& base,
                                              const Scales& a_scales, const Scales& b_scales)
        : Epilogue<Out, Out>(base), a_scales(a_scales), b_scales(b_scales) {
        // Of rows that overlap, or of one for all, there is no tensor map.
        this->is_aligned &= !this->residual || this->m <= 1 || this->residual_stride >= this->n;
    }

    __device__ __forceinline__ float bias_of(int column) const {
        return this->bias && column < this->n ? to_float(this->bias[column]) : 0.0f;
    }
};

// Barriers between the consumers and the warp that fetches scales and bias of a tile.
constexpr int kColumnsFetched = 5, kColumnsRead = 6;

// Fetches scale and bias of each column, and the scale of each row, of all tiles that this block
// completes. One warp, while the consumers multiply.
template <typename C, typename Out>
__device__ __forceinline__ void fetch_columns(const ScaledEpilogue<Out>& epilogue,
                                              const Raster& raster, Schedule schedule,
                                              uint32_t rank) {
    constexpr int kThreads = 128 * C::kConsumers + 32;
    float2* columns = reinterpret_cast<float2*>(dynamic_shared() + C::kColumnsAt);
    float* rows = reinterpret_cast<float*>(dynamic_shared() + C::kRowsAt);
    const int lane = threadIdx.x % 32;
    for (Segment segment; schedule.next(segment);) {
        if (schedule.leaves(segment)) {
            continue;
        }
        int tile_m, tile_n;
        raster.place(segment.tile, tile_m, tile_n);
        const int row = (tile_m * C::kClusterM + rank % C::kClusterM) * C::kBlockM + lane;
        const int column = tile_n * C::kBlockN + lane;
#pragma unroll 4
        for (int i = 0; i < C::kBlockN; i += 32) {
            columns[i + lane] =
                make_float2(epilogue.b_scales.of_row(column + i), epilogue.bias_of(column + i));
        }
#pragma unroll
        for (int i = 0; i < C::kBlockM; i += 32) {
            rows[i + lane] = epilogue.a_scales.of_row(row + i);
        }
        named_barrier_arrive(kColumnsFetched, kThreads);
        named_barrier_sync(kColumnsRead, kThreads);
    }
}

// Where results wait for the copy engine, and the ring after a tile's last step of k.
template <typename C>
struct Places {
    RingEnd<C> end;
    uint32_t boxes;
    int consumer;
    bool borrows;

    __device__ __forceinline__ uint32_t borrowed(int steps_ago) const {
        return end.base + end.ring.before(steps_ago) * C::kStageBytes + consumer * kBoxBytes;
    }
};

// Writes 64 rows of a tile from (first_row, column) on: 64 columns at a time through boxes in
// shared memory and the copy engine where it can, else from registers. kIsPlain: straight code for
// aligned results without activation and residual.
// NOTE: else a loop over boxes, of which one branch fetches the sums: it takes 0.8 us a box, and
// straight code for every epilogue would miss the instruction cache in every tile.
template <typename C, bool kIsPlain, typename Out>
__device__ __forceinline__ void write_boxes(const ScaledEpilogue<Out>& epilogue,
                                            const CUtensorMap* out_map, const Places<C>& places,
                                            int first_row, int column,
                                            const float (&acc)[C::kPieces][C::kSums]) {
    const int thread = threadIdx.x % 128, lane = thread % 32, barrier = 3 + places.consumer;
    const int row_in_part = thread / 32 * 16 + lane / 4, row = first_row + row_in_part;
    constexpr bool kHasBoxes = C::kBoxes > 0 && sizeof(Out) == 2;
    const float4* tile_columns = reinterpret_cast<const float4*>(dynamic_shared() + C::kColumnsAt);
    const float* tile_rows = reinterpret_cast<const float*>(dynamic_shared() + C::kRowsAt) +
                             places.consumer * 64 + row_in_part;
    const float of_rows[2] = {tile_rows[0], tile_rows[8]};
    constexpr int kUnroll = kIsPlain ? C::kNumBoxes : 1;
    const bool has_boxes = kIsPlain || (kHasBoxes && epilogue.is_aligned);
    const bool has_arrivals = !kIsPlain && epilogue.adds_vectors();
    int first = 0, next = 0;  // boxes of a batch
    uint32_t box = 0, stride = 0;
#pragma unroll kUnroll
    for (int at = 0; at < C::kNumBoxes; ++at) {
        if (has_boxes && at == next) {
            first = at;
            if (places.borrows && at == 0) {
                next = 2;
                box = places.borrowed(2);
                stride = places.borrowed(1) - box;
            } else {
                // The boxes must have been read by the stores before.
                if (thread == 0) {
                    if (places.borrows && at == 2) {
                        tma_store_wait<1>();  // that of the first batch may be under way
                    } else {
                        tma_store_wait<0>();
                    }
                }
                if (has_arrivals) {
                    places.end.wait();
                }
                named_barrier_sync(barrier, 128);
                next = min(C::kNumBoxes, at + C::kBoxes);
                box = places.boxes;
                stride = kBoxBytes;
            }
        }
        float values[2][16];
#pragma unroll
        for (int of = 0; of < C::kNumBoxes; ++of) {
            if (of == at) {
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                    const int from = 32 * of + i;
                    values[i / 16][i % 16] = acc[from / C::kSums][from % C::kSums];
                }
                // A branch, not a choice for each value.
                hold_registers(values[0]);
                hold_registers(values[1]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int half_column = column + 64 * at + 32 * half;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                // Scale and bias of this lane's two columns.
                const float4 pair = tile_columns[32 * at + 16 * half + 4 * j + lane % 4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& value = values[half][4 * j + i];
                    value = fmaf(value * of_rows[i / 2], i % 2 ? pair.z : pair.x,
                                 i % 2 ? pair.w : pair.y);
                }
            }
            if constexpr (!kIsPlain) {
                activate<Out>(values[half], epilogue.activation);
            }
            if constexpr (kHasBoxes) {
                if (has_arrivals) {
                    const uint32_t from = places.end.arrivals(places.consumer);
                    add_from_box<Out>(from + (at - first) * kBoxBytes, half, values[half]);
                }
                if (has_boxes) {
                    put_in_box<Out>(box + (at - first) * stride, half, values[half]);
                    continue;
                }
            }
            epilogue.put_32(row, half_column, values[half]);
        }
        if (has_boxes && at + 1 == next) {
            fence_proxy_async();
            named_barrier_sync(barrier, 128);
            if (has_arrivals) {
                places.end.release_stage(thread);
            }
            if (thread == 0) {
                for (int i = first; i < next; ++i) {
                    tma_store_2d(out_map, box + (i - first) * stride, column + 64 * i, first_row);
                }
                tma_store_commit();
            }
        }
    }
}

template <typename C, typename Out>
__device__ __forceinline__ void write_scaled(const ScaledEpilogue<Out>& epilogue,
                                             const CUtensorMap* out_map, const Places<C>& places,
                                             int first_row, int column,
                                             const float (&acc)[C::kPieces][C::kSums]) {
    if constexpr (C::kBoxes > 0 && sizeof(Out) == 2) {
        if (epilogue.is_aligned && !epilogue.residual && epilogue.activation == kIdentity) {
            write_boxes<C, true>(epilogue, out_map, places, first_row, column, acc);
            return;
        }
    }
    write_boxes<C, false>(epilogue, out_map, places, first_row, column, acc);
}

}  // namespace kernel_hub::matmul::fp8
