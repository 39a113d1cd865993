"""Entries of a manifest's text: one found by its name is what it is among all of them."""

from __future__ import annotations

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from kernel_hub.collection.manifest_text import EntryLines, Lines, decoded

INNER = '{"text": "a,\\n \\"b\\": {", "of": {"b": 1}}'


def lines(text: bytes, indent: bytes = b" ") -> EntryLines:
    return EntryLines(b"before " + text + b" behind", slice(7, 7 + len(text)), indent, "here")


def both_ways(text: bytes, name: str) -> tuple[object, object]:
    """(found by its name, found among all)."""
    alone, listed = lines(text), lines(text)
    assert len(listed)
    return decoded(alone[name], "here"), decoded(listed[name], "here")


@pytest.mark.parametrize("name", ["a", "b", "ab", "b.c"])
def test_an_entry_is_the_same_alone_and_among_all(name: str) -> None:
    text = ",\n".join(f' "{each}": {INNER}' for each in ("ab", "a", "b.c", "b")).encode()
    alone, listed = both_ways(text, name)
    assert alone == listed == json.loads(INNER)
    assert name in lines(text) and "c" not in lines(text) and "of" not in lines(text)


def test_the_last_of_a_name_counts() -> None:
    text = b' "a": {"x": 1},\n "b": {"x": 2},\n "a": {"x": 3}'
    assert both_ways(text, "a") == ({"x": 3}, {"x": 3})


@pytest.mark.parametrize(
    "text",
    [
        b'"a": {"x": 1}, "b": {"x": 2}',
        b'  "a":{"x": 1},\n  "b" : {"x": 2}',
        b' "a": 1,\n "b": {"x": 2}',
    ],
)
def test_other_layouts_are_decoded_whole(text: bytes) -> None:
    assert both_ways(text, "b") == ({"x": 2}, {"x": 2})
    assert list(lines(text)) == ["a", "b"]


@pytest.mark.parametrize("name", ["", 'a": {"x', "no", "a\n"])
def test_what_is_not_there(name: str) -> None:
    assert name not in lines(b' "a": {"x": 1}')


def test_the_few_of_a_list_that_are_looked_for_are_those_it_is_cut_into() -> None:
    draw = random.Random(20261127)
    for _ in range(300):
        rows = [
            b"".join(draw.choices([b"a", b",", b"\n", b"{}"], k=draw.randrange(1, 6)))
            for _ in range(draw.randrange(12))
        ]
        before, behind = draw.choice([b"", b",\n", b"[\n"]), draw.choice([b"", b",\nx", b"\n]"])
        inner = b",\n".join(rows)
        part = slice(len(before), len(before) + len(inner))
        cut = inner.split(b",\n") if inner else []
        found = Lines(before + inner + behind, part)
        for number in range(-1, len(cut) + 2):
            assert _entry(found, number) == _entry(cut, number), (inner, number)
        assert list(found) == cut and len(found) == len(cut)


def _entry(entries: object, number: int) -> object:
    try:
        return entries[number]  # type: ignore[index]
    except IndexError:
        return IndexError


def test_of_a_long_list_no_more_is_read_than_up_to_the_entry_asked_for() -> None:
    found = Lines(b",\n".join(b"%d" % number for number in range(1000)), slice(0, 4888))
    assert found[700] == b"700" and len(found._starts) == 702
    assert [found[number] for number in (3, 700, 0)] == [b"3", b"700", b"0"]
    assert len(found._starts) == 702  # nothing is looked for twice
    assert found[-1] == b"999" and len(found) == 1000


def test_threads_that_read_a_list_at_once_find_each_entry_once() -> None:
    rows = [b"%d" % number for number in range(20_000)]
    text = b",\n".join(rows)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for _ in range(8):
                found = Lines(text, slice(0, len(text)))
                reads = [threads.submit(found.__getitem__, at) for at in (9_000, 12_000, 15_000)]
                assert threads.submit(len, found).result() == len(rows)
                assert [read.result() for read in reads] == [b"9000", b"12000", b"15000"]
                assert len(found) == len(rows)
    finally:
        sys.setswitchinterval(interval)
