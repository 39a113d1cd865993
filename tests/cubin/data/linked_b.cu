__device__ int outside(int x) {
    __shared__ int tile[10];
    tile[x] = x;
    __syncthreads();
    return x * 3 + tile[x + 1];
}
__device__ int square(int x) { return x * x; }
typedef int (*Function)(int);
__device__ Function functions[2] = {square, outside};
