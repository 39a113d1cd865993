"""Requests in, text out, a pass at a time: what a server or a program holds of a model."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from ..errors import ModelError, PromptTooLongError, RankError, RequestError, listed
from .batch import batch_of
from .config import NAMED, ModelConfig
from .model import Model
from .pages import Pages
from .parallel import Group
from .requests import Delta, Generated, Request, SamplingParams, TokenLogprob
from .runner import Draws, Runner
from .scheduler import Scheduler, Sequence
from .text import Bytes, TextStream, text_of
from .weights import Random, Safetensors, check_world, expected, load

PAGE_SIZE = 64
_LIMITS: dict[str, tuple[float, float]] = {  # inclusive; two whole numbers: of whole numbers
    "temperature": (0.0, 100.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0), "max_tokens": (1, 2**31), "top_k": (0, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
}  # fmt: skip
_COUNTS = "max_batch", "max_tokens_a_pass", "max_model_len", "cache_tokens", "page_size"
_GREEDY = SamplingParams(temperature=0.0)


def _check_options(place: torch.device, world: int, given: Mapping[str, Any]) -> None:
    """Raise ModelError naming an option that nothing could run with."""
    for name in _COUNTS:
        if given[name] is not None and given[name] < 1:
            raise ModelError(f"{name}: expected at least 1, found {given[name]}")
    if given["dtype"] not in (None, torch.bfloat16, torch.float16):
        raise ModelError(
            f"dtype: expected torch.bfloat16 or torch.float16, found {given['dtype']!r}"
        )
    is_other = place.type == "cuda" and torch.cuda.get_device_capability(place) != (9, 0)
    if given["deterministic"] == "batch" and (is_other or world > 1 or given["page_size"] % 8):
        raise ModelError(
            "deterministic='batch': expected a GPU of compute capability 9.0 (or the CPU, where it "
            "changes nothing), one process and a page_size that is a multiple of 8, "
            f"found {place}, {world} and {given['page_size']}"
        )


@dataclass
class _Flight:
    """A pass under way: for whom it draws, from which place on, how many, and of how many rows."""

    rows: list[tuple[Sequence, int, int, int]]
    drawn: Draws
    is_awaited: bool  # what the next pass does depends on these tokens


class Engine:
    """A model that answers requests. Not for several threads at once."""

    def __init__(
        self, config: ModelConfig | None = None, *, folder: Path | None = None, name: str = "",
        device: str | torch.device | None = None, dtype: torch.dtype | None = None,
        max_batch: int = 256, max_tokens_a_pass: int = 2048, max_model_len: int | None = None,
        cache_tokens: int | None = None, drafts: int = 0, page_size: int = PAGE_SIZE, seed: int = 0,
        random_weights: bool = False, deterministic: bool | Literal["batch"] = False,
    ) -> None:  # fmt: skip
        """As `from_pretrained` and `random` make it."""
        given, device = locals(), device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.name, self.group = name, Group(torch.device(device))
        place, dtype = self.group.device, dtype or torch.bfloat16
        self.text: Any = Bytes()

        def loaded() -> Model:
            _check_options(place, self.group.world, given)
            c = config or ModelConfig.from_folder(folder or Path())
            check_world(c, self.group.world)
            if folder is not None:
                self.text = text_of(folder, c.vocab_size)
            source: Any = Random(c, place, seed)
            if folder is not None and not random_weights:
                source = Safetensors(folder, expected(c))
            longest = min(max_model_len or c.max_position, c.max_position)
            weights = load(c, source, self.group, place, dtype)
            return Model(c, weights, self.group, longest, deterministic)

        model = self.group.agree(loaded)
        self.vocab_size, self.eos_token_ids = model.config.vocab_size, model.config.eos_token_ids
        self.tokenizer = getattr(self.text, "fast", None)
        tokens = cache_tokens or model.cache_room(max_batch, max_tokens_a_pass)
        num_pages = max(1, tokens // page_size)
        self.max_model_len = min(model.max_len, num_pages * page_size)
        max_pages = -(-self.max_model_len // page_size)
        self.runner = Runner(model, num_pages, page_size, max_pages, max_tokens_a_pass, max_batch)
        self._scheduler = Scheduler(
            Pages(num_pages, page_size), max_batch, max_tokens_a_pass, self.max_model_len, drafts
        )
        self._live, self._over = dict[str, Sequence](), list[Delta]()  # ended between two steps
        self._flight: _Flight | None = None
        self._counts = dict.fromkeys(("prompt_tokens", "generated_tokens", "steps"), 0)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> Engine:
        """The model of a Hugging Face folder: config.json, safetensors, tokenizer.json.

        device: None: the GPU where there is one, else the CPU. dtype: bf16 (None) or fp16.
        max_batch: requests that run at once. max_tokens_a_pass: rows of one pass, prompts' chunks
        among them. max_model_len: None: the model's, as far as the cache has room. cache_tokens:
        None: what the GPU's free memory holds; 8,192 on the CPU. drafts: guessed tokens that one
        pass verifies. random_weights: of the folder, the configuration alone. deterministic:
        "batch": on a GPU a request's tokens are those that it gets alone, whatever runs beside it,
        with shared prefixes, chunks and drafts (docs/batch_invariance.md); one process.

        Raises ModelError naming what the folder lacks or the engine does not know.
        """
        folder = Path(folder)
        return cls(**{"folder": folder, "name": folder.resolve().name, **options})

    @classmethod
    def random(cls, config: str | Mapping[str, Any] = "tiny", **options: Any) -> Engine:
        """Random weights of a config.json's content, or of a named one; tokens are bytes."""
        if isinstance(config, str):
            if config not in NAMED:
                raise RequestError(f"no model is named {config!r}; there are {listed(NAMED)}")
            options, config = {"name": config, **options}, NAMED[config]
        return cls(ModelConfig.from_dict(config), **{"name": "random", **options})

    def encode(self, text: str) -> list[int]:
        return self.text.encode(text)

    def decode(self, ids: List[int]) -> str:
        return self.text.decode(ids)

    def chat(self, messages: List[Mapping[str, Any]], **more: Any) -> list[int]:
        """The prompt of a conversation; `more`: what its template takes (tools, say)."""
        return self.text.chat(messages, **more)

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._over)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError naming what of it does not fit."""
        if request.id in self._live:
            raise RequestError(f"a request {request.id!r} is under way already", argument="id")
        room = self.max_model_len - len(request.prompt)
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {len(request.prompt)} tokens: with one more that is over the "
                f"{self.max_model_len} that the model and its cache have room for",
                argument="prompt",
            )
        params = _checked(request, self.vocab_size)  # looks at every token
        wanted = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = random.getrandbits(63) if params.seed is None else params.seed
        most = len(request.prompt) + wanted
        sequence = Sequence(request, list(request.prompt), seed, most)
        sequence.stream = TextStream(self.text.decode, params.stop, request.prompt)
        ends = frozenset() if params.ignore_eos else self.eos_token_ids
        sequence.ends = ends.union(params.stop_token_ids)
        self._live[request.id] = sequence
        self._scheduler.waiting.append(sequence)
        self._counts["prompt_tokens"] += len(request.prompt)

    def abort(self, request_id: str) -> None:
        """End a request, whose pages are free at once; the next step says so. Others: nothing."""
        if request_id in self._live:
            self._end(request_id, "abort")

    def _end(self, request_id: str, reason: str, error: Exception | None = None) -> None:
        self._scheduler.end(self._live.pop(request_id))
        said = None if error is None else f"{type(error).__name__}: {error}"
        self._over.append(Delta(request_id, (), "", (), reason, said))

    def step(self) -> list[Delta]:
        """Begin a pass and read the one before; what that one added to each request.

        A fault of one request ends that one alone.
        """
        last, self._flight = self._flight, None
        deltas = list[Delta]()
        if last is not None and last.is_awaited:
            deltas, last = self._read(last), None
        planned = self._scheduler.plan()
        self._counts["steps"] += bool(planned)
        try:
            self._flight = self._begun(planned) if planned else None
            deltas += self._read(last)
        except RankError:
            raise
        except Exception as error:  # noqa: BLE001 - a grammar's own, the device's memory
            deltas += self._read(last) + self._each_alone(planned, error)
        over, self._over = self._over, []
        return [*deltas, *over]

    def _each_alone(self, planned: list[Sequence], failure: Exception) -> list[Delta]:
        """Passes of one request instead of theirs together, which failed; those that fail end."""
        deltas = list[Delta]()
        for sequence in filter(self._lives, planned):
            try:
                if len(planned) == 1:
                    raise failure
                deltas += self._read(self._begun([sequence]))
            except RankError:
                raise
            except Exception as error:  # noqa: BLE001 - as above
                self._end(sequence.request.id, "error", error)
        return deltas

    def _lives(self, sequence: Sequence) -> bool:
        """Not ended while a pass of it was under way, its name perhaps given again."""
        return self._live.get(sequence.request.id) is sequence

    def _begun(self, planned: list[Sequence]) -> _Flight:
        """Give the device a pass of them."""
        batch = batch_of(planned, self.vocab_size, self._scheduler.pages.num_pages)
        try:
            drawn = self.runner.run(self.group.tell(batch))
        except Exception as error:
            if self.group.world == 1:
                raise
            raise self._broken(error) from error
        rows, name = [], self.vocab_size
        for sequence, num_rows in zip(planned, batch.samples, strict=True):
            rows.append((sequence, len(sequence.tokens), sequence.samples, num_rows))
            self._scheduler.begun(sequence, name)
            name += num_rows
        guided = any(s.is_guided for s, _, count, _ in rows if count)
        return _Flight(rows, drawn, guided or self._scheduler.drafts > 0)

    def _broken(self, error: Exception) -> RankError:
        Group.is_broken = True  # other ranks are in the middle of it
        return RankError(f"a pass of {self.group.world} processes failed: {error}")

    def _read(self, flight: _Flight | None) -> list[Delta]:
        """What a pass has drawn, taken to those of its requests that have not ended meanwhile."""
        if flight is None:
            return []
        try:
            tokens, logprobs = flight.drawn.read()
        except Exception as error:
            if self.group.world > 1:
                raise self._broken(error) from error
            for sequence in filter(self._lives, (row[0] for row in flight.rows)):
                self._end(sequence.request.id, "error", error)
            return []
        deltas, drawn, scores = list[Delta](), iter(tokens), iter(logprobs)
        for sequence, place, count, num_rows in flight.rows:
            new = list(islice(drawn, num_rows))[:count]
            likely = list(islice(scores, num_rows))[:count]
            if new and self._lives(sequence):
                try:
                    deltas.append(self._taken(sequence, place, new, likely))
                except Exception as error:  # noqa: BLE001 - a grammar's or a tokenizer's own
                    self._end(sequence.request.id, "error", error)
        return deltas

    def _taken(
        self, sequence: Sequence, place: int, drawn: list[int], likely: list[TokenLogprob]
    ) -> Delta:
        """Of the drawn tokens those whose drafts were right, as far as the request goes."""
        request, params = sequence.request, sequence.request.params
        stream, new, text, reason = sequence.stream, list[int](), "", None
        for i, token in enumerate(drawn):
            if i and sequence.drafts[i - 1] != drawn[i - 1]:
                break
            new.append(token)
            if params.grammar is not None and params.grammar.accept(token) is False:
                raise RequestError(f"the grammar does not take token {token}, which it allowed")
            if token in sequence.ends:
                reason = "stop"
            else:
                text += stream.push(token)
                if stream.is_stopped:
                    reason = "stop"
                elif place + len(new) >= sequence.most:
                    reason = "length"
            if reason is not None:
                break
        self._scheduler.drawn(sequence, place, new, len(drawn) - len(new))
        self._counts["generated_tokens"] += len(new)
        if reason is not None:
            if not stream.is_stopped:
                text += stream.flush()
            self._scheduler.end(sequence)
            del self._live[request.id]
        shown = () if params.logprobs is None else tuple(
            score._replace(top=score.top[: params.logprobs]) for score in likely[: len(new)]
        )  # fmt: skip
        return Delta(request.id, tuple(new), text, shown, reason)

    def stats(self) -> dict[str, int]:
        """Numbers since the start, and those of now: running, waiting, pages_used."""
        plan, pages = self._scheduler, self._scheduler.pages
        return {
            "running": len(plan.running), "waiting": len(plan.waiting),
            "pages_used": pages.num_pages - len(pages.free), "pages_total": pages.num_pages,
            "prefix_hit_tokens": plan.num_hits, "preemptions": plan.num_preemptions, **self._counts,
        }  # fmt: skip

    def generate(
        self, prompts: List[str] | List[List[int]],
        params: SamplingParams | List[SamplingParams] = _GREEDY,
    ) -> list[Generated]:  # fmt: skip
        """Whole answers to prompts, texts or token ids; all at once, in their order."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        found: dict[str, list[Delta]] = {}
        try:
            for i, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
                ids: Any = self.encode(prompt) if isinstance(prompt, str) else prompt
                self.submit(Request(f"generate-{i}", tuple(ids), own))
                found[f"generate-{i}"] = []
            while self.has_work:
                for delta in self.step():
                    if delta.request_id in found:
                        found[delta.request_id].append(delta)
        finally:  # of a refusal or an interrupt: nobody waits for the others any more
            for name in found:
                self.abort(name)
        return [Generated.of(deltas) for deltas in found.values()]

    def follow(self) -> None:
        """On ranks other than 0: run what rank 0 plans, until it closes."""
        try:
            while (batch := self.group.tell(None)) is not None:
                self.runner.run(batch)
            self.runner.close()
        except Exception as error:
            Group.is_broken = True
            raise RankError(f"rank {self.group.rank} of {self.group.world}: {error}") from error

    def close(self) -> None:
        """On rank 0: let the others go."""
        if not Group.is_broken:
            self.group.tell(None)
            self.runner.close()


def _checked(request: Request, vocab_size: int) -> SamplingParams:
    """Raise RequestError naming what is not right of a request, whatever the model's length."""
    params = request.params

    def refuse(argument: str, expected_: str, found: Any) -> RequestError:
        said = f"{argument}: expected {expected_}, found {found!r:.60}"
        return RequestError(said, argument=argument)

    if not request.prompt:
        raise refuse("prompt", "at least one token", request.prompt)
    for argument in ("prompt", "stop_token_ids", "logit_bias"):
        for token in getattr(request if argument == "prompt" else params, argument):
            if not isinstance(token, int) or not 0 <= token < vocab_size:
                raise refuse(argument, f"token ids from 0 to {vocab_size - 1}", token)
    for argument, (low, high) in {**_LIMITS, "logprobs": (0, vocab_size)}.items():
        value, is_whole = getattr(params, argument), isinstance(low, int)
        if value is None and getattr(_GREEDY, argument) is None:
            continue
        if not isinstance(value, int if is_whole else (int, float)) or not low <= value <= high:
            kind = "a whole number" if is_whole else "a number"
            raise refuse(argument, f"{kind} from {low} to {high}", value)
    for token, bias in params.logit_bias.items():
        if not isinstance(bias, (int, float)) or not -1000 <= bias <= 1000:
            raise refuse("logit_bias", "numbers from -1000 to 1000", {token: bias})
    stop: Any = params.stop
    if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
        raise refuse("stop", "texts of at least one character", stop)
    return params
