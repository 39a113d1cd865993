"""What Python does in the first call of an op, where there is no GPU. A script.

    PYTHONPATH=. python tests/ops/first_python.py [--against OTHER_TREE] [--rounds 5]

The calls of `first_use.py`, each in a process of its own: CPU tensors say that they are on an H100,
and the stand-in for libcuda takes the launches. Least and median of the rounds, in ms: what the
caller's thread and the whole process compute, by their own clocks, which a busy machine disturbs
least; and how many bytecodes the caller's thread runs.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from first_use import CASES

OWN = Path(__file__).resolve().parents[2]
_CUDA = torch.device("cuda", 0)


def begin(library: str) -> None:
    """torch as on a machine with an H100 whose libcuda is `library`, for the rest of the process;
    with the ops."""
    os.environ["KERNEL_HUB_LIBCUDA"] = library
    context, driver = ctypes.c_void_p(), ctypes.CDLL(library)
    driver.cuInit(0)
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    driver.cuCtxSetCurrent(context)  # as torch has it
    properties = SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, name="NVIDIA H100 80GB HBM3",
        shared_memory_per_block_optin=227 << 10, shared_memory_per_multiprocessor=228 << 10,
    )  # fmt: skip
    stream = SimpleNamespace(stream_id=0, cuda_stream=0, synchronize=lambda: None)
    said: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "current_device": 0, "device_count": 1,
        "current_stream": stream, "is_current_stream_capturing": False, "synchronize": None,
        "get_device_properties": properties, "_get_device_properties": properties,
        "get_device_capability": (9, 0),
    }  # fmt: skip
    for name, value in said.items():
        setattr(torch.cuda, name, lambda *_, value=value: value)
    places: dict[Any, dict[str, Any]] = {
        torch.Tensor: {
            "is_cuda": property(lambda _: True), "device": property(lambda _: _CUDA),
            "get_device": lambda _: 0, "new_empty": _on_cpu(torch.Tensor.new_empty),
            "to": lambda x, to, convert=torch.Tensor.to: x if to == _CUDA else convert(x, to),
        },
        torch._C: {
            "_cuda_getCurrentRawStream": lambda _: 0,
            "_cuda_getCurrentStream": lambda _: (0, 0, 1),
        },
        torch.version: {"cuda": "13.0"},  # the runtime comes with the ops
        torch: {
            name: _on_cpu(getattr(torch, name))
            for name in ("arange", "empty", "empty_like", "randn", "tensor", "zeros", "zeros_like")
        },
    }  # fmt: skip
    for place, attributes in places.items():
        for name, value in attributes.items():
            setattr(place, name, value)
    importlib.import_module("kernel_hub.ops")
    c_launcher: Any = importlib.import_module("kernel_hub.launch.c_launcher")
    # torch's own way to a tensor would say where it lies.
    c_launcher._exchange = lambda _: c_launcher.Exchange()


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, device: Any = None, **how: Any) -> Any:
        return make(*args, **how)

    return made


def _bytecodes(call: Callable[[], Any]) -> int:
    count = 0

    def seen(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return seen

    sys.settrace(seen)
    call()
    sys.settrace(None)
    return count


def _child(name: str, library: str, is_counted: bool) -> None:
    x = torch.randn(64, 64).requires_grad_()
    torch.autograd.grad(torch.nn.functional.gelu(x @ x), x, torch.ones(64, 64))
    begin(library)
    calls = CASES[name](lambda: sys.modules["kernel_hub.ops"])
    gc.collect()
    gc.disable()  # a collection would come in any of them
    found: dict[str, float] = {}
    for each, call in calls:
        if is_counted:
            found[f"{each}: bytecodes"] = _bytecodes(call)
            continue
        own, all_threads = time.thread_time(), time.process_time()
        call()
        found[each] = 1e3 * (time.thread_time() - own)
        found[f"{each}, all threads"] = 1e3 * (time.process_time() - all_threads)
    print(json.dumps(found))


def measure(name: str, library: str, tree: Path = OWN, *, is_counted: bool) -> dict[str, float]:
    """What a process found."""
    command = [sys.executable, __file__, "--child", name, "--library", library]
    places = [str(tree), str(OWN / "tests"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [*command, *["--counted"] * is_counted], check=True, text=True, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places), "FAKECUDA_CC": "9.0"},
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--against", type=Path, help="another tree, which comes first")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", choices=CASES, help="may be repeated")
    for hidden in ("--child", "--library"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--counted", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(options.child, options.library, options.counted)
        return
    sys.path.insert(0, str(OWN / "tests"))
    from fakecuda import build

    library = str(build())
    trees = [*([options.against.resolve()] if options.against else []), OWN]
    for name in options.only or CASES:
        rows: dict[Path, dict[str, list[float]]] = {tree: {} for tree in trees}
        for tree in [*trees, *trees * options.rounds]:
            is_counted = not rows[tree]
            for key, ms in measure(name, library, tree, is_counted=is_counted).items():
                rows[tree].setdefault(key, []).append(ms)
        for tree, found in rows.items():
            said = [f"{k} {min(ms):.6g} {statistics.median(ms):.6g}" for k, ms in found.items()]
            print(f"{name}, {tree.name}: {'; '.join(said)}", flush=True)


if __name__ == "__main__":
    main()
