"""Ops of tokens, and copy_blocks, with tables that lie, drawn by lot between guard bands.

An id of no row gives zeros, a position of no row nan, a draft of no token ends the row's, a pair of
no page is not copied; the others are right.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from arena import Arena, outside
from bits import same_bits
from led_outside import check_said, forget

from kernel_hub.ops import copy_blocks, embedding, pad_input, unpad_input, verify_draft, verify_tree
from kernel_hub.testing import reference_tokens
from kernel_hub.testing.compare import check

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FAR = (2**32, 2**32 + 1, -(2**32), 2**62, -(2**63), 2**63 - 1)


def _indices(generator: random.Random, count: int, rows: int) -> torch.Tensor:
    """Some of them are no rows."""
    kind = generator.choice((torch.int32, torch.int64))
    far = _FAR if kind == torch.int64 else ()
    found = [
        generator.randrange(rows) if generator.random() < 0.8
        else generator.choice((*far, outside(generator, rows)))
        for _ in range(count)
    ]  # fmt: skip
    return torch.tensor(found, dtype=kind)


def _is_outside(indices: torch.Tensor, count: int) -> torch.Tensor:
    return (indices < 0) | (indices >= count)


def hostile_embedding(generator: random.Random, arena: Arena) -> None:
    """What is looked up, and that nothing else was read or written."""
    choose = generator.choice
    seed = torch.Generator().manual_seed(generator.randrange(1 << 30))
    dtype, tokens = choose(_DTYPES), choose((1, 7, 40))
    rows, hidden, max_position = choose((1, 9, 70)), choose((1, 8, 72, 200)), choose((1, 30))
    first_id = choose((0, 0, 3))
    vocab_size = choose((first_id + rows, first_id + rows + 9, rows))
    free: dict[str, Any] = {
        "ids": _indices(generator, tokens, vocab_size),
        "weight": torch.randn(rows, hidden, generator=seed).to(dtype),
    }
    if choose((False, True)):
        free["position_weight"] = torch.randn(max_position, hidden, generator=seed).to(dtype)
        free["positions"] = _indices(generator, tokens, max_position)
    options = {"first_id": first_id, "vocab_size": vocab_size, "scale": choose((None, 1.5))}
    print(dtype, rows, hidden, max_position, options, free["ids"], free.get("positions"))
    given = arena.put_all(**{name: x.to(arena.device) for name, x in free.items()})
    out = arena.empty("out", (tokens, hidden), dtype)
    forget(out)
    embedding(**given, **options, out=out)
    arena.check()
    is_bad = _is_outside(free["ids"], vocab_size)
    certain = {"ids"} if bool(is_bad.any()) else set[str]()
    if "positions" in free:
        asked = ~is_bad & ~_is_outside(free["ids"].long() - first_id, rows)
        if bool((asked & _is_outside(free["positions"], max_position)).any()):
            certain.add("positions")
    check_said("embedding", out, certain)
    truth, own = (
        reference_tokens.embedding(**free, **options, dtype=each) for each in (torch.float64, dtype)
    )
    check(out.cpu(), truth, own)


def hostile_verify(generator: random.Random, arena: Arena) -> None:
    """Drafts that are no tokens end their rows; the others are verified."""
    choose = generator.choice
    seed = torch.Generator().manual_seed(generator.randrange(1 << 30))
    batch, drafts, size = choose((1, 3)), choose((1, 4)), choose((1, 9, 300))
    logits = torch.randn(batch, drafts + 1, size, generator=seed).to(choose(_DTYPES))
    ids = _indices(generator, batch * drafts, size).long().view(batch, drafts)
    free: dict[str, Any] = {
        "draft_ids": ids, "target_logits": logits, "seed": torch.arange(batch),
        "temperature": torch.zeros(batch),
    }  # fmt: skip
    if choose((False, True)):
        free["draft_probs"] = torch.rand(batch, drafts, size, generator=seed).softmax(-1)
    print(batch, drafts, size, logits.dtype, ids.tolist())
    given = arena.put_all(**{name: x.to(arena.device) for name, x in free.items()})
    outs = {
        "out_ids": arena.empty("out_ids", (batch, drafts + 1), torch.int64),
        "num_accepted": arena.empty("num_accepted", (batch,), torch.int32),
    }
    forget(logits.to(arena.device))
    found, num = verify_draft(**given, **outs)
    arena.check()
    ends, best = [], logits.argmax(-1)
    for row in ids.tolist():
        ends.append(next((i for i, each in enumerate(row) if not 0 <= each < size), drafts))
    told = [row[end] for row, end in zip(ids.tolist(), ends, strict=True) if end < drafts]
    check_said("verify_draft", found, {"draft_ids"} if any(x != -1 for x in told) else set())
    for row, end in enumerate(ends):
        kept = next((i for i in range(end) if ids[row, i] != best[row, i]), end)
        assert int(num[row]) == kept
        wanted = [*best[row, : kept + 1].tolist(), *[-1] * (drafts - kept)]
        assert found[row].tolist() == wanted


def hostile_tree(generator: random.Random, arena: Arena) -> None:
    """A draft that is no token, or behind one that is not before it, is not in the tree."""
    choose = generator.choice
    seed = torch.Generator().manual_seed(generator.randrange(1 << 30))
    batch, drafts, size = choose((1, 3)), choose((1, 4, 9)), choose((1, 9, 300))
    logits = torch.randn(batch, drafts + 1, size, generator=seed).to(choose(_DTYPES))
    ids = _indices(generator, batch * drafts, min(size, 2)).long().view(batch, drafts)
    places = [generator.randrange(-1, c) for _ in range(batch) for c in range(drafts)]
    for at in range(len(places)):
        if generator.random() < 0.2:
            places[at] = choose((-2, drafts, 2**31 - 1, -(2**31), at % drafts))
    parents = torch.tensor(places, dtype=torch.int32).view(batch, drafts)
    free = {
        "draft_ids": ids, "parents": parents, "target_logits": logits, "seed": torch.arange(batch)
    }  # fmt: skip
    if choose((False, True)):
        free["draft_probs"] = torch.rand(batch, drafts, size, generator=seed).softmax(-1)
    print(batch, drafts, size, logits.dtype, ids.tolist(), parents.tolist())
    given: dict[str, Any] = arena.put_all(**{name: x.to(arena.device) for name, x in free.items()})
    outs = [
        arena.empty("out_ids", (batch, drafts + 1), torch.int64),
        arena.empty("num_accepted", (batch,), torch.int32),
        arena.empty("path", (batch, drafts), torch.int32),
    ]
    forget(logits.to(arena.device))
    names = ("out_ids", "num_accepted", "path")
    verify_tree(**given, **dict(zip(names, outs, strict=True)))
    arena.check()
    is_token = ~_is_outside(ids, size)
    is_before = (parents >= -1) & (parents < torch.arange(drafts))
    certain = {"draft_ids"} if bool((~is_token & (ids != -1)).any()) else set[str]()
    if bool((is_token & ~is_before).any()):
        certain.add("parents")
    check_said("verify_tree", outs[0], certain)
    # Of drafts that are in the tree, the same.
    right = torch.where(is_token & is_before, ids, -1)
    whole = parents.where(is_before, -1)
    wanted = {name: x.to(arena.device) for name, x in free.items()}
    wanted |= {"draft_ids": right.to(arena.device), "parents": whole.to(arena.device)}
    for found, own in zip(outs, verify_tree(**wanted), strict=True):
        same_bits(found, own)


def hostile_rows(generator: random.Random, arena: Arena) -> None:
    """Bounds that fall or lie outside are those of no rows, both ways."""
    choose = generator.choice
    batch, seqlen, total = choose((1, 3, 9)), choose((1, 4)), choose((1, 12))
    row, dtype = choose((1, 7, 8, 40)), choose((torch.int8, torch.float32))
    bounds = sorted(generator.randrange(total + 1) for _ in range(batch + 1))
    for at in range(batch + 1):
        if generator.random() < 0.3:
            bounds[at] = choose((-1, -(2**31), 2**31 - 1, total + 1, generator.randrange(total)))
    pads = choose((False, True))
    shape = (total, row) if pads else (batch, seqlen, row)
    seed = torch.Generator().manual_seed(generator.randrange(1 << 30))
    free = torch.randint(1, 100, shape, generator=seed).to(dtype)
    print(bounds, seqlen, total, row, dtype, pads)
    x = arena.put("x", free)
    table = arena.put("cu_seqlens", torch.tensor(bounds, dtype=torch.int32))
    out = arena.empty("out", (batch, seqlen, row) if pads else (total, row), dtype)
    forget(out)
    (pad_input if pads else unpad_input)(x, table, seqlen if pads else total, out=out)
    arena.check()
    pairs = itertools.pairwise(bounds)
    is_bad = any(not 0 <= start <= end <= total for start, end in pairs)
    name = "pad_input" if pads else "unpad_input"
    check_said(name, out, {"cu_seqlens"} if is_bad else set())
    if pads or bounds == sorted(bounds):
        same_bits(
            out.cpu(), getattr(reference_tokens, name)(free, bounds, seqlen if pads else total)
        )


def hostile_copies(generator: random.Random, arena: Arena) -> None:
    """Pages of the first half to those of the second, some of them none."""
    seed = torch.Generator().manual_seed(generator.randrange(1 << 30))
    num_pages, size = generator.choice((2, 9)), generator.choice((8, 18, 640))
    half = num_pages // 2
    pairs = [[generator.randrange(half), to] for to in range(half, num_pages)]
    for pair in pairs:
        if generator.random() < 0.5:
            far = (*_FAR, -1, outside(generator, num_pages))
            pair[generator.randrange(2)] = generator.choice(far)
    free = [torch.randn(num_pages, size, generator=seed).half() for _ in "kv"]
    print(num_pages, size, pairs)
    caches = [arena.put(f"{n}_cache", x) for n, x in zip("kv", free, strict=True)]
    mapping = arena.put("block_mapping", torch.tensor(pairs))
    forget(caches[0])
    copy_blocks(caches[0], caches[1], mapping)
    arena.check()
    is_bad = any(min(pair) >= 0 and max(pair) >= num_pages for pair in pairs)
    check_said("copy_blocks", caches[0], {"block_mapping"} if is_bad else set())
    for found, before in zip(caches, free, strict=True):
        right = before.clone()
        for source, target in pairs:
            if min(source, target) >= 0 and max(source, target) < num_pages:
                right[target] = before[source]
        same_bits(found.cpu(), right)
