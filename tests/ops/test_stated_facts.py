"""The manifest states what the sources state of launches; the plans name what is there."""

from __future__ import annotations

import itertools
import random
import subprocess
from pathlib import Path

import pytest
import torch

from kernel_hub.collection.manifest import open_collection
from kernel_hub.compilers.launch_facts import read_launch_facts
from kernel_hub.compilers.nvcc import Job, compile_described, find_nvcc, find_sources, make_jobs
from kernel_hub.errors import KernelHubError
from kernel_hub.ops.attention import (
    forward_fp8,
    forward_sm90,
    forward_split_sm90,
    split_costs,
)
from kernel_hub.ops.attention.backward import portable as backward_portable
from kernel_hub.ops.attention.backward import sm90 as backward_sm90
from kernel_hub.ops.core.device import SM90, launch_facts
from kernel_hub.ops.matmul import grouped_plan, linear_fp8_plan, linear_plan, paired_plan, tiles

CSRC = Path(__file__).resolve().parents[2] / "csrc"
BF16 = torch.bfloat16
CUBINS = open_collection().manifest.cubins
# Of the compilations that `./build_cubins.sh --check` does all of; others with each manifest.
DRAWN = 6


def jobs_of(name: str, source: Path) -> list[Job]:
    """Every architecture of a source that asks which it is built for; else the first."""
    jobs = make_jobs(source, sorted(CUBINS[name]), "any", CSRC)
    asks = any("__CUDA_ARCH__" in (CSRC.parent / file).read_text() for file in jobs[0].files)
    return jobs if asks else jobs[:1]


def drawn_jobs() -> list[Job]:
    jobs = [job for name, source in find_sources(CSRC).items() for job in jobs_of(name, source)]
    manifest = (CSRC.parent / "cubins/manifest.json").read_bytes()
    return random.Random(manifest).sample(jobs, DRAWN)


def test_the_manifest_is_that_of_the_sources() -> None:
    """Whoever edits a source and builds nothing learns it here, without nvcc."""
    sources = find_sources(CSRC)
    assert sources.keys() == CUBINS.keys()
    stale = [
        f"{arch}/{name}"
        for name, archs in CUBINS.items()
        for arch, entry in archs.items()
        if make_jobs(sources[name], [arch], entry.toolkit, CSRC)[0].source_sha256
        != entry.source_sha256
    ]
    assert not stale, "run ./build_cubins.sh"


@pytest.mark.parametrize("job", drawn_jobs(), ids=lambda job: f"{job.name}-{job.arch}")
def test_the_manifest_states_what_the_source_states(job: Job, tmp_path: Path) -> None:
    try:
        nvcc = find_nvcc()
    except KernelHubError as missing:
        pytest.skip(str(missing))
    functions = CUBINS[job.name][job.arch].functions
    stated = read_launch_facts(compile_described(nvcc, job, tmp_path), functions, job.label)
    told = {name: function.launch for name, function in functions.items() if function.launch}
    assert stated == told, "run ./build_cubins.sh"
    assert told or job.name == "launch_probe"


def test_what_plans_repeat_of_the_sources(tmp_path: Path) -> None:
    """Sizes of buffers that a plan makes and a kernel fills."""
    try:
        nvcc = find_nvcc()
    except KernelHubError as missing:
        pytest.skip(str(missing))
    asserted = {
        "Packing::kSlots": split_costs.SLOTS,
        "Packing::kAsTheyCome": forward_split_sm90._AS_THEY_COME,
        "Packing::kStep": split_costs.STEP,
        "Packing::kCoarseStep": split_costs.COARSE_STEP,
        "Line::kTried - 1": split_costs.MOST_LONGER,
        "Line::kMost": forward_split_sm90._MAX_BATCH,
    }
    source = tmp_path / "repeated.cu"
    lines = [f"static_assert({name} == {value});" for name, value in asserted.items()]
    namespace = "namespace kernel_hub::attention::sm90 {"
    source.write_text("\n".join(['#include "attention/sm90/plan.cuh"', namespace, *lines, "}\n"]))
    command = [nvcc.path, "-std=c++20", "-arch=sm_90a", "-cubin", "-o", tmp_path / "repeated.cubin"]
    folders = ["-I", CSRC, "-I", CSRC / "include"]
    done = subprocess.run([*command, *folders, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def exported(cubin: str, prefix: str) -> set[str]:
    """Variants of bf16 in a cubin for Hopper."""
    names = CUBINS[cubin]["sm90"].functions
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def test_the_plans_of_products_name_every_variant() -> None:
    linear = {name for name in exported("linear_sm90", "linear_bf16_") if "_fp32" not in name}
    assert set(linear_plan.HOPPER) == linear
    wide = {name + "_fp32" for name in linear_plan.HOPPER_FP32}
    assert wide == exported("linear_sm90", "linear_bf16_") - linear
    fp8 = {*linear_fp8_plan.VARIANTS, *linear_fp8_plan.WITH_BLOCKS.values()}
    assert fp8 == exported("linear_fp8_sm90", "linear_fp8_bf16_")
    for op, rows in paired_plan.HOPPER.items():
        assert {row.name for row in rows} == exported(f"{op}_sm90", f"{op}_bf16_")
        assert {*tiles.PORTABLE, *tiles.SMALL_M} == exported(op, f"{op}_bf16_")
    for op, named in grouped_plan.HOPPER.items():
        assert set(named) == exported(f"{op}_sm90", f"{op}_bf16_")
        assert set(tiles.PORTABLE) == exported(op, f"{op}_bf16_")


def test_the_plans_of_attention_name_every_variant() -> None:
    sm90 = exported("flash_attention_sm90", "")
    assert {body.name(BF16) for body in forward_sm90.BODIES} == {n for n in sm90 if "bf16" in n}
    named = {body.name(BF16) for body in forward_split_sm90.BODIES}
    named |= {forward_split_sm90.merge_name(BF16, scan) for scan in (0, 1)}
    assert named == {n for n in exported("flash_attention_split_sm90", "") if "bf16" in n}
    assert {body.name for body in forward_fp8.BODIES} == exported("flash_attention_fp8_sm90", "")
    backward = CUBINS["flash_attention_backward"].values()
    names = {name for entry in backward for name in entry.functions if "hdim" in name}
    suffixes = itertools.product(backward_portable.VARIANTS, ("fp16", "bf16"), ("", "_general"))
    assert names == {
        f"flash_attention_backward_{dtype}_{variant}{suffix}" for variant, dtype, suffix in suffixes
    }
    named = {
        name for body in backward_sm90.BODIES for name in (body.name(BF16), *body.rows_names(BF16))
    }
    sm90 = exported("flash_attention_backward_sm90", "")
    assert named == {name for name in sm90 if "bf16" in name}


def test_the_names_of_the_bodies_of_gradients_say_what_they_state() -> None:
    for body in backward_sm90.BODIES:
        sizes = body.stated.sizes
        delta, convert = (launch_facts(backward_sm90.CUBIN, x) for x in body.rows_names(BF16))
        assert (sizes["head_dim"], sizes["block_m"]) == body[:2]
        assert body.block_m % delta.sizes["block_m"] == 0
        assert delta == convert
    for dtype in ("fp16", "bf16"):
        delta, convert = (
            launch_facts(backward_portable.CUBIN, f"{backward_portable.CUBIN}_{dtype}_{part}")
            for part in ("delta", "convert")
        )
        assert delta == convert


def test_the_elements_of_k_in_a_box_are_those_of_a_stage() -> None:
    for cubin in ("linear_sm90", "swiglu_linear_sm90", "qkv_linear_sm90", "grouped_linear_sm90"):
        for name in CUBINS[cubin]["sm90"].functions:
            assert launch_facts(cubin, name).sizes["block_k"] == tiles.BLOCK_K
    for name in CUBINS["linear_fp8_sm90"]["sm90"].functions:
        facts = launch_facts("linear_fp8_sm90", name)
        assert facts.sizes["block_k"] == linear_fp8_plan.SCALE_BLOCK
    # A twin that takes scales of blocks is launched as the variant itself.
    for name, twin in linear_fp8_plan.WITH_BLOCKS.items():
        first, second = (
            launch_facts("linear_fp8_sm90", f"linear_fp8_bf16_{each}") for each in (name, twin)
        )
        assert first == second


def test_a_gpu_without_a_cubin_is_planned_for_as_the_newest() -> None:
    newest = launch_facts("linear", "linear_bf16_128x128", SM90)
    assert launch_facts("linear", "linear_bf16_128x128", (12, 0)) == newest
    assert launch_facts("linear", "linear_bf16_128x128", (8, 9)).sizes["stages"] == 3
    assert launch_facts("linear", "linear_bf16_128x128", (8, 6)).sizes["stages"] == 4
