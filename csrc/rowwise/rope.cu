// Rotary position embedding of queries and keys in one launch.
//
// For each head of each token, with c, s = cos[position], sin[position], half = rotary_dim / 2:
//   half-split:   out[j]        = x[j] c[j] - x[half + j] s[j]
//                 out[half + j] = x[half + j] c[j] + x[j] s[j]
//   interleaved:  out[2j]       = x[2j] c[j] - x[2j + 1] s[j]
//                 out[2j + 1]   = x[2j + 1] c[j] + x[2j] s[j]
//   out[rotary_dim:] = x[rotary_dim:]
// in fp32, rounded once. position = positions[batch, token] (int32 or int64), or where positions is
// null batch * positions_batch_stride + token: the rows of the table are the tokens'. One outside
// the table gives NaN.
//
// Parallelisation: threadIdx.x walks the rotary dimension of a head, threadIdx.y the heads (query
// heads, then key heads), threadIdx.z the tokens of a block; blocks of tokens along gridDim.x, the
// batch along gridDim.y. A thread reads its cosines and sines once for all its heads, and takes
// kHeads of them at a time. No shared memory.
//   vec1 vec2 vec4   16 bytes (of each half) of that many heads at a time: head_dim and
//                    rotary_dim / 2 (interleaved: rotary_dim) multiples of the vector, blockDim.x
//                    as many as there are, everything 16-byte aligned
//   flat_vec1 ...    the same where all tensors are contiguous, rotary_dim is head_dim and there is
//                    one batch: few parameters, no stride arithmetic, no loop (gridDim.y is blocks
//                    of heads)
//   scalar           any size, any alignment
// In place is allowed: each element is read, then written, by one thread.
// Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs the code of sm80

#include "kernel_hub/bounds.cuh"
#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/vec.cuh"

#include <type_traits>

namespace kernel_hub::rowwise {

// One of q and k: where it is read and written. Strides in elements.
template <typename T>
struct RopeTensor {
    T* out;      // (batch, num_tokens, num_heads, head_dim)
    const T* x;  // same shape
    int64_t out_batch_stride, out_token_stride, out_head_stride;
    int64_t x_batch_stride, x_token_stride, x_head_stride;

    __device__ __forceinline__ void select_token(int64_t batch_idx, int64_t token_idx) {
        out += batch_idx * out_batch_stride + token_idx * out_token_stride;
        x += batch_idx * x_batch_stride + token_idx * x_token_stride;
    }
};

// The first element of head `head_idx`: query heads, then key heads. By selects: branches would
// split the loads.
template <typename Pointer>
__device__ __forceinline__ Pointer select_head(int head_idx, int num_heads, Pointer q,
                                               int64_t q_head_stride, Pointer k,
                                               int64_t k_head_stride) {
    const bool is_query = head_idx < num_heads;
    const Pointer base = is_query ? q : k;
    const int64_t head_stride = is_query ? q_head_stride : k_head_stride;
    return base + (is_query ? head_idx : head_idx - num_heads) * head_stride;
}

// Sixteen bytes' worth of table entries, or one, as floats.
template <typename Table, int kCount>
__device__ __forceinline__ void load_table(const Table* entries, float (&values)[kCount]) {
    constexpr int kElems = kVecElems<Table>;
    if constexpr (kCount % kElems == 0) {
#pragma unroll
        for (int i = 0; i < kCount; i += kElems) {
            float part[kElems];
            unpack<Table>(load_shared_by_blocks(entries + i), part);
#pragma unroll
            for (int j = 0; j < kElems; ++j) {
                values[i + j] = part[j];
            }
        }
    } else if constexpr (kCount * sizeof(Table) == 8) {
        const uint2 bits = __ldg(reinterpret_cast<const uint2*>(entries));
        Word<Table>::unpack(bits.x, values);
        Word<Table>::unpack(bits.y, values + Word<Table>::kElems);
    } else {
        static_assert(kCount == 1, "table entries are read 16 or 8 bytes at a time, or one by one");
        values[0] = to_float(__ldg(entries));
    }
}

template <typename T, typename Table, bool kInterleaved, int kHeads, int kWidth, bool kFlat>
__device__ __forceinline__ void rope(RopeTensor<T> q, RopeTensor<T> k, int* flag, const Table* cos,
                                     const Table* sin, const void* positions, int64_t table_stride,
                                     int64_t positions_batch_stride, int num_tokens, int num_heads,
                                     int num_kv_heads, int head_dim, int rotary_dim,
                                     int max_position, int positions_bytes) {
    using HeadAccess = Access<T, kWidth>;
    // Half-split: kWidth pairs, one element of each in either half. Interleaved: the pairs lie side
    // by side in the accesses; a scalar access needs two for one pair.
    constexpr int kPairs = kInterleaved && kWidth > 1 ? kWidth / 2 : kWidth;
    constexpr int kParts = kInterleaved && kWidth > 1 ? 1 : 2;
    const int64_t token_idx = static_cast<int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
    follow_launch_before();
    if (token_idx >= num_tokens) {
        return;
    }
    const int batch_idx = kFlat ? 0 : blockIdx.y;
    q.select_token(batch_idx, token_idx);
    k.select_token(batch_idx, token_idx);

    // NOTE: spilled in the other type, each.
    using Index = std::conditional_t<kFlat, int64_t, int>;
    const Index i = batch_idx * static_cast<Index>(positions_batch_stride) + token_idx;
    int64_t position = i;
    if (positions_bytes != 0) {
        position = positions_bytes == 8 ? __ldg(static_cast<const long long*>(positions) + i)
                                        : __ldg(static_cast<const int*>(positions) + i);
    }

    const int half = rotary_dim / 2;
    const int total_heads = num_heads + num_kv_heads;
    const int first_head = threadIdx.y + (kFlat ? blockIdx.y * blockDim.y * kHeads : 0);
    // One round for the vector variants, whose blockDim.x covers the rotary dimension.
    const int pair_step = kWidth > 1 ? (1 << 30) : blockDim.x * kPairs;
    for (int pair = threadIdx.x * kPairs; pair < half; pair += pair_step) {
        const int first = kInterleaved ? 2 * pair : pair;
        const int second = kInterleaved ? 2 * pair + 1 : half + pair;  // used with two parts only
        float c[kPairs], s[kPairs];
        for (int head = first_head; head < total_heads; head += blockDim.y * kHeads) {
            // Issue the loads of kHeads heads before the first use.
            typename HeadAccess::Bits bits[kHeads][kParts];
#pragma unroll
            for (int h = 0; h < kHeads; ++h) {
                const int head_idx = head + h * blockDim.y;
                if (head_idx < total_heads) {
                    const T* x = select_head(head_idx, num_heads, q.x, q.x_head_stride, k.x,
                                             k.x_head_stride);
                    bits[h][0] = HeadAccess::read(x + first);
                    if constexpr (kParts == 2) {
                        bits[h][1] = HeadAccess::read(x + second);
                    }
                }
            }

            // NOTE: after the heads' loads: the table's address waits for the position, and would
            // hold them up.
            if (kFlat || head == first_head) {
                // A position outside the table must not read past it; it shows as NaN.
                const bool is_inside =
                    (kFlat && positions_bytes == 0) || position >= 0 && position < max_position;
                const int64_t table_offset = is_inside ? position * table_stride : 0;
                load_table<Table, kPairs>(cos + table_offset + pair, c);
                load_table<Table, kPairs>(sin + table_offset + pair, s);
                report_if(flag, !is_inside, kPositionsOutside);
                if (!is_inside) {
#pragma unroll
                    for (int j = 0; j < kPairs; ++j) {
                        c[j] = s[j] = __int_as_float(0x7fffffff);
                    }
                }
            }

            // Rotate and write.
#pragma unroll
            for (int h = 0; h < kHeads; ++h) {
                const int head_idx = head + h * blockDim.y;
                if (head_idx < total_heads) {
                    T* out = select_head(head_idx, num_heads, q.out, q.out_head_stride, k.out,
                                         k.out_head_stride);
                    float a[kWidth];
                    HeadAccess::unpack(bits[h][0], a);
                    if constexpr (kParts == 2) {
                        float b[kWidth];
                        HeadAccess::unpack(bits[h][1], b);
#pragma unroll
                        for (int j = 0; j < kWidth; ++j) {
                            const float rotated = a[j] * c[j] - b[j] * s[j];
                            b[j] = b[j] * c[j] + a[j] * s[j];
                            a[j] = rotated;
                        }
                        HeadAccess::write(out + second, b);
                    } else {
#pragma unroll
                        for (int j = 0; j < kPairs; ++j) {
                            const float rotated = a[2 * j] * c[j] - a[2 * j + 1] * s[j];
                            a[2 * j + 1] = a[2 * j + 1] * c[j] + a[2 * j] * s[j];
                            a[2 * j] = rotated;
                        }
                    }
                    HeadAccess::write(out + first, a);
                }
            }
            if constexpr (kFlat) {
                break;
            }
        }
    }

    // Copy the part that is not rotated, unless it is in place.
    for (int j = kFlat ? head_dim : rotary_dim + threadIdx.x * kWidth; j < head_dim;
         j += blockDim.x * kWidth) {
        for (int head_idx = threadIdx.y; head_idx < total_heads; head_idx += blockDim.y) {
            const T* x =
                select_head(head_idx, num_heads, q.x, q.x_head_stride, k.x, k.x_head_stride);
            T* out = select_head(head_idx, num_heads, q.out, q.out_head_stride, k.out,
                                 k.out_head_stride);
            if (out != x) {
                HeadAccess::write_bits(out + j, HeadAccess::read(x + j));
            }
        }
    }
}

#define EXPORT_ROPE(DTYPE, T, TABLE, LAYOUT, INTERLEAVED, VARIANT, HEADS, WIDTH, MIN_BLOCKS)   \
    DESCRIBED(                                                                                 \
        rope_##DTYPE##_##LAYOUT##_##VARIANT, "x: tokens in steps of blockDim.z, y: batch",     \
        (.shared_bytes = 0),                                                                   \
        extern "C" __global__ void                                                             \
        __launch_bounds__(512, MIN_BLOCKS) rope_##DTYPE##_##LAYOUT##_##VARIANT(                \
            T* q_out, T* k_out, int* flag, const T* q, const T* k, const TABLE* cos,           \
            const TABLE* sin, const void* positions, int64_t q_out_batch_stride,               \
            int64_t q_out_token_stride, int64_t q_out_head_stride, int64_t k_out_batch_stride, \
            int64_t k_out_token_stride, int64_t k_out_head_stride, int64_t q_batch_stride,     \
            int64_t q_token_stride, int64_t q_head_stride, int64_t k_batch_stride,             \
            int64_t k_token_stride, int64_t k_head_stride, int64_t table_stride,               \
            int64_t positions_batch_stride, int num_tokens, int num_heads, int num_kv_heads,   \
            int head_dim, int rotary_dim, int max_position, int positions_bytes) {             \
            rope<T, TABLE, INTERLEAVED, HEADS, WIDTH, false>(                                  \
                {q_out, q, q_out_batch_stride, q_out_token_stride, q_out_head_stride,          \
                 q_batch_stride, q_token_stride, q_head_stride},                               \
                {k_out, k, k_out_batch_stride, k_out_token_stride, k_out_head_stride,          \
                 k_batch_stride, k_token_stride, k_head_stride},                               \
                flag, cos, sin, positions, table_stride, positions_batch_stride, num_tokens,   \
                num_heads, num_kv_heads, head_dim, rotary_dim, max_position, positions_bytes); \
        })

#define EXPORT_ROPE_FLAT(DTYPE, T, TABLE, LAYOUT, INTERLEAVED, VARIANT, HEADS, MIN_BLOCKS)    \
    DESCRIBED(                                                                                \
        rope_##DTYPE##_##LAYOUT##_flat_##VARIANT,                                             \
        "x: tokens in steps of blockDim.z, y: heads in steps of blockDim.y times those of a " \
        "thread",                                                                             \
        (.shared_bytes = 0),                                                                  \
        extern "C" __global__ void                                                            \
        __launch_bounds__(512, MIN_BLOCKS) rope_##DTYPE##_##LAYOUT##_flat_##VARIANT(          \
            T* q_out, T* k_out, int* flag, const T* q, const T* k, const TABLE* cos,          \
            const TABLE* sin, const void* positions, int table_stride, int num_tokens,        \
            int num_heads, int num_kv_heads, int head_dim, int max_position,                  \
            int positions_bytes) {                                                            \
            const int q_stride = num_heads * head_dim, k_stride = num_kv_heads * head_dim;    \
            rope<T, TABLE, INTERLEAVED, HEADS, kVecElems<T>, true>(                           \
                {q_out, q, 0, q_stride, head_dim, 0, q_stride, head_dim},                     \
                {k_out, k, 0, k_stride, head_dim, 0, k_stride, head_dim}, flag, cos, sin,     \
                positions, table_stride, 0, num_tokens, num_heads, num_kv_heads, head_dim,    \
                head_dim, max_position, positions_bytes);                                     \
        })

// MIN_BLOCKS: of 512 threads an SM, so 2 is a cap of 64 registers.
#define EXPORT_ROPE_VARIANTS(DTYPE, T, TABLE, LAYOUT, INTERLEAVED, MIN_BLOCKS)           \
    EXPORT_ROPE(DTYPE, T, TABLE, LAYOUT, INTERLEAVED, vec1, 1, kVecElems<T>, MIN_BLOCKS) \
    EXPORT_ROPE(DTYPE, T, TABLE, LAYOUT, INTERLEAVED, vec2, 2, kVecElems<T>, MIN_BLOCKS) \
    EXPORT_ROPE(DTYPE, T, TABLE, LAYOUT, INTERLEAVED, vec4, 4, kVecElems<T>, 1)          \
    EXPORT_ROPE_FLAT(DTYPE, T, TABLE, LAYOUT, INTERLEAVED, vec1, 1, MIN_BLOCKS)          \
    EXPORT_ROPE_FLAT(DTYPE, T, TABLE, LAYOUT, INTERLEAVED, vec2, 2, MIN_BLOCKS)          \
    EXPORT_ROPE_FLAT(DTYPE, T, TABLE, LAYOUT, INTERLEAVED, vec4, 4, 1)                   \
    EXPORT_ROPE(DTYPE, T, TABLE, LAYOUT, INTERLEAVED, scalar, 1, 1, 1)

// {op}_{dtype}[_table32]_{layout}_{variant}: table32 = fp32 cosines and sines with 16-bit queries
// and keys.
EXPORT_ROPE_VARIANTS(fp16, __half, __half, half, false, 2)
EXPORT_ROPE_VARIANTS(fp16, __half, __half, interleaved, true, 2)
EXPORT_ROPE_VARIANTS(fp16_table32, __half, float, half, false, 1)
EXPORT_ROPE_VARIANTS(fp16_table32, __half, float, interleaved, true, 2)
EXPORT_ROPE_VARIANTS(bf16, __nv_bfloat16, __nv_bfloat16, half, false, 2)
EXPORT_ROPE_VARIANTS(bf16, __nv_bfloat16, __nv_bfloat16, interleaved, true, 2)
EXPORT_ROPE_VARIANTS(bf16_table32, __nv_bfloat16, float, half, false, 1)
EXPORT_ROPE_VARIANTS(bf16_table32, __nv_bfloat16, float, interleaved, true, 2)
EXPORT_ROPE_VARIANTS(fp32, float, float, half, false, 2)
EXPORT_ROPE_VARIANTS(fp32, float, float, interleaved, true, 2)

}  // namespace kernel_hub::rowwise
