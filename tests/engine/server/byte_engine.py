"""An engine whose tokens are bytes and whose logits are drawn from the tokens before them.

It keeps the interface of kernel_hub.engine.Engine, and what it answers can be said beforehand
(`alone`). A second thread that touches it, or a page it loses, fails the test.
"""

from __future__ import annotations

import codecs
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernel_hub.engine.requests import Delta, Request, TokenLogprob
from kernel_hub.errors import PromptTooLongError, RequestError

EOS, POISON = 256, 257
VOCAB = 260
PAGE = 16


def logits(context: Sequence[int]) -> np.ndarray:
    """Of the token after `context`: mostly letters, now and then a character of two bytes."""
    last = list(context[-6:])
    generator = np.random.default_rng(zlib.crc32(bytes(t % 256 for t in last)))
    scores = generator.normal(size=VOCAB) * 2
    scores[97:123] += 7
    scores[32] += 8
    scores[0xC3] += 6
    scores[EOS] += 3.5
    scores[258:] = scores[POISON] = -60
    if last and last[-1] == 0xC3:  # the second byte of é and its like
        scores[0xA0:0xC0] += 40
    return scores


@dataclass
class Running:
    request: Request
    tokens: list[int]
    shown: int = 0
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    text: str = ""

    @property
    def pages(self) -> int:
        return -(-len(self.tokens) // PAGE)


class ByteEngine:
    """At most `most_running` at a time; one begins where its prompt fits into what is left of
    `pages_total` pages of 16 tokens, and may outgrow it: nothing is preempted."""

    name, max_model_len, vocab_size = "bytes", 512, VOCAB

    def __init__(self, step_s: float = 0.0, most_running: int = 8, pages_total: int = 512) -> None:
        self.step_s, self.most_running, self.pages_total = step_s, most_running, pages_total
        self.tokenizer = None  # tokens are bytes
        self.eos_token_ids = (EOS,)
        self.on_step: Callable[[ByteEngine], None] = lambda engine: None
        self.running: dict[str, Running] = {}
        self.waiting: dict[str, Running] = {}
        self.over: list[Delta] = []
        self.aborted: list[str] = []
        self._counts = dict.fromkeys(
            ("prefix_hit_tokens", "prompt_tokens", "generated_tokens", "preemptions", "steps"), 0
        )
        self._owner: int | None = None

    def _owned(self) -> None:
        self._owner = self._owner or threading.get_ident()
        assert self._owner == threading.get_ident(), "two threads use the engine"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(t for t in tokens if t < 256).decode("utf-8", "replace")

    def chat(self, messages: list[dict[str, Any]], tools: Any = None, **options: Any) -> list[int]:
        if messages[-1]["role"] == "assistant":
            raise RequestError("the last message is the assistant's own", argument="messages")
        said = "".join(f"<{one['role']}>{one['content']}" for one in messages)
        return self.encode(f"{len(tools or ())}{said}<assistant>")

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.over)

    def submit(self, request: Request) -> None:
        self._owned()
        params = request.params
        for name, tokens in {"prompt": request.prompt, "logit_bias": params.logit_bias}.items():
            if any(not 0 <= token < VOCAB for token in tokens):
                raise RequestError(f"{name}: expected token ids below {VOCAB}", argument=name)
        if len(request.prompt) >= self.max_model_len:
            raise PromptTooLongError(f"the prompt has {len(request.prompt)} tokens, over the "
                                     f"{self.max_model_len}", argument="prompt")  # fmt: skip
        self.waiting[request.id] = Running(request, list(request.prompt))
        self._counts["prompt_tokens"] += len(request.prompt)

    def abort(self, request_id: str) -> None:
        self._owned()
        if self.running.pop(request_id, None) or self.waiting.pop(request_id, None):
            self.aborted.append(request_id)
            self.over.append(Delta(request_id, (), "", (), "abort"))

    def stats(self) -> dict[str, int]:
        if self._owner:
            self._owned()
        return self.stats_now()

    def stats_now(self) -> dict[str, int]:
        """Of any thread, where the engine rests."""
        used = sum(one.pages for one in self.running.values())
        return {
            "running": len(self.running), "waiting": len(self.waiting), "pages_used": used,
            "pages_total": self.pages_total, **self._counts,
        }  # fmt: skip

    def step(self) -> list[Delta]:
        self._owned()
        self._counts["steps"] += 1
        self.on_step(self)
        if self.step_s:
            time.sleep(self.step_s)
        while self.waiting and len(self.running) < self.most_running:
            name = next(iter(self.waiting))
            free = self.pages_total - sum(one.pages for one in self.running.values())
            if self.waiting[name].pages > free:
                break
            self.running[name] = self.waiting.pop(name)
        made, self.over = self.over, []
        for name, one in list(self.running.items()):
            made.append(self._advance(one))
            if made[-1].finish_reason:
                del self.running[name]
        return made

    def _advance(self, one: Running) -> Delta:
        request, params = one.request, one.request.params
        if POISON in request.prompt:
            return Delta(request.id, (), "", (), "error", "this prompt is poisoned")
        token, logprob = choose(one.tokens, params, len(one.tokens) - len(request.prompt))
        self._counts["generated_tokens"] += 1
        one.tokens.append(token)
        generated = len(one.tokens) - len(request.prompt)
        finish = None
        if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
            finish = "stop"
        elif generated == (params.max_tokens or 10**9) or len(one.tokens) == self.max_model_len:
            finish = "length"
        if params.grammar is not None and finish != "stop":
            assert params.grammar.accept(token)
        if finish != "stop":
            one.text += one.decoder.decode(bytes([token]) if token < 256 else b"")
        if finish:
            one.text += one.decoder.decode(b"", final=True)
        ends = [at for stop in params.stop if (at := one.text.find(stop)) >= 0]
        if ends:
            one.text, finish = one.text[: min(ends)], "stop"
        safe = len(one.text)
        if not finish:  # the longest end of the text that a stop string begins with is held back
            for stop in params.stop:
                for n in range(1, len(stop)):
                    if one.text.endswith(stop[:n]):
                        safe = min(safe, len(one.text) - n)
        text, one.shown = one.text[one.shown : safe], max(one.shown, safe)
        return Delta(request.id, (token,), text, (logprob,) if logprob else (), finish)


def choose(tokens: list[int], params: Any, place: int) -> tuple[int, TokenLogprob | None]:
    """The next token and, where asked for, its log-probability among the likeliest."""
    scores = logits(tokens)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if params.grammar is not None:
        mask = np.zeros(-(-VOCAB // 32), np.int32)
        params.grammar.bitmask(mask)
        allowed = (mask[np.arange(VOCAB) // 32] >> (np.arange(VOCAB) % 32)) & 1
        scores = np.where(allowed == 1, scores, -1e30)
    logprobs = scores - np.log(np.exp(scores - scores.max()).sum()) - scores.max()
    noise = np.zeros(VOCAB)
    if params.temperature:
        seed = params.seed if params.seed is not None else int.from_bytes(np.random.bytes(4), "big")
        noise = np.random.default_rng((seed, place)).gumbel(size=VOCAB) * params.temperature
    token = int((scores + noise).argmax())
    if params.logprobs is None:
        return token, None
    best = np.argsort(-logprobs, kind="stable")[: params.logprobs]
    top = tuple((int(t), float(logprobs[t])) for t in best)
    return token, TokenLogprob(token, float(logprobs[token]), top)


def alone(prompt: Sequence[int], params: Any) -> tuple[list[int], str, str]:
    """(tokens, text, finish reason) that a request gets, whoever else is served."""
    engine = ByteEngine()
    engine.submit(Request("alone", tuple(prompt), params))
    tokens, text = [], ""
    while True:
        (delta,) = engine.step()
        tokens += delta.tokens
        text += delta.text
        if delta.finish_reason:
            return tokens, text, delta.finish_reason
