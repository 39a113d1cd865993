"""One case of decode_attention: made from a few numbers, run, held against fp64.

What lies past the end of a sequence in a cache is nan and table entries that no length reaches are
garbage; the caches may change only where new tokens go.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from attention_cases import GARBAGE_PAGES, check_lse
from bits import same_bits
from drawn_sinks import draw_sinks

from kernel_hub.ops import decode_attention
from kernel_hub.testing import reference
from kernel_hub.testing.compare import attention_parts_atol, check
from kernel_hub.testing.guard import Guarded
from kernel_hub.testing.reference_attention import reference_attention

CACHES = ("contiguous", "heads_first", "layers", "paged", "paged_heads_first")
LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 199, 255, 256, 1023, 1024, 3000)
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class DecodeCase:
    """lengths: the keys of each sequence, its new tokens included."""

    cache: str = "contiguous"
    dtype: str = "bf16"
    is_e4m3: bool = False
    has_scales: bool = False
    head_dim: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    seqlen_q: int = 1
    lengths: tuple[int, ...] = (33, 70)
    page_size: int = 16
    appends: bool = False
    rotary_dim: int = 0  # 0: no rope
    interleaved: bool = False
    has_bias: bool = False
    window_left: int = -1
    softcap: float = 0.0
    alibi: str = ""
    softmax_scale: float | None = None
    num_splits: int = 0
    seed: int = 0
    sinks: str = ""  # or their dtype

    def features(self) -> list[str]:
        """What of the op this case uses, to be counted."""
        found = [f"decode {self.cache}", f"decode {self.dtype}", f"decode {self.seqlen_q} new"]
        found += ["decode e4m3"] * self.is_e4m3 + ["decode append"] * self.appends
        found += ["decode rope"] * (self.rotary_dim > 0) + ["decode bias"] * self.has_bias
        found += ["decode window"] * (self.window_left >= 0) + ["decode alibi"] * bool(self.alibi)
        found += ["decode sinks"] * bool(self.sinks)
        found += ["decode softcap"] * (self.softcap > 0)
        found += [f"decode splits {self.num_splits}"]
        return found


def random_decode_case(generator: random.Random) -> DecodeCase:
    """Any cache with any features."""
    is_e4m3 = generator.random() < 0.25
    is_fp32 = not is_e4m3 and generator.random() < 0.2
    step, most = 16 if is_e4m3 else 8, 128 if is_fp32 else 256
    head_dim = generator.choice((64, 128)) if generator.random() < 0.6 else (
        step * generator.randrange(16 // step, most // step + 1)
    )  # fmt: skip
    seqlen_q = generator.choice((1, 1, 1, 2, 4, 7, 16))
    kv_heads = generator.choice((1, 2, 3, 8))
    appends = generator.random() < 0.5
    least = seqlen_q if appends else 0
    lengths = tuple(
        max(least, generator.choice(LENGTHS) if generator.random() < 0.7
            else generator.randrange(4500))
        for _ in range(generator.choice((1, 1, 2, 3, 7)))
    )  # fmt: skip
    half = head_dim // 2
    return DecodeCase(
        cache=generator.choice(CACHES),
        dtype="fp32" if is_fp32 else generator.choice(("fp16", "bf16")),
        is_e4m3=is_e4m3,
        has_scales=generator.random() < 0.7,
        head_dim=head_dim,
        num_heads=kv_heads * generator.choice((1, 2, 4, 8)),
        num_kv_heads=kv_heads,
        seqlen_q=seqlen_q,
        lengths=lengths,
        page_size=generator.choice((1, 2, 4, 7, 8, 16, 24, 32, 64, 100, 128, 256)),
        appends=appends,
        rotary_dim=generator.choice((0, head_dim, head_dim, 2 * (half // 2))) if appends else 0,
        interleaved=generator.random() < 0.5,
        has_bias=appends and generator.random() < 0.4,
        window_left=generator.choice((-1, -1, -1, 0, 1, 50, 128, 1000)),
        softcap=generator.choice((0.0, 0.0, 0.0, 2.0, 20.0)),
        alibi=generator.choice(("", "", "", "heads", "batch")),
        softmax_scale=generator.choice((None, None, 0.3)),
        num_splits=generator.choice((0, 0, 0, 1, 3, 8)),
        seed=generator.randrange(1 << 30),
        sinks=generator.choice(("", "", "fp32", "bf16", "fp16")),
    )


def random_short_case(generator: random.Random) -> DecodeCase:
    """Attention alone, as the kernels of a cluster an item take it: any rows, pages of whole
    tiles."""
    case = random_decode_case(generator)
    head_dim = generator.choice((64, 128, 192, 256, 8 * generator.randrange(2, 33)))
    return replace(
        case, dtype=generator.choice(("fp16", "bf16")), is_e4m3=False, has_scales=False,
        head_dim=head_dim, num_heads=case.num_kv_heads * generator.choice((1, 2, 5, 7, 8, 24)),
        seqlen_q=generator.randrange(1, 17), page_size=16 * generator.randrange(1, 17),
        appends=False, rotary_dim=0, has_bias=False, window_left=-1, softcap=0.0, alibi="",
        num_splits=0,
    )  # fmt: skip


def run_decode(case: DecodeCase, device: str) -> float:
    """Check a case; the largest error there was, in units of what is allowed."""
    generator = torch.Generator(device).manual_seed(case.seed)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[case.dtype]
    cache_dtype = E4M3 if case.is_e4m3 else dtype
    batch_size, seqlen_q, head_dim = len(case.lengths), case.seqlen_q, case.head_dim
    heads, kv_heads = case.num_heads, case.num_kv_heads
    before = [length - seqlen_q if case.appends else length for length in case.lengths]

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def int32(values: Any) -> torch.Tensor:
        return torch.tensor(values, device=device, dtype=torch.int32)

    packed = randn(batch_size, seqlen_q, heads + 2 * kv_heads, head_dim)
    q, k, v = packed.split((heads, kv_heads, kv_heads), 2)
    k_cache, v_cache, block_table = _caches(case, cache_dtype, device, before, randn)
    options: dict[str, Any] = {
        "softmax_scale": case.softmax_scale, "softcap": case.softcap,
        "window_size": (case.window_left, -1), "block_table": block_table,
    }  # fmt: skip
    if case.alibi:
        options["alibi_slopes"] = rand(*((batch_size,) * (case.alibi == "batch")), heads)
    if case.sinks:
        options["sinks"] = draw_sinks(case.sinks, heads, case.seed, device)
    more: dict[str, Any] = {"cache_seqlens": int32(before), "num_splits": case.num_splits}
    if case.appends:
        more |= {"k": k, "v": v}
    if case.rotary_dim:
        angles = 3 * rand(max(case.lengths) + 1, case.rotary_dim // 2)
        more |= {"cos": angles.cos(), "sin": angles.sin(), "interleaved": case.interleaved}
    if case.has_bias:
        more["qkv_bias"] = randn((heads + 2 * kv_heads) * head_dim)
    scales = [torch.ones(kv_heads, device=device)] * 2
    if case.is_e4m3 and case.has_scales:
        scales = [0.5 + rand(kv_heads), 0.5 + rand(kv_heads)]
        more |= {"k_scale": scales[0], "v_scale": scales[1]}

    old = [k_cache.clone(), v_cache.clone()]
    guarded = Guarded(q.shape, dtype, device)
    out, lse = decode_attention(
        q, k_cache, v_cache, **options, **more, out=guarded.tensor, return_lse=True
    )
    guarded.check()
    ratios = []
    positions = int32(before).long()[:, None] + torch.arange(seqlen_q, device=device)

    def turned(x: torch.Tensor, first_head: int, kind: torch.dtype, turns: bool) -> torch.Tensor:
        x = x.to(kind)
        if case.has_bias:
            bias = more["qkv_bias"].view(-1, head_dim)
            x = x + bias[first_head : first_head + x.shape[2]].to(kind)
        if case.rotary_dim and turns:
            x = reference.rope(
                x, more["cos"], more["sin"], positions, interleaved=case.interleaved, dtype=kind
            )
        return x

    for name, cache, was, new, scale, first_head in (
        ("k_cache", k_cache, old[0], k, scales[0], heads),
        ("v_cache", v_cache, old[1], v, scales[1], heads + kv_heads),
    ):
        if case.appends:
            where = _places(case, positions, block_table)
            truth = turned(new, first_head, torch.float64, name == "k_cache")
            own = turned(new, first_head, dtype, name == "k_cache")
            found = cache[where].double()
            if case.is_e4m3:
                truth, own = ((x / scale.to(x.dtype)[:, None]) for x in (truth, own))
                own = own.float().clamp(-448, 448).to(E4M3)
                truth = truth.clamp(-448, 448)
            ratios.append(_ratio(check(found.float(), truth, own.float(), name=name)))
            was[where] = cache[where]
        same_bits(_bytes(cache), _bytes(was), name=f"{name}, where nothing goes")

    options["cache_seqlens"] = int32(case.lengths)
    results = []
    for kind in (torch.float64, dtype):
        keys, values = (
            cache.to(kind) * scale.to(kind)[:, None]
            for cache, scale in zip((k_cache, v_cache), scales, strict=True)
        )
        results.append(
            reference_attention(
                turned(q, 0, kind, True), keys, values, **options, causal=True, dtype=kind
            )
        )
    (truth, truth_lse), (own, own_lse) = results
    atol = attention_parts_atol(truth, dtype, case.softcap)
    ratios.append(_ratio(check(out, truth, own, atol=atol)))
    if case.rotary_dim or case.has_bias or case.is_e4m3:  # q was rounded on its way
        ratios.append(_ratio(check(lse, truth_lse, own_lse, atol=2e-3, name="lse")))
    else:
        ratios.append(_ratio(check_lse(lse, truth_lse, 4.0, case.softcap)))
    return max(ratios)


def _caches(
    case: DecodeCase, dtype: torch.dtype, device: str, before: list[int], randn: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """k_cache, v_cache and the block table; nan where no token is yet."""
    kv_heads, head_dim, page_size = case.num_kv_heads, case.head_dim, case.page_size
    batch_size, longest = len(case.lengths), max(case.lengths) + case.seed % 5

    def nans(*shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), device=device, dtype=torch.float32).to(dtype)

    if not case.cache.startswith("paged"):
        caches = []
        for _ in range(2):
            if case.cache == "contiguous":
                cache = nans(batch_size, longest, kv_heads, head_dim)
            elif case.cache == "heads_first":
                cache = nans(batch_size, kv_heads, longest, head_dim).transpose(1, 2)
            else:
                cache = nans(3, batch_size, kv_heads, longest, head_dim)[1].transpose(1, 2)
            for row, length in enumerate(before):
                cache[row, :length] = randn(length, kv_heads, head_dim).to(dtype)
            caches.append(cache)
        return caches[0], caches[1], None
    counts = [-(-length // page_size) for length in case.lengths]
    num_pages, most = sum(counts) + 3, max(1, max(counts) + case.seed % 3)
    order = torch.randperm(
        num_pages, generator=torch.Generator().manual_seed(case.seed)
    ).tolist()  # fmt: skip
    table = [[GARBAGE_PAGES[(r + c) % 4] for c in range(most)] for r in range(batch_size)]
    pages = [nans(num_pages, page_size, kv_heads, head_dim) for _ in range(2)]
    if case.cache == "paged_heads_first":
        pages = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in pages]
    for row, count in enumerate(counts):
        for column in range(count):
            page = table[row][column] = order.pop()
            filled = min(page_size, max(0, before[row] - column * page_size))
            for x in pages:
                x[page, :filled] = randn(filled, kv_heads, head_dim).to(dtype)
    return pages[0], pages[1], torch.tensor(table, device=device, dtype=torch.int32)


def _places(
    case: DecodeCase, positions: torch.Tensor, block_table: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first two indices of the new tokens in a cache."""
    if block_table is None:
        rows = torch.arange(len(case.lengths), device=positions.device)
        return rows[:, None].expand_as(positions), positions
    pages = block_table.long().gather(1, positions // case.page_size)
    return pages, positions % case.page_size


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def _ratio(result: Any) -> float:
    return float(result.error / result.limit) if result.limit else 0.0
