"""`kernel-hub generate` on models of random weights."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from cli_run import Run

torch = pytest.importorskip("torch", reason="the engine is torch's")


def test_a_named_model_of_random_weights(kernel_hub_cli: Run) -> None:
    command = ("generate", "tiny", "--device", "cpu", "--prompt", "Hello", "--max-tokens", "5")
    ran = kernel_hub_cli(*command)
    assert (ran.code, ran.err) == (0, "") and ran.out.strip()
    report = json.loads(kernel_hub_cli(*command, "--prompt", "and", "--json").out)
    assert [answer["prompt"] for answer in report] == ["Hello", "and"]
    assert all(len(answer["tokens"]) == 5 for answer in report)
    assert ran.out == report[0]["text"] + "\n"  # the likeliest tokens are the same beside others


def test_a_folder_without_weights(kernel_hub_cli: Run, tmp_path: Path) -> None:
    from kernel_hub.engine.config import NAMED

    (tmp_path / "config.json").write_text(json.dumps(NAMED["tiny"]))
    command = ("generate", str(tmp_path), "--device", "cpu", "--prompt", "a", "--max-tokens", "3")
    assert (
        kernel_hub_cli(*command, "--random-weights", "--temperature", "1", "--seed", "4").code == 0
    )
    ran = kernel_hub_cli(*command)
    assert ran.code == 2 and ("model.safetensors" in ran.err or "pip install" in ran.err)


def test_a_report_of_a_step(
    kernel_hub_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("generate", "tiny", "--device", "cpu", "--prompt", "a", "--max-tokens", "3")
    said = kernel_hub_cli(*command).out
    ran = kernel_hub_cli(*command, "--report")
    assert ran.code == 0 and ran.out.startswith(said)
    assert all(op in ran.out for op in ("qkv_linear", "decode_attention", "sample", "us each"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    ran = kernel_hub_cli(*command, "--report", str(tmp_path / "step.png"))
    assert ran.code == 2 and "matplotlib" in ran.err and ran.out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere/at/all",), "nowhere/at/all"),
        (("tiny", "--temperature", "-1"), "temperature"),
        (("tiny", "--chat"), "chat template"),
        (("tiny", "--max-model-len", "2", "--prompt", "abc"), "3 tokens"),
    ],
)
def test_errors_are_one_message(
    kernel_hub_cli: Run, arguments: tuple[str, ...], words: str
) -> None:
    ran = kernel_hub_cli(
        "generate", *arguments, *(() if "--prompt" in arguments else ("--prompt", "a"))
    )
    assert ran.code == 2 and ran.out == "" and words in ran.err
    assert ran.err.startswith("kernel-hub generate: ") and "Traceback" not in ran.err
