// decode_attention.cu over caches of e4m3, with a scale a head of the cache: a file of their own,
// as a process that has no such cache loads none of it. Parts are merged by the kernel there.
//
// Variants: dtype of the queries x head_dim 64, 128, 256 (smaller ones padded with zeros) x (16
// rows a block | rows32: 32 rows, without window, softcap and alibi).
// kernel_hub: not-for: sm89: memory bounds these, and 8.9 runs sm80's, which converts by integers

#include "kv_cache/decode/attend.cuh"

namespace kernel_hub::kv_cache::decode {

// TILE, SLOTS, ROW_TILES, MIN_BLOCKS: see DecodeConfig.
#define EXPORT_DTYPE(DTYPE, T)                                                       \
    EXPORT_DECODE_ATTENTION(DTYPE, T, __nv_fp8_e4m3, 64, _e4m3, 32, 9, 1, 2)         \
    EXPORT_DECODE_ATTENTION(DTYPE, T, __nv_fp8_e4m3, 64, _e4m3_rows32, 32, 9, 2, 2)  \
    EXPORT_DECODE_ATTENTION(DTYPE, T, __nv_fp8_e4m3, 128, _e4m3, 16, 9, 1, 2)        \
    EXPORT_DECODE_ATTENTION(DTYPE, T, __nv_fp8_e4m3, 128, _e4m3_rows32, 16, 9, 2, 2) \
    EXPORT_DECODE_ATTENTION(DTYPE, T, __nv_fp8_e4m3, 256, _e4m3, 16, 5, 1, 2)

// {op}_{dtype}_hdim{head_dim}_e4m3[_rows32]
EXPORT_DTYPE(fp16, __half)
EXPORT_DTYPE(bf16, __nv_bfloat16)

}  // namespace kernel_hub::kv_cache::decode
