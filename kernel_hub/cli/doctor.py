"""`kernel-hub doctor`: driver, devices, cubins and torch: what is there, what is missing."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__, cache_folder
from .. import driver as _driver
from ..collection.manifest import Collection, open_collection
from ..errors import KernelHubError
from ..launch import c_launcher
from .parts import console
from .parts.gather import choices

NAME = "doctor"
HELP = "say whether launches are possible here, and if not, what to do (exit code 0 or 1)"
EXAMPLE = "kernel-hub doctor || echo 'no launches on this machine'"

# Driver calls kernel_hub does without: since which CUDA, and what is lost without them.
OPTIONAL_CALLS = {
    "cuGetErrorString": ("6.0", "clients of cpm_kernels are not told the driver's own words"),
    "cuLibraryGetKernelCount": ("12.4", "a compressed fatbin's functions cannot be counted"),
    "cuLibraryEnumerateKernels": ("12.4", "a compressed fatbin's functions cannot be listed"),
    "cuKernelGetName": ("12.3", "a compressed fatbin's functions cannot be named"),
    "cuKernelGetParamInfo": ("12.4", "a compressed fatbin cannot be launched"),
    "cuFuncLoad": ("12.4", "a function loads inside its first launch, not in .load()"),
    "cuStreamGetDevice": ("12.8", "a raw stream handle's device is not checked"),
    "cuLogsCurrent": ("12.9", "errors come without the driver's own explanation"),
    "cuLogsDumpToMemory": ("12.9", "errors come without the driver's own explanation"),
}

LAUNCHERS = {
    "C": "the C launcher takes the common launches",
    "Python": "the Python launcher takes every launch",
}
POOL_FIGURES = ("used", "reserved", "reserved_high", "release_threshold", "pinned_host")


@dataclass(frozen=True)
class FoundGpu:
    """One GPU, and for each shipped cubin the file it would load or None."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    num_multiprocessors: int
    cubins: dict[str, str | None]


@dataclass
class Report:
    """Everything `doctor` says. `problems` stop every launch and say what to do; `notes` do not."""

    kernel_hub: str
    python: str
    platform: str
    launcher: str
    driver: dict[str, Any] | None = None
    devices: list[FoundGpu] = field(default_factory=list)
    cubins: dict[str, Any] | None = None
    cache: dict[str, str] = field(default_factory=dict)
    torch: dict[str, Any] | None = None
    loaded: list[dict[str, Any]] = field(default_factory=list)
    pools: list[dict[str, Any]] = field(default_factory=list)
    missing_calls: dict[str, tuple[str, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def can_launch(self) -> bool:
        """Whether a shipped kernel can run here."""
        return not self.problems


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def examine() -> Report:
    """Look at everything; never raises for what it finds."""
    launcher = "C" if c_launcher.available() else "Python"
    report = Report(__version__, platform.python_version(), platform.platform(), launcher)
    if reason := c_launcher.why_not():
        report.notes.append(f"the C launcher is not used: {reason}")
    _examine_cache(report)
    collection = _examine_cubins(report)
    driver = _examine_driver(report)
    if driver is not None:
        _examine_devices(report, driver, collection)
    _examine_torch(report)
    # Of this process: from the command line nothing is loaded, within a program it says what is.
    if library := sys.modules.get("kernel_hub.launch.libraries"):
        report.loaded = [image._asdict() for image in library.loaded_images()]
    _examine_pools(report)
    return report


def _examine_pools(report: Report) -> None:
    pool = sys.modules.get("kernel_hub.arrays.pool")
    try:
        found = pool.pools() if pool else []
    except KernelHubError as error:
        report.problems.append(str(error))
        return
    for stats in found:
        figures = {"unused_bytes": stats.unused_bytes, "fragmentation": stats.fragmentation}
        report.pools.append({**stats._asdict(), **figures})


def _examine_cache(report: Report) -> None:
    folder, problem = cache_folder.root(), cache_folder.problem()
    report.cache = {"folder": str(folder) if folder else "off", "problem": problem}
    if problem:
        report.notes.append(
            f"the cache folder {folder} is not used: {problem}. Make it yours alone, or name "
            f"another with {cache_folder.VARIABLE} (0 for none)"
        )


def _examine_cubins(report: Report) -> Collection | None:
    try:
        collection = open_collection()
    except KernelHubError as error:
        report.problems.append(str(error))
        return None
    entries = [e for archs in collection.manifest.cubins.values() for e in archs.values()]
    report.cubins = {
        "folder": str(collection.root),
        "number": len(entries),
        "minimum_driver": max((e.minimum_driver for e in entries), default=0),
    }
    return collection


def _examine_driver(report: Report) -> _driver.Driver | None:
    tried = _driver.candidates()
    try:
        driver = _driver.get()
    except KernelHubError as error:
        report.problems.append(str(error))
        return None
    report.driver = {
        "library": driver.path,
        "file": loaded_file(driver.path),
        "why": why(driver.path, tried),
        "cuda": console.cuda_version(driver.version),
        "version": driver.version,
    }
    report.missing_calls = {
        name: lost for name, lost in OPTIONAL_CALLS.items() if not driver.has(name)
    }
    needed = report.cubins["minimum_driver"] if report.cubins else 0
    if driver.version < needed:
        report.problems.append(
            f"the driver is of CUDA {console.cuda_version(driver.version)}, the shipped cubins "
            f"need {console.cuda_version(needed)}: update the NVIDIA driver (580 is CUDA 13.0)"
        )
    return driver


def why(path: str, tried: list[str]) -> str:
    """Why this library and not another."""
    if tried == [path]:
        return f"{_driver.LIBRARY_VARIABLE} names it"
    before = ", ".join(tried[: tried.index(path)])
    return f"loaded because {before} could not be" if before else "the first name that is tried"


def loaded_file(path: str, maps: Path = Path("/proc/self/maps")) -> str | None:
    """The file behind the library's name, where the system says what is mapped."""
    name = Path(path).name.partition(".so")[0]
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return None
    mapped = [line.split(maxsplit=5)[-1] for line in lines]
    found = [file for file in mapped if Path(file).name.startswith(f"{name}.so")]
    return path if path in found else next(iter(found), None)


def _examine_devices(report: Report, driver: _driver.Driver, collection: Collection | None) -> None:
    for index in range(driver.device_count):
        capability = driver.compute_capability(index)
        found = choices(collection, capability) if collection else []
        report.devices.append(
            FoundGpu(
                index,
                driver.device_name(index),
                capability,
                driver.attribute(index, _driver.MULTIPROCESSOR_COUNT),
                {choice.name: choice.entry.file if choice.entry else None for choice in found},
            )
        )
    if not report.devices:
        report.problems.append("the driver sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES")
        return
    if not any(any(device.cubins.values()) for device in report.devices):
        tokens = sorted({"sm{}{}".format(*gpu.compute_capability) for gpu in report.devices})
        report.problems.append(
            "no shipped cubin runs on any GPU here: in a checkout, "
            f"./build_cubins.sh --arch {','.join(tokens)} builds some"
        )
    try:
        driver.primary_context(0)
    except KernelHubError as error:
        report.problems.append(str(error))


def _examine_torch(report: Report) -> None:
    """From its files: importing torch would take seconds and may fail for reasons of its own."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        report.notes.append("torch is not installed: kernel_hub.ops needs it, Kernel does not")
        return
    folder = Path(spec.submodule_search_locations[0], "lib")
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    uses_cuda = any(folder.glob("*torch_cuda*"))
    report.torch = {"version": version, "cuda": uses_cuda}
    if not uses_cuda and report.devices:
        report.notes.append("this torch is a CPU build: its tensors never reach the GPU")


def run(args: argparse.Namespace) -> int:
    report = examine()
    if args.json:
        console.as_json({"can_launch": report.can_launch, **asdict(report)})
    else:
        _print(report)
    return 0 if report.can_launch else 1


def _print(report: Report) -> None:
    rows: list[tuple[str, object]] = [
        ("kernel_hub", f"{report.kernel_hub}, Python {report.python} at {sys.executable}"),
        ("system", report.platform),
        ("launcher", LAUNCHERS[report.launcher]),
    ]
    if report.driver:
        file = f" ({report.driver['file']})" if report.driver["file"] else ""
        rows.append(("driver", f"CUDA {report.driver['cuda']}, {report.driver['library']}{file}"))
        rows.append(("", report.driver["why"]))
    else:
        rows.append(("driver", "none"))
    if report.cubins:
        needed = console.cuda_version(report.cubins["minimum_driver"])
        rows.append(("cubins", f"{report.cubins['number']} in {report.cubins['folder']}"))
        rows.append(("", f"need a driver of CUDA {needed} or later"))
    rows.append(("cache", report.cache["folder"] + ", not used" * bool(report.cache["problem"])))
    if report.torch:
        build = "with CUDA" if report.torch["cuda"] else "for the CPU only"
        rows.append(("torch", f"{report.torch['version']}, {build}"))
    for device in report.devices:
        major, minor = device.compute_capability
        fitting = sum(file is not None for file in device.cubins.values())
        rows.append(
            (
                f"GPU {device.index}",
                f"{device.name}, {major}.{minor}, {device.num_multiprocessors} SMs: "
                f"{fitting} of {len(device.cubins)} cubins fit",
            )
        )
    console.fields(rows)
    for device in report.devices:
        console.table(
            [f"on GPU {device.index}", "would load"],
            [(name, file or "nothing") for name, file in device.cubins.items()],
        )
    if report.loaded:
        console.table(
            ["loaded image", "bytes", "kernels", "why"],
            [tuple(image.values()) for image in report.loaded],
            right=["bytes", "kernels"],
        )
    if report.pools:
        figures = [f"{name}_bytes" for name in POOL_FIGURES]
        console.table(
            ["memory pool", "arrays", *figures],
            [
                (f"GPU {pool['device']}", pool["live_arrays"], *(f"{pool[f]:,}" for f in figures))
                for pool in report.pools
            ],
            right=["arrays", *figures],
        )
    for name, (since, lost) in report.missing_calls.items():
        console.note(f"note: the driver has no {name} (CUDA {since}): {lost}")
    for text in report.notes:
        console.note(f"note: {text}")
    for text in report.problems:
        console.note(f"problem: {text}")
    console.note("launches are possible" if report.can_launch else "no launch is possible here")
