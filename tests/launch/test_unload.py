"""When an image leaves the driver: after its last user, at the next load or `trim`, unless it may
not."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from fake_torch import fake_torch
from fakecuda import FakeCuda
from fakecuda.helpers import BLOCK, GRID, PROBE_CUBIN, make_stream
from in_threads import in_threads
from lots import Lots

from kernel_hub import Kernel, loaded_images
from kernel_hub.arrays.device_array import trim
from kernel_hub.errors import ParamsError
from kernel_hub.launch import c_launcher, libraries

IMAGE = PROBE_CUBIN.read_bytes()
PARAMS = [None, None, None, 5, 0.5]


def image(number: int) -> str:
    """PTX of one function, another for each number."""
    return (
        ".version 8.0\n.target sm_80\n.address_size 64\n"
        f"// {number}\n.visible .entry scale(.param .u64 out, .param .u32 n) {{ ret; }}\n"
    )


def kernel(number: int, **options: Any) -> Kernel:
    return Kernel(image(number), signatures={"scale": ["float*", "int"]}, **options)


def launch(made: Kernel, stream: int | None = 0) -> None:
    made.scale(GRID, BLOCK, 0, stream, [None, 4])


@pytest.fixture
def fake(make_fakecuda: Callable[..., FakeCuda], monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setenv("KERNEL_HUB_CACHE", "0")
    return make_fakecuda()


def test_five_hundred_dropped_kernels(fake: FakeCuda) -> None:
    gc.disable()
    try:
        for number in range(500):
            launch(kernel(number))
            assert fake.live("libraries") <= 2
    finally:
        gc.enable()
    trim()
    assert fake.live("libraries") == 0 and not loaded_images()
    assert fake.launch_count == 500


def test_shipped_images_stay(fake: FakeCuda) -> None:
    Kernel("launch_probe").launch_probe_5(GRID, BLOCK, 0, 0, PARAMS)
    trim()
    (loaded,) = loaded_images()
    assert loaded.num_kernels == 0 and "shipped" in loaded.why and "launch_probe" in loaded.label
    assert loaded.size_bytes == len(IMAGE)
    Kernel("launch_probe").launch_probe_5(GRID, BLOCK, 0, 0, PARAMS)
    assert fake.calls("cuLibraryLoadData") == 1
    last = Kernel("launch_probe")
    last.launch_probe_5.load()
    last.unload()
    assert not loaded_images()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("way", ["launch", "bind", "bind other", "follow", "follow bound"])
def test_what_a_graph_may_hold_stays(
    make_fakecuda: Callable[..., FakeCuda],
    monkeypatch: pytest.MonkeyPatch,
    native: bool,
    devices: int,
    way: str,
) -> None:
    """A graph launches a captured kernel without our knowing, long after its Kernel is gone."""
    fake = make_fakecuda(devices=devices)
    if native and not c_launcher.available():
        pytest.skip("the shipped C launcher does not fit here")
    if not native:
        monkeypatch.setenv(c_launcher.VARIABLE, "0")
    current = fake_torch(monkeypatch, exchange=True) if native else [0]
    stream = make_stream()
    quiet, used = kernel(1), kernel(2)
    for made in (quiet, used):
        for _ in range(3):
            launch(made)
    params = [None, 4]
    if way == "launch":
        launch(used, stream)
    elif way == "bind":
        used.scale.bind(GRID, BLOCK, 0, stream, params)()
    elif way == "bind other":
        used.scale.bind(GRID, BLOCK, 0, 0, params)
        used.scale.bind(GRID, BLOCK, 0, stream, params)(params)
    elif not native:
        pytest.skip("there is no current stream without torch")
    elif way == "follow":
        current[0] = stream
        launch(used, None)
    else:
        bound = used.scale.bind(GRID, BLOCK, 0, None, params)
        current[0] = stream
        bound()
        del bound
    assert fake.launch().stream == stream
    del quiet, used, made
    gc.collect()
    trim()
    (loaded,) = loaded_images()
    assert "captured graph" in loaded.why and fake.live("libraries") == 1


def test_keep(fake: FakeCuda) -> None:
    stream = make_stream()
    for keep in (True, False):
        launch(kernel(int(keep), keep=keep), stream)
    Kernel("launch_probe", keep=False).launch_probe_5.load()
    trim()
    (loaded,) = loaded_images()
    assert loaded.why == "keep=True"
    again = kernel(1, keep=False)
    launch(again)
    again.unload()
    assert not loaded_images()
    with pytest.raises(ParamsError, match="keep=7"):
        kernel(1, keep=7)


def test_whatever_can_launch_it_keeps_it(fake: FakeCuda) -> None:
    lots = Lots("holders")
    for turn in range(60):
        made = kernel(turn)
        launch(made)
        holders = {
            "kernel": made,
            "function": made.scale,
            "launcher": made.scale.func,
            "bound": made.scale.bind(GRID, BLOCK, 0, 0, [None, 4]),
            "bound launcher": made.scale.bind(GRID, BLOCK, 0, 0, [None, 4]).func,
        }
        del made
        order = lots.sample(list(holders), len(holders))
        for name in order:
            trim()
            assert [loaded.why for loaded in loaded_images()] == ["in use"], (lots, order, name)
            del holders[name]
        trim()
        assert not loaded_images(), (lots, order)


def test_work_is_waited_for(fake: FakeCuda) -> None:
    launch(kernel(1))
    before = fake.calls("cuStreamSynchronize")
    trim()
    assert fake.calls("cuStreamSynchronize") > before
    assert fake.calls("cuLibraryUnload") == 1


def test_a_capture_elsewhere_is_not_disturbed(fake: FakeCuda) -> None:
    """The legacy stream cannot be waited for then: the image goes later."""
    fake.strict_capture()
    stream = make_stream()
    for number in range(3):
        launch(kernel(number))
    fake.set_capture(stream)
    launches: list[BaseException] = []

    def elsewhere() -> None:
        try:
            kernel(7).scale.load()
        except BaseException as error:  # noqa: BLE001
            launches.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert fake.capture_violations == 0
    fake.set_capture(stream, 0)
    trim()
    assert not loaded_images() and fake.capture_violations == 0


def test_a_refused_unload_is_said(fake: FakeCuda) -> None:
    launch(kernel(1))
    fake.fail("cuLibraryUnload", 999)
    with pytest.warns(RuntimeWarning, match="cuLibraryUnload"):
        launch(kernel(2))


def test_the_same_image_again_is_not_unloaded_in_between(fake: FakeCuda) -> None:
    for _ in range(5):
        launch(kernel(3))
    assert fake.calls("cuLibraryLoadData") == 1 and fake.calls("cuLibraryUnload") == 0


def test_threads_that_drop_and_load(fake: FakeCuda) -> None:
    def work(seed: int) -> None:
        lots = Lots("threads", seed)
        held: list[Kernel] = []
        for _ in range(60):
            made = kernel(lots.randrange(5))
            launch(made)
            held.append(made)
            lots.shuffle(held)
            del held[3:], made

    in_threads(*[partial(work, n) for n in range(6)])
    assert fake.launch_count == 360
    gc.collect()
    trim()
    assert not loaded_images() and fake.live("libraries") == 0


def test_nothing_is_swept_in_a_forked_child(fake: FakeCuda) -> None:
    launch(kernel(1))
    pid = os.fork()
    if not pid:
        try:
            loaded_images()
            libraries.sweep()
        finally:
            os._exit(0 if len(loaded_images()) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_launch_itself_asks_nothing_more_of_the_driver(fake: FakeCuda) -> None:
    made, stream = kernel(1), make_stream()
    launch(made, stream)
    before = fake.all_calls
    for _ in range(10):
        launch(made, stream)
    assert fake.all_calls == before + 10
