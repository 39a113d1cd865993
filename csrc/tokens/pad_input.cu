// Packed rows of sequences into padded batches, and out of them: each is the other's gradient.
//
//   pad_input    out[b, s] = x[cu_seqlens[b] + s] for s < cu_seqlens[b + 1] - cu_seqlens[b], else 0
//   unpad_input  out[cu_seqlens[b] + s] = x[b, s] of the same b and s, where s < seqlen; rows that
//                none is for are 0
// Bounds that fall or lie outside the packed rows are those of no rows, and reported; what a
// sequence has beyond seqlen is dropped.
//
// Parallelisation: a row of results belongs to blockDim.x threads of a block, blockDim.y rows a
// block; each thread copies every blockDim.x-th unit, kAhead of them read before they are written.
// A row of packed results finds its sequence in steps of half of what is left. No shared memory.
//   vec    units of 16 bytes
//   word   units of 4 bytes
//   half_word   units of 2 bytes
//   byte   any size and alignment
// kernel_hub: not-for: sm89: memory bounds it, and 8.9 runs the code of sm80
// Source: Dao, flash-attention's bert_padding.py, 2022, for what they do.

#include "kernel_hub/bounds.cuh"
#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/launch_facts.cuh"

namespace kernel_hub::tokens {

constexpr int kCopyThreads = 256;
constexpr int kAhead = 4;

// The last sequence that begins at row `row` or before; 0 where none does.
__device__ __forceinline__ int last_beginning(const int* cu_seqlens, int batch_size, int row) {
    int low = 0, high = batch_size - 1;
#pragma unroll 1
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (__ldg(cu_seqlens + middle) <= row) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

// Says in the flag which bounds are wrong, once each.
__device__ __forceinline__ void check_bounds(int* flag, const int* cu_seqlens, int batch_size,
                                             int total) {
    const int threads = blockDim.x * blockDim.y;
    const int64_t first =
        static_cast<int64_t>(blockIdx.x) * threads + threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll 1
    for (int64_t i = first; i < batch_size; i += static_cast<int64_t>(gridDim.x) * threads) {
        report_if(flag, find_rows(cu_seqlens, static_cast<int>(i), total).is_outside,
                  kTokensOutside);
    }
}

// Strides in units, of rows that are packed, of sequences and of their rows.
template <typename Unit, bool kPads>
__device__ __forceinline__ void copy_rows(Unit* out, int* flag, const Unit* x,
                                          const int* cu_seqlens, int64_t packed_stride,
                                          int64_t batch_stride, int64_t padded_stride,
                                          int batch_size, int seqlen, int total, int units) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= (kPads ? batch_size * seqlen : total)) {
        return;
    }
    const int sequence =
        kPads ? row / seqlen : (batch_size > 0 ? last_beginning(cu_seqlens, batch_size, row) : 0);
    const RowRange range =
        batch_size > 0 ? find_rows(cu_seqlens, sequence, total) : RowRange{0, 0, false};
    // NOTE: a packed row may lie before the first sequence: `at` is below 0.
    const int at = kPads ? row - sequence * seqlen : row - range.start;
    const bool is_there = at >= 0 && at < range.count && at < seqlen;
    const int64_t packed = static_cast<int64_t>(kPads ? range.start + at : row) * packed_stride;
    const int64_t padded = sequence * batch_stride + at * padded_stride;
    const Unit* from = x + (kPads ? packed : padded);
    Unit* to = out + (kPads ? padded : packed);
#pragma unroll 1
    for (int first = threadIdx.x; first < units; first += kAhead * blockDim.x) {
        Unit bits[kAhead] = {};
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (is_there && first + i * static_cast<int>(blockDim.x) < units) {
                bits[i] = from[first + i * blockDim.x];
            }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (first + i * static_cast<int>(blockDim.x) < units) {
                to[first + i * blockDim.x] = bits[i];
            }
        }
    }
    if (kPads) {
        report_if(flag, at == 0 && threadIdx.x == 0 && range.is_outside, kTokensOutside);
    }
}

#define EXPORT_COPY_ROWS(NAME, UNIT, PADS)                                                      \
    DESCRIBED(                                                                                  \
        NAME, "x: rows of out, blockDim.y of them a block", (.threads_z = 1),                   \
        extern "C" __global__ void __launch_bounds__(kCopyThreads) NAME(                        \
            void* out, int* flag, const void* x, const int* cu_seqlens, int64_t packed_stride,  \
            int64_t batch_stride, int64_t padded_stride, int batch_size, int seqlen, int total, \
            int units) {                                                                        \
            follow_launch_before();                                                             \
            copy_rows<UNIT, PADS>(static_cast<UNIT*>(out), flag, static_cast<const UNIT*>(x),   \
                                  cu_seqlens, packed_stride, batch_stride, padded_stride,       \
                                  batch_size, seqlen, total, units);                            \
            if (!PADS) {                                                                        \
                check_bounds(flag, cu_seqlens, batch_size, total);                              \
            }                                                                                   \
        })

#define EXPORT_UNITS(NAME, PADS)                       \
    EXPORT_COPY_ROWS(NAME##_vec, uint4, PADS)          \
    EXPORT_COPY_ROWS(NAME##_word, uint32_t, PADS)      \
    EXPORT_COPY_ROWS(NAME##_half_word, uint16_t, PADS) \
    EXPORT_COPY_ROWS(NAME##_byte, uint8_t, PADS)
EXPORT_UNITS(pad_input, true)
EXPORT_UNITS(unpad_input, false)

}  // namespace kernel_hub::tokens
