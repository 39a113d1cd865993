// What the bodies of swiglu_linear share: out = silu(gate) * up, and the rows that belong
// together.
#pragma once

#include "kernel_hub/ptx.cuh"
#include "matmul/epilogue.cuh"

namespace kernel_hub::matmul::paired {

// b holds `columns` rows of the gate, then as many of what it multiplies.
struct GateUpRows {
    int columns;
    __device__ __forceinline__ int64_t at(int group, int half, int w) const {
        const int column = 8 * group + w;
        return column < columns ? static_cast<int64_t>(half) * columns + column : -1;
    }
};

// Where results go: pair w of a group is column 8 group + w of out.
template <typename T>
struct SwigluEnding {
    static constexpr int kUnit = 4;  // groups: 32 columns of out
    T* out;                          // (m, columns)
    int64_t out_stride;
    int m, columns;
    bool is_aligned;  // columns, stride and address allow accesses of 16 bytes

    __device__ __forceinline__ SwigluEnding(T* out, int64_t out_stride, int m, int columns)
        : out(out), out_stride(out_stride), m(m), columns(columns) {
        is_aligned = ((columns | out_stride) % 8 | reinterpret_cast<uint64_t>(out) % 16) == 0;
    }

    struct Prepared {};
    __device__ __forceinline__ void prepare(int, int, Prepared&) const {}
    __device__ __forceinline__ void prepare_few() const {}

    __device__ __forceinline__ void write_pair(int row, int group, int w, float gate,
                                               float up) const {
        const int column = 8 * group + w;
        if (row < m && column < columns) {
            out[row * out_stride + column] = from_float<T>(silu_16<T>(gate) * up);
        }
    }

    template <int kGroups>
    __device__ __forceinline__ void write(int row, int group, const float (&sums)[kGroups][2][4],
                                          const Prepared&) const {
        const int q = threadIdx.x % 4;
        if (!is_aligned) {
#pragma unroll
            for (int i = 0; i < 4 * kGroups; ++i) {
                write_pair(row + i % 4 / 2 * 8, group + i / 4, 2 * q + i % 2, sums[i / 4][0][i % 4],
                           sums[i / 4][1][i % 4]);
            }
            return;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t words[kGroups];
#pragma unroll
            for (int i = 0; i < kGroups; ++i) {
                const float (&gate)[4] = sums[i][0], (&up)[4] = sums[i][1];
                words[i] = pack2<T>(silu_16<T>(gate[2 * half]) * up[2 * half],
                                    silu_16<T>(gate[2 * half + 1]) * up[2 * half + 1]);
            }
            const int64_t to = row + 8 * half;
            T* first = out + to * out_stride + 8 * group;
            if constexpr (kGroups == 4) {
                // 16 bytes a lane.
                transpose_quad(words, q);
                if (to < m && 8 * (group + q) < columns) {
                    st_global(first + 8 * q, make_uint4(words[0], words[1], words[2], words[3]));
                }
            } else {
#pragma unroll
                for (int i = 0; i < kGroups; ++i) {
                    if (to < m && 8 * (group + i) < columns) {
                        *reinterpret_cast<uint32_t*>(first + 8 * i + 2 * q) = words[i];
                    }
                }
            }
        }
    }
};

}  // namespace kernel_hub::matmul::paired
