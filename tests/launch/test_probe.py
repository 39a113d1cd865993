"""What no reader can vouch for is loaded in a child process first: each outcome, and what is kept.

The stand-in's end in the child is set by FAKECUDA_AT, which this process's own does not read.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import struct
import sys
import threading
import warnings
from pathlib import Path

import pytest
from fakecuda import FakeCuda

from kernel_hub import Kernel, cache_folder, driver
from kernel_hub.cubin import read_cubin, unpack
from kernel_hub.errors import CubinCorruptError, ProbeError
from kernel_hub.launch import probing

DATA = Path(__file__).parents[1] / "cubin/data"
SOUND = (DATA / "tiny_sm90.cubin").read_bytes()
# A section of a name that no toolkit writes: in bounds, and nothing depends on it.
UNKNOWN = SOUND.replace(b".nv.callgraph\0", b".nv.callgriph\0")
WHAT = "section .nv.callgriph, of a kind that no known toolkit writes"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where answers of this test are kept."""
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "probed"


@pytest.fixture(autouse=True)
def stand_in(fakecuda: FakeCuda) -> FakeCuda:
    """The stand-in, open in this process before a test says what becomes of the child."""
    driver.get()
    return fakecuda


def load(image: bytes = UNKNOWN, **options: bool) -> list[str]:
    """Load the image's kernel in a new Kernel; the warnings' texts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel = Kernel(image, **options)
        try:
            kernel.add.load()
        finally:
            kernel.unload()
    return [str(warning.message) for warning in caught]


def test_three_outcomes(kept: Path, stand_in: FakeCuda) -> None:
    """Sound: loaded. Unknown: loaded after a child survived it. Damaged: refused."""
    assert read_cubin(SOUND).unknown == () and read_cubin(UNKNOWN).unknown == (WHAT,)
    assert load(SOUND) == [] and not kept.exists()
    (text,) = load(UNKNOWN)
    assert WHAT in text and "in a child process first" in text
    assert len(list(kept.iterdir())) == 1
    with pytest.raises(CubinCorruptError):
        load(SOUND[:-64])
    assert stand_in.calls("cuLibraryLoadData") == 2


def test_an_answer_is_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By image, driver build and GPU; the warning comes with the first load alone."""
    assert len(load()) == 1
    monkeypatch.setenv("FAKECUDA_AT", "cuLibraryLoadData=abort")
    assert load() == []
    with monkeypatch.context() as other:
        other.setattr(driver.Driver, "device_name", lambda *_: "another GPU")
        with pytest.raises(CubinCorruptError, match="signal 6"):
            load()
    with monkeypatch.context() as other:
        other.setattr(probing, "_build", lambda _: "another driver")
        with pytest.raises(CubinCorruptError, match="signal 6"):
            load()
    with pytest.raises(CubinCorruptError, match="signal 6"):
        load(UNKNOWN.replace(b"callgriph", b"callgreph"))
    assert len(list(kept.iterdir())) == 4


def test_a_deadly_image_is_remembered(
    kept: Path, monkeypatch: pytest.MonkeyPatch, stand_in: FakeCuda
) -> None:
    monkeypatch.setenv("FAKECUDA_AT", "cuLibraryLoadData=abort")
    with pytest.raises(CubinCorruptError, match=r"died on it in a child process \(signal 6\)"):
        load()
    monkeypatch.delenv("FAKECUDA_AT")
    monkeypatch.setattr(probing, "_ask", lambda *_: pytest.fail("asked again"))
    with pytest.raises(CubinCorruptError, match="signal 6"):
        load()
    assert not stand_in.calls("cuLibraryLoadData")


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ("cuKernelGetFunction=200", r"the driver refused it in a child process \(cuKernelGetF"),
        ("cuLibraryLoadData=hang", "the driver hung for 2 s on it in a child process"),
        ("cuFuncLoad=abort", "signal 6"),
    ],
)
def test_the_image_is_to_blame(
    kept: Path, monkeypatch: pytest.MonkeyPatch, at: str, words: str
) -> None:
    monkeypatch.setenv("FAKECUDA_AT", at)
    monkeypatch.setattr(probing, "SECONDS", 2)
    with pytest.raises(CubinCorruptError, match=words):
        load()


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ("cuInit=100", "has no context: cuInit failed"),
        ("cuDevicePrimaryCtxRetain=46", "has no context: cuDevicePrimaryCtxRetain failed"),
        ("cuDevicePrimaryCtxRetain=abort", "died of signal 6 before it had a context"),
        ("cuDevicePrimaryCtxRetain=hang", "did not start within 2 s"),
        ("cuLibraryLoadData=2", "ran out of GPU memory: cuLibraryLoadData failed"),
        ("cuLibraryLoadData=kill", r"ended from outside \(signal 9\)"),
    ],
)
def test_the_image_is_not_to_blame(
    kept: Path, monkeypatch: pytest.MonkeyPatch, stand_in: FakeCuda, at: str, words: str
) -> None:
    """What comes before a context, or from outside, is no word about the image, and is not kept."""
    monkeypatch.setenv("FAKECUDA_AT", at)
    monkeypatch.setattr(probing, "SECONDS", 2)
    with pytest.raises(ProbeError, match=f"could not be probed.*{words}.*KERNEL_HUB_PROBE=0"):
        load()
    assert not kept.exists() and not stand_in.calls("cuLibraryLoadData")
    monkeypatch.setenv("KERNEL_HUB_PROBE", "0")
    (text,) = load()
    assert WHAT in text and "unprobed" in text
    assert stand_in.calls("cuLibraryLoadData") == 1


@pytest.mark.parametrize("executable", ["", "/no/such/python", str(DATA / "tiny.cu")])
def test_no_interpreter_to_start(
    kept: Path, monkeypatch: pytest.MonkeyPatch, executable: str
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(ProbeError, match="could not be probed"):
        load()


def test_a_sound_image_is_probed_on_request(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_AT", "cuLibraryLoadData=abort")
    assert load(SOUND) == []
    with pytest.raises(CubinCorruptError, match="signal 6"):
        load(SOUND, probe=True)
    monkeypatch.setenv("KERNEL_HUB_PROBE", "0")
    assert load(SOUND, probe=True) == []


def hold(path: str, *events: multiprocessing.synchronize.Event) -> None:
    """From the first event, which it sets, to the second."""
    ready, may_end = events
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ready.set()
        may_end.wait(200)


def test_one_probe_a_machine_at_a_time(
    kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    context = multiprocessing.get_context("spawn")
    ready, may_end = context.Event(), context.Event()
    path = str(tmp_path / "kernel_hub_probe.lock")
    holder = context.Process(target=hold, args=(path, ready, may_end))
    holder.start()
    assert ready.wait(60)
    monkeypatch.setattr(probing, "_LOCK_SECONDS", 0.1)
    with pytest.raises(ProbeError, match="another process has held"):
        load()
    monkeypatch.setattr(probing, "_LOCK_SECONDS", 100)
    threading.Timer(0.5, may_end.set).start()  # it waits meanwhile
    assert len(load()) == 1
    holder.join(60)
    assert holder.exitcode == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "unreadable"])
def test_whatever_lies_in_the_place_of_the_lock(
    kind: str, kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Anybody may put it there: it can cost the lock, not the probe."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    path = tmp_path / "kernel_hub_probe.lock"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "made by us")
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch(0)
    assert len(load()) == 1
    assert not (tmp_path / "made by us").exists()


def test_another_probed_it_meanwhile(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waited for the lock asks for the answer again before a child."""
    key = cache_folder.key
    monkeypatch.setattr(probing.cache_folder, "key", lambda *parts: key("one"))
    once = probing._one_at_a_time

    def after_another(label: str) -> object:
        cache_folder.store("probed", key("one"), b"")
        return once(label)

    monkeypatch.setattr(probing, "_one_at_a_time", after_another)
    monkeypatch.setattr(probing, "_ask", lambda *_: pytest.fail("asked all the same"))
    assert load() == []


def test_the_driver_is_known_to_the_build(stand_in: FakeCuda) -> None:
    status = os.stat(stand_in.path)
    expected = f"{os.path.basename(stand_in.path)} {status.st_size} {status.st_mtime_ns}"
    assert probing._build(driver.get()) == expected


def test_a_packed_image_that_kills_the_driver_kills_a_child(
    kept: Path, stand_in: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured: of damaged entries that nobody unpacked, some end the process in the driver."""
    monkeypatch.setattr(unpack, "_zstd", lambda: None)
    monkeypatch.setenv("FAKECUDA_AT", "cuLibraryLoadData=abort")
    kernel = Kernel(DATA / "size.fatbin", ["add"])
    with pytest.raises(CubinCorruptError, match=r"died on it in a child process \(signal 6\)"):
        kernel.add.load()
    assert not stand_in.calls("cuLibraryLoadData") and len(list(kept.iterdir())) == 1


def test_cupys_files_are_made_whole(stand_in: FakeCuda) -> None:
    """CuPy leaves off a cubin's last byte, a zero; its cache puts a digest before it."""
    import hashlib

    for image in (SOUND, (DATA / "nvrtc_tiny_sm90.cubin").read_bytes()):
        short = image[:-1]
        prefixed = hashlib.sha1(short).hexdigest().encode() + short
        for each in (short, prefixed):
            kernel = Kernel(each)
            assert kernel._image.choose((9, 0)).read() == image
            assert kernel._image.choose((9, 0)).unknown == ()
        with pytest.raises(CubinCorruptError):
            Kernel(b"0" * 40 + short)
        with pytest.raises(CubinCorruptError, match="truncated"):
            Kernel(image[:-2])
    assert struct.unpack_from("<Q", SOUND, len(SOUND) - 8) == (8,)  # why that byte is zero
