"""Parameters by value, tensor maps above all, through the C launcher."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from fake_torch import fake_torch
from fakecuda import FakeCuda
from lots import Lots

from kernel_hub import Kernel, KernelFunction
from kernel_hub.collection.manifest import open_collection
from kernel_hub.errors import KernelHubError
from kernel_hub.launch import c_launcher
from kernel_hub.signature.params import Param

pytestmark = pytest.mark.skipif(not c_launcher.available(), reason="no C launcher fits here")


class Drawn(NamedTuple):
    lots: Lots
    function: KernelFunction
    shape: tuple[Any, ...]  # grid, block, shared memory and stream
    params: tuple[Any, ...]
    at: int  # of a parameter by value


def value_of(param: Param, lots: Lots) -> Any:
    if param.code.endswith("s"):
        return bytes(lots.choices(range(256), k=param.size_bytes))
    if param.is_pointer:
        return None
    return lots.uniform(-9, 9) if param.code in "fd" else lots.randrange(1, 100)


@pytest.fixture(params=range(20))
def drawn(
    fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Drawn:
    """A launch of a shipped kernel that takes tensor maps, made once."""
    lots = Lots("bytes", request.param)
    fake_torch(monkeypatch, lots.random() < 0.5)
    name, entry = lots.choice(
        [
            (cubin, function)
            for cubin, archs in open_collection().manifest.cubins.items()
            if cubin.endswith("_sm90")
            for function in archs["sm90"].functions.values()
            if any(param.size_bytes == 128 for param in function.params)
        ]
    )
    function = getattr(Kernel(name), entry.name)
    assert function.params and entry.launch
    shape = (entry.cluster or 1, entry.launch.block or 128, entry.launch.shared_bytes or 0, 0)
    params = tuple(value_of(param, lots) for param in function.params)
    function(*shape, params)
    assert function.func is not function._launch, "the C launcher is in front"
    places = [i for i, value in enumerate(params) if isinstance(value, bytes)]
    return Drawn(lots, function, shape, params, lots.choice(places))


def test_it_launches_what_the_python_launcher_does(
    fakecuda: FakeCuda, drawn: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn.function._launch(*drawn.shape, drawn.params)
    by_python = fakecuda.launch()
    with monkeypatch.context() as patch:
        patch.setattr(drawn.function._launch, "__code__", (lambda *a, **k: 1 / 0).__code__)
        drawn.function(*drawn.shape, drawn.params)
    assert fakecuda.launch() == by_python, drawn.lots
    assert drawn.params[drawn.at] in by_python.params  # type: ignore[operator]


def test_what_are_no_such_bytes_is_left_to_the_python_launcher(
    fakecuda: FakeCuda, drawn: Drawn
) -> None:
    value = drawn.params[drawn.at]
    for other, is_right in (
        (value[:-1], False), (value + b"\0", False), (b"", False), (None, False), (7, False),
        (bytearray(value), True), (memoryview(value), True), (type("B", (bytes,), {})(value), True),
    ):  # fmt: skip
        params = [*drawn.params]
        params[drawn.at] = other
        before = fakecuda.launch_count
        if is_right:
            drawn.function(*drawn.shape, tuple(params))
            assert value in fakecuda.launch().params, drawn.lots  # type: ignore[operator]
            continue
        with pytest.raises(KernelHubError):
            drawn.function(*drawn.shape, tuple(params))
        assert fakecuda.launch_count == before, drawn.lots


def test_a_list_may_let_go_of_them(fakecuda: FakeCuda, drawn: Drawn) -> None:
    """Bytes of a list are copied before anything else can change the list."""
    before = fakecuda.launch_count
    drawn.function(*drawn.shape, [*drawn.params])
    assert fakecuda.launch_count == before + 1
    assert drawn.params[drawn.at] in fakecuda.launch().params  # type: ignore[operator]
