"""The ops as type checkers see them; written by tools/op_types.py."""

from collections.abc import Sequence as Sequence
from typing import Literal, overload

import torch
from torch import Tensor

@overload
def append_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *,
    cache_seqlens: Tensor | None = None, block_table: Tensor | None = None,
    slot_mapping: Tensor | None = None, cu_seqlens: Tensor | None = None, q: None = None,
    cos: Tensor | None = None, sin: Tensor | None = None, positions: Tensor | None = None,
    interleaved: bool = False, rotary_dim: int | None = None, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, out_q: Tensor | None = None, out_k: Tensor | None = None,
    q_norm_weight: Tensor | None = None, k_norm_weight: Tensor | None = None,
    eps: float = 1e-06, weight_offset: float = 0.0, k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
) -> None: ...  # fmt: skip
@overload
def append_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *,
    cache_seqlens: Tensor | None = None, block_table: Tensor | None = None,
    slot_mapping: Tensor | None = None, cu_seqlens: Tensor | None = None, q: Tensor,
    cos: Tensor | None = None, sin: Tensor | None = None, positions: Tensor | None = None,
    interleaved: bool = False, rotary_dim: int | None = None, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, out_q: Tensor | None = None, out_k: Tensor | None = None,
    q_norm_weight: Tensor | None = None, k_norm_weight: Tensor | None = None,
    eps: float = 1e-06, weight_offset: float = 0.0, k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
def batched_matmul(
    a: Tensor, b: Tensor, *, out: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor: ...  # fmt: skip
def copy_blocks(
    k_cache: Tensor, v_cache: Tensor, block_mapping: Tensor,
) -> None: ...  # fmt: skip
def cu_seqlens(
    lengths: Tensor, *, cache_seqlens: Tensor | None = None, block_table: Tensor | None = None,
    page_size: int = 0, out: Tensor | None = None, out_positions: Tensor | None = None,
    out_slots: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor,
    k: Tensor | None = None, v: Tensor | None = None, block_table: Tensor | None = None,
    cos: Tensor | None = None, sin: Tensor | None = None, interleaved: bool = False,
    rotary_dim: int | None = None, qkv_bias: Tensor | None = None,
    softmax_scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    out: Tensor | None = None, return_lse: Literal[False] = False,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, sinks: Tensor | None = None,
    deterministic: bool | Literal['batch'] = False, k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None, tree_mask: Tensor | None = None,
    cache_ready: bool = False,
) -> Tensor: ...  # fmt: skip
@overload
def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor,
    k: Tensor | None = None, v: Tensor | None = None, block_table: Tensor | None = None,
    cos: Tensor | None = None, sin: Tensor | None = None, interleaved: bool = False,
    rotary_dim: int | None = None, qkv_bias: Tensor | None = None,
    softmax_scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    out: Tensor | None = None, return_lse: Literal[True], k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, sinks: Tensor | None = None,
    deterministic: bool | Literal['batch'] = False, k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None, tree_mask: Tensor | None = None,
    cache_ready: bool = False,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor,
    k: Tensor | None = None, v: Tensor | None = None, block_table: Tensor | None = None,
    cos: Tensor | None = None, sin: Tensor | None = None, interleaved: bool = False,
    rotary_dim: int | None = None, qkv_bias: Tensor | None = None,
    softmax_scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    out: Tensor | None = None, return_lse: bool, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, sinks: Tensor | None = None,
    deterministic: bool | Literal['batch'] = False, k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None, tree_mask: Tensor | None = None,
    cache_ready: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def embedding(
    ids: Tensor, weight: Tensor, *, scale: float | None = None,
    position_weight: Tensor | None = None, positions: Tensor | None = None, first_id: int = 0,
    vocab_size: int | None = None, out: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False,
    softmax_scale: float | None = None, window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    block_table: Tensor | None = None, cache_seqlens: Tensor | None = None,
    layout: str = 'bshd', out: Tensor | None = None, return_lse: Literal[False] = False,
    deterministic: bool | Literal['batch'] = False, q_scale: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None, sinks: Tensor | None = None,
    k_scale_cache: Tensor | None = None, v_scale_cache: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False,
    softmax_scale: float | None = None, window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    block_table: Tensor | None = None, cache_seqlens: Tensor | None = None,
    layout: str = 'bshd', out: Tensor | None = None, return_lse: Literal[True],
    deterministic: bool | Literal['batch'] = False, q_scale: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None, sinks: Tensor | None = None,
    k_scale_cache: Tensor | None = None, v_scale_cache: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False,
    softmax_scale: float | None = None, window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    block_table: Tensor | None = None, cache_seqlens: Tensor | None = None,
    layout: str = 'bshd', out: Tensor | None = None, return_lse: bool,
    deterministic: bool | Literal['batch'] = False, q_scale: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None, sinks: Tensor | None = None,
    k_scale_cache: Tensor | None = None, v_scale_cache: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attention_qkvpacked(
    qkv: Tensor, *, num_heads: int | None = None, num_kv_heads: int | None = None,
    causal: bool = False, softmax_scale: float | None = None,
    window_size: Sequence[int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, out: Tensor | None = None,
    return_lse: Literal[False] = False, deterministic: bool | Literal['batch'] = False,
    sinks: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attention_qkvpacked(
    qkv: Tensor, *, num_heads: int | None = None, num_kv_heads: int | None = None,
    causal: bool = False, softmax_scale: float | None = None,
    window_size: Sequence[int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, out: Tensor | None = None, return_lse: Literal[True],
    deterministic: bool | Literal['batch'] = False, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attention_qkvpacked(
    qkv: Tensor, *, num_heads: int | None = None, num_kv_heads: int | None = None,
    causal: bool = False, softmax_scale: float | None = None,
    window_size: Sequence[int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, out: Tensor | None = None, return_lse: bool,
    deterministic: bool | Literal['batch'] = False, sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def gated_linear(
    a: Tensor, weight: Tensor, activation: str = 'silu', *, alpha: float = 1.702,
    limit: float = 7.0, interleaved: bool = False, out: Tensor | None = None,
    deterministic: bool | Literal['batch'] = False, weights_ready: bool = False,
) -> Tensor: ...  # fmt: skip
@overload
def gelu(
    x: Tensor, *, approximate: str = 'none', out_dtype: None = None, out: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def gelu(
    x: Tensor, *, approximate: str = 'none', out_dtype: torch.dtype, out: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def gelu_and_mul(
    x: Tensor, *, approximate: str = 'none', out_dtype: None = None, out: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def gelu_and_mul(
    x: Tensor, *, approximate: str = 'none', out_dtype: torch.dtype, out: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def grouped_linear(
    a: Tensor, b: Tensor, offsets: Tensor, *, bias: Tensor | None = None,
    activation: str | None = None, out: Tensor | None = None,
    out_dtype: torch.dtype | None = None, deterministic: bool | Literal['batch'] = False,
) -> Tensor: ...  # fmt: skip
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-05, *,
    residual: None = None, adds_after: bool = False, weight_offset: float = 0.0,
    out_dtype: None = None, out: Tensor | None = None, out_scale: Tensor | None = None,
    residual_out: Tensor | None = None, deterministic: bool | Literal['batch'] = False,
) -> Tensor: ...  # fmt: skip
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-05, *,
    residual: Tensor, adds_after: Literal[False] = False, weight_offset: float = 0.0,
    out_dtype: None = None, out: Tensor | None = None, out_scale: Tensor | None = None,
    residual_out: Tensor | None = None, deterministic: bool | Literal['batch'] = False,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-05, *,
    residual: Tensor, adds_after: Literal[True], weight_offset: float = 0.0,
    out_dtype: None = None, out: Tensor | None = None, out_scale: Tensor | None = None,
    residual_out: Tensor | None = None, deterministic: bool | Literal['batch'] = False,
) -> Tensor: ...  # fmt: skip
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-05, *,
    residual: Tensor | None = None, adds_after: bool = False, weight_offset: float = 0.0,
    out_dtype: torch.dtype, out: Tensor | None = None, out_scale: Tensor | None = None,
    residual_out: Tensor | None = None, deterministic: bool | Literal['batch'] = False,
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
def linear(
    a: Tensor, b: Tensor, bias: Tensor | None = None, *, activation: str | None = None,
    residual: Tensor | None = None, out: Tensor | None = None,
    out_dtype: torch.dtype | None = None, a_scale: Tensor | None = None,
    b_scale: Tensor | None = None, use_fast_accum: bool = False,
    deterministic: bool | Literal['batch'] = False, weights_ready: bool = False,
) -> Tensor: ...  # fmt: skip
def log_softmax(
    x: Tensor, *, mask: Tensor | None = None, scale: float = 1.0, out: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, out: Tensor | None = None,
    out_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def mla_decode(
    q: Tensor, kv_cache: Tensor, *, cache_seqlens: Tensor, softmax_scale: float,
    block_table: Tensor | None = None, num_splits: int = 0, out: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def mla_decode(
    q: Tensor, kv_cache: Tensor, *, cache_seqlens: Tensor, softmax_scale: float,
    block_table: Tensor | None = None, num_splits: int = 0, out: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def mla_decode(
    q: Tensor, kv_cache: Tensor, *, cache_seqlens: Tensor, softmax_scale: float,
    block_table: Tensor | None = None, num_splits: int = 0, out: Tensor | None = None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def moe_combine(
    rows: Tensor, row_id_map: Tensor, weights: Tensor, *, residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
def moe_permute(
    x: Tensor, experts: Tensor, num_experts: int, *, out: Tensor | None = None,
    offsets: Tensor | None = None, row_id_map: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
def moe_route(
    logits: Tensor, k: int, *, scoring: str = 'softmax', renormalise: bool = False,
    bias: Tensor | None = None, num_groups: int = 1, top_groups: int = 1, scale: float = 1.0,
    weights: Tensor | None = None, experts: Tensor | None = None,
    deterministic: bool | Literal['batch'] = False,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def pad_input(
    x: Tensor, cu_seqlens: Tensor, seqlen: int, *, out: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def qkv_linear(
    x: Tensor, w_qkv: Tensor, bias: Tensor | None = None, cos: Tensor | None = None,
    sin: Tensor | None = None, positions: Tensor | None = None, *, num_heads: int,
    num_kv_heads: int, interleaved: bool = False, rotary_dim: int | None = None,
    k_cache: None = None, v_cache: Tensor | None = None, cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None, slot_mapping: Tensor | None = None,
    cu_seqlens: Tensor | None = None, out_q: Tensor | None = None, out_k: Tensor | None = None,
    out_v: Tensor | None = None, q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None, eps: float = 1e-06, weight_offset: float = 0.0,
    deterministic: bool | Literal['batch'] = False, weights_ready: bool = False,
    cache_ready: bool = False, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    k_scale_cache: Tensor | None = None, v_scale_cache: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def qkv_linear(
    x: Tensor, w_qkv: Tensor, bias: Tensor | None = None, cos: Tensor | None = None,
    sin: Tensor | None = None, positions: Tensor | None = None, *, num_heads: int,
    num_kv_heads: int, interleaved: bool = False, rotary_dim: int | None = None,
    k_cache: Tensor, v_cache: Tensor | None = None, cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None, slot_mapping: Tensor | None = None,
    cu_seqlens: Tensor | None = None, out_q: Tensor | None = None, out_k: Tensor | None = None,
    out_v: Tensor | None = None, q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None, eps: float = 1e-06, weight_offset: float = 0.0,
    deterministic: bool | Literal['batch'] = False, weights_ready: bool = False,
    cache_ready: bool = False, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    k_scale_cache: Tensor | None = None, v_scale_cache: Tensor | None = None,
) -> tuple[Tensor, None, None]: ...  # fmt: skip
@overload
def quantize_e4m3(
    x: Tensor, scale: None = None, *, per: str = 'row', out: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def quantize_e4m3(
    x: Tensor, scale: Tensor, *, per: str = 'row', out: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def relu_squared(
    x: Tensor, *, out_dtype: None = None, out: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def relu_squared(
    x: Tensor, *, out_dtype: torch.dtype, out: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-06, *, residual: None = None,
    adds_after: bool = False, bias: Tensor | None = None, weight_offset: float = 0.0,
    out_dtype: None = None, out: Tensor | None = None, out_scale: Tensor | None = None,
    residual_out: Tensor | None = None, deterministic: bool | Literal['batch'] = False,
    weights_ready: bool = False,
) -> Tensor: ...  # fmt: skip
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-06, *, residual: Tensor,
    adds_after: Literal[False] = False, bias: Tensor | None = None, weight_offset: float = 0.0,
    out_dtype: None = None, out: Tensor | None = None, out_scale: Tensor | None = None,
    residual_out: Tensor | None = None, deterministic: bool | Literal['batch'] = False,
    weights_ready: bool = False,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-06, *, residual: Tensor,
    adds_after: Literal[True], bias: Tensor | None = None, weight_offset: float = 0.0,
    out_dtype: None = None, out: Tensor | None = None, out_scale: Tensor | None = None,
    residual_out: Tensor | None = None, deterministic: bool | Literal['batch'] = False,
    weights_ready: bool = False,
) -> Tensor: ...  # fmt: skip
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-06, *,
    residual: Tensor | None = None, adds_after: bool = False, bias: Tensor | None = None,
    weight_offset: float = 0.0, out_dtype: torch.dtype, out: Tensor | None = None,
    out_scale: Tensor | None = None, residual_out: Tensor | None = None,
    deterministic: bool | Literal['batch'] = False, weights_ready: bool = False,
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, *,
    interleaved: bool = False, rotary_dim: int | None = None, out_q: Tensor | None = None,
    out_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def sample(
    logits: Tensor, *, temperature: Tensor | None = None, top_k: Tensor | None = None,
    top_p: Tensor | None = None, min_p: Tensor | None = None, seed: Tensor | None = None,
    offset: Tensor | None = None, bias: Tensor | None = None,
    token_bitmask: Tensor | None = None, prompt_bitmask: Tensor | None = None,
    output_counts: Tensor | None = None, repetition_penalty: Tensor | None = None,
    presence_penalty: Tensor | None = None, frequency_penalty: Tensor | None = None,
    softcap: float = 0.0, return_logprob: Literal[False] = False, out: Tensor | None = None,
    out_logprob: Tensor | None = None, top_n: Tensor | None = None,
    out_top_ids: Tensor | None = None, out_top_logprobs: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def sample(
    logits: Tensor, *, temperature: Tensor | None = None, top_k: Tensor | None = None,
    top_p: Tensor | None = None, min_p: Tensor | None = None, seed: Tensor | None = None,
    offset: Tensor | None = None, bias: Tensor | None = None,
    token_bitmask: Tensor | None = None, prompt_bitmask: Tensor | None = None,
    output_counts: Tensor | None = None, repetition_penalty: Tensor | None = None,
    presence_penalty: Tensor | None = None, frequency_penalty: Tensor | None = None,
    softcap: float = 0.0, return_logprob: Literal[True], out: Tensor | None = None,
    out_logprob: Tensor | None = None, top_n: Tensor | None = None,
    out_top_ids: Tensor | None = None, out_top_logprobs: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def sample(
    logits: Tensor, *, temperature: Tensor | None = None, top_k: Tensor | None = None,
    top_p: Tensor | None = None, min_p: Tensor | None = None, seed: Tensor | None = None,
    offset: Tensor | None = None, bias: Tensor | None = None,
    token_bitmask: Tensor | None = None, prompt_bitmask: Tensor | None = None,
    output_counts: Tensor | None = None, repetition_penalty: Tensor | None = None,
    presence_penalty: Tensor | None = None, frequency_penalty: Tensor | None = None,
    softcap: float = 0.0, return_logprob: bool, out: Tensor | None = None,
    out_logprob: Tensor | None = None, top_n: Tensor | None = None,
    out_top_ids: Tensor | None = None, out_top_logprobs: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def sample_slice(
    logits: Tensor, first_token: int, *, temperature: Tensor | None = None,
    seed: Tensor | None = None, offset: Tensor | None = None, bias: Tensor | None = None,
    token_bitmask: Tensor | None = None, prompt_bitmask: Tensor | None = None,
    output_counts: Tensor | None = None, repetition_penalty: Tensor | None = None,
    presence_penalty: Tensor | None = None, frequency_penalty: Tensor | None = None,
    softcap: float = 0.0, out: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def silu_and_mul(
    x: Tensor, *, out_dtype: None = None, out: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def silu_and_mul(
    x: Tensor, *, out_dtype: torch.dtype, out: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def softmax(
    x: Tensor, *, mask: Tensor | None = None, scale: float = 1.0, out: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
def swiglu_linear(
    a: Tensor, b_gate_up: Tensor, *, out: Tensor | None = None,
    deterministic: bool | Literal['batch'] = False, weights_ready: bool = False,
) -> Tensor: ...  # fmt: skip
@overload
def swigluoai_and_mul(
    x: Tensor, alpha: float = 1.702, limit: float = 7.0, *, interleaved: bool = True,
    out_dtype: None = None, out: Tensor | None = None, out_scale: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def swigluoai_and_mul(
    x: Tensor, alpha: float = 1.702, limit: float = 7.0, *, interleaved: bool = True,
    out_dtype: torch.dtype, out: Tensor | None = None, out_scale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def unpad_input(
    x: Tensor, cu_seqlens: Tensor, total: int, *, out: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
def verify_draft(
    draft_ids: Tensor, target_logits: Tensor, draft_probs: Tensor | None = None, *,
    temperature: Tensor | None = None, seed: Tensor | None = None, offset: Tensor | None = None,
    out_ids: Tensor | None = None, num_accepted: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def verify_tree(
    draft_ids: Tensor, parents: Tensor, target_logits: Tensor,
    draft_probs: Tensor | None = None, *, temperature: Tensor | None = None,
    seed: Tensor | None = None, offset: Tensor | None = None, out_ids: Tensor | None = None,
    num_accepted: Tensor | None = None, path: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip

__all__ = [
    "append_kv", "batched_matmul", "copy_blocks", "cu_seqlens", "decode_attention", "embedding",
    "flash_attention", "flash_attention_qkvpacked", "gated_linear", "gelu", "gelu_and_mul",
    "grouped_linear", "layer_norm", "linear", "log_softmax", "merge_states", "mla_decode",
    "moe_combine", "moe_permute", "moe_route", "pad_input", "qkv_linear", "quantize_e4m3",
    "relu_squared", "rms_norm", "rope", "sample", "sample_slice", "silu_and_mul", "softmax",
    "swiglu_linear", "swigluoai_and_mul", "unpad_input", "verify_draft", "verify_tree",
]  # fmt: skip
