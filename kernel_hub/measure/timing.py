"""Kernel time and bandwidth on a GPU: CUDA-graph replays over rotated inputs, in random turn."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

# Inputs are rotated over this many times the L2, or the L2 is flushed before each replay.
L2_FACTOR = 3
_MAX_SETS = 48
# Other threads, such as JAX's, which ask their streams now and then, break no capture.
_CAPTURE = "thread_local"
_MIN_LAUNCHES = 4
Key = TypeVar("Key")
Launch = Callable[[], object]


def l2_bytes() -> int:
    """The size of the current GPU's L2."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def num_sets(bytes_a_launch: int) -> int:
    """How many input sets to rotate over: past the L2 where that takes at most 48 of them."""
    return max(2, min(_MAX_SETS, -(-L2_FACTOR * l2_bytes() // bytes_a_launch)))


def capture(launches: Sequence[Launch], pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of the launches, one after the other; raises where one cannot be captured."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode=_CAPTURE):
        # Kept during the capture, so that no launch writes where the one before it did; then given
        # back, so that the next contender writes where this one does.
        kept = [launch() for launch in launches]
    del kept
    return graph


class GraphTimer:
    """Microseconds a launch takes inside CUDA graphs; the contenders of a case alternate.

    Where inputs and outputs lie in DRAM moves a memory-bound kernel by 5-10 %, so every contender
    allocates its outputs in the capture, all captures of a placement draw on one memory pool (what
    one allocated the next one gets), and `placements` pools are used in turn. The order of the
    contenders is drawn anew for each pool and each round.
    """

    def __init__(self, rounds: int = 30, placements: int = 3) -> None:
        self.rounds = rounds
        self.placements = placements
        # Reading this pushes everything else out of the L2 and leaves nothing to write back.
        self._flush = torch.zeros(L2_FACTOR * l2_bytes() // 4, dtype=torch.int32, device="cuda")
        self._random = random.Random(0)

    def measure(
        self, contenders: Mapping[str, Sequence[Callable[[], object]]], bytes_a_launch: int
    ) -> dict[str, list[float]]:
        """contenders: name -> launches, one an input set (as many for each). Returns samples."""
        num_launches = len(next(iter(contenders.values())))
        cold = bytes_a_launch * num_launches < L2_FACTOR * l2_bytes()
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        for launches in contenders.values():
            for launch in launches[:2]:
                launch()
        for placement in range(self.placements):
            torch.cuda.empty_cache()
            # Another place than the pool before got.
            padding = torch.empty((placement * 37 + 1) << 20, dtype=torch.uint8, device="cuda")
            graphs = self._capture(contenders)
            for warming in range(-1, -(-self.rounds // self.placements)):
                events = self._round(graphs, cold)
                torch.cuda.synchronize()
                if warming >= 0:
                    for name, start, stop, count in events:
                        samples[name].append(start.elapsed_time(stop) * 1e3 / count)
            del graphs, padding
        return samples

    def _capture(
        self, contenders: Mapping[str, Sequence[Callable[[], object]]]
    ) -> list[tuple[str, torch.cuda.CUDAGraph, int]]:
        """One graph a contender: each launch once, or more than once where there are few."""
        pool = torch.cuda.graph_pool_handle()
        graphs = []
        for name in self._random.sample(list(contenders), len(contenders)):
            launches = contenders[name]
            repeated = [*launches] * max(1, -(-_MIN_LAUNCHES // len(launches)))
            graphs.append((name, capture(repeated, pool), len(repeated)))
        return graphs

    def _round(
        self, graphs: Sequence[tuple[str, torch.cuda.CUDAGraph, int]], cold: bool
    ) -> list[tuple[str, torch.cuda.Event, torch.cuda.Event, int]]:
        """Replay all, in a new order."""
        events = []
        for name, graph, count in self._random.sample(graphs, len(graphs)):
            if cold:
                torch.sum(self._flush)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            events.append((name, start, stop, count))
        return events


def copy_bandwidth(gigabytes: float = 2.0, repeats: int = 15) -> float:
    """TB/s, read plus written, of plain copies of a large buffer: the ceiling of mixed traffic.

    Plain launches: a captured copy_ runs at two thirds of it on an H200.
    """
    source = torch.randn(int(gigabytes * 2**30) // 4, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return 2 * source.nbytes / statistics.median(times) / 1e9


MATRIX_SIZE = 8192


def matrix_products(dtype: torch.dtype, count: int) -> list[Launch]:
    """Torch's own product of two square matrices of random numbers (cuBLAS), to be timed."""
    shape = MATRIX_SIZE, MATRIX_SIZE
    pairs = [[torch.randn(shape, device="cuda").to(dtype) for _ in range(2)] for _ in range(2)]
    return [partial(torch.nn.functional.linear, *pairs[i % 2]) for i in range(count)]


def matrix_rate(samples: Sequence[float]) -> float:
    """TFLOP/s, from the times of `matrix_products`.

    Timed as an op is, under the clocks that so long a load leaves: a product on zeros, or a single
    one after idleness, is faster than any op can be.
    """
    return 2 * MATRIX_SIZE**3 / statistics.median(samples) / 1e6


def replays(
    contenders: Mapping[Key, Sequence[Launch]],
    count: int,
    idle_seconds: float,
    rounds: int,
    order: random.Random | None = None,
) -> dict[Key, list[float]]:
    """Samples in microseconds a launch, each of one replay of `count` launches after idleness.

    contenders: name -> launches, one an input set; order: draws whose turn it is, anew each round.
    """
    graphs = {}
    for name, launches in contenders.items():
        launches[0]()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], capture_error_mode=_CAPTURE):
            for i in range(count):
                launches[i % len(launches)]()
    samples: dict[Key, list[float]] = {name: [] for name in graphs}
    order = order or random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(graphs), len(graphs)):
            torch.cuda.synchronize()
            time.sleep(idle_seconds)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            stop.record()
            torch.cuda.synchronize()
            samples[name].append(start.elapsed_time(stop) * 1e3 / count)
    return samples


class BurstTimer:
    """Microseconds a launch takes in short bursts after idleness; the contenders alternate.

    For matrix-bound kernels: clocks fall under longer load. A sample is one replay of a CUDA graph
    of `BURST_US` of launches.
    """

    BURST_US = 6000.0
    IDLE_SECONDS = 0.035
    MOST_LAUNCHES = 250

    def __init__(self, rounds: int = 5) -> None:
        self.rounds = rounds
        self._random = random.Random(0)

    def measure(
        self, contenders: Mapping[str, Sequence[Callable[[], object]]], expected_us: float
    ) -> dict[str, list[float]]:
        """contenders: name -> launches, one an input set; expected_us: of one launch, about."""
        count = max(4, min(self.MOST_LAUNCHES, int(self.BURST_US / max(expected_us, 8.0))))
        return replays(contenders, count, self.IDLE_SECONDS, self.rounds, self._random)
