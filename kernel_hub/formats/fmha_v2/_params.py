"""The by-value parameter of an fmha_v2 kernel: 704 bytes, aligned to 64."""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_float, c_int32, c_int64, c_uint8, c_uint32, c_uint64

Address = c_uint64
TmaDescriptor = c_uint8 * 64


class PagedCache(ctypes.Structure):
    """Where the blocks of a paged K and V are."""

    _fields_ = (
        ("max_seqs", c_int32),
        ("max_blocks_per_seq", c_int32),
        ("tokens_per_block", c_int32),
        ("tokens_per_block_log2", c_int32),
        ("bytes_per_block", c_int32),
        ("pool", Address),
        ("block_offsets", Address),
    )


class Alibi(ctypes.Structure):
    """What the heads' slopes are computed from."""

    _fields_ = (
        ("num_heads_pow2", c_int32),
        ("neg4_div_num_heads", c_float),
        ("scale_after_alibi", c_float),
        ("head_idx_offset", c_int32),
        ("sequence_pos_offset", c_int32),
    )


class SageScales(ctypes.Structure):
    """The scales of quantised blocks."""

    _fields_ = (("max_num_blocks", c_int32), ("scales", Address))


class Params(ctypes.Structure):
    """What the kernel reads; addresses are of the device, strides in bytes."""

    _fields_ = (
        ("qkv", Address),
        ("q", Address),
        ("k", Address),
        ("v", Address),
        ("kv", Address),
        ("paged", PagedCache),
        ("packed_mask", Address),
        ("attention_sinks", Address),
        ("out", Address),
        ("softmax_stats", Address),
        ("q_stride", c_int64),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("packed_mask_stride", c_int64),
        ("out_stride", c_int64),
        ("softmax_stats_stride", c_int64),
        ("_to_192", c_uint8 * 32),
        ("tma_q", TmaDescriptor),
        ("tma_k", TmaDescriptor),
        ("tma_v", TmaDescriptor),
        ("tma_out", TmaDescriptor),
        ("blocks_per_tma_load", c_int32),
        ("blocks_per_tma_load_log2", c_int32),
        ("batch_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("num_heads_per_kv", c_int32),
        ("max_seqlen_q", c_int32),
        ("head_dim", c_int32),
        ("head_dim_v", c_int32),
        ("num_grouped_heads", c_int32),
        ("sliding_window_size", c_int32),
        ("log2_chunk_size", c_int32),
        ("scale_bmm1", c_uint32),
        ("softcap", c_uint32),
        ("scale_softmax", c_uint32),
        ("scale_bmm2", c_uint32),
        ("scale_bmm1_on_device", Address),
        ("scale_bmm2_on_device", Address),
        ("cu_seqlens_q", Address),
        ("cu_seqlens_k", Address),
        ("cu_mask_rows", Address),
        ("has_alibi", c_bool),
        ("alibi", Alibi),
        ("tile_counter", Address),
        ("num_tiles", c_uint32),
        ("num_tiles_per_head", c_uint32),
        ("balanced", c_bool),
        ("is_padded", c_bool),
        ("sage_q", SageScales),
        ("sage_k", SageScales),
        ("sage_v", SageScales),
        ("_to_704", c_uint8 * 56),
    )
