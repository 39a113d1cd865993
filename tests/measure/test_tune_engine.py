"""`measure/tune.py`: candidates checked before they may win, timed twice, made into a section."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the ops are torch ops")

from kernel_hub.errors import LaunchConfigError  # noqa: E402
from kernel_hub.measure import tune  # noqa: E402
from kernel_hub.measure.tune import Case, Key, Launch  # noqa: E402
from kernel_hub.tuning import Choice, Gpu, Row, Table, tables  # noqa: E402

GPU = Gpu((9, 0), 132, "NVIDIA H200")
TIMES = {"quick": 10.0, "slow": 30.0, "near": 10.5, "wrong": 1.0, "partial": 1.0, "refused": 1.0}
TIMES |= {"nan": 1.0, "own": 0.0, tune.DEFAULT: 11.0}


class Doubling:
    """An op that doubles its input, by the variant its table says."""

    shapes: Mapping[str, Key] = {"one": {"n": 4}, "two": {"n": 6}}
    sizes: Sequence[int] = (1, 8)
    dtypes: Sequence[str] = ("bf16",)

    def __init__(self) -> None:
        self.table = Table(
            "doubling", key=("n",), bucket="m", cubins=("launch_probe",), check=lambda *_, **__: ""
        )

    def candidates(self, gpu: Gpu, size: int, key: Key) -> Iterator[Row]:
        return (Row(name) for name in TIMES if name != tune.DEFAULT)

    def plan(self, gpu: Gpu, size: int, key: Key) -> object:
        row = self.table.lookup(gpu, size, **key)
        return row.variant if row is not None else "own"

    def case(self, size: int, key: Key, dtype: str) -> Case:
        n = int(key["n"])

        def launch(x: Any, out: Any) -> Any:
            row = self.table.lookup(GPU, size, n=n)
            name = row.variant if row is not None else "own"
            if name == "refused":
                raise LaunchConfigError("too much shared memory\nmore")
            out.copy_(x * {"wrong": 2.1, "nan": math.nan}.get(name, 2.0))
            if name == "partial":
                out[-1] = math.nan  # as if it were not written
            return out

        inputs = [torch.randn(size, n).bfloat16() for _ in range(2)]
        launches = [functools.partial(launch, x, torch.empty_like(x)) for x in inputs]
        return Case(launches, 4 * size * n, size * n)


@pytest.fixture
def doubling() -> Iterator[Doubling]:
    yield Doubling()
    del tables["doubling"]


class Timer:
    """Says TIMES, and notes who was timed."""

    def __init__(self) -> None:
        self.calls: list[tuple[set[str], int]] = []

    def __call__(
        self, contenders: Mapping[str, Sequence[Launch]], case: Case, rounds: int
    ) -> dict[str, list[float]]:
        self.calls.append((set(contenders), rounds))
        for launches in contenders.values():
            for launch in launches:
                launch()
        return {name: [TIMES[name]] * rounds for name in contenders}


def test_only_what_is_right_may_win(doubling: Doubling) -> None:
    timer = Timer()
    found = tune.measure(doubling, GPU, 8, {"n": 4}, "bf16", rounds=3, timer=timer)
    assert (found.best, found.best_us, found.default_us) == (Row("quick"), 10.0, 11.0)
    assert (found.key, found.size) == ("n=4", 8)
    assert found.refused.keys() == {"wrong", "nan", "partial", "refused"}
    assert found.refused["refused"] == "too much shared memory"
    assert "differs by" in found.refused["wrong"] and "nan" in found.refused["partial"]
    everyone = {"quick", "near", "slow", tune.DEFAULT}
    assert timer.calls == [(everyone, 1), (everyone - {"slow"}, 3)]


def test_what_is_hardly_better_does_not_win(
    doubling: Doubling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TIMES, tune.DEFAULT, 10.05)
    found = tune.measure(doubling, GPU, 8, {"n": 4}, "bf16", timer=Timer())
    assert (found.best, found.best_us, found.default_us) == (Row("own"), 10.05, 10.05)
    monkeypatch.delitem(TIMES, "own")  # no candidate is what the op takes by itself
    found = tune.measure(doubling, GPU, 8, {"n": 4}, "bf16", timer=Timer())
    assert (found.best, found.best_us) == (None, 10.05)


def test_nothing_right(doubling: Doubling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubling, "candidates", lambda *_: iter([Row("wrong")]))
    found = tune.measure(doubling, GPU, 8, {"n": 4}, "bf16", timer=Timer())
    assert found.best is None and found.best_us == found.default_us == 11.0
    assert tune.section(doubling.table, GPU, [found]).choices == {}


def test_too_large(doubling: Doubling, monkeypatch: pytest.MonkeyPatch) -> None:
    def case(*_: object) -> Case:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB. GPU 0 has")

    monkeypatch.setattr(doubling, "case", case)
    found = tune.measure(doubling, GPU, 8, {"n": 4}, "bf16", timer=Timer())
    assert found.best is None and math.isnan(found.best_us)
    assert found.refused == {"all": "CUDA out of memory. Tried to allocate 8 GiB"}


def test_a_section_says_how_far_down_a_row_reaches(doubling: Doubling) -> None:
    outcomes = [
        tune.Measured("n=4", size, Row(name), 1.0, 1.0, {}, {})
        for size, name in ((64, "b"), (1, "a"), (4, "a"), (4096, "c"))
    ]
    section = tune.section(doubling.table, GPU, outcomes)
    expected = [(0, 1, "a"), (1, 4, "a"), (15, 64, "b"), (1023, 4096, "c")]
    assert section.choices == {"n=4": tuple(Choice(a, m, Row(v)) for a, m, v in expected)}
    assert section.cubins.keys() == {"launch_probe"} and section.gpu == GPU.name


def test_every_tunable_offers_rows_its_own_table_takes() -> None:
    from kernel_hub.measure.tune_ops import TUNABLE

    for op, tunable in TUNABLE.items():
        for gpu in (GPU, Gpu((8, 0), 108), Gpu((8, 9), 142)):
            for key in tunable.shapes.values():
                for size in tunable.sizes:
                    rows = list(tunable.candidates(gpu, size, key))
                    assert len({str(row) for row in rows}) == len(rows)
                    for row in rows:
                        layout = tunable.table.layout
                        assert layout.numbers.keys() >= row.numbers.keys()
                        assert not layout.check(row, gpu.arch, size, **key), (op, gpu, key, row)
        assert list(tunable.candidates(GPU, tunable.sizes[0], next(iter(tunable.shapes.values()))))
