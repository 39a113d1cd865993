"""Loops that generate as others write them, on the weights of an engine of ours (Llama's layers).

In the manner of gpt-fast: a static cache, flex_attention, the whole step under
torch.compile(mode="reduce-overhead"). In that of nano-vllm: pages of 256 tokens, FlashAttention-3,
products by torch, small pieces compiled, layers in a CUDA graph, the host looks at each token.
transformers' own `generate`: a static cache, which makes it compile its steps.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from lot.attention_peers import xformers_fa3
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

BLOCK, PAGE = 128, 256  # of a mask's keys, and of a cache
WARM = 4  # tokens of `generate` before those that count


def joined(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum, and its norm."""
    x = x + y
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return x, wide.to(x.dtype) * weight


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def activated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


def hold(module: Any, **tensors: torch.Tensor) -> Any:
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


class GptFast(torch.nn.Module):  # type: ignore[misc]
    """Greedy steps of `batch` sequences of one length, whose caches have room for `room` tokens.

    A module, as a graph makes no copies of what one holds.
    """

    pieces = joined, turned, activated

    def __init__(self, model: Any, batch: int, room: int) -> None:
        super().__init__()
        c, own = model.config, model.weights
        self.batch, self.room = batch, -(-room // PAGE) * PAGE
        self.heads, self.d, self.eps = (c.num_heads, c.num_kv_heads), c.head_dim, c.eps
        cos, sin = model._tables[c.layers[0].rope]
        norms = [*(layer.norms["attn_norm"] for layer in own.layers), own.norm]
        hold(self, embedding=own.embedding, head=own.head, cos=cos, sin=sin, first=norms[0])
        self.layers = torch.nn.ModuleList()
        for layer, behind in zip(own.layers, norms[1:], strict=True):
            matrices = {name: getattr(layer, name) for name in ("qkv", "o", "gate_up", "down")}
            k, v = (own.norm.new_zeros(self.cache_shape()) for _ in range(2))
            more = {"norm": layer.norms["mlp_norm"], "behind": behind, "k": k, "v": v}
            self.layers.append(hold(torch.nn.Module(), **matrices, **more))
        self.prepare()

    def cache_shape(self) -> tuple[int, ...]:
        return self.batch, self.heads[1], self.room, self.d

    def by_token(self, cache: torch.Tensor) -> torch.Tensor:
        """(batch, room, heads, head_dim)."""
        return cache.transpose(1, 2)

    def fill(self, sequence: int, pages: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Its keys and values of each layer, (tokens, heads, head_dim)."""
        for layer, (k, v) in zip(self.layers, pages, strict=True):
            self.by_token(layer.k)[sequence, : len(k)] = k
            self.by_token(layer.v)[sequence, : len(v)] = v

    def prepare(self) -> None:
        self.mask = create_block_mask(
            lambda b, h, q, k: q >= k, None, None, self.room, self.room, str(self.head.device)
        )
        self.step = torch.compile(self.next_of, mode="reduce-overhead", fullgraph=True)

    def seen(self, position: torch.Tensor) -> Any:
        """What the token at `position` sees."""
        mask = self.mask[:, :, position // BLOCK]
        mask.mask_mod = lambda b, h, q, k: q + position[0] >= k
        mask.seq_lengths = (1, self.room)
        return mask

    def attend(self, layer: Any, q: Any, k: Any, v: Any, position: Any, seen: Any) -> Any:
        layer.k[:, :, position] = k[:, :, None]
        layer.v[:, :, position] = v[:, :, None]
        return flex_attention(q[:, :, None], layer.k, layer.v, block_mask=seen, enable_gqa=True)

    def hidden(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        join, turn, act = self.pieces
        cos, sin = self.cos[position][:, None], self.sin[position][:, None]
        seen = self.seen(position)
        x = functional.embedding(tokens, self.embedding)
        x, h = join(x, torch.zeros_like(x), self.first, self.eps)
        for layer in self.layers:
            parts = functional.linear(h, layer.qkv).unflatten(-1, (-1, self.d))
            q, k, v = parts.split((self.heads[0], self.heads[1], self.heads[1]), 1)
            out = self.attend(layer, turn(q, cos, sin), turn(k, cos, sin), v, position, seen)
            x, h = join(x, functional.linear(out.flatten(1), layer.o), layer.norm, self.eps)
            y = functional.linear(act(functional.linear(h, layer.gate_up)), layer.down)
            x, h = join(x, y, layer.behind, self.eps)
        return h

    def next_of(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.hidden(tokens, position), self.head).argmax(-1)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def generate(self, tokens: list[int], position: int, count: int) -> list[list[int]]:
        """The tokens of `count` steps, `tokens` at `position` before them."""
        now = torch.tensor(tokens, device=self.head.device)
        place, found = torch.tensor([position], device=now.device), []
        for _ in range(count):
            now = self.step(now, place).clone()
            found.append(now)
            place += 1
        return torch.stack(found).tolist()


class NanoVllm(GptFast):
    """The same by pages and a graph of the layers; logits, draws and arrays are outside of it."""

    def cache_shape(self) -> tuple[int, ...]:
        return self.batch * self.room // PAGE, PAGE, self.heads[1], self.d

    def by_token(self, cache: torch.Tensor) -> torch.Tensor:
        return cache.view(self.batch, self.room, *cache.shape[2:])

    def prepare(self) -> None:
        self.fa3 = xformers_fa3()
        self.pieces = tuple(torch.compile(piece) for piece in GptFast.pieces)
        device, each = self.head.device, self.room // PAGE
        self.table = torch.arange(self.batch * each, device=device, dtype=torch.int32)
        self.table = self.table.view(self.batch, each)
        self.given = torch.zeros(2, self.batch, dtype=torch.int32, device=device)
        with torch.no_grad():
            for _ in range(2):
                self.hidden(*self.given)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = self.hidden(*self.given)

    def seen(self, position: torch.Tensor) -> Any:
        page = self.table.gather(1, (position // PAGE)[:, None].long())[:, 0]
        return page.long() * PAGE + position % PAGE, position + 1

    def attend(self, layer: Any, q: Any, k: Any, v: Any, position: Any, seen: Any) -> Any:
        slots, lengths = seen
        layer.k.flatten(0, 1)[slots] = k
        layer.v.flatten(0, 1)[slots] = v
        options = {"softmax_scale": self.d**-0.5, "is_causal": True, "num_splits": 0}
        tables = {"seqused_k": lengths, "page_table": self.table}
        return self.fa3(q[:, None], layer.k, layer.v, **options, **tables)[0]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def generate(self, tokens: list[int], position: int, count: int) -> list[list[int]]:
        found = [tokens]
        for place in range(position, position + count):
            told = torch.tensor([found[-1], [place] * self.batch], dtype=torch.int32)
            self.given.copy_(told.pin_memory(), non_blocking=True)
            self.graph.replay()
            found.append(functional.linear(self.out, self.head).argmax(-1).tolist())
        return found[1:]


class Transformers:
    """`generate` of a Llama of transformers, by a static cache."""

    def __init__(self, model: Any) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        c, own = model.config, model.weights
        config = LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=len(c.layers),
            intermediate_size=c.intermediate_size, num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.eps,
            max_position_embeddings=c.max_position, dtype=model.dtype, attn_implementation="sdpa",
            rope_parameters={"rope_type": "default", "rope_theta": c.raw.rope_theta},
        )  # fmt: skip
        state = {"model.embed_tokens.weight": own.embedding, "lm_head.weight": own.head}
        state["model.norm.weight"] = own.norm
        sizes = [n * c.head_dim for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
        for i, layer in enumerate(own.layers):
            parts = dict(zip("qkv", layer.qkv.split(sizes), strict=True)) | {"o": layer.o}
            named = {f"self_attn.{name}_proj": x for name, x in parts.items()}
            gate, up = layer.gate_up.chunk(2)
            named |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": layer.down}
            named |= {c.norms[role]: x for role, x in layer.norms.items()}
            state |= {f"model.layers.{i}.{name}.weight": x for name, x in named.items()}
        with torch.device("meta"):
            self.model = LlamaForCausalLM(config).eval()
        self.model.load_state_dict(state, assign=True)
        self.model.model.rotary_emb = LlamaRotaryEmbedding(config).to(own.head.device)
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        self.cache: Any = None

    def generate(self, prompts: torch.Tensor, count: int) -> tuple[list[list[int]], float]:
        """The new tokens, and microseconds: of one until it is there, of more a step.

        Steps by a static cache, the same in every call: graphs of another are recorded again.
        """
        from transformers import StaticCache

        torch.cuda.synchronize()
        times: list[float] = [time.perf_counter()]

        def clock(ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
            if len(times) == WARM:
                torch.cuda.synchronize()
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        more: dict[str, Any] = {"use_cache": True}
        if count > 1:
            length = prompts.shape[1] + count
            self.cache = self.cache or StaticCache(self.model.config, max_cache_len=length)
            self.cache.reset()
            more["past_key_values"] = self.cache
        found = self.model.generate(
            prompts, max_new_tokens=count, do_sample=False, stopping_criteria=[clock],
            attention_mask=torch.ones_like(prompts), **more,
        )  # fmt: skip
        torch.cuda.synchronize()
        since = times[WARM] if count > 1 else times[0]
        spent = (time.perf_counter() - since) / max(1, count - WARM)
        return found[:, prompts.shape[1] :].tolist(), 1e6 * spent
