// decode_attention.cu over caches of e4m3 with a scale a token and a head, as
// decode_attention_int8.cu has them. Parts are merged by the kernel of decode_attention.cu.
//
// Variants: dtype of the queries x head_dim 64, 128, 256 (smaller ones padded with zeros), 16 rows
// a block.
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs the code of sm80

#include "kv_cache/decode/attend.cuh"

namespace kernel_hub::kv_cache::decode {

// TILE, SLOTS: see DecodeConfig.
#define EXPORT_DTYPE(DTYPE, T)                                              \
    EXPORT_SCALED_DECODE(DTYPE, T, __nv_fp8_e4m3, 64, _e4m3_tokens, 32, 9)  \
    EXPORT_SCALED_DECODE(DTYPE, T, __nv_fp8_e4m3, 128, _e4m3_tokens, 16, 9) \
    EXPORT_SCALED_DECODE(DTYPE, T, __nv_fp8_e4m3, 256, _e4m3_tokens, 16, 5)

// {op}_{dtype}_hdim{head_dim}_e4m3_tokens
EXPORT_DTYPE(fp16, __half)
EXPORT_DTYPE(bf16, __nv_bfloat16)

}  // namespace kernel_hub::kv_cache::decode
