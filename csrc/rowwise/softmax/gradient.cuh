// Gradients of softmax or its logarithm, of what came for the output and the output.
#pragma once

#include "kernel_hub/follow_launch.cuh"
#include "rowwise/row_vecs.cuh"
#include "rowwise/softmax/row.cuh"

namespace kernel_hub::rowwise::softmax {

template <typename T>
struct GradientParams {
    T* dx;          // (outer, middle, num_rows, size)
    const T* dout;  // same shape
    const T* out;   // same shape
    RowStrides dx_strides, dout_strides, out_strides;
    int num_rows, size, blocks_a_row;
    int is_log;
    float scale;
};

// Of one value: what is summed along the row.
__device__ __forceinline__ float gradient_term(int is_log, float dout, float out) {
    return is_log ? dout : dout * out;
}

// NOTE: what a mask took out of a logarithm has no gradient, whatever came for its -inf.
template <typename T>
__device__ __forceinline__ float gradient(int is_log, float scale, float dout, float out,
                                          float sum) {
    const float of_log = out == -INFINITY ? 0.0f : dout - power_of<T>(out) * sum;
    return scale * (is_log ? of_log : out * (dout - sum));
}

// The accesses of `dx` from what lies in registers.
template <int kWidth, typename T, typename Bits>
__device__ __forceinline__ void write_gradient(const GradientParams<T>& p, T* dx, Bits dout_bits,
                                               Bits out_bits, float sum) {
    float dout[kWidth], out[kWidth];
    Access<T, kWidth>::unpack(dout_bits, dout);
    Access<T, kWidth>::unpack(out_bits, out);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        dout[j] = gradient<T>(p.is_log, p.scale, dout[j], out[j], sum);
    }
    Access<T, kWidth>::write(dx, dout);
}

template <int kWidth, typename T, typename Bits>
__device__ __forceinline__ void add_terms(const GradientParams<T>& p, Bits dout_bits, Bits out_bits,
                                          Sum<T>& sum) {
    float dout[kWidth], out[kWidth], terms = 0.0f;
    Access<T, kWidth>::unpack(dout_bits, dout);
    Access<T, kWidth>::unpack(out_bits, out);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        terms += gradient_term(p.is_log, dout[j], out[j]);
    }
    sum.add(terms);
}

// Of what each thread found.
template <typename T>
__device__ __forceinline__ float sum_of_row(Sum<T> terms, int blocks_a_row, SharedFound& shared) {
    terms = row_sum(terms, shared.sum_slots);
    if (blocks_a_row > 1) {
        terms = of_all_blocks<T>({0.0f, terms}, blocks_a_row, shared.given).sum;
    }
    return terms.rounded();
}

template <int kVecs, typename T>
__device__ __forceinline__ void gradient_vecs(const GradientParams<T>& p) {
    constexpr int kWidth = kVecElems<T>;
    SharedFound& shared = *reinterpret_cast<SharedFound*>(dynamic_shared());
    const Share share(p.num_rows, p.size / kWidth, p.blocks_a_row);
    const T* dout = p.dout + p.dout_strides.start(share.row_idx);
    const T* out = p.out + p.out_strides.start(share.row_idx);
    follow_launch_before();
    uint4 dout_bits[kVecs], out_bits[kVecs];
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        const int vec_idx = share.first + i * share.step;
        dout_bits[i] = out_bits[i] = make_uint4(0, 0, 0, 0);
        if (vec_idx < share.end) {
            dout_bits[i] = ld_global(dout + vec_idx * kWidth);
            out_bits[i] = ld_global(out + vec_idx * kWidth);
        }
    }
    Sum<T> terms;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        add_terms<kWidth>(p, dout_bits[i], out_bits[i], terms);
        keep_packed(dout_bits[i]);
        keep_packed(out_bits[i]);
    }
    const float sum = sum_of_row(terms, p.blocks_a_row, shared);
    T* dx = p.dx + p.dx_strides.start(share.row_idx);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        const int vec_idx = share.first + i * share.step;
        if (vec_idx < share.end) {
            write_gradient<kWidth>(p, dx + vec_idx * kWidth, dout_bits[i], out_bits[i], sum);
        }
    }
    if (p.blocks_a_row > 1) {
        wait_for_readers();
    }
}

template <int kWidth, typename T>
__device__ __forceinline__ void gradient_passes(const GradientParams<T>& p) {
    using RowAccess = Access<T, kWidth>;
    SharedFound& shared = *reinterpret_cast<SharedFound*>(dynamic_shared());
    const int blocks_a_row = kWidth > 1 ? p.blocks_a_row : 1;
    const Share share(p.num_rows, p.size / kWidth, blocks_a_row);
    const T* dout = p.dout + p.dout_strides.start(share.row_idx);
    const T* out = p.out + p.out_strides.start(share.row_idx);
    follow_launch_before();
    Sum<T> terms;
#pragma unroll 1
    for (int i = share.first; i < share.end; i += share.step) {
        add_terms<kWidth>(p, RowAccess::read(dout + i * kWidth), RowAccess::read(out + i * kWidth),
                          terms);
    }
    const float sum = sum_of_row(terms, blocks_a_row, shared);
    T* dx = p.dx + p.dx_strides.start(share.row_idx);
#pragma unroll 1
    for (int i = share.first; i < share.end; i += share.step) {
        write_gradient<kWidth>(p, dx + i * kWidth, RowAccess::read(dout + i * kWidth),
                               RowAccess::read(out + i * kWidth), sum);
    }
    if (blocks_a_row > 1) {
        wait_for_readers();
    }
}

}  // namespace kernel_hub::rowwise::softmax
