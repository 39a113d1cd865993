// Small kernels for tests/gpu: each shows one thing of a launch to the host.

#include <cooperative_groups.h>
#include <stdint.h>

__constant__ float table[4] = {1.0f, 2.0f, 3.0f, 4.0f};
__device__ int counter;

// out[i] = i-th of `values` by value; a struct parameter of 24 bytes.
struct Values {
    double a;
    float b;
    int c;
    int64_t d;
};
extern "C" __global__ void take_struct(double* out, const Values values) {
    out[0] = values.a;
    out[1] = values.b;
    out[2] = values.c;
    out[3] = static_cast<double>(values.d);
}

extern "C" __global__ void add_table(float* out) { out[threadIdx.x] = table[threadIdx.x]; }

extern "C" __global__ void count(int* out) {
    if (threadIdx.x == 0) {
        out[0] = atomicAdd(&counter, 1);
    }
}

// Dynamic shared memory: the last int of it, written and read back.
extern "C" __global__ void use_shared(int* out, int num_ints) {
    extern __shared__ int memory[];
    memory[num_ints - 1] = 77;
    __syncthreads();
    out[0] = memory[num_ints - 1];
}

// Each block writes its rank in the cluster.
extern "C" __global__ void cluster_rank(int* out) {
    out[blockIdx.x] = static_cast<int>(cooperative_groups::this_cluster().block_rank());
}

// A grid-wide barrier: every block sees every other's value.
extern "C" __global__ void grid_sum(int* out, int* scratch) {
    scratch[blockIdx.x] = static_cast<int>(blockIdx.x);
    cooperative_groups::this_grid().sync();
    int sum = 0;
    for (unsigned i = 0; i < gridDim.x; ++i) {
        sum += scratch[i];
    }
    out[blockIdx.x] = sum;
}

extern "C" __global__ void bad_address(int* out) { out[int64_t{1} << 42] = 1; }

extern "C" __global__ void __cluster_dims__(2, 1, 1) needs_cluster(int* out) { out[blockIdx.x] = 2; }
