"""A pass of a decoder over ragged tokens and a paged cache, every product and norm an op of ours.

One layer by data (`ModelConfig`), not a class a family; knows nothing of requests.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..ops import (
    append_kv,
    decode_attention,
    embedding,
    flash_attention,
    gated_linear,
    gelu_and_mul,
    grouped_linear,
    linear,
    moe_combine,
    moe_permute,
    moe_route,
    qkv_linear,
    rms_norm,
    rotary,
    silu_and_mul,
    swiglu_linear,
)
from .config import LayerKind, ModelConfig
from .parallel import Group
from .weights import LayerWeights, Weights

CPU_CACHE_TOKENS = 8192
_MEMORY_SHARE = 0.9  # of a GPU's memory that is free with the weights in it, less a pass's own
MOST_WIDE = 16  # tokens a sequence that `decode_attention` takes
Cache = list[tuple[torch.Tensor, torch.Tensor]]


class Ragged(NamedTuple):
    """A pass: the tokens of sequences one after the other, first those that decode."""

    ids: torch.Tensor  # (tokens,) int32 or int64
    cu_seqlens: torch.Tensor  # (sequences + 1,) int32
    before: torch.Tensor  # (sequences,) int32: tokens in the cache already; -1: a padding row
    after: torch.Tensor  # (sequences,) int32: with those of this pass; -1: a padding row
    block_table: torch.Tensor  # (sequences, pages) int32
    cu_chunks: torch.Tensor  # cu_seqlens of the sequences with several tokens, from 0
    num_decodes: int  # sequences with `width` tokens
    max_chunk: int  # the longest of the others
    width: int = 1  # more than 1: of all sequences
    rows: torch.Tensor | None = (
        None  # (logits,) int32: the tokens whose logits are asked; None: all
    )


class Model:
    """Weights, and how tokens go through them."""

    def __init__(self, c: ModelConfig, weights: Weights, group: Group, max_len: int) -> None:
        """max_len: of a sequence, as tables of rotation have places."""
        self.config, self.weights, self.group, self.max_len = c, weights, group, max_len
        self.num_heads = c.num_heads // group.world
        self.num_kv_heads = max(1, c.num_kv_heads // group.world)
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        # As models' own code rounds it.
        scale = torch.tensor(c.embed_scale, dtype=self.dtype).item()
        self._embed_scale = None if scale == 1.0 else scale
        self._tables = {
            kind: rotary.tables(
                rotary.frequencies_of(c.raw, layer_type=kind, seqlen=max_len, device=self.device),
                max_len + MOST_WIDE,  # what stands behind drafts may be over it
            )
            for kind in {layer.rope for layer in c.layers}
        }

    def new_cache(self, num_pages: int, page_size: int) -> Cache:
        """Keys and values of each layer, (num_pages, page_size, num_kv_heads, head_dim)."""
        shape = (num_pages, page_size, self.num_kv_heads, self.config.head_dim)
        new = {"device": self.device, "dtype": self.dtype}
        return [(torch.zeros(shape, **new), torch.zeros(shape, **new)) for _ in self.config.layers]

    def cache_bytes(self) -> int:
        """Of a token, in all layers."""
        item = torch.finfo(self.dtype).bits // 8
        return 2 * len(self.config.layers) * self.num_kv_heads * self.config.head_dim * item

    def cache_room(self, max_batch: int, max_tokens: int) -> int:
        """Tokens the cache of every rank has room for: in free memory, less what a pass takes."""
        tokens, c = CPU_CACHE_TOKENS, self.config
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            widest = 2 * c.intermediate_size + 4 * c.hidden_size + 3 * c.num_heads * c.head_dim
            if c.num_experts:
                widest += c.experts_per_token * (2 * c.hidden_size + 3 * c.moe_intermediate_size)
            own = 2 * max_tokens * widest + 8 * max_batch * c.vocab_size
            tokens = int(_MEMORY_SHARE * (free - own)) // self.cache_bytes()
        return self.group.least(tokens)

    def forward(self, b: Ragged, cache: Cache) -> torch.Tensor:
        """Logits in fp32 of this rank's share of the vocabulary, before the last softcap."""
        w, first = self.weights, self.group.share(self.config.vocab_size)[0]
        x = embedding(
            b.ids, w.embedding, scale=self._embed_scale, first_id=first,
            vocab_size=self.config.vocab_size,
        )  # fmt: skip
        x = self.group.add(x)
        for layer, own, pages in zip(self.config.layers, w.layers, cache, strict=True):
            h = self._norm(x, own, "attn_norm")
            out = self._attention(h, layer, own, pages, b)
            x = self._joined(x, out, own.o, own.o_bias, own.norms.get("attn_post_norm"))
            h = self._norm(x, own, "mlp_norm")
            x = self._experts(x, h, own) if layer.is_moe else self._mlp(x, h, own)
        if b.rows is not None:
            if not len(b.rows):  # chunks of prompts alone
                return x[:0]
            x = embedding(b.rows, x)  # a gather
        return linear(self._rms(x, w.norm), w.head, out_dtype=torch.float32)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        c = self.config
        found: torch.Tensor = rms_norm(x, weight, c.eps, weight_offset=c.norm_offset)
        return found

    def _norm(self, x: torch.Tensor, own: LayerWeights, role: str) -> torch.Tensor:
        weight = own.norms.get(role)
        return x if weight is None else self._rms(x, weight)

    def _joined(
        self, x: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        post_norm: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """x + a @ weight.T, the product normed where the family does; summed over the ranks."""
        is_first, c = self.group.rank == 0, self.config
        bias = bias if is_first else None
        if post_norm is None:
            return self.group.add(linear(a, weight, bias, residual=x if is_first else None))
        found: torch.Tensor = rms_norm(
            self.group.add(linear(a, weight, bias)), post_norm, c.eps,
            residual=x, adds_after=True, weight_offset=c.norm_offset,
        )  # fmt: skip
        return found

    def _attention(
        self, h: torch.Tensor, layer: LayerKind, own: LayerWeights,
        pages: tuple[torch.Tensor, torch.Tensor], b: Ragged,
    ) -> torch.Tensor:  # fmt: skip
        c, n = self.config, b.num_decodes
        cos, sin = self._tables[layer.rope]
        has_chunks = n < b.before.shape[0]
        places = {
            "cos": cos, "sin": sin, "cache_seqlens": b.before, "block_table": b.block_table,
            # Where a sequence begins is not looked for where each has one token.
            "cu_seqlens": b.cu_seqlens if has_chunks else None,
        }  # fmt: skip
        if c.qk_norm == "whole" or c.head_dim % 32:
            q = self._projected_apart(h, own, pages, places, b.width)
        else:
            norms = {}
            if own.q_norm is not None:
                norms = {"q_norm_weight": own.q_norm, "k_norm_weight": own.k_norm, "eps": c.eps}
            q = qkv_linear(
                h if has_chunks else h.unflatten(0, (-1, b.width)), own.qkv, own.qkv_bias,
                num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, k_cache=pages[0],
                v_cache=pages[1], weight_offset=c.norm_offset if norms else 0.0, **places, **norms,
            )[0]  # fmt: skip
        q = q.flatten(0, -3)
        out = torch.empty_like(q)
        how: dict[str, Any] = {
            "softmax_scale": c.softmax_scale, "softcap": c.attn_softcap,
            "window_size": (layer.window, 0 if layer.window >= 0 else -1),
        }  # fmt: skip
        if n:
            decode_attention(
                q[: n * b.width].unflatten(0, (n, b.width)), *pages, cache_seqlens=b.after[:n],
                block_table=b.block_table[:n], out=out[: n * b.width].unflatten(0, (n, b.width)),
                **how,
            )  # fmt: skip
        if has_chunks:
            flash_attention(
                q[n:], *pages, causal=True, cu_seqlens_q=b.cu_chunks, max_seqlen_q=b.max_chunk,
                cache_seqlens=b.after[n:], block_table=b.block_table[n:], out=out[n:], **how,
            )  # fmt: skip
        return out.flatten(1)

    def _projected_apart(
        self, h: torch.Tensor, own: LayerWeights, pages: tuple[torch.Tensor, torch.Tensor],
        places: dict[str, Any], width: int,
    ) -> torch.Tensor:  # fmt: skip
        """Queries, by a product, a norm of all heads at once and an append."""
        c, d = self.config, self.config.head_dim
        sizes = [self.num_heads * d, self.num_kv_heads * d, self.num_kv_heads * d]
        q, k, v = linear(h, own.qkv, own.qkv_bias).split(sizes, -1)
        norms: dict[str, Any] = {}
        if c.qk_norm == "whole" and own.q_norm is not None and own.k_norm is not None:
            q, k = (
                self._rms(self.group.columns(q), own.q_norm),
                self._rms(self.group.columns(k), own.k_norm),
            )
            q, k = (y.chunk(self.group.world, -1)[self.group.rank] for y in (q, k))
        elif own.q_norm is not None:
            norms = {
                "q_norm_weight": own.q_norm, "k_norm_weight": own.k_norm, "eps": c.eps,
                "weight_offset": c.norm_offset,
            }  # fmt: skip
        q, k, v = (y.unflatten(-1, (-1, d)) for y in (q, k, v))
        if places["cu_seqlens"] is None:
            q, k, v = (y.unflatten(0, (-1, width)) for y in (q, k, v))
        append: Any = append_kv  # whose overloads know no keywords of a dictionary
        found: torch.Tensor = append(k, v, *pages, q=q, **places, **norms)
        return found

    def _activated(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self.config.activation == "gelu":
            return gelu_and_mul(gate_up, approximate="tanh")
        return silu_and_mul(gate_up)

    def _mlp(self, x: torch.Tensor, h: torch.Tensor, own: LayerWeights) -> torch.Tensor:
        if own.gate_up_bias is not None:
            inner = self._activated(linear(h, own.gate_up, own.gate_up_bias))
        elif self.config.activation == "gelu":
            inner = gated_linear(h, own.gate_up, "gelu_tanh")
        else:
            inner = swiglu_linear(h, own.gate_up)
        return self._joined(x, inner, own.down, own.down_bias, own.norms.get("mlp_post_norm"))

    def _experts(self, x: torch.Tensor, h: torch.Tensor, own: LayerWeights) -> torch.Tensor:
        c = self.config
        assert own.router is not None
        scores = linear(h, own.router, out_dtype=torch.float32)
        shares, experts = moe_route(scores, c.experts_per_token, renormalise=c.renormalises)
        rows, offsets, places = moe_permute(h, experts, c.num_experts)
        rows = self._activated(grouped_linear(rows, own.gate_up, offsets))
        rows = grouped_linear(rows, own.down, offsets)
        residual = x if self.group.rank == 0 else None
        return self.group.add(moe_combine(rows, places, shares, residual=residual))
