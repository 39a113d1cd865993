// out = act(a b^T + bias) + residual for few rows of a: reads b once, at the speed of memory.
//
//   a (m, k), m <= 8 kColumnTiles; b (n, k), of fp16, bf16 or fp32; sums in fp32; out (m, n)
//
// Parallelisation: a block takes 16 kRowTiles rows of b, its warps take turns along k in chunks of
// 128 bytes, so that no warp waits for another before the block's one reduction. b is the side of
// 16 rows of mma.m16n8k16, a the side of 8 columns. blockIdx.x walks tiles of b (persistent),
// blockIdx.y is a share of k; the shares of a tile are added by the block that ends last, in the
// order of shares. Shared memory: a ring of kStages chunks a warp; behind it two buffers for the
// reduction. A lane copies to the ring what it will read itself: 16 bytes of a row, of which mma
// takes words 0 and 1 as columns 2 q and 2 q + 8 of one step of k, words 2 and 3 of the next. As a
// and b are read alike, the order of k inside a step does not matter, and no lane waits for
// another. fp32 is multiplied in parts (three_products.cuh), summed plainly where it has none.
// Variants: m8, m16: the most rows of a; m8_deep: longer chunks, for the shared memory of sm_90.
// All deterministic. Source: NVIDIA, PTX ISA, "Matrix fragments for mma.m16n8k16".
// kernel_hub: not-for: sm89: it is sm80's code but for the order of instructions, and 8.9 runs that

#include "kernel_hub/dependent_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/mma.cuh"
#include "kernel_hub/three_products.cuh"
#include "kernel_hub/vec.cuh"
#include "matmul/epilogue.cuh"
#include "matmul/few_rows.cuh"

namespace kernel_hub::matmul {

constexpr int kWarps = 8;
constexpr int kSliceBytes = 64;  // of k, 16 a lane

template <typename T, int kRowTiles_, int kColumnTiles_, int kStages_, int kSlices_>
struct SmallM {
    static constexpr int kSlice = kSliceBytes / static_cast<int>(sizeof(T));
    static constexpr int kRowTiles = kRowTiles_, kColumnTiles = kColumnTiles_, kStages = kStages_;
    static constexpr int kSlices = kSlices_, kChunk = kSlices * kSlice;  // of k, a warp's turn
    static constexpr int kWeights = 2 * kRowTiles * kSlices;  // 16-byte vectors a lane and chunk
    static constexpr int kVectors = kWeights + kColumnTiles * kSlices;
    static constexpr int kSums = 4 * kRowTiles * kColumnTiles;  // a lane
    static constexpr int kRingBytes = kWarps * kStages * kVectors * 32 * 16;
    static constexpr int kBufferFloats = kWarps * kSums * 32;

    // Where the sum `at` of a block's kSums * 32 is: the row of a, the row of b within the tile.
    __device__ static __forceinline__ int row_of(int at) {
        return at / 32 / 4 % kColumnTiles * 8 + at % 4 * 2 + at / 32 % 2;
    }
    __device__ static __forceinline__ int column_of(int at) {
        return at / 32 / 4 / kColumnTiles * 16 + at / 32 / 2 % 2 * 8 + at % 32 / 4;
    }
};

template <typename C>
constexpr LaunchFacts facts_of(int blocks_per_sm) {
    return {.threads = 32 * kWarps,
            .shared_bytes = C::kRingBytes + 2 * C::kBufferFloats * 4,
            .blocks_per_sm = blocks_per_sm,
            .block_m = 8 * C::kColumnTiles,
            .block_n = 16 * C::kRowTiles,
            .block_k = C::kChunk,
            .stages = C::kStages};
}

// Where a warp is in its list of (tile, chunk).
struct Walk {
    int tile, chunk;
    __device__ __forceinline__ void next(int first_chunk, int last_chunk) {
        chunk += kWarps;
        if (chunk >= last_chunk) {
            chunk = first_chunk;
            tile += gridDim.x;
        }
    }
};

template <typename T, typename C>
struct Inputs {
    const T* a;
    const T* b;
    int64_t a_stride, b_stride;
    int m, n, k;

    // Starts this lane's copies of one chunk: of the weights, and of a where it may be read.
    __device__ __forceinline__ void fetch(uint32_t slot, int tile, int chunk,
                                          bool has_rows = true) const {
        const int lane = threadIdx.x % 32, row = lane / 4;
        const int64_t column = static_cast<int64_t>(chunk) * C::kChunk + lane % 4 * kVecElems<T>;
#pragma unroll
        for (int i = 0; i < 2 * C::kRowTiles; ++i) {
            const int64_t at = static_cast<int64_t>(tile) * 16 * C::kRowTiles + 8 * i + row;
            const T* from = b + at * b_stride + column;
#pragma unroll
            for (int slice = 0; slice < C::kSlices; ++slice) {
                copy(slot + (i * C::kSlices + slice) * 512, from + slice * C::kSlice, at < n,
                     column + slice * C::kSlice);
            }
        }
#pragma unroll
        for (int i = 0; i < C::kColumnTiles; ++i) {
            const int64_t at = 8 * i + row;
            const T* from = a + at * a_stride + column;
            if (at < m && has_rows) {  // the places of other rows are zero from the start
#pragma unroll
                for (int slice = 0; slice < C::kSlices; ++slice) {
                    copy(slot + (C::kWeights + i * C::kSlices + slice) * 512,
                         from + slice * C::kSlice, true, column + slice * C::kSlice);
                }
            }
        }
    }

  private:
    // 16 bytes from a column on, as far as there is k.
    __device__ __forceinline__ void copy(uint32_t target, const T* from, bool is_row,
                                         int64_t column) const {
        if constexpr (sizeof(T) == 4) {
            const int left = static_cast<int>(k - column);
            cp_async_part(target, from, is_row ? 4 * max(0, min(4, left)) : 0);
        } else {
            cp_async_16(target, from, is_row && column < k);
        }
    }
};

// The product of one slice: four words a lane of 16 rows of b in `low` and `high`, of a in `input`.
template <typename T>
__device__ __forceinline__ void multiply_slice(float (&sums)[4], uint4 low, uint4 high,
                                               uint4 input) {
    const uint32_t first[4] = {low.x, high.x, low.y, high.y};
    const uint32_t second[4] = {low.z, high.z, low.w, high.w};
    if constexpr (sizeof(T) == 4) {
        Parts<4> b[2], a;
        b[0].split(first);
        b[1].split(second);
        a.split({input.x, input.y, input.z, input.w});
        float slice[4];
        mma_tf32_first(slice, b[0].low, a.high[0], a.high[1]);
        mma_tf32(slice, b[1].low, a.high[2], a.high[3]);
        mma_tf32(slice, b[0].high, a.low[0], a.low[1]);
        mma_tf32(slice, b[1].high, a.low[2], a.low[3]);
        mma_tf32(slice, b[0].high, a.high[0], a.high[1]);
        mma_tf32(slice, b[1].high, a.high[2], a.high[3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sums[i] += slice[i];
        }
    } else {
        mma_m16n8k16<T>(sums, first, input.x, input.y);
        mma_m16n8k16<T>(sums, second, input.z, input.w);
    }
}

// sums += the chunk in this lane's places from `slot` on.
template <typename T, typename C>
__device__ __forceinline__ void multiply(const uint4* slot,
                                         float (&sums)[C::kRowTiles][C::kColumnTiles][4]) {
#pragma unroll
    for (int slice = 0; slice < C::kSlices; ++slice) {
        uint4 inputs[C::kColumnTiles];
#pragma unroll
        for (int j = 0; j < C::kColumnTiles; ++j) {
            inputs[j] = slot[(C::kWeights + j * C::kSlices + slice) * 32];
        }
#pragma unroll
        for (int i = 0; i < C::kRowTiles; ++i) {
            const uint4 low = slot[(2 * i * C::kSlices + slice) * 32];
            const uint4 high = slot[((2 * i + 1) * C::kSlices + slice) * 32];
#pragma unroll
            for (int j = 0; j < C::kColumnTiles; ++j) {
                multiply_slice<T>(sums[i][j], low, high, inputs[j]);
            }
        }
    }
}

template <typename T, typename Out, typename C>
__device__ __forceinline__ void linear_small_m(Out* out, float* partials, int* tickets, const T* a,
                                               const T* b, const T* bias, const Out* residual,
                                               int64_t out_stride, int64_t a_stride,
                                               int64_t b_stride, int64_t residual_stride, int m,
                                               int n, int k, int activation, int weights_ready) {
    uint8_t* shared = dynamic_shared();
    float* buffer = reinterpret_cast<float*>(shared + C::kRingBytes);
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
    const Inputs<T, C> inputs{a, b, a_stride, b_stride, m, n, k};
    const Epilogue<T, Out> epilogue(out, bias, residual, out_stride, residual_stride, m, n,
                                    activation);
    constexpr int kTileRows = 16 * C::kRowTiles, kThreads = 32 * kWarps;
    constexpr int kTotals = (C::kSums * 32 + kThreads - 1) / kThreads;  // a thread
    const int num_tiles = (n + kTileRows - 1) / kTileRows;
    const int num_chunks = (k + C::kChunk - 1) / C::kChunk;
    const int num_splits = gridDim.y, split = blockIdx.y;
    const int last_chunk = static_cast<int64_t>(num_chunks) * (split + 1) / num_splits;
    const int first_chunk = static_cast<int64_t>(num_chunks) * split / num_splits + warp_idx;
    const int chunks_per_tile = max(0, (last_chunk - first_chunk + kWarps - 1) / kWarps);

    uint4* ring = reinterpret_cast<uint4*>(shared) +
                  static_cast<int64_t>(warp_idx) * C::kStages * C::kVectors * 32 + lane_idx;
    const uint32_t ring_address = shared_address(ring);
    constexpr int kSlot = C::kVectors * 32;  // in vectors

    // Weights that are ready are read under the end of the launch before. Not beside fp32, whose
    // rows of a may begin and end anywhere.
    const bool leads = kOverlapsLaunches && sizeof(Out) == 2 && weights_ready != 0;
    if (!leads) {
        wait_for_launch_before();
    }
    Walk ahead{chunks_per_tile > 0 ? static_cast<int>(blockIdx.x) : num_tiles, first_chunk};
    Walk first = ahead;
#pragma unroll
    for (int stage = 0; stage < C::kStages; ++stage) {
        if (ahead.tile < num_tiles) {
            inputs.fetch(ring_address + stage * kSlot * 16, ahead.tile, ahead.chunk, !leads);
            ahead.next(first_chunk, last_chunk);
        }
        cp_async_commit();
    }
    if (leads) {
        wait_for_launch_before();
        load_first_rows<C>(ring, a, a_stride, m, k, lane_idx, [&] {
            const int chunk = first.tile < num_tiles ? first.chunk : -1;
            first.next(first_chunk, last_chunk);
            return chunk;
        });
    }

    zero_missing_rows<C>(ring, lane_idx, m);

    int stage = 0;
    for (int tile = blockIdx.x, turn = 0; tile < num_tiles; tile += gridDim.x, turn ^= 1) {
        // What is added to this thread's results, so that nothing waits for it after the product.
        T more_bias[kTotals];
        Out more[kTotals];
#pragma unroll
        for (int i = 0; i < kTotals; ++i) {
            const int at = threadIdx.x + i * kThreads;
            const int row = C::row_of(at), column = tile * kTileRows + C::column_of(at);
            if (at < C::kSums * 32 && row < m && column < n) {
                if (bias) {
                    more_bias[i] = bias[column];
                }
                if (residual) {
                    more[i] = residual[row * residual_stride + column];
                }
            }
        }

        float sums[C::kRowTiles][C::kColumnTiles][4] = {};
        for (int i = 0; i < chunks_per_tile; ++i) {
            cp_async_wait<C::kStages - 1>();
            multiply<T, C>(ring + stage * kSlot, sums);
            if (ahead.tile < num_tiles) {
                inputs.fetch(ring_address + stage * kSlot * 16, ahead.tile, ahead.chunk);
                ahead.next(first_chunk, last_chunk);
            }
            cp_async_commit();
            stage = stage + 1 == C::kStages ? 0 : stage + 1;
        }

        if (ahead.tile >= num_tiles) {
            allow_next_launch();
        }
        // Add the warps' sums, in their order.
        float* mine = buffer + turn * C::kBufferFloats;
#pragma unroll
        for (int i = 0; i < C::kSums; ++i) {
            mine[(warp_idx * C::kSums + i) * 32 + lane_idx] =
                sums[i / 4 / C::kColumnTiles][i / 4 % C::kColumnTiles][i % 4];
        }
        __syncthreads();
        float totals[kTotals];
#pragma unroll
        for (int i = 0; i < kTotals; ++i) {
            const int at = threadIdx.x + i * kThreads;
            totals[i] = 0.0f;
            if (at < C::kSums * 32) {
#pragma unroll
                for (int warp = 0; warp < kWarps; ++warp) {
                    totals[i] += mine[warp * C::kSums * 32 + at];
                }
            }
        }

        // Add the shares of k, in their order, in the block that comes last.
        if (num_splits > 1) {
            __shared__ int is_last;
            const int64_t share = static_cast<int64_t>(num_tiles) * C::kSums * 32;
            float* place = partials + static_cast<int64_t>(tile) * C::kSums * 32;
#pragma unroll
            for (int i = 0; i < kTotals; ++i) {
                const int at = threadIdx.x + i * kThreads;
                if (at < C::kSums * 32) {
                    place[split * share + at] = totals[i];
                }
            }
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) {
                is_last = atomicAdd(tickets + tile, 1) == num_splits - 1;
                if (is_last) {
                    tickets[tile] = 0;  // for the next launch
                }
            }
            __syncthreads();
            if (!is_last) {
                continue;
            }
            __threadfence();
#pragma unroll
            for (int i = 0; i < kTotals; ++i) {
                const int at = threadIdx.x + i * kThreads;
                totals[i] = 0.0f;
                if (at < C::kSums * 32) {
                    for (int other = 0; other < num_splits; ++other) {
                        totals[i] += place[other * share + at];
                    }
                }
            }
        }

#pragma unroll
        for (int i = 0; i < kTotals; ++i) {
            const int at = threadIdx.x + i * kThreads;
            if (at < C::kSums * 32) {
                float value[1] = {totals[i]};
                if constexpr (sizeof(T) == 4) {
                    const int64_t row = C::row_of(at);
                    const int64_t column =
                        static_cast<int64_t>(tile) * kTileRows + C::column_of(at);
                    if (!is_number(value[0]) && row < m && column < n) {
                        value[0] = plain_product(a + row * a_stride, b + column * b_stride, k);
                    }
                }
                if (bias) {
                    value[0] += to_float(more_bias[i]);
                }
                activate<Out>(value, activation);
                if (residual) {
                    value[0] += to_float(more[i]);
                }
                epilogue.put_complete(C::row_of(at), tile * kTileRows + C::column_of(at), value[0]);
            }
        }
    }
}

#define EXPORT_LINEAR_SMALL_M(NAME, T, OUT, BLOCKS, ...)                                       \
    DESCRIBED(                                                                                 \
        NAME, "x: at most as many blocks as tiles of block_n rows of b, y: shares of k",       \
        (facts_of<SmallM<T, __VA_ARGS__>>(BLOCKS)),                                            \
        extern "C" __global__ void __launch_bounds__(256, BLOCKS) NAME(                        \
            OUT* out, float* partials, int* tickets, const T* a, const T* b, const T* bias,    \
            const OUT* residual, int64_t out_stride, int64_t a_stride, int64_t b_stride,       \
            int64_t residual_stride, int m, int n, int k, int activation, int weights_ready) { \
            linear_small_m<T, OUT, SmallM<T, __VA_ARGS__>>(                                    \
                out, partials, tickets, a, b, bias, residual, out_stride, a_stride, b_stride,  \
                residual_stride, m, n, k, activation, weights_ready);                          \
        })

// clang-format off
#define EXPORT_BOTH(DTYPE, T, SUFFIX, OUT) \
    EXPORT_LINEAR_SMALL_M(linear_##DTYPE##_m8##SUFFIX, T, OUT, 2, 1, 1, 3, 2) \
    EXPORT_LINEAR_SMALL_M(linear_##DTYPE##_m16##SUFFIX, T, OUT, 2, 1, 2, 2, 2)
EXPORT_BOTH(fp16, __half, , __half)
EXPORT_BOTH(bf16, __nv_bfloat16, , __nv_bfloat16)
EXPORT_BOTH(fp16, __half, _fp32, float)
EXPORT_BOTH(bf16, __nv_bfloat16, _fp32, float)
EXPORT_BOTH(fp32, float, , float)
EXPORT_LINEAR_SMALL_M(linear_fp16_m8_deep, __half, __half, 1, 1, 1, 4, 4)
EXPORT_LINEAR_SMALL_M(linear_bf16_m8_deep, __nv_bfloat16, __nv_bfloat16, 1, 1, 1, 4, 4)
// clang-format on

}  // namespace kernel_hub::matmul
