"""The by-value parameters of fmha_v2 kernels: one struct a generation of TensorRT-LLM."""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_float, c_int32, c_int64, c_uint8, c_uint32, c_uint64
from typing import Any

Address = c_uint64
TmaDescriptor = c_uint8 * 64
_ALIGNMENT = 64


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


# Addresses are of the device, strides in bytes; what is not named here is an int32.
_NAMES: dict[Any, str] = {
    Address: """qkv q k v kv packed_mask attention_sinks out softmax_stats scale_bmm1_on_device
        scale_bmm2_on_device cu_seqlens_q cu_seqlens_k cu_mask_rows tile_counter""",
    c_int64: """qkv_stride q_stride k_stride kv_stride v_stride packed_mask_stride out_stride
        softmax_stats_stride""",
    TmaDescriptor: "tma_q tma_k tma_v tma_kv tma_out",
    # softcap is an integer, which the kernels convert; the scales hold the bits of floats.
    c_uint32: "scale_bmm1 softcap scale_softmax scale_bmm2 num_tiles num_tiles_per_head",
    c_bool: "has_alibi balanced is_padded",
    SageScales: "sage_q sage_k sage_v",
    PagedCache: "paged",
    Alibi: "alibi",
}
_TYPES = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_SIZES = """blocks_per_tma_load blocks_per_tma_load_log2 batch_size num_heads num_kv_heads
    num_heads_per_kv max_seqlen_q"""
_HEADS = "head_dim head_dim_v num_grouped_heads sliding_window_size log2_chunk_size"
_SCALES = """scale_bmm1 softcap scale_softmax scale_bmm2 scale_bmm1_on_device scale_bmm2_on_device
    cu_seqlens_q cu_seqlens_k cu_mask_rows has_alibi alibi tile_counter num_tiles num_tiles_per_head
    balanced is_padded"""
_SAGE = "sage_q sage_k sage_v"
_SEPARATE = "q_stride k_stride v_stride packed_mask_stride out_stride softmax_stats_stride"
_FOUR_MAPS = "tma_q tma_k tma_v tma_out"
_TOGETHER = "qkv q kv paged packed_mask out"


def _laid_out(*names: str) -> list[tuple[str, Any]]:
    """These fields, where the compiler of TensorRT-LLM puts them.

    Tensor maps begin at multiples of 64 bytes, and the whole is a multiple of them.
    """
    fields: list[tuple[str, Any]] = []
    at = 0

    def pad(alignment: int) -> None:
        nonlocal at
        if count := -at % alignment:
            at += count
            fields.append((f"_to_{at}", c_uint8 * count))

    for name in " ".join(names).split():
        kind = _TYPES.get(name, c_int32)
        pad(_ALIGNMENT if kind is TmaDescriptor else ctypes.alignment(kind))
        fields.append((name, kind))
        at += ctypes.sizeof(kind)
    pad(_ALIGNMENT)
    return fields


class Params(ctypes.Structure):
    """TensorRT-LLM from August 2025 on: 704 bytes."""

    _fields_ = _laid_out(
        "qkv q k v kv paged packed_mask attention_sinks out softmax_stats",
        *(_SEPARATE, _FOUR_MAPS, _SIZES, _HEADS, _SCALES, _SAGE),
    )


class ParamsWithoutSinks(ctypes.Structure):
    """The same before attention sinks: 704 bytes."""

    _fields_ = _laid_out(
        "qkv q k v kv paged packed_mask out softmax_stats",
        *(_SEPARATE, _FOUR_MAPS, _SIZES, _HEADS, _SCALES, _SAGE),
    )


class EdgeParams(ctypes.Structure):
    """TensorRT-Edge-LLM, with a longest K: 704 bytes."""

    _fields_ = _laid_out(
        "qkv q k v kv paged packed_mask attention_sinks out softmax_stats",
        *(_SEPARATE, _FOUR_MAPS, _SIZES, "max_seqlen_k", _HEADS, _SCALES, _SAGE),
    )


class Params640(ctypes.Structure):
    """Before K and V were apart: one stride for packed QKV, one tensor map for K and V."""

    _fields_ = _laid_out(
        *(_TOGETHER, "softmax_stats qkv_stride q_stride kv_stride v_stride"),
        "packed_mask_stride out_stride softmax_stats_stride tma_q tma_kv tma_out",
        *(_SIZES, _HEADS, _SCALES, _SAGE),
    )


class Params576(ctypes.Structure):
    """Before chunks and grouped heads."""

    _fields_ = _laid_out(
        *(_TOGETHER, "softmax_stats qkv_stride q_stride kv_stride v_stride"),
        "packed_mask_stride out_stride softmax_stats_stride tma_q tma_kv tma_out",
        *(_SIZES, "head_dim head_dim_v sliding_window_size", _SCALES, _SAGE),
    )


class Params512(ctypes.Structure):
    """TensorRT-LLM 0.12 to 0.16."""

    _fields_ = _laid_out(
        *(_TOGETHER, "qkv_stride q_stride kv_stride packed_mask_stride out_stride"),
        *("tma_q tma_kv tma_out", _SIZES, "head_dim sliding_window_size", _SCALES),
        "head_dim_v v_stride",
    )


class LongParams512(ctypes.Structure):
    """The kernels with head sizes of 192 and 128 in TensorRT-LLM 0.16: 640 bytes."""

    # What the 128 bytes at the end hold is not known; no such kernel reads them.
    _fields_ = (("short", Params512), ("_to_640", c_uint8 * 128))
    _anonymous_ = ("short",)
