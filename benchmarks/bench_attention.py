"""flash_attention beside torch's flash (FlashAttention-2) and cuDNN backends, FlashAttention-3 and
FlashInfer, in one run.

Each contender's output is held against fp64 first, on the last queries of a sequence. Burst: 6 ms
of launches after 35 ms of idling, contenders in random order, medians of the rounds. Sustained:
the same after half a second of launches back to back, when the card runs at its power cap. Inputs
of a case are larger than the L2. TFLOP/s count 4 * head_dim operations a (query, key) pair seen.
FlashAttention-3 comes from fa3-fwd, or from xformers where it is fp16 or paged. Writes
benchmarks/results/<gpu>_attention.json; `plot_attention.py` draws it.

Peers that are not installed or cannot run a case are left out, and named on stderr.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch
from _attention_cases import (
    CUDNN,
    FA2,
    FA3,
    FLASHINFER,
    PORTABLE,
    Case,
    Launch,
    dense,
    fa3,
    paged,
    randn,
    varlen,
)  # fmt: skip
from _ops_common import DTYPES, OURS, RESULTS, _gpu_token

from kernel_hub.measure import results
from kernel_hub.testing.compare import compare

__all__ = ["CUDNN", "FA2", "FA3", "HEADS", "MODELS", "SHAPES", "Launch", "burst", "fa3", "randn",
           "sustained"]  # fmt: skip

BUSY_MS, IDLE_S, WARM_S = 6.0, 0.035, 0.5
# head_dim -> heads of the protocol: 2048 columns in all.
HEADS = {64: 32, 128: 16, 256: 8}
SHAPES = ((32, 512), (16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384))
SUSTAINED = (1024, 16384)
MODELS = {"Llama 8B": (32, 8), "Llama 70B": (64, 8), "Llama 70B TP8": (8, 1)}


def protocol(dtype: torch.dtype, quick: bool) -> Iterator[tuple[Callable[[], Case], bool]]:
    """Every head_dim and mask; of fp16 every second length, and none of it sustained."""
    is_bf16 = dtype == torch.bfloat16
    shapes = SHAPES if is_bf16 and not quick else SHAPES[1::2]
    for head_dim, heads in HEADS.items():
        for causal in (False, True):
            for batch, seqlen in shapes:
                yield partial(
                    dense, "prefill", batch, seqlen, (heads, heads), head_dim, causal, dtype
                ), is_bf16 and seqlen in SUSTAINED and not quick  # fmt: skip


def cases(options: argparse.Namespace) -> Iterator[tuple[Callable[[], Case], bool]]:
    """(how to make it, whether it is measured sustained too), section by section."""
    bf16 = torch.bfloat16
    for section in options.sections:
        if section == "models":
            for name, heads in MODELS.items():
                for batch, seqlen in ((4, 4096),) if options.quick else ((4, 4096), (1, 32768)):
                    yield partial(dense, name, batch, seqlen, heads, 128, True, bf16), False
        if section == "varlen":
            for causal in (True,) if options.quick else (False, True):
                yield partial(varlen, (16, 16), 128, causal, bf16), False
        if section == "paged":
            for page_size in (16, 64, 256):
                yield partial(paged, page_size, 4, 4096, 4096, (32, 8), 128, bf16), False
                if not options.quick:
                    yield partial(paged, page_size, 4, 1024, 16384, (32, 8), 128, bf16), False
        if section in DTYPES:
            yield from protocol(DTYPES[section], options.quick)


def of_part(
    found: Iterator[tuple[Callable[[], Case], bool]], part: str
) -> Iterator[tuple[Callable[[], Case], bool]]:
    """Every case, or with "2/5" each fifth one from the second."""
    number, count = (int(word) for word in part.split("/"))
    for index, each in enumerate(found):
        if index % count == number - 1:
            yield each


def kept(path: Path, measured: Sequence[results.ResultRow]) -> list[results.ResultRow]:
    """The rows of other cases that `path` has."""
    if not path.is_file():
        return []
    names = [field.name for field in fields(results.ResultRow)]
    cases = {row.case for row in measured}
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [
        results.ResultRow(**{name: row[name] for name in names})
        for row in rows
        if row["case"] not in cases
    ]


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


def quickest(launch: Launch) -> float:
    """Milliseconds a launch takes once its plan is made and its code is loaded."""
    return min(milliseconds(launch, 2) for _ in range(3))


def burst(launches: dict[str, Launch], rounds: int) -> dict[str, list[float]]:
    """Samples in ms a launch, at the clocks of a card that was idle."""
    counts = {name: max(1, round(BUSY_MS / quickest(launch))) for name, launch in launches.items()}
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
        each = quickest(launch)
        milliseconds(launch, round(1e3 * WARM_S / each))
        count = max(1, round(2 * BUSY_MS / each))
        samples[name] = [milliseconds(launch, count) for _ in range(rounds)]
    return samples


def main() -> int:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sections", default="models,varlen,paged,bf16,fp16")
    parser.add_argument(
        "--peers", help=f"default: {FA2},{CUDNN},{FA3}, and without --quick {FLASHINFER} (compiles)"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="fewer shapes and rounds")
    parser.add_argument(
        "--part", help="2/5: each fifth case from the second; the rows of the others stay"
    )
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<gpu>_attention.json")
    options = parser.parse_args()
    options.sections = options.sections.split(",")
    if options.quick:
        options.rounds = 5
    peers = [FA2, CUDNN, FA3] + ([] if options.quick else [FLASHINFER])
    wanted = options.peers.split(",") if options.peers else peers
    out = options.out or RESULTS / f"{_gpu_token(results.environment()['gpu'])}_attention.json"
    began = time.monotonic()
    rows: list[results.ResultRow] = []
    ratios: dict[str, list[float]] = {}
    failures = []
    for make, is_long in of_part(cases(options), options.part or "1/1"):
        case = make()
        try:
            launches = usable(case, wanted)
        except AssertionError as error:
            failures.append(str(error))
            continue
        ways = {"burst": burst, "sustained": sustained} if is_long else {"burst": burst}
        for way, measure in ways.items():
            if way == "sustained":  # the nearest peers alone: it takes its time
                launches = {n: each for n, each in launches.items() if n not in (PORTABLE, FA2)}
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
        # What there is so far: a peer may hang in its compiler.
        results.write(out, [*(kept(out, rows) if options.part else []), *rows])
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
