"""What the attention plans launch fits each GPU it may meet, told from the manifest, without a GPU.

The plans run on CPU tensors with the limits of each compute capability; what they would launch is
held against what ptxas wrote of that kernel: registers, local and shared memory, threads.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_devices import BACKWARD, DEVICES, FORWARD, KIB, pretend

from kernel_hub.collection.manifest import FunctionEntry, open_collection
from kernel_hub.ops.attention.problem import Problem
from kernel_hub.ops.core import common
from kernel_hub.ops.core.device import PlannedGpu
from kernel_hub.ops.core.launch import forget_all

# Compute capability -> the cubins it takes; of what 8.9 has none, those of sm80.
ARCHS = {(8, 0): "sm80", (8, 6): "sm80", (8, 7): "sm80", (8, 9): "sm89", (9, 0): "sm90"}
HEAD_DIMS = range(16, 257, 8)
REGISTERS = 64 * KIB
# The portable kernels of all architectures, and Hopper's own beside them.
MAX_CUBIN_BYTES, MAX_HOPPER_BYTES = 15.8 * KIB * KIB, 4.06 * KIB * KIB
MAX_SPLIT_BYTES = 3.12 * KIB * KIB
CUBINS = ("flash_attention", "flash_attention_backward", "decode_attention")
HOPPER = "flash_attention_sm90"
SPLIT_LOCAL_BYTES = 8  # in the warps that load
SM90: Any = importlib.import_module("kernel_hub.ops.attention.forward_sm90")
SPLIT: Any = importlib.import_module("kernel_hub.ops.attention.forward_split_sm90")
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Launch:
    cubin: str
    function: str
    threads: int
    shared_bytes: int


class Recorder:
    """Stands where the kernels are and notes what would be launched."""

    def __init__(self) -> None:
        self.launches: set[Launch] = set()

    def shipped(self, cubin: str, name: str) -> Any:
        def launch(grid: Any, block: Any, shared_bytes: int, *rest: Any, **more: Any) -> None:
            threads = block[0] * block[1] * block[2]
            self.launches.add(Launch(cubin, name, threads, shared_bytes))

        return launch


def forwards() -> None:
    table = torch.zeros(1, 1, dtype=torch.int32)
    for dtype, head_dim in itertools.product(DTYPES, HEAD_DIMS):
        q = torch.zeros(1, 8, 2, head_dim, dtype=dtype)
        for softcap, pages, seqlen_q in itertools.product((0.0, 1.0), (None, table), (1, 8)):
            rows = q[:, :seqlen_q]
            problem = Problem(
                rows, q, q, 1, seqlen_q, 8, 1.0, softcap=softcap, block_table=pages
            )  # fmt: skip
            launch = FORWARD.plan(problem, torch.empty_like(rows), None)
            launch.function(launch.grid, launch.block, launch.shared_bytes, None, ())


def backwards() -> None:
    for dtype, head_dim in itertools.product(DTYPES, HEAD_DIMS):
        q = torch.zeros(1, 8, 2, head_dim, dtype=dtype)
        lse = torch.zeros(1, 2, 8)
        for softcap, window_right, order in itertools.product((0.0, 1.0), (-1, 0), (False, True)):
            problem = Problem(
                q, q, q, 1, 8, 8, 1.0, softcap=softcap, window_right=window_right
            )  # fmt: skip
            BACKWARD.backward(
                problem, q, lse, q, *(q.clone() for _ in range(3)), deterministic=order
            )


def decodes() -> None:
    module = importlib.import_module("kernel_hub.ops.kv_cache.decode_attention")
    lengths = torch.ones(1, dtype=torch.int32)
    for dtype, head_dim in itertools.product(DTYPES, HEAD_DIMS):
        for is_e4m3, seqlen_q, softcap in itertools.product((False, True), (1, 16), (0.0, 1.0)):
            if is_e4m3 and head_dim % 16:
                continue
            q = torch.zeros(1, seqlen_q, 4, head_dim, dtype=dtype)
            cache = torch.zeros(1, 4096, 1, head_dim, dtype=dtype)
            cache = cache.to(torch.float8_e4m3fn) if is_e4m3 else cache
            for num_splits in (0, 1):
                module.decode_attention(
                    q, cache, cache, cache_seqlens=lengths, softcap=softcap, num_splits=num_splits
                )


def recorded(capability: tuple[int, int], *runs: Callable[[], None]) -> frozenset[Launch]:
    """All that `runs` launch on such a device."""
    recorder = Recorder()
    decode = importlib.import_module("kernel_hub.ops.kv_cache.decode_attention")
    run = importlib.import_module("kernel_hub.ops.attention.eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "shipped", recorder.shipped)
        pretend(patch, capability)
        forget_all()
        patch.setattr(run, "cpu_forward", run.cuda_forward)
        patch.setattr(run, "cpu_backward", BACKWARD.backward)
        patch.setattr(decode, "_cpu_into", decode._cuda_into)
        patch.setattr(decode, "device_of", FORWARD.device_of)
        for each in runs:
            each()
    forget_all()
    return frozenset(recorder.launches)


@functools.cache
def launches(capability: tuple[int, int]) -> frozenset[Launch]:
    """All that the plans launch on such a device."""
    return recorded(capability, forwards, backwards, decodes)


def entry_of(arch: str, launch: Launch) -> FunctionEntry:
    built = open_collection().manifest.cubins
    assert launch.cubin in built, f"cubins/ has no {launch.cubin}: run ./build_cubins.sh"
    archs = built[launch.cubin]
    functions = archs[arch if arch in archs or arch != "sm89" else "sm80"].functions
    assert launch.function in functions, f"{launch.cubin} for {arch} has no {launch.function}"
    return functions[launch.function]


@pytest.mark.parametrize("capability", DEVICES, ids=str)
def test_what_the_plans_launch_fits(capability: tuple[int, int]) -> None:
    arch, most_shared = ARCHS[capability], DEVICES[capability] * KIB
    wrong = []
    assert launches(capability)
    for launch in sorted(launches(capability), key=str):
        entry = entry_of(arch, launch)
        shared = launch.shared_bytes + entry.static_shared_bytes
        # A warp's registers come in steps of 8 a thread.
        registers = -(-entry.num_regs // 8) * 8 * -(-launch.threads // 32) * 32
        for what, found, most in (
            ("bytes of shared memory", shared, most_shared),
            ("threads", launch.threads, min(1024, entry.max_threads or 1024)),
            ("registers a block", registers, REGISTERS),
            ("registers a thread", entry.num_regs, 255),
            ("bytes of local memory", entry.local_bytes, 0),
        ):
            if found > most:
                wrong.append(f"{launch.function} on {capability}: {found} {what}, {most} allowed")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90"])
@pytest.mark.parametrize("cubin", CUBINS)
def test_every_kernel_is_one_some_plan_launches(cubin: str, arch: str) -> None:
    """And none of them keeps anything in local memory."""
    built = open_collection().manifest.cubins
    assert cubin in built, f"cubins/ has no {cubin}: run ./build_cubins.sh"
    if arch == "sm89" and arch not in built[cubin]:
        pytest.skip("8.9 runs the code of sm80")
    functions = built[cubin][arch].functions
    used = {
        capability: {x.function for x in launches(capability) if x.cubin == cubin}
        for capability in DEVICES
    }
    own = set().union(*(names for device, names in used.items() if ARCHS[device] == arch))
    assert sorted(own - set(functions)) == []
    assert sorted(set(functions) - set().union(*used.values())) == []
    assert not [name for name, entry in functions.items() if entry.local_bytes]


def check_hopper(launch: Any, entry: Any) -> None:
    """A block of a launch fits a multiprocessor of Hopper."""
    assert launch.threads == entry.max_threads, launch
    assert launch.shared_bytes + entry.static_shared_bytes <= DEVICES[9, 0] * KIB, launch
    assert -(-entry.num_regs // 8) * 8 * launch.threads <= REGISTERS, launch


def recorder_of(monkeypatch: pytest.MonkeyPatch, module: Any) -> Recorder:
    """What an H200 is given by one of Hopper's bodies."""
    recorder = Recorder()
    monkeypatch.setattr(common, "shipped", recorder.shipped)
    monkeypatch.setattr(module, "device_of", lambda _: PlannedGpu((9, 0), 132))
    monkeypatch.setattr(SPLIT, "choice", module is SPLIT)
    return recorder


def test_the_hopper_kernels_fit_and_are_all_used(monkeypatch: pytest.MonkeyPatch) -> None:
    built = open_collection().manifest.cubins
    assert HOPPER in built, f"cubins/ has no {HOPPER}: run ./build_cubins.sh"
    assert list(built[HOPPER]) == ["sm90"]
    recorder = recorder_of(monkeypatch, SM90)
    for dtype, head_dim, length in itertools.product(DTYPES, HEAD_DIMS, (8, 4000, 60000)):
        q = torch.zeros(1, length, 2, head_dim, dtype=dtype)
        for window in ((-1, -1), (-1, 0), (-1, 3), (2, -1), (2, 3), (100, 0), (100, 100)):
            for v, softcap in itertools.product((q, q[..., :128]), (0.0, 20.0)):
                problem = Problem(q, q, v, 1, length, length, 1.0, *window, softcap=softcap)
                function, grid, block, shared_bytes, *_ = SM90.plan(problem, v, None)
                function(grid, block, shared_bytes)
    assert {launch.function for launch in recorder.launches} == set(built[HOPPER]["sm90"].functions)
    for launch in recorder.launches:
        entry = entry_of("sm90", launch)
        assert entry.local_bytes == 0, launch
        check_hopper(launch, entry)


def test_the_split_kernels_fit_and_are_all_used(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = open_collection().manifest.cubins[SPLIT.CUBIN]["sm90"].functions
    recorder = recorder_of(monkeypatch, SPLIT)
    for dtype, head_dim, (new, length) in itertools.product(
        DTYPES, HEAD_DIMS, ((8, 8), (4000, 4000), (60000, 60000), (8, 4000))
    ):
        k = torch.zeros(1, length, 2, head_dim, dtype=dtype)
        q = k[:, :new]
        for window in ((-1, -1), (-1, 0), (2, -1), (100, 0), (100, 100)):
            problem = Problem(q, k, k, 1, new, length, 1.0, *window)
            lengths = torch.zeros(1, dtype=torch.int32)
            for is_cut, each in ((True, problem), (False, problem._replace(cache_seqlens=lengths))):
                monkeypatch.setattr(SPLIT, "cuts_tiles", is_cut)
                main = SM90.plan(each, q, None)
                for one in filter(None, (main, main.maps.merge)):
                    one.function(one.grid, one.block, one.shared_bytes)
    short = torch.zeros(1, 200, 2, 64, dtype=torch.bfloat16)
    capped = SM90.plan(Problem(short, short, short, 1, 200, 200, 1.0, softcap=20.0), short, None)
    capped.function(capped.grid, capped.block, capped.shared_bytes)
    assert {launch.function for launch in recorder.launches} == set(entries)
    for launch in recorder.launches:
        entry = entry_of("sm90", launch)
        may_have = any(x in launch.function for x in ("window", "rows192"))
        assert entry.local_bytes <= SPLIT_LOCAL_BYTES * may_have, launch
        check_hopper(launch, entry)


def test_all_attention_cubins_together_are_small() -> None:
    built = open_collection().manifest.cubins
    sizes = {
        f"{arch}/{name}": entry.size_bytes
        for name, archs in built.items()
        if name in CUBINS
        for arch, entry in archs.items()
    }
    assert sum(sizes.values()) <= MAX_CUBIN_BYTES, sizes
    assert built[HOPPER]["sm90"].size_bytes <= MAX_HOPPER_BYTES
    assert built[SPLIT.CUBIN]["sm90"].size_bytes <= MAX_SPLIT_BYTES


def test_the_sanitizer_sees_every_kernel() -> None:
    path = Path(__file__).parents[2] / "gpu/sanitize_attention.py"
    spec = importlib.util.spec_from_file_location("sanitize_attention", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    runs = [functools.partial(run, "cpu") for run in script.CASES]
    seen = {launch.function for launch in recorded((9, 0), *runs)}
    assert {launch.function for launch in launches((9, 0))} - seen == set()
