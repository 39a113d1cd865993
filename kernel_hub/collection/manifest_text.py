"""The text of a manifest: megabytes, of which only what is asked for is decoded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from ..errors import CubinCorruptError

_NAME = re.compile(r"[\w.$-]+")


def split(text: bytes, start: int, end: int, indent: bytes) -> dict[str, slice] | None:
    """{name: place of its JSON in `text`} of one level; None where the layout is not ours.

    JSON text holds no line break inside a string, so a comma, a line break and `indent` before
    a quote can only be what `to_json` puts between two entries of that level.
    """
    mark = indent + b'"'
    if not text.startswith(mark, start):
        return None
    table, at = dict[str, slice](), start + len(mark)
    for entry in text[at:end].split(b",\n" + mark):
        colon = entry.find(b'": ')
        name = entry[: max(colon, 0)].decode(errors="replace")
        if not _NAME.fullmatch(name):
            return None
        table[name] = slice(at + colon + 3, at + len(entry))
        at += len(entry) + len(mark) + 2
    return table


class Lines(Sequence[object]):
    """A JSON list with each entry on a line of its own, `text[part]`.

    An entry is JSON not decoded yet, as bytes. Lines are looked for up to the one asked for, once.
    """

    def __init__(self, text: bytes, part: slice) -> None:
        self._text, self._stop = text, part.stop
        # Where entries begin that were found; behind the last one where a next would.
        self._starts: list[int] = [part.start] if part.start < part.stop else [part.stop + 2]

    def _reach(self, number: float) -> list[int]:
        """`_starts`, up to the end of the entry of that number, or of all there are."""
        starts = self._starts
        if len(starts) > number + 1:
            return starts
        text, stop, starts, comma = self._text, self._stop, starts.copy(), ord(",")
        at = begin = starts[-1]
        while len(starts) < number + 2 and begin <= stop:
            while (at := text.find(b"\n", at, stop) + 1) > 0:  # a fifth of what two bytes take
                if text[at - 2] == comma and at - 2 >= begin:
                    break
            begin = at or stop + 2
            starts.append(begin)
        self._starts = starts  # one store: what two threads find at once is the same
        return starts

    def __len__(self) -> int:
        return len(self._reach(math.inf)) - 1

    def __getitem__(self, number: Any) -> Any:
        if number < 0:
            number += len(self)
        starts = self._reach(number)
        if not 0 <= number < len(starts) - 1:
            raise IndexError("list index out of range")
        return self._text[starts[number] : starts[number + 1] - 2]


class EntryLines(Mapping[str, object]):
    """As `Lines`, of the JSON object without its braces in `text[part]`: name -> bytes.

    indent: before each name. One entry is found by its name; all are cut up where they are listed.
    """

    def __init__(self, text: bytes, part: slice, indent: bytes, where: str) -> None:
        self._text, self._part, self._where = text, part, where
        self._indent = indent
        self._seen: dict[str, bytes] = {}

    @cached_property
    def _all(self) -> Mapping[str, object]:
        parts = split(self._text, self._part.start, self._part.stop, self._indent)
        if parts is None:
            table: dict[str, object] = loads(b"{%b}" % self._text[self._part], self._where)
            return table
        return {name: self._text[part] for name, part in parts.items()}

    def _found(self, name: str) -> bytes | None:
        """The entry of that name where it lies as `split` would find it."""
        text, start, stop = self._text, self._part.start, self._part.stop
        mark = b'%b"%b": {' % (self._indent, name.encode(errors="replace"))
        if not _NAME.fullmatch(name):
            return None
        at = text.rfind(b",\n" + mark, start, stop) + 2  # the last of a name counts
        if at == 1:
            if not text.startswith(mark, start):
                return None
            at = start
        end = text.find(b',\n%b"' % self._indent, at, stop)
        entry = text[at + len(mark) - 1 : stop if end < 0 else end]
        return entry if entry.endswith(b"}") else None

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __getitem__(self, name: str) -> object:
        if "_all" not in self.__dict__:
            found = self._seen.get(name) or self._found(name)
            if found is not None:
                self._seen[name] = found  # whether it is there is asked first
                return found
        return self._all[name]


def decoded(raw: object, where: str) -> object:
    return loads(raw, where) if isinstance(raw, bytes) else raw


def loads(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CubinCorruptError(f"{where} is not JSON: {error}") from None
