"""qkv_linear as two launches: linear, then append_kv, which norms heads and writes bytes too."""

from __future__ import annotations

from typing import Literal

from ..kv_cache.append_checks import AppendGiven
from ..kv_cache.append_kv import append_for
from ..matmul.linear import linear
from .qkv_checks import OP, QkvGiven


def may_part(given: QkvGiven) -> bool:
    """Whether both together do what is asked.

    Without a cache, keys and values go to out_k and out_v as if these were one: row i of sequence
    b.
    """
    return given.k_cache is not None or given.cu_seqlens is given.cache_seqlens is None


def into(given: QkvGiven) -> None:
    """Project, then norm, rotate and write; the projections are rounded in between."""
    x, k_cache, v_cache = given.x, given.k_cache, given.v_cache
    deterministic: Literal["batch", False] = "batch" if given.batch_invariant else False
    joint = linear(
        x, given.w_qkv, given.bias, deterministic=deterministic, weights_ready=given.weights_ready
    )
    heads = joint.view(*x.shape[:-1], given.total_heads, given.head_dim)
    out_q, positions = given.out_q, given.positions
    if k_cache is None:
        k_cache, v_cache = given.out_k, given.out_v
        if x.dim() == 2:  # all tokens as one sequence
            heads, out_q = heads[None], out_q[None]
            k_cache, v_cache = k_cache[None], v_cache[None]
            positions = None if positions is None else positions[None]
    q, k, v = heads.split([given.num_heads, given.num_kv_heads, given.num_kv_heads], dim=-2)
    appended = AppendGiven(
        k, v, k_cache, v_cache, given.cache_seqlens, given.block_table, given.slot_mapping,
        given.cu_seqlens, q, given.cos, given.sin, positions, given.interleaved, given.rotary_dim,
        given.k_scale, given.v_scale, out_q, out_k=None, q_norm_weight=given.q_norm_weight,
        k_norm_weight=given.k_norm_weight, eps=given.eps, weight_offset=given.weight_offset,
        k_scale_cache=given.k_scale_cache, v_scale_cache=given.v_scale_cache,
    )  # fmt: skip
    append_for(OP, appended)
