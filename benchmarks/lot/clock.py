"""Times the contenders of a case economically: short replays of CUDA graphs, in random turn."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kernel_hub.measure.timing import L2_FACTOR, l2_bytes

Launch = Callable[[], Any]
BURST_US, IDLE_SECONDS = 1500.0, 0.004
EAGER_US = 5000.0  # of calls in a row
CASE_US = 60_000.0  # of one contender, in all its rounds
FEWEST_LAUNCHES, MOST_LAUNCHES, FEWEST_ROUNDS = 2, 100, 3
_SPACER_BYTES = 16 << 20  # read and written in about 10 us


class Times(NamedTuple):
    """contender -> microseconds a launch; behind: less the kernel each launch came after.

    failed: contenders that no graph could be made of, and why.
    """

    train: dict[str, list[float]]
    behind: dict[str, list[float]]
    failed: dict[str, str]


def launches_a_replay(expected_us: float, num_sets: int, is_rotated: bool) -> int:
    """As many as a burst holds; each input set once where all of them stay in the L2."""
    wanted = max(FEWEST_LAUNCHES, min(MOST_LAUNCHES, int(BURST_US / expected_us)))
    return wanted if is_rotated else num_sets


def rounds_of(rounds: int, replay_us: float) -> int:
    """Twice as many of short replays, fewer of long ones."""
    if replay_us < BURST_US / 2:
        return 2 * rounds
    return max(min(rounds, FEWEST_ROUNDS), min(rounds, int(CASE_US / replay_us)))


class Clock:
    """Microseconds a launch takes inside graphs, and behind an elementwise kernel if asked.

    Before each replay something larger than the L2 is read, which also hides the graph's start.
    """

    def __init__(self, rounds: int, is_behind: bool = False) -> None:
        self._rounds, self._is_behind = rounds, is_behind
        self._flush = torch.zeros(L2_FACTOR * l2_bytes() // 4, dtype=torch.int32, device="cuda")
        self._random = random.Random(0)
        count = -(-L2_FACTOR * l2_bytes() // _SPACER_BYTES) + 1 if is_behind else 0
        self._spaced = [
            torch.ones(_SPACER_BYTES // 2, dtype=torch.float16, device="cuda") for _ in range(count)
        ]

    def measure(
        self, contenders: Mapping[str, Sequence[Launch]], expected_us: float, *,
        is_rotated: bool = True, is_matrix_bound: bool = False, is_eager: bool = False,
    ) -> Times:  # fmt: skip
        """contenders: name -> launches, one an input set.

        is_eager: wall time of calls in a row until the GPU has done them, without graphs.
        """
        if is_eager:
            return self._eager(contenders, expected_us)
        counts = {
            name: launches_a_replay(expected_us, len(launches), is_rotated)
            for name, launches in contenders.items()
        }
        ways = (False, True) if self._is_behind else (False,)
        graphs: dict[tuple[str, bool], torch.cuda.CUDAGraph] = {}
        failed: dict[str, str] = {}
        for name, launches in contenders.items():
            try:
                made = {(name, way): self._captured(launches, counts[name], way) for way in ways}
            except RuntimeError as error:  # of torch and its peers
                failed[name] = f"in a graph: {' '.join(str(error).split())[:200]}"
            else:
                graphs.update(made)
        if self._is_behind:
            most = max(counts.values())
            counts[""] = most
            graphs["", True] = self._captured([lambda: None], most, True)
        rounds = rounds_of(self._rounds, expected_us * max(counts.values()))
        samples: dict[tuple[str, bool], list[float]] = {key: [] for key in graphs}
        for i in range(-1, rounds):  # the first warms
            for key in self._random.sample(list(graphs), len(graphs)):
                if is_matrix_bound:
                    time.sleep(IDLE_SECONDS)
                us = self._replayed(graphs[key]) / counts[key[0]]
                if i >= 0:
                    samples[key].append(us)
        return split(samples, failed)

    def _eager(self, contenders: Mapping[str, Sequence[Launch]], expected_us: float) -> Times:
        """As a loop of training calls: as slow as the slower of host and GPU."""
        count = max(FEWEST_LAUNCHES, min(MOST_LAUNCHES // 2, int(EAGER_US / expected_us)))
        samples: dict[tuple[str, bool], list[float]] = {(name, False): [] for name in contenders}
        rounds = rounds_of(self._rounds, expected_us * count)
        for i in range(-1, rounds):  # the first warms
            for key in self._random.sample(list(samples), len(samples)):
                launches = contenders[key[0]]
                launches[0]()
                torch.sum(self._flush)
                torch.cuda.synchronize()
                began = time.perf_counter()
                for each in range(count):
                    launches[each % len(launches)]()
                torch.cuda.synchronize()
                if i >= 0:
                    samples[key].append((time.perf_counter() - began) * 1e6 / count)
        return split(samples, {})

    def _captured(
        self, launches: Sequence[Launch], count: int, is_behind: bool
    ) -> torch.cuda.CUDAGraph:
        """On the current stream, which is no default stream; nothing is given back before it."""
        launches[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for i in range(count):
                if is_behind:
                    self._spaced[i % len(self._spaced)].mul_(1.0)
                launches[i % len(launches)]()
        finally:
            graph.capture_end()
        return graph

    def _replayed(self, graph: torch.cuda.CUDAGraph) -> float:
        """Microseconds of one replay."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.sum(self._flush)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3


def split(samples: Mapping[tuple[str, bool], Sequence[float]], failed: Mapping[str, str]) -> Times:
    """(contender, behind) -> samples; '' is the kernel alone, whose median is subtracted."""
    spacer = samples.get(("", True), ())
    own = statistics.median(spacer) if spacer else 0.0
    times = Times({}, {}, dict(failed))
    for (name, is_behind), values in samples.items():
        if not is_behind:
            times.train[name] = list(values)
        elif name:
            times.behind[name] = [value - own for value in values]
    return times
