"""Kernel time and bandwidth on a GPU: CUDA-graph replays over rotated inputs, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

# Inputs are rotated over this many times the L2, or the L2 is flushed before each replay.
L2_FACTOR = 3
_MAX_SETS = 48
_MIN_LAUNCHES = 4


def l2_bytes() -> int:
    """The size of the current GPU's L2."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def num_sets(bytes_a_launch: int) -> int:
    """How many input sets to rotate over: past the L2 where that takes at most 48 of them."""
    return max(2, min(_MAX_SETS, -(-L2_FACTOR * l2_bytes() // bytes_a_launch)))


class GraphTimer:
    """Microseconds a launch takes inside CUDA graphs; the contenders of a case alternate."""

    def __init__(self, rounds: int = 30) -> None:
        self.rounds = rounds
        # Reading this pushes everything else out of the L2 and leaves nothing to write back.
        self._flush = torch.zeros(L2_FACTOR * l2_bytes() // 4, dtype=torch.int32, device="cuda")

    def measure(
        self, contenders: Mapping[str, Sequence[Callable[[], object]]], bytes_a_launch: int
    ) -> dict[str, list[float]]:
        """contenders: name -> launches, one an input set (as many for each). Returns samples."""
        graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
        for name, launches in contenders.items():
            for launch in launches[:2]:
                launch()
            torch.cuda.synchronize()
            repeats = max(1, -(-_MIN_LAUNCHES // len(launches)))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                # Outputs are kept, so that no launch writes where the one before it did.
                kept = [launch() for _ in range(repeats) for launch in launches]
            graphs[name] = (graph, len(kept))
        num_launches = len(next(iter(contenders.values())))
        cold = bytes_a_launch * num_launches < L2_FACTOR * l2_bytes()
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        for warming in range(-1, self.rounds):
            events = []
            for name, (graph, count) in graphs.items():
                if cold:
                    torch.sum(self._flush)
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                stop.record()
                events.append((name, start, stop, count))
            torch.cuda.synchronize()
            if warming >= 0:
                for name, start, stop, count in events:
                    samples[name].append(start.elapsed_time(stop) * 1e3 / count)
        return samples


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
