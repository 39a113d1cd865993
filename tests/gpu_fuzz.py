"""Feeds damaged cubins that pass the validator to the CUDA driver. A script, not a test.

    python tests/gpu_fuzz.py --images 10000 --workers 12 --seed 1 --json OUT.json --save DIR

Child processes load each image and resolve every kernel; nothing is launched. Reports how many
images the validator refused, and of those that pass as sound how many the driver accepted, refused,
died of or hung on. Those with something unknown go through `Kernel` in this very process, which
must outlive them. `--no-validate` shows what the driver does without the validator.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import fnmatch
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_loader import Worker

if TYPE_CHECKING:
    from mutate import Mutation

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cubin")]

MAX_SAVED = 40


def bases(pattern: str, folder: str) -> dict[str, bytes]:
    """The sound cubins for sm90: the fixtures of the tests, what the project ships, a folder's."""
    from kernel_hub.cubin import read_cubin

    found = {}
    for path in (
        *sorted((ROOT / "tests/cubin/data").glob("*.cubin")),
        *sorted((ROOT / "cubins/sm90").glob("*.cubin")),
        *(sorted(Path(folder).glob("*.cubin")) if folder else ()),
    ):
        image = path.read_bytes()
        if not fnmatch.fnmatch(path.name, pattern):
            continue
        if read_cubin(image).compute_capability == (9, 0):
            found[path.name] = image
    return found


def mutations(options: argparse.Namespace) -> Iterator[tuple[Mutation | None, str, bytes]]:
    """(mutation or None for the sound images first, name, image)"""
    import mutate

    images = bases(options.bases, options.folder)
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


def passed(image: bytes) -> tuple[bytes | None, bool]:
    """What goes to the driver, and whether it has something unknown; None when it is refused.

    PTX and what only the driver unpacks stay here: the first nothing loads, the second goes to a
    child process first. Any other exception is our fault and ends the run.
    """
    from kernel_hub.errors import CubinCorruptError, CubinNotFoundError
    from kernel_hub.image.foreign import ForeignImage

    try:
        chosen = ForeignImage(image, "x").choose((9, 0))
    except (CubinCorruptError, CubinNotFoundError):
        return None, False
    if chosen.jit_target or chosen.kind == "fatbin":
        return None, False
    return chosen.read(), bool(chosen.unknown)


def load_here(image: bytes) -> str:
    """What becomes of an image with something unknown: loaded in this process, or why not."""
    import warnings

    from kernel_hub import Kernel
    from kernel_hub.errors import KernelHubError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            kernel = Kernel(image)
            for name in kernel.function_names:
                getattr(kernel, name).load()
            kernel.unload()
        except KernelHubError as error:
            text = str(error)
            for outcome in ("died", "hung", "refused it", "not be probed"):
                if outcome in text:
                    return f"a child: {outcome}"
            return type(error).__name__
    return "loaded"


def run(options: argparse.Namespace) -> dict[str, object]:
    """Send every passing image through a worker and count what happens."""
    local, lock, workers = threading.local(), threading.Lock(), []
    kinds: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    codes: collections.Counter[str] = collections.Counter()
    hits: collections.Counter[str] = collections.Counter()
    bad: list[dict[str, object]] = []
    unsound: list[str] = []
    here: collections.Counter[str] = collections.Counter()
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
                    kept, unknown = passed(image)
                    if kept is None:
                        kinds[mutation.kind]["invalid"] += 1
                        continue
                    image = kept
                    if unknown:
                        kinds[mutation.kind]["unknown"] += 1
                        if here.total() < options.unknown:
                            here[load_here(image)] += 1
                        continue
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
        "unknown_loaded_here": dict(here), "driver_codes": dict(codes.most_common(30)),
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
    parser.add_argument("--folder", default="", help="damage the sm90 cubins in here as well")
    parser.add_argument("--unknown", type=int, default=100, help="unknown ones to load here")
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
    options = parser.parse_args()
    if options.save:
        Path(options.save).mkdir(parents=True, exist_ok=True)
    result = run(options)
    columns = ("images", "invalid", "unknown", "passed", "accepted", "refused", "killed", "hung")
    print(f"{'kind':16}" + "".join(f"{column:>10}" for column in columns))
    for kind, row in [*result["kinds"].items(), ("all", result["total"])]:
        print(f"{kind:16}" + "".join(f"{row.get(column, 0):>10}" for column in columns))
    print(
        f"killed or hung: {result['deadly']} = {result['rate_of_passed']:.2%} of those that pass, "
        f"{result['rate_of_images']:.2%} of all; seed {options.seed}, {result['seconds']} s"
    )
    print("unknown, loaded in this process:", result["unknown_loaded_here"])
    print("driver refusals:", result["driver_codes"])
    print("sections of killers:", result["sections_of_killers"])
    print("sound images not accepted:", result["sound_images_not_accepted"])
    for killer in result["killers"][:30]:
        print(json.dumps(killer))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
