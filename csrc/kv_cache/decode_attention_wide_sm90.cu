// Decode steps of many rows or wide heads on Hopper: the kernels of decode_attention_sm90.cu, a
// cluster an item, for blocks of 32 rows and for head_dim 256; and those of decode_attention.cu for
// head_dim 192, which as 256 has fewer bytes under way, and for 256, which has a slot more than
// other GPUs have room for. A file of their own: who decodes with none does not load them.
//
// Variants: dtype x (head_dim 64, 128 in blocks of 32 rows | head_dim 256 in blocks of 16 |
// head_dim 192, 256 in parts, whose merge is decode_attention.cu's). Parameters, shared memory and
// sources: there.

#include "kv_cache/decode/attend.cuh"
#include "kv_cache/decode/sm90/short.cuh"

namespace kernel_hub::kv_cache::decode::sm90 {

#define EXPORT_DTYPE(DTYPE, T)                                                          \
    EXPORT_SHORT(decode_attention_wide_sm90_##DTYPE##_hdim64_rows32, T, 64, 2, false)   \
    EXPORT_SHORT(decode_attention_wide_sm90_##DTYPE##_hdim128_rows32, T, 128, 2, false) \
    EXPORT_SHORT(decode_attention_wide_sm90_##DTYPE##_hdim256, T, 256, 1, false)        \
    EXPORT_DECODE_ATTENTION(DTYPE, T, T, 192, , 16, 3, 1, 2)                            \
    EXPORT_DECODE_ATTENTION(DTYPE, T, T, 256, _slots3, 16, 3, 1, 2)

// {op}_wide_sm90_{dtype}_hdim{head_dim}[_rows32], {op}_{dtype}_hdim{head_dim}[_slots3]
EXPORT_DTYPE(fp16, __half)
EXPORT_DTYPE(bf16, __nv_bfloat16)

}  // namespace kernel_hub::kv_cache::decode::sm90
