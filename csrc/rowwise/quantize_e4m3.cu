// Values into e4m3 with scales, as linear takes them: values = out * scale.
//
//   scale = max |x| / 448 of what shares one,  out = round(x / scale),  in fp32
//
// Variants by what shares a scale, each in 16-byte vectors or (scalar) of any size and alignment:
//   row_vec1 _vec2 _vec4 _vec8 _loop _scalar   a row; blockDim.x threads a row, blockDim.y rows a
//   block,
//                    in registers (vecN: that many vectors a thread) or read twice; a small whole
//                    tensor is one too
//   block_vec _scalar   128 columns of a row: as many neighbouring lanes as hold them
//   tile_vec _scalar   128 x 128: a block each, in registers
//   largest_vec _scalar   the whole tensor: only its scale, by the block that ends last; rows are
//                    dealt in fours, `state` is (blocks that ended, largest), zeros before and
//                    after
//   given_vec _scalar   scales that are there: of the whole, of rows, of blocks or of tiles, by
//                    their strides and by what a row or a column is shifted right for its place
// NOTE: given_* walks rows from the last to the first: the launch of largest_* before it left those
// in the L2.
// Shared memory: one float a warp.
// Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022; DeepSeek-AI, "DeepSeek-V3
// Technical Report", 2024, 3.3.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs sm80's, which converts by integers

#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/math.cuh"
#include "rowwise/quantise_rows.cuh"

namespace kernel_hub::rowwise {

constexpr int kScaleBlock = 128;
constexpr int kTileThreads = 256;
constexpr int kRowsAtOnce = 4;

template <typename T>
struct E4m3Params {
    __nv_fp8_e4m3* out;  // (outer, num_rows, size)
    float* out_scale;
    const T* x;  // same shape
    int64_t out_stride, out_outer_stride;
    int64_t scale_stride, scale_outer_stride, scale_column_stride;
    int64_t x_stride, x_outer_stride;
    int num_rows, size;
    int rows_a_thread;  // at most kRowsAtOnce, where threads take several
};

// This thread's row, and its values.
template <typename T>
__device__ __forceinline__ E4m3Row select_row(E4m3Params<T>& p) {
    const int64_t row_idx = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    p.x += blockIdx.y * p.x_outer_stride + row_idx * p.x_stride;
    return {p.out + blockIdx.y * p.out_outer_stride + row_idx * p.out_stride,
            p.out_scale + blockIdx.y * p.scale_outer_stride + row_idx * p.scale_stride,
            row_idx < p.num_rows, p.size};
}
template <int kVecs, typename T>
__device__ __forceinline__ void row_in_registers(E4m3Params<T> p) {
    const E4m3Row row = select_row(p);
    quantise_vecs<kVecs>(PlainRow<T>{p.x}, row);
}
template <int kWidth, typename T>
__device__ __forceinline__ void row_twice(E4m3Params<T> p) {
    const E4m3Row row = select_row(p);
    if constexpr (kWidth == 1) {
        quantise_elements(PlainRow<T>{p.x}, row);
    } else {
        quantise_passes<kWidth>(PlainRow<T>{p.x}, row);
    }
}

// The largest of `value` over aligned groups of kLanes lanes.
template <int kLanes>
__device__ __forceinline__ float group_max(float value) {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
        value = max_nan(value, __shfl_xor_sync(kAllLanes, value, mask));
    }
    return value;
}

template <int kWidth, typename T>
__device__ __forceinline__ void quantise_blocks(E4m3Params<T> p) {
    constexpr int kLanes = kWidth == 1 ? kWarpSize : kScaleBlock / kWidth;
    constexpr int kAccesses = kScaleBlock / (kLanes * kWidth);
    const int thread_idx = blockIdx.x * blockDim.x + threadIdx.x;
    const int block_idx = thread_idx / kLanes;
    const int lane_idx = thread_idx % kLanes;
    const int first = block_idx * kScaleBlock + lane_idx * kWidth;
    p.out += blockIdx.z * p.out_outer_stride;
    p.x += blockIdx.z * p.x_outer_stride;
    p.out_scale += blockIdx.z * p.scale_outer_stride + block_idx * p.scale_column_stride;
    const int64_t step = static_cast<int64_t>(gridDim.y) * p.rows_a_thread;
    follow_launch_before();
    for (int64_t first_row = static_cast<int64_t>(blockIdx.y) * p.rows_a_thread;
         first_row < p.num_rows; first_row += step) {
        // Issue every load before the first use.
        typename Access<T, kWidth>::Bits bits[kRowsAtOnce][kAccesses];
#pragma unroll
        for (int row = 0; row < kRowsAtOnce; ++row) {
#pragma unroll
            for (int i = 0; i < kAccesses; ++i) {
                const int column = first + i * kLanes * kWidth;
                if (row < p.rows_a_thread && first_row + row < p.num_rows && column < p.size) {
                    bits[row][i] =
                        Access<T, kWidth>::read(p.x + (first_row + row) * p.x_stride + column);
                }
            }
        }
#pragma unroll
        for (int row = 0; row < kRowsAtOnce; ++row) {
            const int64_t row_idx = first_row + row;
            if (row >= p.rows_a_thread || row_idx >= p.num_rows) {
                break;
            }
            float values[kAccesses][kWidth];
            float largest = 1e-12f;
#pragma unroll
            for (int i = 0; i < kAccesses; ++i) {
                if (first + i * kLanes * kWidth < p.size) {
                    Access<T, kWidth>::unpack(bits[row][i], values[i]);
                    largest = max_nan(largest, largest_of(values[i]));
                }
            }
            // NOTE: of the scale, not of the largest, whose reciprocal may be subnormal.
            const float scale = group_max<kLanes>(largest) * (1.0f / kLargest<__nv_fp8_e4m3>);
            if (lane_idx == 0 && first < p.size) {
                p.out_scale[row_idx * p.scale_stride] = scale;
            }
            const float factor = reciprocal_approx(scale);
#pragma unroll
            for (int i = 0; i < kAccesses; ++i) {
                const int column = first + i * kLanes * kWidth;
                if (column < p.size) {
                    write_scaled(p.out + row_idx * p.out_stride + column, factor, values[i]);
                }
            }
        }
    }
}

// A tile of 128 x 128 a block.
template <int kWidth, typename T>
__device__ __forceinline__ void quantise_tile(E4m3Params<T> p) {
    constexpr int kThreadsARow = kScaleBlock / kWidth;
    constexpr int kRowStep = kTileThreads / kThreadsARow;
    constexpr int kAccesses = kScaleBlock / kRowStep;
    using RowAccess = Access<T, kWidth>;
    __shared__ float slots[kMaxWarps];
    const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kScaleBlock;
    const int column = blockIdx.x * kScaleBlock + threadIdx.x % kThreadsARow * kWidth;
    const int64_t row_idx = first_row + threadIdx.x / kThreadsARow;
    // Of this thread's column, kRowStep apart.
    const int rows_left =
        column < p.size && row_idx < p.num_rows ? static_cast<int>(p.num_rows - row_idx) : 0;
    const T* x = p.x + blockIdx.z * p.x_outer_stride + row_idx * p.x_stride + column;
    __nv_fp8_e4m3* out = p.out + blockIdx.z * p.out_outer_stride + row_idx * p.out_stride + column;

    follow_launch_before();
    // Issue every load before the first use.
    typename RowAccess::Bits bits[kAccesses];
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
        if (i * kRowStep < rows_left) {
            bits[i] = RowAccess::read(x);
        }
        x += kRowStep * p.x_stride;
    }
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
        if (i * kRowStep < rows_left) {
            float values[kWidth];
            RowAccess::unpack(bits[i], values);
            largest = max_nan(largest, largest_of(values));
        }
    }
    float* out_scale = p.out_scale + blockIdx.z * p.scale_outer_stride +
                       blockIdx.y * p.scale_stride + blockIdx.x * p.scale_column_stride;
    const float factor =
        scale_row(kLargest<__nv_fp8_e4m3>, out_scale, row_max(largest, slots), true);
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
        if (i * kRowStep < rows_left) {
            float values[kWidth];
            RowAccess::unpack(bits[i], values);
            write_scaled(out, factor, values);
        }
        out += kRowStep * p.out_stride;
    }
}

// The scale of the whole, written by the block that ends last.
template <int kWidth, typename T>
__device__ __forceinline__ void find_largest(float* out_scale, int* state, const T* x,
                                             int64_t x_stride, int64_t x_outer_stride, int num_rows,
                                             int size) {
    using RowAccess = Access<T, kWidth>;
    __shared__ float slots[kMaxWarps];
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y * kRowsAtOnce;
    float largest = 0.0f;
    x += blockIdx.y * x_outer_stride;
    follow_launch_before();
    for (int64_t first =
             (static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y) * kRowsAtOnce;
         first < num_rows; first += step) {
        for (int column = threadIdx.x * kWidth; column < size; column += blockDim.x * kWidth) {
            typename RowAccess::Bits bits[kRowsAtOnce];
#pragma unroll
            for (int i = 0; i < kRowsAtOnce; ++i) {
                // Behind the last row the last one again.
                const int64_t row = first + i < num_rows ? first + i : num_rows - 1;
                bits[i] = RowAccess::read(x + row * x_stride + column);
            }
#pragma unroll
            for (int i = 0; i < kRowsAtOnce; ++i) {
                float values[kWidth];
                RowAccess::unpack(bits[i], values);
                largest = max_nan(largest, largest_of(values));
            }
        }
    }
    largest = row_max(largest, slots);
    // Magnitudes are in the order of their bits, nan behind all.
    if (threadIdx.x == 0) {
        atomicMax(state + 1, static_cast<int>(__float_as_uint(largest)));
        __threadfence();
        const int num_rows_of_threads = gridDim.x * gridDim.y * blockDim.y;
        if (atomicAdd(state, 1) == num_rows_of_threads - 1) {
            __threadfence();
            const float found = __uint_as_float(static_cast<uint32_t>(atomicExch(state + 1, 0)));
            atomicExch(state, 0);
            *out_scale = max_nan(found, 1e-12f) / kLargest<__nv_fp8_e4m3>;
        }
    }
}

// Scales that are there.
template <int kWidth, typename T>
__device__ __forceinline__ void quantise_given(E4m3Params<T> p, const float* scales,
                                               int row_shift) {
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * kWidth;
    follow_launch_before();
    if (column >= p.size) {
        return;
    }
    p.out += blockIdx.z * p.out_outer_stride + column;
    p.x += blockIdx.z * p.x_outer_stride + column;
    scales += blockIdx.z * p.scale_outer_stride + column / kScaleBlock * p.scale_column_stride;
    const int64_t step = static_cast<int64_t>(gridDim.y) * p.rows_a_thread;
    for (int64_t last_row = p.num_rows - 1 - static_cast<int64_t>(blockIdx.y) * p.rows_a_thread;
         last_row >= 0; last_row -= step) {
        typename Access<T, kWidth>::Bits bits[kRowsAtOnce];
        float found[kRowsAtOnce];
#pragma unroll
        for (int row = 0; row < kRowsAtOnce; ++row) {
            const int64_t row_idx = last_row - row;
            if (row < p.rows_a_thread && row_idx >= 0) {
                bits[row] = Access<T, kWidth>::read(p.x + row_idx * p.x_stride);
                found[row] = scales[(row_idx >> row_shift) * p.scale_stride];
            }
        }
#pragma unroll
        for (int row = 0; row < kRowsAtOnce; ++row) {
            const int64_t row_idx = last_row - row;
            if (row < p.rows_a_thread && row_idx >= 0) {
                float values[kWidth];
                Access<T, kWidth>::unpack(bits[row], values);
                write_scaled(p.out + row_idx * p.out_stride, 1.0f / found[row], values);
            }
        }
    }
}

#define QUANTIZE_STRIDES                                                           \
    int64_t out_stride, int64_t out_outer_stride, int64_t scale_stride,            \
        int64_t scale_outer_stride, int64_t scale_column_stride, int64_t x_stride, \
        int64_t x_outer_stride, int num_rows, int size, int rows_a_thread
#define QUANTIZE_PARAMS(SCALE) \
    {out,                      \
     SCALE,                    \
     x,                        \
     out_stride,               \
     out_outer_stride,         \
     scale_stride,             \
     scale_outer_stride,       \
     scale_column_stride,      \
     x_stride,                 \
     x_outer_stride,           \
     num_rows,                 \
     size,                     \
     rows_a_thread}

#define EXPORT_QUANTIZE(NAME, T, BODY, SIZE, THREADS, GRID, FACTS)                \
    DESCRIBED(                                                                    \
        NAME, GRID, FACTS,                                                        \
        extern "C" __global__ void __launch_bounds__(THREADS) NAME(               \
            __nv_fp8_e4m3* out, float* out_scale, const T* x, QUANTIZE_STRIDES) { \
            BODY<SIZE, T>(QUANTIZE_PARAMS(out_scale));                            \
        })

#define EXPORT_QUANTIZE_ROW(NAME, T, BODY, SIZE)                                          \
    EXPORT_QUANTIZE(NAME, T, BODY, SIZE, 1024,                                            \
                    "x: rows in steps of blockDim.y, y: the outer dimension; blockDim.x " \
                    "threads a row",                                                      \
                    (.shared_bytes = 0))

#define EXPORT_QUANTIZE_WIDTH(NAME, T, VARIANT, WIDTH)                                             \
    EXPORT_QUANTIZE(NAME##_block_##VARIANT, T, quantise_blocks, WIDTH, 1024,                       \
                    "x: columns in steps of blockDim.x threads, y: rows in steps of "              \
                    "rows_a_thread, z: the outer dimension",                                       \
                    (.shared_bytes = 0))                                                           \
    EXPORT_QUANTIZE(NAME##_tile_##VARIANT, T, quantise_tile, WIDTH, kTileThreads,                  \
                    "x: tiles of columns, y: of rows, z: the outer dimension",                     \
                    (.threads = kTileThreads, .shared_bytes = 0))                                  \
    DESCRIBED(                                                                                     \
        NAME##_largest_##VARIANT, "x: rows in steps of 4 blockDim.y, y: the outer dimension",      \
        (.shared_bytes = 0),                                                                       \
        extern "C" __global__ void __launch_bounds__(1024) NAME##_largest_##VARIANT(               \
            float* out_scale, int* state, const T* x, int64_t x_stride, int64_t x_outer_stride,    \
            int num_rows, int size) {                                                              \
            find_largest<WIDTH, T>(out_scale, state, x, x_stride, x_outer_stride, num_rows, size); \
        })                                                                                         \
    DESCRIBED(                                                                                     \
        NAME##_given_##VARIANT,                                                                    \
        "x: columns in steps of blockDim.x accesses, y: rows in steps of rows_a_thread, z: the "   \
        "outer dimension",                                                                         \
        (.shared_bytes = 0),                                                                       \
        extern "C" __global__ void __launch_bounds__(1024) NAME##_given_##VARIANT(                 \
            __nv_fp8_e4m3* out, const T* x, const float* scale, QUANTIZE_STRIDES, int row_shift) { \
            quantise_given<WIDTH, T>(QUANTIZE_PARAMS(nullptr), scale, row_shift);                  \
        })

#define EXPORT_QUANTIZE_VARIANTS(NAME, T)                            \
    EXPORT_QUANTIZE_ROW(NAME##_row_vec1, T, row_in_registers, 1)     \
    EXPORT_QUANTIZE_ROW(NAME##_row_vec2, T, row_in_registers, 2)     \
    EXPORT_QUANTIZE_ROW(NAME##_row_vec4, T, row_in_registers, 4)     \
    EXPORT_QUANTIZE_ROW(NAME##_row_loop, T, row_twice, kVecElems<T>) \
    EXPORT_QUANTIZE_ROW(NAME##_row_scalar, T, row_twice, 1)          \
    EXPORT_QUANTIZE_WIDTH(NAME, T, vec, kVecElems<T>)                \
    EXPORT_QUANTIZE_WIDTH(NAME, T, scalar, 1)

EXPORT_QUANTIZE_VARIANTS(quantize_e4m3_fp16, __half)
EXPORT_QUANTIZE_VARIANTS(quantize_e4m3_bf16, __nv_bfloat16)
EXPORT_QUANTIZE_VARIANTS(quantize_e4m3_fp32, float)
EXPORT_QUANTIZE_ROW(quantize_e4m3_fp16_row_vec8, __half, row_in_registers, 8)
EXPORT_QUANTIZE_ROW(quantize_e4m3_bf16_row_vec8, __nv_bfloat16, row_in_registers, 8)

}  // namespace kernel_hub::rowwise
