// decode_attention.cu over caches of int8, with a scale a head of the cache, or a scale a token and
// a head: scores are multiplied by those of keys, probabilities by those of values. Parts are
// merged by the kernel there.
//
// Variants: dtype of the queries x head_dim 64, 128, 256 (smaller ones padded with zeros), 16 rows
// a block.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs the code of sm80

#include "kv_cache/decode/attend.cuh"

namespace kernel_hub::kv_cache::decode {

// TILE, SLOTS: see DecodeConfig.
#define EXPORT_DTYPE(DTYPE, T)                                \
    EXPORT_SCALED_DECODE(DTYPE, T, int8_t, 64, _int8, 32, 9)  \
    EXPORT_SCALED_DECODE(DTYPE, T, int8_t, 128, _int8, 16, 9) \
    EXPORT_SCALED_DECODE(DTYPE, T, int8_t, 256, _int8, 16, 5)

// {op}_{dtype}_hdim{head_dim}_int8
EXPORT_DTYPE(fp16, __half)
EXPORT_DTYPE(bf16, __nv_bfloat16)

}  // namespace kernel_hub::kv_cache::decode
