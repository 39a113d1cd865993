"""fmha_v2 on a real GPU: the stand-ins of fmha_stand_in.cu, and the user's own kernels.

KERNEL_HUB_FMHA_DIR names a folder of TensorRT-LLM's cubins or `.cubin.cpp` files: each kernel in it
is called too, of any version whose struct is known. Each runs in a child process, which is started
anew after one that broke its context.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the reference of these tests is torch's arithmetic")

from fmha_cases import Case, load  # noqa: E402
from fmha_worker import Worker  # noqa: E402

from kernel_hub import KernelFunction  # noqa: E402
from kernel_hub.arrays.device_array import DeviceArray  # noqa: E402
from kernel_hub.formats import fmha_v2  # noqa: E402
from kernel_hub.formats.fmha_v2 import KernelName  # noqa: E402

# How many kernels the stand-ins of a struct are.
STRUCTS = {"CURRENT": 12, "WITHOUT_SINKS": 12, "P640": 6, "P576": 6, "LONG512": 6, "P512": 6}


def folder() -> Path | None:
    given = os.environ.get("KERNEL_HUB_FMHA_DIR")
    return Path(given) if given else None


def own_kernels() -> list[Any]:
    """(file, name) of each kernel in KERNEL_HUB_FMHA_DIR that `run` takes.

    Alibi's tma_ws kernels exist in TensorRT-LLM under the causal mask alone.
    """
    root = folder()
    files = (
        [] if root is None else sorted(p for p in root.iterdir() if p.suffix in (".cubin", ".cpp"))
    )
    return [
        pytest.param(path, name, id=str(name))
        for path in files
        for name in fmha_v2.load(path)
        if not any(a.startswith(("sage", "skip", "mtp")) for a in name.attributes)
        and not ("alibi" in name.attributes and name.mask in ("padding", "custom_mask"))
    ]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


@pytest.fixture(scope="module")
def stand_ins(
    compile_cuda: Callable[..., Path], device_arch: str
) -> dict[KernelName, KernelFunction]:
    return load(stand_in(compile_cuda, device_arch, "CURRENT"))


def call_each(worker: Worker, path: Path, num_kernels: int) -> None:
    kernels = load(path)
    assert len(kernels) == num_kernels
    failed = {}
    for name in kernels:
        if (outcome := worker.run(path, str(name))).failed:
            failed[str(name)] = outcome.text
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())


def stand_in(compile_cuda: Callable[..., Path], device_arch: str, struct: str) -> Path:
    if device_arch != "sm_90":
        pytest.skip("the stand-ins use the TMA and are named sm90")
    return compile_cuda("fmha_stand_in.cu", "-cubin", "-arch=sm_90a", f"-DSTRUCT={struct}")


@pytest.mark.parametrize("struct", STRUCTS)
def test_stand_ins(
    worker: Worker, compile_cuda: Callable[..., Path], device_arch: str, struct: str
) -> None:
    call_each(worker, stand_in(compile_cuda, device_arch, struct), STRUCTS[struct])


@pytest.mark.parametrize(("path", "name"), own_kernels())
def test_real_kernels(worker: Worker, path: Path, name: KernelName) -> None:
    if name.arch != "sm90":
        pytest.skip(f"a kernel for {name.arch}")
    outcome = worker.run(path, str(name))
    print(outcome.text)
    assert not outcome.failed, outcome.text


@pytest.mark.parametrize("mask", ["causal", "padding"])
def test_a_plan_repeats_itself_in_a_graph_too(
    stand_ins: dict[KernelName, KernelFunction], mask: str
) -> None:
    fields = {"variant": "tma_ws", "dtype": "fp16"} if mask == "causal" else {"variant": "nl"}
    function = fmha_v2.find(stand_ins, mask=mask, head_dim=128, **fields)
    case = Case(fmha_v2.parse_name(function.name), 4, 4)
    plan = fmha_v2.plan(function, *case.inputs, **case.options)
    first = plan().clone()
    for _ in range(3):
        plan.out.zero_()
        torch.testing.assert_close(plan(), first, rtol=0, atol=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan()
    for _ in range(2):
        plan.out.zero_()
        graph.replay()
        torch.testing.assert_close(plan.out, first, rtol=0, atol=0)


def test_arrays_of_our_own_and_another_stream(
    stand_ins: dict[KernelName, KernelFunction],
) -> None:
    function = fmha_v2.find(stand_ins, mask="causal", variant="nl")
    case = Case(fmha_v2.parse_name(function.name), 2, 2)
    expected = fmha_v2.run(function, *case.inputs, **case.options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    again = fmha_v2.run(function, *case.inputs, stream=stream, **case.options)
    stream.synchronize()
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    packed = DeviceArray.from_numpy(case.inputs[0].cpu().numpy())
    starts = DeviceArray.from_numpy(case.options["cu_seqlens"].cpu().numpy())
    ours = fmha_v2.run(function, packed, cu_seqlens=starts, num_kv_heads=2)
    assert isinstance(ours, DeviceArray)
    np.testing.assert_array_equal(ours.to_numpy(), expected.cpu().numpy())
