// Rows of a table by ids, scaled, and rows of a second table by positions added.
//
//   out[t] = weight[id - first_id]                                              the same bits, or
//   out[t] = scale * weight[id - first_id] + position_weight[position]  in fp32, rounded once
// id = ids[t]; position = positions[t % period], or where positions is null t % period. An id that
// is not first_id .. first_id + num_rows - 1 gives zeros, and no position is asked for it; one that
// is none of vocab_size is reported. A position that is no row of its table gives nan.
//
// Parallelisation: threadIdx.x walks a row, 4 or 16 accesses a thread, gridDim.y blocks wide;
// threadIdx.y and gridDim.x the tokens. No shared memory. A row is read and written once.
//   vec       16 bytes an access
//   scalar    any alignment
// kernel_hub: not-for: sm89: memory bounds it, and 8.9 runs the code of sm80
// Source: Vaswani et al., "Attention Is All You Need", 2017, 3.4.

#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/vec.cuh"
#include "tokens/indices.cuh"

namespace kernel_hub::tokens {

constexpr int kThreads = 256;
// Accesses of a row before its writes: of vectors, of elements.
constexpr int kFour = 4, kVecsAhead = 4, kElementsAhead = 16;

template <typename T, int kWidth>
__device__ __forceinline__ void embed(T* out, int* flag, const void* ids, const T* weight,
                                      const T* position_weight, const void* positions,
                                      int64_t out_stride, int64_t ids_stride, int64_t weight_stride,
                                      int64_t position_stride, int num_tokens, int hidden_size,
                                      int num_rows, int first_id, int vocab_size, int max_position,
                                      int period, int ids_bytes, int positions_bytes, int is_scaled,
                                      float scale) {
    using A = Access<T, kWidth>;
    constexpr int kAhead = kWidth > 1 ? kVecsAhead : kElementsAhead;
    const int token = blockIdx.x * blockDim.y + threadIdx.y;
    follow_launch_before();
    if (token >= num_tokens) {
        return;
    }
    const bool is_first = blockIdx.y == 0 && threadIdx.x == 0;
    const int64_t id = load_index(ids, token * ids_stride, ids_bytes);
    // Asked for before the id is known, so that neither read waits for the other.
    int64_t position = token % period;
    if (position_weight != nullptr && positions != nullptr) {
        position = load_index(positions, position, positions_bytes);
    }
    const bool is_id = is_wide_index(id, vocab_size);
    const bool is_there = is_id && is_wide_index(id - first_id, num_rows);
    const T* row = weight + (is_there ? (id - first_id) * weight_stride : 0);

    const bool has_position = is_there && position_weight != nullptr;
    const bool has_row = position_weight != nullptr && is_wide_index(position, max_position);
    const bool is_position = !has_position || has_row;
    const T* added = position_weight + (has_row ? position * position_stride : 0);

    T* to = out + token * out_stride;
    const int step = gridDim.y * blockDim.x * kWidth;
    const int first = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
    // By fours that the whole grid has columns for.
    const auto each = [&](const auto& use) {
#pragma unroll
        for (int four = 0; four < kAhead; four += kFour) {
            if (four * step < hidden_size) {
#pragma unroll
                for (int i = four; i < four + kFour; ++i) {
                    if (first + i * step < hidden_size) {
                        use(i, first + i * step);
                    }
                }
            }
        }
    };
    typename A::Bits bits[kAhead] = {}, more[kAhead] = {};
    if (is_there) {
        each([&](int i, int at) { bits[i] = A::read(row + at); });
    }
    if (has_row) {
        each([&](int i, int at) { more[i] = A::read_shared_by_blocks(added + at); });
    }
    const float factor = is_position ? scale : __builtin_nanf("");
    const bool is_changed = is_there && (is_scaled || has_position);
    each([&](int i, int at) {
        if (!is_changed) {
            A::write_bits(to + at, bits[i]);
            return;
        }
        float values[kWidth], others[kWidth];
        A::unpack(bits[i], values);
        A::unpack(more[i], others);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            const float scaled = __fmul_rn(values[j], factor);
            values[j] = has_position ? __fadd_rn(scaled, others[j]) : scaled;
        }
        A::write(to + at, values);
    });
    report(flag, is_first ? (is_id ? 0 : kIdsOutside) | (is_position ? 0 : kPositionsOutside) : 0);
}

#define EXPORT_EMBEDDING_VARIANT(NAME, T, WIDTH)                                                  \
    DESCRIBED(                                                                                    \
        NAME, "x: tokens in steps of blockDim.y, y: columns in steps of 4 or 16 blockDim.x", (),  \
        extern "C" __global__ void __launch_bounds__(kThreads) NAME(                              \
            T* out, int* flag, const void* ids, const T* weight, const T* position_weight,        \
            const void* positions, int64_t out_stride, int64_t ids_stride, int64_t weight_stride, \
            int64_t position_stride, int num_tokens, int hidden_size, int num_rows, int first_id, \
            int vocab_size, int max_position, int period, int ids_bytes, int positions_bytes,     \
            int is_scaled, float scale) {                                                         \
            embed<T, WIDTH>(out, flag, ids, weight, position_weight, positions, out_stride,       \
                            ids_stride, weight_stride, position_stride, num_tokens, hidden_size,  \
                            num_rows, first_id, vocab_size, max_position, period, ids_bytes,      \
                            positions_bytes, is_scaled, scale);                                   \
        })
#define EXPORT_EMBEDDING(DTYPE, T)                                     \
    EXPORT_EMBEDDING_VARIANT(embedding_##DTYPE##_vec, T, kVecElems<T>) \
    EXPORT_EMBEDDING_VARIANT(embedding_##DTYPE##_scalar, T, 1)

// {op}_{dtype}_{variant}
EXPORT_EMBEDDING(fp16, __half)
EXPORT_EMBEDDING(bf16, __nv_bfloat16)
EXPORT_EMBEDDING(fp32, float)

}  // namespace kernel_hub::tokens
