// Weights of 4 and 8 bits, as ChatGLM and its kin keep them: packing, and back to floats.
//
//   int4WeightCompression      out[i, j] = weight[i, 2j] << 4 | (weight[i, 2j + 1] & 15)
//   int4WeightExtraction<T>    out[i, 2j] = high(weight[i, j]) * scale[i],
//                              out[i, 2j + 1] = low(weight[i, j]) * scale[i], both halves signed
//   int8WeightExtraction<T>    out[i, j] = weight[i, j] * scale[i]
//   in fp32, rounded once
//
// Names, parameters and their order are what the clients of cpm_kernels use, who launch n blocks of
// min(round_up(m, 32), 1024) threads; any other grid and block gives the same result.
// Parallelisation: four neighbouring blocks are a team and take four rows together. Of narrow rows
// one block takes all, and the others leave at once; of wide ones each takes every fourth stretch
// of columns. A thread has one vector of each of the four rows and loads them all before it stores
// the first: 16 bytes of `out` for the extraction, 8 bytes of `weight` for the compression; where
// row length or addresses do not allow it, one byte of either. No shared memory.
//
// NOTE: a row a block has too few bytes in flight, as two blocks of 1024 threads fill an SM. What a
// block does before it leaves counts, as most blocks do only that: divisions there doubled the time
// (docs/notes/weight_extraction.md).

#include "kernel_hub/launch_facts.cuh"
#include "kernel_hub/ptx.cuh"
#include "kernel_hub/vec.cuh"

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900)
#define LAUNCH_BOUNDS __launch_bounds__(1024, 2)
#else
#define LAUNCH_BOUNDS __launch_bounds__(1024)
#endif

namespace kernel_hub::quantised {

constexpr unsigned kTeam = 4;  // rows, and neighbouring blocks
constexpr int kNarrow = 1024;  // vectors of a row that one block takes at once

// Whether this block has nothing to do, as one of its team is enough. NOTE: three quarters of the
// blocks of most launches run this alone: two reads, no division. Which one of a team stays turns
// from team to team, as neighbouring blocks start on neighbouring SMs.
__device__ __forceinline__ bool is_spare(bool is_narrow) {
    return is_narrow && (blockIdx.x + blockIdx.x / kTeam) % kTeam != 0;
}

// What a block that is not spare takes: of the rows `first_row`, `first_row` + `row_step`, …, kTeam
// each time, the vectors `first`, `first` + `step`, … that its threads have.
struct Share {
    unsigned first_row, row_step;
    int first, step;

    __device__ __forceinline__ Share(bool is_narrow, unsigned num_rows) {
        const unsigned num_teams = max(1u, gridDim.x / kTeam);
        const unsigned team = blockIdx.x / kTeam;
        const unsigned part = is_narrow ? 0 : blockIdx.x % kTeam;
        // Blocks of a last team that is not whole take nothing, unless there is no other.
        first_row = team < num_teams ? team * kTeam : num_rows;
        row_step = num_teams * kTeam;
        first = part * blockDim.x + threadIdx.x;
        step = (is_narrow ? 1 : min(kTeam, gridDim.x)) * blockDim.x;
    }
};

constexpr int kLongest = 1 << 28;  // a team's vectors are counted in 32 bits

template <int kBytes>
struct Packed;
template <>
struct Packed<2> {
    using Word = uint16_t;
};
template <>
struct Packed<4> {
    using Word = uint32_t;
};
template <>
struct Packed<8> {
    using Word = uint2;
};

template <typename Word>
__device__ __forceinline__ bool is_aligned(const void* address) {
    return reinterpret_cast<uintptr_t>(address) % sizeof(Word) == 0;
}

// Element `i` of packed bytes.
template <int kElemsPerByte>
__device__ __forceinline__ float element(const int8_t* bytes, int i) {
    if constexpr (kElemsPerByte == 1) {
        return static_cast<float>(bytes[i]);
    }
    const int byte = bytes[i / 2];
    return static_cast<float>(i % 2 == 0 ? byte >> 4 : static_cast<int8_t>(byte << 4) >> 4);
}

template <typename T, int kElemsPerByte>
__device__ __forceinline__ void extract(const int8_t* weight,  // (n, m)
                                        const T* scale,        // (n)
                                        T* out,                // (n, kElemsPerByte * m)
                                        int n, int m) {
    constexpr int kElems = kVecElems<T>;
    constexpr int kBytes = kElems / kElemsPerByte;  // of weight, for 16 bytes of out
    using Word = typename Packed<kBytes>::Word;
    const bool is_narrow = m <= kNarrow * kBytes;
    if (is_spare(is_narrow)) {
        return;
    }
    const int row_vecs = m / kBytes;
    const bool is_vector =
        m % kBytes == 0 && m < kLongest && is_aligned<Word>(weight) && is_aligned<uint4>(out);
    const unsigned num_rows = n > 0 && m > 0 ? n : 0;
    const Share share(is_narrow, num_rows);
    for (unsigned row = share.first_row; row < num_rows; row += share.row_step) {
        const unsigned rows = num_rows - row;
        const int8_t* bytes = weight + static_cast<int64_t>(row) * m;
        T* row_out = out + static_cast<int64_t>(row) * m * kElemsPerByte;
        if (!is_vector) {
            for (unsigned k = 0; k < kTeam && k < rows; ++k) {
                const float factor = to_float(scale[row + k]);
                for (int j = share.first; j < m; j += share.step) {
                    const int64_t at = static_cast<int64_t>(k) * m + j;
#pragma unroll
                    for (int i = 0; i < kElemsPerByte; ++i) {
                        row_out[at * kElemsPerByte + i] =
                            from_float<T>(element<kElemsPerByte>(bytes + at, i) * factor);
                    }
                }
            }
            continue;
        }
        for (int vec = share.first; vec < row_vecs; vec += share.step) {
            // NOTE: converted below: a use of the scale here would hold up the loads behind it.
            Word word[kTeam];
            T factor[kTeam];
#pragma unroll
            for (unsigned k = 0; k < kTeam; ++k) {
                if (k < rows) {
                    word[k] = reinterpret_cast<const Word*>(bytes)[k * row_vecs + vec];
                    factor[k] = scale[row + k];
                }
            }
#pragma unroll
            for (unsigned k = 0; k < kTeam; ++k) {
                float values[kElems];
#pragma unroll
                for (int i = 0; i < kElems; ++i) {
                    values[i] = element<kElemsPerByte>(reinterpret_cast<int8_t*>(&word[k]), i) *
                                to_float(factor[k]);
                }
                if (k < rows) {
                    st_global(row_out + static_cast<int64_t>(k * row_vecs + vec) * kElems,
                              pack<T>(values));
                }
            }
        }
    }
}

// The low halves of neighbouring bytes, four pairs, the first of each on top.
__device__ __forceinline__ uint32_t pack_nibbles(uint2 pairs) {
    uint32_t packed = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t halves = (i == 0 ? pairs.x : pairs.y) & 0x0f0f0f0f;
        const uint32_t both = halves << 4 | halves >> 8;  // in bytes 0 and 2
        packed |= (both & 0xff | both >> 8 & 0xff00) << (16 * i);
    }
    return packed;
}

__device__ __forceinline__ void compress(const int8_t* weight,  // (n, 2 m)
                                         int8_t* out,           // (n, m)
                                         int n, int m) {
    const bool is_narrow = m <= kNarrow * 4;
    if (is_spare(is_narrow)) {
        return;
    }
    const int row_vecs = m / 4;
    const bool is_vector =
        m % 4 == 0 && m < kLongest && is_aligned<uint2>(weight) && is_aligned<uint32_t>(out);
    const unsigned num_rows = n > 0 && m > 0 ? n : 0;
    const Share share(is_narrow, num_rows);
    for (unsigned row = share.first_row; row < num_rows; row += share.row_step) {
        const unsigned rows = num_rows - row;
        const int8_t* bytes = weight + static_cast<int64_t>(row) * m * 2;
        int8_t* row_out = out + static_cast<int64_t>(row) * m;
        if (!is_vector) {
            for (unsigned k = 0; k < kTeam && k < rows; ++k) {
                for (int j = share.first; j < m; j += share.step) {
                    const int64_t at = static_cast<int64_t>(k) * m + j;
                    row_out[at] = static_cast<int8_t>(bytes[2 * at] << 4 | bytes[2 * at + 1] & 15);
                }
            }
            continue;
        }
        for (int vec = share.first; vec < row_vecs; vec += share.step) {
            uint2 pairs[kTeam];
#pragma unroll
            for (unsigned k = 0; k < kTeam; ++k) {
                if (k < rows) {
                    pairs[k] = reinterpret_cast<const uint2*>(bytes)[k * row_vecs + vec];
                }
            }
#pragma unroll
            for (unsigned k = 0; k < kTeam; ++k) {
                if (k < rows) {
                    reinterpret_cast<uint32_t*>(row_out)[k * row_vecs + vec] =
                        pack_nibbles(pairs[k]);
                }
            }
        }
    }
}

DESCRIBED(
    int4WeightCompression, "x: any; four neighbouring blocks take four rows together",
    (.shared_bytes = 0),
    extern "C" __global__ void LAUNCH_BOUNDS int4WeightCompression(const int8_t* weight,
                                                                   int8_t* out, int n, int m) {
        compress(weight, out, n, m);
    })

#define EXPORT_EXTRACTION(NAME, T, ELEMS_PER_BYTE)                                             \
    DESCRIBED(                                                                                 \
        NAME, "x: any; four neighbouring blocks take four rows together", (.shared_bytes = 0), \
        extern "C" __global__ void LAUNCH_BOUNDS NAME(const int8_t* weight, const T* scale,    \
                                                      T* out, int n, int m) {                  \
            extract<T, ELEMS_PER_BYTE>(weight, scale, out, n, m);                              \
        })

#define EXPORT_EXTRACTIONS(BITS, ELEMS_PER_BYTE)                                          \
    EXPORT_EXTRACTION(int##BITS##WeightExtractionFloat, float, ELEMS_PER_BYTE)            \
    EXPORT_EXTRACTION(int##BITS##WeightExtractionHalf, __half, ELEMS_PER_BYTE)            \
    EXPORT_EXTRACTION(int##BITS##WeightExtractionBFloat16, __nv_bfloat16, ELEMS_PER_BYTE) \
    /* NOTE: the other spelling that clients use. */                                      \
    EXPORT_EXTRACTION(int##BITS##WeightExtractionBfloat16, __nv_bfloat16, ELEMS_PER_BYTE)

EXPORT_EXTRACTIONS(4, 2)
EXPORT_EXTRACTIONS(8, 1)

}  // namespace kernel_hub::quantised
