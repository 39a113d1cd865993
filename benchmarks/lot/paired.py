"""Contenders of qkv_linear and swiglu_linear."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernel_hub.ops import append_kv, qkv_linear, rope, silu_and_mul, swiglu_linear

from .contenders import DTYPES, Contender, Expected, Launch, Made, Peer, Source, Written, product
from .product_peers import CUBLAS, CUBLASLT, through_lt
from .shapes import BIAS, Lot

PAGE_SIZE, POSITIONS = 16, 8192


def make_swiglu(lot: Lot, source: Source) -> Made:
    """The product by a library, then our silu_and_mul; or both at once."""
    dtype, columns = DTYPES[lot.dtype], lot.n // 2
    sets = [
        (
            source.rows(lot.m, lot.k, dtype=dtype, options=lot.options),
            source.weight(lot.n, lot.k, dtype=dtype),
            source.empty(lot.m, columns, dtype=dtype),
        )
        for _ in range(source.num_sets(lot.num_bytes))
    ]
    a, b, out = sets[0]
    rows = source.some(lot.m)
    expected = [Expected(_joined(a[rows], b, torch.float64), _joined(a[rows], b, dtype))]
    written = Written([out], lambda: [out[rows]])

    def ours(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Launch:
        return functools.partial(swiglu_linear, a, b, out=out)

    def two(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Launch:
        turned, joint = b.T, source.empty(lot.m, lot.n, dtype=dtype)

        def run() -> None:
            torch.mm(a, turned, out=joint)
            silu_and_mul(joint, out=out)

        return run

    def contender(launch_of: Callable[..., Launch], lt: bool = False) -> Contender:
        launches = [launch_of(*one) for one in sets]
        launches = [through_lt(launch) for launch in launches] if lt else launches
        return Contender(launches, written, expected)

    peers = {
        f"{name} + silu_and_mul": Peer((name,), functools.partial(contender, two, name == CUBLASLT))
        for name in (CUBLAS, CUBLASLT)
    }
    return Made(contender(ours), peers, source.is_rotated(len(sets), lot.num_bytes))


def _joined(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    gate, up = product(a, b, dtype).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def make_qkv(lot: Lot, source: Source) -> Made:
    """One launch; or a library's product, then our rope and append_kv, or append_kv for both."""
    return _Qkv(lot, source).made()


class _Qkv:
    """One projection: its heads, its cache, where its tokens go."""

    def __init__(self, lot: Lot, source: Source) -> None:
        self.lot, self.dtype = lot, DTYPES[lot.dtype]
        m, (num_heads, num_kv_heads, head_dim) = lot.m, lot.heads
        self.sets = [
            (
                source.rows(m, lot.k, dtype=self.dtype, options=lot.options),
                source.weight(lot.n, lot.k, dtype=self.dtype),
                source.empty(m, lot.n, dtype=self.dtype),
            )
            for _ in range(source.num_sets(lot.num_bytes))
        ]
        self.is_rotated = source.is_rotated(len(self.sets), lot.num_bytes)
        device = source.device
        self.bias = source.normal(lot.n, dtype=self.dtype) if BIAS in lot.options else None
        self.is_paged = lot.kind == "paged"
        self.caches: list[torch.Tensor] = []
        pages = -(-m // PAGE_SIZE) + 1
        self.slots = torch.randperm(pages * PAGE_SIZE, device=device)[:m]
        if self.is_paged:
            shape = (pages, PAGE_SIZE, num_kv_heads, head_dim)
            self.caches = [source.empty(*shape, dtype=self.dtype) for _ in range(2)]
        self.tables: Sequence[Any] = (None, None)
        self.positions = None
        if lot.has_rope:
            angles = torch.rand(POSITIONS, head_dim // 2, device=device) * 6
            self.tables = angles.cos(), angles.sin()
            self.positions = torch.randint(0, POSITIONS, (m,), device=device)
        self.out_q = source.empty(m, num_heads, head_dim, dtype=self.dtype)
        self.out_kv = [source.empty(m, num_kv_heads, head_dim, dtype=self.dtype) for _ in "kv"]
        self.rows = source.some(m)
        a, b, _ = self.sets[0]
        found = [self._heads(a[self.rows], b, dtype) for dtype in (torch.float64, self.dtype)]
        self.expected = [Expected(truth, own) for truth, own in zip(*found, strict=True)]

    def made(self) -> Made:
        outs = [self.out_q, *(self.caches or self.out_kv)]
        ours = Written(outs, lambda: self._sample(*outs), is_whole=not self.is_paged)
        names = self._names()
        peers = {}
        for library, lt in ((CUBLAS, False), (CUBLASLT, True)):
            for name, after in names.items():
                make = functools.partial(self._peer, after, lt)
                peers[f"{library}{name}"] = Peer((library,), make)
        launches = [functools.partial(self._ours, a, b) for a, b, _ in self.sets]
        return Made(Contender(launches, ours, self.expected), peers, self.is_rotated)

    def _names(self) -> dict[str, Callable[..., None]]:
        """What follows a product, by the ways there are."""
        if not self.is_paged:
            return {" + rope": self._rotate} if self.lot.has_rope else {"": lambda *_: None}
        if not self.lot.has_rope:
            return {" + append_kv": self._append}
        return {" + rope + append_kv": self._rotate_append, " + append_kv": self._append_rotated}

    def _ours(self, x: torch.Tensor, w: torch.Tensor) -> None:
        num_heads, num_kv_heads, _ = self.lot.heads
        cos, sin = self.tables
        to: dict[str, Any] = {"out_k": self.out_kv[0], "out_v": self.out_kv[1]}
        if self.is_paged:
            to = {"k_cache": self.caches[0], "v_cache": self.caches[1], "slot_mapping": self.slots}
        qkv_linear(
            x, w, self.bias, cos, sin, self.positions, num_heads=num_heads,
            num_kv_heads=num_kv_heads, out_q=self.out_q, **to,
        )  # fmt: skip

    def _peer(self, after: Callable[..., None], lt: bool) -> Contender:
        launches = [self._launch(after, *one) for one in self.sets]
        launches = [through_lt(launch) for launch in launches] if lt else launches
        joint = self.sets[0][2]
        q, k, v = self._split(joint)
        outs = [q, *(self.caches or (k, v))]
        tensors = [joint, *self.caches]
        written = Written(tensors, lambda: self._sample(*outs), is_whole=not self.is_paged)
        return Contender(launches, written, self.expected)

    def _launch(
        self, after: Callable[..., None], x: torch.Tensor, w: torch.Tensor, joint: torch.Tensor
    ) -> Launch:
        turned, heads = w.T, self._split(joint)

        def run() -> None:
            if self.bias is None:
                torch.mm(x, turned, out=joint)
            else:
                torch.addmm(self.bias, x, turned, out=joint)
            after(*heads)

        return run

    def _split(self, joint: torch.Tensor) -> Sequence[torch.Tensor]:
        num_heads, num_kv_heads, head_dim = self.lot.heads
        heads = joint.view(len(joint), -1, head_dim)
        return heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)

    def _rotate(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        cos, sin = self.tables
        rope(q, k, cos, sin, self.positions, out_q=q, out_k=k)

    def _append(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        append_kv(k, v, *self.caches, slot_mapping=self.slots)

    def _rotate_append(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self._rotate(q, k, v)
        self._append(q, k, v)

    def _append_rotated(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        cos, sin = self.tables
        append_kv(
            k, v, *self.caches, slot_mapping=self.slots, q=q, out_q=q, cos=cos, sin=sin,
            positions=self.positions,
        )  # fmt: skip

    def _sample(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Sequence[torch.Tensor]:
        if not self.is_paged:
            return [x[self.rows] for x in (q, k, v)]
        places = self.slots[self.rows]
        return [q[self.rows], *(cache.flatten(0, 1)[places] for cache in (k, v))]

    def _heads(self, x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """Queries, keys and values of sampled rows."""
        values = product(x, w, dtype)
        if self.bias is not None:
            values = values + self.bias.to(dtype)
        q, k, v = self._split(values)
        if self.positions is None:
            return [q, k, v]
        cos, sin = (table.to(dtype)[self.positions[self.rows], None] for table in self.tables)
        turned = []
        for heads in (q, k):
            first, second = heads.chunk(2, dim=-1)
            pair = (first * cos - second * sin, second * cos + first * sin)
            turned.append(torch.cat(pair, dim=-1))
        return [*turned, v]
