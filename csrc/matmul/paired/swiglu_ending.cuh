// What the bodies of swiglu_linear share: out = activation(gate) * up, and the rows that belong
// together.
#pragma once

#include "kernel_hub/ptx.cuh"
#include "matmul/epilogue.cuh"
#include "matmul/paired/gates.cuh"

namespace kernel_hub::matmul::paired {

// b holds `columns` rows of the gate, then as many of what it multiplies; where half_rows is 1, a
// row of each in turn.
struct GateUpRows {
    int columns, half_rows;
    __device__ __forceinline__ int64_t at(int group, int half, int w) const {
        const int column = 8 * group + w;
        const int64_t row = half_rows == 1 ? 2 * static_cast<int64_t>(column) : column;
        return column < columns ? row + static_cast<int64_t>(half) * half_rows : -1;
    }
};

// Where results go: pair w of a group is column 8 group + w of out.
template <typename T>
struct GatedPlace {
    T* out;  // (m, columns)
    int64_t out_stride;
    int m, columns;
    bool is_aligned;  // columns, stride and address allow accesses of 16 bytes

    __device__ __forceinline__ GatedPlace(T* out, int64_t out_stride, int m, int columns)
        : out(out), out_stride(out_stride), m(m), columns(columns) {
        is_aligned = ((columns | out_stride) % 8 | reinterpret_cast<uint64_t>(out) % 16) == 0;
    }

    __device__ __forceinline__ void store(int row, int column, float value) const {
        if (row < m && column < columns) {
            out[row * out_stride + column] = from_float<T>(value);
        }
    }

    // value(4 g + e): of sums[g][..][e], as `write` of an ending has them.
    template <int kGroups, typename Value>
    __device__ __forceinline__ void store_groups(int row, int group, const Value& value) const {
        const int q = threadIdx.x % 4;
        if (!is_aligned) {
#pragma unroll
            for (int i = 0; i < 4 * kGroups; ++i) {
                store(row + i % 4 / 2 * 8, 8 * (group + i / 4) + 2 * q + i % 2, value(i));
            }
            return;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t words[kGroups];
#pragma unroll
            for (int i = 0; i < kGroups; ++i) {
                words[i] = pack2<T>(value(4 * i + 2 * half), value(4 * i + 2 * half + 1));
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

template <int kGroups, typename Gate>
__device__ __forceinline__ void join(float (&joined)[4 * kGroups], const Gate& gate,
                                     const float (&sums)[kGroups][2][4]) {
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i) {
        joined[i] = gate(sums[i / 4][0][i % 4], sums[i / 4][1][i % 4]);
    }
}

template <typename T>
struct GatedEnding : GatedPlace<T> {
    static constexpr int kUnit = 4;  // groups: 32 columns of out
    int kind;                        // a GateKind
    float alpha, limit;              // of the clamped gate

    __device__ __forceinline__ GatedEnding(T* out, int64_t out_stride, int m, int columns, int kind,
                                           float alpha, float limit)
        : GatedPlace<T>(out, out_stride, m, columns), kind(kind), alpha(alpha), limit(limit) {}

    struct Prepared {};
    __device__ __forceinline__ void prepare(int, int, Prepared&) const {}
    __device__ __forceinline__ void prepare_few() const {}

    // Calls use(gate): one that is silu alone, or any.
    template <typename Use>
    __device__ __forceinline__ void with_gate(const Use& use) const {
        if (kind == kSiluGate) {
            use(SiluGate<T>());
        } else {
            use(NumberedGate(kind, alpha, limit));
        }
    }

    __device__ __forceinline__ void write_pair(int row, int group, int w, float first,
                                               float second) const {
        with_gate([&](const auto& gate) { first = gate(first, second); });
        this->store(row, 8 * group + w, first);
    }

    template <int kGroups>
    __device__ __forceinline__ void write(int row, int group, const float (&sums)[kGroups][2][4],
                                          const Prepared&) const {
        float joined[4 * kGroups];
        with_gate([&](const auto& gate) { join<kGroups>(joined, gate, sums); });
        this->template store_groups<kGroups>(row, group, [&](int i) { return joined[i]; });
    }
};

}  // namespace kernel_hub::matmul::paired
