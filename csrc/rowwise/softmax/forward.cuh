// Softmax of rows or its logarithm: rows in registers, or read twice.
#pragma once

#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/shared_size.cuh"
#include "rowwise/softmax/row.cuh"

namespace kernel_hub::rowwise::softmax {

template <typename T>
struct SoftmaxParams {
    T* out;            // (outer, middle, num_rows, size)
    const T* x;        // same shape
    const void* mask;  // same shape, T or bytes of 0 and 1, or null
    RowStrides out_strides, x_strides, mask_strides;
    int num_rows, size, blocks_a_row;
    int is_added;  // the mask is T
    int is_log;
    float scale;

    __device__ __forceinline__ const void* mask_of(int64_t row_idx) const {
        const int64_t start = mask_strides.start(row_idx) * (is_added ? sizeof(T) : 1);
        return static_cast<const uint8_t*>(mask) + start;
    }
};

// kWidth values scaled and masked, of which the first is the one at `column`.
template <int kWidth, typename T>
__device__ __forceinline__ void score(const SoftmaxParams<T>& p, const void* mask, int column,
                                      typename Access<T, kWidth>::Bits bits, float (&s)[kWidth]) {
    Access<T, kWidth>::unpack(bits, s);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        s[j] *= p.scale;
    }
    if (p.mask == nullptr) {
        return;
    }
    if (p.is_added) {
        float added[kWidth];
        Access<T, kWidth>::unpack(Access<T, kWidth>::read(static_cast<const T*>(mask) + column),
                                  added);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            s[j] += added[j];
        }
        return;
    }
    using Bytes = std::conditional_t<kWidth == 1, uint8_t, uint32_t>;
    constexpr int kBytes = sizeof(Bytes);
    const Bytes* truth = reinterpret_cast<const Bytes*>(static_cast<const uint8_t*>(mask) + column);
#pragma unroll
    for (int word = 0; word < kWidth / kBytes; ++word) {
        const uint32_t bytes = truth[word];
#pragma unroll
        for (int j = 0; j < kBytes; ++j) {
            float& value = s[word * kBytes + j];
            value = bytes & 0xffu << 8 * j ? value : -INFINITY;
        }
    }
}

template <int kWidth>
__device__ __forceinline__ float largest_among(float largest, const float (&s)[kWidth]) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        largest = max_nan(largest, s[j]);
    }
    return largest;
}

template <typename T>
__device__ __forceinline__ float quotient(float a, float b) {
    if constexpr (std::is_same_v<T, float>) {
        return a / b;
    }
    return __fdividef(a, b);
}

// What numbers are set off from, so that a part of -inf alone gives no nan.
__device__ __forceinline__ float base_of(float largest) {
    return largest == -INFINITY ? 0.0f : largest;
}

// The same of a vector that reaches beyond the row's ends, or whose mask has another alignment:
// -inf where there is no column.
template <typename T>
__device__ __forceinline__ void score_edges(const SoftmaxParams<T>& p, const void* mask, int column,
                                            uint4 bits, float (&s)[kVecElems<T>]) {
    constexpr int kWidth = kVecElems<T>;
    unpack<T>(bits, s);
    // A mask's loads are all issued before the first use.
    float added[kWidth] = {};
    if (p.mask != nullptr) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            if (is_column(column + j, p.size) && p.is_added) {
                added[j] = to_float(static_cast<const T*>(mask)[column + j]);
            } else if (is_column(column + j, p.size)) {
                added[j] = static_cast<const uint8_t*>(mask)[column + j] ? 0.0f : -INFINITY;
            }
        }
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        // NOTE: what truth leaves out is -inf whatever it is, nan too.
        const bool is_out = !p.is_added && added[j] < 0.0f;
        s[j] = is_out ? -INFINITY : s[j] * p.scale + added[j];
    }
    if (!is_inside<T>(column, p.size)) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            s[j] = is_column(column + j, p.size) ? s[j] : -INFINITY;
        }
    }
}

// This thread's part of a row, scaled and masked; `first` is the column of its first vector.
template <int kVecs, bool kHasEdges, typename T>
__device__ __forceinline__ void read_scores(const SoftmaxParams<T>& p, const Share& share,
                                            const T* x, int first,
                                            float (&s)[kVecs][kVecElems<T>]) {
    constexpr int kWidth = kVecElems<T>;
    const void* mask = p.mask_of(share.row_idx);
    // Issue every load before the first use.
    uint4 bits[kVecs];
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        const int column = first + i * share.step * kWidth;
        if (share.has(i) && (!kHasEdges || is_inside<T>(column, p.size))) {
            bits[i] = ld_global(x + column);
        }
    }
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        const int column = first + i * share.step * kWidth;
        if (share.has(i)) {
            if constexpr (kHasEdges) {
                if (!is_inside<T>(column, p.size)) {
                    bits[i] = read_columns(x, column, p.size);
                }
                score_edges(p, mask, column, bits[i], s[i]);
            } else {
                score<kWidth>(p, mask, column, bits[i], s[i]);
            }
        }
    }
}

// A row in registers, kVecs vectors a thread. kHasEdges: neither their addresses nor the row's
// length need be whole vectors.
template <int kVecs, bool kHasEdges, typename T>
__device__ __forceinline__ void softmax_once(const SoftmaxParams<T>& p) {
    constexpr int kWidth = kVecElems<T>;
    SharedFound& shared = *reinterpret_cast<SharedFound*>(dynamic_shared());
    Share share(p.num_rows, p.size / kWidth, p.blocks_a_row);
    const T* x = p.x + p.x_strides.start(share.row_idx);
    int first = share.first * kWidth;
    if constexpr (kHasEdges) {
        const int lead = columns_before(x);
        share.end = share.row_idx < p.num_rows ? (lead + p.size + kWidth - 1) / kWidth : 0;
        first -= lead;
    }
    follow_launch_before();
    float s[kVecs][kWidth];
    read_scores<kVecs, kHasEdges>(p, share, x, first, s);
    Found<T> own;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        if (share.has(i)) {
            own.largest = largest_among(own.largest, s[i]);
        }
    }

    // Maximum and sum of this block's part.
    own.largest = row_max(own.largest, shared.largest_slots);
    const float base = base_of(own.largest);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        if (share.has(i)) {
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                const float distance = s[i][j] - base, power = power_of<T>(distance);
                own.sum.add(power);
                s[i][j] = p.is_log ? distance : power;
            }
        }
    }
    own.sum = row_sum(own.sum, shared.sum_slots);

    const Found<T> all =
        p.blocks_a_row > 1 ? of_all_blocks(own, p.blocks_a_row, shared.given) : own;
    const float sum = all.sum.rounded();
    // NOTE: where all of the row is -inf, or one is nan, these are nan.
    const bool is_empty = own.largest == -INFINITY && all.largest > -INFINITY;
    const float part = is_empty ? 0.0f : power_of<T>(own.largest - all.largest);
    const float factor = p.is_log ? 1.0f : quotient<T>(part, sum);
    const float offset = p.is_log ? base - all.largest - logf(sum) : 0.0f;
    T* out = p.out + p.out_strides.start(share.row_idx);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        const int column = first + i * share.step * kWidth;
        if (share.has(i)) {
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                s[i][j] = s[i][j] * factor + offset;
            }
            if (!kHasEdges || (is_inside<T>(column, p.size) && columns_before(out + column) == 0)) {
                st_global(out + column, pack<T>(s[i]));
            } else {
                write_columns(out, column, p.size, s[i]);
            }
        }
    }
    if (p.blocks_a_row > 1) {
        wait_for_readers();
    }
}

template <int kVecs, typename T>
__device__ __forceinline__ void softmax_vecs(const SoftmaxParams<T>& p) {
    softmax_once<kVecs, false>(p);
}

template <int kVecs, typename T>
__device__ __forceinline__ void softmax_edges(const SoftmaxParams<T>& p) {
    softmax_once<kVecs, true>(p);
}

// This thread's accesses of a row in shared memory, all under way at once. Only it reads them.
template <int kWidth, typename T>
__device__ __forceinline__ const T* keep_row(const T* x, const Share& share) {
    T* kept = reinterpret_cast<T*>(dynamic_shared());
#pragma unroll 1
    for (int i = share.first; i < share.end; i += share.step) {
        cp_async_16(shared_address(kept + i * kWidth), x + i * kWidth, true);
    }
    cp_async_commit();
    cp_async_wait<0>();
    return kept;
}

template <int kWidth, typename T>
__device__ __forceinline__ void softmax_passes(const SoftmaxParams<T>& p) {
    constexpr int kAtOnce = kWidth == 1 ? 2 : 1;
    using RowAccess = Access<T, kWidth>;
    using Bits = typename RowAccess::Bits;
    __shared__ float largest_slots[kMaxWarps], sum_slots[2][kMaxWarps];
    const Share share(p.num_rows, p.size / kWidth, 1);
    const T* x = p.x + p.x_strides.start(share.row_idx);
    T* out = p.out + p.out_strides.start(share.row_idx);
    const void* mask = p.mask_of(share.row_idx);
    follow_launch_before();
    if constexpr (kWidth > 1 && sizeof(T) == 2) {
        if (dynamic_shared_bytes() > 0) {
            x = keep_row<kWidth>(x, share);
        }
    }

    // Of this thread, then of the row: a sum is of powers of distances from the maximum so far.
    Found<T> found;
    float factor = 0.0f, offset = 0.0f;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
        for (int first = share.first; first < share.end; first += kAtOnce * share.step) {
            Bits bits[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int access_idx = first + i * share.step;
                if (access_idx < share.end) {
                    bits[i] = reinterpret_cast<const Bits*>(x)[access_idx];
                }
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int access_idx = first + i * share.step;
                if (access_idx >= share.end) {
                    break;
                }
                float s[kWidth];
                score<kWidth>(p, mask, access_idx * kWidth, bits[i], s);
                if (pass == 0) {
                    const float largest = largest_among(found.largest, s);
                    const float base = base_of(largest);
                    found.sum = found.sum.times(power_of<T>(found.largest - base));
                    found.largest = largest;
#pragma unroll
                    for (int j = 0; j < kWidth; ++j) {
                        found.sum.add(power_of<T>(s[j] - base));
                    }
                } else {
#pragma unroll
                    for (int j = 0; j < kWidth; ++j) {
                        const float distance = s[j] - found.largest;
                        s[j] = p.is_log ? distance - offset : power_of<T>(distance) * factor;
                    }
                    RowAccess::write(out + access_idx * kWidth, s);
                }
            }
        }
        if (pass == 0) {
            const float largest = row_max(found.largest, largest_slots);
            const bool is_empty = found.largest == -INFINITY;
            const float part = is_empty ? 0.0f : power_of<T>(found.largest - largest);
            const float sum = row_sum(found.sum.times(part), sum_slots).rounded();
            factor = quotient<T>(1.0f, sum);
            offset = logf(sum);
            found.largest = largest;
        }
    }
}

}  // namespace kernel_hub::rowwise::softmax
