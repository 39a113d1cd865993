"""`tune`: what it measures and writes, `--list`, `--clear`, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_run import Run
from fakecuda import FakeCuda

pytest.importorskip("torch", reason="the ops are torch ops")

from kernel_hub import tuning
from kernel_hub.measure import tune
from kernel_hub.ops.matmul import linear_plan
from kernel_hub.tuning import Gpu, Row

H200 = Gpu((9, 0), 132, "NVIDIA H200")
TABLE = linear_plan.TABLE
WIDE, NARROW = Row("128x256_c21", {"group": 8}), Row("swapped_64x16_c11_b2", {"group": 8})


@pytest.fixture
def measured(
    fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> list[tuple[str, int]]:
    """The measurement is replaced; gives the problems it was asked for."""
    asked: list[tuple[str, int]] = []

    def measure(
        tunable: Any, gpu: Gpu, size: int, key: Any, dtype: str, *, rounds: int
    ) -> tune.Measured:
        text = tunable.table.layout.text(key)
        asked.append((text, size))
        best = WIDE if size > 16 else NARROW
        return tune.Measured(text, size, best, 8.0, 10.0, {}, {"m16 num_splits=3": "differs"})

    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(tune, "current_gpu", lambda: H200)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(tuning.VARIABLE, "1")
    TABLE.changed()
    return asked


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    TABLE.changed()


def test_it_needs_a_gpu(no_driver: None, kernel_hub_cli: Run) -> None:
    ran = kernel_hub_cli("tune")
    assert ran.code == 2 and "no CUDA driver library" in ran.err


def test_it_measures_and_writes_and_the_op_reads(
    measured: list[tuple[str, int]], kernel_hub_cli: Run, tmp_path: Path
) -> None:
    before = linear_plan.choose((9, 0), 132, 300, 4096, 11008, False, H200.name)
    ran = kernel_hub_cli("tune", "linear", "--shapes", "8B-o,4096x11008", "--sizes", "512,8")
    assert ran.code == 0, ran.err
    one, two = "n=4096 k=4096", "n=4096 k=11008"
    assert measured == [(one, 8), (one, 512), (two, 8), (two, 512)]
    path = tmp_path / "kernel_hub/tuned/nvidia_h200_sm90/linear.json"
    assert f"wrote {path}" in ran.out and "+25.0%" in ran.out
    assert "not taken: n=4096 k=4096 8: m16 num_splits=3: differs" in ran.out
    (section,) = json.loads(path.read_text())["gpus"]
    assert section["choices"][two] == [
        {"m": 8, "above": 1, "variant": NARROW.variant, "group": 8},
        {"m": 512, "above": 127, "variant": WIDE.variant, "group": 8},
    ]
    assert section["cubins"] == TABLE.hashes(H200)
    after = linear_plan.choose((9, 0), 132, 300, 4096, 11008, False, H200.name)
    assert after.variant == WIDE.variant != before.variant
    assert linear_plan.choose((9, 0), 132, 300, 4096, 11008, False, "other") == before

    again = kernel_hub_cli("tune", "linear", "--shapes", "8B-o", "--sizes", "32")
    assert again.code == 0, again.err
    listed = kernel_hub_cli("tune", "--list")
    assert listed.code == 0 and "all of these: op linear, GPU NVIDIA H200\n1 file in" in listed.out

    cleared = kernel_hub_cli("tune", "--clear")
    assert cleared.code == 0 and not (tmp_path / "kernel_hub/tuned").exists()
    assert "0 files" in kernel_hub_cli("tune", "--list").out


def test_dry_run_measures_nothing(
    measured: list[tuple[str, int]], kernel_hub_cli: Run, tmp_path: Path
) -> None:
    ran = kernel_hub_cli("tune", "linear", "--dry-run")
    assert ran.code == 0, ran.err
    assert "8B-gate_up" in ran.out and "nothing was measured" in ran.out
    assert not measured and not list(tmp_path.rglob("*.json"))


def test_output_goes_into_a_file_with_other_gpus(
    measured: list[tuple[str, int]], kernel_hub_cli: Run, tmp_path: Path
) -> None:
    path = tmp_path / "linear.json"
    shipped = json.loads(
        (Path(tuning.__file__).parent / "shipped/linear.json").read_text(encoding="utf-8")
    )
    (own,) = shipped["gpus"]
    row = {"m": 4, "variant": "m8_deep"}
    own |= {"cubins": TABLE.hashes(H200), "choices": {"n=4096 k=4096": [row]}}
    shipped["gpus"].insert(0, {**own, "gpu": "NVIDIA H100", "cubins": {}})
    path.write_text(json.dumps(shipped))
    ran = kernel_hub_cli("tune", "linear", "--shapes", "8B-o", "--m", "8", "--output", str(path))
    assert ran.code == 0, ran.err
    gpus = {gpu["gpu"]: gpu for gpu in json.loads(path.read_text())["gpus"]}
    assert gpus.keys() == {"NVIDIA H100", "NVIDIA H200"}
    rows = gpus["NVIDIA H200"]["choices"]["n=4096 k=4096"]
    assert rows == [row, {"m": 8, "variant": NARROW.variant, "group": 8}]
    assert gpus["NVIDIA H100"]["choices"] == {"n=4096 k=4096": [row]}
    assert gpus["NVIDIA H200"]["costs"] == own["costs"]
    assert not (tmp_path / "kernel_hub").exists()


@pytest.mark.parametrize("content", ["{", '{"format": 9}', "stale"])
def test_a_file_of_no_use_is_listed_and_replaced(
    measured: list[tuple[str, int]], kernel_hub_cli: Run, content: str
) -> None:
    path = TABLE.user_file(H200)
    assert path is not None
    assert kernel_hub_cli("tune", "linear", "--shapes", "8B-o", "--m", "8").code == 0
    if content == "stale":
        now = path.read_text()
        content = now.replace(TABLE.hashes(H200)["linear"], "0" * 64)
        assert content != now
    path.write_text(content)
    listed = kernel_hub_cli("tune", "--list")
    assert listed.code == 1 and f"not used: {path}: " in listed.out
    ran = kernel_hub_cli("tune", "linear", "--shapes", "8B-qkv", "--m", "8")
    assert ran.code == 0 and "starting anew" in ran.out
    assert list(json.loads(path.read_text())["gpus"][0]["choices"]) == ["n=6144 k=4096"]


def test_an_interrupted_run_keeps_what_it_has(
    measured: list[tuple[str, int]], kernel_hub_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = tune.measure

    def interrupted(tunable: Any, gpu: Gpu, size: int, key: Any, *rest: Any, **more: Any) -> Any:
        if key["n"] == 6144:
            raise KeyboardInterrupt
        return measure(tunable, gpu, size, key, *rest, **more)

    monkeypatch.setattr(tune, "measure", interrupted)
    ran = kernel_hub_cli("tune", "linear", "--shapes", "8B-o,8B-qkv", "--m", "8")
    assert ran.code == 130 and "interrupted" in ran.err
    path = TABLE.user_file(H200)
    assert path is not None
    assert list(json.loads(path.read_text())["gpus"][0]["choices"]) == ["n=4096 k=4096"]


def test_a_home_that_cannot_be_written(
    measured: list[tuple[str, int]],
    kernel_hub_cli: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    ran = kernel_hub_cli("tune", "linear")
    assert ran.code == 2 and "cannot write" in ran.err and not measured


def test_it_says_when_its_result_is_turned_off(
    measured: list[tuple[str, int]], kernel_hub_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tuning.VARIABLE, "0")
    ran = kernel_hub_cli("tune", "linear", "--shapes", "8B-o", "--m", "8")
    assert ran.code == 0 and "KERNEL_HUB_TUNED=0 is set" in ran.out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("rope",), "rope has no variants to choose from; these have: "),
        (("linear", "--shapes", "8B"), "neither a name (70B-down"),
        (("linear", "--shapes", "4096x"), "nor sizes like nxk"),
        (("linear", "--sizes", "0"), "--sizes takes numbers from 1 up"),
        (("linear", "--sizes", "1,x"), "--sizes takes numbers from 1 up"),
        (("linear", "--dtype", "fp64"), "linear takes bf16, fp16"),
    ],
)
def test_what_is_asked_wrongly(
    measured: list[tuple[str, int]], kernel_hub_cli: Run, argv: tuple[str, ...], words: str
) -> None:
    ran = kernel_hub_cli("tune", *argv)
    assert ran.code == 2 and words in ran.err and not measured
