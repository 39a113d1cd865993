"""`kernel-hub export --hub`: the folder that Hugging Face's kernels package loads, and runs of it.

Children load it: no kernel_hub, and nothing of this checkout, is on their path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakecuda import FakeCuda

from kernel_hub.cli import main
from kernel_hub.collection.manifest import open_collection
from kernel_hub.errors import KernelHubError
from kernel_hub.integrations.kernels import hub_folder

torch = pytest.importorskip("torch", reason="torch is not installed")

LOAD = """
import importlib.util, json, sys
from pathlib import Path
def load(build):
    about = json.loads(Path(build, "metadata.json").read_text())
    spec = importlib.util.spec_from_file_location(about["id"], Path(build, "__init__.py"))
    module = sys.modules[about["id"]] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "kernel_hub"
    folder.mkdir()
    hub_folder.write(folder)
    return folder


def ran(script: str, *arguments: object, **env: str) -> str:
    """What a child printed: isolated from this checkout, with this Python's packages."""
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import sys\nsys.modules['kernel_hub'] = None\n" + script,
         *map(str, arguments)] if sys.version_info >= (3, 11) else
        [sys.executable, "-c", "import sys\nsys.path.pop(0)\nsys.modules['kernel_hub'] = None\n"
         + script, *map(str, arguments)],
        capture_output=True, text=True, env=settings | env, cwd=Path(__file__).anchor, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_written(repository: Path) -> None:
    builds = {path.name: path for path in (repository / "build").iterdir()}
    assert set(builds) == {"torch-cuda", "torch-cpu"}
    about = {
        name: json.loads((path / "metadata.json").read_text()) for name, path in builds.items()
    }
    assert about["torch-cuda"]["backend"] == {"type": "cuda", "archs": ["8.0", "8.9", "9.0"]}
    assert about["torch-cpu"]["backend"] == {"type": "cpu"}
    assert about["torch-cpu"]["id"] != about["torch-cuda"]["id"]
    assert all(one["python-depends"] == [] for one in about.values())
    shipped = open_collection().manifest.cubins
    found = {path.stem for path in builds["torch-cuda"].rglob("*.cubin")}
    assert found == set(shipped) and not list(builds["torch-cpu"].rglob("*.cubin"))
    assert not list(repository.rglob("__pycache__")) and not list(repository.rglob("cli"))


def test_nothing_is_overwritten(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KernelHubError, match="exists already; nothing was written"):
        hub_folder.write(repository)
    assert main(["export", "--hub", str(repository)]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["rms_norm", "--hub", "x"], "leave out names"),
        (["--hub", "x", "--to", "y", "--tvm-ffi"], "leave out to, tvm-ffi"),
        (["rms_norm"], "names and --to DIR, or --hub DIR alone"),
        (["--to", "y"], "names and --to DIR, or --hub DIR alone"),
    ],
)
def test_what_does_not_go_together(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


RUN = """
import torch
sys.modules["numpy"] = None  # may not be asked for
hub = load(sys.argv[1])
x, weight = torch.randn(3, 64), torch.ones(64)
norm = hub.rms_norm(x, weight)
assert torch.allclose(norm, torch.nn.functional.rms_norm(x, (64,), weight, 1e-6), atol=1e-6)
q = torch.randn(2, 9, 4, 64)
assert hub.flash_attn_func(q.bfloat16(), q.bfloat16(), q.bfloat16(), causal=True).shape == q.shape
again = torch.compile(lambda x: hub.silu_and_mul(x), fullgraph=True, backend="eager")(x)
assert torch.equal(again, hub.silu_and_mul(x))
try:
    hub.rms_norm(x, weight, eps="1e-6")
except Exception as error:
    assert type(error).__name__ == "TensorError" and "pass eps=float" in str(error), error
names = sorted(name for name in dir(torch.ops) if "kernel_hub" in name)
assert len(names) == 1 and names[0].startswith(hub.__name__), names
assert not [name for name in sys.modules if name.startswith("kernel_hub.")]
print("ran")
"""


@pytest.mark.parametrize("build", ["torch-cpu", "torch-cuda"])
def test_the_ops_run_without_kernel_hub_and_numpy(repository: Path, build: str) -> None:
    assert ran(LOAD + RUN, repository / "build" / build) == "ran\n"


LAUNCH = """
first, second = load(sys.argv[1]), load(sys.argv[2])
assert len(first.registry) > 20 and "rms_norm" in first.registry
kernel = first.registry.launch_probe
out = bytearray(4)
inside = first.__name__ + "._kernel_hub"
DeviceArray = sys.modules[inside].DeviceArray
x, y, out = (DeviceArray.zeros(256) for _ in range(3))
kernel.launch_probe_5(1, 256, 0, None, [out, x, y, 256, 0.5])
from importlib import import_module
table = import_module(inside + ".ops.matmul.linear_plan").TABLE
assert table.costs("sm90"), "shipped tables are found"
assert import_module(inside + ".launch.probing")._NAME == "_kernel_hub"
try:
    second.registry.launch_probe
except Exception as error:
    assert type(error).__name__ == "CubinNotFoundError", error
print("launched")
"""


def test_a_launch_from_the_cubins_inside(repository: Path, fakecuda: FakeCuda) -> None:
    builds = [repository / "build" / name for name in ("torch-cuda", "torch-cpu")]
    assert ran(LOAD + LAUNCH, *builds, KERNEL_HUB_LIBCUDA=fakecuda.path) == "launched\n"


REAL = """
from pathlib import Path
import torch
from kernels import get_local_kernel, kernelize, use_kernel_mapping, Mode, LocalLayerRepository
hub = get_local_kernel(Path(sys.argv[1]))
x, weight = torch.randn(3, 64), torch.ones(64)
assert torch.allclose(hub.rms_norm(x, weight), torch.nn.functional.rms_norm(x, (64,), weight, 1e-6))
assert issubclass(hub.layers.RMSNorm, torch.nn.Module)
print(hub.__name__)
"""


def test_the_real_package_loads_it(repository: Path) -> None:
    pytest.importorskip("kernels", reason="kernels is not installed: pip install kernels")
    assert ran(REAL, repository).startswith("_kernel_hub_cpu_")
