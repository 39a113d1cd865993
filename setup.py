"""Package metadata. The cubins are data: nothing here compiles, and nothing needs nvcc."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
ZSTD = "zstandard>=0.19; python_version < '3.14'"  # later ones bring it themselves
TEST = [
    *("hypothesis", "pytest>=8", "pytest-timeout", "pytest-xdist>=3.6", "rich>=12"),
    "setuptools>=70.1",
    ZSTD,
]

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
    packages=packages,
    package_dir={"kernel_hub.cubins": "cubins"},
    package_data={"kernel_hub": ["py.typed"], "kernel_hub.cubins": ["manifest.json", "*/*.cubin"]},
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
        "test": TEST,
        # Exact versions: another formatter release would want other line breaks.
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
