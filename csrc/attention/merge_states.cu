// Merge of two attention states over disjoint keys: outputs out_a, out_b with the logarithms lse_a,
// lse_b of their softmax denominators (natural).
//
//   lse = log(exp(lse_a) + exp(lse_b))
//   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
// in fp32, rounded once. A side whose lse is -inf has seen no key: the other is taken as it is, and
// with neither, out is 0 and lse -inf.
//
// Parallelisation: threadIdx.x walks a head, threadIdx.y the heads, threadIdx.z the tokens of a
// block; blocks of tokens along gridDim.x, of heads along gridDim.y, the batch along gridDim.z. No
// shared memory.
//   vec1 vec2   16 bytes of each state of that many heads: head_dim a multiple of the vector,
//                    blockDim.x as many as there are, everything 16-byte aligned
//   flat_vec1 ...    the same where everything is contiguous: few parameters, one offset for all
//   scalar           any size, any alignment
// Into either state is allowed.
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al.,
// "FlashAttention", 2022.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs the code of sm80

#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/vec.cuh"

namespace kernel_hub::attention {

// (batch, seqlen, num_heads, head_dim), or without the last dimension. Strides in elements.
template <typename Pointer>
struct State {
    Pointer data;
    int64_t batch_stride, token_stride, head_stride;

    __device__ __forceinline__ Pointer at(int batch_idx, int index, int head_idx) const {
        return data + batch_idx * batch_stride + index * token_stride + head_idx * head_stride;
    }
};

// What each side of a merge counts, and the logarithm of their sum.
struct Weights {
    float a, b;
    float missing_a, missing_b;  // what stands for a side that has seen no key
    bool has_a, has_b;
    float larger_lse, ratio;

    __device__ __forceinline__ Weights(float lse_a, float lse_b) {
        const bool is_a_larger = lse_a >= lse_b;
        larger_lse = is_a_larger ? lse_a : lse_b;
        ratio = __expf((is_a_larger ? lse_b : lse_a) - larger_lse);
        const float larger = __fdividef(1.0f, 1.0f + ratio), smaller = ratio * larger;
        a = is_a_larger ? larger : smaller;
        b = is_a_larger ? smaller : larger;
        has_a = lse_a != -INFINITY;
        has_b = lse_b != -INFINITY;
        // Minus zero, which leaves the other side's zeros their sign.
        missing_a = has_b ? -0.0f : 0.0f;
        missing_b = -0.0f;
    }
    __device__ __forceinline__ float merge(float value_a, float value_b) const {
        return (has_a ? a * value_a : missing_a) + (has_b ? b * value_b : missing_b);
    }
    __device__ __forceinline__ float lse() const {
        return larger_lse == -INFINITY ? larger_lse : larger_lse + log1pf(ratio);
    }
};

template <typename T, int kHeads, int kWidth>
__device__ __forceinline__ void merge_states(State<T*> out, State<float*> out_lse,
                                             State<const T*> out_a, State<const T*> out_b,
                                             State<const float*> lse_a, State<const float*> lse_b,
                                             int seqlen, int num_heads, int head_dim) {
    using HeadAccess = Access<T, kWidth>;
    const int batch_idx = blockIdx.z;
    const int index = blockIdx.x * blockDim.z + threadIdx.z;
    const int first_head = blockIdx.y * blockDim.y * kHeads + threadIdx.y;
    const int last_head = index < seqlen ? num_heads : 0;

    float lses[kHeads][2];
    typename HeadAccess::Bits bits[kHeads][2];
    const auto load = [&](int at) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
            const int head_idx = first_head + h * blockDim.y;
            if (head_idx < last_head) {
                bits[h][0] = HeadAccess::read(out_a.at(batch_idx, index, head_idx) + at);
                bits[h][1] = HeadAccess::read(out_b.at(batch_idx, index, head_idx) + at);
            }
        }
    };
    follow_launch_before();
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
        const int head_idx = first_head + h * blockDim.y;
        if (head_idx < last_head) {
            lses[h][0] = *lse_a.at(batch_idx, index, head_idx);
            lses[h][1] = *lse_b.at(batch_idx, index, head_idx);
        }
    }
    if (kWidth > 1) {
        load(threadIdx.x * kWidth);
    }
    // NOTE: out_lse may be lse_a, which all threads of a head read. Here, where nothing has been
    // waited for yet, the barrier is free.
    __syncthreads();
    // One round for the vector variants, whose blockDim.x covers the head.
    const int step = kWidth > 1 ? (1 << 30) : blockDim.x;
    for (int at = threadIdx.x * kWidth; at < head_dim; at += step) {
        if (kWidth == 1) {
            load(at);
        }
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
            const int head_idx = first_head + h * blockDim.y;
            if (head_idx < last_head) {
                const Weights weights(lses[h][0], lses[h][1]);
                float a[kWidth], b[kWidth];
                HeadAccess::unpack(bits[h][0], a);
                HeadAccess::unpack(bits[h][1], b);
#pragma unroll
                for (int j = 0; j < kWidth; ++j) {
                    a[j] = weights.merge(a[j], b[j]);
                }
                HeadAccess::write(out.at(batch_idx, index, head_idx) + at, a);
            }
        }
    }
    if (threadIdx.x == 0) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
            const int head_idx = first_head + h * blockDim.y;
            if (head_idx < last_head) {
                *out_lse.at(batch_idx, index, head_idx) = Weights(lses[h][0], lses[h][1]).lse();
            }
        }
    }
}

#define EXPORT_MERGE_STATES(DTYPE, T, VARIANT, HEADS, WIDTH)                                      \
    DESCRIBED(                                                                                    \
        merge_states_##DTYPE##_##VARIANT, "x: tokens in steps of blockDim.z, y: heads, z: batch", \
        (.shared_bytes = 0),                                                                      \
        extern "C" __global__ void __launch_bounds__(512) merge_states_##DTYPE##_##VARIANT(       \
            T* out, float* out_lse, const T* out_a, const T* out_b, const float* lse_a,           \
            const float* lse_b, int64_t out_batch_stride, int64_t out_token_stride,               \
            int64_t out_head_stride, int64_t out_lse_batch_stride, int64_t out_lse_token_stride,  \
            int64_t out_lse_head_stride, int64_t out_a_batch_stride, int64_t out_a_token_stride,  \
            int64_t out_a_head_stride, int64_t out_b_batch_stride, int64_t out_b_token_stride,    \
            int64_t out_b_head_stride, int64_t lse_a_batch_stride, int64_t lse_a_token_stride,    \
            int64_t lse_a_head_stride, int64_t lse_b_batch_stride, int64_t lse_b_token_stride,    \
            int64_t lse_b_head_stride, int seqlen, int num_heads, int head_dim) {                 \
            merge_states<T, HEADS, WIDTH>(                                                        \
                {out, out_batch_stride, out_token_stride, out_head_stride},                       \
                {out_lse, out_lse_batch_stride, out_lse_token_stride, out_lse_head_stride},       \
                {out_a, out_a_batch_stride, out_a_token_stride, out_a_head_stride},               \
                {out_b, out_b_batch_stride, out_b_token_stride, out_b_head_stride},               \
                {lse_a, lse_a_batch_stride, lse_a_token_stride, lse_a_head_stride},               \
                {lse_b, lse_b_batch_stride, lse_b_token_stride, lse_b_head_stride}, seqlen,       \
                num_heads, head_dim);                                                             \
        })

#define EXPORT_MERGE_STATES_FLAT(DTYPE, T, VARIANT, HEADS)                                       \
    DESCRIBED(                                                                                   \
        merge_states_##DTYPE##_flat_##VARIANT,                                                   \
        "x: tokens in steps of blockDim.z, y: heads, z: batch", (.shared_bytes = 0),             \
        extern "C" __global__ void __launch_bounds__(512) merge_states_##DTYPE##_flat_##VARIANT( \
            T* out, float* out_lse, const T* out_a, const T* out_b, const float* lse_a,          \
            const float* lse_b, int seqlen, int num_heads, int head_dim) {                       \
            const int64_t token_stride = static_cast<int64_t>(num_heads) * head_dim;             \
            const int64_t batch_stride = seqlen * token_stride;                                  \
            const int64_t lse_stride = static_cast<int64_t>(num_heads) * seqlen;                 \
            merge_states<T, HEADS, kVecElems<T>>(                                                \
                {out, batch_stride, token_stride, head_dim}, {out_lse, lse_stride, 1, seqlen},   \
                {out_a, batch_stride, token_stride, head_dim},                                   \
                {out_b, batch_stride, token_stride, head_dim}, {lse_a, lse_stride, 1, seqlen},   \
                {lse_b, lse_stride, 1, seqlen}, seqlen, num_heads, head_dim);                    \
        })

#define EXPORT_MERGE_STATES_VARIANTS(DTYPE, T)           \
    EXPORT_MERGE_STATES(DTYPE, T, vec1, 1, kVecElems<T>) \
    EXPORT_MERGE_STATES(DTYPE, T, vec2, 2, kVecElems<T>) \
    EXPORT_MERGE_STATES_FLAT(DTYPE, T, vec1, 1)          \
    EXPORT_MERGE_STATES_FLAT(DTYPE, T, vec2, 2)          \
    EXPORT_MERGE_STATES(DTYPE, T, scalar, 1, 1)

// {op}_{dtype}[_flat]_{variant}
EXPORT_MERGE_STATES_VARIANTS(fp16, __half)
EXPORT_MERGE_STATES_VARIANTS(bf16, __nv_bfloat16)
EXPORT_MERGE_STATES_VARIANTS(fp32, float)

}  // namespace kernel_hub::attention
