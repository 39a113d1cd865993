"""Programs that use cpm_kernels, written out for the tests: a client and an installed package."""

from __future__ import annotations

import base64
import bz2
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fakecuda import FakeCuda

DATA = Path(__file__).parent / "data"
HOPPER = DATA / "client_sm80_sm90.fatbin"
OLDER = DATA / "client_sm75_sm86.fatbin"
# Sizes of the parameters of data/client.cu, which the stand-in cannot read from a fatbin.
SIZES = {
    "int4WeightCompression": [8, 8, 4, 4],
    "int4WeightExtractionHalf": [8, 8, 8, 4, 4],
    "int8WeightExtractionHalf": [8, 8, 8, 4, 4],
    "int8WeightExtractionFloat": [8, 8, 8, 8, 8],
    "writePair": [8, 8, 8],
}


def prepared(fake: FakeCuda) -> FakeCuda:
    """A stand-in that records launches and knows the parameters of the client's functions."""
    for name, sizes in SIZES.items():
        fake.set_params(name, sizes)
    fake.record(True)
    return fake


# The published pattern: the image as text in the module, all of it inside try/except.
_CLIENT = '''
import base64
import bz2
import ctypes

failure = None
try:
    from cpm_kernels.kernels.base import KernelFunction, LazyKernelCModule, round_up

    class Kernel:
        def __init__(self, code, names):
            self.code = code
            self.module = LazyKernelCModule(self.code)
            for name in names:
                setattr(self, name, KernelFunction(self.module, name))

    packed = "{packed}"
    kernels = Kernel(bz2.decompress(base64.b64decode(packed)), {names})
except Exception as error:
    kernels, failure = None, error


def compress(weight):
    """(n, 2 m) int8 -> (n, m)."""
    import torch

    with torch.cuda.device(weight.device):
        n, m = weight.size(0), weight.size(1) // 2
        out = torch.empty(n, m, dtype=torch.int8, device="cuda")
        kernels.int4WeightCompression(
            (n, 1, 1),
            (min(round_up(m, 32), 1024), 1, 1),
            0,
            torch.cuda.current_stream(),
            [
                ctypes.c_void_p(weight.data_ptr()),
                ctypes.c_void_p(out.data_ptr()),
                ctypes.c_int32(n),
                ctypes.c_int32(m),
            ],
        )
        return out


def extract(weight, scale, bits):
    """(n, m) int8, (n) -> (n, m * 8 / bits) fp16."""
    import torch

    launch = getattr(kernels, "int%dWeightExtractionHalf" % bits)
    with torch.cuda.device(weight.device):
        n, m = weight.shape
        out = torch.empty(n, m * 8 // bits, dtype=torch.half, device="cuda")
        launch(
            gridDim=(n, 1, 1),
            blockDim=(min(round_up(m, 32), 1024), 1, 1),
            sharedMemBytes=0,
            stream=torch.cuda.current_stream(),
            params=[
                ctypes.c_void_p(weight.data_ptr()),
                ctypes.c_void_p(scale.data_ptr()),
                ctypes.c_void_p(out.data_ptr()),
                ctypes.c_int32(n),
                ctypes.c_int32(m),
            ],
        )
        return out
'''


def needs_package() -> None:
    """Skip, or fail where KERNEL_HUB_TEST_REQUIRES lists it, without the published cpm_kernels."""
    if importlib.util.find_spec("cpm_kernels") is None:
        missing = "cpm_kernels is not installed (pip install --no-deps cpm_kernels)"
        if "cpm_kernels" in os.environ.get("KERNEL_HUB_TEST_REQUIRES", "").split(","):
            pytest.fail(missing, pytrace=False)
        pytest.skip(missing)


def client_text(image: bytes, names: list[str]) -> str:
    """The source of a client that holds `image`."""
    packed = base64.b64encode(bz2.compress(image)).decode()
    return _CLIENT.format(packed=packed, names=names)


def import_client(folder: Path, monkeypatch: pytest.MonkeyPatch, image: bytes, **more: Any) -> Any:
    """A client in a module of its own; `names`: what it asks of the image."""
    names = more.get("names", list(SIZES))
    path = folder / f"client_{len(image)}.py"
    path.write_text(client_text(image, names))
    monkeypatch.syspath_prepend(folder)
    module: ModuleType = importlib.import_module(path.stem)
    del sys.modules[path.stem]  # the next test's is another
    return module


# A package laid out as the published one; what would need a library, or the package's own base,
# fails the test when it runs.
_PACKAGE = {
    "__init__.py": "from . import library\nfrom .kernels import *\n",
    "kernels/__init__.py": "from .pairs import write_pair\n",
    "kernels/base.py": "raise AssertionError('the package\\'s own base was imported')\n",
    "kernels/pairs.py": """
import ctypes
from ..device import current_device
from ..library import blas
from .base import CUDAStream, DevicePointer, Kernel, round_up

pairs_kernel = Kernel("client", ["writePair", "noSuchFunction"])


class Pair(ctypes.Structure):
    _fields_ = [("first", ctypes.c_int32), ("second", ctypes.c_int32)]


def write_pair(out: DevicePointer, first: int, second: int, stream: CUDAStream):
    pairs_kernel.writePair(
        (1, 1, 1), (round_up(1, 32), 1, 1), 0, stream,
        [ctypes.c_void_p(out), Pair(first, second), ctypes.c_void_p(0)],
    )


def handle():
    return current_device().cublasLtHandle


def kind():
    return blas.KIND
""",
    "device/__init__.py": "raise AssertionError('the package\\'s own device was imported')\n",
    "library/__init__.py": "from . import blas, cublaslt\n",
    "library/base.py": "opened = []\n",
    "library/blas.py": "from .base import opened\n\nopened.append('blas')\nKIND = 7\n",
    "library/cublaslt.py": (
        "from .base import opened\n\nopened.append('cublaslt')\n\n\n"
        "def cublasLtCreate():\n    return 'handle'\n"
    ),
    "torch/__init__.py": "from ..kernels import write_pair as pair\n",
}


def write_package(folder: Path, image: bytes) -> Path:
    """An installed cpm_kernels under `folder`, with `image` as its cuda/client.fatbin."""
    for name, text in _PACKAGE.items():
        path = folder / "cpm_kernels" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    data = folder / "cpm_kernels/kernels/cuda/client.fatbin"
    data.parent.mkdir()
    data.write_bytes(image)
    return data
