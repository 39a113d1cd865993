"""`kernel-hub generate` on models of random weights."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
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


def test_a_name_of_the_hub_is_no_folder(kernel_hub_cli: Run) -> None:
    ran = kernel_hub_cli("generate", "org/Some-8B", "--device", "cpu", "--prompt", "a")
    assert ran.code == 2 and "hf download org/Some-8B --local-dir Some-8B" in ran.err
    ran = kernel_hub_cli("generate", "nothing", "--device", "cpu", "--prompt", "a")
    assert ran.code == 2 and "there is no folder 'nothing'\n" in ran.err


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


def test_no_device_and_no_characters(kernel_hub_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without a GPU says so; bytes that are no UTF-8 are a prompt, as anything is."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    ran = kernel_hub_cli("generate", "tiny", "--device", "cuda", "--prompt", "a")
    assert ran.code == 2 and "sees no GPU" in ran.err and "Traceback" not in ran.err
    command = ("generate", "tiny", "--device", "cpu", "--max-tokens", "3", "--prompt")
    assert kernel_hub_cli(*command, "a\udcff").out == kernel_hub_cli(*command, "a\ufffd").out


def test_a_terminal_of_few_characters() -> None:
    """What it has not is a question mark, no error."""
    command = ["generate", "tiny", "--device", "cpu", "--prompt", "Hello", "--max-tokens", "9"]
    ran = subprocess.run(
        [sys.executable, "-m", "kernel_hub", *command], capture_output=True, check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )  # fmt: skip
    assert ran.returncode == 0 and b"?" in ran.stdout, ran.stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere/at/all",), "nowhere/at/all"),
        (("tiny", "--temperature", "-1"), "temperature"),
        (("tiny", "--chat"), "chat template"),
        (("tiny", "--device", "gpu"), "expected cpu, cuda or cuda:N"),
        (("tiny", "--device", "mps"), "expected cpu, cuda or cuda:N"),
        (("tiny", "--max-batch", "0"), "max_batch"),
        (("tiny", "--max-tokens-a-pass", "-1"), "max_tokens_a_pass"),
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
