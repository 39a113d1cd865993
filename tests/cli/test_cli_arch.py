"""`--arch` and `--dtype`: one way to read them, whatever the command; what nothing has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_run import Run

from kernel_hub.archs import token_of, tokens_of
from kernel_hub.build import main as build
from kernel_hub.errors import ParamsError


@pytest.mark.parametrize("spelled", ["sm90", "sm_90", "SM90", "Sm_90", "90", "9.0", " 90 ", (9, 0)])
def test_ways_to_write_an_architecture(spelled: object) -> None:
    assert token_of(spelled) == "sm90"


def test_exact_architectures_and_lists() -> None:
    assert [token_of(text) for text in ("sm_90A", "100a", "12.0f")] == ["sm90a", "sm100a", "sm120f"]
    assert tokens_of(["80,SM_90", "9.0", (8, 9)]) == ["sm80", "sm90", "sm89"]


@pytest.mark.parametrize(
    "wrong", ["hopper", "sm", "", "9", "sm_9000", "compute_90", None, 9, 90.0, True, ()]
)
def test_what_is_no_architecture(wrong: object) -> None:
    with pytest.raises(ParamsError, match="arch"):
        tokens_of(wrong)


@pytest.mark.parametrize("command", [["list"], ["inspect", "rms_norm"]])
def test_commands_read_it_alike(kernel_hub_cli: Run, command: list[str]) -> None:
    def rows(*options: str) -> list[str]:
        ran = kernel_hub_cli(*command, *options, "--json")
        assert ran.code == 0, ran.err
        return [row.get("arch", row["target"]) for row in json.loads(ran.out)]

    assert rows("--arch", "90") == rows("--arch", "sm_90") == rows("--arch", "SM90")
    both = rows("--arch", "80", "--arch", "sm90")
    assert both == rows("--arch", "sm80,sm90") and len(set(both)) == 2


def test_export_takes_it_too(kernel_hub_cli: Run, tmp_path: Path) -> None:
    ran = kernel_hub_cli(
        "export", "launch_probe", "--to", str(tmp_path), "--arch", "SM90", "--arch", "8.0"
    )
    assert ran.code == 0, ran.err
    text = (tmp_path / "launch_probe.c").read_text()
    assert "image_sm90" in text and "image_sm80" in text and "image_sm89" not in text


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("list", "--arch", "sm75"), "nothing for arch='sm75'; it has: sm80, sm89, sm90"),
        (("list", "--arch", "80", "--arch", "61"), "arch='sm61'; it has: sm80, sm89, sm90"),
        (("list", "--arch", "hopper"), "--arch='hopper' is no architecture: 'sm90' is one"),
        (("list", "--dtype", "e5m2"), "nothing for dtype='e5m2'; it has: bf16, e4m3, fp16, fp32"),
        (("list", "--dtype", "half"), "nothing for dtype='half'; it has: bf16, e4m3, fp16, fp32"),
        (("inspect", "append_kv", "--arch", "80,61"), "shipped for sm80, sm90, not sm61"),
        (("export", "rms_norm", "--to", "x", "--arch", "75"), "not built for sm75; it is for"),
    ],
)
def test_what_nothing_has(kernel_hub_cli: Run, arguments: tuple[str, ...], found: str) -> None:
    ran = kernel_hub_cli(*arguments)
    assert (ran.code, ran.out) == (2, "") and found in ran.err


@pytest.mark.parametrize("wrong", ["hopper", "sm90a"])
def test_the_builder_refuses_in_words(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build(["--arch", wrong])
    assert f"--arch={wrong!r}" in capsys.readouterr().err
