#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/barrier>
// What the reader once called corrupt: 16-bit atomics, a barrier's copies, aligned dynamic shared
// memory beside variables with and without a value.
__device__ float started[3] = {1, 2, 3};
__device__ float empty[5];
extern "C" __global__ void add_half(__half* x, __half y) {
    atomicAdd(x + threadIdx.x, y);
}
extern "C" __global__ void add_bf16(__nv_bfloat16* x, __nv_bfloat16 y) {
    atomicAdd(x + threadIdx.x, y);
}
extern "C" __global__ void swap16(unsigned short* x) {
    atomicCAS(x + threadIdx.x, (unsigned short)1, (unsigned short)2);
}
extern "C" __global__ void one(float* out) {
    extern __shared__ __align__(1024) float tile[];
    tile[threadIdx.x] = out[0];
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x ^ 1] + started[threadIdx.x % 3];
}
extern "C" __global__ void two(float* out) {
    extern __shared__ __align__(1024) float other[];
    other[threadIdx.x] = out[1];
    __syncthreads();
    out[threadIdx.x] = other[threadIdx.x ^ 2];
    empty[threadIdx.x % 5] = out[0];
}
extern "C" __global__ void copies(float* out) {
#pragma nv_diag_suppress static_var_with_dynamic_init
    __shared__ cuda::barrier<cuda::thread_scope_block> bar;
    __shared__ float tile[128];
    if (threadIdx.x == 0) init(&bar, blockDim.x);
    __syncthreads();
    cuda::memcpy_async(cooperative_groups::this_thread_block(), tile, out, sizeof tile, bar);
    bar.arrive_and_wait();
    out[threadIdx.x] = tile[threadIdx.x % 128];
}
