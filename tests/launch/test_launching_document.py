"""docs/launching.md says what is true: its blocks run in their order, as one program."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakecuda import FakeCuda

from kernel_hub.compilers.nvcc import find_nvcc
from kernel_hub.errors import KernelHubError

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/launching.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)([^\n]*)\n(.*?)```", TEXT, re.DOTALL)

try:
    NVCC, REASON = find_nvcc().path, ""
except KernelHubError as error:
    NVCC, REASON = "", str(error)
needs_nvcc = pytest.mark.skipif(bool(REASON), reason=REASON)


def saxpy(launch: Any, params: list[int]) -> None:
    """What the kernel does, on the stand-in, whose memory is the host's."""
    y, x = (ctypes.c_uint64.from_address(at).value for at in params[:2])
    a, count = ctypes.c_float.from_address(params[2]).value, ctypes.c_int.from_address(params[3])
    arrays = [(ctypes.c_float * count.value).from_address(at) for at in (y, x)]
    out, added = (np.frombuffer(array, np.float32) for array in arrays)
    out += np.float32(a) * added


def follow(folder: Path, target: str, *, on_gpu: bool) -> list[str]:
    """Do what the document says; gives the kinds of its blocks."""
    namespace: dict[str, Any] = {}
    for kind, info, block in BLOCKS:
        if kind == "cuda":
            (folder / "saxpy.cu").write_text(block)
        elif kind == "sh":
            command = block.replace("nvcc", NVCC, 1).replace("sm_90", target)
            subprocess.run(["sh", "-euc", command], cwd=folder, check=True)
        elif on_gpu or "gpu" not in info.split():
            if "needs=torch" in info:
                pytest.importorskip("torch", reason="the block needs torch")
            exec(compile(block, "docs/launching.md", "exec"), namespace)
    return [kind for kind, _, _ in BLOCKS]


@needs_nvcc
def test_the_document_is_followed(
    fakecuda: FakeCuda,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    fakecuda.set_params("saxpy", [8, 8, 4, 4])
    fakecuda.set_callback("saxpy", saxpy)
    kinds = follow(tmp_path, "sm_90", on_gpu=False)
    assert kinds[:2] == ["cuda", "sh"] and kinds.count("python") >= 6
    said = capsys.readouterr().out
    assert "saxpy(float* y, float* x, float a, int num_elements)" in said
    assert "as NumPy has it" in said and "us a launch on the GPU" in said
    for refused in (
        "too few params: got 3",
        "DeviceArray.from_numpy(array)",
        "a float does not go into an integer",
        "blockDim=(2048, 1, 1) of saxpy",
    ):
        assert refused in said, said
    assert fakecuda.launch_count == 1 + 100 + 10 + 1


@pytest.mark.gpu
@needs_nvcc
def test_the_document_is_followed_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_hub import driver

    monkeypatch.chdir(tmp_path)
    major, minor = driver.get().compute_capability(0)
    follow(tmp_path, f"sm_{major}{minor}", on_gpu=True)
