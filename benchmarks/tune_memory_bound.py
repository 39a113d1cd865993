"""Times every variant and launch shape of the memory-bound kernels, to choose the ops' plans.

Needs a GPU, torch and nvcc, not kernel_hub: it compiles csrc/*.cu itself (once for each cache
policy) and launches by ctypes. Each cell is checked against torch once, then all contenders are
timed interleaved, as replays of CUDA graphs over inputs rotated past the L2. Prints the best
launches of each cell beside torch.compile and, where installed, Liger; all rows go to a JSON file.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

DEVICE = "cuda"
REPOSITORY = Path(__file__).resolve().parent.parent
L2_BYTES = 60 << 20
EPS = 1e-6
SHARED_BYTES_AN_SM = 228 << 10
DTYPE_TOKENS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
LOADS = ("ld_global", "ld_global_cs")
STORES = ("st_global", "st_global_cs")
Dims = tuple[int, int, int]
ROTARY_TABLE_ROWS = 32768


class Cubin:
    """A cubin loaded into torch's context, launched by ctypes on torch's current stream."""

    driver = ctypes.CDLL("libcuda.so.1") if torch.cuda.is_available() else None

    def __init__(self, path: Path) -> None:
        self.handle = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(self.handle), path.read_bytes())
        self.functions: dict[str, ctypes.c_void_p] = {}

    @classmethod
    def call(cls, name: str, *args: object) -> None:
        status = getattr(cls.driver, name)(*args)
        if status:
            raise RuntimeError(f"{name} returned CUresult {status}")

    def function(self, name: str) -> ctypes.c_void_p:
        if name not in self.functions:
            function = ctypes.c_void_p()
            self.call("cuModuleGetFunction", ctypes.byref(function), self.handle, name.encode())
            self.functions[name] = function
        return self.functions[name]

    def blocks_per_sm(self, name: str, threads: int) -> int:
        blocks = ctypes.c_int()
        self.call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            ctypes.byref(blocks), self.function(name), threads, ctypes.c_size_t(0),
        )  # fmt: skip
        return blocks.value

    def launcher(
        self, name: str, grid: Dims, block: Dims, shared: int, args: list
    ) -> Callable[[], None]:
        """A launch with everything prepared. Python ints become C ints, floats C floats."""
        values = []
        for arg in args:
            if isinstance(arg, torch.Tensor):
                values.append(ctypes.c_void_p(arg.data_ptr()))
            elif isinstance(arg, float):
                values.append(ctypes.c_float(arg))
            elif isinstance(arg, int):
                values.append(ctypes.c_int(arg))
            else:
                values.append(arg)
        if shared > 48 << 10:
            self.call("cuFuncSetAttribute", self.function(name), 8, shared)
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        function = self.function(name)

        def launch(keep: object = values) -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            self.call("cuLaunchKernel", function, *grid, *block, shared, stream, pointers, None)

        return launch


@dataclass
class Launch:
    """One contender: a kernel variant with its launch shape, in one cache policy."""

    function: str
    grid: Dims
    block: Dims
    shared: int = 0
    policy: tuple[str, str] = (LOADS[0], STORES[0])

    @property
    def name(self) -> str:
        blocks = "x".join(map(str, self.block))
        policy = (
            "" if self.policy == (LOADS[0], STORES[0]) else f" {self.policy[0]} {self.policy[1]}"
        )
        grid = "x".join(map(str, self.grid))
        shared = f" shared {self.shared}" if self.shared else ""
        return f"{self.function} grid {grid} block {blocks}{shared}{policy}"

    def throttled(self, resident: int) -> Iterator[Launch]:
        """The same with fewer blocks on an SM, by shared memory nobody uses."""
        for blocks in (2, 3, 4, 5, 6, 8, 10, 12):
            if blocks < resident:
                shared = (SHARED_BYTES_AN_SM // blocks - 1024) // 128 * 128 - 512
                yield Launch(self.function, self.grid, self.block, shared, self.policy)


def i64(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


def build(folder: Path, sources: list[str], policies: list[tuple[str, str]]) -> dict:
    """Compiles each source once a cache policy; maps (source, policy) to its cubin."""

    def compile_one(job: tuple[str, tuple[str, str]]) -> tuple:
        source, (load, store) = job
        output = folder / f"{source}-{load}-{store}.cubin"
        command = [
            os.environ.get("NVCC", "nvcc"), "-std=c++17", "-O3", "-cubin", "-arch=sm_90",
            f"-DKERNEL_HUB_STREAM_LOAD={load}", f"-DKERNEL_HUB_STREAM_STORE={store}",
            "-I", str(REPOSITORY / "csrc/include"), "-o", str(output),
            str(REPOSITORY / "csrc" / f"{source}.cu"),
        ]  # fmt: skip
        subprocess.run(command, check=True)
        return job, output

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        outputs = list(pool.map(compile_one, itertools.product(sources, policies)))
    return {job: Cubin(path) for job, path in outputs}


class Timer:
    """Times one launch by CUDA-graph replays, contenders interleaved, L2 flushed where needed."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.flush_buffer = torch.empty(4 * L2_BYTES, dtype=torch.uint8, device=DEVICE).view(
            torch.int32
        )
        self.flush_buffer.zero_()

    def measure(
        self, contenders: dict[str, list[Callable[[], object]]], bytes_a_launch: int
    ) -> dict[str, dict]:
        """`contenders`: name -> launches, one an input set. Returns us: median, p20, p80."""
        graphs = {}
        for name, launches in contenders.items():
            repeats = max(1, -(-4 // len(launches)))
            for launch in launches[:2]:
                launch()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kept = [launch() for _ in range(repeats) for launch in launches]
            graphs[name] = (graph, len(kept))
        small = bytes_a_launch * len(next(iter(contenders.values()))) < 3 * L2_BYTES
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        events = []
        for _ in range(self.rounds):
            for name, (graph, count) in graphs.items():
                if small:
                    torch.sum(self.flush_buffer)
                start, stop = (
                    torch.cuda.Event(enable_timing=True),
                    torch.cuda.Event(enable_timing=True),
                )
                start.record()
                graph.replay()
                stop.record()
                events.append((name, start, stop, count))
            torch.cuda.synchronize()
        for name, start, stop, count in events[len(graphs) :]:
            samples[name].append(start.elapsed_time(stop) * 1e3 / count)
        return {name: summary(values) for name, values in samples.items()}


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "p20": ordered[len(ordered) // 5],
        "p80": ordered[min(len(ordered) - 1, len(ordered) * 4 // 5)],
    }


def copy_bandwidth() -> float:
    """TB/s, read plus written, of plain copies of 2 GiB: the ceiling."""
    source = torch.randn(1 << 29, device=DEVICE)
    target = torch.empty_like(source)
    times = []
    for _ in range(15):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return 2 * source.nbytes / statistics.median(times) / 1e9


def num_sets(bytes_a_launch: int) -> int:
    return max(2, min(48, -(-3 * L2_BYTES // bytes_a_launch)))


def compiled(function: Callable) -> Callable:
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


class RmsNorm:
    """Rows held in registers by blockDim.x threads, with and without the residual."""

    source = "rms_norm"
    hidden_sizes = (1024, 2048, 4096, 5120, 8192, 16384)

    def __init__(self, dtype: torch.dtype, tokens: int, hidden: int, residual: bool) -> None:
        self.dtype, self.tokens, self.hidden, self.residual = dtype, tokens, hidden, residual
        self.bytes_a_launch = (4 if residual else 2) * tokens * hidden * dtype.itemsize
        self.sets = num_sets(self.bytes_a_launch)
        self.weight = torch.randn(hidden, device=DEVICE, dtype=dtype)
        shape = (self.sets, tokens, hidden)
        self.x = torch.randn(shape, device=DEVICE, dtype=dtype)
        self.out = torch.empty_like(self.x)
        if residual:
            self.r = torch.randn(shape, device=DEVICE, dtype=dtype)
            self.r_out = torch.empty_like(self.r)

    def launches(self, cubin: Cubin, num_sms: int) -> Iterator[Launch]:
        vecs = self.hidden * self.dtype.itemsize // 16
        prefix = f"rms_norm_{DTYPE_TOKENS[self.dtype]}_{'residual_' if self.residual else ''}"
        variants = [("vec1", 1, 1024), ("vec2", 2, 1024), ("vec4", 4, 1024)]
        for variant, per_thread, limit in variants:
            threads = -(-vecs // per_thread)
            threads = -(-threads // 32) * 32 if threads > 32 else 32
            for rows in (1, 2, 4):
                if threads * rows > limit or rows > max(1, self.tokens):
                    continue
                if rows > 1 and threads * rows > 512:
                    continue
                blocks = -(-self.tokens // rows)
                yield Launch(f"{prefix}{variant}", (blocks, 1, 1), (threads, rows, 1))
        for threads in (256, 512):
            if vecs >= 512 and threads <= vecs:
                yield Launch(f"{prefix}loop", (self.tokens, 1, 1), (threads, 1, 1))

    def arguments(self, i: int) -> list:
        h = i64(self.hidden)
        tail = [self.tokens, self.hidden, EPS, 0.0]
        zero = i64(0)
        if self.residual:
            tensors = [self.out[i], self.r_out[i], self.x[i], self.r[i], self.weight]
            return [*tensors, h, zero, h, zero, h, zero, h, zero, *tail]
        return [self.out[i], self.x[i], self.weight, h, zero, h, zero, *tail]

    @staticmethod
    def formula(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        f = x.float()
        return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + EPS) * w.float()).to(x.dtype)

    def error(self) -> float:
        x = self.x[0]
        if self.residual:
            x = x + self.r[0]
            if not torch.equal(self.r_out[0], x):
                return float("inf")
        return relative_error(self.out[0], self.formula(x.float(), self.weight))

    def poison(self) -> None:
        self.out[0].fill_(float("nan"))
        if self.residual:
            self.r_out[0].fill_(float("nan"))

    def peers(self) -> dict[str, list[Callable[[], object]]]:
        if self.residual:

            def fused(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple:
                s = x + r
                return self.formula(s, w), s

            f = compiled(fused)
            found = {
                "torch.compile": [
                    lambda i=i: f(self.x[i], self.r[i], self.weight) for i in range(self.sets)
                ]
            }
        else:
            f = compiled(self.formula)
            found = {
                "torch.compile": [lambda i=i: f(self.x[i], self.weight) for i in range(self.sets)]
            }
        try:
            from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward
            from liger_kernel.ops.rms_norm import rms_norm_forward
        except ImportError:
            return found
        if self.residual:
            found["liger"] = [
                lambda i=i: fused_add_rms_norm_forward(
                    self.x[i], self.r[i], self.weight, EPS, 0.0, "llama"
                )
                for i in range(self.sets)
            ]
        else:
            found["liger"] = [
                lambda i=i: rms_norm_forward(self.x[i], self.weight, EPS, 0.0, "llama", True)
                for i in range(self.sets)
            ]
        return found


class SiluAndMul:
    """Column blocks along x, rows along y."""

    source = "silu_and_mul"
    hidden_sizes = (11008, 14336, 28672)

    def __init__(self, dtype: torch.dtype, tokens: int, hidden: int, residual: bool) -> None:
        self.dtype, self.tokens, self.hidden = dtype, tokens, hidden
        self.bytes_a_launch = 3 * tokens * hidden * dtype.itemsize
        self.sets = num_sets(self.bytes_a_launch)
        self.x = torch.randn((self.sets, tokens, 2 * hidden), device=DEVICE, dtype=dtype)
        self.out = torch.empty((self.sets, tokens, hidden), device=DEVICE, dtype=dtype)

    def launches(self, cubin: Cubin, num_sms: int) -> Iterator[Launch]:
        vecs = self.hidden * self.dtype.itemsize // 16
        name = f"silu_and_mul_{DTYPE_TOKENS[self.dtype]}_vec"
        for threads in (64, 128, 192, 224, 256, 320, 384, 448, 512, 704, 768, 896, 1024):
            blocks = -(-vecs // threads)
            if blocks * threads <= 1.08 * vecs:
                yield Launch(name, (blocks, min(self.tokens, 65535), 1), (threads, 1, 1))

    def arguments(self, i: int) -> list:
        zero = i64(0)
        return [
            self.out[i], self.x[i], i64(self.hidden), zero, i64(2 * self.hidden), zero,
            self.tokens, self.hidden,
        ]  # fmt: skip

    @staticmethod
    def formula(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype)

    def error(self) -> float:
        return relative_error(self.out[0], self.formula(self.x[0].float()))

    def poison(self) -> None:
        self.out[0].fill_(float("nan"))

    def peers(self) -> dict[str, list[Callable[[], object]]]:
        f = compiled(self.formula)
        return {"torch.compile": [lambda i=i: f(self.x[i]) for i in range(self.sets)]}


class Rope:
    """Heads along threadIdx.y, tokens along z. `hidden` counts query heads; 8 key heads of 128."""

    source = "rope"
    hidden_sizes = (32, 64)
    head_dim = 128
    kv_heads = 8

    def __init__(self, dtype: torch.dtype, tokens: int, hidden: int, residual: bool) -> None:
        self.dtype, self.tokens, self.heads = dtype, tokens, hidden
        total = hidden + self.kv_heads
        self.bytes_a_launch = 2 * tokens * total * self.head_dim * dtype.itemsize
        self.sets = num_sets(self.bytes_a_launch)
        self.q = torch.randn((self.sets, tokens, hidden, self.head_dim), device=DEVICE, dtype=dtype)
        self.k = torch.randn(
            (self.sets, tokens, self.kv_heads, self.head_dim), device=DEVICE, dtype=dtype
        )
        self.in_place = residual
        if not self.in_place:
            self.q_out, self.k_out = torch.empty_like(self.q), torch.empty_like(self.k)
        angle = torch.arange(ROTARY_TABLE_ROWS, device=DEVICE)[:, None] * (
            10000.0 ** (-torch.arange(0, self.head_dim, 2, device=DEVICE) / self.head_dim)
        )
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)
        self.positions = torch.arange(tokens, device=DEVICE, dtype=torch.int64) % ROTARY_TABLE_ROWS

    def launches(self, cubin: Cubin, num_sms: int) -> Iterator[Launch]:
        total = self.heads + self.kv_heads
        width = self.head_dim // 2 * self.dtype.itemsize // 16
        for per_thread in (1, 2, 4):
            for rounds in (1, 2, 3, 4):
                head_threads = -(-total // (per_thread * rounds))
                for tokens in (1, 2, 4):
                    threads = width * head_threads * tokens
                    if not 64 <= threads <= 512 or tokens > self.tokens:
                        continue
                    name = f"rope_{DTYPE_TOKENS[self.dtype]}_half_vec{per_thread}"
                    yield Launch(
                        name, (-(-self.tokens // tokens), 1, 1), (width, head_threads, tokens)
                    )

    def arguments(self, i: int) -> list:
        d, q_width, k_width = (
            i64(self.head_dim),
            i64(self.heads * self.head_dim),
            i64(self.kv_heads * self.head_dim),
        )
        zero = i64(0)
        q_out, k_out = (self.q, self.k) if self.in_place else (self.q_out, self.k_out)
        return [
            q_out[i], k_out[i], self.q[i], self.k[i], self.cos, self.sin, ctypes.c_void_p(0),
            zero, q_width, d, zero, k_width, d, zero, q_width, d, zero, k_width, d,
            i64(self.head_dim // 2), zero, self.tokens, self.heads, self.kv_heads,
            self.head_dim, self.head_dim, ROTARY_TABLE_ROWS, 0,
        ]  # fmt: skip

    @staticmethod
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.float().chunk(2, -1)
        c, s = cos.float()[:, None], sin.float()[:, None]
        return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)

    def error(self) -> float:
        if self.in_place:
            return 0.0  # the same kernel as out of place, which is checked
        cos, sin = self.cos[self.positions].float(), self.sin[self.positions].float()
        pairs = ((self.q, self.q_out), (self.k, self.k_out))
        return max(relative_error(out[0], self.rotate(x[0].float(), cos, sin)) for x, out in pairs)

    def poison(self) -> None:
        if self.in_place:
            return
        self.q_out[0].fill_(float("nan"))
        self.k_out[0].fill_(float("nan"))

    def peers(self) -> dict[str, list[Callable[[], object]]]:
        def both(
            q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, at: torch.Tensor
        ) -> tuple:
            c, s = cos[at], sin[at]
            return self.rotate(q, c, s), self.rotate(k, c, s)

        f = compiled(both)
        found = {
            "torch.compile": [
                lambda i=i: f(self.q[i], self.k[i], self.cos, self.sin, self.positions)
                for i in range(self.sets)
            ]
        }
        try:
            from liger_kernel.ops.rope import rope_forward
        except ImportError:
            return found
        cos = torch.cat((self.cos, self.cos), -1)[self.positions][None].contiguous()
        sin = torch.cat((self.sin, self.sin), -1)[self.positions][None].contiguous()
        found["liger (in place)"] = [
            lambda i=i: rope_forward(
                self.q[i][None].transpose(1, 2), self.k[i][None].transpose(1, 2), cos, sin
            )
            for i in range(self.sets)
        ]
        return found


def relative_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    error = (out.float() - truth.float()).norm() / truth.float().norm()
    return float(error) if bool(torch.isfinite(error)) else float("inf")


FAMILIES: dict[str, tuple[type, bool]] = {
    "rms_norm": (RmsNorm, False),
    "add_rms_norm": (RmsNorm, True),
    "silu_and_mul": (SiluAndMul, False),
    "rope": (Rope, False),
    "rope in place": (Rope, True),
}


def run_cell(
    family: str,
    dtype: torch.dtype,
    tokens: int,
    hidden: int,
    cubins: dict,
    timer: Timer,
    options: argparse.Namespace,
) -> list[dict]:
    """Checks and times one cell; prints its best launches and returns all rows."""
    kind, residual = FAMILIES[family]
    cell = kind(dtype, tokens, hidden, residual)
    default = (LOADS[0], STORES[0])
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    tolerance = 5e-6 if dtype == torch.float32 else 5e-3

    def prepare(launch: Launch) -> list[Callable[[], object]] | None:
        cubin = cubins[(kind.source, launch.policy)]
        calls = [
            cubin.launcher(
                launch.function, launch.grid, launch.block, launch.shared, cell.arguments(i)
            )
            for i in range(cell.sets)
        ]
        cell.poison()
        calls[0]()
        torch.cuda.synchronize()
        error = cell.error()
        if error > tolerance:
            print(f"WRONG {family} T={tokens} H={hidden} {launch.name}: relative error {error:.3g}")
            return None
        return calls

    cubin = cubins[(kind.source, default)]
    launches = list(cell.launches(cubin, num_sms))
    if options.throttle:
        for launch in list(launches):
            threads = launch.block[0] * launch.block[1] * launch.block[2]
            launches += launch.throttled(cubin.blocks_per_sm(launch.function, threads))
    contenders = {launch.name: calls for launch in launches if (calls := prepare(launch))}
    peers: dict[str, list[Callable[[], object]]] = {}
    if options.peers and hidden in options.peer_sizes:
        try:
            peers = cell.peers()
            for name in list(peers):
                try:
                    peers[name][0]()
                except Exception as error:  # noqa: BLE001  a peer that fails only leaves the table
                    print(f"peer {name} left out: {type(error).__name__}: {str(error)[:200]}")
                    del peers[name]
        except Exception as error:  # noqa: BLE001
            print(f"peers left out: {type(error).__name__}: {str(error)[:200]}")
    times = timer.measure({**contenders, **peers}, cell.bytes_a_launch)

    # The best two again under every cache policy, with the peers beside them.
    if options.policies:
        best = sorted(contenders, key=lambda name: times[name]["median"])[:2]
        again = {}
        for launch in launches:
            if launch.name in best:
                for policy in itertools.product(LOADS, STORES):
                    other = Launch(
                        launch.function, launch.grid, launch.block, launch.shared, policy
                    )
                    if calls := prepare(other):
                        again[other.name] = calls
        times.update(timer.measure({**again, **peers}, cell.bytes_a_launch))

    rows = []
    for name, us in sorted(times.items(), key=lambda item: item[1]["median"]):
        bandwidth = cell.bytes_a_launch / us["median"] / 1e6
        row = {"family": family, "dtype": DTYPE_TOKENS[dtype], "tokens": tokens, "hidden": hidden}
        rows.append({**row, "contender": name, "us": us, "tbps": bandwidth})
    megabytes = cell.bytes_a_launch / 1e6
    print(f"\n{family} {DTYPE_TOKENS[dtype]} T={tokens} H={hidden} ({megabytes:.1f} MB a launch)")
    shown = rows[: options.top] + [row for row in rows[options.top :] if row["contender"] in peers]
    for row in shown:
        us = row["us"]
        spread = f"[{us['p20']:.2f} {us['p80']:.2f}]"
        print(f"  {row['tbps']:6.3f} TB/s {us['median']:9.2f} us {spread}  {row['contender']}")
    return rows


def check_matmul(cubin: Cubin) -> None:
    a, b = (torch.randn(512, 512, device=DEVICE, dtype=torch.float16) for _ in range(2))
    c = torch.full((512, 512), float("nan"), device=DEVICE)
    cubin.launcher("matmul_cache_kernel_0d1d2d", (8, 8, 1), (32, 32, 1), 16384, [a, b, c])()
    torch.cuda.synchronize()
    print(f"matmul_cache_kernel: relative error {relative_error(c, a.double() @ b.double()):.3g}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--dtypes", default="bf16")
    parser.add_argument("--tokens", default="1,64,1024,8192,32768")
    parser.add_argument("--hidden", default="", help="only these sizes (rope: query heads)")
    parser.add_argument(
        "--peer-sizes", default="4096,8192,14336,28672,32,64", help="sizes timed beside the peers"
    )
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument(
        "--no-policies", dest="policies", action="store_false", help="skip the cache policies"
    )
    parser.add_argument("--throttle", action="store_true", help="also with fewer blocks an SM")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--top", type=int, default=6)
    parser.add_argument(
        "--seconds", type=float, default=540, help="stop starting cells after this long"
    )
    parser.add_argument(
        "--json", default=os.path.join(os.environ.get("OUT", "."), "tune_memory_bound.json")
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing to tune")
        return 1
    options.peer_sizes = {int(size) for size in options.peer_sizes.split(",")}
    began = time.monotonic()
    torch.cuda.init()
    torch.manual_seed(0)
    torch.empty(1, device=DEVICE)
    policies = (
        list(itertools.product(LOADS, STORES)) if options.policies else [(LOADS[0], STORES[0])]
    )
    families = options.families.split(",")
    sources = sorted({FAMILIES[family][0].source for family in families})
    with tempfile.TemporaryDirectory() as folder:
        cubins = build(Path(folder), sources, policies)
        check_matmul(
            next(iter(build(Path(folder), ["matmul_cache_kernel"], policies[:1]).values()))
        )
    seconds = time.monotonic() - began
    print(f"built in {seconds:.1f} s; {torch.cuda.get_device_name()}; torch {torch.__version__}")
    print(f"copy {copy_bandwidth():.3f} TB/s")

    timer = Timer(options.rounds)
    rows: list[dict] = []
    by_token = {token: dtype for dtype, token in DTYPE_TOKENS.items()}
    wanted = {int(size) for size in options.hidden.split(",") if size}
    for family, token in itertools.product(families, options.dtypes.split(",")):
        for hidden in FAMILIES[family][0].hidden_sizes:
            if wanted and hidden not in wanted:
                continue
            for tokens in map(int, options.tokens.split(",")):
                if time.monotonic() - began > options.seconds:
                    print(f"out of time before {family} T={tokens} H={hidden}")
                    break
                try:
                    rows += run_cell(
                        family, by_token[token], tokens, hidden, cubins, timer, options
                    )
                except Exception as error:  # noqa: BLE001  one bad cell must not cost the others
                    print(f"FAILED {family} {token} T={tokens} H={hidden}: {error!r}")
                torch.cuda.empty_cache()
    print(f"\ncopy {copy_bandwidth():.3f} TB/s at the end; {time.monotonic() - began:.0f} s in all")
    Path(options.json).write_text(json.dumps(rows, indent=1))
    print(f"{len(rows)} rows in {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
