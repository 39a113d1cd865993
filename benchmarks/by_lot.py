"""Ops on cases drawn by lot, beside every peer: published models, their 1-, 2-, 4- and 8-way
slices, token counts as servers see them; a third of the products with bias, residual, fp32 results,
strided rows or k off 64. --family takes families and groups: products, attention, rows, torch (its
attention with the door of integrations.sdpa open, beside what it takes itself).

Case i of a family under a seed is the same whatever else is drawn: `--seed S --family F --first i
--cases 1` runs it alone. Every output is checked before and after it is timed. A case counts only
where each peer of --peers that takes such a case ran in its family. FlashInfer compiles at first
use, once a head_dim and dtype. --sweep instead times linear at numbers of rows from 1 to 1024, for
benchmarks/plot_sweep.py.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.util
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, arguments, gpu_token
from lot import rowwise, sdpa, sweep
from lot.attention_peers import ATTENTION_PEERS
from lot.clock import Clock
from lot.contenders import Source
from lot.outcome import Outcome, rows, told
from lot.product_peers import CUBLAS, DEEPGEMM, PEERS
from lot.run import FAMILIES, GROUPS, AnyLot, Timer, draw, run

from kernel_hub import tuning
from kernel_hub.measure import results
from kernel_hub.measure.timing import GraphTimer
from kernel_hub.progress import progress

WRITE_EVERY_SECONDS = 30.0
ROUNDS_OF_ROWS = 12


def families(names: Sequence[str]) -> list[str]:
    """Families by their names and those of groups, each once. Raises ValueError for another."""
    known = {**{name: (name,) for name in (*FAMILIES, *rowwise.FAMILIES)}, **GROUPS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no family {', '.join(unknown)}; there are {', '.join(known)}")
    return list(dict.fromkeys(itertools.chain.from_iterable(known[name] for name in names)))


def drawn(names: Sequence[str], seed: int, count: int, first: int = 0) -> Iterator[AnyLot]:
    """`count` cases in all, dealt to the families in turn."""
    for i in range(count):
        yield draw(names[i % len(names)], seed, first + i // len(names))


def file_name(options: argparse.Namespace) -> str:
    """h200_by_lot_products_s7.json."""
    words = [gpu_token(options.about["gpu"])]
    words.append("sweep_linear" if options.sweep else f"by_lot_{'_'.join(options.family)}")
    words += ["emptied"] * options.emptied
    return "_".join([*words, f"s{options.seed}"]) + ".json"


def measured(
    lots: Sequence[AnyLot], source: Source, timer: Timer, peers: Sequence[str], seconds: float
) -> Iterator[tuple[AnyLot, Outcome]]:
    """Outcomes of the cases, until the time is up."""
    began = time.monotonic()
    of_rows = functools.cache(lambda: GraphTimer(ROUNDS_OF_ROWS))
    with progress(len(lots), "by lot") as advance:
        for lot in lots:
            if time.monotonic() - began > seconds:
                return
            advance(f"{lot.family} {lot.name}")
            if isinstance(lot, rowwise.RowLot):
                yield lot, rowwise.run(lot, of_rows(), peers)
            else:
                yield lot, run(lot, source, timer, peers)
            if source.device == "cuda" and torch.cuda.memory_reserved() > _half_of_memory():
                torch.cuda.empty_cache()


def _half_of_memory() -> int:
    return int(torch.cuda.get_device_properties(0).total_memory) // 2


def save(path: Path, options: argparse.Namespace, found: Sequence[tuple[AnyLot, Outcome]]) -> None:
    """The rows so far."""
    outcomes = [outcome for _, outcome in found]
    prefix = "sweep" if options.sweep else "by lot"
    results.write(path, rows(outcomes, prefix, ", emptied" if options.emptied else ""))


def finish(options: argparse.Namespace, found: Sequence[tuple[Any, Outcome]], asked: int) -> int:
    """Print the summary; 1 where an output of ours was wrong."""
    outcomes = [outcome for _, outcome in found]
    for line in sweep.told(found) if options.sweep else told(outcomes):
        print(line)
    if len(found) < asked:
        print(f"the time was up after {len(found)} of {asked} cases")
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    for outcome in wrong:
        print(f"WRONG {outcome.family} {outcome.case}: {outcome.wrong}", file=sys.stderr)
    return 1 if wrong else 0


def more_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark alone."""
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=270, help="in all, dealt to the families")
    parser.add_argument("--first", type=int, default=0, help="number of each family's first case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="draw no more after it")
    parser.add_argument(
        "--emptied", action="store_true", help="without measured tables: the cost models choose"
    )
    parser.add_argument(
        "--behind", action="store_true", help="time each launch behind an ordinary kernel too"
    )
    parser.add_argument("--sweep", action="store_true", help="linear at rows from 1 to 1024")
    parser.add_argument("--every", action="store_true", help="with --sweep: at every one of them")
    parser.add_argument("--sizes", type=int, default=0, help="with --sweep: at so many of them")


def main() -> int:
    """Draw, measure, write, print."""
    options = arguments(
        __doc__,
        rounds=5,
        quick={"cases": 27, "rounds": 3},
        more=more_arguments,
        family="products",
        peers=",".join((*PEERS, *ATTENTION_PEERS, *rowwise.PEERS, *sdpa.PEERS)),
    )
    try:
        names = families(options.family)
    except ValueError as error:
        sys.exit(str(error))
    has_products = not set(GROUPS["products"]).isdisjoint(names)
    if has_products and DEEPGEMM in options.peers and importlib.util.find_spec("deep_gemm") is None:
        print("DeepGEMM is not on PYTHONPATH: what it takes will not count", file=sys.stderr)
    lots: Sequence[AnyLot]
    if options.sweep:
        lots = sweep.lots(options.seed, options.every, options.sizes)
        options.peers = [CUBLAS]
    else:
        lots = [*drawn(names, options.seed, options.cases, options.first)]
    path = options.out or RESULTS / file_name(options)
    found: list[tuple[AnyLot, Outcome]] = []
    with contextlib.ExitStack() as stack:
        if options.emptied:
            for table in tuning.tables.values():
                stack.enter_context(table.emptied())
        stack.enter_context(torch.no_grad())
        # Graphs are captured on it, so workspaces are allocated for it before.
        stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
        gc.collect()
        gc.freeze()
        source, clock = Source(), Clock(options.rounds, options.behind)
        saved = time.monotonic()
        for each in measured(lots, source, clock, options.peers, options.seconds):
            found.append(each)
            if time.monotonic() - saved > WRITE_EVERY_SECONDS:
                save(path, options, found)
                saved = time.monotonic()
    save(path, options, found)
    return finish(options, found, len(lots))


if __name__ == "__main__":
    sys.exit(main())
