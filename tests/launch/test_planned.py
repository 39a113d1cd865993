"""Planned launches: what a whole launch launches, of what they bring alone."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
from fake_torch import FP16, Tensor, fake_torch
from fakecuda import FakeCuda
from test_native import BLOCK, GRID, X, Y, Z

from kernel_hub import Kernel, KernelFunction
from kernel_hub.errors import ParamsError
from kernel_hub.launch import c_launcher

pytestmark = pytest.mark.skipif(not c_launcher.available(), reason="no C launcher fits here")
PARAMS = (X, None, None, 5, 0.5)
BROUGHT = [1, 2, 4]
FACTS = ("gridDim", "blockDim", "sharedMemBytes", "stream", "params", "attributes")


@pytest.fixture(params=["attributes", "exchange API"])
def probe(
    fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> KernelFunction:
    fake_torch(monkeypatch, request.param == "exchange API")
    made = Kernel("launch_probe").launch_probe_5
    made(GRID, BLOCK, 0, None, PARAMS)
    return made


def left(*given: Any) -> tuple[Any, ...]:
    """What C leaves to Python."""
    return given


def plan(
    probe: KernelFunction, make: Callable[[], Any] | None, fallback: Any = left, *,
    device: int = 0, shared: int = 0, params: Any = PARAMS, places: Any = BROUGHT, **options: Any,
) -> Any:  # fmt: skip
    arguments = (GRID, BLOCK, shared, None, params)
    made = None if make is None else (make, ())
    return probe.planned(device, arguments, options, places, made, fallback)


def facts(fakecuda: FakeCuda) -> list[Any]:
    return [getattr(fakecuda.launch(), name) for name in FACTS]


@pytest.mark.parametrize("shared", [0, 512])
@pytest.mark.parametrize(
    "options", [{}, {"programmatic": True}, {"cluster": (2, 1, 1), "programmatic": True}]
)
def test_it_launches_what_a_whole_launch_does(
    fakecuda: FakeCuda, probe: KernelFunction, shared: int, options: dict[str, Any]
) -> None:
    planned = plan(probe, lambda: X, shared=shared, **options)
    probe(GRID, BLOCK, shared, None, (X, Y, Z, 5, 0.25), **options)
    whole, before = facts(fakecuda), fakecuda.all_calls
    assert planned(Y, Z, 0.25) is X
    assert facts(fakecuda) == whole
    assert fakecuda.all_calls == before + 1
    assert planned(None, Z, -0.5) is X
    params = facts(fakecuda)[FACTS.index("params")]
    probe(GRID, BLOCK, shared, None, (X, None, Z, 5, -0.5), **options)
    assert params == facts(fakecuda)[FACTS.index("params")]


def test_nothing_is_made_where_nobody_asks(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    planned = plan(probe, None, places=[0, 1, 2, 4])
    assert planned(X, Y, Z, 0.25) is None
    probe(GRID, BLOCK, 0, None, (X, Y, Z, 5, 0.25))
    assert fakecuda.launch(-2).params == fakecuda.launch(-1).params


@pytest.mark.parametrize(
    "given",
    [
        (Y, Z), (Y, Z, 0.5, 1), (Y, Z, 1), (Y, 3, 0.5), (Tensor(16, FP16), Z, 0.5),
        (Tensor(16, cuda=False), Z, 0.5), (Tensor(0), Z, 0.5), (Y, Z, 1e300), (),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_left_to_python(
    fakecuda: FakeCuda, probe: KernelFunction, given: tuple[Any, ...]
) -> None:
    before = fakecuda.launch_count
    assert plan(probe, lambda: X)(*given) == given
    assert fakecuda.launch_count == before


def test_so_is_a_failure_to_make_or_launch(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    wrong = Tensor(32, FP16)
    for make in (lambda: 1 / 0, lambda: None, lambda: wrong):
        count = sys.getrefcount(wrong)
        assert plan(probe, make)(Y, Z, 0.5) == (Y, Z, 0.5)
        assert sys.getrefcount(wrong) == count
    planned = plan(probe, lambda: X)
    fakecuda.fail("cuLaunchKernelEx", 701)
    assert planned(Y, Z, 0.5) == (Y, Z, 0.5)
    assert planned(Y, Z, 0.5) is X

    def stop() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan(probe, stop)(Y, Z, 0.5)


def test_what_cannot_be_planned_is_not(probe: KernelFunction) -> None:
    assert plan(probe, lambda: X, device=1) is None
    assert plan(probe, lambda: X, places=[4, 1]) is None
    assert plan(probe, lambda: X, places=[1, 2, 4, 7]) is None
    assert plan(probe, lambda: X, params=(X, None, None, 2**40, 0.5)) is None
    assert plan(probe, lambda: X, params=(X, None, None, 5)) is None
    assert plan(probe, lambda: X, places=[1, 4], params=(X, None, Z, 5, 0.5)) is None
    assert plan(probe, lambda: X, shared=10**7) is None
    assert plan(probe, lambda: X, colour=1) is None
    assert plan(Kernel("launch_probe").launch_probe_5, lambda: X) is None  # not launched yet


def test_it_outlives_the_function_and_its_image(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    kernel = Kernel("launch_probe")
    function = kernel.launch_probe_5
    function(GRID, BLOCK, 0, None, PARAMS)
    planned = plan(function, lambda: X)
    kernel.unload()
    before = fakecuda.launch_count
    assert planned(Y, Z, 0.5) == (Y, Z, 0.5)  # C knows of no image
    assert fakecuda.launch_count == before
    function(GRID, BLOCK, 0, None, PARAMS)
    assert planned(Y, Z, 0.5) is X
    del kernel, function
    gc.collect()
    junk = [bytearray(4096) for _ in range(1000)]
    assert planned(Y, Z, 0.5) is X
    del junk


def test_the_fallbacks_words_reach_the_caller(probe: KernelFunction) -> None:
    def whole(*given: Any) -> None:
        probe(GRID, BLOCK, 0, None, (X, *given[:2], 5, *given[2:]))

    with pytest.raises(ParamsError, match="fp16"):
        plan(probe, lambda: X, whole)(Tensor(16, FP16), Z, 0.5)
