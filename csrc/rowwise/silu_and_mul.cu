// The gated activation of SwiGLU feed-forward layers.
//
//   out[i, j] = silu(x[i, j]) * x[i, size + j],  silu(g) = g / (1 + exp(-g)),
//   in fp32, rounded once
//   e4m3: out = round(that / out_scale), out_scale = max |that| of the row / 448
//
// Parallelisation: one access of `out` a thread; blocks of columns along gridDim.x, rows along
// gridDim.y (in steps of gridDim.y when there are more), along gridDim.z an outer dimension whose
// stride does not collapse with the rows'.
//   vec      16 bytes a thread: size a multiple of the vector, everything 16-byte aligned
//   flat     the same of contiguous rows, as many as gridDim.y: few parameters, no strides, no loop
//   scalar   any size, any alignment, an element an access: of few one a thread, else as many as a
//            vector has
// Into e4m3 blockDim.x threads a row, blockDim.y rows a block along gridDim.x, the outer dimension
// along gridDim.y; shared memory for one float a warp.
//   vec1 vec2 vec4   a row in registers, that many 16-byte vectors a thread; vec8 of 16 bits
//   loop, scalar     rows of any length, read twice, in vectors or by the element
// NOTE: two or four vectors a thread, and a grid as large as the card, were slower at every size
// (docs/notes/silu_and_mul.md).
// Source: Shazeer, "GLU Variants Improve Transformer", 2020.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs the code of sm80

#include "rowwise/activations.cuh"
#include "rowwise/gated.cuh"

#define GATE_NUMBERS
#define GATE_OF(GATE) \
    GATE {}

namespace kernel_hub::rowwise {

template <typename T>
struct SiluGate {
    static constexpr int kParts = 2;
    static constexpr bool kHasPairs = false;
    __device__ __forceinline__ float of(float gate, float up) const {
        return times_logistic<T>(gate, gate) * up;
    }
};

template <typename T>
using Gate = EachGate<SiluGate<T>>;

EXPORT_GATED_OP(silu_and_mul, Gate)
EXPORT_GATED_WIDE(512, silu_and_mul, Gate)

}  // namespace kernel_hub::rowwise
