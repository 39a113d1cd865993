"""A load on the scheduler by a simulated clock: no model, no device.

A pass takes what an H200 takes for an 8B model in bf16: products by rows with the padding that its
graph gives it, and attention and draws by tokens and rows; and the host what it takes to launch it,
by a graph or op by op, one pass ahead of the device.
"""

from __future__ import annotations

import math
import random
import statistics
from typing import NamedTuple

from kernel_hub.engine.pages import Pages
from kernel_hub.engine.requests import Request, SamplingParams
from kernel_hub.engine.scheduler import Scheduler, Sequence
from kernel_hub.engine.shapes import room

PAGE = 64
PROMPT, ANSWER = (32, 2048), (16, 256)


# Of 32 layers with up to so many rows, as plans of the products reckon them: qkv, o, gate and up,
# down of 6144, 4096, 28672 x 4096 and 4096 x 14336.
PRODUCTS_US = {
    64: 4180.0, 128: 4360.0, 160: 4710.0, 192: 5140.0, 224: 5610.0, 256: 5710.0, 320: 7560.0,
    384: 8740.0, 448: 9800.0, 512: 10010.0, 576: 12800.0, 640: 13140.0, 768: 15080.0,
    1024: 19570.0,
}  # fmt: skip


def pass_us(rows: int, prompt: int, keys: int, logits: int) -> float:
    """Of a pass: measured 4,180 (1, 0, 1k), 6,860 (64, 0, 64k), 47,700 (2,048, all, 2k)."""
    products = next((us for most, us in PRODUCTS_US.items() if rows <= most), 19.1 * rows)
    chunks = 1200.0 + 3.0 * prompt if prompt else 0.0
    return products + chunks + 0.028 * keys + 6.0 * logits


# Of the host for a pass by a graph, and for one without.
HOST_US, PLAIN_US = 500.0, 12_000.0


Arrivals = list[tuple[float, Sequence]]


class Ran(NamedTuple):
    """In microseconds."""

    total: float
    floor: float  # prompt tokens as those of a pass of 2,048, and a step for each that decoded
    step: float  # the median of the passes that only decode
    p95: float  # between two tokens of a request
    first: float  # the median from a request's arrival to its first token


def arrived(lot: random.Random, count: int, a_second: float) -> Arrivals:
    """Requests by lot and when they come: all at once where `a_second` is 0."""
    at, found = 0.0, []
    for i in range(count):
        prompt, most = (
            round(math.exp(lot.uniform(*map(math.log, span)))) for span in (PROMPT, ANSWER)
        )
        request = Request(str(i), (0,) * prompt, SamplingParams())
        sequence = Sequence(request, [i] * prompt, 0, prompt + most)
        at += lot.expovariate(a_second) * 1e6 if a_second else 0.0
        found.append((at, sequence))
    return found


def ran(
    arrivals: Arrivals, max_batch: int = 64, max_tokens: int = 2048,
    num_pages: int = 4096, passes: list[tuple[int, int]] | None = None,
) -> Ran:  # fmt: skip
    """All of them; `passes`: of each its decodes and its tokens of prompts."""
    plan = Scheduler(Pages(num_pages, PAGE), max_batch, max_tokens, 4096, 0)
    now = host = device = 0.0  # tokens are read, the host is free, the device is
    last, came = dict[Sequence, float](), dict[Sequence, float]()
    gaps, first, decodes, num_decoding, num_prompt = [], [], list[float](), 0, 0
    waiting = arrivals[::-1]
    while waiting or plan.running or plan.waiting:
        if not plan.running and not plan.waiting:
            host = max(host, device, waiting[-1][0])
        while waiting and waiting[-1][0] <= host:
            came_at, sequence = waiting.pop()
            came[sequence] = came_at
            num_prompt += len(sequence.tokens)
            plan.waiting.append(sequence)
        planned = plan.plan()
        chunks = [s.chunk for s in planned if s.chunk > 1]
        draws = [s for s in planned if s.samples]
        decoding, prompt = len(planned) - len(chunks), sum(chunks)
        shape = room(decoding, 1, len(chunks), prompt, 100)
        took = pass_us(
            decoding + prompt if shape is None else shape.decodes + shape.prompt,
            prompt, sum(s.computed + s.chunk for s in planned), len(draws),
        )  # fmt: skip
        before, began, host = device, host, host + (PLAIN_US if shape is None else HOST_US)
        # Its first kernel runs while the host launches the others; one by a graph after all.
        device = max(max(device, began if shape is None else host) + took, host)
        host = max(host, before)  # the pass before is read
        took, now = device - now, device
        num_decoding += any(s in last for s in draws)
        if not chunks:
            decodes.append(took)
        if passes is not None:
            passes.append((decoding, prompt))
        for sequence in planned:
            place, draw = len(sequence.tokens), sequence.samples > 0
            plan.begun(sequence, 0)
            if draw:
                plan.drawn(sequence, place, [0], 0)
                if sequence in last:
                    gaps.append(now - last[sequence])
                else:
                    first.append(now - came[sequence])
                last[sequence] = now
                if len(sequence.tokens) == sequence.most:
                    plan.end(sequence)
    step = statistics.median(decodes)
    floor = num_prompt * pass_us(2048, 2048, 2048, 1) / 2048 + num_decoding * step
    p95 = statistics.quantiles(gaps, n=20)[18]
    return Ran(now, floor, step, p95, statistics.median(first))
