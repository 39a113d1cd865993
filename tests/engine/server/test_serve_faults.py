"""Clients that leave, hang or come in crowds, an engine that fails, and the end of a server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

for package in ("starlette", "uvicorn", "prometheus_client", "httpx", "openai"):
    pytest.importorskip(package, reason="the server or its client is made of it")

import httpx  # noqa: E402
import openai  # noqa: E402
from byte_engine import ByteEngine  # noqa: E402
from served_here import KEY, Served, served  # noqa: E402

ENDLESS = {"ignore_eos": True}
HANG_S = 120.0  # after which what should have come is not coming, however busy the machine is
LONG: dict[str, Any] = {
    "model": "bytes", "prompt": "abc", "max_tokens": 480, "extra_body": ENDLESS
}  # fmt: skip


def raw(here: Served, body: dict[str, Any], receive_bytes: int = 0) -> socket.socket:
    """A request sent on a bare socket, of whose answer nothing is read."""
    client = socket.socket()
    if receive_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(20)
    client.connect(("127.0.0.1", here.port))
    text = json.dumps(body).encode()
    client.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n".encode()
        + text
    )
    return client


def plain(**more: Any) -> dict[str, Any]:
    """LONG as it goes over the wire."""
    body = {name: value for name, value in LONG.items() if name != "extra_body"}
    return {**body, **ENDLESS, **more}


def num_taken(engine: ByteEngine) -> int:
    """How many of LONG's choices it has been asked for, ended ones too: never less again."""
    return engine.stats_now()["prompt_tokens"] // len(LONG["prompt"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_a_dropped_client_frees_its_pages(stream: bool, running: bool) -> None:
    engine = ByteEngine(step_s=0.2, most_running=1)  # nothing ends meanwhile
    with served(engine) as here:
        others = [] if running else [raw(here, plain(max_tokens=300))]
        here.until(lambda: running or len(engine.running) == 1, "another runs")
        client = raw(here, plain(stream=stream, n=2))
        here.until(lambda: len(engine.running) + len(engine.waiting) == 2 + len(others), "taken")
        client.close()
        here.until(lambda: len(engine.aborted) == 2, "both choices are aborted")
        engine.step_s = 0.0
        for other in others:
            assert b"200 OK" in other.recv(50), "whoever stays is answered"
            other.close()
        here.settles()
        assert engine.stats_now()["pages_used"] == 0


def test_a_client_that_reads_slowly_gets_all_of_it_and_holds_up_nobody() -> None:
    with served(ByteEngine(most_running=20), write_s=600.0) as here:
        body = plain(stream=True, logprobs=5, n=16)
        slow = raw(here, body, receive_bytes=2048)
        quick = here.openai(timeout=HANG_S).completions.create(**LONG)
        assert quick.usage.completion_tokens == 480
        here.until(lambda: not here.engine.has_work, "its pages are free before it has read")
        assert here.server.worker.waiting == 0, "who only reads does not wait"
        said = b""
        while b"data: [DONE]\n\n" not in said:
            part = slow.recv(1 << 16)
            assert part, "the server leaves it"
            said += part
            time.sleep(0.0005)
        assert said.count(b'"finish_reason":"length"') == 16
        slow.close()
        here.settles()


def test_a_client_that_hangs_is_left() -> None:
    with served(write_s=0.5) as here:
        # More than the buffers of both ends have room for.
        hung = [raw(here, plain(stream=True, logprobs=5, n=40), 2048) for _ in range(2)]
        here.until(lambda: num_taken(here.engine) == 80, "both are taken")
        here.settles()
        assert here.openai().completions.create(model="bytes", prompt="a", max_tokens=2)
        connections = here.server.server_state.connections
        here.until(lambda: len(connections) <= 1, "theirs are cut")  # ours is kept alive
        for client in hung:
            client.close()


def test_clients_that_hang_do_not_hold_up_the_end() -> None:
    """Who is waited for is not cut for ten minutes: the end comes first."""
    with served(drain_s=0.3, write_s=600.0) as here:
        hung = [raw(here, plain(stream=True, logprobs=5, n=24), 2048) for _ in range(2)]
        here.until(lambda: num_taken(here.engine) == 48, "both are taken")
        here.until(lambda: not here.engine.has_work, "it has run", HANG_S)
        assert here.server.num_open == 2, "both have yet to read"
        here.server.drain()
        here.thread.join(HANG_S)
        assert not here.thread.is_alive()
        for client in hung:
            client.close()


def test_overload_is_said_with_a_time() -> None:
    engine = ByteEngine(step_s=0.1, most_running=1)
    with served(engine, waiting=2) as here:
        held = [raw(here, plain())]
        here.until(lambda: here.server.worker.stats["running"] == 1, "one runs")
        for number in (1, 2):
            held.append(raw(here, plain()))
            here.until(lambda n=number: len(engine.waiting) == n, "others wait")  # type: ignore[misc]
        with pytest.raises(openai.RateLimitError) as caught:
            here.openai().completions.create(**LONG)
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.code == "rate_limit_exceeded"
        for client in held:
            client.close()
        engine.step_s = 0.0
        here.settles()
        assert here.openai().completions.create(model="bytes", prompt="a", max_tokens=2)


def test_bodies_that_do_not_come_are_no_way_around_it() -> None:
    with served(waiting=2) as here:
        hung = [socket.create_connection(("127.0.0.1", here.port)) for _ in range(2)]
        for client in hung:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            client.sendall(
                f"{head}Content-Type: application/json\r\nContent-Length: 9\r\n\r\n".encode()
            )
        here.until(lambda: here.server.num_open == 2, "their heads are read")
        with pytest.raises(openai.RateLimitError):
            here.openai().completions.create(model="bytes", prompt="a")
        for client in hung:
            client.close()
        here.settles()
        assert here.openai().completions.create(model="bytes", prompt="a", max_tokens=2)


def failing(number: int) -> Any:
    """Makes the next `number` steps fail."""
    left = [number]

    def on_step(engine: ByteEngine) -> None:
        if left[0] and engine.has_work:
            left[0] -= 1
            raise RuntimeError("the card is gone")

    return on_step


def test_a_step_that_fails_ends_what_it_hurts() -> None:
    engine = ByteEngine(step_s=0.1, most_running=2)  # none ends before the last is there
    with served(engine) as here, ThreadPoolExecutor(6) as pool:

        def ask(stream: bool) -> str:
            made = here.openai().completions.create(**LONG, stream=stream)
            return "".join(p.choices[0].text for p in made) if stream else made.choices[0].text

        asked = [pool.submit(ask, bool(i % 2)) for i in range(6)]
        here.until(lambda: len(engine.running) + len(engine.waiting) == 6, "all are there")
        engine.on_step = failing(1)
        for one in asked:
            with pytest.raises(openai.APIError, match="the card is gone") as caught:
                one.result(HANG_S)
            assert caught.value.code == "engine_error"
        here.settles()
        assert len(engine.aborted) == 6, "none of them runs on for nobody"
        engine.step_s = 0.0
        assert ask(False), "a later request is answered"
        assert httpx.get(f"{here.url}/health").status_code == 200


@pytest.mark.parametrize("number", [2, 3])
def test_an_engine_that_fails_again_and_again_is_given_up(number: int) -> None:
    engine = ByteEngine()
    with served(engine) as here:
        engine.on_step = failing(number)  # at first of the request, then of telling its end
        short: Any = {"model": "bytes", "prompt": "a", "max_tokens": 2}
        with pytest.raises(openai.InternalServerError, match="the card is gone"):
            here.openai().completions.create(**short)
        if number == 2:
            here.settles()
            assert here.openai().completions.create(**short).usage
            return
        here.until(lambda: httpx.get(f"{here.url}/health").status_code == 503, "/health says so")
        with pytest.raises(openai.InternalServerError, match="given up") as caught:
            here.openai().completions.create(**short)
        assert caught.value.response.status_code == 503


@pytest.mark.parametrize("what", ["submit", "abort", "stats"])
def test_no_fault_of_the_engine_is_a_hang(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ByteEngine(step_s=0.1)
    with served(engine) as here:
        if what == "submit":
            real, asked = engine.submit, []

            def second(request: Any) -> None:
                asked.append(request)
                if len(asked) == 2:
                    raise ValueError("no room")
                real(request)

            monkeypatch.setattr(engine, "submit", second)
            with pytest.raises(openai.InternalServerError, match="no room"):
                here.openai().completions.create(**LONG, n=3)
            here.settles()
            return

        def broken(*args: Any) -> Any:
            raise ValueError("broken")

        client = raw(here, plain())
        here.until(lambda: engine.has_work, "it runs")
        monkeypatch.setattr(engine, what, broken)
        if what == "abort":
            client.close()
        else:
            assert b"500" in client.recv(100)
        here.until(lambda: httpx.get(f"{here.url}/health").status_code == 503, "/health says so")
        with pytest.raises(openai.InternalServerError):
            here.openai().completions.create(**LONG)


def test_a_fault_of_the_server_itself_is_said_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as here:
        monkeypatch.setattr(here.engine, "encode", lambda text: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="failed: ZeroDivisionError"):
            here.openai().completions.create(**LONG)
        counted = 'kernel_hub_requests_total{route="/v1/completions",status="500"} 1.0'
        here.until(lambda: counted in here.client().get("/metrics").text, "it is counted")


def test_a_step_that_does_not_end_is_no_hang() -> None:
    engine, goes_on = ByteEngine(), threading.Event()
    with served(engine, step_s=0.5) as here:
        engine.on_step = lambda engine: goes_on.wait(HANG_S) and None
        client = here.openai()
        for stream in (False, True):
            with pytest.raises(openai.APIError, match=r"over 0\.5 s") as caught:
                list(client.completions.create(**LONG, stream=stream))
        assert "over 0.5 s" in httpx.get(f"{here.url}/health").json()["status"]
        goes_on.set()
        here.settles()
        assert httpx.get(f"{here.url}/health").status_code == 200
        assert client.completions.create(model="bytes", prompt="a", max_tokens=2), caught


def test_draining_answers_what_runs_and_takes_nothing_new() -> None:
    engine = ByteEngine(step_s=0.1)  # none ends before all is asked
    with served(engine, drain_s=600.0) as here, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(here.openai().completions.create, **LONG) for _ in range(4)]
        here.until(lambda: len(engine.running) == 4, "four run")
        here.server.drain()
        here.until(lambda: httpx.get(f"{here.url}/health").status_code == 503, "/health says so")
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            here.openai().completions.create(**LONG)
        assert caught.value.response.status_code == 503
        assert caught.value.response.headers["retry-after"]
        engine.step_s = 0.0
        assert [one.result(HANG_S).usage.completion_tokens for one in asked] == [480] * 4
        here.thread.join(HANG_S)
        assert not here.thread.is_alive()


def test_what_is_still_being_read_when_it_drains_is_refused() -> None:
    body = json.dumps(plain()).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with served() as here, socket.create_connection(("127.0.0.1", here.port)) as client:
        client.sendall(head.encode())
        here.until(lambda: here.server.num_open == 1, "its head is read")
        here.server.drain()
        here.until(lambda: httpx.get(f"{here.url}/health").status_code == 503, "/health says so")
        client.sendall(body)
        assert b" 503 " in client.recv(100)
        here.thread.join(HANG_S)
        assert not here.thread.is_alive() and not here.engine.stats_now()["steps"]


def test_draining_ends_what_takes_too_long() -> None:
    """Its answers would take an hour."""
    engine, long = ByteEngine(step_s=0.05), {**LONG, "max_tokens": 90_000}
    engine.max_model_len = 10**6
    with served(engine, drain_s=0.5) as here, ThreadPoolExecutor(2) as pool:
        client = here.openai(timeout=HANG_S)
        whole = pool.submit(client.completions.create, **long)
        pieces = iter(client.completions.create(**long, stream=True))
        assert next(pieces)
        here.until(lambda: len(engine.running) == 2, "both run")
        here.server.drain()
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            whole.result(HANG_S)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(pieces)
        here.thread.join(HANG_S)
        assert not here.thread.is_alive()
        assert not engine.running and not engine.waiting


PROCESS = """
import sys
sys.path[:0] = [{here!r}]
from byte_engine import ByteEngine
from kernel_hub.engine.server import serve
from kernel_hub.engine.server.serve import ServerLimits
engine = ByteEngine(step_s=0.01, most_running=16)
engine.max_model_len = 10**6
listener = serve.bound("127.0.0.1", 0, ServerLimits())
ready = lambda server: print(listener.getsockname()[1], flush=True)
serve.serve(engine, listener, ServerLimits(drain_s={drain_s}), ready=ready)
print("gone", flush=True)
"""


@pytest.mark.parametrize(("signals", "drain_s"), [(1, 1.0), (2, 600.0)])
def test_a_process_under_load_ends_in_time(signals: int, drain_s: float) -> None:
    """In a small part of what its answers, or its drain, would take."""
    code = PROCESS.format(here=str(Path(__file__).parent), drain_s=drain_s)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    assert process.stdout is not None
    url = f"http://127.0.0.1:{int(process.stdout.readline())}"
    stop, begun, ends = threading.Event(), set[int](), [0]

    def load(number: int) -> None:
        """Asks again and again until told to stop: for short answers, or one of 15 minutes."""
        body = plain(stream=number % 2 == 0, max_tokens=3 if number < 6 else 90_000)
        with httpx.Client(base_url=url, timeout=HANG_S) as client:
            while not stop.is_set():
                with contextlib.suppress(httpx.TransportError):
                    with client.stream("POST", "/v1/completions", json=body) as answer:
                        assert answer.status_code in (200, 500, 503), answer.read()
                        for _ in answer.iter_raw():
                            begun.add(number)
                    ends[0] += 1

    def until(holds: Callable[[], bool], what: str) -> None:
        gives_up = time.monotonic() + HANG_S
        while not holds():
            assert time.monotonic() < gives_up and process.poll() is None, what
            time.sleep(0.01)

    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(load, number) for number in range(12)]
        try:
            until(lambda: ends[0] > 20 and begun.issuperset((6, 8, 10)), "short and long run")
            process.send_signal(signal.SIGTERM)
            if signals == 2:
                until(lambda: httpx.get(f"{url}/health").status_code == 503, "/health says so")
                process.send_signal(signal.SIGTERM)
            said, errors = process.communicate(timeout=HANG_S)
        finally:
            stop.set()
            process.kill()
        for one in asked:
            one.result(HANG_S)
    assert "Traceback" not in errors, errors
    if signals == 1:
        assert process.returncode == 0 and "gone" in said, errors
