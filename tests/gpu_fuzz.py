"""Feeds damaged cubins that pass the validator to the CUDA driver. A script, not a test.

    python tests/gpu_fuzz.py --images 10000 --workers 12 --seed 1 --json OUT.json --save DIR

Child processes load each image and resolve every kernel; nothing is launched. Reports how many
images the validator refused, and of those that pass how many the driver accepted, refused, died of
or hung on. `--no-validate` shows what the driver does without the validator.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import ctypes
import fnmatch
import json
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mutate import Mutation

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cubin")]

START_TIMEOUT_S = 60.0
MAX_SAVED = 40


def child() -> None:
    """Read images from stdin, load each, say each call before it is made and its result after."""
    driver = ctypes.CDLL("libcuda.so.1")
    say = _speaker(sys.stdout.fileno())
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for call, arguments in (
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(device), 0)),
        ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), device)),
        ("cuCtxSetCurrent", (context,)),
    ):
        code = getattr(driver, call)(*arguments)
        if code:
            say(f"end {call} {code}")
            return
    say("ready")
    stream = sys.stdin.buffer
    while True:
        head = stream.read(4)
        if len(head) < 4:
            return
        image = stream.read(struct.unpack("<I", head)[0])
        call, code = load(driver, image, say)
        say(f"end {call} {code}")


def _speaker(descriptor: int) -> Callable[[str], int]:
    return lambda line: os.write(descriptor, line.encode() + b"\n")


def load(driver: ctypes.CDLL, image: bytes, say: Callable[[str], int]) -> tuple[str, int]:
    """Load, resolve and unload one image; (the first call that failed or '-', its code)."""
    library, module, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint()
    failed: list[tuple[str, int]] = []

    def do(call: str, *arguments: object) -> bool:
        say(call)
        code = getattr(driver, call)(*arguments)
        if code:
            failed.append((call, code))
        return not code

    zero = ctypes.c_uint(0)
    if not do(
        "cuLibraryLoadData", ctypes.byref(library), image, None, None, zero, None, None, zero
    ):
        return failed[0]
    do("cuLibraryGetModule", ctypes.byref(module), library)
    if do("cuLibraryGetKernelCount", ctypes.byref(count), library):
        kernels = (ctypes.c_void_p * max(1, min(count.value, 4096)))()
        if do("cuLibraryEnumerateKernels", kernels, ctypes.c_uint(len(kernels)), library):
            for kernel in kernels[: count.value]:
                function, value = ctypes.c_void_p(), ctypes.c_int()
                offset, size, index = ctypes.c_size_t(), ctypes.c_size_t(), 0
                handle = ctypes.c_void_p(kernel)
                if not do("cuKernelGetFunction", ctypes.byref(function), handle):
                    continue
                for attribute in (0, 1, 3, 4):
                    do("cuFuncGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), function)
                while index < 64 and not driver.cuKernelGetParamInfo(
                    handle, ctypes.c_size_t(index), ctypes.byref(offset), ctypes.byref(size)
                ):
                    index += 1
    do("cuLibraryUnload", library)
    return failed[0] if failed else ("-", 0)


class Worker:
    """One child process, started again whenever it dies or hangs."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.process: subprocess.Popen[bytes] | None = None
        self.loads = 0

    def start(self) -> None:
        """Start the child and wait until it has a context."""
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.buffer = b""
        self.loads = 0
        line = self._line(START_TIMEOUT_S)
        if line != "ready":
            self.stop()
            raise SystemExit(f"a child got no context: {line}")

    def stop(self) -> int:
        """Kill the child; its exit status."""
        process, self.process = self.process, None
        if process is None:
            return 0
        process.kill()
        for pipe in (process.stdin, process.stdout):
            try:
                pipe.close()
            except OSError:
                pass  # the child is gone, and what was not written with it
        return process.wait()

    def try_image(self, image: bytes) -> tuple[str, str, int]:
        """('accepted' | 'refused' | 'killed' | 'hung', last call, code or signal)."""
        if self.process is None:
            self.start()
        process, call = self.process, "write"
        try:
            process.stdin.write(struct.pack("<I", len(image)) + image)
            process.stdin.flush()
        except OSError:
            return "killed", call, self._status()
        deadline = time.monotonic() + self.timeout_s
        while True:
            line = self._line(deadline - time.monotonic())
            if line is None:
                self.stop()
                return "hung", call, 0
            if line == "":
                return "killed", call, self._status()
            if line.startswith("end "):
                _, call, code = line.split()
                self.loads += 1
                return ("accepted" if code == "0" else "refused"), call, int(code)
            call = line

    def _status(self) -> int:
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            pass  # still dying; killed below
        return self.stop()

    def _line(self, timeout_s: float) -> str | None:
        """The next line; '' at the end of the child's output, None when the time is up."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                return None
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                return ""
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line.decode()


def bases(pattern: str) -> dict[str, bytes]:
    """The sound cubins for sm90: the fixtures of the tests and what the project ships."""
    from kernel_hub.cubin import read_cubin

    found = {}
    for path in (
        *sorted((ROOT / "tests/cubin/data").glob("*.cubin")),
        *sorted((ROOT / "cubins/sm90").glob("*.cubin")),
    ):
        image = path.read_bytes()
        if not fnmatch.fnmatch(path.name, pattern):
            continue
        if read_cubin(image).compute_capability == (9, 0):
            found[path.relative_to(ROOT).as_posix()] = image
    return found


def mutations(options: argparse.Namespace) -> Iterator[tuple[Mutation | None, str, bytes]]:
    """(mutation or None for the sound images first, name, image)"""
    import mutate

    images = bases(options.bases)
    if options.fatbins:
        paths = sorted((ROOT / "tests/cubin/data").glob("*.fatbin"))
        images = {path.name: path.read_bytes() for path in paths}
    yield from ((None, name, image) for name, image in images.items())
    kinds = tuple(options.kinds.split(",")) if options.kinds else mutate.KINDS
    mutator: mutate.Mutator | mutate.FatbinMutator = (
        mutate.FatbinMutator(images, options.seed)
        if options.fatbins
        else mutate.Mutator(images, options.seed, kinds)
    )
    options.spans = mutator.spans
    started = time.monotonic()
    for index in range(options.first, options.first + options.images):
        if options.seconds and time.monotonic() - started > options.seconds:
            return
        mutation = mutator.make(index)
        yield mutation, mutation.base, mutation.image


def passed(image: bytes) -> bytes | None:
    """What goes to the driver; None when the image is refused, or goes to a child process first.

    PTX stays here: nothing loads it.

    Any other exception is our fault and ends the run.
    """
    from kernel_hub._foreign import ForeignImage
    from kernel_hub.errors import CubinCorruptError, CubinNotFoundError

    try:
        chosen = ForeignImage(image, "x").choose((9, 0))
    except (CubinCorruptError, CubinNotFoundError):
        return None
    return None if chosen.jit_target or chosen.kind == "fatbin" else chosen.read()


def run(options: argparse.Namespace) -> dict[str, object]:
    """Send every passing image through a worker and count what happens."""
    local, lock, workers = threading.local(), threading.Lock(), []
    kinds: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    codes: collections.Counter[str] = collections.Counter()
    hits: collections.Counter[str] = collections.Counter()
    bad: list[dict[str, object]] = []
    unsound: list[str] = []
    slots = threading.BoundedSemaphore(options.workers * 4)

    def send(mutation: Mutation | None, name: str, image: bytes) -> None:
        try:
            if not hasattr(local, "worker"):
                local.worker = Worker(options.timeout)
                with lock:
                    workers.append(local.worker)
            loads = local.worker.loads
            outcome, call, code = local.worker.try_image(image)
            again = None
            if outcome in ("killed", "hung"):  # by itself, or by what earlier images left behind?
                again = local.worker.try_image(image)[0]
        finally:
            slots.release()
        with lock:
            if outcome == "refused":
                codes[f"{call} {code}"] += 1
            if mutation is None:
                if outcome != "accepted":
                    unsound.append(f"{name}: {outcome} {call} {code}")
                return
            kinds[mutation.kind][outcome] += 1
            if again is None:
                return
            sections = mutation.sections_hit(options.spans[name])
            hits.update(sections)
            bad.append(
                {
                    "index": mutation.index,
                    "kind": mutation.kind,
                    "base": name,
                    "outcome": outcome,
                    "call": call,
                    "status": code,
                    "alone": again,
                    "loads_before": loads,
                    "offsets": mutation.offsets[:16],
                    "sections": sections,
                }
            )
            if options.save and len(bad) <= MAX_SAVED:
                (Path(options.save) / f"{mutation.index}_{outcome}.cubin").write_bytes(image)

    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        futures = []
        for mutation, name, image in mutations(options):
            if mutation is not None:
                kinds[mutation.kind]["images"] += 1
                if not options.no_validate:
                    kept = passed(image)
                    if kept is None:
                        kinds[mutation.kind]["invalid"] += 1
                        continue
                    image = kept
                kinds[mutation.kind]["passed"] += 1
            slots.acquire()
            futures.append(pool.submit(send, mutation, name, image))
        for future in futures:
            future.result()
    for worker in workers:
        worker.stop()
    total = sum(kinds.values(), collections.Counter())
    deadly = total["killed"] + total["hung"]
    return {
        "seed": options.seed, "validated": not options.no_validate,
        "seconds": round(time.monotonic() - started, 1),
        "total": dict(total), "deadly": deadly, "rate_of_passed": deadly / max(1, total["passed"]),
        "rate_of_images": deadly / max(1, total["images"]),
        "kinds": {kind: dict(kinds[kind]) for kind in sorted(kinds)},
        "driver_codes": dict(codes.most_common(30)),
        "sections_of_killers": dict(hits.most_common(40)),
        "sound_images_not_accepted": unsound, "killers": bad[:200],
    }  # fmt: skip


def main() -> None:
    """Parse the command line, run, print a table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=10000, help="damaged images to make")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--workers", type=int, default=12, help="child processes at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--kinds", default="", help="comma-separated kinds of damage (default: all)"
    )
    parser.add_argument("--bases", default="*", help="damage only files like this: 'cuda1*'")
    parser.add_argument("--fatbins", action="store_true", help="damage the fatbins of the tests")
    parser.add_argument("--seconds", type=float, default=0, help="stop early after so long")
    parser.add_argument(
        "--timeout",
        type=float,
        default=5.0,
        help="seconds an image may take before it counts as hung",
    )
    parser.add_argument("--no-validate", action="store_true", help="give everything to the driver")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--save", help="write images that kill or hang into this folder")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child()
        return
    if options.save:
        Path(options.save).mkdir(parents=True, exist_ok=True)
    result = run(options)
    columns = ("images", "invalid", "passed", "accepted", "refused", "killed", "hung")
    print(f"{'kind':16}" + "".join(f"{column:>10}" for column in columns))
    for kind, row in [*result["kinds"].items(), ("all", result["total"])]:
        print(f"{kind:16}" + "".join(f"{row.get(column, 0):>10}" for column in columns))
    print(
        f"killed or hung: {result['deadly']} = {result['rate_of_passed']:.2%} of those that pass, "
        f"{result['rate_of_images']:.2%} of all; seed {options.seed}, {result['seconds']} s"
    )
    print("driver refusals:", result["driver_codes"])
    print("sections of killers:", result["sections_of_killers"])
    print("sound images not accepted:", result["sound_images_not_accepted"])
    for killer in result["killers"][:30]:
        print(json.dumps(killer))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
