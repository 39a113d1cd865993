"""Launches are held against what a kernel's source states: blockDim and dynamic shared memory."""

from __future__ import annotations

from typing import Any

import pytest
from fake_torch import fake_torch
from fakecuda import FakeCuda

from kernel_hub import Kernel
from kernel_hub.errors import LaunchConfigError
from kernel_hub.launch import c_launcher

GRID, BLOCK, SHARED = (8, 8, 1), (32, 32, 1), 16384


@pytest.fixture(params=["Python", "C"])
def matmul(request: pytest.FixtureRequest, fakecuda: FakeCuda, monkeypatch: Any) -> Any:
    if request.param == "C":
        if not c_launcher.available():
            pytest.skip("no C launcher fits here")
        fake_torch(monkeypatch, exchange=True)
    else:
        monkeypatch.setenv(c_launcher.VARIABLE, "0")
    return Kernel("matmul_cache_kernel").matmul_cache_kernel_0d1d2d


PARAMS: list[Any] = [None, None, None]


@pytest.mark.parametrize("how", ["first", "later", "bound"])
@pytest.mark.parametrize(
    ("block", "shared", "said"),
    [
        ((256, 1, 1), SHARED, "built for blocks of exactly (32, 32, 1)"),
        (1024, SHARED, "pass blockDim=(32, 32, 1)"),
        ((32, 16, 2), SHARED, "blockDim=(32, 16, 2)"),
        (BLOCK, 0, "sharedMemBytes=0"),
        (BLOCK, None, "built for 16384 bytes of dynamic shared memory"),
        (BLOCK, SHARED - 1, "pass sharedMemBytes=16384"),
    ],
)
def test_another_shape_is_refused(
    matmul: Any, fakecuda: FakeCuda, how: str, block: Any, shared: int | None, said: str
) -> None:
    if how == "later":
        matmul(GRID, BLOCK, SHARED, None, PARAMS)
        matmul(GRID, BLOCK, SHARED, None, PARAMS)
    before = fakecuda.launch_count
    given = (GRID, block) if shared is None else (GRID, block, shared)
    launch = matmul.bind if how == "bound" else matmul
    with pytest.raises(LaunchConfigError) as caught:
        launch(*given, params=PARAMS)
    assert said in str(caught.value) and "matmul_cache_kernel_0d1d2d on" in str(caught.value)
    assert fakecuda.launch_count == before


def test_what_it_was_built_for_and_more_shared_memory_is_launched(
    matmul: Any, fakecuda: FakeCuda
) -> None:
    for shared in (SHARED, SHARED, SHARED + 64, 49152, 65536):
        matmul(GRID, BLOCK, shared, None, PARAMS)
    assert fakecuda.launch_count == 5


def test_help_says_what_a_launch_takes(matmul: Any) -> None:
    for said in ("gridDim (8, 8, 1)", "blockDim (32, 32, 1)", "sharedMemBytes from 16384"):
        assert said in matmul.__doc__ and said in repr(matmul)


def test_a_kernel_that_states_nothing_is_bound_by_its_limits_alone(fakecuda: FakeCuda) -> None:
    probe = Kernel("launch_probe").launch_probe_5
    assert probe.spec.launch is None and "gridDim" not in repr(probe)
    probe(4, 96, 128, None, [None, None, None, 1, 1.0])
