// The features whose traces tests/cubin/ looks for in a cubin. Plain enough for nvcc and for NVRTC.
struct Big {
    int values[16];
    double scale;
    char flag;
};

__constant__ float table[64];
__device__ float counter;
__device__ int lookup[8] = {1, 2, 3};

__device__ __noinline__ int factorial(int n) { return n < 2 ? 1 : n * factorial(n - 1); }

extern "C" __global__ void __launch_bounds__(256) scale(float* out, const float* in, int n, float s) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[i] * s * table[i & 63];
}

extern "C" __global__ void __launch_bounds__(128) staged(float* out, const float* in, int n) {
    __shared__ float tile[128];
    extern __shared__ float dynamic[];
    tile[threadIdx.x] = in[threadIdx.x];
    dynamic[threadIdx.x] = in[n];
    __syncthreads();
    out[threadIdx.x] = tile[127 - threadIdx.x] + dynamic[127 - threadIdx.x];
    atomicAdd(&counter, 1.0f);
}

extern "C" __global__ void empty() {}

extern "C" __global__ void by_value(Big big, char c, short s, double d, float* out) {
    out[0] = big.values[3] + big.scale + big.flag + c + s + d + lookup[s & 7];
}

extern "C" __global__ void calls(int* out, int n) {
    int local[64];
    for (int i = 0; i < 64; i++) local[i] = out[i * n];
    printf("%d\n", n);
    out[0] = factorial(n) + local[n & 63];
}

#if __CUDA_ARCH__ >= 900
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(64) clustered(int* out) {
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;");
    out[0] = 1;
}
#endif
