"""Tuning a Triton collection: checked, timed by a stand-in timer, written, and looked up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakecuda import FakeCuda

torch = pytest.importorskip("torch", reason="configurations are compared as torch tensors")
pytest.importorskip("triton", reason="the collection is built by Triton")

from triton_kernels import add_kernel  # noqa: E402

from kernel_hub.errors import (  # noqa: E402
    CubinNotFoundError,
    KernelHubError,
    LaunchConfigError,
    ParamsError,
    TableError,
)
from kernel_hub.formats import triton  # noqa: E402
from kernel_hub.formats.triton import Problem, TritonFunction, Tuned  # noqa: E402
from kernel_hub.formats.triton.ahead import tune  # noqa: E402
from kernel_hub.tuning import Gpu  # noqa: E402

BLOCKS = (128, 256, 512)
SHAPES = [{"rows": 100, "n": 500}, {"rows": 128, "n": 512}, {"rows": 1, "n": 4000}]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("collection")
    configs = [{"BLOCK": block} for block in BLOCKS]
    signature = "*fp32:16,*fp32:16,*fp32:16,i32"
    triton.compile_configs(add_kernel, configs, signature=signature, arch="sm90", out=out)
    return out


@pytest.fixture
def folder(built: Path, tmp_path: Path, fakecuda: FakeCuda) -> Path:
    return Path(shutil.copytree(built, tmp_path / "collection"))


def names(folder: Path) -> dict[int, str]:
    kernels = triton.collection(folder)
    return {kernels[name].constexprs["BLOCK"]: name for name in kernels}


def solve(**sizes: int) -> Callable[[TritonFunction], Any]:
    """Doubles a tensor as if it were the kernel."""
    x = torch.arange(float(sizes["rows"]))
    out = torch.empty_like(x)

    def launch(function: TritonFunction) -> Any:
        return out.copy_(2 * x)

    return launch


class Timer:
    """Gives each block size its time, as the launches' functions say."""

    def __init__(self, us: Callable[[int, int], float]) -> None:
        self.us = us
        self.looks: list[list[int]] = []

    def __call__(
        self, contenders: Mapping[str, Sequence[Callable[[], Any]]], case: Any, rounds: int
    ) -> dict[str, list[float]]:
        blocks = {}
        for name, launches in contenders.items():
            (function,) = launches[0].args  # type: ignore[attr-defined]
            blocks[name] = function.constexprs["BLOCK"]
        rows = len(launches[0]())
        self.looks.append(sorted(blocks.values()))
        return {name: [self.us(block, rows)] * rounds for name, block in blocks.items()}


def test_the_best_of_each_bucket_is_written_and_selected(folder: Path) -> None:
    # 100 and 128 rows share a bucket: 256 loses less over both than the best of either.
    table = {(128, 100): 10.0, (256, 100): 11.0, (128, 128): 20.0, (256, 128): 11.0}
    timer = Timer(lambda block, rows: table.get((block, rows), 500.0 / block + 90))
    measured = triton.tune(folder, solve, SHAPES, timer=timer)
    by_block = names(folder)
    assert [one.best for one in measured] == [by_block[128], by_block[256], by_block[512]]
    assert measured[0].best_us == 10.0 and measured[0].refused == {}
    assert timer.looks[:2] == [[128, 256, 512], [128, 256]], "the hopeless are timed once"

    raw = json.loads((folder / "tuned.json").read_text())
    (section,) = raw["tables"]["add_kernel"]["gpus"]
    assert raw["tables"]["add_kernel"]["keys"] == ["rows", "n"]
    assert section["arch"] == "sm90" and section["num_sms"] > 1
    choices = {text: choice["function"] for text, choice in section["choices"].items()}
    assert choices == {"rows=128 n=512": by_block[256], "rows=1 n=4096": by_block[512]}

    tuned = triton.collection(folder).tuned()
    assert tuned.choices == choices and tuned.keys == ("rows", "n")
    for sizes, block in {(128, 512): 256, (65, 257): 256, (1, 2049): 512, (2, 10**6): 512}.items():
        assert tuned.select(rows=sizes[0], n=sizes[1]).constexprs["BLOCK"] == block, sizes
    assert tuned.select(rows=np.int64(128), n=np.int32(512)) is tuned.select(rows=128, n=512)
    assert tuned.select(rows=0, n=0) is not None


def test_a_lookup_reads_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton.tune(folder, solve, SHAPES[:1], timer=Timer(lambda block, rows: block))
    tuned = triton.collection(folder).tuned()
    shutil.rmtree(folder)
    assert tuned.select(rows=3, n=3) is tuned.select(rows=100, n=500), "the only one"
    monkeypatch.setattr(Tuned, "_search", None)
    assert tuned.select(rows=100, n=500).constexprs["BLOCK"] == 128


def test_tuning_again_keeps_other_buckets_kernels_and_gpus(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton.tune(folder, solve, SHAPES[:1], timer=Timer(lambda block, rows: block))
    triton.tune(
        folder, solve, SHAPES[:1], table="other", timer=Timer(lambda block, rows: 1 / block)
    )
    triton.tune(folder, solve, SHAPES[2:], timer=Timer(lambda block, rows: 1 / block))
    monkeypatch.setattr(tune, "current_gpu", lambda: Gpu((9, 0), 20, "small"))
    triton.tune(folder, solve, SHAPES[:1], timer=Timer(lambda block, rows: 1 / block))
    kernels = triton.collection(folder)
    with pytest.raises(TableError, match="add_kernel, other"):
        kernels.tuned()
    assert len(kernels.tuned("other").choices) == 1
    raw = json.loads((folder / "tuned.json").read_text())
    large, small = raw["tables"]["add_kernel"]["gpus"]
    assert len(large["choices"]) == 2 and len(small["choices"]) == 1 and small["num_sms"] == 20


def test_wrong_and_refused_configurations_do_not_win(folder: Path) -> None:
    x = torch.arange(64.0)

    def case(**sizes: int) -> Problem:
        def launch(function: TritonFunction) -> Any:
            if function.constexprs["BLOCK"] == 128:
                return x * 1.5
            if function.constexprs["BLOCK"] == 256:
                raise LaunchConfigError("too much shared memory")
            return x * 2

        return Problem(launch, expected=x * 2)

    (one,) = triton.tune(folder, case, SHAPES[:1], timer=Timer(lambda block, rows: block))
    by_block = names(folder)
    assert one.best == by_block[512]
    assert "differs" in one.refused[by_block[128]]
    assert one.refused[by_block[256]] == "too much shared memory"
    with pytest.raises(KernelHubError, match=r"(?s)no configuration solves.*differs"):
        triton.tune(folder, case, SHAPES[:1], names=[by_block[128]])


def test_what_tune_refuses(folder: Path, tmp_path: Path) -> None:
    for shapes in ([], [{}], [{"n": 1}, {"m": 1}]):
        with pytest.raises(ParamsError, match="shapes"):
            triton.tune(folder, solve, shapes)
    with pytest.raises(CubinNotFoundError, match="no collection"):
        triton.tune(tmp_path / "nowhere", solve, SHAPES)
    with pytest.raises(CubinNotFoundError, match="add_kernel_BLOCK128"):
        triton.tune(folder, solve, SHAPES, names=["add_kernel_BLOCK12"])
    assert not (folder / "tuned.json").exists()
    (folder / "tuned.json").write_text("{")
    with pytest.raises(TableError, match=r"tuned\.json: cannot be read"):
        triton.tune(folder, solve, SHAPES)
    assert (folder / "tuned.json").read_text() == "{", "a damaged file is left as it is"


GOOD = {"function": "f", "us": 1.0, "sha256": "0" * 64}
GPU: dict[str, Any] = {"arch": "sm90", "gpu": "H200", "num_sms": 132, "choices": {}}


def of_choices(choices: object) -> dict[str, Any]:
    table = {"keys": ["M", "N"], "gpus": [{**GPU, "choices": choices}]}
    return {"format": 1, "tables": {"t": table}}


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ([], "the whole: expected an object"),
        ({"format": 2, "tables": {}}, "format"),
        ({"format": 1, "tables": {}, "more": 1}, "more"),
        ({"format": 1, "tables": []}, "tables"),
        ({"format": 1, "tables": {"t": {"keys": [], "gpus": []}}}, "tables.t.keys"),
        ({"format": 1, "tables": {"t": {"keys": ["M", "M"], "gpus": []}}}, "tables.t.keys"),
        ({"format": 1, "tables": {"t": {"keys": ["M"], "gpus": {}}}}, "tables.t.gpus"),
        ({"format": 1, "tables": {"t": {"keys": ["M"], "gpus": [{**GPU, "arch": "x"}]}}}, "arch"),
        (of_choices({"M=3 N=4": GOOD}), "powers of two"),
        (of_choices({"N=4 M=4": GOOD}), "powers of two"),
        (of_choices({"M=4": GOOD}), "powers of two"),
        (of_choices({"M=4 N=99999999999": GOOD}), "powers of two"),
        (of_choices({"M=4 N=4": "f"}), "choices.M=4 N=4"),
        (of_choices({"M=4 N=4": {**GOOD, "us": True}}), "choices.M=4 N=4.us"),
        (of_choices({"M=4 N=4": {**GOOD, "us": float("nan")}}), "choices.M=4 N=4.us"),
        (of_choices({"M=4 N=4": {**GOOD, "sha256": "../../x"}}), "choices.M=4 N=4.sha256"),
        (of_choices({"M=4 N=4": {**GOOD, "function": 7}}), "choices.M=4 N=4.function"),
        (of_choices({"M=4 N=4": GOOD}), "'f', which the collection does not hold"),
        (of_choices({}), "no choice runs"),
    ],
)
def test_a_wrong_file_is_refused_with_its_field(folder: Path, raw: object, says: str) -> None:
    (folder / "tuned.json").write_text(json.dumps(raw))
    with pytest.raises((TableError, CubinNotFoundError)) as caught:
        triton.collection(folder).tuned()
    assert str(folder / "tuned.json") in str(caught.value)
    assert says in str(caught.value)


def test_a_build_newer_than_the_measurement_is_said(folder: Path) -> None:
    triton.tune(folder, solve, SHAPES[:1], timer=Timer(lambda block, rows: block))
    text = (folder / "tuned.json").read_text()
    sha = json.loads(text)["tables"]["add_kernel"]["gpus"][0]["choices"]["rows=128 n=512"]["sha256"]
    (folder / "tuned.json").write_text(text.replace(sha, "0" * 64))
    with pytest.warns(RuntimeWarning, match="tune again"):
        triton.collection(folder).tuned()


def test_select_refuses_other_sizes(folder: Path) -> None:
    triton.tune(folder, solve, SHAPES[:1], timer=Timer(lambda block, rows: block))
    tuned = triton.collection(folder).tuned()
    for sizes in ({}, {"rows": 1}, {"rows": 1, "m": 2}, {"rows": 1, "n": 2, "k": 3}):
        with pytest.raises(ParamsError, match="select takes rows, n"):
            tuned.select(**sizes)
    for wrong in (1.5, "4", None, 1 << 40, -1):
        with pytest.raises(ParamsError, match="n="):
            tuned.select(rows=1, n=wrong)  # type: ignore[arg-type]


def test_choices_that_cannot_run_here(folder: Path, make_fakecuda: Callable[..., FakeCuda]) -> None:
    triton.tune(folder, solve, SHAPES[:1], timer=Timer(lambda block, rows: block))
    make_fakecuda(capability=(8, 0))
    with pytest.raises(CubinNotFoundError, match=r"(?s)no choice runs.*sm_90a"):
        triton.collection(folder).tuned()
