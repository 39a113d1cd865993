"""docs/formats.md says what is true: its Python runs as it stands."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
# What follows `python` on a fence: `gpu` needs one, `needs=x` the package x.
BLOCKS = [
    pytest.param(info.split(), block, marks=[pytest.mark.gpu] if "gpu" in info.split() else [])
    for info, block in re.findall(r"```python( [^\n]*)?\n(.*?)```", TEXT, re.DOTALL)
]
KERNELS = (ROOT / "tests/formats/triton_kernels.py").read_text(encoding="utf-8")


def test_there_is_something_to_run() -> None:
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize(("info", "block"), BLOCKS)
def test_blocks_run(
    info: list[str],
    block: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for needs in info:
        if needs.startswith("needs="):
            package = needs.removeprefix("needs=")
            pytest.importorskip(package, reason=f"the block needs {package}")
    cubin = (ROOT / "cubins/sm90/launch_probe.cubin").read_bytes()
    array = ", ".join(map(hex, cubin))
    (tmp_path / "probe.cubin.cpp").write_text(
        f"unsigned char launch_probe_cubin[] = {{{array}}};\nunsigned launch_probe_cubin_len = "
        f"{len(cubin)};\n"
    )
    fmha = (ROOT / "tests/formats/data/fmha_stand_in.cubin").read_bytes()
    (tmp_path / "fmha.cubin.cpp").write_text(
        f"unsigned char cubin_fmha_cu_cubin[] = {{{', '.join(map(hex, fmha))}}};\n"
    )
    images = ROOT / "tests/cubin/data"
    shutil.copy(images / "speed.fatbin", tmp_path / "add.fatbin")
    shutil.copy(images / "tiny_sm90.ptx", tmp_path / "add.ptx")
    (tmp_path / "add").mkdir()
    for path in (ROOT / "tests/formats/data/triton/3.6.0").glob("add_kernel.*"):
        shutil.copy(path, tmp_path / "add")
    (tmp_path / "my_kernels.py").write_text(KERNELS)  # Triton reads its functions from files
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_kernels", raising=False)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/formats.md", "exec"), {})
    assert capsys.readouterr().out
