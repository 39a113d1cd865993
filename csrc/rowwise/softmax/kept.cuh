// Rows of 16 bits that are kept in shared memory, without a mask: three passes of few instructions.
#pragma once

#include "rowwise/row_vecs.cuh"
#include "rowwise/softmax/params.cuh"

namespace kernel_hub::rowwise::softmax {

// -inf, as elements that are no row's are kept: no maximum, and no power, is of them.
template <typename T>
constexpr uint32_t kMinusInfinity = 0xff80;
template <>
constexpr uint32_t kMinusInfinity<__half> = 0xfc00;
template <>
constexpr uint32_t kMinusInfinity<float> = 0xff800000;

// Asks for this thread's vectors of a row and waits for them.
template <typename T>
__device__ __forceinline__ void keep_row(const T* x, int first_column, int step, int size) {
    uint4* kept = kept_vecs();
    int column = first_column;
#pragma unroll 4
    for (; column < size; column += step, kept += blockDim.x) {
        if (is_inside<T>(column, size)) {
            keep_vec(kept, x, column);
        }
    }
    // NOTE: what is read one by one is waited for: after all else is under way.
    column -= step, kept -= blockDim.x;
    if (first_column < size && !is_inside<T>(first_column, size)) {
        *kept_vecs() = read_columns(x, first_column, size, kMinusInfinity<T>);
    }
    if (column > first_column && !is_inside<T>(column, size)) {
        *kept = read_columns(x, column, size, kMinusInfinity<T>);
    }
    cp_async_commit();
    cp_async_wait<0>();
}

// The largest exponent that powers are set off from: what was rounded of it is a power near 1.
constexpr float kMostBase = 1 << 20;

// The results of such a row; false where its numbers are too large for it, and nothing was written.
// NOTE: a power is of x * factor - base in one instruction. What base_log2 lost is the same factor
// of all powers of a block, `off` at the end.
template <typename T>
__device__ __forceinline__ bool softmax_kept(const SoftmaxParams<T>& p, const Share& share,
                                             T* out) {
    constexpr int kWidth = kVecElems<T>;
    SharedFound& shared = shared_found();
    const int first = share.first, end = share.end, step = share.step, threads = blockDim.x;
    uint32_t pairs = kMinusInfinity<T> << 16 | kMinusInfinity<T>;
    const uint4* kept = kept_vecs();
#pragma unroll 4
    for (int at = first; at < end; at += step, kept += threads) {
        const uint4 bits = *kept;
        pairs = max_of_pairs<T>(max_of_pairs<T>(pairs, bits.x), max_of_pairs<T>(bits.y, bits.z));
        pairs = max_of_pairs<T>(pairs, bits.w);
    }
    float both[2];
    Word<T>::unpack(pairs, both);
    const float largest = row_max(max_nan(both[0], both[1]), shared.largest_slots);
    const float factor = p.scale * kLog2e, base = base_of(largest), base_log2 = base * factor;
    if (fabsf(largest) <= FLT_MAX && !(fabsf(base_log2) <= kMostBase)) {
        __syncthreads();  // the slots are read
        return false;
    }

    Found<T> own;
    own.largest = largest * p.scale;
    kept = kept_vecs();
#pragma unroll 2
    for (int at = first; at < end; at += step, kept += threads) {
        float s[kWidth];
        unpack<T>(*kept, s);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            own.sum.add(exp2_approx(fmaf(s[j], factor, -base_log2)));
        }
    }
    const float off = exp2_approx(fmaf(-base, factor, base_log2));
    own.sum = row_sum(own.sum, shared.sum_slots).times(off);
    const Found<T> all =
        p.blocks_a_row > 1 ? of_all_blocks(own, p.blocks_a_row, shared.given) : own;
    const float sum = all.sum.rounded(), own_base = base * p.scale;
    const float part = off * power_of<T>(own.largest - all.largest);
    // NOTE: where all of the row is -inf, or one is nan, these are nan.
    const float quotient_of_sum = quotient<T>(part, sum);
    // What own_base was rounded by, which elements less it still have: the largest gives -log(sum).
    const float rounded_by = fmaf(base, p.scale, -own_base);
    const float rest = logf(sum) + (all.largest - own_base) + rounded_by;
    if (share.fits(out)) {
        const int first_whole = share.lead > 0;
        const int num_whole = (share.lead + p.size) / kWidth - first_whole;
        kept = kept_vecs();
#pragma unroll 1
        for (int at = first; at < end; at += step, kept += threads) {
            float s[kWidth];
            unpack<T>(*kept, s);
            if (p.is_log) {
#pragma unroll
                for (int j = 0; j < kWidth; ++j) {
                    s[j] = fmaf(s[j], p.scale, -own_base) - rest;
                }
            } else {
#pragma unroll
                for (int j = 0; j < kWidth; ++j) {
                    s[j] = exp2_approx(fmaf(s[j], factor, -base_log2)) * quotient_of_sum;
                }
            }
            const bool is_whole =
                static_cast<uint32_t>(at - first_whole) < static_cast<uint32_t>(num_whole);
            write_vec(out, at * kWidth - share.lead, p.size, is_whole, s);
        }
    } else {
        // Neighbours by neighbours: a thread has elements of the vectors of others.
        __syncthreads();
        const T* elements = reinterpret_cast<const T*>(kept_vecs() - threadIdx.x) + threadIdx.x;
        int column = (first - static_cast<int>(threadIdx.x)) * kWidth - share.lead + threadIdx.x;
        const auto result_of = [&](T element) {
            const float value = to_float(element);
            return p.is_log ? fmaf(value, p.scale, -own_base) - rest
                            : exp2_approx(fmaf(value, factor, -base_log2)) * quotient_of_sum;
        };
        const int last = (kWidth - 1) * threads;
#pragma unroll 1
        for (; column < p.size; column += step * kWidth, elements += threads * kWidth) {
            if (column >= 0 && column + last < p.size) {
#pragma unroll
                for (int j = 0; j < kWidth; ++j) {
                    out[column + j * threads] = from_float<T>(result_of(elements[j * threads]));
                }
                continue;
            }
#pragma unroll 1
            for (int off = 0; off <= last; off += threads) {
                if (is_column(column + off, p.size)) {
                    out[column + off] = from_float<T>(result_of(elements[off]));
                }
            }
        }
    }
    if (p.blocks_a_row > 1) {
        wait_for_readers();
    }
    return true;
}

}  // namespace kernel_hub::rowwise::softmax
