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

// A vector of `dx` from those of the others.
template <typename T>
__device__ __forceinline__ void write_gradient(const GradientParams<T>& p, T* dx, int column,
                                               bool is_whole, uint4 dout_bits, uint4 out_bits,
                                               float sum) {
    constexpr int kWidth = kVecElems<T>;
    float dout[kWidth], out[kWidth];
    unpack<T>(dout_bits, dout);
    unpack<T>(out_bits, out);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        dout[j] = gradient<T>(p.is_log, p.scale, dout[j], out[j], sum);
    }
    write_vec(dx, column, p.size, is_whole, dout);
}

// NOTE: zeros stand beside a row's ends, which add nothing.
template <typename T>
__device__ __forceinline__ void add_terms(const GradientParams<T>& p, uint4 dout_bits,
                                          uint4 out_bits, Sum<T>& sum) {
    constexpr int kWidth = kVecElems<T>;
    float dout[kWidth], out[kWidth], terms = 0.0f;
    unpack<T>(dout_bits, dout);
    unpack<T>(out_bits, out);
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

// A row in registers, kVecs vectors a thread. kHasEdges: neither their addresses nor the row's
// length need be whole vectors.
template <int kVecs, bool kHasEdges, typename T>
__device__ __forceinline__ void gradient_once(const GradientParams<T>& p) {
    SharedFound& shared = shared_found();
    Share share(p.blocks_a_row);
    const T* dout = p.dout + p.dout_strides.start(share.row_idx);
    const T* out = p.out + p.out_strides.start(share.row_idx);
    if constexpr (kHasEdges) {
        share.lay_over(out, p.num_rows, p.size);
    } else {
        share.lay_over_whole<T>(p.num_rows, p.size);
    }
    follow_launch_before();
    const bool are_alike = !kHasEdges || share.fits(dout);
    uint4 dout_bits[kVecs], out_bits[kVecs];
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        const int column = share.column<T>(i);
        dout_bits[i] = out_bits[i] = make_uint4(0, 0, 0, 0);
        if (share.has(i) && (!kHasEdges || (are_alike && is_inside<T>(column, p.size)))) {
            dout_bits[i] = ld_global(dout + column);
            out_bits[i] = ld_global(out + column);
        }
    }
    if constexpr (kHasEdges) {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            const int column = share.column<T>(i);
            if (share.has(i) && !(are_alike && is_inside<T>(column, p.size))) {
                dout_bits[i] = read_columns(dout, column, p.size);
                out_bits[i] = read_columns(out, column, p.size);
            }
        }
    }
    Sum<T> terms;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        add_terms(p, dout_bits[i], out_bits[i], terms);
        keep_packed(dout_bits[i]);
        keep_packed(out_bits[i]);
    }
    const float sum = sum_of_row(terms, p.blocks_a_row, shared);
    T* dx = p.dx + p.dx_strides.start(share.row_idx);
    const bool fits_dx = !kHasEdges || share.fits(dx);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        if (share.has(i)) {
            const int column = share.column<T>(i);
            const bool is_whole = !kHasEdges || (fits_dx && is_inside<T>(column, p.size));
            write_gradient(p, dx, column, is_whole, dout_bits[i], out_bits[i], sum);
        }
    }
    if (p.blocks_a_row > 1) {
        wait_for_readers();
    }
}

// A row that is kept in shared memory, a vector of `dout`, then one of `out`; or read twice.
template <typename T>
__device__ __forceinline__ void gradient_passes(const GradientParams<T>& p) {
    SharedFound& shared = shared_found();
    Share share(p.blocks_a_row);
    const T* dout = p.dout + p.dout_strides.start(share.row_idx);
    const T* out = p.out + p.out_strides.start(share.row_idx);
    T* dx = p.dx + p.dx_strides.start(share.row_idx);
    share.lay_over(out, p.num_rows, p.size);
    const int first_column = share.column<T>(0), step = share.step * kVecElems<T>;
    const int of_out = blockDim.x, kept_step = 2 * blockDim.x;
    const bool is_kept = keeps_rows(), are_alike = share.fits(dout), fits_dx = share.fits(dx);
    follow_launch_before();
    if (is_kept) {
        // NOTE: what is read one by one is waited for: after all else is under way.
#pragma unroll 1
        for (int is_last = 0; is_last < 2; ++is_last) {
            uint4* kept = kept_vecs();
#pragma unroll 1
            for (int column = first_column; column < p.size; column += step, kept += kept_step) {
                const bool are_whole = are_alike && is_inside<T>(column, p.size);
                if (are_whole && !is_last) {
                    keep_vec(kept, dout, column);
                    keep_vec(kept + of_out, out, column);
                } else if (!are_whole && is_last) {
                    kept[0] = read_columns(dout, column, p.size);
                    kept[of_out] = read_columns(out, column, p.size);
                }
            }
        }
        cp_async_commit();
        cp_async_wait<0>();
    }
    Sum<T> terms;
    float sum = 0.0f;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
        const uint4* kept = kept_vecs();
#pragma unroll 1
        for (int column = first_column; column < p.size; column += step, kept += kept_step) {
            const bool has_all = is_inside<T>(column, p.size), are_whole = has_all && are_alike;
            const uint4 dout_bits = is_kept ? kept[0] : read_vec(dout, column, p.size, are_whole);
            const uint4 out_bits =
                is_kept ? kept[of_out] : read_vec(out, column, p.size, are_whole);
            if (pass == 0) {
                add_terms(p, dout_bits, out_bits, terms);
            } else {
                write_gradient(p, dx, column, has_all && fits_dx, dout_bits, out_bits, sum);
            }
        }
        if (pass == 0) {
            sum = sum_of_row(terms, p.blocks_a_row, shared);
        }
    }
    if (p.blocks_a_row > 1) {
        wait_for_readers();
    }
}

}  // namespace kernel_hub::rowwise::softmax
