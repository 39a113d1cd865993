# ruff: noqa
"""Trees of drafts, caches of int8 and with scales of tokens, attention over them: on one GPU, in
about 240 s, the most important first.

    python scratch/next_gpu.py [--seed 1] [--seconds 230] [--only abcd] [--dry]
    BASE=/path/to/tree/before python scratch/next_gpu.py     b needs it: kernel_hub/ and cubins/

a: each feature by fresh lot against fp64, what is written and the pages around it poisoned. b: calls
without the features give the bits of $BASE and take no longer, both trees by turns. c: what each
feature costs beside the nearest form without it, and beside FlashInfer where it is installed. d:
compute-sanitizer over small cases. --dry: a little of each on the CPU.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("TREE", Path(__file__).resolve().parents[1]))
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / x) for x in (
    ".", "ops", "ops/attention", "ops/kv_cache", "gpu")), str(ROOT / "benchmarks")]  # fmt: skip

import torch

from kernel_hub.ops import append_kv, decode_attention, flash_attention

E4M3, INT8, BF16, FP16 = torch.float8_e4m3fn, torch.int8, torch.bfloat16, torch.float16
FORMS = {"16 bits": (None, ""), "e4m3 heads": (E4M3, "heads"), "int8 heads": (INT8, "heads"),
         "int8 tokens": (INT8, "tokens"), "e4m3 tokens": (E4M3, "tokens")}  # fmt: skip
DRY = "--dry" in sys.argv
DEVICE = "cpu" if DRY else "cuda"
failed: list[str] = []


def say(*words: Any) -> None:
    print(*words, flush=True)


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


# ---- a: against fp64 -----------------------------------------------------------------------------


def tree_words(lot: random.Random, n: int) -> list[int]:
    words: list[int] = []
    for i in range(n):
        parent = lot.randrange(-1, i)
        words.append(1 << i | (words[parent] if parent >= 0 else 0))
    return words


def of_bytes(kind: torch.dtype, *shape: int) -> torch.Tensor:
    """Values as a cache has them."""
    if kind == INT8:
        return torch.randint(-127, 128, shape, device=DEVICE, dtype=torch.int8)
    return randn(*shape, dtype=torch.float32).mul(30).to(E4M3)


def poisoned(kind: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.full(shape, 127, device=DEVICE, dtype=torch.int8) if kind == INT8
            else torch.full(shape, float("nan"), device=DEVICE).to(kind))  # fmt: skip


class Pages:
    """Caches of sequences in shuffled pages, and what they hold in fp64; all else is poison."""

    def __init__(
        self, lot: random.Random, form: str, lengths: list[int], kv_heads: int, dim: int,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        kind, per = FORMS[form]
        size = lot.choice((1, 16, 16, 64, 256))
        columns = -(-max(*lengths, 1) // size)
        pages = len(lengths) * columns + 3
        self.table = torch.randperm(pages, device=DEVICE)[: len(lengths) * columns].int()
        self.table = self.table.view(len(lengths), columns)
        self.caches = [poisoned(kind or dtype, pages, size, kv_heads, dim) for _ in "kv"]
        self.values: list[list[torch.Tensor]] = [[], []]
        shape = {"heads": (kv_heads,), "tokens": (pages, size, kv_heads)}.get(per, (0,))
        scales = [torch.full(shape, float("nan"), device=DEVICE) for _ in "kv"]
        for i in range(2):
            if per == "heads":
                scales[i] = torch.rand(kv_heads, device=DEVICE) / 40 + 0.01
            for row, length in enumerate(lengths):
                at = torch.arange(length, device=DEVICE)
                where = self.table[row].long()[at // size], at % size
                new = of_bytes(kind, length, kv_heads, dim) if kind else randn(
                    length, kv_heads, dim, dtype=dtype)  # fmt: skip
                self.caches[i].view(torch.uint8)[where] = new.view(torch.uint8)
                exact = new.double()
                if per == "tokens":
                    found = (torch.rand(length, kv_heads, device=DEVICE) * 8 - 9).exp2() / 8
                    scales[i][where] = found
                    exact = exact * found[..., None].double()
                elif per:
                    exact = exact * scales[i][:, None].double()
                self.values[i].append(exact)
        end = "_cache" if per == "tokens" else ""
        self.options = {f"{x}_scale{end}": s for x, s in zip("kv", scales, strict=True) if per}
        self.before = [x.clone() for x in self.caches]

    def untouched(self) -> bool:
        pairs = zip(self.caches, self.before, strict=True)
        return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


def truth_of(q: torch.Tensor, pages: Pages, row: int, seen: torch.Tensor) -> torch.Tensor:
    """(n, heads, dim) in fp64; seen: (n, tokens)."""
    keys, values = (x[row] for x in pages.values)
    group = q.shape[1] // keys.shape[1]
    grouped = q.double().unflatten(1, (keys.shape[1], group))
    scores = torch.einsum("nhgd,thd->hgnt", grouped, keys) * q.shape[-1] ** -0.5
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1).nan_to_num()
    return torch.einsum("hgnt,thd->nhgd", weights, values).flatten(1, 2)


def close(out: torch.Tensor, truth: torch.Tensor) -> None:
    limit = (3e-3 if out.dtype == FP16 else 1.6e-2) * max(truth.abs().max().item(), 1e-3)
    error = (out.double() - truth).abs().max().item()
    assert error <= limit, f"off by {error:.3g}, limit {limit:.3g}"


def long_steps(number: int) -> None:
    """Decode as models have it: long ragged caches of each form, a tree's mask or none."""
    lot = random.Random(f"long {number}")
    form, dtype = lot.choice(tuple(FORMS)), lot.choice((BF16, FP16))
    kv_heads, n, dim = (
        lot.choice((1, 2, 8)),
        lot.choice((1, 2, 4, 8, 16)),
        lot.choice((64, 128, 256)),
    )
    heads, longest = kv_heads * lot.choice((1, 4, 8)), 60 if DRY else lot.choice((200, 3000, 20000))
    count = 2 if DRY else lot.choice((1, 3, 17) if longest > 3000 else (1, 7, 40))
    lengths = [lot.randrange(n, longest + n) for _ in range(count)]
    pages = Pages(lot, form, lengths, kv_heads, dim, dtype)
    q = randn(count, n, heads, dim, dtype=dtype) / (4 if "heads" in form else 1)
    words = [tree_words(lot, n) if lot.random() < 0.7 else [(2 << i) - 1 for i in range(n)]
             for _ in lengths]  # fmt: skip
    mask = torch.tensor(words, dtype=lot.choice((torch.int32, torch.int64)), device=DEVICE)
    is_chain = words == [[(2 << i) - 1 for i in range(n)]] * count
    out = torch.full_like(q, float("nan"))
    decode_attention(
        q, *pages.caches, cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        block_table=pages.table, out=out, num_splits=lot.choice((0, 0, 0, 3)), **pages.options,
        **({} if is_chain and lot.random() < 0.5 else {"tree_mask": mask}),
    )  # fmt: skip
    assert pages.untouched(), "wrote to the caches"
    bits = torch.arange(n, device=DEVICE)
    for row, length in enumerate(lengths):
        seen = torch.ones(n, length, dtype=torch.bool, device=DEVICE)
        seen[:, length - n :] = (mask[row, :, None] >> bits & 1).bool()
        close(out[row], truth_of(q[row], pages, row, seen))


def chunks(number: int) -> None:
    """Chunks of prompts over long caches of bytes by flash_attention."""
    lot = random.Random(f"chunks {number}")
    form, dtype = lot.choice(tuple(FORMS)[1:]), lot.choice((BF16, FP16))
    kv_heads, n = lot.choice((1, 2, 8)), 20 if DRY else lot.choice((17, 64, 300, 1000))
    heads, dim = kv_heads * lot.choice((1, 4)), lot.choice((64, 128, 256))
    lengths = [lot.randrange(n, 60 if DRY else 6000) for _ in range(lot.choice((1, 3)))]
    pages = Pages(lot, form, lengths, kv_heads, dim, dtype)
    q = randn(len(lengths), n, heads, dim, dtype=dtype) / 4
    out = torch.full_like(q, float("nan"))
    flash_attention(
        q, *pages.caches, causal=True, block_table=pages.table, out=out, **pages.options,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    assert pages.untouched(), "wrote to the caches"
    for row, length in enumerate(lengths):
        at, place = torch.arange(length, device=DEVICE), torch.arange(n, device=DEVICE)[:, None]
        close(out[row], truth_of(q[row], pages, row, at <= length - n + place))


def lots() -> dict[str, Callable[[int], None]]:
    """The tests' own lots, small and ugly, by numbers they have not had; then long ones."""
    import pytest
    import test_decode_trees as trees
    import test_decode_trees_bytes as trees_bytes
    import test_flash_attention_byte_caches as byte_caches
    import test_scaled_caches as scaled
    from ways import Way

    way = Way("torch" if DRY else "gpu", DEVICE)

    def with_patch(test: Callable[..., Any], number: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            test(way, number, patch)

    def over_bytes(number: int) -> None:
        case, kind, byte_caches.MODULE.most_bytes = byte_caches.drawn(
            number, (16, 64, 96, 128, 192, 256))  # fmt: skip
        byte_caches.run(case, kind, DEVICE)
        byte_caches.MODULE.most_bytes = 1 << 29

    found = {
        "long steps": long_steps, "chunks": chunks, "flash over bytes": over_bytes,
        "trees": functools.partial(with_patch, trees.test_by_lot),
        "windows of trees": functools.partial(trees.test_windows_and_alibi, way),
        "trees over bytes": functools.partial(trees_bytes.test_by_lot, way),
        "scaled decode": functools.partial(with_patch, scaled.test_decode_by_lot),
        "scaled append": functools.partial(scaled.test_append_by_lot, way),
    }  # fmt: skip
    if not DRY:
        chains = trees.test_the_mask_of_a_chain_gives_the_same_bits
        found["chains have the bits of none"] = functools.partial(chains, way)
    return found


def correctness(seed: int, seconds: float) -> None:
    drawn, end = lots(), time.monotonic() + seconds
    counts, wrong = dict.fromkeys(drawn, 0), dict.fromkeys(drawn, 0)
    for index in range(1 if DRY else 400):
        for name, run in drawn.items():
            if time.monotonic() > end:
                break
            number, counts[name] = seed * 1000 + index, counts[name] + 1
            try:
                run(number)
            except Exception as error:  # each is said, none ends the others
                wrong[name] += 1
                failed.append(f"{name} {number}")
                if wrong[name] <= 4:
                    what = f"{type(error).__name__}: {str(error)[:300]}"
                    say(f"  WRONG {name}, number {number}: {what}")
    for name, count in counts.items():
        say(f"  {name}: {count - wrong[name]} of {count} right (seed {seed})")
    for form, (kind, _) in FORMS.items():
        if kind:
            say(f"  {form}: rms error of a step, caches by append_kv, beside fp64 of the tokens "
                f"{rms_error(form):.4f}")  # fmt: skip


def scales_for(
    form: str, k: torch.Tensor, v: torch.Tensor, pages: int, size: int
) -> dict[str, Any]:
    kind, per = FORMS[form]
    if per == "tokens":
        shape = (pages, size, k.shape[-2])
        return {f"{x}_scale_cache": torch.zeros(shape, device=DEVICE) for x in "kv"}
    most = 127.0 if kind == INT8 else 448.0
    found = [x.float().abs().amax((0, 1, 3)) / most for x in (k, v)]
    return {"k_scale": found[0], "v_scale": found[1]} if per else {}


def rms_error(form: str) -> float:
    torch.manual_seed(3)
    tokens, kv_heads, heads, dim = 64 if DRY else 2048, 8, 32, 128
    k, v = (randn(1, tokens, kv_heads, dim) for _ in "kv")
    k *= (torch.rand(1, tokens, 1, 1, device=DEVICE) * 2).exp().to(BF16)
    caches = [torch.zeros(tokens // 16, 16, kv_heads, dim, device=DEVICE).to(FORMS[form][0])
              for _ in "kv"]  # fmt: skip
    more = scales_for(form, k, v, tokens // 16, 16)
    append_kv(k, v, *caches, slot_mapping=torch.arange(tokens, device=DEVICE), **more)
    q = randn(1, 1, heads, dim) / 4
    table = torch.arange(tokens // 16, device=DEVICE).int()[None]
    lengths = torch.tensor([tokens], dtype=torch.int32, device=DEVICE)
    out = decode_attention(q, *caches, cache_seqlens=lengths, block_table=table, **more)
    keys, values = (x[0].double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    p = torch.softmax(torch.einsum("hd,thd->ht", q[0, 0].double(), keys) / dim**0.5, -1)
    truth = torch.einsum("ht,thd->hd", p, values)
    return ((out[0, 0].double() - truth).norm() / truth.norm()).item()


# ---- times ---------------------------------------------------------------------------------------


def graph_us(run: Callable[[int], Any], rounds: int = 5, launches: int = 20) -> float:
    """Of a launch in a CUDA graph of some, the caches rotated by its index; the median round."""
    if DRY:
        run(0)
        return 1.0
    for i in range(2):
        run(i)
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(i)
    for _ in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / launches)
    return statistics.median(times[1:])


# ---- b: beside the tree before -------------------------------------------------------------------

# batch, tokens, new, heads, kv heads, head_dim, cache ("" bf16), window, page size, appends
SHAPES = (
    (1, 8192, 1, 32, 8, 128, "", -1, 16, False), (16, 4096, 1, 32, 8, 128, "", -1, 0, False),
    (64, 2048, 1, 32, 8, 128, "", -1, 16, False), (64, 2048, 1, 32, 8, 128, "", 1023, 16, False),
    (64, 4096, 1, 64, 8, 64, "", 127, 16, False), (16, 8192, 4, 32, 8, 128, "", -1, 0, False),
    (16, 4096, 16, 32, 8, 128, "", -1, 16, False), (16, 8192, 1, 32, 8, 128, "e4m3", -1, 16, False),
    (16, 8192, 4, 32, 8, 256, "e4m3", -1, 0, False), (16, 4096, 1, 16, 8, 256, "", -1, 16, False),
    (32, 2048, 1, 32, 8, 128, "", -1, 16, True), (8, 2048, 1, 16, 4, 128, "fp32", -1, 0, False),
    (1, 1024, 1, 32, 8, 128, "", -1, 0, False), (8, 16384, 2, 64, 8, 64, "e4m3", -1, 16, True),
)  # fmt: skip


class Step:
    """A step of SHAPES, the same numbers in whichever tree."""

    def __init__(self, index: int) -> None:
        batch, tokens, n, heads, kv_heads, dim, cache, self.window, size, appends = SHAPES[index]
        if DRY:
            batch, tokens = 2, 64
        torch.manual_seed(index)
        dtype = torch.float32 if cache == "fp32" else BF16
        kind = E4M3 if cache == "e4m3" else dtype
        shape = (batch, tokens, kv_heads, dim)
        if size:
            shape = (batch * tokens // size, size, kv_heads, dim)
        bytes_each = batch * tokens * kv_heads * dim * 2 * kind.itemsize
        copies = 1 if DRY else max(1, min(6, (200 << 20) // bytes_each + 1))
        make = functools.partial(randn, dtype=dtype)
        self.caches = [[make(*shape).to(kind) for _ in "kv"] for _ in range(copies)]
        self.q, self.out = make(batch, n, heads, dim), make(batch, n, heads, dim)
        lengths = torch.randint(tokens // 2, tokens - n, (batch,), device=DEVICE, dtype=torch.int32)
        self.options: dict[str, Any] = {"cache_seqlens": lengths}
        if size:
            pages = torch.randperm(batch * tokens // size, device=DEVICE).int()
            self.options["block_table"] = pages.view(batch, -1)
        if cache == "e4m3":
            self.options |= {
                x: torch.rand(kv_heads, device=DEVICE) + 0.5 for x in ("k_scale", "v_scale")
            }
        if appends:
            angles = torch.rand(tokens + 20, dim // 2, device=DEVICE)
            self.options |= {"k": make(batch, n, kv_heads, dim), "v": make(batch, n, kv_heads, dim),
                             "cos": angles.cos(), "sin": angles.sin()}  # fmt: skip
        self.options["window_size"] = (self.window, -1)

    def bits(self) -> str:
        found = hashlib.sha256()
        for splits in (0, 3):
            out, lse = decode_attention(
                self.q, *self.caches[0], num_splits=splits, return_lse=True, **self.options
            )
            for x in (out, lse, *(self.caches[0] if "k" in self.options else ())):
                found.update(x.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return found.hexdigest()[:16]

    def us(self) -> float:
        return graph_us(
            lambda i: decode_attention(
                self.q, *self.caches[i % len(self.caches)], out=self.out, **self.options
            )
        )


def work() -> None:
    """Answers the parent: `bits I` and `us I`."""
    import kernel_hub

    say(json.dumps({"tree": str(Path(kernel_hub.__file__).parents[1])}))
    last: tuple[int, Step] | None = None
    for line in sys.stdin:
        what, index = line.split()
        if last is None or last[0] != int(index):
            last = None
            if not DRY:
                torch.cuda.empty_cache()
            last = int(index), Step(int(index))
        say(json.dumps(last[1].bits() if what == "bits" else last[1].us()))


class Worker:
    """A process of one tree."""

    def __init__(self, tree: str) -> None:
        command = [sys.executable, __file__, "work", *(["--dry"] if DRY else [])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tree,
            env={**os.environ, "TREE": tree, "PYTHONPATH": tree},
        )  # fmt: skip
        found = json.loads(self.read())["tree"]
        if Path(found).resolve() != Path(tree).resolve():
            raise RuntimeError(f"{tree} was asked, {found} is what was imported")

    def read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended: {self.process.wait()}")
        return line

    def ask(self, what: str, index: int) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what} {index}\n")
        self.process.stdin.flush()
        return json.loads(self.read())


def beside_base(seconds: float) -> None:
    base, end = os.environ.get("BASE"), time.monotonic() + seconds
    if not base:
        say("  BASE names no tree: left out")
        return
    sums = [
        {name: archs["sm90"]["sha256"] for name, archs in json.loads(
            (Path(tree) / "cubins/manifest.json").read_text())["cubins"].items() if "sm90" in archs}
        for tree in (base, ROOT)
    ]  # fmt: skip
    changed = [x for x in sums[1] if sums[0].get(x) not in (None, sums[1][x])]
    say(
        f"  cubins of sm90 that changed: {', '.join(changed)}; new: {', '.join(sums[1].keys() - sums[0])}"
    )
    workers = [Worker(base), Worker(str(ROOT))]
    ratios = []
    for index, shape in enumerate(SHAPES[:2] if DRY else SHAPES):
        if time.monotonic() > end:
            say(f"  out of time before {shape}")
            break
        bits = [worker.ask("bits", index) for worker in workers]
        times: list[list[float]] = [[], []]
        for round_ in range(1 if DRY else 6):
            for which in ((0, 1), (1, 0))[round_ % 2]:
                times[which].append(workers[which].ask("us", index))
        before, after = (statistics.median(x) for x in times)
        ratios.append(after / before)
        is_same = bits[0] == bits[1]
        if not is_same:
            failed.append(f"bits of {shape}")
        say(f"  {'same bits' if is_same else 'OTHER BITS'} {after:.2f} us, before {before:.2f}: "
            f"{after / before:.3f} (least {min(times[1]) / min(times[0]):.3f})  {shape}")  # fmt: skip
    if ratios:
        say(f"  geometric mean {statistics.geometric_mean(ratios):.4f}, most {max(ratios):.3f}")
    for worker in workers:
        worker.process.kill()


# ---- c: what the features cost -------------------------------------------------------------------


def flashinfer_decode(
    q: torch.Tensor, caches: list[list[torch.Tensor]], table: torch.Tensor, tokens: int, size: int
) -> Callable[[int], Any]:
    """Its decode of the same pages, planned; ImportError where it is not installed."""
    from lot import attention_peers as peers

    run = peers.flashinfer_paged(
        table.cpu() if DRY else table, [1] * q.shape[0], [tokens] * q.shape[0],
        (q.shape[2], caches[0][0].shape[2], q.shape[3]), size, q.dtype,
    )  # fmt: skip
    return lambda i: run(q[:, 0], tuple(caches[i % len(caches)]))


def decode_forms(shape: tuple[int, int, int, int, int]) -> Iterator[tuple[str, float]]:
    batch, tokens, heads, kv_heads, dim = (2, 64, 4, 2, 64) if DRY else shape
    pages, size = batch * tokens // 16, 16
    q, table = (
        randn(batch, 1, heads, dim),
        torch.randperm(pages, device=DEVICE).int().view(batch, -1),
    )
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(q)
    for form, (kind, _) in FORMS.items():
        bytes_each = 2 * pages * size * kv_heads * dim * (1 if kind else 2)
        copies = 1 if DRY else max(1, min(6, (200 << 20) // bytes_each + 1))
        caches = [[randn(pages, size, kv_heads, dim).to(kind or BF16) for _ in "kv"]
                  for _ in range(copies)]  # fmt: skip
        more = scales_for(form, caches[0][0].float(), caches[0][1].float(), pages, size)
        if "tokens" in form:
            more = {name: x + 0.01 for name, x in more.items()}
        yield (
            form,
            graph_us(
                lambda i, caches=caches, more=more: decode_attention(
                    q,
                    *caches[i % len(caches)],
                    cache_seqlens=lengths,
                    block_table=table,
                    out=out,
                    **more,
                )
            ),
        )
        if not kind:
            try:
                yield "FlashInfer 16 bits", graph_us(
                    flashinfer_decode(q, caches, table, tokens, size))  # fmt: skip
            except Exception as error:
                say(f"  (no FlashInfer: {type(error).__name__} {str(error)[:80]})")


def tree_times(shape: tuple[int, ...]) -> Iterator[tuple[str, float]]:
    batch, tokens, n, heads, kv_heads, dim, e4m3 = (2, 64, 4, 4, 2, 64, 0) if DRY else shape
    kind = E4M3 if e4m3 else BF16
    bytes_each = 2 * batch * tokens * kv_heads * dim * kind.itemsize
    copies = 1 if DRY else max(1, min(6, (200 << 20) // bytes_each + 1))
    caches = [[randn(batch, tokens, kv_heads, dim).to(kind) for _ in "kv"] for _ in range(copies)]
    q, out = randn(batch, n, heads, dim), randn(batch, n, heads, dim)
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=DEVICE)
    lot = random.Random(1)
    words = [tree_words(lot, n) for _ in range(batch)]
    mask = torch.tensor(words, dtype=torch.int32, device=DEVICE)
    for name, more in (
        ("no mask", {}),
        ("by parts", {"num_splits": 2}),
        ("tree", {"tree_mask": mask}),
    ):
        yield (
            name,
            graph_us(
                lambda i, more=more: decode_attention(
                    q, *caches[i % len(caches)], cache_seqlens=lengths, out=out, **more
                )
            ),
        )


def append_forms(tokens: int) -> Iterator[tuple[str, float]]:
    heads, kv_heads, dim = 32, 8, 128
    q, k, v = (randn(1, tokens, n, dim) for n in (heads, kv_heads, kv_heads))
    weight, angles = randn(dim), torch.rand(tokens, dim // 2, device=DEVICE)
    slots, out_q = torch.randperm(tokens, device=DEVICE), torch.empty_like(q)
    for form, (kind, _) in FORMS.items():
        pages = -(-tokens // 16)
        caches = [
            torch.zeros(pages, 16, kv_heads, dim, device=DEVICE).to(kind or BF16) for _ in "kv"
        ]
        more = scales_for(form, k, v, pages, 16)
        cos, sin = angles.cos(), angles.sin()
        yield form, graph_us(
            lambda i, caches=caches, more=more, cos=cos, sin=sin: append_kv(
                k, v, *caches, slot_mapping=slots, positions=slots, q=q, out_q=out_q, cos=cos,
                sin=sin, q_norm_weight=weight, k_norm_weight=weight, **more,
            )
        )  # fmt: skip


def chunk_forms(shape: tuple[int, ...]) -> Iterator[tuple[str, float]]:
    from kernel_hub.ops.attention.caches import widened
    from kernel_hub.ops.attention.problem import Options

    batch, n, tokens, heads, kv_heads, dim = (2, 20, 64, 4, 2, 64) if DRY else shape
    pages = batch * tokens // 16
    q, table = (
        randn(batch, n, heads, dim),
        torch.randperm(pages, device=DEVICE).int().view(batch, -1),
    )
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=DEVICE)
    given = {"causal": True, "block_table": table, "cache_seqlens": lengths}
    for form, (kind, _) in FORMS.items():
        k, v = (randn(pages, 16, kv_heads, dim).to(kind or BF16) for _ in "kv")
        more = scales_for(form, k.float(), v.float(), pages, 16)
        yield form, graph_us(lambda i, k=k, v=v, more=more: flash_attention(q, k, v, **given, **more),
                             launches=5)  # fmt: skip
        if form in ("e4m3 heads", "int8 tokens") and not DRY:
            scales = widened.CacheScales(*(more.get(x) for x in (
                "k_scale", "v_scale", "k_scale_cache", "v_scale_cache")))  # fmt: skip
            options = Options(causal=True, block_table=table, cache_seqlens=lengths)
            plan = widened._plan(q, k, v, scales, None, options)
            us = graph_us(
                lambda i, k=k, v=v, plan=plan, scales=scales, options=options: [
                    widened._widened(share, q, k, v, scales, options) for share in plan.shares
                ], launches=5,
            )  # fmt: skip
            moved = 6 * batch * tokens * kv_heads * dim
            yield f"  its widening ({moved / us / 1e6:.2f} TB/s)", us
        if not kind and not DRY:
            try:
                from lot import attention_peers as peers

                run = peers.flashinfer_paged(
                    table, [n] * batch, [tokens] * batch, (heads, kv_heads, dim), 16, BF16, "fa3"
                )
                yield "FlashInfer (fa3) 16 bits", graph_us(
                    lambda i, run=run, k=k, v=v: run(q.flatten(0, 1), (k, v)), launches=5)  # fmt: skip
            except Exception as error:
                say(f"  (no FlashInfer: {type(error).__name__} {str(error)[:80]})")


def costs(seconds: float) -> None:
    end = time.monotonic() + seconds
    jobs: list[tuple[str, Callable[[Any], Iterator[tuple[str, float]]], Any]] = []
    for shape in ((16, 4096, 32, 8, 128), (1, 8192, 32, 8, 128), (64, 2048, 32, 8, 128),
                  (16, 4096, 16, 8, 256), (128, 1024, 64, 8, 64)):  # fmt: skip
        jobs.append((f"decode {shape}", decode_forms, shape))
    for trees in ((1, 8192, 8, 32, 8, 128, 0), (16, 1024, 4, 32, 8, 128, 0), (16, 8192, 4, 32, 8, 128, 0),
                  (16, 4096, 16, 32, 8, 128, 0), (16, 8192, 4, 32, 8, 256, 1)):  # fmt: skip
        jobs.append((f"trees {trees}", tree_times, trees))
    for chunk in ((1, 512, 8192, 32, 8, 128), (4, 256, 16384, 32, 8, 128), (16, 17, 2048, 28, 4, 128),
                  (1, 1024, 32768, 32, 8, 128), (1, 17, 131072, 64, 8, 128)):  # fmt: skip
        jobs.append((f"chunk {chunk}", chunk_forms, chunk))
    jobs += [(f"append {tokens}", append_forms, tokens) for tokens in (1, 512, 3072, 8192)]
    order = sorted(range(len(jobs)), key=lambda i: (i % 5, i))  # the first of each kind first
    for number in order[:4] if DRY else order:
        name, run, shape = jobs[number]
        if time.monotonic() > end:
            say(f"  out of time before {name}")
            return
        found = list(run(shape))
        say(f"  {name}: " + ", ".join(f"{form} {us:.1f}" for form, us in found))


# ---- d: compute-sanitizer ------------------------------------------------------------------------


def small() -> None:
    """A few launches of every kernel that is new or changed, for compute-sanitizer."""
    import sanitize_attention as cases

    cases.DTYPES = {"bf16": BF16}
    cases.HEAD_DIMS = (64,) if DRY else (64, 128, 200)
    with torch.no_grad():
        cases.byte_caches(DEVICE)
        cases.decode_bytes(DEVICE)
        for form, (kind, _) in FORMS.items():
            if kind:
                rms_error(form)
    if not DRY:
        torch.cuda.synchronize()
    say("small cases were launched")


def sanitized(seconds: float) -> None:
    if DRY:
        small()
        return
    end = time.monotonic() + seconds
    for tool in ("memcheck", "racecheck"):
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable,
                   __file__, "small"]  # fmt: skip
        left = end - time.monotonic()
        try:
            found = subprocess.run(command, capture_output=True, text=True, timeout=max(left, 5))
        except (OSError, subprocess.TimeoutExpired) as error:
            say(f"  {tool}: {type(error).__name__} (by hand: {' '.join(command)})")
            continue
        if found.returncode:
            failed.append(tool)
        say(f"  {tool}: exit {found.returncode}; {(found.stdout + found.stderr).strip()[-400:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=230.0)
    parser.add_argument("--only", default="abcd")
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    say(torch.cuda.get_device_name() if not DRY else "the CPU", ROOT)
    parts: list[tuple[str, str, float, Callable[[float], None]]] = [
        ("a", "against fp64", 0.28, functools.partial(correctness, given.seed)),
        ("b", "beside BASE", 0.24, beside_base), ("c", "times, us", 0.24, costs),
        ("d", "sanitizer", 0.24, sanitized),
    ]  # fmt: skip
    for letter, name, share, run in parts:
        if letter in given.only:
            since = time.monotonic()
            say(f"{letter}: {name}")
            try:
                run(share * given.seconds)
            except Exception as error:
                failed.append(f"{letter}: {type(error).__name__}: {str(error)[:300]}")
            say(f"  ({time.monotonic() - since:.0f} s)")
    say(f"FAILED: {failed[:20]}" if failed else "all went well")
    return len(failed) > 0


if __name__ == "__main__":
    if "work" in sys.argv[1:2]:
        work()
    elif "small" in sys.argv[1:2]:
        small()
    else:
        raise SystemExit(main())
