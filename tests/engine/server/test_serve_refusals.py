"""What is refused: the status, and OpenAI's error object that names what is wrong."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

for package in ("starlette", "uvicorn", "prometheus_client", "httpx", "openai"):
    pytest.importorskip(package, reason="the server or its client is made of it")

import openai  # noqa: E402
from byte_engine import POISON  # noqa: E402
from served_here import KEY, Served, served  # noqa: E402

MESSAGES = [{"role": "user", "content": "hi"}]
TEXT = {"model": "bytes", "prompt": "hi"}
CHAT = {"model": "bytes", "messages": MESSAGES}


@pytest.fixture(scope="module")
def here() -> Iterator[Served]:
    with served(body_bytes=100_000, read_s=1.0) as running:
        yield running
        running.settles()


def refused(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    (name,) = answer.json()
    error: dict[str, Any] = answer.json()[name]
    assert name == "error" and error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and isinstance(error["message"], str)
    assert error["type"] == {401: "authentication_error", 429: "rate_limit_error"}.get(
        status, "server_error" if status >= 500 else "invalid_request_error"
    )
    return error


# (route, what is added to a good body, param, code)
BAD = [
    ("completions", {"temperature": 2.1}, "temperature", "invalid_value"),
    ("completions", {"temperature": "hot"}, "temperature", "invalid_value"),
    ("completions", {"temperature": "1"}, "temperature", "invalid_value"),
    ("completions", {"top_p": 0}, "top_p", "invalid_value"),
    ("completions", {"max_tokens": 0}, "max_tokens", "invalid_value"),
    ("completions", {"max_tokens": 1.5}, "max_tokens", "invalid_value"),
    ("completions", {"n": 0}, "n", "invalid_value"),
    ("completions", {"n": 129}, "n", "invalid_value"),
    ("completions", {"n": 65, "prompt": ["a", "b"]}, "n", None),
    ("completions", {"logprobs": 6}, "logprobs", "invalid_value"),
    ("completions", {"stop": ["a"] * 5}, "stop", "invalid_value"),
    ("completions", {"stop": ["a", ""]}, "stop.1", "invalid_value"),
    ("completions", {"stop": 5}, "stop", "invalid_value"),
    ("completions", {"presence_penalty": 3}, "presence_penalty", "invalid_value"),
    ("completions", {"logit_bias": {"x": 1}}, "logit_bias.x", "invalid_value"),
    ("completions", {"logit_bias": {"1": 101}}, "logit_bias.1", "invalid_value"),
    ("completions", {"logit_bias": {"100000": 1}}, "logit_bias", "invalid_value"),
    ("completions", {"seed": 2**64}, "seed", "invalid_value"),
    ("completions", {"prompt": None}, "prompt", "invalid_value"),
    ("completions", {"prompt": []}, "prompt", "invalid_value"),
    ("completions", {"prompt": ""}, "prompt.0", "invalid_value"),
    ("completions", {"prompt": [1, 99999]}, "prompt", "invalid_value"),
    ("completions", {"prompt": [1, -1], "echo": True}, "prompt.0", "invalid_value"),
    ("completions", {"prompt": [2**80], "echo": True}, "prompt.0", "invalid_value"),
    ("completions", {"prompt": ["x"] * 129}, "prompt", "invalid_value"),
    ("completions", {"stop": ["a", "b" * 1001]}, "stop.1", "invalid_value"),
    ("completions", {"prompt": "x" * 600}, "prompt", "context_length_exceeded"),
    ("completions", {"echo": True, "logprobs": 1}, "echo", None),
    ("completions", {"stream_options": {"include_usage": True}}, "stream_options", None),
    ("completions", {"best_of": 3}, "best_of", "unknown_parameter"),
    ("completions", {"max_completion_tokens": 3}, "max_completion_tokens", "unknown_parameter"),
    ("chat/completions", {"messages": []}, "messages", "invalid_value"),
    ("chat/completions", {"messages": [{"content": "x"}]}, "messages.0.role",
     "missing_required_parameter"),
    ("chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role",
     "invalid_value"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages.0.content.0.type", "invalid_value"),
    ("chat/completions", {"messages": [{"role": "assistant", "content": "x"}]}, "messages",
     "invalid_value"),
    ("chat/completions", {"messages": [{"role": "user", "content": "y" * 900}]}, None,
     "context_length_exceeded"),
    ("chat/completions", {"top_logprobs": 3}, "top_logprobs", None),
    ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ("chat/completions", {"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ("chat/completions", {"response_format": {"type": "xml"}}, "response_format.type",
     "invalid_value"),
    ("chat/completions", {"response_format": {"type": "json_schema"}},
     "response_format.json_schema", "missing_required_parameter"),
    ("chat/completions", {"frobnicate": 1}, "frobnicate", "unknown_parameter"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "more", "param", "code"), BAD)
def test_bad_parameters(
    here: Served, route: str, more: dict[str, Any], param: str | None, code: str | None
) -> None:
    good = CHAT if "messages" in more or route.startswith("chat") else TEXT
    with here.client() as client:
        for stream in ({}, {"stream": True}):
            body = {**good, **more, **({} if "stream_options" in more else stream)}
            error = refused(client.post(f"/v1/{route}", json=body), 400)
            assert error["code"] == code, error
            assert param is None or error["param"] == param, error


def test_too_many_biases(here: Served) -> None:
    """Each takes its time in every step, for all."""
    for count, said in ((1025, "at most 1024 items"), (1024, "expected token ids below 260")):
        body = {**TEXT, "logit_bias": dict.fromkeys(range(count), 1)}
        error = refused(here.client().post("/v1/completions", json=body), 400)
        assert error["param"] == "logit_bias" and said in error["message"]


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_missing_parameters(here: Served, missing: str) -> None:
    body = {name: value for name, value in TEXT.items() if name != missing}
    error = refused(here.client().post("/v1/completions", json=body), 400)
    assert (error["param"], error["code"]) == (missing, "missing_required_parameter")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[1]", b'"x"', b"\xff\xfe", b'{"model": "bytes", "prompt": "\\ud800"}',
     b"[" * 50_000, b'{"model": "bytes", "prompt": "x", "temperature": NaN}',
     b'{"model": "bytes", "prompt": "x", "seed": 1' + b"0" * 5000 + b"}"],
    ids=range(10),
)  # fmt: skip
def test_bad_json(here: Served, body: bytes) -> None:
    head = {"content-type": "application/json"}
    for route in ("completions", "chat/completions"):
        error = refused(here.client().post(f"/v1/{route}", content=body, headers=head), 400)
        assert "None" not in error["message"]


def test_nulls_are_as_if_not_given(here: Served) -> None:
    nothing: dict[str, Any] = {
        "stream": None, "stream_options": None, "n": None, "temperature": None, "top_p": None,
        "seed": None, "stop": None, "logit_bias": None, "user": None, "logprobs": None,
        "echo": None, "presence_penalty": None, "frequency_penalty": None, "max_tokens": None,
    }  # fmt: skip
    body = {**TEXT, **nothing, "ignore_eos": True}
    answer = here.client().post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 16


def test_other_types_of_bodies(here: Served) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        head = {"content-type": kind}
        answer = here.client().post("/v1/completions", content=json.dumps(TEXT), headers=head)
        assert "application/json" in refused(answer, 415)["message"]
    head = {"content-type": "Application/JSON; charset=utf-8"}
    answer = here.client().post("/v1/completions", content=json.dumps(TEXT), headers=head)
    assert answer.status_code == 200


def test_an_unknown_model(here: Served) -> None:
    for body in ({**TEXT, "model": "gpt-4"}, {**TEXT, "model": ""}):
        error = refused(here.client().post("/v1/completions", json=body), 404)
        assert error["code"] == "model_not_found" and "`bytes`" in error["message"]


def test_unknown_routes_and_methods(here: Served) -> None:
    with here.client() as client:
        refused(client.get("/v1/nothing"), 404)
        refused(client.post("/"), 404)
        refused(client.get("/v1/completions"), 405)
        refused(client.post("/v1/models", json={}), 405)


@pytest.mark.parametrize("is_stated", [True, False])
def test_a_body_that_is_too_large(here: Served, is_stated: bool) -> None:
    text = json.dumps({**TEXT, "prompt": "x" * 3_000_000}).encode()
    content: Any = text if is_stated else (text[i : i + 9999] for i in range(0, len(text), 9999))
    head = {"content-type": "application/json"}
    answer = here.client().post("/v1/completions", content=content, headers=head)
    assert "100000 bytes" in refused(answer, 413)["message"]


def test_a_body_that_does_not_come(here: Served) -> None:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        "Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
    )
    with socket.create_connection(("127.0.0.1", here.port), timeout=10) as client:
        client.sendall(head.encode())
        said = b""
        while part := client.recv(4096):
            said += part
    assert said.startswith(b"HTTP/1.1 408") and b"over 1 s" in said


def test_keys(here: Served) -> None:
    import httpx

    with httpx.Client(base_url=here.url) as client:
        for key in (None, "", "Bearer", f"Bearer {KEY}x", f"Basic {KEY}", KEY, "é"):
            head = {} if key is None else {"Authorization": key.encode()}
            for path in ("/v1/models", "/metrics", "/v1/nothing"):
                answer = client.get(path, headers=head)
                assert refused(answer, 401)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
            refused(client.post("/v1/completions", json=TEXT, headers=head), 401)
        assert client.get("/health").json() == {"status": "ok"}
    with pytest.raises(openai.AuthenticationError):
        here.openai(api_key="sk-other").models.list()


def test_a_key_of_any_characters() -> None:
    """As UTF-8, which is what a terminal sends."""
    import httpx

    with served(api_key="schlüssel") as here:
        for key, status in (("schlüssel", 200), ("schlussel", 401)):
            head = {"Authorization": f"Bearer {key}".encode()}
            assert httpx.get(f"{here.url}/v1/models", headers=head).status_code == status


def test_without_a_key_anybody_may_ask() -> None:
    import httpx

    with served(api_key=None) as here:
        assert httpx.post(f"{here.url}/v1/completions", json=TEXT).status_code == 200


def test_a_poisoned_request_hurts_itself_alone(here: Served) -> None:
    client = here.openai()
    for stream in (False, True):
        with pytest.raises(openai.APIError, match="poisoned") as caught:
            made = client.completions.create(model="bytes", prompt=[POISON], stream=stream)
            list(made)
        assert caught.value.code == "engine_error"
    assert client.completions.create(**TEXT, max_tokens=3).usage.completion_tokens <= 3


def test_a_million_errors_are_one() -> None:
    """Each would be told in turn, by the thread that answers everybody."""
    from pydantic import ValidationError

    from kernel_hub.engine.server.bodies import Chat, Completion
    from kernel_hub.engine.server.refusals import MOST_ERRORS, api_error

    many: list[Any] = [{}] * 5000
    for kind, good, more in (
        (Completion, TEXT, {"prompt": [[""] * 5000]}), (Completion, TEXT, {"prompt": [""] * 5000}),
        (Completion, TEXT, {"stop_token_ids": [""] * 5000}), (Chat, CHAT, {"tools": [""] * 5000}),
        (Chat, CHAT, {"messages": many}), (Chat, CHAT, {"stop": many}),
        (Chat, CHAT, {"messages": [{"role": "user", "content": many}]}),
        (Chat, CHAT, {"messages": [{"role": "user", "tool_calls": [""] * 5000}]}),
    ):  # fmt: skip
        with pytest.raises(ValidationError) as caught:
            kind.model_validate_json(json.dumps({**good, **more}))
        assert caught.value.error_count() < 300, more.keys()
    for more in ({"logit_bias": dict.fromkeys("x" * i for i in range(MOST_ERRORS + 2))},
                 dict.fromkeys("x" * i for i in range(1, MOST_ERRORS + 2))):  # fmt: skip
        with pytest.raises(ValidationError) as caught:
            Completion.model_validate_json(json.dumps({**TEXT, **more}))
        error = api_error(caught.value)
        assert error.status_code == 400 and "places" in error.detail
