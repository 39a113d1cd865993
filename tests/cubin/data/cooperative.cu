// grid.sync() beside a kernel without, and a bound on the cluster.
#include <cooperative_groups.h>

extern "C" __global__ void grid_wide(int* out) {
    out[threadIdx.x] = 1;
    cooperative_groups::this_grid().sync();
    out[threadIdx.x] += out[threadIdx.x + 1];
}

#if __CUDA_ARCH__ >= 900
extern "C" __global__ void __launch_bounds__(128, 1, 8) block_wide(int* out) {
#else
extern "C" __global__ void block_wide(int* out) {
#endif
    cooperative_groups::this_thread_block().sync();
    out[0] = 1;
}
