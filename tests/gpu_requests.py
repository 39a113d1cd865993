"""Requests by lot on a GPU: no page is lost, each answer is what the request gets alone.

    python tests/gpu_requests.py [--requests 10000] [--seconds 50] [--seed 1]

A small model of random weights with deterministic="batch": prefixes that many share, chunks,
drafts, pages that run out, requests given up. All requests go through the engine together; then
as many as --seconds has time for, drawn by lot, one at a time. A script, not a test:
tests/ops/test_batch_engine.py does the same with fewer.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from functools import partial
from typing import Any

from crowd import alone, answered, drawn_params, is_that_of, requests_by_lot

from kernel_hub.engine.engine import Engine

CONFIG = {
    "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 1024,
}  # fmt: skip
MOST, PAGE = 160, 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    began, lot = time.monotonic(), random.Random(options.seed)
    how: dict[str, Any] = {"device": options.device, "deterministic": "batch", "page_size": PAGE}
    engine = Engine.random(
        CONFIG, **how, drafts=4, max_batch=64, cache_tokens=1024, max_tokens_a_pass=256
    )
    params = partial(drawn_params, lot, 20)
    requests = requests_by_lot(lot, options.requests, CONFIG["vocab_size"], MOST, params)
    found = answered(engine, requests, lot, bursts=(0,) * 150 + (1, 5, 200, 200), aborts=0.2)
    stats, spent = engine.stats(), time.monotonic() - began
    engine.close()
    given_up = sum(answer.reason == "abort" for answer in found.values())
    guessed = sum(answer.guessed for answer in found.values())
    print(f"{len(found)} requests, {given_up} given up, in {spent:.1f} s; no page is lost. Drafts "
          f"that were right: {guessed}; {stats}", flush=True)  # fmt: skip
    engine = Engine.random(CONFIG, **how, max_batch=1, cache_tokens=1024)
    num_held, wrong = 0, list[str]()
    for request in lot.sample(requests, len(requests)):
        if time.monotonic() - began > options.seconds:
            break
        num_held += 1
        whole = alone(engine, request)
        if not is_that_of(found[request.id], whole):
            wrong.append(f"request {request.id}: {found[request.id].tokens}, alone {whole}")
    engine.close()
    print(f"{num_held} of them alone, {time.monotonic() - began:.1f} s: {len(wrong)} differ")
    print(*wrong[:5], sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
