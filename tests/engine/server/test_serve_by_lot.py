"""Mixes of clients by lot: whole, streamed, leaving, wrong; then nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest
from lots import Lots

for package in ("starlette", "uvicorn", "prometheus_client", "httpx", "openai"):
    pytest.importorskip(package, reason="the server or its client is made of it")

import httpx  # noqa: E402
import openai  # noqa: E402
from byte_engine import POISON, ByteEngine, alone  # noqa: E402
from served_here import KEY, Served, served  # noqa: E402

from kernel_hub.engine.requests import SamplingParams  # noqa: E402

NUM_CLIENTS, NUM_EACH = 24, 10
WRONG: list[dict[str, Any]] = [
    {"temperature": 9.0}, {"n": 0}, {"prompt": []}, {"prompt": "x" * 700}, {"stop": [""]},
    {"logit_bias": {"99999": 1}}, {"model": "other"}, {"max_tokens": -1}, {"what": 1},
]  # fmt: skip


def drawn(lots: random.Random) -> tuple[dict[str, Any], SamplingParams]:
    """A body and what the engine is to be asked by it."""
    prompt = "".join(lots.choices("abc dé", k=lots.choice([1, 2, 15, 16, 17, 100, 400])))
    temperature, seed = lots.choice([0.0, 0.7, 1.3]), lots.randrange(2**63)
    stop = [lots.choice(["a", "en", "zzz", "é"]) for _ in range(lots.randrange(3))]
    most = lots.choice([1, 2, 20, 90])
    body = {
        "model": "bytes", "prompt": prompt, "temperature": temperature, "seed": seed,
        "max_tokens": most, **({"stop": stop} if stop else {}),
    }  # fmt: skip
    params = SamplingParams(max_tokens=most, temperature=temperature, seed=seed, stop=tuple(stop))
    return body, params


async def one(here: Served, client: Any, lots: random.Random, counts: dict[str, int]) -> None:
    kind = lots.choice(["whole", "stream", "leave", "leave", "wrong", "poison", "bytes"])
    counts[kind] = counts.get(kind, 0) + 1
    body, params = drawn(lots)
    if kind == "wrong":
        wrong = {**body, **lots.choice(WRONG)}
        extra = {"extra_body": {"what": wrong.pop("what")}} if "what" in wrong else {}
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
            await client.completions.create(**wrong, stream=lots.random() < 0.5, **extra)
    elif kind == "poison":
        with pytest.raises(openai.APIError, match="poisoned"):
            made = await client.completions.create(**{**body, "prompt": [1, POISON]}, stream=True)
            async for _ in made:
                pass
    elif kind == "bytes":
        async with httpx.AsyncClient(timeout=30) as bare:
            answer = await bare.post(
                f"{here.url}/v1/chat/completions", content=lots.randbytes(lots.randrange(300)),
                headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
            )  # fmt: skip
        assert answer.status_code == 400
    elif kind == "leave":
        with contextlib.suppress(openai.APITimeoutError):
            patience = lots.choice([0.001, 0.02, 0.2])
            asked = client.with_options(timeout=patience).completions
            if lots.random() < 0.5:
                await asked.create(**{**body, "max_tokens": 100, "n": 2})
            else:
                made = await client.completions.create(**{**body, "max_tokens": 100}, stream=True)
                async for _ in made:
                    if lots.random() < 0.3:
                        break
                await made.close()
    else:
        wanted = await asyncio.to_thread(alone, list(body["prompt"].encode()), params)
        made = await client.completions.create(**body, stream=kind == "stream")
        if kind == "whole":
            text, finish = made.choices[0].text, made.choices[0].finish_reason
        else:
            pieces = [piece.choices[0] async for piece in made]
            text, finish = "".join(p.text for p in pieces), pieces[-1].finish_reason
        assert (text, finish) == wanted[1:], body


def test_clients_by_lot() -> None:
    lots = Lots("clients of a server")
    engine = ByteEngine(step_s=0.0005, most_running=6, pages_total=120)
    counts: dict[str, int] = {}

    async def client(here: Served, seed: int) -> None:
        own = random.Random(seed)
        async with here.async_openai() as asked:
            for _ in range(NUM_EACH):
                await one(here, asked, own, counts)

    with served(engine) as here:

        async def all_of_them() -> None:
            seeds = [lots.randrange(2**32) for _ in range(NUM_CLIENTS)]
            await asyncio.gather(*(client(here, seed) for seed in seeds))

        try:
            asyncio.run(all_of_them())
        except BaseException as error:
            raise AssertionError(str(lots)) from error
        here.settles()
        said = here.client().get("/metrics").text
        assert "kernel_hub_engine_pages_used 0.0" in said
        assert 'kernel_hub_requests_total{route="/v1/completions",status="200"}' in said
        assert f"kernel_hub_engine_steps_total {float(engine.stats_now()['steps'])}" in said
    assert len(counts) == 6 and engine.aborted, counts
