"""Decode steps of one model on one, two, four and eight GPUs of a host, by torchrun and NCCL.

    python benchmarks/bench_ranks.py [--quick] [--gpus 1,2,4,8] [--decodes 64] [--context 8192]

Random weights; the cache holds random numbers where prompts would have left theirs, so that no
time goes into prompts. From step to step in wall time, a pass ahead, sampled as in bench_engine.py.
Beside it the collectives of a step alone, in a CUDA graph: a sum of one pass's rows, one of 64 MiB,
by which the rate of the links is said (2 (n - 1) / n of the bytes over the time), and the logits'
exchange.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from bench_engine import PARAMS, WARM, Words, floor_us, stepped
from harness import Report, arguments, model_arguments

from kernel_hub.engine.config import NAMED, ModelConfig
from kernel_hub.engine.engine import Engine
from kernel_hub.engine.requests import Request

QUICK = {"rounds": 10, "layers": 4}
START = "RANKS"
LAUNCHES = 20  # of a collective, in one graph
TARGETS = {2: 1.7, 4: 2.5}  # times as fast as one GPU


def collective_us(launch: Any, rounds: int = 5) -> float:
    """Of one launch, in a graph of some; every rank does as many."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(LAUNCHES):
            launch()
    found = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(1e3 * begin.elapsed_time(end) / LAUNCHES)
    return statistics.median(found[1:])


def collectives(engine: Engine, decodes: int) -> dict[str, float]:
    """Microseconds of those of a decode pass, and GB/s of the links."""
    group, c, rows = engine.group, engine.runner.model.config, decodes + -decodes % 8
    if group.world == 1:
        return {}
    new: dict[str, Any] = {"device": engine.runner.model.device}
    x = torch.zeros(rows, c.hidden_size, dtype=torch.bfloat16, **new)
    large = torch.zeros(2**25, dtype=torch.bfloat16, **new)
    logits = torch.zeros(rows, c.vocab_size // group.world, **new)
    large_us = collective_us(lambda: group.add(large))
    return {
        "sum_us": collective_us(lambda: group.add(x)),
        "exchange_us": collective_us(lambda: group.rows(logits)),
        "link_gb_per_s": 2 * (group.world - 1) / group.world * large.nbytes / large_us / 1e3,
    }


def as_if_computed(engine: Engine) -> None:
    """Of a prompt only the last token goes through the model; before it stands what lies there."""
    for pair in engine.runner.cache:
        for pages in pair:
            pages.normal_()
    real = engine._scheduler._admitted

    def admitted() -> Any:
        sequence = real()
        if sequence:
            sequence.computed = len(sequence.tokens) - 1
        return sequence

    engine._scheduler._admitted = admitted  # type: ignore[method-assign]


def process(options: argparse.Namespace) -> None:
    """One of the processes of a model; rank 0 prints what it found."""
    config = {**NAMED[options.model], "num_hidden_layers": options.layers}
    lot = random.Random(options.seed)
    lengths = [
        lot.randint(options.context * 2 // 3, options.context * 4 // 3)
        for _ in range(options.decodes)
    ]
    room = sum(-(-(n + 2 * options.rounds + 64) // 64) * 64 for n in lengths)
    engine = Engine.random(
        config, max_model_len=4 * options.context, max_batch=options.decodes, cache_tokens=room
    )  # fmt: skip
    engine.text = Words(engine.vocab_size)
    found: dict[str, Any] = collectives(engine, options.decodes)
    as_if_computed(engine)
    if engine.group.rank:
        engine.follow()
        return
    params = replace(PARAMS, max_tokens=10_000)
    for i, length in enumerate(lengths):
        prompt = tuple(lot.randrange(engine.vocab_size) for _ in range(length))
        engine.submit(Request(f"decode {i}", prompt, params))
    while len(stepped(engine)) < options.decodes:
        pass
    for _ in range(WARM):
        stepped(engine)
    began = [time.perf_counter()]
    for _ in range(options.rounds):
        if len(stepped(engine)) != options.decodes:
            raise RuntimeError("a step that not all requests have a part of")
        began.append(time.perf_counter())
    found["steps_us"] = [(after - before) * 1e6 for before, after in pairwise(began)]
    found["graphs"] = len(engine.runner._graphs)
    for i in range(options.decodes):
        engine.abort(f"decode {i}")
    while engine.has_work:
        stepped(engine)
    engine.close()
    print(START, json.dumps({**found, "lengths": lengths}), flush=True)


def started(world: int, timeout_s: float) -> dict[str, Any]:
    """What rank 0 of as many processes of this command says."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world),
        "--master-port", str(port), __file__, *sys.argv[1:],
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as torchrun:
        try:
            said, _ = torchrun.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            torchrun.terminate()  # and it its processes
            raise
    if torchrun.returncode:
        raise RuntimeError(f"{world} processes failed: {torchrun.returncode}")
    found: dict[str, Any] = json.loads(said.split(START, 1)[1].splitlines()[0])
    return found


def run(options: argparse.Namespace) -> int:
    if "WORLD_SIZE" in os.environ:
        process(options)
        return 0
    report, medians = Report("ranks", options), dict[int, float]()
    config = {**NAMED[options.model], "num_hidden_layers": options.layers}
    case = f"{options.decodes} x {options.context}"
    samples, rates = dict[str, list[float]](), dict[str, list[float]]()
    for world in map(int, options.gpus):
        if world > torch.cuda.device_count():
            continue
        found = started(world, options.timeout_s)
        medians[world] = statistics.median(found["steps_us"])
        samples[f"{world} GPUs"], lengths = found.pop("steps_us"), found.pop("lengths")
        floor = floor_us(
            ModelConfig.from_dict(config), [1] * len(lengths), lengths,
            world * options.tb_per_s * 1e6, world * options.tflops * 1e6,
        )  # fmt: skip
        ratio = medians[min(medians)] / medians[world]
        print(
            f"{case}, {world} GPUs: {medians[world]:9.1f} us, {floor / medians[world]:.2f} of the "
            f"floor, {ratio:.3f} x {min(medians)} GPUs (asked {TARGETS.get(world, 1)}); "
            + ", ".join(f"{name} {value:.1f}" for name, value in found.items()),
            flush=True,
        )
        if world > 1:
            rates[f"{world} GPUs"] = [found["link_gb_per_s"]]
            for name in ("sum_us", "exchange_us"):
                samples[f"{world} GPUs, {name.removesuffix('_us')}"] = [found[name]]
    report.case(case, samples, "us", ratio_to=next(iter(samples)))
    if rates:
        report.case(f"{case}, links", rates, "GB/s", ratio_to=next(iter(rates)))
    return report.done()


def main() -> int:
    def more(parser: argparse.ArgumentParser) -> None:
        model_arguments(parser)
        parser.add_argument("--decodes", type=int, default=64)
        parser.add_argument("--context", type=int, default=8192)
        parser.add_argument("--seed", type=int, default=1)
        parser.add_argument("--timeout-s", type=float, default=300.0, help="of one number of GPUs")
        parser.add_argument("--tb-per-s", type=float, default=4.69, help="of memory, measured")
        parser.add_argument("--tflops", type=float, default=801.0, help="of products, measured")

    return run(arguments(__doc__, rounds=30, quick=QUICK, more=more, gpus="1,2,4,8"))


if __name__ == "__main__":
    sys.exit(main())
