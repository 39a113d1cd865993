"""Completion: the scripts, run by the shells that are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from cli_run import Run

from kernel_hub import cli, registry
from kernel_hub.cli.parts import completion


@pytest.fixture
def scripts(kernel_hub_cli: Run, tmp_path: Path) -> dict[str, Path]:
    made = {}
    for shell in completion.SHELLS:
        ran = kernel_hub_cli("--completion", shell)
        assert (ran.code, ran.err) == (0, "")
        made[shell] = tmp_path / f"completion.{shell}"
        made[shell].write_text(ran.out)
    return made


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


def run(shell: str, text: str, folder: Path) -> list[str]:
    done = subprocess.run(
        [shell, "-c", text], capture_output=True, text=True, cwd=folder, check=False, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


CASES = [
    ("", {module.NAME for module in cli.COMMANDS} | {"build"}),
    ("in", {"inspect"}),
    ("build", {"build", "build-triton"}),
    ("inspect rms_norm_", {"rms_norm_joined"}),
    ("list --dt", {"--dtype"}),
    ("list --dtype b", {"bf16"}),
    ("list --arch ", {"sm80", "sm89", "sm90"}),
    ("build --che", {"--check"}),
    ("tune linear_", {"linear_fp8"}),
    ("bench verify_", {"verify_draft", "verify_tree"}),
    ("verify --", {"--help", "--package", "--json"}),
]


@pytest.mark.parametrize(("line", "offered"), CASES)
def test_bash_completes(scripts: dict[str, Path], line: str, offered: set[str]) -> None:
    words = ["kernel-hub", *line.split(" ")]
    quoted = " ".join(f"'{word}'" for word in words)
    text = f"source {scripts['bash']}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; "
    text += 'complete -p kernel-hub >/dev/null; _kernel_hub; printf "%s\\n" "${COMPREPLY[@]}"'
    found = set(run("bash", text, scripts["bash"].parent))
    assert found >= offered and (not line or found == offered)


def test_names_of_cubins_are_offered_and_files_where_no_name_fits(
    scripts: dict[str, Path],
) -> None:
    text = f"source {scripts['bash']}; COMP_WORDS=(kernel-hub inspect ''); COMP_CWORD=2; "
    text += 'complete -p kernel-hub; _kernel_hub; printf "%s\\n" "${COMPREPLY[@]}"'
    found = run("bash", text, scripts["bash"].parent)
    assert {*registry} <= {*found} and found[:5] == [
        "complete",
        "-o",
        "default",
        "-F",
        "_kernel_hub",
    ]


@needs("zsh")
def test_zsh_reads_its_script(scripts: dict[str, Path]) -> None:
    text = f"source {scripts['zsh']}; print $_comps[kernel-hub]; whence -w _kernel_hub"
    assert run("zsh", text, scripts["zsh"].parent) == [
        *("_bash_complete", "-o", "default", "-F", "_kernel_hub", "_kernel_hub:", "function"),
    ]


@needs("fish")
@pytest.mark.parametrize(("line", "offered"), CASES)
def test_fish_completes(scripts: dict[str, Path], line: str, offered: set[str]) -> None:
    text = (
        f"source {scripts['fish']}; complete -C 'kernel-hub {line}' | string split -f1 \\t; or true"
    )
    found = set(run("fish", text, scripts["fish"].parent))
    assert found >= offered


def test_each_option_of_each_command_is_in_each_script(scripts: dict[str, Path]) -> None:
    _, commands = cli._parser()
    for shell, file in scripts.items():
        text = file.read_text()
        for command in commands.values():
            for action in command._actions:
                for option in action.option_strings:
                    assert option.lstrip("-") in text, f"{option} is not in {shell}'s"


@pytest.mark.parametrize("asked", [[], ["tcsh"], ["bash", "zsh"]])
def test_other_shells_are_refused(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--completion", *asked])
    assert stopped.value.code == 2
    assert "--completion takes one of bash, zsh, fish" in capsys.readouterr().err
