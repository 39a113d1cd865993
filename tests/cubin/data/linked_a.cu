// Separate compilation, linked by nvlink with linked_b.cu: function pointers, calls across files.
extern __device__ int outside(int);
typedef int (*Function)(int);
extern __device__ Function functions[2];

extern "C" __global__ void caller(int* out) { out[0] = outside(out[0]) + functions[out[1]](out[2]); }
