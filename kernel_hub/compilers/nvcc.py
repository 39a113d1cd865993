"""nvcc: finding it, one source for one architecture, and what counts as a good cubin.

Build only. Knows nothing of the manifest; one call of nvcc a cubin gives image, PTX and the
preprocessed source together (`--keep` leaves the image byte for byte as it is without).
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..archs import target_of
from ..errors import KernelHubError

# Raise this when the builder changes so that unchanged sources must be built or described anew.
BUILDER_FORMAT = 2
BASE_FLAGS = ("-std=c++20", "-O3")
DESCRIBING = "include/kernel_hub/launch_facts.cuh"
INSTALL_NVCC = 'pip install "cuda-toolkit[nvcc,nvvm,crt,cudart,cccl]==13.0.2"'

_DIRECTIVE = re.compile(r"^\s*//\s*kernel_hub:\s*(.*?)\s*$", re.MULTILINE)
_NOT_FOR = re.compile(r"\s*(sm\d+):\s*\S.*")
_INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)
_LINE_MARKER = re.compile(r'^# \d+ "([^"<]+)"', re.MULTILINE)
_SLOW_WGMMA = re.compile(r".*(?:\bC75(?:08|10|13|14)\b|instructions are serialized).*")
_UNREPRODUCIBLE = {"-lineinfo", "--generate-line-info", "-G", "--device-debug", "-v", "--verbose"}


@dataclass(frozen=True)
class Nvcc:
    """A compiler: `path`, and its release such as '13.0.88'."""

    path: str
    version: str

    @property
    def minimum_driver(self) -> int:
        """cuDriverGetVersion() a cubin of this toolkit needs: any driver of the same major."""
        return int(self.version.split(".")[0]) * 1000


def find_nvcc() -> Nvcc:
    """$NVCC, else PATH, $CUDA_HOME, the pip package in this Python, /usr/local/cuda."""
    asked = os.environ.get("NVCC")
    if asked:
        return Nvcc(asked, _version(asked))
    places = [shutil.which("nvcc")]
    places += [os.path.join(os.environ.get("CUDA_HOME", "/nowhere"), "bin/nvcc")]
    places += [str(nvcc) for path in sys.path for nvcc in Path(path).glob("nvidia/cu*/bin/nvcc")]
    places += ["/usr/local/cuda/bin/nvcc"]
    for place in places:
        if place and os.access(place, os.X_OK):
            return Nvcc(place, _version(place))
    raise KernelHubError(
        "nvcc not found: $NVCC is not set, and none is on PATH, under $CUDA_HOME, in this "
        f"Python's packages or in /usr/local/cuda. One command brings it: {INSTALL_NVCC}"
    )


def _version(path: str) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise KernelHubError(f"nvcc at {path} does not run: {error}") from error
    match = re.search(r"\bV(\d+\.\d+\.\d+)", done.stdout)
    if not match:
        raise KernelHubError(f"{path} --version names no release: {done.stdout}{done.stderr}")
    return match[1]


@dataclass(frozen=True)
class Job:
    """One cubin to build: `source` (<name>.cu, in `csrc` or a folder of it) for `arch`."""

    name: str
    arch: str
    csrc: Path
    source: Path
    target: str
    flags: tuple[str, ...]
    local_memory_reason: str | None
    files: tuple[str, ...]
    source_sha256: str

    @property
    def file(self) -> str:
        """Where the cubin goes, relative to the manifest."""
        return f"{self.arch}/{self.name}.cubin"

    @property
    def label(self) -> str:
        return f"{self.place} ({self.arch})"

    @property
    def place(self) -> str:
        """The source, relative to the folder above csrc."""
        return self.source.relative_to(self.csrc.parent).as_posix()


def find_sources(csrc: Path) -> dict[str, Path]:
    """The .cu files of `csrc` and its folders, by name: a file's name is its cubin's."""
    found: dict[str, Path] = {}
    for path in sorted(csrc.rglob("*.cu")):
        within = path.relative_to(csrc)
        if within.parts[0] == "include" or any(part.startswith(".") for part in within.parts):
            continue
        other = found.setdefault(path.stem, path)
        if other != path:
            raise KernelHubError(
                f"{csrc.name}/{other.relative_to(csrc)} and {csrc.name}/{within} would both be "
                f"{path.stem}.cubin; rename one of them"
            )
    return found


def make_jobs(source: Path, archs: list[str], toolkit: str, csrc: Path | None = None) -> list[Job]:
    """Reads the source's directives and hashes, per arch, all that decides the cubin's bytes.

    csrc: the folder that `source` is somewhere in; None: the one it lies in.

    The hash covers the source, the project headers it includes, transitively, the flags and the
    toolkit; system headers belong to the toolkit.
    """
    asked, reason, _ = _directives(source)
    csrc = csrc or source.parent
    texts = _project_files(source, csrc)
    jobs = []
    for arch in archs:
        target = target_of(arch, exact=only_arch(source) is not None)
        code = f"-gencode=arch={target.replace('sm', 'compute')},code={target}"
        flags = (*BASE_FLAGS, code, f"-I{csrc.name}/include", f"-I{csrc.name}", *asked)
        digest = hashlib.sha256(repr((BUILDER_FORMAT, toolkit, flags)).encode())
        for file, text in texts.items():
            digest.update(f"\n{file} {len(text)}\n{text}".encode())
        files = tuple(texts)
        jobs.append(
            Job(source.stem, arch, csrc, source, target, flags, reason, files, digest.hexdigest())
        )
    return jobs


def only_arch(source: Path) -> str | None:
    """'sm90' for <name>_sm90.cu, which is built for that architecture alone."""
    match = re.search(r"_(sm\d+)$", source.stem)
    return match[1] if match else None


def built_for(source: Path, archs: Iterable[str]) -> list[str]:
    """Those of `archs` that a source is built for: not what it leaves to code for an older one."""
    one, left = only_arch(source), _directives(source)[2]
    return [arch for arch in archs if one in (None, arch) and arch not in left]


def _directives(source: Path) -> tuple[list[str], str | None, list[str]]:
    """nvcc's flags, why local memory may be used, the architectures that are left out."""
    flags: list[str] = []
    left: list[str] = []
    reason = None
    for text in _DIRECTIVE.findall(_read(source)):
        key, _, value = text.partition(":")
        if key == "flags" and value.strip():
            flags += shlex.split(value)
        elif key == "allow-local-memory" and value.strip():
            reason = value.strip()
        elif key == "not-for" and (found := _NOT_FOR.fullmatch(value)):
            left.append(found[1])
        else:
            raise KernelHubError(
                f"{source}: `// kernel_hub: {text}` is not understood; there are `flags: <nvcc "
                "flags>`, `allow-local-memory: <reason>` and `not-for: <arch>: <reason>`"
            )
    bad = _UNREPRODUCIBLE.intersection(",".join(flags).split(","))
    if bad:
        raise KernelHubError(
            f"{source}: {', '.join(sorted(bad))} would make the cubin differ from place to place"
        )
    return flags, reason, left


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _project_files(source: Path, csrc: Path) -> dict[str, str]:
    """Path (relative to the folder above csrc) -> text: the source and all it may include."""
    texts: dict[Path, str] = {}
    waiting = [source]
    while waiting:
        file = waiting.pop()
        texts[file] = _read(file)
        for name in _INCLUDE.findall(texts[file]):
            folders = (file.parent, csrc / "include", csrc)
            places = (Path(os.path.normpath(folder / name)) for folder in folders)
            header = next((p for p in places if p.is_file()), None)
            if header and header not in texts:
                waiting.append(header)
    return {os.path.relpath(p, csrc.parent): texts[p] for p in sorted(texts)}


@dataclass(frozen=True)
class Compiled:
    """What one call of nvcc gave; `messages` is what it said though it succeeded."""

    image: bytes
    ptx: str
    preprocessed: str
    messages: str


def compile_cubin(nvcc: Nvcc, job: Job, scratch: Path) -> Compiled:
    """Compiles in `scratch` (an empty folder) and refuses what would not be fit to ship."""
    out = scratch / "out.cubin"
    messages = _run(nvcc, job, ["--keep", f"--keep-dir={scratch}", "-o", str(out)], scratch)
    compiled = Compiled(
        image=out.read_bytes(),
        ptx=_kept(scratch, ".ptx"),
        preprocessed=_kept(scratch, ".cpp1.ii"),
        messages=messages,
    )
    _refuse_unfit(job, compiled)
    return compiled


def compile_described(nvcc: Nvcc, job: Job, scratch: Path) -> bytes | None:
    """The constants that stand for the kernels where DESCRIBED tells of them; None: nowhere."""
    if not any(file.endswith(DESCRIBING) for file in job.files):
        return None
    out = scratch / "described.cubin"
    # What serves the kernels alone is unused here, which is worth no warning.
    _run(nvcc, job, ["-DKERNEL_HUB_DESCRIBE", "-w", "-o", str(out)], scratch)
    return out.read_bytes()


def _run(nvcc: Nvcc, job: Job, more: list[str], scratch: Path) -> str:
    """Calls nvcc on the job's source and returns what it said."""
    command = [nvcc.path, "-cubin", *job.flags, *more, job.place]
    # Variables that add flags behind our back would make the record in the manifest a lie.
    env = {k: v for k, v in os.environ.items() if not k.startswith("NVCC_")}
    # A relative source path, so that not even __FILE__ differs from checkout to checkout.
    done = subprocess.run(
        command,
        cwd=job.csrc.parent,
        env={**env, "LC_ALL": "C", "TMPDIR": str(scratch)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        shown = shlex.join(part for part in command if not part.startswith("--keep"))
        raise KernelHubError(f"{job.label}: nvcc failed\n$ {shown}\n{done.stdout.rstrip()}")
    return done.stdout.strip()


def _kept(scratch: Path, suffix: str) -> str:
    return next(scratch.glob(f"*{suffix}")).read_text(encoding="utf-8", errors="replace")


def _refuse_unfit(job: Job, compiled: Compiled) -> None:
    slow = _SLOW_WGMMA.search(compiled.messages)
    if slow:
        raise KernelHubError(f"{job.label}: ptxas serialised wgmma: {slow[0].strip()}")
    if b"_INTERNAL_" in compiled.image:
        raise KernelHubError(
            f"{job.label}: a static or anonymous-namespace function survived un-inlined; its "
            "_INTERNAL_ symbol hashes the absolute path, so the cubin would differ from checkout "
            "to checkout. Make it __forceinline__, or drop `static` and the anonymous namespace"
        )
    included = {os.path.normpath(name) for name in _LINE_MARKER.findall(compiled.preprocessed)}
    unseen = sorted(
        name for name in included - set(job.files) if name.startswith(f"{job.csrc.name}/")
    )
    if unseen:
        raise KernelHubError(
            f"{job.label}: includes {', '.join(unseen)} in a way the builder cannot see; "
            'write a plain #include "..." so that a change of it rebuilds this cubin'
        )
