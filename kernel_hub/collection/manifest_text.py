"""The text of a manifest: megabytes, of which only what is asked for is decoded."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ..errors import CubinCorruptError

_NAME = re.compile(r"[\w.$-]+")


def split(text: bytes, start: int, end: int, indent: bytes) -> dict[str, slice] | None:
    """{name: place of its JSON in `text`} of one level; None where the layout is not ours.

    JSON text holds no line break inside a string, so a comma, a line break and `indent` before
    a quote can only be what `to_json` puts between two entries of that level.
    """
    table, mark = dict[str, slice](), indent + b'"'
    while text.startswith(mark, start):
        stop = text.find(b"\n", start, end)  # one character: several are sought 8 x as slowly
        while stop >= 0 and not (text[stop - 1 : stop] == b"," and text.startswith(mark, stop + 1)):
            stop = text.find(b"\n", stop + 1, end)
        stop = stop if stop >= 0 else end + 1
        colon = text.find(b'": ', start, stop)
        name = text[start + len(mark) : max(colon, 0)].decode(errors="replace")
        if not _NAME.fullmatch(name):
            return None
        table[name] = slice(colon + 3, stop - 1)
        start = stop + 1
    return table or None


class Lines(Sequence[object]):
    """A JSON list with each entry on a line of its own, `text[part]`; cut up when one is asked for.

    An entry is JSON not decoded yet, as bytes.
    """

    def __init__(self, text: bytes, part: slice) -> None:
        self._text, self._part = text, part
        self._entries: list[bytes] | None = None

    def _all(self) -> list[bytes]:
        if self._entries is None:
            lines = self._text[self._part]
            self._entries = lines.split(b",\n") if lines else []
        return self._entries

    def __len__(self) -> int:
        return len(self._all())

    def __getitem__(self, number: Any) -> Any:
        return self._all()[number]


def decoded(raw: object, where: str) -> object:
    return loads(raw, where) if isinstance(raw, bytes) else raw


def loads(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CubinCorruptError(f"{where} is not JSON: {error}") from None
