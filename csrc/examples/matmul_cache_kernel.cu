// A 512 x 512 matrix product through shared memory: the smallest complete shipped kernel.
//
//   c = a @ b,  a and b fp16, c fp32, all row-major 512 x 512, fp32 accumulation
//
// Launch exactly: gridDim (8, 8, 1), blockDim (32, 32, 1), sharedMemBytes 16384.
// Parallelisation: one block a 64 x 64 tile of c; a thread computes two neighbouring columns of two
// rows 32 apart.
// Shared memory: a 64 x 64 tile of a, then one of b, 8 KiB each.
// NOTE: the name and the order of the parameters (inputs first) are those of the study that asked
// for this library; every other kernel here takes its outputs first.

#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/vec.cuh"

namespace kernel_hub::examples {

constexpr int kMatrixSize = 512;
constexpr int kTile = 64;
constexpr int kBlockWidth = 32;
constexpr int kVecsPerTileRow = kTile / kVecElems<__half>;

static_assert(
    2 * kTile * kVecsPerTileRow == kBlockWidth * kBlockWidth,
    "each thread copies one 16-byte vector: the first half of the block a's tile, the second b's");

__device__ __forceinline__ void matmul_tile(const __half* a, const __half* b, float* c,
                                            uint4* tiles) {
    const __half2* a_tile = reinterpret_cast<const __half2*>(tiles);
    const __half2* b_tile = reinterpret_cast<const __half2*>(tiles + kTile * kVecsPerTileRow);
    const int first_row = blockIdx.y * kTile;
    const int first_column = blockIdx.x * kTile;

    const int thread_idx = threadIdx.y * kBlockWidth + threadIdx.x;
    const bool copies_a = thread_idx < kTile * kVecsPerTileRow;
    const int copy_idx = thread_idx % (kTile * kVecsPerTileRow);
    const int copy_row = copy_idx / kVecsPerTileRow;
    const int copy_column = copy_idx % kVecsPerTileRow * kVecElems<__half>;

    float2 sums[2] = {};
    for (int k = 0; k < kMatrixSize; k += kTile) {
        // Copy one tile of each matrix.
        const __half* from = copies_a
                                 ? a + (first_row + copy_row) * kMatrixSize + k + copy_column
                                 : b + (k + copy_row) * kMatrixSize + first_column + copy_column;
        tiles[thread_idx] = load_shared_by_blocks(from);
        __syncthreads();

        // Multiply, two steps of k at a time.
#pragma unroll 8
        for (int i = 0; i < kTile; i += 2) {
            const float2 b_even = __half22float2(b_tile[(i * kTile) / 2 + threadIdx.x]);
            const float2 b_odd = __half22float2(b_tile[((i + 1) * kTile) / 2 + threadIdx.x]);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float2 a_pair =
                    __half22float2(a_tile[((threadIdx.y + r * kBlockWidth) * kTile + i) / 2]);
                sums[r].x += a_pair.x * b_even.x + a_pair.y * b_odd.x;
                sums[r].y += a_pair.x * b_even.y + a_pair.y * b_odd.y;
            }
        }
        __syncthreads();
    }

#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = first_row + threadIdx.y + r * kBlockWidth;
        *reinterpret_cast<float2*>(c + row * kMatrixSize + first_column + 2 * threadIdx.x) =
            sums[r];
    }
}

DESCRIBED(
    matmul_cache_kernel_0d1d2d, "(8, 8, 1): tiles of 64 x 64 of c",
    (.threads = kBlockWidth, .threads_y = kBlockWidth,
     .shared_bytes = 2 * kTile * kTile * sizeof(__half)),
    extern "C" __global__ void
    __launch_bounds__(1024) matmul_cache_kernel_0d1d2d(const __half* a, const __half* b, float* c) {
        extern __shared__ uint4 tiles[];
        matmul_tile(a, b, c, tiles);
    })

}  // namespace kernel_hub::examples
