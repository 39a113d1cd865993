"""Parameters of a manifest, read column by column: what is taken, and what is said of the rest."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kernel_hub.collection import entries
from kernel_hub.errors import CubinCorruptError, ParamsError
from kernel_hub.signature.params import Param


def _outcome(read: Any, *args: Any) -> object:
    try:
        return read(*args)
    except (CubinCorruptError, ParamsError) as error:
        return str(error)


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_what_each_would_be_by_itself(seed: int) -> None:
    draw = random.Random(seed)
    odd: list[Any] = ["text", -1, 0, 8, True, 1.5, None, [], {}, "int"]
    for _ in range(100):
        rows: list[Any] = [
            [f"p{i}", draw.choice(["int", "float*", "S"]), 8, 8 * i]
            for i in range(draw.randrange(6))
        ]
        for _ in range(draw.choice([0, 0, 1, 2]) if rows else 0):
            row = draw.randrange(len(rows))
            way = draw.randrange(4)
            if way == 0:
                named = [
                    dict(zip(entries._PARAM, x, strict=False)) for x in rows if type(x) is list
                ]
                rows[row] = draw.choice([*odd, *named])
            elif isinstance(rows[row], list) and rows[row]:
                if way == 1:
                    rows[row][draw.randrange(len(rows[row]))] = draw.choice(odd)
                elif way == 2:
                    rows[row].pop()
                else:
                    rows[row].append(draw.choice(odd))
        each = _outcome(
            lambda rows: tuple([entries._param(x, "here", i) for i, x in enumerate(rows)]), rows
        )
        found = _outcome(entries._params, rows, "here")
        assert found == each, rows
        if isinstance(found, tuple):
            assert all(type(entry) is entries.ParamEntry for entry in found)


@pytest.mark.parametrize("seed", range(20))
def test_parameters_made_together_are_those_made_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    types = {"int": 4, "const float *": 8, "double": 8, "CUtensorMap": 128, "struct Own": 24, "": 8}
    for _ in range(100):
        rows = []
        for i in range(draw.randrange(8)):
            kind = draw.choice([*types])
            size = types[kind] if draw.random() < 0.97 else 3  # which is refused where it is known
            rows.append((draw.choice([f"p{i}", f"p{i}", ""]), kind, size, 8 * i))
        found = _outcome(Param.make_all, rows)
        each = _outcome(
            lambda rows: tuple([Param.make(i, *row) for i, row in enumerate(rows)]), rows
        )
        assert found == each, rows
        if isinstance(found, tuple):
            assert all(type(param) is Param for param in found)
