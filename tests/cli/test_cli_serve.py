"""`kernel-hub serve` without what it needs; tests/engine/server runs it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cli_run import ROOT, Run

MAIN = "import sys; sys.modules['{0}'] = None; from kernel_hub.cli import main; sys.exit(main({1}))"


@pytest.mark.parametrize("missing", ["uvicorn", "torch"])
def test_a_missing_package_is_named(missing: str) -> None:
    code = MAIN.format(missing, ["serve", "tiny", "--port", "0"])
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (2, "") and "Traceback" not in ran.stderr, ran.stderr
    assert "pip install" in ran.stderr and ran.stderr.startswith("kernel-hub serve: ")


def test_help_names_the_limits(kernel_hub_cli: Run, capsys: pytest.CaptureFixture[str]) -> None:
    from kernel_hub.cli import serve

    with pytest.raises(SystemExit):
        kernel_hub_cli("serve", "--help")
    out = capsys.readouterr().out
    assert all(option in out for option, _, _ in serve.LIMITS.values())


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_ports(kernel_hub_cli: Run, capsys: pytest.CaptureFixture[str], port: str) -> None:
    with pytest.raises(SystemExit):
        kernel_hub_cli("serve", "tiny", "--port", port)
    assert f"{port} is no port" in capsys.readouterr().err
