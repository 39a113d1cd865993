"""Tokens and the caches of keys and values that they go to: what is asked of them, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...errors import TensorError
from . import common

_INDICES = (torch.int32, torch.int64)
_TINY = torch.finfo(torch.float32).tiny  # 1 / less may be an infinity
BYTES = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # dtypes of caches, and the most they hold


class Tokens(NamedTuple):
    """The tokens of a call, by the argument that holds them."""

    op: str
    argument: str
    tensor: torch.Tensor
    leading: Sequence[int]  # (batch_size, seqlen) or (total,)
    packed: str  # the shape of `tensor` where leading is (total,)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self.leading[0] * (self.leading[1] if len(self.leading) > 1 else 1)

    def check_sequences(self, cu_seqlens: Any, cache_seqlens: Any) -> None:
        """Where each sequence starts, and how long it is in the cache."""
        is_packed = len(self.leading) == 1
        if cu_seqlens is not None:
            common.check_tensor(self.op, "cu_seqlens", cu_seqlens)
            if not is_packed:
                expected = f"shape {self.packed} where cu_seqlens is given"
                raise common.refuse(self.op, self.argument, expected, self.tensor)
            check_cu_seqlens(self.op, "cu_seqlens", cu_seqlens, self.tensor)
        if cache_seqlens is not None:
            if is_packed and cu_seqlens is None:
                expected = "None, as nothing says which sequence a token is of (give cu_seqlens)"
                raise common.refuse(self.op, "cache_seqlens", expected, cache_seqlens)
            shape = (batch_and_seqlen(self.leading, cu_seqlens)[0],)
            common.check_like(
                self.op, "cache_seqlens", cache_seqlens, shape, self.tensor, dtypes=(torch.int32,)
            )

    def check_indices(self, argument: str, indices: Any) -> None:
        """One index for each token: in their leading dimensions, or all of them as one."""
        common.check_tensor(self.op, argument, indices)
        shape = (self.num_tokens,) if indices.dim() == 1 else self.leading
        common.check_like(self.op, argument, indices, shape, self.tensor, dtypes=_INDICES)
        if not indices.is_contiguous():
            raise common.refuse(self.op, argument, "a contiguous tensor", indices)

    def check_positions(self, cos: Any, positions: Any, cu_seqlens: Any) -> None:
        """Where each token is in its sequence, for a rotation."""
        if positions is not None:
            self.check_indices("positions", positions)
        elif cos is not None and len(self.leading) == 1 and cu_seqlens is None:
            raise TensorError(
                f"{self.op}: positions: expected one for each of {self.num_tokens} tokens, as "
                f"neither cu_seqlens nor a batch dimension of {self.argument} says which sequence "
                "they are of, found None"
            )

    def check_places(
        self, k_cache: torch.Tensor, cu_seqlens: Any, block_table: Any, slot_mapping: Any
    ) -> None:
        """Where the cache takes each token."""
        num_pages, page_size = k_cache.shape[:2]
        if slot_mapping is not None:
            if block_table is not None:
                expected = "expected None where slot_mapping is given"
                raise TensorError(f"{self.op}: block_table: {expected}")
            self.check_indices("slot_mapping", slot_mapping)
            if num_pages * page_size >= 2**31:
                expected = "fewer than 2**31 slots with slot_mapping"
                raise common.refuse(self.op, "k_cache", expected, k_cache)
            return
        batch_size, _ = batch_and_seqlen(self.leading, cu_seqlens)
        if block_table is not None:
            check_block_table(self.op, block_table, batch_size, self.tensor)
            if page_size * block_table.shape[1] >= 2**31:
                expected = "fewer than 2**31 tokens a row"
                raise common.refuse(self.op, "block_table", expected, block_table)
        elif num_pages != batch_size:
            expected = f"one row of pages for each of {batch_size} sequences (or a block_table)"
            raise common.refuse(self.op, "k_cache", expected, k_cache)


def check_cu_seqlens(
    op: str, argument: str, bounds: Any, like: torch.Tensor, length: int | None = None
) -> None:
    """`bounds` must be (batch_size + 1,) int32 on the device of `like`; length: batch_size + 1."""
    common.check_tensor(op, argument, bounds)
    if length is None:
        if bounds.dim() != 1 or bounds.shape[0] < 1:
            raise common.refuse(op, argument, "shape (batch_size + 1,)", bounds)
        length = bounds.shape[0]
    common.check_like(op, argument, bounds, (length,), like, dtypes=(torch.int32,))


def check_block_table(op: str, block_table: Any, batch_size: int, like: torch.Tensor) -> None:
    """`block_table` must be (batch_size, max_pages) int32 on the device of `like`."""
    common.check_tensor(op, "block_table", block_table)
    if block_table.dim() != 2:
        raise common.refuse(op, "block_table", "shape (batch_size, max_pages)", block_table)
    shape = (batch_size, block_table.shape[1])
    common.check_like(op, "block_table", block_table, shape, like, dtypes=(torch.int32,))


def check_alibi(op: str, slopes: Any, q: torch.Tensor, batch_size: int) -> None:
    """`slopes`, where given, must be (num_heads,) or (batch_size, num_heads) fp32."""
    if slopes is None:
        return
    common.check_tensor(op, "alibi_slopes", slopes)
    num_heads = q.shape[-2]
    if tuple(slopes.shape) not in ((num_heads,), (batch_size, num_heads)):
        expected = f"shape ({num_heads},) or ({batch_size}, {num_heads})"
        raise common.refuse(op, "alibi_slopes", expected, slopes)
    common.check_like(op, "alibi_slopes", slopes, slopes.shape, q, dtypes=(torch.float32,))


def check_sinks(op: str, sinks: Any, q: torch.Tensor) -> None:
    """`sinks`, where given, must be (num_heads,) fp32, bf16 or fp16."""
    if sinks is not None:
        common.check_like(op, "sinks", sinks, (q.shape[-2],), q, dtypes=common.ELEMENT_TYPES)


def check_caches(
    op: str, k_cache: Any, v_cache: Any, heads: tuple[int, int], like: torch.Tensor,
    dtypes: Sequence[torch.dtype],
) -> None:  # fmt: skip
    """Caches to be written must be (pages, rows, *heads), k_cache of one of `dtypes`."""
    common.check_tensor(op, "k_cache", k_cache)
    if k_cache.dim() != 4:
        expected = f"shape (pages or batch, page_size or max_seqlen, {heads[0]}, {heads[1]})"
        raise common.refuse(op, "k_cache", expected, k_cache)
    for argument, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        shape = (*k_cache.shape[:2], *heads)
        common.check_like(op, argument, cache, shape, like, dtypes=dtypes)
        common.check_output(op, argument, cache)
        if max(cache.shape[:2]) > common.MAX_SIZE:
            raise common.refuse(op, argument, f"at most {common.MAX_SIZE} pages and rows", cache)
        dtypes = (k_cache.dtype,)


def check_cache_scales(
    op: str, k_cache: torch.Tensor, k_scale: Any, v_scale: Any, like: torch.Tensor,
    k_scale_cache: Any = None, v_scale_cache: Any = None, *, is_written: bool = False,
) -> None:  # fmt: skip
    """Scales of caches of bytes: where given, (num_kv_heads,) fp32, or of tokens; int8 has some.

    is_written: those of tokens are.
    """
    token_scales = {"k_scale_cache": k_scale_cache, "v_scale_cache": v_scale_cache}
    given = {argument: x for argument, x in token_scales.items() if x is not None}
    for argument, scale in given.items():
        if k_cache.dtype not in BYTES:
            expected = f"None for a cache of {str(k_cache.dtype).removeprefix('torch.')}"
            raise common.refuse(op, argument, expected, scale)
        if like.dtype == torch.float32:
            raise common.refuse(op, argument, "None beside tensors of float32", scale)
        common.check_fp32(op, argument, scale, like)
        if scale.shape != k_cache.shape[:-1]:
            raise common.refuse(op, argument, f"shape {tuple(k_cache.shape[:-1])}", scale)
        if is_written:
            common.check_output(op, argument, scale)
    if len(given) == 1:
        missing = next(iter(token_scales.keys() - given))
        there = next(iter(given))
        raise TensorError(f"{op}: {missing}: expected a tensor, as {there} is one, found None")
    for argument, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            if k_cache.dtype == torch.int8 and not given:
                expected = f"a scale a head, or {argument}_cache, of a cache of int8"
                raise TensorError(f"{op}: {argument}: expected {expected}, found None")
            continue
        if given:
            raise common.refuse(op, argument, f"None where {argument}_cache is given", scale)
        if k_cache.dtype not in BYTES:
            expected = f"None for a cache of {str(k_cache.dtype).removeprefix('torch.')}"
            raise common.refuse(op, argument, expected, scale)
        shape = (k_cache.shape[-2],)
        common.check_like(op, argument, scale, shape, like, dtypes=(torch.float32,))


def check_aligned(op: str, argument: str, value: torch.Tensor) -> None:
    """Rows that begin at multiples of 16 bytes, as vectors and tensor maps want them."""
    size = value.element_size()
    pairs = zip(value.stride()[:-1], value.shape[:-1], strict=True)
    if any(n > 1 and stride * size % common.VEC_BYTES for stride, n in pairs):
        raise common.refuse(op, argument, "strides that are multiples of 16 bytes", value)
    if common.is_plain(value) and value.data_ptr() % common.VEC_BYTES:
        found = f"address {value.data_ptr():#x}"
        raise common.refuse(op, argument, "memory aligned to 16 bytes", found)


def check_held(
    op: str, cache: torch.Tensor, cache_seqlens: torch.Tensor, block_table: torch.Tensor | None,
    num_new: int = 0, *, is_strict: bool = True,
) -> None:  # fmt: skip
    """Values on the device: lengths must fit the cache, below 0 being a finished row, and the pages
    that they and `num_new` tokens lie in exist.

    is_strict: new tokens past the end are refused too.
    """
    num_pages, page_size = cache.shape[:2]
    most = page_size * (1 if block_table is None else block_table.shape[1])
    most -= num_new if is_strict else 0
    lengths = cache_seqlens.tolist()
    for index, length in enumerate(lengths):
        if length > most:
            raise common.refuse(op, "cache_seqlens", f"0 to {most} at index {index}", length)
    if block_table is None:
        return
    for index, (length, pages) in enumerate(zip(lengths, block_table.tolist(), strict=True)):
        used = -(-(length + num_new) // page_size) if length >= 0 else 0
        for place, page in enumerate(pages[:used]):
            if not 0 <= page < num_pages:
                expected = f"pages from 0 to {num_pages - 1} at [{index}, {place}]"
                raise common.refuse(op, "block_table", expected, page)


def batch_and_seqlen(leading: Sequence[int], cu_seqlens: torch.Tensor | None) -> tuple[int, int]:
    """Sequences, and tokens from one to the next of those that are not packed."""
    if cu_seqlens is not None:
        return cu_seqlens.shape[0] - 1, max(1, leading[0])
    return (leading[0] if len(leading) > 1 else 1), max(1, leading[-1])


@dataclass(frozen=True)
class Places:
    """Where tokens go, each a (num_tokens,) tensor."""

    inside: torch.Tensor  # of a sequence whose length is not below 0
    stored: torch.Tensor
    page: torch.Tensor
    row: torch.Tensor
    position: torch.Tensor
    batch: torch.Tensor
    index: torch.Tensor  # in the sequence, what the cache holds included

    def assign(self, out: torch.Tensor, values: torch.Tensor) -> None:
        """Write a row of `values` for each token that is of a sequence."""
        out[self.inside.view(out.shape[:-2])] = values[self.inside].to(out.dtype)

    def store(
        self, cache: torch.Tensor, values: torch.Tensor, scale: torch.Tensor | None = None,
        scale_cache: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write a row of `values` for each token that has a place in the cache, and its scales."""
        values = values[self.stored]
        where = self.page[self.stored], self.row[self.stored]
        if scale_cache is not None:
            values, scale = values.float(), values.float().abs().amax(-1) / BYTES[cache.dtype]
            scale_cache[where] = scale
            values = torch.where(scale < _TINY, 0.0, 1.0 / scale)[..., None] * values
            scale = None
        if cache.dtype in BYTES:
            # torch indexes no fp8 tensors.
            values = to_bytes(values.float(), cache.dtype, scale).view(torch.uint8)
            cache = cache.view(torch.uint8)
        cache[where] = values.to(cache.dtype)


def to_bytes(
    values: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Heads of fp32 over their scales as a cache of bytes has them; nan in int8 is the least."""
    if scale is not None:
        values = values * (1.0 / scale)[:, None]
    most = BYTES[dtype]
    values = values.clamp(-most, most)
    return values.round().nan_to_num(-most).to(dtype) if dtype == torch.int8 else values.to(dtype)


def places(
    leading: Sequence[int], k_cache: torch.Tensor, cache_seqlens: torch.Tensor | None,
    block_table: torch.Tensor | None, slot_mapping: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, positions: torch.Tensor | None,
) -> Places:  # fmt: skip
    """Where each token goes. leading: (batch_size, seqlen) or (total,) of the tokens; of k_cache,
    the first two sizes and the device count.
    """
    batch_size, seqlen = batch_and_seqlen(leading, cu_seqlens)
    token = torch.arange(torch.Size(leading).numel(), device=k_cache.device)
    if cu_seqlens is None:
        batch, index = token // seqlen, token % seqlen
        inside = torch.ones_like(token, dtype=torch.bool)
    else:
        starts = cu_seqlens.long()
        batch = torch.searchsorted(starts[1:].contiguous(), token, right=True)
        inside = (token >= starts[0]) & (batch < batch_size)
        batch = batch.clamp(max=max(0, batch_size - 1))
        index = token - starts[batch]
    if cache_seqlens is not None and batch_size:
        lengths = cache_seqlens.long()[batch]
        inside = inside & (lengths >= 0)  # below 0: a finished or padding row
        index = index + lengths
    position = index if positions is None else positions.flatten().long()
    num_pages, page_size = k_cache.shape[:2]
    rows = max(1, page_size)
    if slot_mapping is not None:
        slot = slot_mapping.flatten().long()
        page, row = slot // rows, slot % rows
        known = (slot >= 0) & (slot < num_pages * page_size)
    elif block_table is not None:
        known = (index >= 0) & (index < block_table.shape[1] * page_size)
        row = index % rows
        page = torch.full_like(token, -1)
        entry = (batch[known], (index // rows)[known])
        page[known] = block_table[entry].long()
        known = (page >= 0) & (page < num_pages)
    else:
        page, row = batch, index
        known = (index >= 0) & (index < page_size)
    return Places(inside, inside & known, page, row, position, batch, index)
