"""Images with something unknown on a real driver: taken after a child survived them, or not."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from skips import alone

from kernel_hub import Kernel, cache_folder
from kernel_hub.cubin import read_cubin
from kernel_hub.errors import ProbeError
from kernel_hub.launch import probing

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


@pytest.fixture
def unknown(cubin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The kernels of this folder with a section by a name that no toolkit writes."""
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path))
    image = cubin.read_bytes().replace(b".nv.callgraph\0", b".nv.callgriph\0")
    assert read_cubin(image).unknown
    return image


def launch(image: bytes) -> list[float]:
    out = torch.zeros(4, device="cuda")
    kernel = Kernel(image, ["add_table"])
    kernel.add_table(1, 4, params=[out])
    result = out.tolist()
    kernel.unload()
    return list(result)


def test_an_unknown_image_runs(unknown: bytes) -> None:
    with pytest.warns(RuntimeWarning, match="in a child process first, and the driver took it"):
        assert launch(unknown) == [1.0, 2.0, 3.0, 4.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launch(unknown) == [1.0, 2.0, 3.0, 4.0]


@alone
def test_a_full_gpu_is_not_the_images_fault(unknown: bytes) -> None:
    """A child without room for a context says nothing of the image."""
    torch.zeros(4, device="cuda").tolist()  # what torch loads for it needs room too
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    held = [torch.empty(free - (48 << 20), dtype=torch.uint8, device="cuda")]
    try:
        with pytest.raises(ProbeError, match=r"could not be probed.*KERNEL_HUB_PROBE=0"):
            launch(unknown)
    finally:
        held.clear()
        torch.cuda.empty_cache()
    with pytest.warns(RuntimeWarning):
        launch(unknown)


def test_the_driver_names_its_build() -> None:
    from kernel_hub import driver

    assert "libcuda.so." in probing._build(driver.get())
