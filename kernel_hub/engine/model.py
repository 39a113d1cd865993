"""A pass of a decoder over ragged tokens and a paged cache, every product and norm an op of ours.

One layer by data (`ModelConfig`), not a class a family; knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch

from .. import ops
from ..ops import rotary
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
    rows: torch.Tensor | None = None  # (logits,) int32: tokens whose logits are asked; None: all


class Model:
    """Weights, and how tokens go through them."""

    def __init__(
        self, c: ModelConfig, weights: Weights, group: Group, max_len: int,
        deterministic: bool | Literal["batch"] = False,
    ) -> None:  # fmt: skip
        """max_len: of a sequence, as tables of rotation have places. deterministic: of every op."""
        self._how: dict[str, Any] = {"deterministic": deterministic}
        self.config, self.weights, self.group, self.max_len = c, weights, group, max_len
        self.num_heads = c.num_heads // group.world
        self.num_kv_heads = max(1, c.num_kv_heads // group.world)
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        self._product = {**self._how, "weights_ready": True}  # nothing writes them again
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
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

    def cache_room(self, max_batch: int, max_tokens: int) -> int:
        """Tokens the cache of every rank has room for: in free memory, less what a pass takes."""
        tokens, c = CPU_CACHE_TOKENS, self.config
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            widest = 2 * c.intermediate_size + 4 * c.hidden_size + 3 * c.num_heads * c.head_dim
            if c.num_experts:
                widest += c.experts_per_token * (2 * c.hidden_size + 3 * c.moe_intermediate_size)
            own = 2 * max_tokens * widest + 8 * max_batch * c.vocab_size
            a_token = 2 * len(c.layers) * self.num_kv_heads * c.head_dim * self.dtype.itemsize
            tokens = int(_MEMORY_SHARE * (free - own)) // a_token
        return int(self.group.columns(torch.tensor([tokens])).min())

    def forward(self, b: Ragged, cache: Cache) -> torch.Tensor:
        """Logits in fp32 of this rank's share of the vocabulary, before the last softcap."""
        c, w = self.config, self.weights
        x = self.group.add(ops.embedding(
            b.ids, w.embedding, scale=self._embed_scale,
            first_id=self.group.share(c.vocab_size)[0], vocab_size=c.vocab_size,
        ))  # fmt: skip
        for layer, own, pages in zip(c.layers, w.layers, cache, strict=True):
            h = self._normed(x, own.norms.get("attn_norm"))
            out = self._attention(self._queries(h, layer, own, pages, b), layer, pages, b)
            x = self._joined(x, out, own.o, own.o_bias, own.norms.get("attn_post_norm"))
            h = self._normed(x, own.norms.get("mlp_norm"))
            x = self._experts(x, h, own) if layer.is_moe else self._mlp(x, h, own)
        if b.rows is not None:
            if not len(b.rows):  # chunks of prompts alone
                return x[:0]
            x = ops.embedding(b.rows, x)  # a gather
        return ops.linear(self._normed(x, w.norm), w.head, out_dtype=torch.float32, **self._product)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """x itself where the family has no norm there."""
        c = self.config
        if weight is None:
            return x
        return ops.rms_norm(x, weight, c.eps, weight_offset=c.norm_offset, **self._product)

    def _joined(
        self, x: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        post_norm: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """x + a @ weight.T, the product normed where the family does; summed over the ranks."""
        is_first, c = self.group.rank == 0, self.config
        residual = x if is_first and post_norm is None else None
        y = self.group.add(
            ops.linear(a, weight, bias if is_first else None, residual=residual, **self._product)
        )
        if post_norm is None:
            return y
        return ops.rms_norm(
            y, post_norm, c.eps, residual=x, adds_after=True, weight_offset=c.norm_offset,
            **self._how,
        )  # fmt: skip

    def _queries(
        self, h: torch.Tensor, layer: LayerKind, own: LayerWeights,
        pages: tuple[torch.Tensor, torch.Tensor], b: Ragged,
    ) -> torch.Tensor:  # fmt: skip
        """(tokens, heads, head_dim), normed and rotated; keys and values go to the cache."""
        c, (cos, sin) = self.config, self._tables[layer.rope]
        more: dict[str, Any] = {
            "cos": cos, "sin": sin, "cache_seqlens": b.before, "block_table": b.block_table,
        }  # fmt: skip
        if b.num_decodes < len(b.before):
            more["cu_seqlens"] = b.cu_seqlens
        else:  # nobody looks where a sequence begins
            h = h.unflatten(0, (-1, b.width))
        if c.qk_norm == "head":
            more |= {
                "q_norm_weight": own.q_norm, "k_norm_weight": own.k_norm, "eps": c.eps,
                "weight_offset": c.norm_offset,
            }  # fmt: skip
        if c.qk_norm == "whole" or c.head_dim % 32:
            q, k, v = self._projected(h, own)
            q = ops.append_kv(k, v, *pages, q=q, **more)
        else:
            q, _, _ = ops.qkv_linear(
                h, own.qkv, own.qkv_bias, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
                k_cache=pages[0], v_cache=pages[1], cache_ready=True, **more, **self._product,
            )  # fmt: skip
        return q.flatten(0, -3)

    def _projected(self, h: torch.Tensor, own: LayerWeights) -> Iterator[torch.Tensor]:
        """Queries, keys and values by heads; where a norm is of all heads at once, normed."""
        c, group = self.config, self.group
        sizes = [n * c.head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        q, k, v = ops.linear(h, own.qkv, own.qkv_bias, **self._product).split(sizes, -1)
        if c.qk_norm == "whole":
            q, k = (
                self._normed(group.columns(y), norm).chunk(group.world, -1)[group.rank]
                for y, norm in ((q, own.q_norm), (k, own.k_norm))
            )
        return (y.unflatten(-1, (-1, c.head_dim)) for y in (q, k, v))

    def _attention(
        self, q: torch.Tensor, layer: LayerKind, pages: tuple[torch.Tensor, torch.Tensor], b: Ragged
    ) -> torch.Tensor:
        """Of the sequences that decode, then of the chunks of prompts, each over its pages."""
        c, n, out = self.config, b.num_decodes, torch.empty_like(q)
        how: dict[str, Any] = {
            "softmax_scale": c.softmax_scale, "softcap": c.attn_softcap,
            "window_size": (layer.window, 0 if layer.window >= 0 else -1), **self._how,
        }  # fmt: skip
        if n:
            decode_q, decode_out = (x[: n * b.width].unflatten(0, (n, b.width)) for x in (q, out))
            ops.decode_attention(
                decode_q, *pages, cache_seqlens=b.after[:n], block_table=b.block_table[:n],
                out=decode_out, cache_ready=True, **how,
            )  # fmt: skip
        if n < len(b.before):
            ops.flash_attention(
                q[n:], *pages, causal=True, cu_seqlens_q=b.cu_chunks, max_seqlen_q=b.max_chunk,
                cache_seqlens=b.after[n:], block_table=b.block_table[n:], out=out[n:], **how,
            )  # fmt: skip
        return out.flatten(1)

    def _activated(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self.config.activation == "silu":
            return ops.silu_and_mul(gate_up)
        return ops.gelu_and_mul(gate_up, approximate="tanh")

    def _mlp(self, x: torch.Tensor, h: torch.Tensor, own: LayerWeights) -> torch.Tensor:
        if own.gate_up_bias is None:
            inner = ops.gated_linear(h, own.gate_up, self.config.activation, **self._product)
        else:
            inner = self._activated(ops.linear(h, own.gate_up, own.gate_up_bias, **self._product))
        return self._joined(x, inner, own.down, own.down_bias, own.norms.get("mlp_post_norm"))

    def _experts(self, x: torch.Tensor, h: torch.Tensor, own: LayerWeights) -> torch.Tensor:
        c = self.config
        scores = ops.linear(h, own.router, out_dtype=torch.float32, **self._product)
        shares, experts = ops.moe_route(
            scores, c.experts_per_token, renormalise=c.renormalises, **self._how
        )
        rows, offsets, places = ops.moe_permute(h, experts, c.num_experts)
        rows = self._activated(ops.grouped_linear(rows, own.gate_up, offsets, **self._how))
        rows = ops.grouped_linear(rows, own.down, offsets, **self._how)
        residual = x if self.group.rank == 0 else None
        return self.group.add(ops.moe_combine(rows, places, shares, residual=residual))
