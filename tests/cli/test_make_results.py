"""RESULTS.md and README's table from benchmark rows."""

from __future__ import annotations

import importlib.util
import json
import lzma
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from cli_run import ROOT


def script(name: str) -> ModuleType:
    """A script of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


picture, plot_sweep = script("picture"), script("plot_sweep")  # which make_results imports
make_results = script("make_results")


def row(family: str, case: str, contender: str, median: float, unit: str) -> dict[str, Any]:
    return {
        "family": family,
        "case": case,
        "contender": contender,
        "median": median,
        "p20": median,
        "p80": median,
        "unit": unit,
        "ratio": None,
        "ratio_to": None,
    }


ABOUT = {
    "gpu": "NVIDIA H200",
    "driver": "CUDA 13.0 (580.1)",
    "versions": {"python": "3.12"},
    "command": "python benchmarks/bench_x.py",
}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """A file of results as measure/results.py writes it."""
    names = [*row("", "", "", 0.0, ""), "note"]
    values = [[each[name] for name in names if name in each] for each in rows]
    path.write_text(json.dumps({"about": ABOUT, "columns": names, "rows": values}))


ROWS = [
    row("launch", "3 tensors", "kernel_hub", 4500.0, "ns"),
    row("launch", "3 tensors", "kernel_hub bound", 3900.0, "ns"),
    row("launch", "3 tensors", "C loop", 3200.0, "ns"),
    row("launch", "3 tensors", "CuPy", 5900.0, "ns"),
    row("rms_norm", "1k", "kernel_hub", 3.0, "TB/s"),
    row("rms_norm", "1k", "Liger", 2.7, "TB/s"),
    row("rms_norm", "8k", "kernel_hub", 3.8, "TB/s"),
    row("rms_norm", "8k", "Liger", 3.9, "TB/s"),
    row("rms_norm", "8k", "copy", 4.2, "TB/s"),
]


@pytest.fixture
def families(tmp_path: Path) -> list[Any]:
    write(tmp_path / "h200.json", ROWS)
    loaded: list[Any] = make_results.load(tmp_path)
    return loaded


def test_the_best_peer_is_no_floor_and_units_have_a_direction(families: list[Any]) -> None:
    launch, norm = families
    assert launch.cases[0].best_peer == "CuPy"
    assert launch.cases[0].ratio() == pytest.approx(4500 / 5900)
    assert [case.best_peer for case in norm.cases] == ["Liger", "Liger"]
    assert norm.cases[1].ratio() == pytest.approx(3.9 / 3.8)
    assert [case.is_lost for case in norm.cases] == [False, True]


def test_the_document(families: list[Any]) -> None:
    text = make_results.document(families)
    assert "| 3 tensors | ns | 4,500 | 3,900 | 3,200 | 5,900 | 0.76 |" in text
    assert "Reproduce: `python benchmarks/bench_x.py`" in text
    assert "- rms_norm, 8k: 3.8 TB/s against 3.9 of Liger (1.03)" in text
    assert "NVIDIA H200, driver CUDA 13.0 (580.1); python 3.12." in text


def test_the_readme(families: list[Any]) -> None:
    table = make_results.summary(families)
    line = "| 3 tensors | 4,500 ns (bound 3,900, C floor 3,200) | 5,900 (CuPy) | 0.76 |"
    assert line in table
    assert "| rms_norm | 2 | 0.96 | 1.03 | 0% |" in table
    text = make_results.replaced(f"a\n{make_results.BEGIN}\nold\n{make_results.END}\nb\n", "new")
    assert text == f"a\n{make_results.BEGIN}\nnew\n{make_results.END}\nb\n"
    with pytest.raises(ValueError, match="needs one line"):
        make_results.replaced("no markers", "new")


def test_cases_drawn_by_lot_are_summed_up(tmp_path: Path) -> None:
    for seed, slower in (("s1", 1.0), ("s2", 2.4)):
        rows = [
            row("by lot linear", "0: x", "kernel_hub", slower, "us") | {"note": "tile"},
            row("by lot linear", "0: x", "cuBLAS", 2.0, "us"),
            row("by lot linear, not counted", "1: x", "kernel_hub", 9.0, "us"),
            row("by lot linear, not counted", "1: x", "cuBLAS", 2.0, "us"),
        ]
        write(file := tmp_path / f"h200_{seed}.json", rows)
    # A seed that is packed counts like the others.
    file.with_suffix(".json.xz").write_bytes(lzma.compress(file.read_bytes()))
    file.unlink()
    families = make_results.load(tmp_path)
    expected = "| linear | 2 of 4, by lot, 2 seeds | 0.77 | 1.20 | 50% |"
    table = make_results.summary(families)
    assert expected in table and "not counted" not in table
    fixed = [row("linear", "4k", "kernel_hub", 1.0, "us"), row("linear", "4k", "cuBLAS", 9.0, "us")]
    write(tmp_path / "h200_a.json", fixed)
    assert make_results.summary(make_results.load(tmp_path)) == table  # the fixed case gives way
    text = make_results.document(families)
    assert "1 cases: geometric mean 1.20, worst 1.20, 100% over 1.10, 0% over 1.20." in text
    assert "- 1.20 0: x: 2.4 us (tile) against 2 of cuBLAS" in text
    assert text.endswith("## Where a peer is ahead\n\nNowhere in these runs.\n")


def test_families_of_attention_stand_for_the_fixed_cases(tmp_path: Path) -> None:
    """As by_lot.py names files and families: a row of the table a family, over its seeds."""
    fixed = [row("attention", "4 x 4096", x, 3.0, "us") for x in ("kernel_hub", "torch flash")]
    write(tmp_path / "h200_attention.json", fixed)
    assert "| attention | 1 |" in make_results.summary(make_results.load(tmp_path))
    for seed, ours in ((1, 4.4), (2, 1.0)):
        rows = [
            row(f"by lot {family}", "0: x", name, us, "us")
            for family in ("prefill", "backward_eager")
            for name, us in (("kernel_hub", ours), ("FlashAttention-3", 2.0))
        ]
        write(tmp_path / f"h200_by_lot_attention_s{seed}.json", rows)
    families = make_results.load(tmp_path)
    table = make_results.summary(families)
    for family in ("prefill", "backward_eager"):
        assert f"| {family} | 2, by lot, 2 seeds | 1.05 | 2.20 | 50% |" in table
    assert "| attention |" not in table
    assert make_results.document(families).count("- 2.20 0: x: 4.4 us against 2 of Flash") == 2


def test_the_picture_has_each_case(families: list[Any]) -> None:
    ratios = {n: f.ratios for n, f in make_results.ratios_of_families(families).items()}
    assert list(ratios) == ["rms_norm"]  # launches are rows of their own
    drawn = ElementTree.fromstring(picture.svg(ratios | {"wide": [0.01, 9.0]}, "of us"))
    paths = [each.attrib["d"] for each in drawn.iter("{http://www.w3.org/2000/svg}path")]
    dots = [dot.removesuffix("h0").split() for dot in "".join(paths).split("M")[1:]]
    assert len(dots) == 4
    said = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"of us", "rms_norm", "0.96 / 1.03", "wide", "0.30 / 9.00"} <= set(said)
    _, _, width, height = map(float, drawn.attrib["viewBox"].split())
    for x, y in dots:
        assert 0 < float(x) < width and 0 < float(y) < height


def test_nothing_measured(tmp_path: Path) -> None:
    families = make_results.load(tmp_path)
    assert "Nothing has been measured yet." in make_results.document(families)
    assert "Not measured yet" in make_results.summary(families)


def test_it_writes_once_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "benchmarks").mkdir()
    readme = tmp_path / "README.md"
    for file in (readme, tmp_path / "README.zh-CN.md"):
        file.write_text(f"{make_results.BEGIN}\n{make_results.END}\n")
    write(tmp_path / "h200.json", ROWS)
    sweep = [
        row("sweep linear", f"64x32 m{m} bf16", name, us, "us")
        for m in (1, 8)
        for name, us in (("kernel_hub", 2.0), ("cuBLAS", 2.5))
    ]
    write(tmp_path / "h200_sweep_linear_s1.json", sweep)
    monkeypatch.setattr(make_results, "ROOT", tmp_path)
    monkeypatch.setattr(make_results, "RESULTS", tmp_path)
    assert make_results.main(["--check"]) == 1
    assert make_results.main([]) == 0
    assert capsys.readouterr().out.count("wrote ") == 5
    assert "polyline" in (tmp_path / "h200_sweep_linear_s1.svg").read_text()
    assert "(results/h200_sweep_linear_s1.svg)" in (tmp_path / "benchmarks/RESULTS.md").read_text()
    assert make_results.main(["--check"]) == 0
    assert "5,900 (CuPy)" in readme.read_text()


def test_gpu_names() -> None:
    pytest.importorskip("torch", reason="the harness measures torch tensors")
    harness = script("harness")
    names = ["NVIDIA H200", "NVIDIA A100-SXM4-80GB", ""]
    assert [harness.gpu_token(n) for n in names] == ["h200", "a100_sxm4_80gb", "gpu"]
