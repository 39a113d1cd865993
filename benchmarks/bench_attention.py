"""flash_attention beside torch's flash (FlashAttention-2) and cuDNN backends, FlashAttention-3 and
FlashInfer, in one run.

Each contender's output is held against fp64 first, on the last queries of a sequence. Burst: 6 ms
of launches after 35 ms of idling, contenders in random order, medians of the rounds. Sustained:
the same after half a second of launches back to back, when the card runs at its power cap. Inputs
of a case are larger than the L2. TFLOP/s count 4 * head_dim operations a (query, key) pair seen.
Writes benchmarks/results/<gpu>_attention.json; `plot_attention.py` draws it.

Peers that are not installed or cannot run a case are left out, and named on stderr.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from _ops_common import DTYPES, OURS, RESULTS, _gpu_token
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernel_hub import ops
from kernel_hub.ops import _flash_attention_sm90 as hopper
from kernel_hub.testing import results
from kernel_hub.testing.compare import compare
from kernel_hub.testing.reference_attention import reference_attention

PORTABLE = f"{OURS} portable"
FA2, CUDNN, FA3, FLASHINFER = "torch flash", "torch cuDNN", "FlashAttention-3", "FlashInfer"
CHECKED_ROWS = 128
BUSY_MS, IDLE_S, WARM_S = 6.0, 0.035, 0.5
Launch = Callable[[], torch.Tensor]
# head_dim -> heads of the protocol: 2048 columns in all.
HEADS = {64: 32, 128: 16, 256: 8}
SHAPES = ((32, 512), (16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384))
MODELS = {"Llama 8B": (32, 8), "Llama 70B": (64, 8), "Llama 70B TP8": (8, 1)}


@dataclass
class Case:
    """One shape: contenders, its operations, and what to hold their outputs against.

    checks: (rows of out, truth in fp64, the same reference in the tensors' dtype).
    """

    name: str
    flops: float
    contenders: dict[str, Callable[[], Launch]]
    checks: list[tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, torch.Tensor]] = field(
        default_factory=list
    )

    def check(
        self,
        rows: Callable[[torch.Tensor], torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
    ) -> None:
        """Hold `rows` of every output against attention of q (the last queries) over k and v."""
        truth, own = (
            reference_attention(q, k, v, causal=causal, dtype=dtype)[0]
            for dtype in (torch.float64, q.dtype)
        )
        self.checks.append((rows, truth, own))


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def portable(**options: Any) -> torch.Tensor:
    """Our op without Hopper's own kernels."""
    before, hopper.is_enabled = hopper.is_enabled, False
    try:
        return ops.flash_attention(**options)
    finally:
        hopper.is_enabled = before


def ours(**options: Any) -> dict[str, Callable[[], Launch]]:
    """Our op; on Hopper also its portable kernels."""
    found = {OURS: lambda: partial(ops.flash_attention, **options)}
    if torch.cuda.get_device_capability() == hopper.COMPUTE_CAPABILITY:
        found[PORTABLE] = lambda: partial(portable, **options)
    return found


@cache
def fa3() -> Any:
    """FlashAttention-3's forward op, from the fa3-fwd wheel."""
    import importlib.util

    spec = importlib.util.find_spec("fa3_fwd")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("no fa3_fwd package")
    for library in Path(spec.submodule_search_locations[0]).glob("*.so"):
        torch.ops.load_library(str(library))
    return torch.ops.fa3_fwd.fwd


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, backend: Any) -> Launch:
    views = [x.transpose(1, 2) for x in (q, k, v)]
    grouped = q.shape[2] != k.shape[2]

    def launch() -> torch.Tensor:
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                *views, is_causal=causal, enable_gqa=grouped
            )
        return out.transpose(1, 2)

    return launch


def dense(
    title: str, batch: int, seqlen: int, heads: tuple[int, int], head_dim: int, causal: bool,
    dtype: torch.dtype,
) -> Case:  # fmt: skip
    """(batch, seqlen, heads, head_dim) contiguous."""
    q = randn(batch, seqlen, heads[0], head_dim, dtype=dtype)
    k, v = (randn(batch, seqlen, heads[1], head_dim, dtype=dtype) for _ in range(2))

    def use_fa3() -> Launch:
        op = fa3()
        scale = 1 / math.sqrt(head_dim)
        return lambda: op(q, k, v, softmax_scale=scale, is_causal=causal, num_splits=1)[0]

    token = next(name for name, kind in DTYPES.items() if kind == dtype)
    mask = "causal" if causal else "full"
    case = Case(
        f"{title} {batch} x {seqlen} h{heads[0]}/{heads[1]} d{head_dim} {mask} {token}",
        4.0 * batch * heads[0] * seqlen * seqlen * head_dim * (0.5 if causal else 1),
        {
            **ours(q=q, k=k, v=v, causal=causal),
            FA2: lambda: sdpa(q, k, v, causal, SDPBackend.FLASH_ATTENTION),
            CUDNN: lambda: sdpa(q, k, v, causal, SDPBackend.CUDNN_ATTENTION),
            FA3: use_fa3,
        },
    )
    for b in {0, batch - 1}:
        rows = partial(lambda b, out: out[b : b + 1, -CHECKED_ROWS:, : heads[0] // heads[1]], b)
        case.check(rows, rows(q), k[b : b + 1, :, :1], v[b : b + 1, :, :1], causal)
    return case


def varlen(heads: tuple[int, int], head_dim: int, causal: bool, dtype: torch.dtype) -> Case:
    """16 lengths, log-uniform from 64 to 8k, the same every time."""
    draw = random.Random(0)
    lengths = [round(64 * 128 ** draw.random()) for _ in range(16)]
    starts = [sum(lengths[:i]) for i in range(17)]
    bounds = torch.tensor(starts, dtype=torch.int32, device="cuda")
    longest, total = max(lengths), starts[-1]
    q = randn(total, heads[0], head_dim, dtype=dtype)
    k, v = (randn(total, heads[1], head_dim, dtype=dtype) for _ in range(2))
    scale = 1 / math.sqrt(head_dim)
    tables: dict[str, Any] = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    tables |= {"max_seqlen_q": longest, "max_seqlen_k": longest}

    def use_fa2() -> Launch:
        # It takes as many key heads as query heads, or groups by itself; torch's op does the same.
        op = torch.ops.aten._flash_attention_forward
        return lambda: op(
            q, k, v, bounds, bounds, longest, longest, 0.0, causal, False, scale=scale
        )[0]

    def use_fa3() -> Launch:
        op = fa3()
        return lambda: op(q, k, v, softmax_scale=scale, is_causal=causal, num_splits=1, **tables)[0]

    token = next(name for name, kind in DTYPES.items() if kind == dtype)
    case = Case(
        f"varlen 16 x 64..8192 h{heads[0]}/{heads[1]} d{head_dim} "
        f"{'causal' if causal else 'full'} {token}",
        sum(4.0 * heads[0] * n * n * head_dim * (0.5 if causal else 1) for n in lengths),
        {**ours(q=q, k=k, v=v, causal=causal, **tables), FA2: use_fa2, FA3: use_fa3},
    )
    for i in (0, lengths.index(longest)):
        start, end = starts[i], starts[i + 1]
        first = max(start, end - CHECKED_ROWS)
        rows = partial(lambda a, b, out: out[None, a:b, : heads[0] // heads[1]], first, end)
        case.check(rows, rows(q), k[None, start:end, :1], v[None, start:end, :1], causal)
    return case


def paged(
    page_size: int, batch: int, seqlen_q: int, seqlen_k: int, heads: tuple[int, int],
    head_dim: int, dtype: torch.dtype,
) -> Case:  # fmt: skip
    """Causal prefill of seqlen_q new tokens over seqlen_k in shuffled pages."""
    per_sequence = -(-seqlen_k // page_size)
    num_pages = batch * per_sequence
    q = randn(batch, seqlen_q, heads[0], head_dim, dtype=dtype)
    k, v = (randn(num_pages, page_size, heads[1], head_dim, dtype=dtype) for _ in range(2))
    table = torch.randperm(num_pages, device="cuda").to(torch.int32).view(batch, per_sequence)
    lengths = torch.full((batch,), seqlen_k, dtype=torch.int32, device="cuda")
    gathered = [x[table[:1].long()].flatten(1, 2)[:, :seqlen_k].contiguous() for x in (k, v)]
    dense_k, dense_v = (x[table.long()].flatten(1, 2)[:, :seqlen_k].contiguous() for x in (k, v))

    def use_flashinfer() -> Launch:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        wrapper = BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD"
        )
        steps = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        last = (seqlen_k - 1) % page_size + 1
        wrapper.plan(
            steps * seqlen_q, steps * per_sequence, table.flatten(),
            torch.full((batch,), last, dtype=torch.int32, device="cuda"),
            heads[0], heads[1], head_dim, page_size, causal=True, q_data_type=dtype,
            kv_data_type=dtype,
        )  # fmt: skip
        flat = q.flatten(0, 1)
        return lambda: wrapper.run(flat, (k, v)).view(q.shape)

    token = next(name for name, kind in DTYPES.items() if kind == dtype)
    hidden = seqlen_q * (seqlen_q - 1) / 2
    case = Case(
        f"paged {page_size} {batch} x {seqlen_q} over {seqlen_k} h{heads[0]}/{heads[1]} "
        f"d{head_dim} causal {token}",
        4.0 * batch * heads[0] * (seqlen_q * seqlen_k - hidden) * head_dim,
        {
            OURS: lambda: partial(
                ops.flash_attention, q, k, v, causal=True, block_table=table, cache_seqlens=lengths
            ),
            f"{OURS} contiguous": lambda: partial(
                ops.flash_attention, q, dense_k, dense_v, causal=True
            ),
            FLASHINFER: use_flashinfer,
        },
    )
    rows = partial(lambda out: out[:1, -CHECKED_ROWS:, : heads[0] // heads[1]])
    case.check(rows, rows(q), gathered[0][:, :, :1], gathered[1][:, :, :1], True)
    return case


def cases(options: argparse.Namespace) -> Iterator[tuple[Callable[[], Case], bool]]:
    """(how to make it, whether it is measured sustained too)."""
    sections = options.sections
    bf16 = torch.bfloat16
    if "protocol" in sections:
        shapes = SHAPES[::2] + SHAPES[-1:] if options.quick else SHAPES
        for dtype in (bf16,) if options.quick else (bf16, torch.float16):
            for head_dim, heads in HEADS.items():
                for causal in (False, True):
                    for batch, seqlen in shapes:
                        long = seqlen == 16384 and dtype == bf16 and not options.quick
                        yield partial(
                            dense, "prefill", batch, seqlen, (heads, heads), head_dim, causal, dtype
                        ), long  # fmt: skip
    if "models" in sections:
        for name, heads in MODELS.items():
            for batch, seqlen in ((4, 4096),) if options.quick else ((4, 4096), (1, 32768)):
                yield partial(dense, name, batch, seqlen, heads, 128, True, bf16), False
    if "varlen" in sections:
        for causal in (True,) if options.quick else (False, True):
            yield partial(varlen, (16, 16), 128, causal, bf16), False
    if "paged" in sections:
        for page_size in (16, 64):
            yield partial(paged, page_size, 4, 4096, 4096, (32, 8), 128, bf16), False
            if not options.quick:
                yield partial(paged, page_size, 4, 1024, 16384, (32, 8), 128, bf16), False


def usable(case: Case, wanted: Sequence[str]) -> dict[str, Launch]:
    """The contenders that run and are right; raises AssertionError where ours is wrong."""
    launches = {}
    for name, make in case.contenders.items():
        if not name.startswith(OURS) and name not in wanted:
            continue
        try:
            launch = make()
            out = launch()
            torch.cuda.synchronize()
            wrong = ""
            for rows, truth, own in case.checks:
                result = compare(rows(out), truth, own, name=f"{case.name}: {name}")
                if not (result.ok or (not name.startswith(OURS) and result.error < 0.05)):
                    wrong = result.message
        except Exception as error:  # a peer that fails is left out, and said
            if name == OURS:
                raise
            wrong = f"{type(error).__name__}: {str(error)[:200]}"
        if wrong and name.startswith(OURS):
            raise AssertionError(wrong)
        if wrong:
            print(f"left out in {case.name}: {name}: {wrong}", file=sys.stderr)
        else:
            launches[name] = launch
    return launches


def milliseconds(launch: Launch, count: int) -> float:
    """Of one launch, `count` of them in a row."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        launch()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / count


def burst(launches: dict[str, Launch], rounds: int) -> dict[str, list[float]]:
    """Samples in ms a launch, at the clocks of a card that was idle."""
    counts = {
        name: max(1, round(BUSY_MS / milliseconds(launch, 2))) for name, launch in launches.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in launches}
    draw = random.Random(0)
    for _ in range(rounds):
        for name in draw.sample(list(launches), len(launches)):
            time.sleep(IDLE_S)
            samples[name].append(milliseconds(launches[name], counts[name]))
    return samples


def sustained(launches: dict[str, Launch], rounds: int) -> dict[str, list[float]]:
    """The same at the clocks of a card that has been busy."""
    samples: dict[str, list[float]] = {}
    for name, launch in launches.items():
        each = milliseconds(launch, 2)
        milliseconds(launch, round(1e3 * WARM_S / each))
        count = max(1, round(2 * BUSY_MS / each))
        samples[name] = [milliseconds(launch, count) for _ in range(rounds)]
    return samples


def main() -> int:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sections", default="protocol,models,varlen,paged")
    parser.add_argument(
        "--peers", help=f"default: {FA2},{CUDNN},{FA3}, and without --quick {FLASHINFER} (compiles)"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="fewer shapes and rounds")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<gpu>_attention.json")
    options = parser.parse_args()
    options.sections = options.sections.split(",")
    if options.quick:
        options.rounds = 5
    peers = [FA2, CUDNN, FA3] + ([] if options.quick else [FLASHINFER])
    wanted = options.peers.split(",") if options.peers else peers
    out = options.out or RESULTS / f"{_gpu_token(results.environment()['gpu'])}_attention.json"
    began = time.monotonic()
    rows: list[results.Row] = []
    ratios: dict[str, list[float]] = {}
    failures = []
    for make, is_long in cases(options):
        case = make()
        try:
            launches = usable(case, wanted)
        except AssertionError as error:
            failures.append(str(error))
            continue
        ways = {"burst": burst, "sustained": sustained} if is_long else {"burst": burst}
        for way, measure in ways.items():
            rates = {
                name: [case.flops / ms / 1e9 for ms in values]
                for name, values in measure(launches, options.rounds).items()
            }
            rows += results.summarise(
                "attention", f"{case.name} {way}", rates, "TFLOP/s", ratio_to=FA2
            )
            medians = {name: statistics.median(values) for name, values in rates.items()}
            for peer, rate in medians.items():
                if peer != OURS:
                    ratios.setdefault(peer, []).append(medians[OURS] / rate)
            shown = ", ".join(f"{name} {rate:.0f}" for name, rate in medians.items())
            print(f"{case.name} {way}: {shown} TFLOP/s", flush=True)
        results.write(out, rows)  # what there is so far: a peer may hang in its compiler
        del case, launches
        torch.cuda.empty_cache()
    for peer, values in ratios.items():
        print(
            f"attention: {OURS} / {peer}: geometric mean {statistics.geometric_mean(values):.3f}, "
            f"worst {min(values):.3f}, {len(values)} cases"
        )
    print(f"{time.monotonic() - began:.0f} s; {out}")
    for failure in failures:
        print(f"WRONG {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
