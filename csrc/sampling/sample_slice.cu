// What one slice of the vocabulary says of rows of logits, for a draw from all slices together.
//
//   z = penalised(masked(softcap * tanh(x / softcap) + bias)),  as sample.cu has them
//   listed: what is above the 257th largest z, all where there are not so many
//   the rest: its mass, in 2^-40 of the slice's largest at the row's temperature, and one of it,
//   drawn
//
// A block of 512 threads a row of the slice.
//   1. The largest, of the row and of each thread; as many threads' largest bound what is listed
//      from below. Where nothing is allowed: the largest as if all were.
//   2. What is above the bound is compared with each other. Where that is too much, the 257th
//      largest is found bit by bit, by a pass each.
//   3. The rest is weighed, and drawn from.
// The same bits in any run: what is listed is written in the order of its tokens.
// One kernel for every dtype and alignment, as sample.cu.
// Shared memory: 11 KB, candidates.
// Source: as sample.cu.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs the code of sm80

#include "kernel_hub/follow_launch.cuh"
#include "kernel_hub/launch_facts.cuh"
#include "sampling/search.cuh"

namespace kernel_hub::sampling {

constexpr int kMostListed = 256;
constexpr uint32_t kSliceUse = 0x80000000u;  // of random bits: sample uses 0

// Of a row.
struct Summary {
    int num;                    // that are listed
    float bound;                // the largest of the rest; -inf: there is none
    float largest;              // -inf: nothing is allowed
    int first;                  // the first token of it, or -1
    float most;                 // the largest as if all were allowed
    int first_of_all;           // likewise
    int drawn, unused;          // one of the rest, or -1
    uint32_t rest[2];           // what it weighs, the low word first
    float values[kMostListed];  // in the order of tokens; then -inf
    int tokens[kMostListed];    // then -1
};

// The 257th largest of a row that has as many.
__device__ __forceinline__ float largest_of_rest(const Row& row, Shared& s) {
    uint32_t key = 0;
#pragma unroll 1
    for (int bit = 31; bit >= 0; --bit) {
        const uint32_t higher = key | 1u << bit;
        uint32_t count = 0;
        row.walk(0, row.p.size, threadIdx.x, kNumThreads, false, [&](int, const auto& z) {
            for (const float value : z) {
                count += value > -kInfinity && key_of(value) >= higher;
            }
        });
        count = block_reduce(count, s.count_slots, [](uint32_t a, uint32_t b) { return a + b; });
        key = count > kMostListed ? higher : key;
    }
    return from_key(key);
}

// Lists what of the candidates is among the 256 largest with all that equals it, in the order of
// tokens; the largest that is not.
__device__ __forceinline__ float list_candidates(Summary& summary, int first_token, Shared& s) {
    const int num = s.num_candidates, thread_idx = threadIdx.x;
    const bool is_any = thread_idx < num;
    const float value = is_any ? s.values[thread_idx] : -kInfinity;
    const int index = is_any ? s.indices[thread_idx] : 0;
    int as_large = 0, place = 0;
#pragma unroll 4
    for (int i = 0; i < num; ++i) {
        as_large += s.values[i] >= value;
    }
    const bool is_listed = is_any && as_large <= kMostListed;
    __syncthreads();
    if (is_any && !is_listed) {
        s.indices[thread_idx] = INT32_MAX;
    }
    const int num_listed = __syncthreads_count(is_listed);
#pragma unroll 4
    for (int i = 0; i < num; ++i) {
        place += s.indices[i] < index;
    }
    if (is_listed) {
        summary.values[place] = value;
        summary.tokens[place] = first_token + index;
    }
    for (int i = num_listed + thread_idx; i < kMostListed; i += kNumThreads) {
        summary.values[i] = -kInfinity;
        summary.tokens[i] = -1;
    }
    if (thread_idx == 0) {
        summary.num = num_listed;
    }
    return block_reduce(is_any && !is_listed ? value : -kInfinity, s.float_slots,
                        [](float a, float b) { return fmaxf(a, b); });
}

// The mass of all that is at most `bound`, a warp's in s.warp_masses.
__device__ __forceinline__ uint64_t weigh_rest(const Row& row, const Weigher& weigher, float bound,
                                               Shared& s) {
    const int a_warp = elements_a_warp(row);
    const int begin = min(row.p.size, static_cast<int>(threadIdx.x / 32) * a_warp);
    uint64_t mass = 0;
    row.walk(begin, min(row.p.size, begin + a_warp), threadIdx.x % 32, 32, false,
             [&](int, const auto& z) {
                 for (const float value : z) {
                     mass += value <= bound ? weigher.mass(value) : 0;
                 }
             });
    return block_sum(mass, s.warp_masses);
}

__device__ __forceinline__ void sum_up(Summary& summary, const SampleParams& p, int first_token) {
    follow_launch_before();
    __shared__ Shared s;
    Row row(p);
    const int size = p.size, row_idx = p.row_idx;
    Largest top, of_all;
    float bound = 0.0f;
#pragma unroll 1
    for (bool is_first = true;; is_first = false) {
        of_all = find_largest(row, 0, size, s);
        if (is_first) {
            top = of_all;
            bound = bound_of<0>(top.of_thread, kMostListed + 1);
        }
        if (of_all.of_row > -kInfinity || !row.has_mask) {
            break;
        }
        row.has_mask = false;
    }
    row.has_mask = p.allowed != nullptr;
    const float largest = top.of_row;
    float most_of_rest = -kInfinity;
#pragma unroll 1
    while (true) {
        __syncthreads();
        if (threadIdx.x == 0) {
            s.num_candidates = 0;
            s.question = {-kInfinity, bound, kInfinity, false, true};
        }
        __syncthreads();
        // What is above the bound, up to all that there is room for, becomes the candidates.
        scan<false>(row, Weigher{}, 0, size, nullptr, s);
        if (s.num_candidates <= kNumCandidates) {
            break;
        }
        bound = most_of_rest = largest_of_rest(row, s);
    }
    most_of_rest = fmaxf(most_of_rest, list_candidates(summary, first_token, s));

    const float temperature = p.temperature ? p.temperature[row_idx] : 1.0f;
    uint64_t rest = 0;
    if (threadIdx.x == 0) {
        summary.drawn = -1;
    }
    if (most_of_rest > -kInfinity && temperature > 0.0f) {
        const Weigher weigher = weigher_of(largest, temperature);
        rest = weigh_rest(row, weigher, most_of_rest, s);
        if (rest > 0) {
            const uint64_t bits =
                random_bits(p.seed ? p.seed[row_idx] : 0, p.offset ? p.offset[row_idx] : 0,
                            kSliceUse | static_cast<uint32_t>(first_token));
            const auto weigh = [&](int i) {
                const float z = row.value(i);
                return z <= most_of_rest ? weigher.mass(z) : 0;
            };
            find_drawn(row, rest, bits, s, weigh, [&](int i) { summary.drawn = first_token + i; });
        }
    }
    if (threadIdx.x == 0) {
        summary.bound = __fadd_rn(most_of_rest, 0.0f);  // of -0 there is none
        summary.largest = __fadd_rn(largest, 0.0f);
        summary.first = largest > -kInfinity ? first_token + top.index : -1;
        summary.most = __fadd_rn(of_all.of_row, 0.0f);
        summary.first_of_all = of_all.of_row > -kInfinity ? first_token + of_all.index : -1;
        summary.unused = 0;
        summary.rest[0] = static_cast<uint32_t>(rest);
        summary.rest[1] = static_cast<uint32_t>(rest >> 32);
    }
}

// NOTE: rows are never plain: walks by elements alone are a third of the code.
#define EXPORT_SAMPLE_SLICE(NAME)                                                                  \
    DESCRIBED(                                                                                     \
        NAME, "x: rows", (.threads = kNumThreads, .shared_bytes = 0),                              \
        extern "C" __global__ void __launch_bounds__(kNumThreads, 1) NAME(                         \
            int* summary, const void* logits, const float* temperature, const int64_t* seed,       \
            const int64_t* offset, const float* bias, const int* allowed, const float* repetition, \
            const float* presence, const float* frequency, const int* in_prompt,                   \
            const int* counts, int64_t summary_stride, int64_t logits_stride, int64_t bias_stride, \
            int64_t allowed_stride, int64_t in_prompt_stride, int64_t counts_stride,               \
            int first_token, int size, int dtype, float softcap) {                                 \
            SampleParams p = {};                                                                   \
            p.logits = logits;                                                                     \
            p.temperature = temperature;                                                           \
            p.seed = seed;                                                                         \
            p.offset = offset;                                                                     \
            p.bias = bias;                                                                         \
            p.allowed = allowed;                                                                   \
            p.repetition = repetition;                                                             \
            p.presence = presence;                                                                 \
            p.frequency = frequency;                                                               \
            p.in_prompt = in_prompt;                                                               \
            p.counts = counts;                                                                     \
            p.logits_stride = logits_stride;                                                       \
            p.bias_stride = bias_stride;                                                           \
            p.allowed_stride = allowed_stride;                                                     \
            p.in_prompt_stride = in_prompt_stride;                                                 \
            p.counts_stride = counts_stride;                                                       \
            p.size = size;                                                                         \
            p.dtype = dtype;                                                                       \
            p.softcap = softcap;                                                                   \
            p.row_idx = blockIdx.x;                                                                \
            sum_up(*reinterpret_cast<Summary*>(summary + p.row_idx * summary_stride), p,           \
                   first_token);                                                                   \
        })

EXPORT_SAMPLE_SLICE(sample_slice)

}  // namespace kernel_hub::sampling
