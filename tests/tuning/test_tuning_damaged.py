"""Damaged files of `kernel-hub tune`: whatever they say, each op still finds a launch.

The documents are drawn: choices that `tune` could have written, then some of them changed.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from lots import Lots

from kernel_hub import tuning

pytest.importorskip("torch", reason="the ops are torch ops")
from kernel_hub.measure.tune_ops import TUNABLE

GPUS = [tuning.Gpu((9, 0), 132, "NVIDIA H200"), tuning.Gpu((8, 0), 108, "NVIDIA A100")]
JUNK: list[Any] = [
    *("", "many", "n=many k=4096", "n=4096", "n=-1 k=0", "n=" + "9" * 5000, "k=1 n=1", "\ud800"),
    *(None, True, 0, -1, 1, 3, 2**31, 10**400, 0.5, float("nan"), float("inf"), [], {}, [[]]),
    *({"m": 1}, "sm90", "sm1000", "0" * 64, "128x128_c21", "m8_deep"),
]


def document(lots: Lots, op: str, gpu: tuning.Gpu) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What `kernel-hub tune` could have written, and the keys in it."""
    tunable = TUNABLE[op]
    table, keys, choices = tunable.table, [], {}
    for _ in range(lots.randint(1, 3)):
        key = dict(lots.choice(list(tunable.shapes.values())))
        rows: list[dict[str, Any]] = []
        for size in sorted(lots.sample(list(tunable.sizes), lots.randint(1, 4))):
            candidates = list(tunable.candidates(gpu, size, key))
            if candidates:
                row = lots.choice(candidates)
                rows.append({table.layout.bucket: size, "variant": row.variant, **row.numbers})
        if rows:
            keys.append(key)
            choices[table.layout.text(key)] = rows
    section = {
        "arch": gpu.arch, "gpu": gpu.name, "num_sms": gpu.num_sms, "cubins": table.hashes(gpu),
        "choices": choices,
    }  # fmt: skip
    head = {"format": 1, "op": op, "function": table.layout.function}
    return {**head, "gpus": [section]}, keys


def damage(lots: Lots, raw: Any) -> Any:
    """`raw` with one place of it changed: a key, a value, or something left out."""
    if isinstance(raw, dict) and raw and lots.random() < 0.9:
        key = lots.choice(list(raw))
        changed = dict(raw)
        value = changed.pop(key)
        match lots.randrange(6):
            case 0:
                changed[lots.choice([j for j in JUNK if isinstance(j, str)])] = value
            case 1:
                pass
            case _:
                changed[key] = damage(lots, value)
        return changed
    if isinstance(raw, list) and raw and lots.random() < 0.9:
        at = lots.randrange(len(raw))
        return [*raw[:at], damage(lots, raw[at]), *raw[at + 1 :]]
    return lots.choice(JUNK)


@pytest.mark.parametrize("turn", range(40))
@pytest.mark.parametrize("op", sorted(TUNABLE))
def test_every_op_finds_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str, turn: int
) -> None:
    lots = Lots(op, turn)
    tunable, gpu = TUNABLE[op], lots.choice(GPUS if op != "linear_fp8" else GPUS[:1])
    monkeypatch.setenv("KERNEL_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv(tuning.VARIABLE, "1")
    raw, keys = document(lots, op, gpu)
    for _ in range(lots.randint(0, 3)):
        raw = damage(lots, raw)
    path = tunable.table.user_file(gpu)
    assert path is not None
    tuning.write(path, json.dumps(raw) if lots.random() < 0.95 else json.dumps(raw)[:-9])
    tunable.table.changed()
    try:
        for key in keys or list(map(dict, tunable.shapes.values()))[:1]:
            for size in {
                *lots.sample(list(tunable.sizes), 3),
                *(lots.randint(1, 300) for _ in "ab"),
            }:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)
                    try:
                        tunable.plan(gpu, size, key)
                    except Exception as error:
                        text = f"{op} {key} of {size}: {lots}: {json.dumps(raw)}"
                        raise AssertionError(text) from error
    finally:
        monkeypatch.undo()
        tunable.table.changed()


@pytest.mark.parametrize("key", ["n=many k=4096", "n=4096 k=", "n=1e3 k=4096", "n=" + "9" * 5000])
def test_a_key_that_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """`linear` ended with a TypeError of its own check."""
    monkeypatch.setenv("KERNEL_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv(tuning.VARIABLE, "1")
    tunable, gpu = TUNABLE["linear"], GPUS[0]
    raw, _ = document(Lots("key"), "linear", gpu)
    raw["gpus"][0]["choices"][key] = [{"m": 4, "variant": "m8_deep"}]
    path = tunable.table.user_file(gpu)
    assert path is not None
    tuning.write(path, json.dumps(raw))
    tunable.table.changed()
    try:
        with pytest.warns(RuntimeWarning, match="goes on with kernel_hub's own choices"):
            assert tunable.plan(gpu, 4, {"n": 4096, "k": 4096})
    finally:
        monkeypatch.undo()
        tunable.table.changed()
