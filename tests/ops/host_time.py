"""What eager calls of the ops cost the host, without a GPU: everything but the launches. A script.

    PYTHONPATH=. python tests/ops/host_time.py [--against OTHER_TREE] [--rounds 200] [--only linear]

The ops' own code runs, from the public call to the launch: CPU tensors go the way of CUDA tensors,
planned for an H200, and where the kernels are stands what does nothing. With --gpu it is the real
way, of so little work that the host is what takes time, beside what torch has for it, and with
--silent too but for the launches. Given another tree (a folder with a kernel_hub in it), both run
in turn, a round each; a figure is the least of its rounds. First calls: first_use.py.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host_peers

CALLS = 20
E4M3 = "float8_e4m3fn"


Makers = dict[str, Callable[[], Callable[[], Any]]]


def _cases() -> Makers:
    """What makes each call: its tensors, then the call itself."""
    import torch

    from kernel_hub import ops

    def half(*shape: int, **how: Any) -> Any:
        return torch.randn(*shape).to(torch.bfloat16).requires_grad_(how.get("grad", False))

    def byte(*shape: int) -> Any:
        return torch.randn(*shape).to(torch.float8_e4m3fn)

    def attention(grad: bool = False, has_out: bool = False, **options: Any) -> Any:
        q, k, v = (half(1, 248, 4, 64, grad=grad) for _ in range(3))
        if not grad:
            out = half(1, 248, 4, 64) if has_out else None
            return lambda: ops.flash_attention(q, k, v, causal=True, out=out, **options)
        dout = half(1, 248, 4, 64)

        def both() -> None:
            out = ops.flash_attention(q, k, v, causal=True, **options)
            torch.autograd.grad(out, (q, k, v), dout)

        return both

    def attention_e4m3() -> Any:
        q, k, v = (byte(1, 248, 4, 64) for _ in range(3))
        scale = torch.ones(1)
        return lambda: ops.flash_attention(q, k, v, q_scale=scale, k_scale=scale, v_scale=scale)

    def product(op: Any, *shapes: tuple[int, ...], has_out: bool = False, **how: Any) -> Any:
        given = [half(*shape) for shape in shapes]
        out = torch.empty_like(op(*given, **how)) if has_out else None
        return (lambda: op(*given, out=out, **how)) if has_out else (lambda: op(*given, **how))

    def linear_e4m3(has_out: bool = False) -> Any:
        a, b, out = byte(16, 512), byte(256, 512), half(16, 256) if has_out else None
        a_scale, b_scale = torch.ones(16), torch.ones(256)
        return lambda: ops.linear(a, b, out=out, a_scale=a_scale, b_scale=b_scale)

    def grouped(has_out: bool = False) -> Any:
        offsets = torch.tensor([0, 8, 16, 32, 64], dtype=torch.int32)
        a, b, out = half(64, 128), half(4, 256, 128), half(64, 256) if has_out else None
        return lambda: ops.grouped_linear(a, b, offsets, out=out)

    def decode(has_out: bool = False, appends: bool = False) -> Any:
        q, caches = half(4, 1, 8, 128), [half(64, 16, 2, 128) for _ in range(2)]
        lengths = torch.tensor([17, 30, 40, 90], dtype=torch.int32)
        table = torch.arange(64, dtype=torch.int32).view(4, 16)
        out = half(4, 1, 8, 128) if has_out else None
        new = {name: half(4, 1, 2, 128) for name in ("k", "v")} if appends else {}
        return lambda: ops.decode_attention(
            q, *caches, cache_seqlens=lengths, block_table=table, out=out, **new
        )

    def qkv_linear() -> Any:
        x, w, caches = half(4, 512), half(12 * 128, 512), [half(64, 16, 2, 128) for _ in "kv"]
        slots = torch.arange(4)
        cos, sin, positions = torch.ones(64, 64), torch.ones(64, 64), torch.arange(4)
        return lambda: ops.qkv_linear(
            x, w, num_heads=8, num_kv_heads=2, cos=cos, sin=sin, positions=positions,
            k_cache=caches[0], v_cache=caches[1], slot_mapping=slots,
        )  # fmt: skip

    def rms_norm(has_out: bool = False) -> Any:
        x, weight, out = half(4, 512), half(512), half(4, 512) if has_out else None
        return lambda: ops.rms_norm(x, weight, out=out)

    def rope() -> Any:
        q, k, cos, sin = half(4, 8, 128), half(4, 2, 128), torch.ones(64, 64), torch.ones(64, 64)
        positions = torch.arange(4)
        return lambda: ops.rope(q, k, cos, sin, positions=positions)

    def append_kv() -> Any:
        new, caches = [half(4, 2, 128) for _ in "kv"], [half(64, 16, 2, 128) for _ in "kv"]
        slots = torch.arange(4)
        return lambda: ops.append_kv(*new, *caches, slot_mapping=slots)

    def layer_norm() -> Any:
        x, weight, bias = half(4, 512), half(512), half(512)
        return lambda: ops.layer_norm(x, weight, bias)

    def of_rows(op: Any, size: int = 512, **how: Any) -> Any:
        x = half(4, size)
        return lambda: op(x, **how)

    def embedding() -> Any:
        ids, weight = torch.arange(4), half(64, 512)
        return lambda: ops.embedding(ids, weight)

    def moe_route() -> Any:
        logits = half(4, 8)
        return lambda: ops.moe_route(logits, 2, renormalise=True)

    def moe_permute() -> Any:
        x, experts = half(4, 512), torch.arange(8, dtype=torch.int32).view(4, 2)
        return lambda: ops.moe_permute(x, experts, 8)

    def moe_combine() -> Any:
        rows, places = half(8, 512), torch.arange(8, dtype=torch.int32).view(4, 2)
        weights = torch.rand(4, 2)
        return lambda: ops.moe_combine(rows, places, weights)

    def merge_states() -> Any:
        a, b, lse_a, lse_b = half(4, 8, 64), half(4, 8, 64), torch.rand(8, 4), torch.rand(8, 4)
        return lambda: ops.merge_states(a, lse_a, b, lse_b)

    def pad_input() -> Any:
        x, starts = half(8, 512), torch.tensor([0, 3, 8], dtype=torch.int32)
        return lambda: ops.pad_input(x, starts, 5)

    def copy_blocks() -> Any:
        caches, pairs = [half(8, 16, 2, 64) for _ in "kv"], torch.tensor([[0, 1], [2, 3]])
        return lambda: ops.copy_blocks(*caches, pairs)

    def cu_seqlens() -> Any:
        lengths = torch.tensor([3, 5, 1, 9], dtype=torch.int32)
        return lambda: ops.cu_seqlens(lengths)

    def sample() -> Any:
        logits, seed = torch.randn(4, 4096), torch.zeros(4, dtype=torch.int64)
        return lambda: ops.sample(logits, seed=seed, offset=seed)

    def softmax(has_out: bool = False) -> Any:
        x = half(4, 512)
        out = half(4, 512) if has_out else None
        return lambda: ops.softmax(x, out=out)

    return {
        "attention": attention,
        "attention out": lambda: attention(has_out=True),
        "attention + backward": lambda: attention(grad=True),
        "attention + backward softcap": lambda: attention(grad=True, softcap=30.0),
        "attention e4m3": attention_e4m3,
        "decode": decode,
        "decode out": lambda: decode(has_out=True),
        "decode append": lambda: decode(appends=True),
        "linear": lambda: product(ops.linear, (16, 512), (256, 512)),
        "linear out": lambda: product(ops.linear, (16, 512), (256, 512), has_out=True),
        "linear e4m3": linear_e4m3,
        "linear e4m3 out": lambda: linear_e4m3(has_out=True),
        "swiglu": lambda: product(ops.swiglu_linear, (16, 512), (512, 512)),
        "swiglu out": lambda: product(ops.swiglu_linear, (16, 512), (512, 512), has_out=True),
        "grouped": grouped,
        "grouped out": lambda: grouped(has_out=True),
        "batched": lambda: product(ops.batched_matmul, (4, 32, 128), (4, 64, 128)),
        "batched out": lambda: product(
            ops.batched_matmul, (4, 32, 128), (4, 64, 128), has_out=True
        ),
        "qkv_linear": qkv_linear,
        "rms_norm": rms_norm,
        "rms_norm out": lambda: rms_norm(has_out=True),
        "rope": rope,
        "append_kv": append_kv,
        "sample": sample,
        "softmax": softmax,
        "softmax out": lambda: softmax(has_out=True),
        "log_softmax": lambda: of_rows(ops.log_softmax),
        "layer_norm": layer_norm,
        "silu_and_mul": lambda: of_rows(ops.silu_and_mul, 1024),
        "gelu_and_mul": lambda: of_rows(ops.gelu_and_mul, 1024),
        "gelu": lambda: of_rows(ops.gelu),
        "relu_squared": lambda: of_rows(ops.relu_squared),
        "quantize_e4m3": lambda: of_rows(ops.quantize_e4m3),
        "embedding": embedding,
        "moe_route": moe_route,
        "moe_permute": moe_permute,
        "moe_combine": moe_combine,
        "merge_states": merge_states,
        "pad_input": pad_input,
        "copy_blocks": copy_blocks,
        "cu_seqlens": cu_seqlens,
    }


class _Nothing:
    """A function whose launches do nothing."""

    def __call__(self, *arguments: Any, **options: Any) -> None:
        """A launch."""

    load = __call__


_nothing = _Nothing()


def _go_the_gpus_way() -> None:
    """CPU tensors are planned for an H200 from here on, and nothing is launched."""
    import pkgutil

    from kernel_hub import ops
    from kernel_hub.ops.core import common, device, tensor_maps

    found = pkgutil.walk_packages(ops.__path__, "kernel_hub.ops.")
    modules = [importlib.import_module(each.name) for each in found if not each.ispkg]
    sets: dict[int, Any] = {}
    for module in modules:
        for name, launches in list(vars(module).items()):
            by_torch = name.replace("cuda", "cpu", 1).replace("gpu", "cpu", 1)
            if by_torch != name and hasattr(module, by_torch):
                setattr(module, by_torch, launches)
        for name, value in (
            ("applies", getattr(module, "fits", None)),
            ("counters", lambda _, count: sets.setdefault(count, b"")),
            ("check_device", _nothing),
        ):
            if value is not None and hasattr(module, name):
                setattr(module, name, value)
    common.shipped = lambda *_: _nothing
    tensor_maps.make = lambda key, *_: tensor_maps.known.setdefault(key, bytes(128))
    device.device_of.cache_clear()
    device._pretended = device.PlannedGpu((9, 0), 132, "NVIDIA H200")


def _serve(names: list[str], is_gpu: bool, is_silent: bool) -> None:
    """A process of one tree: a line of JSON a round, when it is asked."""
    import torch

    if is_gpu and is_silent:
        common: Any = importlib.import_module("kernel_hub.ops.core.common")
        common.shipped = lambda *_: _nothing
    if not is_gpu:
        torch.set_num_threads(1)
        _go_the_gpus_way()
    calls = {}
    cases = {**_cases(), **host_peers.makers()} if is_gpu else _cases()
    for name in names or cases:
        try:
            with torch.device("cuda" if is_gpu else "cpu"):
                call = cases[name]()
            call()
        except Exception as failed:  # noqa: BLE001 (a torch without such a call)
            print(f"{name}: {failed!r:.300}", file=sys.stderr)
        else:
            calls[name] = call
    gc.collect()
    gc.freeze()  # torch's half a million objects are no call's
    for _ in sys.stdin:
        found = {}
        for name, call in calls.items():
            if is_gpu:  # a call is never held up by those before it
                torch.cuda.synchronize()
            for _ in range(3):
                call()
            started = time.perf_counter()
            for _ in range(CALLS):
                call()
            found[name] = 1e6 * (time.perf_counter() - started) / CALLS
        print(json.dumps(found), flush=True)


def _start(tree: Path, names: list[str], options: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--serve"]
    command += ["--gpu"] * options.gpu + ["--silent"] * options.silent
    command += [word for name in names for word in ("--only", name)]
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(tree)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def _ask(process: subprocess.Popen[str]) -> dict[str, float]:
    """us a call of a round."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    found: dict[str, float] = json.loads(process.stdout.readline())
    return found


def _table(title: str, trees: list[Path], least: list[dict[str, float]]) -> None:
    print(f"{title:30}" + "".join(f"{tree.name:>12}" for tree in trees))
    for name in least[-1]:
        print(f"{name:30}" + "".join(f"{each.get(name, 0):12.2f}" for each in least))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another tree, which comes first")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--only", action="append", default=[], help="a call; may be repeated")
    parser.add_argument("--gpu", action="store_true", help="on a GPU, beside torch")
    parser.add_argument("--silent", action="store_true", help="launch nothing on it")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return _serve(options.only, options.gpu, options.silent)
    own = Path(__file__).resolve().parents[2]
    trees = [*([options.against.resolve()] if options.against else []), own]
    least: list[dict[str, float]] = [{} for _ in trees]

    def keep(at: int, found: dict[str, float]) -> None:
        least[at].update({n: min(value, least[at].get(n, value)) for n, value in found.items()})

    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_start(tree, options.only, options)) for tree in trees]
        for _ in range(options.rounds):
            for at, process in enumerate(processes):
                keep(at, _ask(process))
    return _table("us a call", trees, least)


if __name__ == "__main__":
    main()
