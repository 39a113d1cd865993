"""Weights of a model as its kernels take them: joined, and of each matrix this rank's share only.

Reads slices straight from safetensors, or draws them by lot; knows names, launches nothing.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelError, listed
from .config import ModelConfig, package, read_json
from .parallel import Group

Shape = tuple[int, ...]
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
# Of models that see or hear, beside the text's.
_UNREAD = ("vision_tower.", "audio_tower.", "multi_modal_projector.", "image_newline")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PLAIN = ("BF16", "F16", "F32", "F64")  # others are numbers of something quantised


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


class Safetensors:
    """The files of a model's folder; only slices that are asked for are read."""

    def __init__(self, folder: Path, shapes: dict[str, Shape]) -> None:
        """Raises ModelError naming tensors and files that are missing, odd or unknown."""
        safe_open = package("safetensors", "models' weights are read").safe_open
        if how := read_json(folder / "config.json").get("quantization_config"):
            kind = how.get("quant_method") if isinstance(how, dict) else how
            raise ModelError(
                f"{folder}: weights quantised by {kind or how!r} (its quantization_config): "
                "the engine reads those of 16 or 32 bits"
            )
        index = folder / "model.safetensors.index.json"
        files = {"model.safetensors"}
        if index.is_file():
            where = read_json(index).get("weight_map", {})
            if not isinstance(where, dict) or not all(isinstance(x, str) for x in where.values()):
                raise ModelError(f"{index}: weight_map: expected names of files by tensor")
            files = set(where.values())
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
        if self.has_head:
            shapes = {**shapes, _HEAD: shapes[_EMBEDDING]}
        for name, shape in shapes.items():
            file, key = self._where[name]
            found = file.get_slice(key)
            if (is_so := tuple(found.get_shape())) != shape:
                raise ModelError(f"{folder}: {name}: expected shape {shape}, found {is_so}")
            if (kind := found.get_dtype()) not in _PLAIN:
                raise ModelError(f"{folder}: {name}: expected 16 or 32 bits, found {kind}")
        unknown = [
            name for name in self._where.keys() - shapes
            if not (name.removeprefix("model.").startswith(_UNREAD)
                    or name.endswith("rotary_emb.inv_freq"))
        ]  # fmt: skip
        if unknown:
            names = listed(sorted(unknown))
            raise ModelError(f"{folder}: weights the engine would ignore: {names}")

    @property
    def has_head(self) -> bool:
        """Whether they have one of their own, which a file may whatever its configuration says."""
        return _HEAD in self._where

    def read(self, name: str, shape: Shape, dim: int, start: int, stop: int) -> torch.Tensor:
        """Elements start to stop of a dimension."""
        file, key = self._where[name]
        found = file.get_slice(key)
        return found[start:stop] if dim == 0 else found[:, start:stop]


class Random:
    """Weights by lot, the same in any number of processes: norms that change nothing, no bias."""

    has_head = False

    def __init__(self, config: ModelConfig, device: torch.device, seed: int = 0) -> None:
        self._norm, self._device, self._seed = 1.0 - config.norm_offset, device, seed

    def read(self, name: str, shape: Shape, dim: int, start: int, stop: int) -> torch.Tensor:
        if len(shape) == 1:
            value = 0.0 if name.endswith("bias") else self._norm
            return torch.full((stop - start,), value, device=self._device)
        lot = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()) ^ self._seed)
        whole = torch.empty(shape, device=self._device)
        whole.normal_(0, shape[1] ** -0.5, generator=lot)
        return whole.narrow(dim, start, stop - start)


class _Listing(dict[str, Shape]):
    """Notes what is read."""

    has_head = False

    def read(self, name: str, shape: Shape, dim: int, start: int, stop: int) -> torch.Tensor:
        self[name] = shape
        return torch.empty(shape, device="meta")


def expected(c: ModelConfig) -> dict[str, Shape]:
    """The name and shape of every tensor of a whole checkpoint."""
    nowhere, found = torch.device("meta"), _Listing()
    load(c, found, Group(nowhere, world=1), nowhere, torch.float32)
    return found


def check_world(c: ModelConfig, world: int) -> None:
    """Raise ModelError naming what no kernel takes, or `world` processes cannot share evenly."""
    inner = sorted({f"{'moe_' * layer.is_moe}intermediate_size" for layer in c.layers})
    sizes = {
        "hidden_size": (c.hidden_size, 8, 1), "head_dim": (c.head_dim, 8, 1),
        "num_attention_heads": (c.num_heads, 1, world), "vocab_size": (c.vocab_size, 1, world),
        "num_key_value_heads": (c.num_kv_heads, 1, 1),
        "max_position_embeddings": (c.max_position, 1, 1),
        **{name: (getattr(c, name), 8, world) for name in inner},
    }  # fmt: skip
    for name, (size, unit, parts) in sizes.items():
        if not isinstance(size, int) or size < 1 or size % (unit * parts):
            who = f"{parts} processes" if parts > 1 else "kernels"
            units = f" in multiples of {unit}" if unit > 1 else ""
            raise ModelError(f"{who} do not divide {name} {size} evenly{units}")
    kv = c.num_kv_heads
    if c.num_heads % kv or not 16 <= c.head_dim <= 256:
        raise ModelError(f"no kernel takes {c.num_heads} heads of {c.head_dim} on {kv} KV heads")
    if kv % world and (world % kv or c.qk_norm == "whole"):
        raise ModelError(f"{world} processes neither divide nor repeat {kv} KV heads")


def load(
    c: ModelConfig, source: Safetensors | Random | _Listing, group: Group, device: torch.device,
    dtype: torch.dtype,
) -> Weights:  # fmt: skip
    """All that this rank needs, on its device."""
    hidden, d, layers = c.hidden_size, c.head_dim, []
    q_size, kv_size = c.num_heads * d, c.num_kv_heads * d
    first, last = (d * end for end in group.share(c.num_heads))
    kv_first, kv_last = group.share(c.num_kv_heads)
    # A head that several ranks share is theirs whole.
    kv_span = d * kv_first, d * max(kv_last, kv_first + 1)
    qk_norms = (q_size, kv_size) if c.qk_norm == "whole" else (d, d)

    def read(name: str, *shape: int, dim: int = 0, span: Any = None) -> torch.Tensor:
        found = source.read(name, shape, dim, *(span or (0, shape[dim])))
        return found.to(device=device, dtype=dtype)

    def joined(parts: list[tuple[str, int, Any]], what: str = "weight") -> torch.Tensor:
        columns = (hidden,) if what == "weight" else ()
        return torch.cat([read(f"{x}.{what}", n, *columns, span=span) for x, n, span in parts])

    with group.progress(len(c.layers), "weights") as advance:
        for i, layer in enumerate(c.layers):
            at = f"model.layers.{i}."
            advance(f"layer {i}")
            inner = c.moe_intermediate_size if layer.is_moe else c.intermediate_size
            names = c.moe_names[1:] if layer.is_moe else MLP
            mlps = [[x.format(n) for x in names] for n in range(c.num_experts * layer.is_moe or 1)]
            columns, has_bias = group.share(inner), c.mlp_bias and not layer.is_moe
            q, k, v, o = (f"{at}self_attn.{x}_proj" for x in "qkvo")
            qkv = [(q, q_size, (first, last)), (k, kv_size, kv_span), (v, kv_size, kv_span)]
            gate_ups = [[(at + x, inner, columns) for x in own[:2]] for own in mlps]
            downs = [at + own[2] for own in mlps]
            gate_up = [joined(parts) for parts in gate_ups]
            down = [read(f"{x}.weight", hidden, inner, dim=1, span=columns) for x in downs]
            layers.append(LayerWeights(
                qkv=joined(qkv),
                o=read(f"{o}.weight", hidden, q_size, dim=1, span=(first, last)).contiguous(),
                gate_up=torch.stack(gate_up) if layer.is_moe else gate_up[0],
                down=torch.stack(down) if layer.is_moe else down[0].contiguous(),
                qkv_bias=joined(qkv, "bias") if c.qkv_bias else None,
                o_bias=read(f"{o}.bias", hidden) if c.o_bias else None,
                gate_up_bias=joined(gate_ups[0], "bias") if has_bias else None,
                down_bias=read(f"{downs[0]}.bias", hidden) if has_bias else None,
                router=read(f"{at}{c.moe_names[0]}.weight", c.num_experts, hidden)
                if layer.is_moe else None,
                q_norm=read(f"{at}self_attn.q_norm.weight", qk_norms[0]) if c.qk_norm else None,
                k_norm=read(f"{at}self_attn.k_norm.weight", qk_norms[1]) if c.qk_norm else None,
                norms={role: read(f"{at}{x}.weight", hidden) for role, x in c.norms.items()},
            ))  # fmt: skip
    rows = group.share(c.vocab_size)
    head = embedding = read(_EMBEDDING, c.vocab_size, hidden, span=rows)
    if source.has_head or not c.is_tied:
        own = source.read(_HEAD, (c.vocab_size, hidden), 0, *rows).to(dtype)
        # One of the same values is no head of its own, as in transformers. Told on the host: a
        # second copy on a GPU would stay out of its free memory.
        if not (c.is_tied and torch.equal(own, embedding.cpu())):
            head = own.to(device)
    return Weights(embedding, head, read("model.norm.weight", hidden), layers)
