"""Clients of cpm_kernels on a GPU: their own code, refusals, and kernel_hub's kernels instead."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from in_threads import in_threads

from kernel_hub import driver
from kernel_hub.collection.resolve import refusal
from kernel_hub.integrations import cpm_kernels

torch = pytest.importorskip("torch", reason="the clients are torch programs")

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
from clients import HOPPER, OLDER, import_client  # noqa: E402

ROWS, COLUMNS = 96, 200


@pytest.fixture(autouse=True)
def alias() -> Iterator[None]:
    """`import cpm_kernels` is kernel_hub's until the test ends."""
    cpm_kernels.install()
    yield
    cpm_kernels.uninstall()


def runs(*targets: str) -> bool:
    """Whether the GPU runs machine code for one of `targets`."""
    capability = driver.get().compute_capability(torch.cuda.current_device())
    return any(not refusal(capability, target) for target in targets)


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client with code for 8.x and 9.0."""
    if not runs("sm_80", "sm_90"):
        pytest.skip("the client's image has code for 8.x and 9.0")
    return import_client(tmp_path, monkeypatch, HOPPER.read_bytes())


@pytest.fixture
def older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client with code for 7.5 and 8.6 alone."""
    if runs("sm_75", "sm_86"):
        pytest.skip("this GPU runs the older client's own code")
    return import_client(tmp_path, monkeypatch, OLDER.read_bytes())


def check(client: Any, columns: int = COLUMNS) -> None:
    """Pack and unpack, as a model does when it is quantised and run."""
    weight = torch.randint(-8, 8, (ROWS, columns), dtype=torch.int8, device="cuda")
    scale = torch.randn(ROWS, device="cuda").half()
    packed = client.compress(weight)
    assert torch.equal(packed, (weight[:, ::2] << 4) | (weight[:, 1::2] & 15))
    expected = weight.half() * scale[:, None]
    assert torch.equal(client.extract(packed, scale, 4), expected)
    assert torch.equal(client.extract(weight, scale, 8), expected)


def test_a_clients_own_code(client: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cpm_kernels.install(substitute=True)
        check(client)
        with torch.cuda.stream(torch.cuda.Stream()):
            check(client)


def test_from_any_thread(client: Any) -> None:
    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            check(client)
            torch.cuda.synchronize()

    in_threads(*[work] * 4)


def test_a_structure_by_value(client: Any) -> None:
    class Pair(ctypes.Structure):
        _fields_ = (("first", ctypes.c_int32), ("second", ctypes.c_int32))

    out = torch.zeros(2, dtype=torch.int32, device="cuda")
    params = [ctypes.c_void_p(out.data_ptr()), Pair(3, -4), ctypes.c_void_p(0)]
    client.kernels.writePair((1, 1, 1), (1, 1, 1), 0, torch.cuda.current_stream(), params)
    assert out.tolist() == [3, -4]


def test_the_second_launch_can_be_captured(client: Any) -> None:
    weight = torch.randint(-128, 128, (ROWS, COLUMNS), dtype=torch.int8, device="cuda")
    scale = torch.randn(ROWS, device="cuda").half()
    client.extract(weight, scale, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = client.extract(weight, scale, 4)
    weight.fill_(0x21)
    graph.replay()
    assert torch.equal(out, torch.tensor([2, 1], device="cuda").repeat(COLUMNS) * scale[:, None])


def test_no_code_for_this_gpu(older: Any) -> None:
    with pytest.raises(RuntimeError, match="no kernel image is available") as caught:
        check(older)
    assert caught.match(r"(?s)int4WeightCompression.*sm_75.*sm_86.*substitute=True")
    assert torch.ones(1, device="cuda").item() == 1  # nothing is broken by it


@pytest.mark.parametrize("columns", [2, 64, 126, 200, 2048, 4096])
def test_substitutes(older: Any, columns: int) -> None:
    cpm_kernels.install(substitute=True)
    with pytest.warns(RuntimeWarning, match="sm_75, sm_86.*int4WeightExtractionHalf"):
        check(older, columns)
    with torch.cuda.stream(torch.cuda.Stream()):
        check(older, columns)


def test_the_package_on_top(tmp_path: Path) -> None:
    cpm_kernels.uninstall()
    if importlib.util.find_spec("cpm_kernels") is None:
        pytest.skip("cpm_kernels is not installed")
    cpm_kernels.install()
    kernels = importlib.import_module("cpm_kernels.kernels")
    package = importlib.import_module("cpm_kernels.torch")
    assert callable(kernels.gelu_forward)
    x = torch.randn(4, 1024, device="cuda").half()
    if runs("sm_80", "sm_86"):
        found = package.gelu(x)
        expected = torch.nn.functional.gelu(x.float(), approximate="tanh")
        torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=2e-3)
        return
    with pytest.raises(RuntimeError, match="no kernel image is available") as caught:
        package.gelu(x)
    assert caught.match(r"(?s)gelu.fatbin.*sm_86.*kernel_hub has no kernel cu_gelu_forward")
