"""`kernel-hub serve` as a process: what it says, whom it lets in, how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from free_port import free_port

for package in ("starlette", "uvicorn", "prometheus_client", "httpx", "openai"):
    pytest.importorskip(package, reason="the server or its client is made of it")
pytest.importorskip("torch", reason="the ops are torch ops")

import openai  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


@contextlib.contextmanager
def started(*arguments: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and the line that it says once it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kernel_hub", "serve", "tiny", "--device", "cpu", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def address(said: str) -> str:
    return next(word for word in said.split() if word.startswith("http")).rstrip(",")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_and_ends(sent: signal.Signals) -> None:
    with started("--port", "0", "--name", "my/model", "--max-model-len", "64") as (process, said):
        assert said.startswith("my/model at http://127.0.0.1:")
        assert said.endswith(", for anybody on this machine\n")
        client = openai.OpenAI(base_url=address(said), api_key="any", max_retries=0)
        (model,) = client.models.list()
        assert model.id == "my/model"
        assert model.model_extra is not None and model.model_extra["max_model_len"] == 64
        made = client.completions.create(model="my/model", prompt="abc", max_tokens=4)
        assert made.usage is not None and made.usage.completion_tokens == 4
        process.send_signal(sent)
        code, errors = ended(process)
        assert code == 0 and errors == "", errors


@pytest.mark.parametrize("how", ["option", "variable"])
def test_a_key(how: str) -> None:
    by_option = how == "option"
    options = ["--api-key", "sk-1"] if by_option else []
    variables = {"KERNEL_HUB_API_KEY": "sk-of-another" if by_option else "sk-1"}
    with started("--port", "0", "--host", "::1", *options, **variables) as (_, said):
        assert "http://[::1]:" in said and "whoever has the key on this machine" in said
        client = openai.OpenAI(base_url=address(said), api_key="sk-1", max_retries=0)
        assert len(list(client.models.list())) == 1
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="sk-of-another-kind").models.list()


def test_it_says_that_anybody_can_come() -> None:
    with started("--port", "0", "--host", "0.0.0.0") as (_, said):
        assert "for anybody who reaches this machine: set $KERNEL_HUB_API_KEY" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-waiting", "0"), "is not above 0"),
        (("--drain-timeout", "nan"), "is not above 0"),
        (("--read-timeout", "x"), "invalid float value: 'x'"),
        (("--host", "no.such.host.invalid"), "can not listen on no.such.host.invalid port 8000"),
    ],
)
def test_errors_are_one_message(arguments: tuple[str, ...], words: str) -> None:
    with started(*arguments) as (process, said):
        code, errors = ended(process)
        assert (code, said) == (2, "") and words in errors and "Traceback" not in errors, errors


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with started("--port", str(port)) as (process, _):
            code, errors = ended(process)
            assert code == 2 and f"port {port}: Address already in use" in errors


def test_ranks_end_together() -> None:
    """Two processes by torchrun's variables: the second runs what the first is asked."""
    world: dict[str, Any] = {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "kernel_hub", "serve", "tiny", "--device", "cpu",
                 "--port", "0"],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**os.environ, **world, "RANK": str(rank), "PYTHONPATH": str(ROOT),
                     "OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]  # fmt: skip
        for process in ranks:
            stack.callback(process.kill)
        assert ranks[0].stdout is not None
        client = openai.OpenAI(base_url=address(ranks[0].stdout.readline()), api_key="any")
        together = client.completions.create(
            model="tiny", prompt="abc", max_tokens=6, temperature=0
        )
        assert together.usage is not None and together.usage.completion_tokens == 6
        ranks[0].send_signal(signal.SIGTERM)
        ends = [ended(process) for process in ranks]
        assert [code for code, _ in ends] == [0, 0], ends
