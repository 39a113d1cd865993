// The kernels of a client as its author would write them: one block a row, one byte a thread.
// make_data.py builds it for GPUs of two generations; the numbers are what the tests compare.
#include <cuda_fp16.h>
#include <stdint.h>

extern "C" __global__ void int4WeightCompression(const int8_t* in, int8_t* out, int n, int m) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * m;
    for (int j = threadIdx.x; j < m; j += blockDim.x) {
        out[row + j] = in[2 * (row + j)] << 4 | (in[2 * (row + j) + 1] & 15);
    }
}

extern "C" __global__ void int4WeightExtractionHalf(const int8_t* weight, const __half* scale,
                                                    __half* out, int n, int m) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * m;
    const float factor = __half2float(scale[blockIdx.x]);
    for (int j = threadIdx.x; j < m; j += blockDim.x) {
        const int byte = weight[row + j];
        out[2 * (row + j)] = __float2half((byte >> 4) * factor);
        out[2 * (row + j) + 1] = __float2half((static_cast<int8_t>(byte << 4) >> 4) * factor);
    }
}

extern "C" __global__ void int8WeightExtractionHalf(const int8_t* weight, const __half* scale,
                                                    __half* out, int n, int m) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * m;
    for (int j = threadIdx.x; j < m; j += blockDim.x) {
        out[row + j] = __float2half(weight[row + j] * __half2float(scale[blockIdx.x]));
    }
}

// A published name whose parameters differ from the published ones.
extern "C" __global__ void int8WeightExtractionFloat(const int8_t* weight, const float* scale,
                                                     float* out, int64_t n, int64_t m) {
    const int64_t row = blockIdx.x * m;
    for (int64_t j = threadIdx.x; j < m; j += blockDim.x) {
        out[row + j] = weight[row + j] * scale[blockIdx.x];
    }
}

// A function that is this client's alone; its parameter goes by value.
struct Pair {
    int32_t first;
    int32_t second;
};
extern "C" __global__ void writePair(int32_t* out, Pair pair, void* unused) {
    if (unused == nullptr) {
        out[0] = pair.first;
        out[1] = pair.second;
    }
}
