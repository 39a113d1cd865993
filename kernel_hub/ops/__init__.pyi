"""The ops as type checkers see them; written by tools/op_types.py."""

from collections.abc import Sequence as Sequence
from typing import Literal, overload

import torch

@overload
def append_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *,
    cache_seqlens: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None,
    q: None = None, cos: torch.Tensor | None = None, sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None, interleaved: bool = False,
    rotary_dim: int | None = None, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None, out_q: torch.Tensor | None = None,
    out_k: torch.Tensor | None = None, q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None, eps: float = 1e-06, weight_offset: float = 0.0,
) -> None: ...  # fmt: skip
@overload
def append_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *,
    cache_seqlens: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None,
    q: torch.Tensor, cos: torch.Tensor | None = None, sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None, interleaved: bool = False,
    rotary_dim: int | None = None, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None, out_q: torch.Tensor | None = None,
    out_k: torch.Tensor | None = None, q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None, eps: float = 1e-06, weight_offset: float = 0.0,
) -> torch.Tensor: ...  # fmt: skip
def batched_matmul(
    a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor: ...  # fmt: skip
def copy_blocks(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_mapping: torch.Tensor,
) -> None: ...  # fmt: skip
def cu_seqlens(
    lengths: torch.Tensor, *, cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, page_size: int = 0,
    out: torch.Tensor | None = None, out_positions: torch.Tensor | None = None,
    out_slots: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *,
    cache_seqlens: torch.Tensor, k: torch.Tensor | None = None, v: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None, interleaved: bool = False, rotary_dim: int | None = None,
    qkv_bias: torch.Tensor | None = None, softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, num_splits: int = 0,
    out: torch.Tensor | None = None, return_lse: Literal[False] = False,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *,
    cache_seqlens: torch.Tensor, k: torch.Tensor | None = None, v: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None, interleaved: bool = False, rotary_dim: int | None = None,
    qkv_bias: torch.Tensor | None = None, softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, num_splits: int = 0,
    out: torch.Tensor | None = None, return_lse: Literal[True],
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *,
    cache_seqlens: torch.Tensor, k: torch.Tensor | None = None, v: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None, interleaved: bool = False, rotary_dim: int | None = None,
    qkv_bias: torch.Tensor | None = None, softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, num_splits: int = 0,
    out: torch.Tensor | None = None, return_lse: bool, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def embedding(
    ids: torch.Tensor, weight: torch.Tensor, *, scale: float | None = None,
    position_weight: torch.Tensor | None = None, positions: torch.Tensor | None = None,
    first_id: int = 0, vocab_size: int | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False,
    softmax_scale: float | None = None, window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    block_table: torch.Tensor | None = None, cache_seqlens: torch.Tensor | None = None,
    layout: str = 'bshd', out: torch.Tensor | None = None, return_lse: Literal[False] = False,
    deterministic: bool = False, q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, sinks: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False,
    softmax_scale: float | None = None, window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    block_table: torch.Tensor | None = None, cache_seqlens: torch.Tensor | None = None,
    layout: str = 'bshd', out: torch.Tensor | None = None, return_lse: Literal[True],
    deterministic: bool = False, q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False,
    softmax_scale: float | None = None, window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    block_table: torch.Tensor | None = None, cache_seqlens: torch.Tensor | None = None,
    layout: str = 'bshd', out: torch.Tensor | None = None, return_lse: bool,
    deterministic: bool = False, q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def flash_attention_qkvpacked(
    qkv: torch.Tensor, *, num_heads: int | None = None, num_kv_heads: int | None = None,
    causal: bool = False, softmax_scale: float | None = None,
    window_size: Sequence[int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None, out: torch.Tensor | None = None,
    return_lse: Literal[False] = False, deterministic: bool = False,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def flash_attention_qkvpacked(
    qkv: torch.Tensor, *, num_heads: int | None = None, num_kv_heads: int | None = None,
    causal: bool = False, softmax_scale: float | None = None,
    window_size: Sequence[int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None, out: torch.Tensor | None = None, return_lse: Literal[True],
    deterministic: bool = False, sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def flash_attention_qkvpacked(
    qkv: torch.Tensor, *, num_heads: int | None = None, num_kv_heads: int | None = None,
    causal: bool = False, softmax_scale: float | None = None,
    window_size: Sequence[int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None, out: torch.Tensor | None = None, return_lse: bool,
    deterministic: bool = False, sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def gated_linear(
    a: torch.Tensor, weight: torch.Tensor, activation: str = 'silu', *, alpha: float = 1.702,
    limit: float = 7.0, interleaved: bool = False, out: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def gelu(
    x: torch.Tensor, *, approximate: str = 'none', out_dtype: None = None,
    out: torch.Tensor | None = None, out_scale: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def gelu(
    x: torch.Tensor, *, approximate: str = 'none', out_dtype: torch.dtype,
    out: torch.Tensor | None = None, out_scale: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def gelu_and_mul(
    x: torch.Tensor, *, approximate: str = 'none', out_dtype: None = None,
    out: torch.Tensor | None = None, out_scale: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def gelu_and_mul(
    x: torch.Tensor, *, approximate: str = 'none', out_dtype: torch.dtype,
    out: torch.Tensor | None = None, out_scale: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def grouped_linear(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, *,
    bias: torch.Tensor | None = None, activation: str | None = None,
    out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-05, *, residual: None = None, adds_after: bool = False,
    weight_offset: float = 0.0, out_dtype: None = None, out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None, residual_out: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-05, *, residual: torch.Tensor, adds_after: Literal[False] = False,
    weight_offset: float = 0.0, out_dtype: None = None, out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None, residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-05, *, residual: torch.Tensor, adds_after: Literal[True],
    weight_offset: float = 0.0, out_dtype: None = None, out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None, residual_out: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-05, *, residual: torch.Tensor | None = None, adds_after: bool = False,
    weight_offset: float = 0.0, out_dtype: torch.dtype, out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None, residual_out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]: ...  # fmt: skip
def linear(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, *,
    activation: str | None = None, residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    a_scale: torch.Tensor | None = None, b_scale: torch.Tensor | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor: ...  # fmt: skip
def log_softmax(
    x: torch.Tensor, *, mask: torch.Tensor | None = None, scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, *,
    out: torch.Tensor | None = None, out_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def mla_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, *, cache_seqlens: torch.Tensor,
    softmax_scale: float, block_table: torch.Tensor | None = None, num_splits: int = 0,
    out: torch.Tensor | None = None, return_lse: Literal[False] = False,
) -> torch.Tensor: ...  # fmt: skip
@overload
def mla_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, *, cache_seqlens: torch.Tensor,
    softmax_scale: float, block_table: torch.Tensor | None = None, num_splits: int = 0,
    out: torch.Tensor | None = None, return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def mla_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, *, cache_seqlens: torch.Tensor,
    softmax_scale: float, block_table: torch.Tensor | None = None, num_splits: int = 0,
    out: torch.Tensor | None = None, return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def moe_combine(
    rows: torch.Tensor, row_id_map: torch.Tensor, weights: torch.Tensor, *,
    residual: torch.Tensor | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
def moe_permute(
    x: torch.Tensor, experts: torch.Tensor, num_experts: int, *,
    out: torch.Tensor | None = None, offsets: torch.Tensor | None = None,
    row_id_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...  # fmt: skip
def moe_route(
    logits: torch.Tensor, k: int, *, scoring: str = 'softmax', renormalise: bool = False,
    bias: torch.Tensor | None = None, num_groups: int = 1, top_groups: int = 1,
    scale: float = 1.0, weights: torch.Tensor | None = None, experts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def pad_input(
    x: torch.Tensor, cu_seqlens: torch.Tensor, seqlen: int, *, out: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def qkv_linear(
    x: torch.Tensor, w_qkv: torch.Tensor, bias: torch.Tensor | None = None,
    cos: torch.Tensor | None = None, sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None, *, num_heads: int, num_kv_heads: int,
    interleaved: bool = False, rotary_dim: int | None = None, k_cache: None = None,
    v_cache: torch.Tensor | None = None, cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, slot_mapping: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None, out_q: torch.Tensor | None = None,
    out_k: torch.Tensor | None = None, out_v: torch.Tensor | None = None,
    q_norm_weight: torch.Tensor | None = None, k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-06, weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def qkv_linear(
    x: torch.Tensor, w_qkv: torch.Tensor, bias: torch.Tensor | None = None,
    cos: torch.Tensor | None = None, sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None, *, num_heads: int, num_kv_heads: int,
    interleaved: bool = False, rotary_dim: int | None = None, k_cache: torch.Tensor,
    v_cache: torch.Tensor | None = None, cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, slot_mapping: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None, out_q: torch.Tensor | None = None,
    out_k: torch.Tensor | None = None, out_v: torch.Tensor | None = None,
    q_norm_weight: torch.Tensor | None = None, k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-06, weight_offset: float = 0.0,
) -> tuple[torch.Tensor, None, None]: ...  # fmt: skip
@overload
def quantize_e4m3(
    x: torch.Tensor, scale: None = None, *, per: str = 'row', out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def quantize_e4m3(
    x: torch.Tensor, scale: torch.Tensor, *, per: str = 'row', out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def relu_squared(
    x: torch.Tensor, *, out_dtype: None = None, out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def relu_squared(
    x: torch.Tensor, *, out_dtype: torch.dtype, out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-06, *, residual: None = None,
    adds_after: bool = False, bias: torch.Tensor | None = None, weight_offset: float = 0.0,
    out_dtype: None = None, out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None, residual_out: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-06, *, residual: torch.Tensor,
    adds_after: Literal[False] = False, bias: torch.Tensor | None = None,
    weight_offset: float = 0.0, out_dtype: None = None, out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None, residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-06, *, residual: torch.Tensor,
    adds_after: Literal[True], bias: torch.Tensor | None = None, weight_offset: float = 0.0,
    out_dtype: None = None, out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None, residual_out: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-06, *,
    residual: torch.Tensor | None = None, adds_after: bool = False,
    bias: torch.Tensor | None = None, weight_offset: float = 0.0, out_dtype: torch.dtype,
    out: torch.Tensor | None = None, out_scale: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]: ...  # fmt: skip
def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    positions: torch.Tensor | None = None, *, interleaved: bool = False,
    rotary_dim: int | None = None, out_q: torch.Tensor | None = None,
    out_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def sample(
    logits: torch.Tensor, *, temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None, top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None, seed: torch.Tensor | None = None,
    offset: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    token_bitmask: torch.Tensor | None = None, prompt_bitmask: torch.Tensor | None = None,
    output_counts: torch.Tensor | None = None, repetition_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None, frequency_penalty: torch.Tensor | None = None,
    softcap: float = 0.0, return_logprob: Literal[False] = False,
    out: torch.Tensor | None = None, out_logprob: torch.Tensor | None = None,
    top_n: torch.Tensor | None = None, out_top_ids: torch.Tensor | None = None,
    out_top_logprobs: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def sample(
    logits: torch.Tensor, *, temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None, top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None, seed: torch.Tensor | None = None,
    offset: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    token_bitmask: torch.Tensor | None = None, prompt_bitmask: torch.Tensor | None = None,
    output_counts: torch.Tensor | None = None, repetition_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None, frequency_penalty: torch.Tensor | None = None,
    softcap: float = 0.0, return_logprob: Literal[True], out: torch.Tensor | None = None,
    out_logprob: torch.Tensor | None = None, top_n: torch.Tensor | None = None,
    out_top_ids: torch.Tensor | None = None, out_top_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def sample(
    logits: torch.Tensor, *, temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None, top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None, seed: torch.Tensor | None = None,
    offset: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    token_bitmask: torch.Tensor | None = None, prompt_bitmask: torch.Tensor | None = None,
    output_counts: torch.Tensor | None = None, repetition_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None, frequency_penalty: torch.Tensor | None = None,
    softcap: float = 0.0, return_logprob: bool, out: torch.Tensor | None = None,
    out_logprob: torch.Tensor | None = None, top_n: torch.Tensor | None = None,
    out_top_ids: torch.Tensor | None = None, out_top_logprobs: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def silu_and_mul(
    x: torch.Tensor, *, out_dtype: None = None, out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def silu_and_mul(
    x: torch.Tensor, *, out_dtype: torch.dtype, out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def softmax(
    x: torch.Tensor, *, mask: torch.Tensor | None = None, scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
def swiglu_linear(
    a: torch.Tensor, b_gate_up: torch.Tensor, *, out: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def swigluoai_and_mul(
    x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0, *, interleaved: bool = True,
    out_dtype: None = None, out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def swigluoai_and_mul(
    x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0, *, interleaved: bool = True,
    out_dtype: torch.dtype, out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def unpad_input(
    x: torch.Tensor, cu_seqlens: torch.Tensor, total: int, *, out: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
def verify_draft(
    draft_ids: torch.Tensor, target_logits: torch.Tensor,
    draft_probs: torch.Tensor | None = None, *, temperature: torch.Tensor | None = None,
    seed: torch.Tensor | None = None, offset: torch.Tensor | None = None,
    out_ids: torch.Tensor | None = None, num_accepted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def verify_tree(
    draft_ids: torch.Tensor, parents: torch.Tensor, target_logits: torch.Tensor,
    draft_probs: torch.Tensor | None = None, *, temperature: torch.Tensor | None = None,
    seed: torch.Tensor | None = None, offset: torch.Tensor | None = None,
    out_ids: torch.Tensor | None = None, num_accepted: torch.Tensor | None = None,
    path: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...  # fmt: skip

__all__ = [
    "append_kv", "batched_matmul", "copy_blocks", "cu_seqlens", "decode_attention", "embedding",
    "flash_attention", "flash_attention_qkvpacked", "gated_linear", "gelu", "gelu_and_mul",
    "grouped_linear", "layer_norm", "linear", "log_softmax", "merge_states", "mla_decode",
    "moe_combine", "moe_permute", "moe_route", "pad_input", "qkv_linear", "quantize_e4m3",
    "relu_squared", "rms_norm", "rope", "sample", "silu_and_mul", "softmax", "swiglu_linear",
    "swigluoai_and_mul", "unpad_input", "verify_draft", "verify_tree",
]  # fmt: skip
