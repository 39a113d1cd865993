"""Which tokens go through the model next: requests in order, chunks of prompts beside decode rows.

Knows sequences and pages; no tensors, no text.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from .pages import Pages
from .requests import Request
from .shapes import beside

NGRAM = 3  # tokens that must stand in the text before for what followed them to be a draft
KNOBS = np.dtype([  # what `sample` is always given a row
    ("seed", "i8"), ("temperature", "f4"), ("top_k", "i4"), ("top_p", "f4"), ("min_p", "f4"),
])  # fmt: skip


@dataclass(eq=False)
class Sequence:
    """A request under way."""

    request: Request
    tokens: list[int]  # one that a pass under way draws is the name that `begun` gave it
    seed: int
    most: int  # tokens it may have, the prompt's included
    known: int = field(init=False)  # tokens, less those that passes under way draw
    knobs: bytes = field(init=False)  # KNOBS of a row
    is_guided: bool = field(init=False)  # the host must know what it said to say what it may say
    computed: int = 0  # tokens whose keys and values lie in the cache once passes under way end
    pages: array[int] = field(default_factory=lambda: array("i"))
    kept: int = 0  # pages that may be found by their digests
    digests: list[bytes] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)  # guessed, to be verified in the next pass
    chunk: int = 0  # tokens of the pass that is under way, drafts included
    prompt_words: Any = None  # as batch.py has made them
    stream: Any = None  # its text, as engine.py has made it
    ends: frozenset[int] = frozenset()  # tokens after which it is over, engine.py's too
    _seen: dict[tuple[int, ...], int] = field(default_factory=dict)
    _indexed: int = NGRAM

    def __post_init__(self) -> None:
        p, self.known = self.request.params, len(self.tokens)
        knobs = self.seed, p.temperature, p.top_k, p.top_p, p.min_p
        self.knobs = np.array(knobs, KNOBS).tobytes()
        penalties = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
        self.is_guided = p.grammar is not None or penalties != (1, 0, 0)

    @property
    def missing(self) -> int:
        """Tokens that have not gone through the model; 1 of one that answers."""
        return len(self.tokens) - self.computed

    @property
    def samples(self) -> int:
        """Logits that the pass under way is asked for: none before the end of the prompt."""
        return max(0, self.computed + self.chunk - len(self.tokens) + 1)

    def draft(self, most: int) -> None:
        """Guess the next tokens: what followed the last few where they stood before."""
        tokens, seen = self.tokens, self._seen
        for end in range(self._indexed, len(tokens)):  # not yet the n-gram at the very end
            seen[tuple(tokens[end - NGRAM : end])] = end
        self._indexed = max(self._indexed, len(tokens))
        at = seen.get(tuple(tokens[-NGRAM:]))
        if at is not None:  # a short text from there to the end goes round
            follow = tokens[at : at + most]
            self.drafts = (follow * -(-most // len(follow)))[:most]


class Scheduler:
    """Requests that wait and that run, and the pages that those have."""

    def __init__(
        self, pages: Pages, max_batch: int, max_tokens: int, max_len: int, drafts: int
    ) -> None:
        """max_tokens: of a pass. max_len: of a sequence; the cache must have room for one."""
        self.pages, self.max_batch, self.max_tokens = pages, max_batch, max_tokens
        self.max_len, self.drafts = max_len, drafts
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # in the order in which they were let in
        self.num_hits = self.num_preemptions = 0

    def plan(self) -> list[Sequence]:
        """Who goes into the next pass, each with its `chunk`; those with one token first."""
        budget, found = self.max_tokens, list[Sequence]()
        answering = [s for s in self.running if s.missing <= 1]
        prompts = [s for s in self.running if s.missing > 1]
        may_come = self.waiting and len(self.running) < self.max_batch
        drafts = 0 if prompts or may_come else self.drafts  # beside prompts no row is free
        # Tokens of sequences that answer already come before chunks of prompts.
        for sequence in answering:
            if sequence in self.running:  # it has not given way to one before it
                budget -= self._planned(sequence, found, budget, drafts)
        if found:  # others wait for the pass to end
            coming = (*self.running, *islice(self.waiting, self.max_batch - len(self.running)))
            budget = min(budget, beside(len(found), sum(s.missing for s in coming)))
        for sequence in prompts:
            if sequence in self.running:
                budget -= self._planned(sequence, found, budget)
        while budget and (admitted := self._admitted()):
            budget -= self._planned(admitted, found, budget)
        return sorted(found, key=lambda s: s.chunk > 1)

    def _chunk(self, sequence: Sequence, budget: int, drafts: int) -> int:
        """How many of its tokens go next, with drafts behind the last one."""
        if len(sequence.tokens) == sequence.most:  # its last one is being drawn
            return 0
        missing, params = sequence.missing, sequence.request.params
        sequence.drafts = []
        if missing == 1 and drafts and params.grammar is None:
            most = min(drafts, budget - 1, self.max_len - len(sequence.tokens))
            room = len(self.pages.free) + len(sequence.pages)
            most = min(most, room * self.pages.page_size - len(sequence.tokens))
            if most > 0:
                sequence.draft(most)
        return min(missing + len(sequence.drafts), budget)

    def _planned(
        self, sequence: Sequence, found: list[Sequence], budget: int, drafts: int = 0
    ) -> int:
        """How many of its tokens go too; the youngest of those not in `found` may lose their pages.

        Those go to the head of the queue; what they said stays and is computed again.
        """
        chunk = sequence.chunk = self._chunk(sequence, budget, drafts)
        end, pages = sequence.computed + chunk, self.pages
        missing = -(-end // pages.page_size) - len(sequence.pages)
        while missing > len(pages.free):
            victim = next(s for s in reversed(self.running) if s not in found)
            self.end(victim)
            self.waiting.appendleft(victim)
            self.num_preemptions += 1
            if victim is sequence:
                return 0
        sequence.pages.extend(pages.new() for _ in range(missing))
        if chunk:
            found.append(sequence)
        return chunk

    def _admitted(self) -> Sequence | None:
        """Who waits longest, with the pages that hold its beginning; None without room for all."""
        if not self.waiting or len(self.running) >= self.max_batch:
            return None
        sequence, pages, size = self.waiting[0], self.pages, self.pages.page_size
        digests = pages.digests(sequence.tokens, sequence.known, sequence.digests)
        # At least one token goes through the model, for its logits.
        shared = pages.found(digests[: (len(sequence.tokens) - 1) // size])
        wanted = -(-min(len(sequence.tokens) + 1, self.max_len) // size) - len(shared)
        if wanted > len(pages.free) - pages.num_idle(shared):
            return None
        self.running[self.waiting.popleft()] = None
        pages.share(shared)
        sequence.pages = array("i", shared)
        sequence.kept, sequence.computed = len(shared), len(shared) * size
        self.num_hits += sequence.computed
        return sequence

    def begun(self, sequence: Sequence, name: int) -> None:
        """A pass of its chunk is under way; `name` stands for the token that it draws."""
        draws = sequence.samples > 0
        sequence.computed += sequence.chunk
        sequence.chunk = 0
        if draws:
            sequence.tokens.append(name)
        self._keep(sequence)

    def drawn(self, sequence: Sequence, place: int, new: list[int], wrong: int) -> None:
        """`new` tokens stand from `place` on; `wrong` drafts lie in the cache for nothing."""
        sequence.tokens[place : place + 1] = new
        sequence.known = place + len(new)
        sequence.computed -= wrong
        self._keep(sequence)

    def _keep(self, sequence: Sequence) -> None:
        """Let pages full of known tokens be found: who reads them does so in a later pass."""
        pages = self.pages
        full = min(sequence.computed, sequence.known) // pages.page_size
        if full > sequence.kept:
            digests = pages.digests(sequence.tokens, sequence.known, sequence.digests)
            for i in range(sequence.kept, full):
                pages.keep(sequence.pages[i], digests[i])
            sequence.kept = full

    def end(self, sequence: Sequence) -> None:
        """Give back all that it has, at once: whoever is given it writes it in a later pass."""
        if sequence in self.running:
            del self.running[sequence]
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.pages.release(sequence.pages)
        sequence.pages, sequence.computed, sequence.chunk = array("i"), 0, 0
