"""deterministic="batch" in attention: a token's bits are those that it has alone, on Hopper.

On the CPU by the emulator, whose tensor cores add in one order whatever the tile.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from bits import same_bits
from emulated_attention import hopper_attention
from ways import Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import decode_attention, flash_attention, flash_attention_qkvpacked
from kernel_hub.ops.attention import forward_split_sm90 as split

DRAWN_EMULATED, DRAWN = 10, 60


@dataclass(frozen=True)
class Cache:
    """Sequences in pages, with queries at all of their last places."""

    lengths: tuple[int, ...]
    num_queries: tuple[int, ...]  # the last so many
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    options: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def drawn(cls, seed: object, most: int) -> Cache:
        lot = random.Random(f"batch attention {seed}")
        kv_heads = lot.choice((1, 2))
        options: dict[str, Any] = {}
        if lot.random() < 0.4:
            options["window_size"] = (lot.randrange(1, most), 0)
        if lot.random() < 0.4:
            options["softcap"] = lot.choice((5.0, 50.0))
        lengths = tuple(lot.randrange(1, most) for _ in range(lot.randrange(1, 4)))
        return cls(
            lengths, tuple(min(n, lot.choice((1, 7, 40, 150))) for n in lengths),
            kv_heads * lot.choice((1, 4, 7)), kv_heads, lot.choice((64, 128, 256)),
            lot.choice((16, 64)), options,
            lot.choice((torch.bfloat16, torch.float16)),
        )  # fmt: skip


class Held:
    """A cache's tensors; `rows` asks for the queries from `first` to `end` of some sequences."""

    def __init__(self, case: Cache, way: Way, scale: float = 3.0) -> None:
        self.case, self.way = case, way
        self.pages = [-(-n // case.page_size) for n in case.lengths]
        shape = (sum(self.pages) + 1, case.page_size, case.num_kv_heads, case.head_dim)
        self.k = way.randn(*shape, dtype=case.dtype, seed=1)
        self.v = way.randn(*shape, dtype=case.dtype, seed=2)
        # Large ones make shifts move, and differ between rows.
        self.q = [
            (way.randn(n, case.num_heads, case.head_dim, seed=3 + i) * scale).to(case.dtype)
            for i, n in enumerate(case.num_queries)
        ]

    def int32(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.way.device)

    def table(self, which: list[int]) -> torch.Tensor:
        firsts = [sum(self.pages[:i]) for i in range(len(self.pages))]
        table = torch.zeros(len(which), max(self.pages[i] for i in which), dtype=torch.int32)
        for row, i in enumerate(which):
            table[row, : self.pages[i]] = firsts[i] + torch.arange(self.pages[i])
        return table.to(self.way.device)

    def rows(self, parts: list[tuple[int, int, int]], **more: Any) -> list[torch.Tensor]:
        """Of (sequence, first, end) each, in one ragged call."""
        which = [i for i, _, _ in parts]
        counts = [end - first for _, first, end in parts]
        q = torch.cat([self.q[i][first:end] for i, first, end in parts])
        bounds = [sum(counts[:i]) for i in range(len(counts) + 1)]
        ends = [self.case.lengths[i] - self.case.num_queries[i] + end for i, _, end in parts]
        how = {"deterministic": "batch", **self.case.options, **more}
        out = flash_attention(
            q, self.k, self.v, causal=True, cu_seqlens_q=self.int32(bounds),
            max_seqlen_q=max(counts), cache_seqlens=self.int32(ends),
            block_table=self.table(which), **how,
        )  # fmt: skip
        return list(out.split(counts))

    def alone(self, i: int, row: int) -> torch.Tensor:
        """One token, as a decode step of its own."""
        length = self.case.lengths[i] - self.case.num_queries[i] + row + 1
        return decode_attention(
            self.q[i][None, row : row + 1], self.k, self.v, cache_seqlens=self.int32([length]),
            block_table=self.table([i]), **{"deterministic": "batch", **self.case.options},
        )[0, 0]  # fmt: skip


def check(held: Held, lot: random.Random, num_rows: int) -> None:
    case = held.case
    everyone = list(range(len(case.lengths)))
    whole = held.rows([(i, 0, case.num_queries[i]) for i in everyone])
    for i in everyone:
        cut = lot.randrange(case.num_queries[i])
        parts = (
            [(i, 0, cut), (i, cut, case.num_queries[i])] if cut else [(i, 0, case.num_queries[i])]
        )
        same_bits(torch.cat([held.rows([part])[0] for part in parts]), whole[i], name="chunks")
        for row in lot.sample(range(case.num_queries[i]), min(num_rows, case.num_queries[i])):
            same_bits(held.alone(i, row), whole[i][row], name=f"sequence {i}, row {row}")


@pytest.mark.parametrize("index", range(DRAWN_EMULATED))
def test_tokens_emulated(hopper_way: Way, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    if hopper_way.is_gpu:
        pytest.skip("the test below does that with larger cases")
    lot = random.Random(index)
    with hopper_attention(monkeypatch, lot.choice((1, 3, 7))):
        check(Held(Cache.drawn(index, 700), hopper_way), lot, 1)


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_heads_share_a_tile(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch, head_dim: int, softcap: float
) -> None:
    """A step's q may be a slice, out is where it is asked for, lse is each head's."""
    case = Cache((130, 64, 3), (1, 1, 1), 6, 2, head_dim, 16, {"softcap": softcap})
    held = Held(case, hopper_way)
    packed = torch.stack(held.q).repeat(1, 1, 3, 1)
    out = hopper_way.randn(*packed.shape, dtype=case.dtype)[:, :, 6:12]
    how: dict[str, Any] = {
        "cache_seqlens": held.int32(case.lengths), "block_table": held.table([0, 1, 2]),
        "deterministic": "batch", "return_lse": True, **case.options,
    }  # fmt: skip
    given = (packed[:, :, :6], held.k, held.v)
    with hopper_attention(monkeypatch, 3) if not hopper_way.is_gpu else nullcontext():
        found, lse = decode_attention(*given, out=out, **how)
        expected, own_lse = flash_attention(*given, causal=True, **how)
    assert found is out
    same_bits(out, expected)
    same_bits(lse, own_lse)


def test_shares_depend_on_the_batch(hopper_way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for is not there anyway."""
    if hopper_way.is_gpu:
        pytest.skip("emulated: it forces a plan")
    monkeypatch.setattr(split, "choice", True)
    case = Cache((900, 500), (20, 60), 4, 1, 64, 64, {})
    with hopper_attention(monkeypatch, 7):
        held = Held(case, hopper_way)
        together = held.rows([(0, 0, 20), (1, 0, 60)], deterministic=False)
        alone = [held.rows([(i, 0, case.num_queries[i])], deterministic=False)[0] for i in (0, 1)]
    assert any(not torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_other_kernels_refuse(way: Way) -> None:
    """Those of GPUs before Hopper, and of pages that Hopper's do not take."""
    case = replace(Cache.drawn("refused", 100), page_size=3)
    with pytest.raises(TensorError, match="'batch' is what Hopper's kernels keep"):
        Held(case, way).rows([(0, 0, 1)])


@pytest.mark.parametrize("name", ["q", "k", "out"])
def test_what_they_do_not_take_is_named(
    hopper_way: Way, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {key: hopper_way.randn(2, 3, 2, 64).bfloat16() for key in ("q", "k", "v", "out")}
    x = tensors[name]
    tensors[name] = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
    said = f"found {name} of shape .*, 2 bytes behind a multiple of 16"
    with hopper_attention(monkeypatch, 7):
        with pytest.raises(TensorError, match=said):
            flash_attention(**tensors, deterministic="batch")
        row = tensors["v"][:1].expand(2, -1, -1, -1)
        with pytest.raises(TensorError, match=r"no element of them twice.* found q of shape"):
            flash_attention(row, tensors["v"], tensors["v"], deterministic="batch")
        lengths = torch.tensor([3, 3], dtype=torch.int32, device=x.device)
        with pytest.raises(TensorError, match="decode_attention: deterministic: 'batch' is"):
            decode_attention(
                row, tensors["v"], tensors["v"], cache_seqlens=lengths, deterministic="batch"
            )


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(DRAWN))
def test_tokens(hopper_way: Way, index: int) -> None:
    lot = random.Random(index)
    check(Held(Cache.drawn(index, lot.choice((300, 3000, 20_000))), hopper_way), lot, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_size", [1, 3, 64, 200])
def test_llama_steps(hopper_way: Way, batch_size: int) -> None:
    """Decode steps of 32 / 8 heads beside a chunk of 777 tokens and a whole prompt."""
    lot = random.Random(batch_size)
    lengths = tuple(lot.randrange(1, 6000) for _ in range(batch_size))
    held = Held(Cache(lengths, (1,) * batch_size, 32, 8, 128, 64, {}), hopper_way)
    everyone = held.rows([(i, 0, 1) for i in range(batch_size)])
    for i in range(min(batch_size, 20)):
        same_bits(held.alone(i, 0), everyone[i][0], name=f"sequence {i}")
    held = Held(Cache((777, 4096), (777, 4096), 32, 8, 128, 64, {}), hopper_way)
    whole = held.rows([(0, 0, 777), (1, 0, 4096)])
    for first, end in ((0, 512), (512, 1536), (1536, 4096)):
        same_bits(held.rows([(1, first, end)])[0], whole[1][first:end], name="chunk")
    for row in (0, 1, 63, 64, 1023, 1024, 2048, 4095):
        same_bits(held.alone(1, row), whole[1][row], name=f"row {row}")


@pytest.mark.parametrize("op", [flash_attention, flash_attention_qkvpacked, decode_attention])
def test_refusals(op: Any) -> None:
    x = torch.zeros(1, 1, 3, 32, dtype=torch.bfloat16)
    given: tuple[Any, ...] = (x,) * (1 if op is flash_attention_qkvpacked else 3)
    more: dict[str, Any] = {}
    if op is decode_attention:
        more["cache_seqlens"] = torch.ones(1, dtype=torch.int32)
    if op is flash_attention_qkvpacked:
        more |= {"num_heads": 1, "num_kv_heads": 1}
    with pytest.raises(TensorError, match=r"deterministic: expected True, False or 'batch'"):
        op(*given, **more, deterministic="yes")
    op(*given, **more, deterministic="batch")
    if op is decode_attention:
        with pytest.raises(TensorError, match=r"qkv_bias: expected None where deterministic"):
            op(*given, **more, deterministic="batch", qkv_bias=x[0, 0, 0])
