"""Damaged cubins (30,000; KERNEL_HUB_FUZZ_IMAGES), any bytes: a CubinInfo or a CubinCorruptError.

Soon, too.

Of what is not refused hardly any counts as unknown: that costs a child process each.
"""

from __future__ import annotations

import collections
import concurrent.futures
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mutate import KINDS, Mutator

from kernel_hub.cubin import (
    CubinInfo,
    FatbinInfo,
    PtxInfo,
    image_kind,
    read_cubin,
    read_fatbin,
    read_ptx,
)
from kernel_hub.errors import CubinCorruptError

DATA = Path(__file__).parent / "data"
IMAGES = int(os.environ.get("KERNEL_HUB_FUZZ_IMAGES", "30000"))
CHUNK = 5_000
SEED = int(os.environ.get("KERNEL_HUB_FUZZ_SEED", "20250611"))
MAX_UNKNOWN = 0.05  # of all mutants
MAX_SECONDS = 0.5  # of CPU, an image: the slowest takes 0.01


def bases() -> dict[str, bytes]:
    """The cubins that kernel_hub could load: what only `inspect` reads need not be this sound."""
    paths = sorted(DATA.glob("*.cubin"))
    return {path.stem: path.read_bytes() for path in paths if "sm120" not in path.stem}


def read_mutations(first: int) -> tuple[collections.Counter[str], float]:
    """Read CHUNK mutations from number `first` on.

    Returns: how many pass as sound by kind ("unknown": those that are not), the slowest's CPU time.
    """
    mutator = Mutator(bases(), SEED)
    passed: collections.Counter[str] = collections.Counter()
    slowest = 0.0
    for index in range(first, first + CHUNK):
        mutation = mutator.make(index)
        start = time.thread_time()
        try:
            info = read_cubin(mutation.image)
            assert isinstance(info, CubinInfo)
            passed["unknown" if info.unknown else mutation.kind] += 1
        except CubinCorruptError:
            pass
        except Exception as error:
            what = f"mutation {index} of seed {SEED} ({mutation.kind}, {mutation.base})"
            raise AssertionError(f"{what}: {error!r}") from error
        slowest = max(slowest, time.thread_time() - start)
    return passed, slowest


@pytest.mark.slow
def test_damaged_cubins() -> None:
    print(f"seed {SEED} (KERNEL_HUB_FUZZ_SEED sets another)")
    passed: collections.Counter[str] = collections.Counter()
    slowest = 0.0
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(8, os.cpu_count() or 1), context) as pool:
        for counts, seconds in pool.map(read_mutations, range(0, IMAGES, CHUNK)):
            passed += counts
            slowest = max(slowest, seconds)
    print(f"{sum(passed.values())} pass: {dict(passed)}; slowest {slowest * 1e3:.1f} ms")
    assert slowest < MAX_SECONDS
    assert passed["unknown"] < MAX_UNKNOWN * IMAGES
    each = IMAGES / len(KINDS)
    # Whatever changes the length is refused; of the frame's own bytes hardly one is free.
    assert not any(passed[kind] for kind in ("delete", "duplicate"))
    assert passed["truncate"] < 0.005 * each  # the last byte is known
    for kind in ("header", "section table", "program headers", "symbols"):
        assert passed[kind] < 0.02 * each, kind
    for kind in ("nv.info", "notes", "relocations", "strings"):
        assert passed[kind] < 0.25 * each, kind


@pytest.mark.parametrize(
    ("pattern", "read", "result"),
    [("*.fatbin", read_fatbin, FatbinInfo), ("*.ptx", read_ptx, PtxInfo)],
)
def test_damaged_fatbins_and_ptx(
    pattern: str, read: Callable[[bytes], object], result: type
) -> None:
    rng = random.Random(SEED)
    images = [path.read_bytes() for path in sorted(DATA.glob(pattern))]
    for index in range(5_000):
        image = bytearray(rng.choice(images))
        for _ in range(rng.choice((1, 2, 8))):
            at = rng.randrange(len(image))
            how = rng.randrange(4)
            if how == 0:
                image[at] = rng.randrange(256)
            elif how == 1:
                image[at : at + 8] = rng.randbytes(8)
            elif how == 2:
                image[at:at] = image[: rng.randrange(64)]
            else:
                del image[at : at + rng.choice((1, 8, len(image)))]
                image += b"\0" * (not image)
        try:
            assert isinstance(read(bytes(image)), result), index
        except CubinCorruptError:
            pass


@pytest.mark.parametrize(
    "text",
    [
        "/*" * 200_000,
        ".version 8.0\n.target sm_90\n" + ".entry a(" * 100_000 + ")",
        ".version 8.0\n.target sm_90\n.entry a(" + "," * 300_000 + ")",
        ".version 8.0\n.target sm_90\n.entry a(.param .u64 " + " " * 300_000 + "x[)",
        ".version 8.0\n.target sm_90\n.entry " + " " * 300_000,
        "//\n" * 200_000,
        " " * 500_000,
    ],
)
def test_hostile_ptx_takes_linear_time(text: str) -> None:
    start = time.thread_time()
    for read, image in ((image_kind, text.encode()), (read_ptx, text), (read_ptx, text.encode())):
        try:
            read(image)
        except CubinCorruptError:
            pass
    assert time.thread_time() - start < 2


def test_hostile_tables_take_linear_time() -> None:
    """A large image whose string table, symbols or records are all alike."""
    image = bytearray((DATA / "tiny_sm90.cubin").read_bytes())
    header, tables = bytes(image[:64]), bytes(image[-(64 * 15 + 56 * 5) :])
    start = time.thread_time()
    for filler in (b"\0", b"a", b"a\0", b"\x01\x04\0\0", b"\xff"):
        with pytest.raises(CubinCorruptError):
            read_cubin(header + filler * (4_000_000 // len(filler)) + tables)
    assert time.thread_time() - start < 2


def test_any_bytes() -> None:
    hypothesis = pytest.importorskip("hypothesis")
    strategies = pytest.importorskip("hypothesis.strategies")
    sound = sorted(bases().values(), key=len)
    starts = (
        b"",
        b"\x7fELF\x02\x01\x01\x41\x08",
        b"\x50\xed\x55\xba\x01\0\x10\0",
        b".version 8.0\n",
    )

    @hypothesis.settings(max_examples=400, deadline=None, derandomize=True, database=None)
    @hypothesis.given(
        strategies.sampled_from(starts),
        strategies.binary(max_size=4096),
        strategies.sampled_from(sound),
        strategies.integers(0, 1 << 16),
    )
    def check(start: bytes, tail: bytes, base: bytes, at: int) -> None:
        at %= len(base)
        for image in (start + tail, base[:at] + tail + base[at + len(tail) :]):
            for read in (image_kind, read_cubin, read_fatbin, read_ptx):
                try:
                    read(image)
                except CubinCorruptError as error:
                    assert str(error)

    check()
