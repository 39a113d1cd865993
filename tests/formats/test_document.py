"""docs/formats.md says what is true: its Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_there_is_something_to_run() -> None:
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_run(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cubin = (ROOT / "cubins/sm90/launch_probe.cubin").read_bytes()
    array = ", ".join(map(hex, cubin))
    (tmp_path / "probe.cubin.cpp").write_text(
        f"unsigned char launch_probe_cubin[] = {{{array}}};\nunsigned launch_probe_cubin_len = "
        f"{len(cubin)};\n"
    )
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/formats.md", "exec"), {})
    assert capsys.readouterr().out
