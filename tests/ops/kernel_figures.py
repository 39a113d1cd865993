"""What the sources in csrc say of the launches of their kernels, in numbers that nvcc works out.

The macros of a source that make kernels (`EXPORT_*` with `__global__` in its text) are put aside,
and one of them makes an array of figures instead: the source's own list of variants, in its own
configurations. No kernel is compiled: half a second a source.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from emulated import INCLUDE, SOURCES

from kernel_hub.compilers.nvcc import find_nvcc
from kernel_hub.errors import KernelHubError

Rows = dict[str, dict[str, int]]  # figures by name, of kernels by name
HALVES = ("fp16", "bf16")
_MACRO = re.compile(r"^#define (EXPORT_\w+)\(([^)]*)\)((?:.*\\\n)*.*\n)", re.MULTILINE)
_NAMESPACE = re.compile(r"^namespace ([\w:]+) {", re.MULTILINE)
_ARRAY = re.compile(r"\.global \.align 4 \.b8 (\w+)\[(\d+)\](?: = \{([\d, ]*)\})?;")
_CONSTANTS = "the_constants_of_the_source"


@dataclass(frozen=True)
class Source:
    """Where figures come from.

    macro: of `cubin`.cu, makes kernels named `kernel`. figures: by name, in C++; in them C is
    `config`, and the macro's arguments may be used. constants: of the source's
    namespace. before: C++ that the figures need.
    """

    cubin: str
    macro: str
    kernel: str
    config: str
    figures: dict[str, str]
    constants: tuple[str, ...] = ()
    arch: str = "sm_90a"
    before: str = ""

    def text(self) -> str:
        """The source with arrays where it has kernels."""
        source = SOURCES[self.cubin].read_text(encoding="utf-8")
        kernels = {match[1] for match in _MACRO.finditer(source) if "__global__" in match[3]}
        assert self.macro in kernels, f"{self.cubin}.cu: no {self.macro} in {sorted(kernels)}"

        def without_kernel(match: re.Match[str]) -> str:
            if match[1] not in kernels:
                return match[0]
            array = ""
            if match[1] == self.macro:
                found = (re.sub(r"\bC\b", self.config, each) for each in self.figures.values())
                array = _array(self.kernel, list(found))
            arguments = re.sub(r"\s*\\\n\s*", " ", match[2])
            return f"#define {match[1]}({arguments}) {array}\n{self.before if array else ''}\n"

        constants = _array(_CONSTANTS, [*self.constants, "0"])
        namespace = _NAMESPACE.findall(source)[0]
        return f"{_MACRO.sub(without_kernel, source)}namespace {namespace} {{ {constants} }}"

    def read(self) -> tuple[Rows, dict[str, int]]:
        """Figures of each kernel, and the constants; skips without nvcc."""
        arrays = dict(_compiled(self.text(), self.arch))
        constants = dict(zip(self.constants, arrays.pop(_CONSTANTS), strict=False))
        return {
            name: dict(zip(self.figures, values, strict=True)) for name, values in arrays.items()
        }, constants


def _array(name: str, values: list[str]) -> str:
    return f'extern "C" __device__ int {name}[] = {{{", ".join(f"int({v})" for v in values)}}};'


@functools.cache
def _compiled(text: str, arch: str) -> dict[str, list[int]]:
    """The arrays of a source, out of its PTX."""
    try:
        nvcc = find_nvcc()
    except KernelHubError as missing:
        pytest.skip(str(missing).splitlines()[0])
    with tempfile.TemporaryDirectory(prefix="kernel_hub_figures_") as folder:
        source, ptx = Path(folder, "figures.cu"), Path(folder, "figures.ptx")
        source.write_text(text, encoding="utf-8")
        done = subprocess.run(
            [
                nvcc.path, "-ptx", "-std=c++20", f"-arch={arch}", *INCLUDE,
                str(source), "-o", str(ptx),
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[:4000]
        found = _ARRAY.findall(ptx.read_text(encoding="utf-8"))
    return {name: _integers(int(size), values) for name, size, values in found}


def _integers(size: int, given: str) -> list[int]:
    """What .b8 {128, 1} is as int32; zeros at the end are not written."""
    data = bytes(int(byte) for byte in given.split(",") if byte.strip()).ljust(size, b"\0")
    return [int.from_bytes(data[at : at + 4], "little", signed=True) for at in range(0, size, 4)]
