"""Writes what every op launches over a wide grid of calls and GPUs, without one. A script.

    PYTHONPATH=. python tests/ops/record_plans.py before.jsonl
    ... (move code) ...
    PYTHONPATH=. python tests/ops/record_plans.py after.jsonl --against before.jsonl

The ops' own code runs, from the public call to the launch: CPU tensors say that they are on a GPU,
torch says what that GPU is, and where the kernels are stands something that writes down cubin,
function, grid, block, shared bytes, numbers, and tensor maps. A line holds one call. Code that only
moved gives the same lines.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from plan_lots import DRAWN, Lot

from kernel_hub import ops, registry
from kernel_hub.arrays import tensor_map
from kernel_hub.errors import KernelHubError
from kernel_hub.ops.core import counters, launch

# Of each GPU: compute capability, multiprocessors, name, KiB of shared memory a block may have.
GPUS = [
    ((8, 0), 108, "NVIDIA A100-SXM4-80GB", 163),
    ((8, 6), 84, "NVIDIA A10", 99),
    ((8, 9), 142, "NVIDIA L40S", 99),
    ((9, 0), 132, "NVIDIA H100 80GB HBM3", 227),
    ((9, 0), 132, "NVIDIA H200", 227),
    ((9, 0), 78, "some other GPU", 227),
]
_CUDA = torch.device("cuda", 0)
_IS_CUDA: Any = property(lambda _: True)
_DEVICE: Any = property(lambda _: _CUDA)


class _Recorder:
    """registry.own's place: notes each launch."""

    def __init__(self) -> None:
        self.launches: list[list[Any]] = []

    def __getitem__(self, cubin: str) -> Any:
        return _Cubin(self, cubin)


class _Cubin(dict[str, Any]):
    def __init__(self, recorder: _Recorder, cubin: str) -> None:
        self._recorder, self._cubin = recorder, cubin

    def __missing__(self, name: str) -> Any:
        def launch(
            grid: Any, block: Any, shared: int, stream: Any, params: Any, **how: Any
        ) -> None:
            shown = [_shown(one) for one in params]
            self._recorder.launches.append(
                [self._cubin, name, list(grid), list(block), shared, shown, sorted(how.items())]
            )

        launch.load = lambda *_, **how: None  # type: ignore[attr-defined]
        self[name] = launch
        return launch


def _shown(param: Any) -> Any:
    if isinstance(param, torch.Tensor):
        return f"{str(param.dtype).removeprefix('torch.')}*"
    if isinstance(param, (bytes, bytearray, memoryview)):
        return hashlib.sha256(bytes(param)).hexdigest()[:12]
    return param


def _map(tensor: torch.Tensor, box: Any, **how: Any) -> Any:
    """A TensorMap that says what it was asked for."""
    text = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {box} {sorted(how.items())}"
    return SimpleNamespace(raw=text.encode())


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, device: Any = None, **how: Any) -> Any:
        return make(*args, **how)

    return made


@contextlib.contextmanager
def pretending(gpu: tuple[Any, ...]) -> Iterator[_Recorder]:
    """Calls of ops plan for this GPU and launch nothing."""
    capability, num_sms, gpu_name, kib = gpu
    recorder = _Recorder()
    properties = SimpleNamespace(
        major=capability[0], minor=capability[1], multi_processor_count=num_sms, name=gpu_name,
        shared_memory_per_block_optin=kib << 10,
        shared_memory_per_multiprocessor=(kib + 1) << 10, L2_cache_size=50 << 20,
        total_memory=80 << 30,
    )  # fmt: skip
    _forget()
    stream = SimpleNamespace(stream_id=0, cuda_stream=0, synchronize=lambda: None)
    empty, empty_like = torch.empty, torch.empty_like
    makers = {
        "empty": _on_cpu(empty), "zeros": _on_cpu(empty),
        "empty_like": _on_cpu(empty_like), "zeros_like": _on_cpu(empty_like),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for module in [m for n, m in sys.modules.items() if n.startswith("kernel_hub.ops")]:
            for attribute, value in list(vars(module).items()):  # those that took one by name
                for name, maker in makers.items():
                    if value is getattr(torch, name):
                        stack.enter_context(mock.patch.object(module, attribute, maker))
        for place, attribute, value in (
            (registry, "own", recorder),
            (tensor_map.TensorMap, "tiled", _map),
            (torch.Tensor, "is_cuda", _IS_CUDA),
            (torch.Tensor, "device", _DEVICE),
            (torch.cuda, "get_device_properties", lambda *_: properties),
            (torch.cuda, "get_device_capability", lambda *_: capability),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "current_stream", lambda *_: stream),
            (counters, "_current_stream", None),
            (counters, "_FEW", 0),  # a copy would go to a GPU
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            *((torch, name, maker) for name, maker in makers.items()),
            (torch.Tensor, "new_empty", lambda x, *size, dtype=None, device=None:
                empty(*size, dtype=dtype or x.dtype)),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(place, attribute, value, create=True))
        yield recorder
    _forget()


def _forget() -> None:
    """Empty every cache of a module of ops: what was planned or asked for another GPU."""
    launch.forget_all()
    for name, module in list(sys.modules.items()):
        if not name.startswith("kernel_hub.ops"):
            continue
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
        for attribute in ("known", "_checked", "_sets", "_flags"):
            if hasattr(held := getattr(module, attribute, None), "clear"):
                held.clear()


def record(name: str, seed: int, gpu: tuple[Any, ...]) -> dict[str, Any]:
    """What one call launches on one GPU: its launches, or how it was refused."""
    op, draw = DRAWN[name]
    args, options = draw(Lot(f"{name} {seed}"))
    with pretending(gpu) as recorder:
        try:
            if name.endswith("backward"):
                for x in args:
                    x.requires_grad_()
            found = getattr(ops, op)(*args, **options)
            if name.endswith("backward"):
                found.backward(torch.empty_like(found))
        except KernelHubError as error:
            return {"refused": str(error)[:200]}
        return {"launches": recorder.launches}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="file to write, a line a call")
    parser.add_argument("--cases", type=int, default=150, help="calls of each op and GPU")
    parser.add_argument("--against", type=Path, help="exit with 1 where a line differs from its")
    parser.add_argument("--only", default="", help="of ops whose name contains this")
    options = parser.parse_args()
    importlib.import_module("kernel_hub.ops")
    lines = []
    for name in DRAWN:
        if options.only not in name:
            continue
        counts: dict[str, int] = {}
        for gpu in GPUS:
            for seed in range(options.cases):
                found = record(name, seed, gpu)
                counts[next(iter(found))] = counts.get(next(iter(found)), 0) + 1
                line = {"op": name, "seed": seed, "gpu": [*gpu[0], gpu[1], gpu[2]], **found}
                lines.append(json.dumps(line, default=str))
        print(f"{name}: {counts}", file=sys.stderr, flush=True)
    options.out.write_text("\n".join(lines) + "\n")
    if options.against:
        _compare(lines, options.against.read_text().splitlines())


def _compare(lines: list[str], before: list[str]) -> None:
    differing = [pair for pair in zip(before, lines, strict=False) if pair[0] != pair[1]]
    for old, new in differing[:5]:
        print(f"before: {old}\nafter:  {new}\n")
    if differing or len(lines) != len(before):
        raise SystemExit(f"{len(differing)} of {len(lines)} lines differ ({len(before)} before)")
    print(f"{len(lines)} lines are equal")


if __name__ == "__main__":
    main()
