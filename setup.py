"""Package metadata. The cubins are data: nothing here compiles, and nothing needs nvcc.

Wheel and sdist are the same bytes wherever and whenever they are built (docs/security.md): all is
dated with the last commit, and of a file's mode only "executable" is kept.
"""

import gzip
import io
import os
import stat
import subprocess
import tarfile
import time
import zipfile
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70.1 a package of its own brings it
    try:
        from wheel.bdist_wheel import bdist_wheel
    except ImportError:
        bdist_wheel = None

HERE = Path(__file__).resolve().parent
EARLIEST = 315532800  # 1980, where the dates of a zip begin
DATED = "SOURCE_DATE"  # in an sdist, which has no commits
ZSTD = "zstandard>=0.19; python_version < '3.14'"  # later ones bring it themselves
ENGINE = ["torch>=2.4", "safetensors>=0.4", "tokenizers>=0.20", "jinja2>=3.1"]
TEST = [
    *("hypothesis", "pytest>=8", "pytest-timeout", "pytest-xdist>=3.6", "rich>=12"),
    "setuptools>=70.1",
    ZSTD,
]


def source_date() -> int:
    """What is built is dated with this, in seconds since 1970; 1980 where nothing tells.

    SOURCE_DATE_EPOCH (https://reproducible-builds.org/specs/source-date-epoch/), else the date of
    the last commit, else what the sdist says.
    """
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given is None and (HERE / ".git").exists():
        ask = ["git", "show", "--no-patch", "--no-show-signature", "--format=%ct", "HEAD"]
        try:
            given = subprocess.run(ask, cwd=HERE, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"dated 1980, as git does not tell the commit: {error}")
    elif given is None and (HERE / DATED).is_file():
        given = (HERE / DATED).read_text()
    return max(EARLIEST, int(given or 0))


def plain_mode(mode: int) -> int:
    """The mode that a file or folder has whatever the umask was."""
    return 0o755 if mode & stat.S_IXUSR else 0o644


def rewrite_wheel(path: Path, date: int) -> None:
    """The same files in one order, with one date; RECORD, which lists them, comes last."""
    with zipfile.ZipFile(path) as old:
        names = [name for name in old.namelist() if not name.endswith("/")]
        files = [(name, old.getinfo(name).external_attr >> 16, old.read(name)) for name in names]
    files.sort(key=lambda file: (".dist-info/" in file[0], file[0].endswith("/RECORD"), file[0]))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, mode, content in files:
            info = zipfile.ZipInfo(name, time.gmtime(date)[:6])
            info.create_system = 3  # Unix: so the modes below are read
            info.external_attr = (stat.S_IFREG | plain_mode(mode)) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            new.writestr(info, content)


def packed_sdist(tar: Path, date: int) -> Path:
    """The files of a .tar in one order, with one date, of nobody, as a .tar.gz; it is removed."""
    made = tar.with_name(f"{tar.name}.gz")
    with tarfile.open(tar) as old:
        members = sorted(old.getmembers(), key=lambda member: member.name)
        # A hard link reads as what it leads to.
        contents = [None if one.isdir() else old.extractfile(one).read() for one in members]
    tar.unlink()
    with (
        made.open("wb") as file,
        gzip.GzipFile("", "wb", 6, file, date) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member, content in zip(members, contents, strict=True):
            info = tarfile.TarInfo(member.name)
            info.mtime = date
            info.mode = plain_mode(member.mode)
            if content is None:
                info.type = tarfile.DIRTYPE
                new.addfile(info)
            else:
                info.size = len(content)
                new.addfile(info, io.BytesIO(content))
    return made


class Sdist(sdist):
    """Says in the sdist what it is dated with, so that a wheel built from it is dated so too."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        (Path(base_dir) / DATED).write_text(f"{source_date()}\n", encoding="ascii")

    def make_archive(self, base_name, format, *args, **options):
        if format != "gztar":
            return super().make_archive(base_name, format, *args, **options)
        made = super().make_archive(base_name, "tar", *args, **options)
        return str(packed_sdist(Path(made), source_date()))


commands = {"sdist": Sdist}
if bdist_wheel:

    class Wheel(bdist_wheel):
        def run(self):
            super().run()
            rewrite_wheel(Path(self.distribution.dist_files[-1][2]), source_date())

    commands["bdist_wheel"] = Wheel

readme = HERE / "README.md"
packages = find_packages(include=["kernel_hub", "kernel_hub.*"])
if (HERE / "cubins").is_dir():  # a checkout may be cleaned of what it can build again
    packages.append("kernel_hub.cubins")

setup(
    name="kernel_hub",
    version="0.1.0",
    description="CUDA kernels as data: prebuilt cubins, checked and launched through ctypes",
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    cmdclass=commands,
    packages=packages,
    package_dir={"kernel_hub.cubins": "cubins"},
    package_data={
        "kernel_hub": ["py.typed", "ops/*.pyi"],
        "kernel_hub.cubins": ["manifest.json", "*/*.cubin"],
    },
    include_package_data=True,
    zip_safe=True,
    install_requires=["numpy>=1.23"],
    extras_require={
        "torch": ["torch>=2.4"],
        "cli": ["rich>=12"],
        "bench": ["matplotlib>=3.6", "rich>=12"],
        # cuda-core[cu13] would bring NVVM and more, twice the download.
        "jit": ["cuda-core>=1.2,<2", "cuda-bindings>=13,<14", "nvidia-cuda-nvrtc>=13,<14"],
        "triton": ["triton>=3.0"],
        "fatbin": [ZSTD],
        "transformers": ["torch>=2.4", "transformers>=4.53"],
        "engine": ENGINE,
        "serve": [
            *ENGINE,
            "starlette>=0.40",
            "uvicorn>=0.30",
            "pydantic>=2.8",
            "prometheus-client>=0.20",
        ],
        # JSON by a schema; one wheel for every Python, and nothing comes with it.
        "grammar": ["llguidance>=1.3"],
        "test": TEST,
        # Exact versions: another formatter release would want other line breaks.
        "docs": ["mkdocs-material==9.8.1", "mkdocstrings[python]==1.0.8", "ruff==0.17.5"],
        "dev": [*TEST, "build>=1", "clang-format==23.1.5", "mypy==2.4.1", "ruff==0.17.5"],
    },
    entry_points={"console_scripts": ["kernel-hub = kernel_hub.cli:main"]},
    classifiers=[
        "Environment :: GPU :: NVIDIA CUDA",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Typing :: Typed",
    ],
)
