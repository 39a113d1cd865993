"""What the builder reads of a source's statements: constants of a cubin compiled for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernel_hub.collection.manifest import LaunchFacts
from kernel_hub.compilers.launch_facts import read_launch_facts
from kernel_hub.compilers.nvcc import compile_described, find_nvcc, make_jobs
from kernel_hub.errors import KernelHubError

HEADER = Path(__file__).resolve().parents[2] / "csrc/include/kernel_hub/launch_facts.cuh"
INCLUDE = '#include "kernel_hub/launch_facts.cuh"\n'
KERNEL = 'DESCRIBED({name}, "x: rows", ({facts}), extern "C" __global__ void {name}(int* x) {{}})\n'
PLAIN = 'extern "C" __global__ void plain(int* x) {}\n'


def described(tmp_path: Path, text: str) -> bytes | None:
    try:
        nvcc = find_nvcc()
    except KernelHubError as missing:
        pytest.skip(str(missing))
    csrc = tmp_path / "csrc"
    (csrc / "include/kernel_hub").mkdir(parents=True)
    shutil.copy(HEADER, csrc / "include/kernel_hub")
    source = csrc / "scale.cu"
    source.write_text(text)
    [job] = make_jobs(source, ["sm90"], nvcc.version)
    return compile_described(nvcc, job, tmp_path)


def test_facts_go_by_their_names(tmp_path: Path) -> None:
    text = INCLUDE + KERNEL.format(name="a", facts=".threads = 32 * 2, .stages = 0, .swaps = 1 > 0")
    text += KERNEL.format(name="b", facts=".threads = 8, .threads_y = 4, .shared_bytes = 96")
    text += KERNEL.format(name="c", facts="")
    assert read_launch_facts(described(tmp_path, text), "abc", "scale.cu") == {
        "a": LaunchFacts("x: rows", (64, 1, 1), None, {"stages": 0, "swaps": 1}),
        "b": LaunchFacts("x: rows", (8, 4, 1), 96, {}),
        "c": LaunchFacts("x: rows"),
    }


def test_a_source_without_the_header_states_nothing(tmp_path: Path) -> None:
    assert described(tmp_path, PLAIN) is None
    assert read_launch_facts(None, ["plain"], "scale.cu") == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (KERNEL.format(name="a", facts="") + PLAIN, "plain is exported without a DESCRIBED"),
        (KERNEL.format(name="plain", facts=".stages = -3"), "states {'stages': -3}"),
    ],
)
def test_what_is_left_out_or_below_0_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(KernelHubError) as caught:
        read_launch_facts(described(tmp_path, INCLUDE + text), ["plain"], "scale.cu (sm90)")
    assert said in str(caught.value) and "scale.cu (sm90)" in str(caught.value)
