// out = act(a b^T + bias) + residual with mma.sync: the body for every GPU since sm_80.
//
//   a (m, k), b (n, k), of fp16 or bf16, k a multiple of 8; sums in fp32; out (m, n)
//
// Parallelisation: a block of 4 warps, 2 x 2, computes a kBlockM x 128 tile; blockIdx.x walks tiles
// in groups of 8 rows of tiles, so that what is fetched stays in the L2; blockIdx.y is a share of
// k. The shares of a tile are added by the block that ends last, in the order of shares. Shared
// memory: a ring of kStages x (kBlockM rows of a, 128 rows of b), 32 elements of k each. Two rows
// share 128 bytes; their 16-byte chunks are swapped by the pair's index, so that ldmatrix meets no
// bank twice. Variants: 128x128 and 64x128, for few tiles. All deterministic. Source: NVIDIA, PTX
// ISA, "Matrix fragments for mma.m16n8k16".

#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/vec.cuh"
#include "matmul/epilogue.cuh"
#include "matmul/stages.cuh"

namespace kernel_hub::matmul {

constexpr int kGroup = 8;

// Leaves this block's sums in `partials`; in the block that comes last for its tile, acc becomes
// the sum of all shares, and the result is true.
template <typename C>
__device__ __forceinline__ bool merge(float (&acc)[C::kTilesM][C::kTilesN][4], float* partials,
                                      int* ticket, int tile, int num_tiles) {
    __shared__ int is_last;
    const int num_splits = gridDim.y;
    const int64_t share = static_cast<int64_t>(num_tiles) * C::kSums * kThreads;
    float* mine = partials + static_cast<int64_t>(tile) * C::kSums * kThreads + threadIdx.x;
#pragma unroll
    for (int i = 0; i < C::kSums; ++i) {
        mine[blockIdx.y * share + i * kThreads] =
            acc[i / 4 / C::kTilesN][i / 4 % C::kTilesN][i % 4];
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(ticket, 1) == num_splits - 1;
        if (is_last) {
            *ticket = 0;  // for the next launch
        }
    }
    __syncthreads();
    if (!is_last) {
        return false;
    }
    __threadfence();
    for (int split = 0; split < num_splits; ++split) {
#pragma unroll
        for (int i = 0; i < C::kSums; ++i) {
            float& sum = acc[i / 4 / C::kTilesN][i / 4 % C::kTilesN][i % 4];
            sum = mine[split * share + i * kThreads] + (split == 0 ? 0.0f : sum);
        }
    }
    return true;
}

template <typename T, typename Out, typename C>
__device__ __forceinline__ void linear(Out* out, float* partials, int* tickets, const T* a,
                                       const T* b, const T* bias, const Out* residual,
                                       int64_t out_stride, int64_t a_stride, int64_t b_stride,
                                       int64_t residual_stride, int m, int n, int k,
                                       int activation) {
    const uint32_t ring = shared_address(dynamic_shared());
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
    const int rows = (m + C::kBlockM - 1) / C::kBlockM, columns = (n + kBlockN - 1) / kBlockN;
    const int of_group = kGroup * columns, tile = blockIdx.x;
    const int first_row = tile / of_group * kGroup, in_group = tile % of_group;
    const int group_rows = min(kGroup, rows - first_row);
    const int row = (first_row + in_group % group_rows) * C::kBlockM;
    const int column = in_group / group_rows * kBlockN;

    const int all_steps = (k + kBlockK - 1) / kBlockK;
    const int first_step = static_cast<int64_t>(all_steps) * blockIdx.y / gridDim.y;
    const int last_step = static_cast<int64_t>(all_steps) * (blockIdx.y + 1) / gridDim.y;
    const T* a_tile = a + row * a_stride;
    const T* b_tile = b + column * b_stride;
    const auto fetch_step = [&](int step, int stage) {
        if (step < last_step) {
            const int64_t at = static_cast<int64_t>(step) * kBlockK;
            const uint32_t target = ring + stage * C::kStageBytes;
            fetch_rows<C::kBlockM>(target, a_tile + at, a_stride, m - row,
                                   k - static_cast<int>(at));
            fetch_rows<kBlockN>(target + C::kBlockM * kBlockK * 2, b_tile + at, b_stride,
                                n - column, k - static_cast<int>(at));
        }
        cp_async_commit();
    };

    float acc[C::kTilesM][C::kTilesN][4] = {};
    const int warp_row = warp_idx / 2 * C::kWarpM, warp_column = warp_idx % 2 * C::kWarpN;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        fetch_step(first_step + i, i);
    }
    int stage = 0;
    for (int step = first_step; step < last_step; ++step) {
        cp_async_wait<kStages - 2>();
        // All warps see this stage, and have left the one that is fetched into next.
        __syncthreads();
        fetch_step(step + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
        multiply_stage<T, C>(ring + stage * C::kStageBytes, warp_row, warp_column, acc);
        stage = stage + 1 == kStages ? 0 : stage + 1;
    }

    if (gridDim.y > 1 && !merge<C>(acc, partials, tickets + tile, tile, gridDim.x)) {
        return;
    }
    const Epilogue<T, Out> epilogue(out, bias, residual, out_stride, residual_stride, m, n,
                                    activation);
    constexpr int kGroups = C::kTilesM * C::kTilesN / 4;  // of two rows of 32 columns
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
        float values[16];
        pick<kGroups>(values, group,
                      [&](int i) { return acc[i / 4 / C::kTilesN][i / 4 % C::kTilesN][i % 4]; });
        const int first = row + warp_row + group / (C::kTilesN / 4) * 16 + lane_idx / 4;
        const int at = column + warp_column + group % (C::kTilesN / 4) * 32;
        epilogue.finish_32(first, at, values);
        epilogue.put_32(first, at, values);
    }
}

#define EXPORT_LINEAR(NAME, T, OUT, BLOCK_M)                                                     \
    DESCRIBED(                                                                                   \
        NAME, "x: tiles of block_m x block_n, y: shares of k", (facts_of<Tile<BLOCK_M>>()),      \
        extern "C" __global__ void __launch_bounds__(kThreads, 2) NAME(                          \
            OUT* out, float* partials, int* tickets, const T* a, const T* b, const T* bias,      \
            const OUT* residual, int64_t out_stride, int64_t a_stride, int64_t b_stride,         \
            int64_t residual_stride, int m, int n, int k, int activation) {                      \
            linear<T, OUT, Tile<BLOCK_M>>(out, partials, tickets, a, b, bias, residual,          \
                                          out_stride, a_stride, b_stride, residual_stride, m, n, \
                                          k, activation);                                        \
        })

#define EXPORT_LINEAR_TILES(NAME, T, OUT, SUFFIX)      \
    EXPORT_LINEAR(NAME##_128x128##SUFFIX, T, OUT, 128) \
    EXPORT_LINEAR(NAME##_64x128##SUFFIX, T, OUT, 64)

EXPORT_LINEAR_TILES(linear_fp16, __half, __half, )
EXPORT_LINEAR_TILES(linear_bf16, __nv_bfloat16, __nv_bfloat16, )
EXPORT_LINEAR_TILES(linear_fp16, __half, float, _fp32)
EXPORT_LINEAR_TILES(linear_bf16, __nv_bfloat16, float, _fp32)

}  // namespace kernel_hub::matmul
