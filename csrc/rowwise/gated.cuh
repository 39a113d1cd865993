// Activations of rows, gated (out = the gate's activation * up) or of one value, for any Gate; rows
// of a dtype, or e4m3 with a scale a row. A source defines a Gate, GATE_NUMBERS and GATE_OF, and
// exports by the macros below.
//
// A Gate has kParts, what a result is made of: 1 or, gated, 2; kHasPairs, whether it may have
// is_interleaved (gate and up take turns; otherwise gate is the first half of a row, up the
// second); and `gate(gate, up)` -> the result in fp32, `up` being 0 where there is none. Forms of a
// Gate are its numbers, questions of the whole grid: a kernel a form would be the same bytes again.
#pragma once

#include "kernel_hub/follow_launch.cuh"
#include "rowwise/quantise_rows.cuh"
#include "rowwise/row_elements.cuh"

namespace kernel_hub::rowwise {

// Gates and ups that take turns in two vectors, as one vector of each.
template <typename T>
__device__ __forceinline__ void part_pairs(uint4& first, uint4& second) {
    const uint4 a = first, b = second;
    if constexpr (sizeof(T) == 2) {
        first = {__byte_perm(a.x, a.y, 0x5410), __byte_perm(a.z, a.w, 0x5410),
                 __byte_perm(b.x, b.y, 0x5410), __byte_perm(b.z, b.w, 0x5410)};
        second = {__byte_perm(a.x, a.y, 0x7632), __byte_perm(a.z, a.w, 0x7632),
                  __byte_perm(b.x, b.y, 0x7632), __byte_perm(b.z, b.w, 0x7632)};
    } else {
        first = {a.x, a.z, b.x, b.z};
        second = {a.y, a.w, b.y, b.w};
    }
}

// A row of gates and ups; a Source of quantise_rows.cuh.
template <typename T, typename Gate>
struct GatedRow {
    using Elem = T;
    static constexpr bool kGrows = Gate::kParts == 1, kOfMagnitudes = false;
    template <int kWidth>
    struct Bits {
        typename Access<T, kWidth>::Bits first, second;
    };

    const T* x;
    int size;
    Gate gate;

    template <int kWidth>
    __device__ __forceinline__ Bits<kWidth> read(int first) const {
        using RowAccess = Access<T, kWidth>;
        if constexpr (Gate::kParts == 1) {
            return {RowAccess::read(x + first), {}};
        } else {
            int64_t gate_at = first, up_at = size;
            if constexpr (Gate::kHasPairs) {
                gate_at = gate.is_interleaved ? 2 * first : first;
                up_at = gate.is_interleaved ? kWidth : size;
            }
            // NOTE: `up` first: behind the gate its load may come to wait for the gate's
            // arithmetic.
            Bits<kWidth> bits;
            bits.second = RowAccess::read(x + gate_at + up_at);
            bits.first = RowAccess::read(x + gate_at);
            return bits;
        }
    }

    template <int kWidth>
    __device__ __forceinline__ void values(Bits<kWidth> bits, float (&found)[kWidth]) const {
        float gates[kWidth], ups[kWidth] = {};
        if constexpr (Gate::kHasPairs && kWidth > 1) {
            if (gate.is_interleaved) {
                part_pairs<T>(bits.first, bits.second);
            }
        }
        Access<T, kWidth>::unpack(bits.first, gates);
        if constexpr (Gate::kParts == 2) {
            Access<T, kWidth>::unpack(bits.second, ups);
        }
        gate(gates, ups, found);
    }

    static constexpr __device__ float trough() { return Gate::kTrough; }
    __device__ __forceinline__ uint4 number_bits(Bits<kVecElems<T>> bits) const {
        return bits.first;
    }
    __device__ __forceinline__ float value_of(float number) const {
        const float numbers[1] = {number};
        float found[1];
        gate(numbers, numbers, found);
        return found[0];
    }
    template <int kWidth>
    __device__ __forceinline__ void quotients(Bits<kWidth> bits, RowScale scale,
                                              float (&found)[kWidth]) const {
        float numbers[kWidth];
        Access<T, kWidth>::unpack(bits.first, numbers);
        gate.quotients(numbers, scale, found);
    }
};

// A Gate of one result at a time: Of has `of(gate, up)`.
template <typename Of>
struct EachGate : Of {
    template <int kWidth>
    __device__ __forceinline__ void operator()(const float (&gates)[kWidth],
                                               const float (&ups)[kWidth],
                                               float (&found)[kWidth]) const {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            found[j] = this->of(gates[j], ups[j]);
        }
    }
    template <int kWidth>
    __device__ __forceinline__ void quotients(const float (&x)[kWidth], RowScale scale,
                                              float (&found)[kWidth]) const {
        (*this)(x, x, found);
        times(found, scale.factor);
    }
};

// One access of `out`.
template <typename T, int kWidth, typename Gate>
__device__ __forceinline__ void gate_one(T* out, const GatedRow<T, Gate>& row, int column) {
    float values[kWidth];
    row.template values<kWidth>(row.template read<kWidth>(column), values);
    Access<T, kWidth>::write(out + column, values);
}

// As many elements of `out` as a vector has, a warp's 32 apart.
template <typename T, typename Gate>
__device__ __forceinline__ void gate_run(T* out, const GatedRow<T, Gate>& row, int first) {
    constexpr int kCount = kVecElems<T>;
    const int left = row.size - first;
    typename GatedRow<T, Gate>::template Bits<1> bits[kCount] = {};
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
        if (j * kWarpSize < left) {
            bits[j] = row.template read<1>(first + j * kWarpSize);
        }
    }
    float gates[kCount], ups[kCount] = {}, values[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
        gates[j] = to_float(bits[j].first);
        if constexpr (Gate::kParts == 2) {
            ups[j] = to_float(bits[j].second);
        }
    }
    row.gate(gates, ups, values);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
        if (j * kWarpSize < left) {
            out[first + j * kWarpSize] = from_float<T>(values[j]);
        }
    }
}

template <typename T, bool kIsVec, typename Gate>
__device__ __forceinline__ void gate_rows(T* out,      // (outer, num_rows, size)
                                          const T* x,  // (outer, num_rows, kParts * size)
                                          int64_t out_stride, int64_t out_outer_stride,
                                          int64_t x_stride, int64_t x_outer_stride, int num_rows,
                                          int size, Gate gate) {
    constexpr int kCount = kVecElems<T>;
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, lane = thread % kWarpSize;
    // By the element: of few of them a thread has one.
    const bool is_one = !kIsVec && gridDim.x * blockDim.x >= static_cast<uint32_t>(size);
    const int column = kIsVec ? thread * kCount : is_one ? thread : (thread - lane) * kCount + lane;
    follow_launch_before();
    if (column >= size) {
        return;
    }
    out += blockIdx.z * out_outer_stride;
    x += blockIdx.z * x_outer_stride;
    for (int64_t row_idx = blockIdx.y; row_idx < num_rows; row_idx += gridDim.y) {
        T* to = out + row_idx * out_stride;
        const GatedRow<T, Gate> row = {x + row_idx * x_stride, size, gate};
        if constexpr (kIsVec) {
            gate_one<T, kCount, Gate>(to, row, column);
        } else if (is_one) {
            gate_one<T, 1, Gate>(to, row, column);
        } else {
            gate_run(to, row, column);
        }
    }
}

// Both contiguous, a row a blockIdx.y.
template <typename T, typename Gate>
__device__ __forceinline__ void gate_flat(T* out, const T* x, int size, Gate gate) {
    constexpr int kWidth = kVecElems<T>;
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * kWidth;
    follow_launch_before();
    if (column >= size) {
        return;
    }
    const int64_t first = static_cast<int64_t>(blockIdx.y) * size;
    gate_one<T, kWidth, Gate>(out + first, {x + Gate::kParts * first, size, gate}, column);
}

template <typename T, typename Gate>
struct GatedE4m3 {
    GatedRow<T, Gate> source;
    E4m3Row row;

    __device__ __forceinline__ GatedE4m3(__nv_fp8_e4m3* out, float* out_scale, const T* x,
                                         int64_t out_stride, int64_t out_outer_stride,
                                         int64_t scale_stride, int64_t scale_outer_stride,
                                         int64_t x_stride, int64_t x_outer_stride, int num_rows,
                                         int size, Gate gate)
        : source{x, size, gate}, row{out, out_scale, false, size} {
        const int64_t row_idx = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
        row.is_there = row_idx < num_rows;
        row.out += row_idx * out_stride;
        row.out_scale += row_idx * scale_stride;
        source.x += row_idx * x_stride;
        // Products of 64 bits, seldom needed. NOTE: of fp32 pointers that are moved later spill.
        if (sizeof(T) > 2 || blockIdx.y > 0) {
            row.out += blockIdx.y * out_outer_stride;
            row.out_scale += blockIdx.y * scale_outer_stride;
            source.x += blockIdx.y * x_outer_stride;
        }
    }
};

#define EXPORT_GATED(NAME, T, GATE, IS_VEC)                                                      \
    DESCRIBED(                                                                                   \
        NAME, "x: columns in steps of blockDim.x vectors, y: rows, z: the outer dimension",      \
        (.shared_bytes = 0),                                                                     \
        extern "C" __global__ void __launch_bounds__(1024) NAME(                                 \
            T* out, const T* x, int64_t out_stride, int64_t out_outer_stride, int64_t x_stride,  \
            int64_t x_outer_stride, int num_rows, int size GATE_NUMBERS) {                       \
            gate_rows<T, IS_VEC>(out, x, out_stride, out_outer_stride, x_stride, x_outer_stride, \
                                 num_rows, size, GATE_OF(GATE));                                 \
        })

#define EXPORT_GATED_VARIANTS(NAME, T, GATE)                                             \
    DESCRIBED(                                                                           \
        NAME##_flat, "x: columns in steps of blockDim.x vectors, y: exactly the rows",   \
        (.shared_bytes = 0),                                                             \
        extern "C" __global__ void                                                       \
        __launch_bounds__(1024) NAME##_flat(T* out, const T* x, int size GATE_NUMBERS) { \
            gate_flat<T>(out, x, size, GATE_OF(GATE));                                   \
        })                                                                               \
    EXPORT_GATED(NAME##_vec, T, GATE, true)                                              \
    EXPORT_GATED(NAME##_scalar, T, GATE, false)

#define EXPORT_GATED_E4M3_UP_TO(THREADS, NAME, T, GATE, BODY)                                     \
    DESCRIBED(                                                                                    \
        NAME, "x: rows in steps of blockDim.y, y: the outer dimension; blockDim.x threads a row", \
        (.shared_bytes = 0),                                                                      \
        extern "C" __global__ void __launch_bounds__(THREADS) NAME(                               \
            __nv_fp8_e4m3* out, float* out_scale, const T* x, int64_t out_stride,                 \
            int64_t out_outer_stride, int64_t scale_stride, int64_t scale_outer_stride,           \
            int64_t x_stride, int64_t x_outer_stride, int num_rows, int size GATE_NUMBERS) {      \
            const GatedE4m3 gated(out, out_scale, x, out_stride, out_outer_stride, scale_stride,  \
                                  scale_outer_stride, x_stride, x_outer_stride, num_rows, size,   \
                                  GATE_OF(GATE));                                                 \
            BODY(gated.source, gated.row);                                                        \
        })

// 64 registers a thread: any blockDim up to 1,024.
#define EXPORT_GATED_E4M3(...) EXPORT_GATED_E4M3_UP_TO(1024, __VA_ARGS__)

#define EXPORT_GATED_E4M3_VARIANTS(NAME, T, GATE)                          \
    EXPORT_GATED_E4M3(NAME##_vec1, T, GATE, quantise_vecs<1>)              \
    EXPORT_GATED_E4M3(NAME##_vec2, T, GATE, quantise_vecs<2>)              \
    EXPORT_GATED_E4M3(NAME##_vec4, T, GATE, quantise_vecs<4>)              \
    EXPORT_GATED_E4M3(NAME##_loop, T, GATE, quantise_passes<kVecElems<T>>) \
    EXPORT_GATED_E4M3(NAME##_scalar, T, GATE, quantise_elements)

// Of wide rows of 16 bits eight vectors a thread. THREADS: of a block at most, 1,024 in 64
// registers.
#define EXPORT_GATED_WIDE(THREADS, OP, GATE)                                                      \
    EXPORT_GATED_E4M3_UP_TO(THREADS, OP##_fp16_e4m3_vec8, __half, GATE<__half>, quantise_vecs<8>) \
    EXPORT_GATED_E4M3_UP_TO(THREADS, OP##_bf16_e4m3_vec8, __nv_bfloat16, GATE<__nv_bfloat16>,     \
                            quantise_vecs<8>)

// The kernels of an op, of T and of e4m3: {op}_{dtype}[_e4m3]_{variant}.
#define EXPORT_GATED_OF(NAME, T, GATE)   \
    EXPORT_GATED_VARIANTS(NAME, T, GATE) \
    EXPORT_GATED_E4M3_VARIANTS(NAME##_e4m3, T, GATE)
#define EXPORT_GATED_OP(OP, GATE)                                  \
    EXPORT_GATED_OF(OP##_fp16, __half, GATE<__half>)               \
    EXPORT_GATED_OF(OP##_bf16, __nv_bfloat16, GATE<__nv_bfloat16>) \
    EXPORT_GATED_OF(OP##_fp32, float, GATE<float>)

}  // namespace kernel_hub::rowwise
