// Two small element-wise kernels with the parameter lists that the launch benchmark times.
//
//   launch_probe_5:  out[i] = x[i] + scale * y[i]
//   launch_probe_12: out0[i] = (x[i] + scale0 * y[i]) * factor, out1[i] = (z[i] + scale1 * w[i]) +
//   offset + bias
//
// Parallelisation: one thread an element.

#include <stdint.h>

extern "C" __global__ void __launch_bounds__(1024) launch_probe_5(float* out, const float* x,
                                                                  const float* y, int num_elements,
                                                                  float scale) {
    const int element_idx = blockIdx.x * blockDim.x + threadIdx.x;
    if (element_idx < num_elements) {
        out[element_idx] = x[element_idx] + scale * y[element_idx];
    }
}

extern "C" __global__ void __launch_bounds__(1024) launch_probe_12(
    float* out0, float* out1, const float* x, const float* y, const float* z, const float* w,
    int num_elements, int factor, int64_t offset, float scale0, float scale1, int bias) {
    const int element_idx = blockIdx.x * blockDim.x + threadIdx.x;
    if (element_idx < num_elements) {
        out0[element_idx] = (x[element_idx] + scale0 * y[element_idx]) * factor;
        out1[element_idx] = (z[element_idx] + scale1 * w[element_idx]) + offset + bias;
    }
}
