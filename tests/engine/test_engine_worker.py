"""The engine behind a thread of its own, as programs of asyncio ask it; and JSON by a schema."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the ops are torch ops")

from kernel_hub.engine.engine import Engine
from kernel_hub.engine.grammars import Grammars
from kernel_hub.engine.requests import Generated, Request, SamplingParams
from kernel_hub.engine.worker import EngineError, Worker
from kernel_hub.errors import RequestError

PARAMS = SamplingParams(max_tokens=12, temperature=0.0)


def made() -> Engine:
    return Engine.random("tiny", device="cpu", page_size=16, cache_tokens=512)


async def answered(worker: Worker, *requests: Request) -> list[Generated]:
    """Whole answers, in the order of the requests."""
    found: dict[str, list[Any]] = {one.id: [] for one in requests}
    try:
        async for delta in worker.deltas(requests):
            if delta:
                found[delta.request_id].append(delta)
    finally:
        worker.leave(requests)
    return [Generated.of(deltas) for deltas in found.values()]


def test_answers_are_those_of_the_engine_alone() -> None:
    prompts = [b"abc", b"de" * 20, b"f"]
    wanted = made().generate([list(prompt) for prompt in prompts], PARAMS)
    worker = Worker(made(), 60.0)

    async def all_at_once() -> list[list[Generated]]:
        asked = [Request(f"{i}", tuple(prompt), PARAMS) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(answered(worker, *asked[:2]), answered(worker, asked[2]))

    (first, second), (third,) = asyncio.run(all_at_once())
    assert [first, second, third] == wanted
    worker.stop(10.0)
    assert not worker.ill and worker.waiting == 0


def test_who_leaves_and_what_is_refused() -> None:
    engine = made()
    worker, long = Worker(engine, 60.0), SamplingParams(max_tokens=300)

    async def ask() -> None:
        leaves = [Request("leaves", (1, 2), long)]
        deltas = worker.deltas(leaves)
        assert await anext(deltas) is None
        assert await anext(deltas)
        worker.leave(leaves)
        with pytest.raises(RequestError, match="prompt"):
            await answered(worker, Request("empty", ()))
        waits = asyncio.ensure_future(answered(worker, Request("waits", (1,), long)))
        await asyncio.sleep(0)  # it has asked, and is not answered before this loop goes on
        worker.fail_all(EngineError("told to"))
        with pytest.raises(EngineError, match="told to"):
            await waits
        assert (await answered(worker, Request("stays", (1, 2), PARAMS)))[0].tokens

    asyncio.run(ask())
    worker.stop(10.0)
    assert engine.stats()["pages_used"] == 0 and not engine.has_work


def test_json_by_a_schema_without_a_server() -> None:
    pytest.importorskip("llguidance", reason="the grammars of JSON answers")
    config = {
        "model_type": "qwen3", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 256, "eos_token_id": 257,
    }  # fmt: skip
    engine = Engine.random(config, device="cpu")
    schema = {
        "type": "object", "additionalProperties": False, "required": ["yes"],
        "properties": {"yes": {"enum": [True, 17]}}, "x-guidance": {"whitespace_flexible": False},
    }  # fmt: skip
    params = [
        SamplingParams(max_tokens=60, seed=seed, grammar=grammar)
        for seed, grammar in enumerate(Grammars(engine).json(schema, 3))
    ]
    for answer in engine.generate(["a"] * 3, params):
        assert json.loads(answer.text)["yes"] in (True, 17), answer
    with pytest.raises(RequestError, match="nonsense"):
        Grammars(engine).json({"type": "nonsense"}, 1)
    (large,) = Grammars(engine).json({"type": "string", "pattern": "^(a{1000}){1000}$"}, 1)
    (answer,) = engine.generate(["a"], SamplingParams(max_tokens=9, grammar=large))
    assert answer.finish_reason == "error" and "too many expressions" in (answer.error or "")
    assert "\n" not in (answer.error or "") and engine.generate(["a"])[0].error is None


CHAIN = 900  # each in the one before: deep enough for the stack of an ordinary thread


def test_schemas_that_take_everything_are_refused() -> None:
    """In a process of its own, which they would end; and those that take for ever, in time."""
    pytest.importorskip("llguidance", reason="the grammars of JSON answers")
    code = f"""
import threading
from kernel_hub.engine import grammars
from kernel_hub.engine.engine import Engine
from kernel_hub.engine.requests import SamplingParams
from kernel_hub.errors import RequestError
config = {{"model_type": "qwen3", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "eos_token_id": 257}}
engine = Engine.random(config, device="cpu")
made = grammars.Grammars(engine)
to = "#/$defs/x"
chain = {{
    f"x{{i}}": {{"properties": {{"": {{"$ref": f"{{to}}{{i + 1}}"}}}}}} for i in range({CHAIN})
}}
(deep,) = made.json({{"$defs": chain | {{"x{CHAIN}": {{}}}}, "$ref": "#/$defs/x0"}}, 1)
print(engine.generate(["a"], SamplingParams(max_tokens=20, grammar=deep))[0].error)
grammars.MOST_S = 0.5
slow = {{"allOf": [{{"type": "string", "pattern": f".*{{i}}.*"}} for i in range(1500)]}}
for schema in (slow, {{"type": "object"}}, {{"enum": ["x" * 70_000]}}):
    try:
        made.json(schema, 1)
    except RequestError as error:
        print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert [line.partition(": ")[2] or line for line in ran.stdout.splitlines()] == [
        "None", "reading it takes over 0.5 s", "try again later.", "it is larger than 65536 bytes",
    ], ran.stdout  # fmt: skip
