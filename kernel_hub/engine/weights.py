"""Weights of a model as its kernels take them: joined, and of each matrix this rank's share only.

Reads slices straight from safetensors, or draws them by lot; knows names, launches nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelError, listed
from .config import ModelConfig, package, read_json
from .parallel import Group

Shape = tuple[int, ...]
_UNREAD = ("vision_tower.", "multi_modal_projector.")  # of models that see, beside the text's


@dataclass
class LayerWeights:
    """Of one layer; None: the family has none. Matrices are (n, k), of experts (experts, n, k)."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    router: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norms: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Weights:
    """Of a model, or of this rank's share of it."""

    embedding: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor
    layers: list[LayerWeights]


def expected(c: ModelConfig) -> dict[str, Shape]:
    """The name and shape of every tensor of a whole checkpoint."""
    hidden, q, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    found: dict[str, Shape] = {"model.embed_tokens.weight": (c.vocab_size, hidden)}
    found["model.norm.weight"] = (hidden,)
    if not c.is_tied:
        found["lm_head.weight"] = (c.vocab_size, hidden)
    for i, layer in enumerate(c.layers):
        sizes = {
            "self_attn.q_proj": (q, hidden, c.qkv_bias), "self_attn.o_proj": (hidden, q, c.o_bias),
            "self_attn.k_proj": (kv, hidden, c.qkv_bias),
            "self_attn.v_proj": (kv, hidden, c.qkv_bias),
        }  # fmt: skip
        inner = c.moe_intermediate_size if layer.is_moe else c.intermediate_size
        if layer.is_moe:
            sizes[c.moe_names[0]] = (c.num_experts, hidden, False)
        for gate, up, down in _mlps(c, layer.is_moe):
            has_bias = c.mlp_bias and not layer.is_moe
            sizes[gate] = sizes[up] = (inner, hidden, has_bias)
            sizes[down] = (hidden, inner, has_bias)
        vectors = dict.fromkeys(c.norms.values(), hidden)
        if c.qk_norm:
            whole = c.qk_norm == "whole"
            vectors["self_attn.q_norm"] = q if whole else c.head_dim
            vectors["self_attn.k_norm"] = kv if whole else c.head_dim
        for name, (n, k, has_bias) in sizes.items():
            found[f"model.layers.{i}.{name}.weight"] = (n, k)
            if has_bias:
                found[f"model.layers.{i}.{name}.bias"] = (n,)
        found.update({f"model.layers.{i}.{name}.weight": (n,) for name, n in vectors.items()})
    return found


def _mlps(c: ModelConfig, is_moe: bool) -> Iterator[tuple[str, ...]]:
    """The names of gate, up and down: of the layer's one MLP, or of each expert."""
    if not is_moe:
        yield "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
    for expert in range(c.num_experts if is_moe else 0):
        yield tuple(name.format(expert) for name in c.moe_names[1:])


class Safetensors:
    """The files of a model's folder; only slices that are asked for are read."""

    def __init__(self, folder: Path, shapes: dict[str, Shape]) -> None:
        """Raises ModelError naming tensors and files that are missing, odd or unknown."""
        safe_open = package("safetensors", "models' weights are read").safe_open
        index = folder / "model.safetensors.index.json"
        files = {"model.safetensors"}
        if index.is_file():
            files = set(read_json(index).get("weight_map", {}).values())
        self._where: dict[str, tuple[Any, str]] = {}
        for name in sorted(files):
            if Path(name).name != name or not (folder / name).is_file():
                raise ModelError(f"{folder} has no file {name!r}, which holds weights of the model")
            try:
                file: Any = safe_open(folder / name, framework="pt")
            except Exception as error:  # the package's own class is no public one
                raise ModelError(
                    f"{folder / name}: no whole file of safetensors: {error}"
                ) from error
            # Text models inside of those that see have one more word in their names.
            found = {key.replace("language_model.", "", 1): (file, key) for key in file.keys()}  # noqa: SIM118 - no mapping
            self._where.update(found)
        if missing := sorted(shapes.keys() - self._where):
            raise ModelError(f"{folder}: weights that are missing: {listed(missing)}")
        for name, shape in shapes.items():
            file, key = self._where[name]
            if (is_so := tuple(file.get_slice(key).get_shape())) != shape:
                raise ModelError(f"{folder}: {name}: expected shape {shape}, found {is_so}")
        unknown = [
            name for name in self._where.keys() - shapes
            if not (name.removeprefix("model.").startswith(_UNREAD)
                    or name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight")
        ]  # fmt: skip
        if unknown:
            raise ModelError(
                f"{folder}: weights the engine would ignore: {listed(sorted(unknown))}"
            )

    def read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Elements start to stop of a dimension."""
        file, key = self._where[name]
        found = file.get_slice(key)
        return found[start:stop] if dim == 0 else found[:, start:stop]


class Random:
    """Weights by lot, the same in any number of processes: norms that change nothing, no bias."""

    def __init__(self, config: ModelConfig, device: torch.device, seed: int = 0) -> None:
        self._shapes, self._seed, self._device = expected(config), seed, device
        self._norm = 1.0 - config.norm_offset

    def read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            value = 0.0 if name.endswith("bias") else self._norm
            return torch.full((stop - start,), value, device=self._device)
        generator = torch.Generator(self._device).manual_seed(
            zlib.crc32(name.encode()) ^ self._seed
        )
        whole = torch.empty(shape, device=self._device).normal_(
            0, shape[1] ** -0.5, generator=generator
        )
        return whole.narrow(dim, start, stop - start)


def check_world(c: ModelConfig, world: int) -> None:
    """Raise ModelError naming what `world` processes cannot share evenly."""
    inner = {"intermediate_size": c.intermediate_size}
    if c.num_experts:
        inner = {"moe_intermediate_size": c.moe_intermediate_size}
    sizes = {"num_attention_heads": c.num_heads, "vocab_size": c.vocab_size, **inner}
    for name, size in sizes.items():
        if size % (world * (8 if name in inner and world > 1 else 1)):
            unit = " in multiples of 8" if name in inner else ""
            raise ModelError(f"{world} processes do not divide {name} {size} evenly{unit}")
    if c.num_kv_heads % world and (world % c.num_kv_heads or c.qk_norm == "whole"):
        raise ModelError(f"{world} processes neither divide nor repeat {c.num_kv_heads} KV heads")


def load(
    c: ModelConfig, source: Safetensors | Random, group: Group, device: torch.device,
    dtype: torch.dtype,
) -> Weights:  # fmt: skip
    """All that this rank needs, on its device."""
    shapes = expected(c)

    def read(name: str, dim: int = 0, span: tuple[int, int] | None = None) -> torch.Tensor:
        start, stop = span or (0, shapes[name][dim])
        return source.read(name, dim, start, stop).to(device=device, dtype=dtype)

    def whole(name: str) -> Any:
        """None where models of the family have none."""
        return read(name) if name in shapes else None

    def joined(names: list[str], spans: list[tuple[int, int]], what: str = "weight") -> Any:
        names = [f"{name}.{what}" for name in names]
        if names[0] not in shapes:
            return None
        return torch.cat([read(name, 0, span) for name, span in zip(names, spans, strict=True)])

    d = c.head_dim
    heads = [d * end for end in group.share(c.num_heads)]
    first, last = group.share(c.num_kv_heads)
    kv = d * first, d * max(last, first + 1)  # a head that several ranks share is theirs whole
    qkv_spans = [(heads[0], heads[1]), kv, kv]
    rows = group.share(c.vocab_size)
    embedding = read("model.embed_tokens.weight", 0, rows)
    head = embedding if c.is_tied else read("lm_head.weight", 0, rows)
    layers = []
    with group.progress(len(c.layers), "weights") as advance:
        for i, layer in enumerate(c.layers):
            p = f"model.layers.{i}."
            advance(f"layer {i}")
            inner = c.moe_intermediate_size if layer.is_moe else c.intermediate_size
            columns = group.share(inner)
            mlps = [[p + name for name in names] for names in _mlps(c, layer.is_moe)]
            gate_up = [joined(m[:2], [columns] * 2) for m in mlps]
            down = [read(f"{m[2]}.weight", 1, columns) for m in mlps]
            q, k, v, o = (f"{p}self_attn.{n}_proj" for n in "qkvo")
            layers.append(LayerWeights(
                qkv=joined([q, k, v], qkv_spans),
                o=read(f"{o}.weight", 1, (heads[0], heads[1])).contiguous(),
                gate_up=torch.stack(gate_up) if layer.is_moe else gate_up[0],
                down=torch.stack(down) if layer.is_moe else down[0].contiguous(),
                qkv_bias=joined([q, k, v], qkv_spans, "bias"),
                o_bias=whole(f"{o}.bias"),
                gate_up_bias=joined(mlps[0][:2], [columns] * 2, "bias"),
                down_bias=whole(f"{mlps[0][2]}.bias"),
                router=whole(f"{p}{c.moe_names[0]}.weight") if layer.is_moe else None,
                q_norm=whole(f"{p}self_attn.q_norm.weight"),
                k_norm=whole(f"{p}self_attn.k_norm.weight"),
                norms={role: read(f"{p}{name}.weight") for role, name in c.norms.items()},
            ))  # fmt: skip
    return Weights(embedding, head, read("model.norm.weight"), layers)
