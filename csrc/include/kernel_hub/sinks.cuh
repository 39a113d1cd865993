// Attention's sinks: a logit a head beside a row's scores, unscaled, that weighs no value.
#pragma once

#include "kernel_hub/element_type.cuh"
#include "kernel_hub/math.cuh"
#include "kernel_hub/optional_reads.cuh"

namespace kernel_hub {

// The sink of a head, for parameters P that name sinks and sink_type; -inf: there are none.
template <class P>
__device__ __forceinline__ float load_sink(const P& p, int head_idx) {
    const bool is_fp32 = p.sink_type == kFp32;
    const uint32_t word =
        ld_global_if(p.sinks && is_fp32, static_cast<const uint32_t*>(p.sinks) + head_idx);
    const uint16_t half =
        ld_global_if(p.sinks && !is_fp32, static_cast<const uint16_t*>(p.sinks) + head_idx);
    const float sink = is_fp32                ? __uint_as_float(word)
                       : p.sink_type == kBf16 ? __uint_as_float(half << 16)
                                              : __half2float(__ushort_as_half(half));
    return p.sinks ? sink : -INFINITY;
}

// The same of a row that may see no keys, P naming cache_seqlens too: a finished row, whose length
// is below 0, has none.
template <class P>
__device__ __forceinline__ float find_sink(const P& p, int batch_idx, int head_idx) {
    const bool is_finished = p.sinks && p.cache_seqlens && p.cache_seqlens[batch_idx] < 0;
    return is_finished ? -INFINITY : load_sink(p, head_idx);
}

// Adds a sink to the complete sum of a row's 2^(score - shift); the shift moves to the larger of
// the two. Returns what the row's sum of values must be multiplied by: 1 / sum, and what the
// shift's move takes. A sink of +inf takes everything, one of -inf nothing; beside -inf the sum of
// a row without keys (0, its shift -inf) becomes 1.
// NOTE: without branches, which cost registers where products are under way.
__device__ __forceinline__ float add_sink(float sink, float& shift, float& sum) {
    sink *= kLog2e;
    const float scale = exp2_approx(fminf(shift - sink, 0.0f));
    const float weight = exp2_approx(fminf(sink - shift, 0.0f));
    sum = fmaf(sum, scale, sink != sink ? sink : weight);
    shift = fmaxf(sink, shift);
    return __fdividef(scale, sum);
}

}  // namespace kernel_hub
