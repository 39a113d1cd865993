// Softmax of rows or its logarithm: rows in registers, or read twice.
#pragma once

#include "kernel_hub/follow_launch.cuh"
#include "rowwise/softmax/kept.cuh"
#include "rowwise/softmax/params.cuh"

namespace kernel_hub::rowwise::softmax {

// What a vector's mask has: T, or of a mask of truth a byte an element, in the first words.
template <typename T>
__device__ __forceinline__ uint4 read_mask(const SoftmaxParams<T>& p, const void* mask, int column,
                                           bool is_whole) {
    if (p.is_added) {
        return read_vec(static_cast<const T*>(mask), column, p.size, is_whole);
    }
    const uint8_t* truth = static_cast<const uint8_t*>(mask);
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < kVecElems<T> / 4; ++i) {
        if (is_whole) {
            words[i] = reinterpret_cast<const uint32_t*>(truth + column)[i];
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = column + 4 * i + j;
                words[i] |= (is_column(at, p.size) ? truth[at] : 0u) << 8 * j;
            }
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// A vector's values scaled and masked, of which the first is the one at `column`; -inf where there
// is no column. has_all: all of the vector is the row's.
template <typename T>
__device__ __forceinline__ void score(const SoftmaxParams<T>& p, int column, bool has_all,
                                      uint4 bits, uint4 masks, float (&s)[kVecElems<T>]) {
    constexpr int kWidth = kVecElems<T>;
    unpack<T>(bits, s);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        s[j] *= p.scale;
    }
    if (p.mask != nullptr && p.is_added) {
        float added[kWidth];
        unpack<T>(masks, added);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            s[j] += added[j];
        }
    } else if (p.mask != nullptr) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            const uint32_t word = j < 4 ? masks.x : masks.y;
            s[j] = word & 0xffu << 8 * (j % 4) ? s[j] : -INFINITY;
        }
    }
    if (!has_all) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            s[j] = is_column(column + j, p.size) ? s[j] : -INFINITY;
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

// This thread's part of a row that is whole vectors, scaled and masked.
template <int kVecs, typename T>
__device__ __forceinline__ void read_vecs(const SoftmaxParams<T>& p, const Share& share, const T* x,
                                          float (&s)[kVecs][kVecElems<T>]) {
    const void* mask = p.mask_of(share.row_idx);
    // Issue every load before the first use.
    uint4 bits[kVecs], masks[kVecs] = {};
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        if (share.has(i)) {
            bits[i] = ld_global(x + share.column<T>(i));
        }
    }
    if (p.mask != nullptr) {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            if (share.has(i)) {
                masks[i] = read_mask(p, mask, share.column<T>(i), true);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        if (share.has(i)) {
            score(p, share.column<T>(i), true, bits[i], masks[i], s[i]);
        }
    }
}

// NOTE: else an address is made anew of parameters and strides for each element.
template <typename T>
__device__ __forceinline__ void keep_pointer(T*& pointer) {
    asm("" : "+l"(pointer));
}

// Rows of any alignment, an element an access: kFours times four of a thread, each
// `step` behind the last. Of fours that all threads would have beyond the row there is nothing.
constexpr int kFours = 5, kFour = 4;

// Which columns of a row are this thread's. kStep: 0, or what `step` is.
// NOTE: of a step that is known addresses are a base and numbers in the instructions.
template <int kStep>
struct Columns {
    int first, step, end;

    __device__ __forceinline__ Columns(const Share& share, int num_rows, int size)
        : first(share.first),
          step(kStep > 0 ? kStep : share.step),
          end(share.row_idx < num_rows ? size : 0) {}
    __device__ __forceinline__ bool has(int i) const { return i * kFour * step < end; }
    __device__ __forceinline__ int column(int i, int j) const {
        return first + (i * kFour + j) * step;
    }

    // Their bits, 0 beyond the row.
    template <typename Bits>
    __device__ __forceinline__ void read(const void* row, uint32_t (&bits)[kFours][kFour]) const {
        const Bits* from = static_cast<const Bits*>(row) + first;
        keep_pointer(from);
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
            if (has(i)) {
#pragma unroll
                for (int j = 0; j < kFour; ++j) {
                    bits[i][j] = column(i, j) < end ? from[(i * kFour + j) * step] : 0;
                }
            }
        }
    }
};

// What such an element is, from its bits.
template <typename T>
__device__ __forceinline__ float value_of(uint32_t bits) {
    float values[Word<T>::kElems];
    Word<T>::unpack(bits, values);
    return values[0];
}

// This thread's part of such a row, scaled and masked; -inf where there is no column.
template <int kStep, typename T>
__device__ __forceinline__ void read_columns(const SoftmaxParams<T>& p, const Share& share,
                                             const Columns<kStep>& columns, const T* x,
                                             float (&s)[kFours][kFour]) {
    const bool has_mask = p.mask != nullptr, is_truth = has_mask && !p.is_added;
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
    // Issue every load before the first use.
    uint32_t bits[kFours][kFour], masks[kFours][kFour] = {};
    columns.template read<Bits>(x, bits);
    if (is_truth) {
        columns.template read<uint8_t>(p.mask_of(share.row_idx), masks);
    } else if (has_mask) {
        columns.template read<Bits>(p.mask_of(share.row_idx), masks);
    }
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
        if (columns.has(i)) {
#pragma unroll
            for (int j = 0; j < kFour; ++j) {
                const bool is_out = is_truth && masks[i][j] == 0;
                const float added = has_mask && !is_truth ? value_of<T>(masks[i][j]) : 0.0f;
                s[i][j] = columns.column(i, j) < columns.end && !is_out
                              ? value_of<T>(bits[i][j]) * p.scale + added
                              : -INFINITY;
            }
        }
    }
}

// A row in registers, kVecs vectors a thread, or (0) the columns of one that need not be vectors,
// kStep apart where that is known.
template <int kVecs, int kStep, typename T>
__device__ __forceinline__ void softmax_once(const SoftmaxParams<T>& p) {
    constexpr bool kIsColumns = kVecs == 0;
    constexpr int kParts = kIsColumns ? kFours : kVecs;
    constexpr int kWidth = kIsColumns ? kFour : kVecElems<T>;
    SharedFound& shared = shared_found();
    Share share(p.blocks_a_row);
    const Columns<kStep> columns(share, p.num_rows, p.size);
    const T* x = p.x + p.x_strides.start(share.row_idx);
    share.lay_over_whole<T>(p.num_rows, p.size);
    const auto has = [&](int i) { return kIsColumns ? columns.has(i) : share.has(i); };
    follow_launch_before();
    float s[kParts][kWidth];
    if constexpr (kIsColumns) {
        read_columns(p, share, columns, x, s);
    } else {
        read_vecs(p, share, x, s);
    }
    Found<T> own;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
        if (has(i)) {
            own.largest = largest_among(own.largest, s[i]);
        }
    }

    // Maximum and sum of this block's part.
    own.largest = row_max(own.largest, shared.largest_slots);
    const float base = base_of(own.largest);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
        if (has(i)) {
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
    T* out = p.out + p.out_strides.start(share.row_idx) + (kIsColumns ? columns.first : 0);
    if constexpr (kIsColumns) {
        keep_pointer(out);
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
        if (has(i)) {
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                s[i][j] = s[i][j] * factor + offset;
            }
            if constexpr (kIsColumns) {
#pragma unroll
                for (int j = 0; j < kWidth; ++j) {
                    if (columns.column(i, j) < columns.end) {
                        out[(i * kFour + j) * columns.step] = from_float<T>(s[i][j]);
                    }
                }
            } else {
                write_vec(out, share.column<T>(i), p.size, true, s[i]);
            }
        }
    }
    if (p.blocks_a_row > 1) {
        wait_for_readers();
    }
}

// A row that is kept in shared memory, or read twice.
template <typename T>
__device__ __forceinline__ void softmax_passes(const SoftmaxParams<T>& p) {
    constexpr int kWidth = kVecElems<T>;
    SharedFound& shared = shared_found();
    Share share(p.blocks_a_row);
    const T* x = p.x + p.x_strides.start(share.row_idx);
    T* out = p.out + p.out_strides.start(share.row_idx);
    const void* mask = p.mask_of(share.row_idx);
    share.lay_over(x, p.num_rows, p.size);
    const int first_column = share.column<T>(0), step = share.step * kWidth;
    const bool is_kept = keeps_rows(), is_word = p.fits(share, mask), fits_out = share.fits(out);
    follow_launch_before();
    if (is_kept) {
        keep_row(x, first_column, step, p.size);
        if constexpr (!std::is_same_v<T, float>) {
            if (p.mask == nullptr && p.scale > 0.0f && softmax_kept(p, share, out)) {
                return;
            }
        }
    }

    // Of this thread, then of the row: a sum is of powers of distances from the maximum so far.
    Found<T> found;
    float rest = 0.0f;  // a factor of each, or what is taken off logarithms
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
        const uint4* kept = kept_vecs();
#pragma unroll 1
        for (int column = first_column; column < p.size; column += step, kept += blockDim.x) {
            const bool has_all = is_inside<T>(column, p.size);
            const uint4 bits = is_kept ? *kept : read_vec(x, column, p.size, has_all);
            uint4 masks = {};
            if (p.mask != nullptr) {
                masks = read_mask(p, mask, column, has_all && is_word);
            }
            float s[kWidth];
            score(p, column, has_all, bits, masks, s);
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
                    s[j] = p.is_log ? distance - rest : power_of<T>(distance) * rest;
                }
                write_vec(out, column, p.size, has_all && fits_out, s);
            }
        }
        if (pass == 0) {
            const float largest = row_max(found.largest, shared.largest_slots);
            const bool is_empty = found.largest == -INFINITY;
            const float part = is_empty ? 0.0f : power_of<T>(found.largest - largest);
            found = {largest, row_sum(found.sum.times(part), shared.sum_slots)};
            if (p.blocks_a_row > 1) {
                found = of_all_blocks(found, p.blocks_a_row, shared.given);
            }
            const float sum = found.sum.rounded();
            rest = p.is_log ? logf(sum) : quotient<T>(1.0f, sum);
        }
    }
    if (p.blocks_a_row > 1) {
        wait_for_readers();
    }
}

}  // namespace kernel_hub::rowwise::softmax
