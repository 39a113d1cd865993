"""`verify` on an installed copy: each file is vouched for by a digest somewhere, or named."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lots import Lots

ROOT = Path(__file__).resolve().parent.parent.parent
LAUNCHER = "kernel_hub/native/launcher_linux_x86_64.so"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with kernel_hub in it, and the record that pip writes."""
    site = tmp_path_factory.mktemp("site")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kernel_hub", site / "kernel_hub", ignore=ignored)
    if not (site / "kernel_hub/cubins").exists():
        shutil.copytree(ROOT / "cubins", site / "kernel_hub/cubins", ignore=ignored)
    info = site / "kernel_hub-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernel_hub\nVersion: 0.1.0\n")
    lines = []
    for path in sorted((site / "kernel_hub").rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{path.relative_to(site)},sha256={digest},{len(data)}")
    (info / "RECORD").write_text("\n".join(lines) + "\n")
    return site


def verify(site: Path, *options: str) -> tuple[int, str]:
    env = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "kernel_hub", "verify", *options]
    done = subprocess.run(command, cwd=site, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, done.stdout + done.stderr


def test_an_installed_copy_is_vouched_for_whole(wheel: Path) -> None:
    code, said = verify(wheel, "--json")
    report: dict[str, Any] = json.loads(said)
    assert code == 0 and not report["is_checkout"]
    assert len(report["files"]) > 150
    assert all(file["is_vouched"] and not file["problem"] for file in report["files"])
    assert any(file["file"].endswith(".so") for file in report["files"])


def test_what_was_changed_or_put_there_is_named(wheel: Path, tmp_path: Path) -> None:
    lots = Lots("verify")
    shutil.copytree(wheel, site := tmp_path / "site")
    victims = lots.sample(sorted((site / "kernel_hub").rglob("*.py")), 3)
    victims = [path for path in victims if path.name != "__init__.py" and "cli" not in path.parts]
    for path in victims:
        path.write_bytes(path.read_bytes() + b"\n# changed\n")
    planted = [site / "kernel_hub/ctypes.py", site / "kernel_hub/cubins/sm90/more.cubin"]
    for path in planted:
        path.write_bytes(b"")
    (site / "kernel_hub/native/link.so").symlink_to("/nowhere")
    code, said = verify(site)
    assert code == 1
    for path in victims:
        assert f"changed: {path}: sha256 expected " in said, lots
    for path in [*planted, site / "kernel_hub/native/link.so"]:
        assert f"nothing vouches for {path}" in said, lots


def test_a_launcher_and_a_record_changed_together_are_found(wheel: Path, tmp_path: Path) -> None:
    """A digest that lies beside the data proves nothing of the data alone."""
    shutil.copytree(wheel, site := tmp_path / "site")
    library = site / LAUNCHER
    library.write_bytes(library.read_bytes() + b"\0")
    record = site / "kernel_hub-0.1.0.dist-info/RECORD"
    digest = base64.urlsafe_b64encode(hashlib.sha256(library.read_bytes()).digest())
    lines = [line for line in record.read_text().splitlines() if LAUNCHER not in line]
    lines.append(f"{LAUNCHER},sha256={digest.rstrip(b'=').decode()},1")
    record.write_text("\n".join(lines) + "\n")
    code, said = verify(site)
    assert code == 1 and f"changed: {library}" in said


def test_a_checkout_says_that_it_has_no_record() -> None:
    code, said = verify(ROOT)
    assert code == 0 and "it was not installed from a wheel" in said
