"""What bounds in the kernels cost: the ops of an earlier commit beside those of the working tree.

Once, in the repository (not on the GPU's machine): .old_tree/ gets the package of that commit under
another name, and its Hopper cubins. Keep the folder out of git.

    python tests/gpu/bounds_cost.py --prepare e312e16

Then, on a GPU of compute capability 9.0 (about two minutes; names of ops choose among them):

    python tests/gpu/bounds_cost.py [decode_attention ...]

Both run in one process on the same inputs, which are rotated past the L2, in CUDA graphs that share
their memory and alternate in random order. Prints medians in microseconds and their ratio; a ratio
of two medians is good to about 0.3 %.
"""

from __future__ import annotations

import argparse
import importlib
import io
import math
import os
import re
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
OLD_TREE, OLD, NEW = ROOT / ".old_tree", "kernel_hub_old", "kernel_hub"
CUBINS = re.compile(
    r"(append_kv|decode_attention|flash_attention\w*|grouped_linear\w*|qkv_linear\w*|rope|"
    r"merge_states)\.cubin"
)
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SEED = 12
# A launch of one package on one set of inputs: name of the package -> what it returns.
Launch = Callable[[str], Any]
# Name, bytes of a launch, launches, whether by the portable kernels.
Case = tuple[str, int, list[Launch], bool]


def prepare(commit: str) -> None:
    """Write .old_tree/: the package of a commit as `kernel_hub_old`, and cubins/ beside it."""
    names = ("kernel_hub", "cubins/sm90", "cubins/manifest.json")
    packed = subprocess.run(
        ["git", "archive", commit, *names], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive.getmembers():
            path = Path(member.name)
            if not member.isfile() or (
                path.suffix == ".cubin" and not CUBINS.fullmatch(path.name)
            ):  # fmt: skip
                continue
            reader = archive.extractfile(member)
            assert reader is not None
            data = reader.read()
            if path.suffix == ".py":
                data = re.sub(rb"\bkernel_hub\b", OLD.encode(), data)
            target = OLD_TREE / re.sub(r"^kernel_hub/", f"{OLD}/", member.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)


def op(package: str, name: str) -> Any:
    """An op of one of the packages."""
    return getattr(importlib.import_module(f"{package}.ops"), name)


def module(package: str, old: str, new: str) -> Any:
    """A module of one of the packages: where it lay in the old one, and where it lies."""
    return importlib.import_module(f"{package}.ops.{new if package == NEW else old}")


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16).to(dtype)


def int32(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def _sets(num_bytes: int, make: Callable[[], Launch]) -> tuple[int, list[Launch]]:
    """Enough sets of inputs for the L2."""
    timing = importlib.import_module("kernel_hub.measure.timing")
    return num_bytes, [make() for _ in range(timing.num_sets(num_bytes))]


def _case(name: str, num_bytes: int, make: Callable[[], Launch], is_portable: bool = False) -> Case:
    return (name, *_sets(num_bytes, make), is_portable)


def decode() -> Iterator[Case]:
    """32 query heads, 8 of the cache, d 128."""
    for batch, length, page, cache_dtype, appends in (
        (1, 8192, 0, BF16, False), (1, 8192, 16, BF16, True), (16, 4096, 16, BF16, False),
        (16, 4096, 16, E4M3, True), (64, 8192, 16, BF16, False), (64, 8192, 0, BF16, True),
    ):  # fmt: skip

        def make(
            batch: int = batch, length: int = length, page: int = page,
            kind: torch.dtype = cache_dtype, appends: bool = appends,
        ) -> Launch:  # fmt: skip
            rows = length + 16
            shape = (batch * rows // page, page) if page else (batch, rows)
            caches = [randn(*shape, 8, 128, dtype=kind) for _ in range(2)]
            options: dict[str, Any] = {"cache_seqlens": int32([length] * batch)}
            if page:
                order = torch.randperm(shape[0], device="cuda").int()
                options["block_table"] = order.view(batch, -1)
            if appends:
                options |= {name: randn(batch, 1, 8, 128) for name in "kv"}
            q = randn(batch, 1, 32, 128)
            return lambda package: op(package, "decode_attention")(q, *caches, **options)

        size = 2 * batch * length * 8 * 128 * cache_dtype.itemsize
        name = f"{batch} x {length}, page {page}, {str(cache_dtype)[6:]}{', new' * appends}"
        yield _case(name, size, make)


def _ragged(total: int, count: int) -> torch.Tensor:
    parts = torch.rand(count, generator=torch.Generator().manual_seed(SEED)).mul(3).exp()
    bounds = [0, *(parts.cumsum(0) / parts.sum() * total).long().tolist()]
    return int32(bounds)


def attention() -> Iterator[Case]:
    """Hopper's kernels, then the portable ones."""
    for is_portable in (False, True):
        for layout, batch, seqlen, head_dim, causal in (
            ("dense", 16, 512, 128, True), ("dense", 4, 4096, 128, True),
            ("dense", 4, 4096, 128, False), ("dense", 4, 4096, 64, True),
            ("dense", 2, 4096, 256, True), ("varlen", 16, 1024, 128, True),
            ("varlen", 16, 1024, 128, False), ("cache", 4, 4096, 128, False),
            ("paged 16", 4, 4096, 128, True), ("paged 64", 4, 4096, 128, True),
            ("alibi", 4, 1024, 128, True),
        ):  # fmt: skip
            if layout == "alibi" and not is_portable:
                continue

            def make(
                layout: str = layout, batch: int = batch, seqlen: int = seqlen,
                head_dim: int = head_dim, causal: bool = causal,
            ) -> Launch:  # fmt: skip
                heads = 2048 // head_dim
                lead = (batch * seqlen,) if layout == "varlen" else (batch, seqlen)
                options: dict[str, Any] = {"causal": causal}
                q = randn(*lead, heads, head_dim)
                if layout == "varlen":
                    bounds = _ragged(batch * seqlen, batch)
                    longest = int(bounds.diff().max())
                    options |= {f"cu_seqlens_{x}": bounds for x in "qk"}
                    options |= {f"max_seqlen_{x}": longest for x in "qk"}
                if layout == "alibi":
                    options["alibi_slopes"] = torch.rand(heads, device="cuda")
                if layout == "cache" or layout.startswith("paged"):
                    options["cache_seqlens"] = int32([seqlen - 5] * batch)
                if layout.startswith("paged"):
                    page = int(layout[6:])
                    lead = (batch * seqlen // page, page)
                    order = torch.randperm(lead[0], device="cuda").int()
                    options["block_table"] = order.view(batch, -1)
                k, v = (randn(*lead, heads, head_dim) for _ in "kv")
                return lambda package: op(package, "flash_attention")(q, k, v, **options)

            size = 4 * batch * seqlen * 2048 * 2
            name = f"{layout} {batch} x {seqlen}, d {head_dim}{', causal' * causal}"
            yield _case(name + ", portable" * is_portable, size, make, is_portable)


def attention_fp8() -> Iterator[Case]:
    """e4m3, Hopper's alone."""
    for layout, causal in (("dense", True), ("dense", False), ("varlen", True)):

        def make(layout: str = layout, causal: bool = causal) -> Launch:
            lead = (16384,) if layout == "varlen" else (4, 4096)
            q, k, v = (randn(*lead, 16, 128, dtype=E4M3) for _ in "qkv")
            options: dict[str, Any] = {"causal": causal}
            if layout == "varlen":
                bounds = _ragged(16384, 16)
                longest = int(bounds.diff().max())
                options |= {f"cu_seqlens_{x}": bounds for x in "qk"}
                options |= {f"max_seqlen_{x}": longest for x in "qk"}
            return lambda package: op(package, "flash_attention")(q, k, v, **options)

        yield _case(f"{layout}{', causal' * causal}", 5 * 16384 * 2048, make)


def attention_backward() -> Iterator[Case]:
    """Hopper's, then the portable."""
    for is_portable in (False, True):
        for layout, deterministic in (("dense", False), ("varlen", False), ("varlen", True)):

            def make(layout: str = layout, deterministic: bool = deterministic) -> Launch:
                lead = (8192,) if layout == "varlen" else (4, 2048)
                q, k, v, dout = (randn(*lead, 16, 128) for _ in range(4))
                tables: list[Any] = [None] * 4
                if layout == "varlen":
                    bounds = _ragged(8192, 8)
                    tables = [bounds, bounds, *[int(bounds.diff().max())] * 2]
                options = (True, None, (-1, -1), 0.0, None, *tables, None, None)
                run = module(NEW, "_attention_run", "attention.eager")
                out, lse = run.forward("flash_attention", q, k, v, None, True, options)
                grads = [torch.empty_like(q) for _ in range(3)]

                def launch(package: str) -> None:
                    run = module(package, "_attention_run", "attention.eager")
                    run.backward(
                        "flash_attention", dout, q, k, v, out, lse, *grads, deterministic, options
                    )

                return launch

            name = f"{layout}{', deterministic' * deterministic}{', portable' * is_portable}"
            yield _case(name, 8 * 8192 * 2048 * 2, make, is_portable)


def append() -> Iterator[Case]:
    """8 heads of 128, rotated, with 32 of q."""
    for batch, seqlen, kind in (
        (1, 1, "paged"), (64, 1, "paged"), (64, 1, "slots"), (4, 1024, "paged"),
        (4096, 1, "slots"), (4, 4096, "slots"),
    ):  # fmt: skip

        def make(batch: int = batch, seqlen: int = seqlen, kind: str = kind) -> Launch:
            total, pages = batch * seqlen, -(-seqlen // 16) + 1
            lead = (batch, seqlen) if kind == "paged" else (total,)
            q, k, v = randn(*lead, 32, 128), randn(*lead, 8, 128), randn(*lead, 8, 128)
            caches = [randn(batch * pages, 16, 8, 128) for _ in range(2)]
            cos, sin = (torch.rand(8192, 64, device="cuda") for _ in range(2))
            options: dict[str, Any] = {"q": q, "cos": cos, "sin": sin}
            if kind == "paged":
                order = torch.randperm(batch * pages, device="cuda").int()
                options["block_table"] = order.view(batch, pages)
                options["cache_seqlens"] = int32([7] * batch)
            else:
                options["slot_mapping"] = torch.randperm(batch * pages * 16, device="cuda")[:total]
                options["positions"] = torch.arange(total, device="cuda") % 8192
            return lambda package: op(package, "append_kv")(k, v, *caches, **options)

        yield _case(f"{batch} x {seqlen}, {kind}", 2 * batch * seqlen * 48 * 128 * 2, make)


def qkv() -> Iterator[Case]:
    """Llama 8B: 6144 x 4096."""
    for tokens in (1, 16, 64, 256, 1024, 4096):

        def make(tokens: int = tokens) -> Launch:
            x, w = randn(tokens, 4096), randn(6144, 4096)
            caches = [randn(tokens // 16 + 8, 16, 8, 128) for _ in range(2)]
            cos, sin = (torch.rand(8192, 64, device="cuda") for _ in range(2))
            slots = torch.randperm(caches[0].shape[0] * 16, device="cuda")[:tokens]
            at = torch.arange(tokens, device="cuda")
            return lambda package: op(package, "qkv_linear")(
                x, w, None, cos, sin, at, num_heads=32, num_kv_heads=8, k_cache=caches[0],
                v_cache=caches[1], slot_mapping=slots,
            )  # fmt: skip

        yield _case(f"{tokens} tokens", 2 * (6144 * 4096 + tokens * 10240), make)


def rope() -> Iterator[Case]:
    """32 + 8 heads of 128."""
    for tokens, strided in ((1, False), (64, False), (1024, False), (8192, False), (8192, True)):

        def make(tokens: int = tokens, strided: bool = strided) -> Launch:
            room = randn(tokens, 48, 128)
            q, k = room[:, :32], room[:, 32:40]
            if not strided:
                q, k = q.contiguous(), k.contiguous()
            cos, sin = (torch.rand(8192, 64, device="cuda") for _ in range(2))
            at = torch.randint(0, 8192, (tokens,), device="cuda")
            return lambda package: op(package, "rope")(q, k, cos, sin, at)

        yield _case(f"{tokens} tokens{', strided' * strided}", 4 * tokens * 40 * 128, make)


def grouped() -> Iterator[Case]:
    """Mixtral's and Qwen3's gate_up; Hopper's kernels."""
    for experts, rows, n, k in (
        (8, 2, 28672, 4096), (8, 2048, 28672, 4096), (128, 128, 1536, 2048), (128, 8192, 1536, 2048)
    ):  # fmt: skip

        def make(experts: int = experts, rows: int = rows, n: int = n, k: int = k) -> Launch:
            a, b, offsets = randn(rows, k), randn(experts, n, k), _ragged(rows, experts)
            return lambda package: op(package, "grouped_linear")(a, b, offsets)

        yield _case(f"{experts} experts, {rows} rows, {n} x {k}", 2 * experts * n * k, make)


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "decode_attention": decode, "flash_attention": attention, "flash_attention_fp8": attention_fp8,
    "flash_attention_backward": attention_backward, "append_kv": append, "qkv_linear": qkv,
    "rope": rope, "grouped_linear": grouped,
}  # fmt: skip


def _take_portable(is_portable: bool) -> None:
    for package in (OLD, NEW):
        for old, new in (
            ("_flash_attention_sm90", "attention.forward_sm90"),
            ("_flash_attention_backward_sm90", "attention.backward.sm90"),
        ):
            module(package, old, new).is_enabled = not is_portable


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prepare", metavar="COMMIT", help="write .old_tree/ and end")
    parser.add_argument("--rounds", type=int, default=45)
    parser.add_argument("ops", nargs="*", metavar="op")
    args = parser.parse_args()
    if args.prepare:
        prepare(args.prepare)
        return 0
    if unknown := [name for name in args.ops if name not in CASES]:
        parser.error(f"there are {', '.join(CASES)}, not {', '.join(unknown)}")
    if not (OLD_TREE / OLD).is_dir():
        parser.error(f"{OLD_TREE} is not there: see --prepare")
    os.environ["KERNEL_HUB_TUNED"] = "0"
    sys.path[:0] = [str(ROOT), str(OLD_TREE)]
    timing = importlib.import_module("kernel_hub.measure.timing")
    torch.manual_seed(SEED)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, seed {SEED}")
    print(f"{'case':72} {'old us':>9} {'new us':>9} {'new/old':>8}")
    begin = time.monotonic()
    timer = timing.GraphTimer(rounds=args.rounds)
    for name in args.ops or CASES:
        ratios = []
        for label, num_bytes, launches, is_portable in CASES[name]():
            _take_portable(is_portable)
            with torch.no_grad():
                found = timer.measure(
                    {p: [(lambda f=f, p=p: f(p)) for f in launches] for p in (OLD, NEW)}, num_bytes
                )
            old, new = (statistics.median(found[package]) for package in (OLD, NEW))
            ratios.append(new / old)
            print(f"{name + ': ' + label:72} {old:9.2f} {new:9.2f} {new / old:8.4f}", flush=True)
            del launches
            torch.cuda.empty_cache()
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        print(f"{name + ': geometric mean':92} {mean:8.4f}", flush=True)
    print(f"{time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
