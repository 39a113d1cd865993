"""Tables of measured choices: reading, refusing, merging, the user's file, forcing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernel_hub import tuning
from kernel_hub.collection.manifest import open_collection
from kernel_hub.errors import TableError
from kernel_hub.tuning import Choice, Gpu, GpuSection, Row, Table, file

ROOT = Path(__file__).resolve().parents[2]
H200 = Gpu((9, 0), 132, "NVIDIA H200")
CUBIN = "launch_probe"
SHA = open_collection().manifest.cubins[CUBIN]["sm90"].sha256


def check(row: Row, arch: str, size: int, *, n: int, kind: str) -> str:
    return "" if row.variant in ("wide", "narrow") and size <= n else f"{arch}: not with {size}"


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    """A table of no real op, whose user has files in tmp_path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(tuning.VARIABLE, "1")
    yield Table(
        "some_op", key=("n", "kind"), bucket="m", cubins=(CUBIN,), check=check,
        numbers={"group": (1, 16)},
    )  # fmt: skip
    del tuning.tables["some_op"]


def document(**changes: Any) -> dict[str, Any]:
    rows = [{"m": 4, "variant": "narrow"}, {"m": 64, "above": 16, "variant": "wide", "group": 8}]
    gpu = {"arch": "sm90", "gpu": "NVIDIA H200", "num_sms": 132, "cubins": {CUBIN: SHA}}
    gpu |= {"choices": {"n=128 kind=a": rows}, "costs": {"wide": {"step_us": 0.5, "tile_us": 2}}}
    return {
        "format": 1, "op": "some_op", "function": "some_op_{dtype}_{variant}", "gpus": [gpu],
        **changes,
    }  # fmt: skip


def put(table: Table, raw: object) -> Path:
    path = table.user_file(H200)
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw))
    table.changed()
    return path


def test_lookup(table: Table) -> None:
    put(table, document())
    found = [table.lookup(H200, m, n=128, kind="a") for m in (1, 4, 5, 16, 17, 64, 65)]
    narrow, wide = Row("narrow"), Row("wide", {"group": 8})
    assert found == [narrow, narrow, None, None, wide, wide, None]
    row = table.lookup(H200, 20, n=128, kind="a")
    assert row is not None and row.numbers == {"group": 8} and str(row) == "wide group=8"
    assert table.lookup(H200, 4, n=129, kind="a") is None
    assert table.lookup(H200._replace(name="NVIDIA H100"), 4, n=128, kind="a") is None
    assert table.lookup(H200._replace(name=""), 4, n=128, kind="a") is None
    assert table.lookup(H200._replace(num_sms=114), 4, n=128, kind="a") is None


def test_a_repeated_lookup_touches_no_file(table: Table) -> None:
    path = put(table, document())
    assert table.lookup(H200, 4, n=128, kind="a") == Row("narrow")
    path.unlink()
    assert table.lookup(H200, 4, n=128, kind="a") == Row("narrow")
    table.changed()
    assert table.lookup(H200, 4, n=128, kind="a") is None


@pytest.mark.parametrize("value", ["0", ""])
def test_it_can_be_turned_off(table: Table, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    put(table, "not JSON")
    monkeypatch.setenv(tuning.VARIABLE, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table.lookup(H200, 4, n=128, kind="a") is None


def test_the_users_file_comes_before_what_is_shipped(table: Table) -> None:
    shipped = Row("wide", {"group": 1})
    choices = {"n=128 kind=a": (Choice(0, 128, shipped),)}
    for num_sms, expected in ((132, shipped), (114, None)):
        put(table, document())
        table._shipped = [
            GpuSection("sm90", "NVIDIA H200", num_sms, {}, choices, {"wide": {"x": 1}})
        ]
        assert table.lookup(H200, 4, n=128, kind="a") == Row("narrow")
        assert table.lookup(H200, 5, n=128, kind="a") == expected
        assert table.costs("sm90") == {"wide": {"x": 1}} and table.costs("sm80") == {}


def test_it_can_be_emptied(table: Table) -> None:
    put(table, document())
    costs, forgotten = {"wide": {"x": 1.0}}, []
    table._shipped = [GpuSection("sm90", "NVIDIA H200", 132, {}, {}, costs)]
    table.on_change(lambda: forgotten.append(1))
    with table.emptied():
        assert table.lookup(H200, 4, n=128, kind="a") is None
        with table.emptied(), table.forcing(Row("wide")):
            assert table.lookup(H200, 4, n=128, kind="a") == Row("wide")
        assert table.lookup(H200, 4, n=128, kind="a") is None
    assert table.lookup(H200, 4, n=128, kind="a") == Row("narrow")
    assert len(forgotten) == 6


def row(**changes: Any) -> dict[str, Any]:
    """A document of one choice, that with `changes`."""
    made = document()
    made["gpus"][0]["choices"] = {"n=128 kind=a": [{"m": 4, "variant": "wide", **changes}]}
    return made


def gpu(**changes: Any) -> dict[str, Any]:
    made = document()
    made["gpus"][0] |= changes
    return made


BAD: list[tuple[object, str]] = [
    ("{", "not JSON"),
    ("[" * 100_000, "not JSON"),
    ([1], "the whole: expected an object, found [1]"),
    (document(format=2), "format: expected 1"),
    (document(op="other"), "op: expected 'some_op', found \"other\""),
    (document(function="f"), "function: expected"),
    (document(gpus={}), "gpus: expected a list"),
    (document(gpu=[]), "gpu: expected one of format, op, function, gpus as a field"),
    (gpu(arch="hopper"), "gpus[0].arch: expected text like"),
    (gpu(num_sms="132"), "gpus[0].num_sms: expected a whole number"),
    (gpu(gpu=""), "gpus[0].gpu: expected text"),
    (gpu(cubins={CUBIN: "12"}), f"gpus[0].cubins.{CUBIN}: expected text like"),
    (gpu(choices={"n=128": []}), "gpus[0].choices: expected a key like n=… kind=…"),
    (gpu(choices={"n=128 kind=a": []}), "choices.n=128 kind=a: expected a list of choices"),
    (gpu(costs={"wide": {"step_us": "1"}}), "costs.wide.step_us: expected a number"),
    (row(variant="tall"), "kind=a[0].variant: expected one that runs there (sm90: not with 4)"),
    (row(variant=3), "[0].variant: expected text like"),
    (row(m=200), "(sm90: not with 200), found \"wide\""),
    (row(m=True), "[0].m: expected a whole number from 1"),
    (row(m=4.0), "[0].m: expected a whole number"),
    (row(above=4), "[0].above: expected a whole number from 0 to 3"),
    (row(group=17), "[0].group: expected a whole number from 1 to 16, found 17"),
    (row(splits=2), "[0].splits: expected one of m, above, variant, group as a field"),
    (gpu(choices={"n=128 kind=a": [row_ := {"m": 4, "variant": "wide"}, row_]}), "[1].m: expected"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(BAD)))
def test_a_wrong_file_is_refused_with_its_field(table: Table, case: int) -> None:
    raw, words = BAD[case]
    path = put(table, raw)
    with pytest.raises(TableError) as raised:
        table.read_user_file(path, H200)
    assert str(raised.value).startswith(f"{path}: ") and words in str(raised.value)
    # A plan goes on without it, and says so once.
    with pytest.warns(RuntimeWarning, match="goes on with kernel_hub's own choices") as warned:
        assert table.lookup(H200, 4, n=128, kind="a") is None
        assert table.lookup(H200, 5, n=128, kind="a") is None
    assert len(warned) == 1 and words in str(warned[0].message)


@pytest.mark.parametrize("cubins", [{}, {CUBIN: "0" * 64}, {"other": SHA}])
def test_a_file_of_other_cubins_is_stale(table: Table, cubins: dict[str, str]) -> None:
    put(table, gpu(cubins=cubins))
    with pytest.warns(RuntimeWarning, match=f"stale: measured with another build of {CUBIN}"):
        assert table.lookup(H200, 4, n=128, kind="a") is None


def test_a_file_that_cannot_be_read(table: Table) -> None:
    path = put(table, document())
    path.unlink()
    path.mkdir()
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert table.lookup(H200, 4, n=128, kind="a") is None


def test_where_the_files_are(table: Table, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tail = "kernel_hub/tuned/nvidia_h200_sm90/some_op.json"
    assert table.user_file(H200) == tmp_path / tail
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert table.user_file(H200) == tmp_path / "home/.cache" / tail
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert table.user_file(H200) is None
    assert table.lookup(H200, 4, n=128, kind="a") is None


def test_forcing(table: Table) -> None:
    put(table, document())
    calls = []
    table.on_change(lambda: calls.append(table.lookup(H200, 4, n=128, kind="a")))
    forced = Row("wide", {"group": 3})
    with pytest.raises(KeyError), table.forcing(forced):
        assert table.lookup(H200, 4, n=5, kind="b") is forced
        raise KeyError
    assert calls == [forced, Row("narrow")]
    assert table.lookup(H200, 4, n=128, kind="a") == Row("narrow")


def test_text_is_read_back_and_written_alike(table: Table) -> None:
    sections = file.read(json.dumps(document()), table.layout, where="x")
    text = file.text_of(sections, table.layout)
    assert file.read(text, table.layout, where="x") == sections
    assert file.text_of(sections, table.layout) == text
    assert json.loads(text) == document()


def choice_rows(*rows: tuple[int, int, str]) -> dict[str, tuple[Choice, ...]]:
    return {"n=128 kind=a": tuple(Choice(above, most, Row(name)) for above, most, name in rows)}


def test_merging_keeps_what_was_measured_before(table: Table) -> None:
    old = GpuSection("sm90", "x", 132, {"a": "old"}, choice_rows((0, 4, "a"), (16, 64, "b")))
    old.choices["n=1 kind=b"] = (Choice(0, 1, Row("kept")),)
    new = GpuSection("sm90", "x", 132, {"a": "new"}, choice_rows((8, 32, "c"), (32, 64, "d")))
    merged = file.merged(old, new)
    assert merged.cubins == {"a": "new"}
    assert merged.choices == {
        **choice_rows((0, 4, "a"), (8, 32, "c"), (32, 64, "d")),
        "n=1 kind=b": (Choice(0, 1, Row("kept")),),
    }
    assert file.merged(None, new) is new


def test_writing_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "x.json"
    file.write(path, "first")
    assert path.stat().st_mode & 0o777 == 0o644

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(TableError, match=f"cannot write {path}: No space left on device"):
        file.write(path, "second")
    assert path.read_text() == "first" and os.listdir(path.parent) == ["x.json"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TableError, match=r"cannot write .*(Not a directory|File exists)"):
        file.write(tmp_path / "file" / "x.json", "text")


def shipped_ops() -> list[str]:
    return sorted(path.stem for path in (ROOT / "kernel_hub/tuning/shipped").glob("*.json"))


@pytest.mark.parametrize("op", shipped_ops())
def test_shipped_tables_are_right(op: str) -> None:
    """Laid out as the writer does, and of functions that the manifest has."""
    pytest.importorskip("torch", reason="the ops are torch ops")
    from kernel_hub.measure import tune_ops

    assert op in tune_ops.TUNABLE, f"measure/tune_ops.py does not tune {op}"
    table = tune_ops.TUNABLE[op].table
    sections = table.shipped()
    assert sections
    text = (ROOT / f"kernel_hub/tuning/shipped/{op}.json").read_text()
    assert text == file.text_of(sections, table.layout)
    for section in sections:
        shipped = [open_collection().manifest.cubins[name] for name in table.cubins]
        functions = {name for archs in shipped for e in archs.values() for name in e.functions}
        variants = {choice.row.variant for rows in section.choices.values() for choice in rows}
        for variant in variants | set(section.costs):
            names = {
                table.layout.function.format(dtype=dtype, variant=variant)
                for dtype in tune_ops.TUNABLE[op].dtypes
            }
            assert names <= functions, f"{op}.json names {variant}, which no cubin has"


def test_reading_a_table_does_not_need_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    code = "from kernel_hub import tuning; print(tuning.user_folder())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "XDG_CACHE_HOME": "/x"},
    )  # fmt: skip
    assert done.stdout == "/x/kernel_hub/tuned\n", done.stderr
