"""The machine code of every Hopper cubin: tensor-core products, local memory, lengths of loops.

Of every cubin of a *_sm90.cu; the counts of tests/ops/sass_loops.json are written by
`python tests/ops/record_sass.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import drawn
import pytest
import sass

from kernel_hub.collection.manifest import open_collection
from kernel_hub.compilers.nvcc import find_sources, make_jobs

CSRC = sass.RECORD.parents[2] / "csrc"
# A loop may grow by this much before it must be looked at and recorded anew.
MOST_GROWTH = 1.05
# Kernels that only read and write rows, beside those that multiply.
ROWS_ONLY = (
    "_delta", "_convert", "_merge", "_merge_left", "sample", "sum_ranks_fp16", "sum_ranks_bf16",
)  # fmt: skip
# Of few rows a warp: their products are mma.sync, which are not counted.
OF_WARPS = ("decode_attention_sm90", "decode_attention_wide_sm90", "decode_ordered_sm90")
RECORD = "python tests/ops/record_sass.py"

CUBINS = {entry.name: entry for entry in sass.hopper_cubins()}


def test_every_source_for_hopper_has_its_cubin() -> None:
    sources = {name for name in find_sources(CSRC) if name.endswith("_sm90")}
    assert sources == CUBINS.keys()


@pytest.mark.parametrize("cubin", sorted(CUBINS))
def test_what_is_recorded_is_of_these_functions(cubin: str) -> None:
    found = sass.recorded().get(cubin, {})
    assert found.keys() == CUBINS[cubin].functions.keys(), RECORD
    for name, row in found.items():
        assert bool(row["loops"]) != (name.endswith(ROWS_ONLY) or cubin in OF_WARPS), name


@pytest.mark.skipif(
    sass.find_nvdisasm() is None,
    reason="nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)",
)
@pytest.mark.parametrize("cubin", sorted(CUBINS))
def test_machine_code(cubin: str) -> None:
    """Of cubins whose very bytes are recorded a run reads two by lot, and all others."""
    again = drawn.some([name for name in sorted(CUBINS) if sass.is_recorded(CUBINS[name])], 2)
    if sass.is_recorded(CUBINS[cubin]) and cubin not in again:
        return
    functions = sass.functions(cubin)
    assert functions.keys() == CUBINS[cubin].functions.keys()
    wanted = "QGMMA" if "fp8" in cubin else "HGMMA"
    (job,) = make_jobs(find_sources(CSRC)[cubin], ["sm90"], "0", CSRC)
    for name, function in functions.items():
        if name.endswith(ROWS_ONLY) or cubin in OF_WARPS:
            assert not function.products and not function.loops, name
        else:
            assert wanted in function.products, f"{name} has {sorted(function.products)}"
            assert function.loops, f"{name}: no loop holds its products"
        if job.local_memory_reason is None:
            assert function.local_bytes == 0, f"{name}: {function.local_bytes} bytes"
            assert not any(loop.num_local for loop in function.loops), name
    recorded, found = sass.recorded().get(cubin, {}), sass.rows(cubin)
    if sass.is_recorded(CUBINS[cubin]):
        assert found == recorded, RECORD
    problems = [
        f"{name}: {problem}"
        for name in sorted({*recorded, *found})
        if (problem := difference(recorded.get(name), found.get(name)))
    ]
    assert not problems, "\n".join([*problems, f"if that is meant: {RECORD}"])


def follows(path: Path) -> bool:
    """Whether a source, or what it includes, says follow_launch_before."""
    text = path.read_text(encoding="utf-8")
    included = re.findall(r'#include "(.+?)"', text)
    return "follow_launch.cuh" in text or any(
        follows(CSRC / name) for name in included if (CSRC / name).is_file()
    )


# Some kernels read tables and first tiles, which are older than the launch before them.
EARLIER = re.compile(
    r"flash_attention_backward_sm90_(fp16|bf16)_hdim\d+_rows\d+|sum_ranks_\w+|moe_permute_rows_vec"
)
FOLLOWING = sorted(name for name, path in find_sources(CSRC).items() if follows(path))


@pytest.mark.skipif(
    sass.find_nvdisasm() is None,
    reason="nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)",
)
def test_nothing_is_read_before_the_launch_before_has_ended() -> None:
    """Compilers move reads of constant memory; of four cubins by lot."""
    assert len(FOLLOWING) >= 20
    for cubin in drawn.some(FOLLOWING, 4):
        entry = open_collection().manifest.cubins[cubin]["sm90"]
        found = {
            name: ahead
            for name, ahead in sass.ahead_of_wait(entry).items()
            if ahead and not EARLIER.fullmatch(name)
        }
        assert not found, cubin


def difference(before: dict[str, Any] | None, now: dict[str, Any] | None) -> str:
    """'' or what is worse than, or cannot be held against, what was recorded."""
    if before is None or now is None:
        return "is not recorded" if before is None else "is recorded, but gone"
    if len(now["loops"]) != len(before["loops"]):
        return f"{len(before['loops'])} loops with products became {len(now['loops'])}"
    if now["local_bytes"] > before["local_bytes"]:
        return f"local memory grew from {before['local_bytes']} to {now['local_bytes']} bytes"
    for old, new in zip(before["loops"], now["loops"], strict=True):
        if new[0] > MOST_GROWTH * old[0]:
            return f"a loop of {old[0]} instructions grew to {new[0]}"
        if new[1] != old[1]:
            return f"a loop of {old[1]} products has {new[1]} now"
        if new[2] > old[2]:
            return f"a loop with {old[2]} accesses to local memory has {new[2]} now"
    return ""


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"loops": [[105, 4, 0], [50, 8, 1]], "local_bytes": 8}, ""),
        ({"loops": [[90, 4, 0], [50, 8, 0]], "local_bytes": 0}, ""),
        ({"loops": [[106, 4, 0], [50, 8, 1]], "local_bytes": 8}, "100 instructions grew to 106"),
        ({"loops": [[100, 4, 0], [50, 4, 1]], "local_bytes": 8}, "8 products has 4 now"),
        ({"loops": [[100, 4, 0]], "local_bytes": 8}, "2 loops with products became 1"),
        (
            {"loops": [[100, 4, 1], [50, 8, 1]], "local_bytes": 8},
            "0 accesses to local memory has 1",
        ),
        ({"loops": [[100, 4, 0], [50, 8, 1]], "local_bytes": 16}, "from 8 to 16 bytes"),
        (None, "gone"),
    ],
)
def test_what_counts_as_worse(now: dict[str, Any] | None, words: str) -> None:
    before = {"loops": [[100, 4, 0], [50, 8, 1]], "local_bytes": 8}
    assert (words in difference(before, now)) and bool(words) == bool(difference(before, now))
    assert difference(None, before) == "is not recorded"


NESTED = """
    MOV R1, c[0x0][0x28]
tile:
    UTMALDG.2D [UR8], [UR4]
head:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3
    @!P0 BRA `(again)
back:
    HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24
    STL [R1], R2
    @P1 BRA `(head)
    FADD R1, R1, R1
    @P2 BRA `(tile)
switch:
    BRX R6 -0x1280  (*"BRANCH_TARGETS one,two"*)
one:
    FADD R1, R1, R1
    BRA `(end)
two:
    @P3 BRA `(two)
end:
    EXIT
again:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3
    @!P0 BRA `(again)
    BRA `(back)
"""


def test_loops_are_those_of_the_control_flow() -> None:
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in NESTED.replace("(", "(.L_").replace("TARGETS ", "TARGETS .L_").splitlines():
        text = line.strip().replace("one,two", "one,.L_two")
        if text.endswith(":"):
            labels[f".L_{text[:-1]}"] = len(code)
        elif text:
            code.append(text)
    # Of `head` .. its branch, with the three instructions at `again`; not the loop of tiles.
    assert sass.product_loops(code, labels) == (sass.Loop(8, 1, 1),)
    without = [each.replace("HGMMA", "FFMA") for each in code]
    assert sass.product_loops(without, labels) == ()
    assert sass.product_loops(["HGMMA R0", "EXIT"], {}) == ()
